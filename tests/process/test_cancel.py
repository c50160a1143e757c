"""A cancel from outside reaches the worker that runs the task, and what becomes of the call."""

from __future__ import annotations

import contextlib

import httpx
import psycopg2
import pytest

import db
from tests.support.fake_ollama import FakeOllama, answer, slow, status
from tests.support.processes import Api, Processes, Worker, eventually
from tests.support.queue import Queue


def cancel(api: Api, task_id: int) -> httpx.Response:
    return api.http.delete(f"/tasks/{task_id}")


def test_a_running_task_is_stopped_within_a_heartbeat_and_its_call_hung_up(
    api: Api, worker: Worker, fake: FakeOllama
) -> None:
    fake.on("endless", slow())
    task_id = api.submit("an endless task")
    eventually(lambda: fake.calls_for("endless"))
    assert cancel(api, task_id).status_code == 202
    assert cancel(api, task_id).json() == {"task_id": task_id, "status": "RUNNING"}
    task = api.task(task_id, wait=20)
    assert (task["status"], task["result"]) == ("CANCELLED", None)
    assert task["cancel_requested"] is True
    eventually(lambda: fake.calls_for("endless")[0].outcome == "hung up")
    assert cancel(api, task_id).status_code == 409
    assert len(fake.calls_for("endless")) == 1


def test_a_cancel_stops_one_task_and_leaves_its_neighbours_alone(
    api: Api, worker: Worker, fake: FakeOllama
) -> None:
    fake.on("endless", slow())
    fake.on("patient", slow())
    endless, patient = api.submit("an endless task"), api.submit("a patient task")
    eventually(lambda: fake.calls_for("endless") and fake.calls_for("patient"))
    cancel(api, endless)
    api.await_status(endless, "CANCELLED")
    fake.release()
    assert api.await_status(patient, "SUCCEEDED")["attempt"] == 1


def test_a_task_that_waits_is_cancelled_and_no_worker_ever_runs_it(
    processes: Processes, api: Api, fake: FakeOllama
) -> None:
    doomed, healthy = api.submit("doomed"), api.submit("healthy")
    assert cancel(api, doomed).json() == {"task_id": doomed, "status": "CANCELLED"}
    processes.worker()
    api.await_status(healthy, "SUCCEEDED")
    assert fake.calls_for("doomed") == []


def test_a_task_whose_worker_was_killed_after_the_cancel_ends_cancelled(
    processes: Processes, api: Api, worker: Worker, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("endless", slow())
    task_id = api.submit("an endless task")
    eventually(lambda: fake.calls_for("endless"))
    worker.kill()
    assert cancel(api, task_id).status_code == 202
    queue.await_loss()
    processes.worker()
    api.await_status(task_id, "CANCELLED")
    assert len(fake.calls_for("endless")) == 1


def test_a_dead_letter_that_was_requeued_is_run_again_by_a_worker(
    api: Api, worker: Worker, fake: FakeOllama
) -> None:
    fake.on("stubborn", [status(400), answer("well then")])
    task_id = api.submit("a stubborn task")
    assert api.await_status(task_id, "FAILED")["error"]["type"] == "permanent"
    assert [task["id"] for task in api.http.get("/dead-letters").json()["tasks"]] == [task_id]
    assert api.http.post(f"/tasks/{task_id}/requeue").status_code == 200
    task = api.await_status(task_id, "SUCCEEDED")
    assert (task["result"], task["error"], task["attempt"]) == ({"text": "well then"}, None, 2)
    assert api.http.get("/dead-letters").json()["tasks"] == []


def test_stats_show_a_worker_while_it_is_there(processes: Processes) -> None:
    processes.configure(worker={"lease_seconds": 3})
    api = processes.api()
    worker = processes.worker("--concurrency", "3")

    def workers() -> list[dict[str, object]]:
        seen: list[dict[str, object]] = api.http.get("/stats").json()["workers"]
        return seen

    (seen,) = eventually(workers)
    assert (seen["name"], seen["concurrency"], seen["running"]) == (worker.name, 3, 0)
    worker.kill()
    eventually(lambda: not workers(), what="the dead worker is no longer named")


@pytest.mark.parametrize("how", ["sql", "python"])
def test_a_task_enqueued_with_the_callers_data_wakes_a_worker(
    processes: Processes, api: Api, worker: Worker, database_url: str, how: str
) -> None:
    with contextlib.closing(psycopg2.connect(database_url)) as program:
        with program.cursor() as cursor:
            cursor.execute("CREATE TABLE orders (id int)")
            if how == "sql":
                cursor.execute("SELECT submit_task('Thank the customer.')")
                (task_id,) = cursor.fetchone()
            else:
                task_id = db.enqueue(cursor, "Thank the customer.")
        assert api.http.get(f"/tasks/{task_id}").status_code == 404
        program.commit()
    api.await_status(task_id, "SUCCEEDED")

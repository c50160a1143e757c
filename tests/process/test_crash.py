"""Workers that die or freeze in the middle of a task: redelivery, fencing, the poison cap."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest

import db
from config import DatabaseSettings
from tests.support.fake_ollama import FakeOllama, Reply, answer, echo, slow
from tests.support.processes import Processes, Worker, eventually
from tests.support.queue import Queue

psutil = pytest.importorskip("psutil", reason="comes with requirements-local.txt")

LEASE_SECONDS = 2.0
# Many beats in a lease: a healthy worker on a busy machine keeps its tasks.
SHORT = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": 0.2, "reap_seconds": 0.3}
SEEDS = [int(os.environ.get("TEST_SEED", 20261129))]


@pytest.fixture(autouse=True)
def short_leases(processes: Processes) -> None:
    processes.configure(worker=SHORT)


def freeze(worker: Worker) -> None:
    worker.signal(signal.SIGSTOP)


def thaw(worker: Worker) -> None:
    worker.signal(signal.SIGCONT)


def without_lease(row: dict[str, Any]) -> dict[str, Any]:
    """All of a row but what its own worker's heartbeats move."""
    return {name: value for name, value in row.items() if name != "lease_expires_at"}


def test_a_task_of_a_killed_worker_is_finished_by_another(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("victim", [slow(), answer("saved", tokens=7)])
    (task_id,) = queue.submit("victim")
    first = processes.worker()
    fake.wait_for("victim")
    first.kill()
    held = queue.row(task_id)
    second = processes.worker()
    row = queue.await_status(task_id, "SUCCEEDED")

    assert (row["delivery_count"], row["retry_count"], row["attempt"]) == (2, 0, 2)
    assert row["result"] == {"text": "saved"}
    assert row["worker"] == second.name
    _, claimed, reaped, again, succeeded = queue.audit(task_id)
    assert queue.story(task_id) == ["created", "claimed", "reaped", "claimed", "succeeded"]
    assert [e["worker"] for e in (claimed, again, succeeded)] == [
        first.name,
        second.name,
        second.name,
    ]
    assert held["lease_expires_at"] - held["created_at"] >= timedelta(seconds=LEASE_SECONDS)
    assert reaped["at"] >= held["lease_expires_at"]
    queue.check()
    conn = db.connect(queue.url, DatabaseSettings(), "tests")
    assert db.metrics(conn)["reclaimed_count"] == 1
    conn.close()


def test_a_frozen_worker_that_wakes_after_another_finished_its_task_changes_nothing(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("victim", [slow(), answer("by the second", tokens=7)])
    (task_id,) = queue.submit("victim")
    first = processes.worker()
    (call,) = fake.wait_for("victim")
    freeze(first)
    second = processes.worker()
    row = queue.await_status(task_id, "SUCCEEDED")
    audit = queue.audit(task_id)
    assert (row["worker"], row["delivery_count"]) == (second.name, 2)

    thaw(first)
    eventually(lambda: f"action=lease_lost task_id={task_id}" in first.log, what="it says so")
    eventually(lambda: call.outcome == "hung up", what="its model call is dropped")
    (other,) = queue.submit("another task for whoever comes first")
    queue.await_status(other, "SUCCEEDED")
    assert first.terminate() == 0
    assert queue.row(task_id) == row
    assert queue.audit(task_id) == audit
    assert f"action=succeeded task_id={task_id}" not in first.log


@pytest.mark.parametrize("its_answer_has_come", [True, False])
def test_a_frozen_worker_that_wakes_while_another_runs_its_task_changes_nothing(
    processes: Processes, fake: FakeOllama, queue: Queue, its_answer_has_come: bool
) -> None:
    """Here the state alone protects nothing: the row is RUNNING, and only the token is another."""
    let_first_answer = False

    def of_the_first(reply: Reply) -> None:
        while not let_first_answer:
            reply.wait(0.05)
        answer("by the first, too late", tokens=1000)(reply)

    fake.on("victim", [of_the_first, slow(then=answer("by the second", tokens=7))])
    (task_id,) = queue.submit("victim")
    first = processes.worker()
    (call,) = fake.wait_for("victim")
    freeze(first)
    if its_answer_has_come:
        let_first_answer = True
        eventually(lambda: call.outcome == "finished")
    second = processes.worker()
    fake.wait_for("victim", count=2)
    row, audit = queue.row(task_id), queue.audit(task_id)
    assert (row["worker"], row["status"]) == (second.name, "RUNNING")

    thaw(first)
    eventually(lambda: f"action=lease_lost task_id={task_id}" in first.log, what="it says so")
    assert first.terminate() == 0
    assert without_lease(queue.row(task_id)) == without_lease(row)
    assert queue.audit(task_id) == audit
    fake.release()
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["result"] == {"text": "by the second"}
    assert row["completion_tokens"] == 7
    queue.check()


def test_heartbeats_keep_a_task_that_runs_longer_than_three_leases(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("long", slow())
    (task_id,) = queue.submit("long")
    workers = [processes.worker() for _ in range(2)]

    def renewed_beyond_three_leases() -> bool:
        row = queue.row(task_id)
        return bool(
            row["status"] != "RUNNING"
            or row["lease_expires_at"] - row["started_at"] > timedelta(seconds=4 * LEASE_SECONDS)
        )

    eventually(renewed_beyond_three_leases, what="the lease was renewed")
    assert (queue.row(task_id)["status"], queue.row(task_id)["attempt"]) == ("RUNNING", 1)
    fake.release()
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["duration_seconds"] > 3 * LEASE_SECONDS
    assert queue.story(task_id) == ["created", "claimed", "succeeded"]
    assert len(fake.calls) == 1
    assert all(worker.is_running() for worker in workers)


def test_a_task_that_is_lost_with_its_worker_three_times_is_a_dead_letter(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("poison", slow())
    (task_id,) = queue.submit("poison")
    names = []
    for hand_out in (1, 2, 3):
        worker = processes.worker()
        names.append(worker.name)
        fake.wait_for("poison", count=hand_out)
        for child in psutil.Process(worker.pid).children():  # the last try has its own process
            child.kill()
        worker.kill()
    last = processes.worker()
    row = queue.await_status(task_id, "FAILED")
    (healthy,) = queue.submit("healthy")
    queue.await_status(healthy, "SUCCEEDED")

    assert row["reason"] == "max_delivery"
    assert (row["delivery_count"], row["retry_count"], row["reclaim_count"]) == (3, 0, 3)
    assert "handed out 3 times" in row["last_error"]
    assert names[-1] in row["last_error"]
    lost = ["claimed", "reaped"]
    assert queue.story(task_id) == ["created", *lost, *lost, "claimed", "max_delivery"]
    assert queue.audit(task_id)[-1]["detail"]["error"] == row["last_error"]
    assert f"action=max_delivery task_id={task_id}" in last.log
    assert len(fake.calls_for("poison")) == 3
    queue.check()


def test_failures_between_crashes_do_not_count_as_lost_hand_outs(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """Two crashes and two failures: neither cap of three is reached."""
    processes.configure(worker=SHORT, retry={"max_delay_seconds": 0.1})
    broken = lambda reply: reply.send(500, b"{}")  # noqa: E731
    fake.on("unlucky", [broken, slow(), broken, slow(), echo])
    (task_id,) = queue.submit("unlucky")
    for calls in (2, 4):
        worker = processes.worker()
        fake.wait_for("unlucky", count=calls)
        worker.kill()
    processes.worker()
    row = queue.await_final(task_id)
    assert row["status"] == "SUCCEEDED", row
    assert (row["delivery_count"], row["retry_count"], row["reclaim_count"]) == (5, 2, 2)
    queue.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_killed_at_random_instants_lose_nothing_and_settle_nothing_twice(
    processes: Processes, fake: FakeOllama, queue: Queue, seed: int
) -> None:
    chance = random.Random(seed)
    # The cap is another test's: here each task is to survive however often it was hit.
    processes.configure(
        worker={**SHORT, "lease_seconds": 1.5, "heartbeat_seconds": 0.3}, retry={"max_delivery": 99}
    )
    fake.script = lambda call: slow(0.1 + int(call.prompt[-1]) / 50)
    ids = queue.submit(*(f"task {number:03}" for number in range(200)))
    workers = [processes.worker_starting("--concurrency", "3") for _ in range(3)]
    for _ in range(20):
        time.sleep(chance.uniform(0.05, 0.6))
        victim = workers.pop(chance.randrange(3))
        victim.kill()
        workers.append(processes.worker_starting("--concurrency", "3"))
    queue.await_all("SUCCEEDED", 90)

    queue.check()
    results = queue.ask("SELECT task_id, result->>'text' AS text FROM tasks ORDER BY task_id")
    assert [(row["task_id"], row["text"]) for row in results] == [
        (task_id, f"echo: task {number:03}") for number, task_id in enumerate(ids)
    ]
    lost = queue.ask("SELECT sum(reclaim_count) AS n FROM tasks")[0]["n"]
    assert lost > 0, "no kill has hit a task: this run shows nothing"
    assert len(fake.calls) >= 200
    assert all(worker.is_running() for worker in workers)

"""Postgres restarts, kills its backends, is full, read-only, or not there yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg2
import pytest

from tests.conftest import administrator
from tests.support.fake_ollama import FakeOllama, answer, slow
from tests.support.processes import Api, Processes, Worker, eventually
from tests.support.queue import Queue

SHORT = {"lease_seconds": 4, "heartbeat_seconds": 0.5, "reap_seconds": 0.5}


@pytest.fixture
def processes(own_queue: Queue, fake: FakeOllama, tmp_path: Path) -> Iterator[Processes]:
    with Processes(own_queue.url, fake.url, tmp_path) as started:
        started.configure(worker=SHORT, database={"pool_wait_seconds": 1})
        yield started


class Submitter:
    """Submits tasks one after the other, whatever comes; remembers what was acknowledged."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._submit_all)
        self.acknowledged: list[int] = []
        self.refused: list[httpx.Response] = []
        self.broken: list[object] = []

    def __enter__(self) -> Submitter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _submit_all(self) -> None:
        with httpx.Client(base_url=self._api.url, timeout=60) as http:
            while not self._ended.wait(0.05):
                try:
                    said = http.post("/tasks", json={"prompt": "submitted meanwhile"})
                except httpx.HTTPError as failed:
                    self.broken.append(failed)
                    continue
                if said.status_code == 201:
                    self.acknowledged.append(said.json()["task_id"])
                elif said.status_code == 503:
                    self.refused.append(said)
                else:
                    self.broken.append(said.text)


def check_all_done(
    queue: Queue, processes: list[Worker | Api], submitter: Submitter | None = None
) -> None:
    """Every task SUCCEEDED, none settled twice, nothing acknowledged is lost, nobody has died."""
    queue.await_all("SUCCEEDED", 90)
    queue.check()
    assert all(process.is_running() for process in processes)
    for process in processes:
        assert "Traceback" not in process.log, process.log[-5000:]
    if submitter is not None:
        assert submitter.broken == []
        assert submitter.acknowledged
        known = {row["task_id"] for row in queue.ask("SELECT task_id FROM tasks")}
        assert set(submitter.acknowledged) <= known
        for refused in submitter.refused:
            assert refused.headers["Retry-After"].isdigit()
            assert refused.json()["error"]


def await_database_away(api: Api) -> None:
    """Until the API says 503, with Retry-After, for reading and for probing."""

    def look() -> bool:
        for path in ("/readyz", "/tasks/1", "/metrics"):
            said = api.http.get(path)
            assert said.status_code == 503, said.text
            assert said.headers["Retry-After"].isdigit()
            assert said.json()["error"]
        assert api.http.get("/healthz").status_code == 200
        return True

    eventually(look, what="the API says that the database is away")


def fill_up(url: str) -> Iterator[Any]:
    """Take every connection that is to be had."""
    with contextlib.suppress(psycopg2.OperationalError):
        while True:
            yield psycopg2.connect(url, application_name="hog")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_restarts_under_fifty_running_tasks(
    own_server: Any, own_queue: Queue, processes: Processes, fake: FakeOllama, mode: Any
) -> None:
    fake.default = answer("done", delay=0.15)
    api = processes.api()
    own_queue.submit(*(f"task {number}" for number in range(50)))
    workers = [processes.worker("--concurrency", "4") for _ in range(3)]
    with Submitter(api) as submitter:
        eventually(lambda: own_queue.count("SUCCEEDED") >= 10, what="they are at work")
        own_server.stop(mode)
        await_database_away(api)
        eventually(
            lambda: all("action=database_away" in worker.log for worker in workers),
            what="every worker has noticed",
        )
        own_server.start()
        eventually(lambda: api.http.get("/readyz").status_code == 200, what="the API is back")
        before = len(submitter.acknowledged)
        eventually(lambda: len(submitter.acknowledged) > before, what="it takes tasks again")
    assert submitter.refused
    check_all_done(own_queue, [*workers, api], submitter)


def test_a_worker_waits_quietly_for_a_postgres_that_is_away(
    own_server: Any, own_queue: Queue, processes: Processes
) -> None:
    worker = processes.worker()
    own_queue.await_idle(worker.name)
    own_server.stop()

    def tries() -> list[datetime]:
        # Of its loop; its heart tries for itself.
        lines = [line for line in worker.log.splitlines() if "No work for now" in line]
        return [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f") for line in lines]

    eventually(lambda: len(tries()) >= 6, what="it has tried some times")
    first, *_, sixth = tries()[:6]
    assert sixth - first >= timedelta(seconds=5 * 0.2), "it tries without a rest"
    own_server.start()
    (task_id,) = own_queue.submit("hello")
    own_queue.await_status(task_id, "SUCCEEDED")


def test_backends_are_killed_again_and_again(
    own_server: Any, own_queue: Queue, processes: Processes, fake: FakeOllama
) -> None:
    fake.default = answer("done", delay=0.1)
    api = processes.api()
    own_queue.submit(*(f"task {number}" for number in range(100)))
    workers = [processes.worker("--concurrency", "4") for _ in range(3)]
    kill_all = (
        "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        " AND application_name <> 'tests'"
    )
    with Submitter(api) as submitter, administrator(own_server.url("postgres")) as cursor:
        for done in range(5, 100, 8):
            eventually(lambda: own_queue.count("SUCCEEDED") >= done)  # noqa: B023
            cursor.execute(kill_all)
    check_all_done(own_queue, [*workers, api], submitter)


def test_postgres_comes_later_than_the_worker_and_the_api(
    own_server: Any, own_queue: Queue, processes: Processes
) -> None:
    own_server.stop()
    api = processes.api(ready=False)
    worker = processes.worker()
    await_database_away(api)
    said = api.http.post("/tasks", json={"prompt": "too early"})
    assert (said.status_code, said.headers["Retry-After"].isdigit()) == (503, True)
    eventually(lambda: "action=database_away" in worker.log, what="the worker waits")
    own_server.start()
    eventually(lambda: api.http.get("/readyz").status_code == 200, what="the API is ready")
    task = api.task(api.submit("now"), wait=30)
    assert task["status"] == "SUCCEEDED"
    check_all_done(own_queue, [worker, api])


def test_all_connections_are_in_use_for_a_while(
    own_server: Any, own_queue: Queue, processes: Processes, fake: FakeOllama
) -> None:
    fake.default = slow()
    api = processes.api()
    worker = processes.worker("--concurrency", "2")
    own_queue.submit(*(f"task {number}" for number in range(10)))
    fake.wait_for(count=2)
    own_queue.close()
    hogs = []
    try:
        with administrator(own_server.url("postgres")) as cursor:

            def everybody_else_is_out() -> bool:
                cursor.execute(
                    "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity"
                    " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                    " AND application_name <> 'hog'"
                )
                hogs.extend(fill_up(own_server.url("postgres")))
                # Whoever was quick enough to come back before the hogs is turned out again.
                refused = api.http.get("/readyz")
                return (
                    "too many clients" in worker.log
                    and refused.status_code == 503
                    and "too many clients" in refused.json()["error"]
                )

            eventually(everybody_else_is_out, what="nobody else finds a place")
            fake.release()  # what the worker has under way ends now, and cannot be written
            await_database_away(api)
    finally:
        for hog in hogs:
            hog.close()
    check_all_done(own_queue, [worker, api])


def test_postgres_becomes_read_only_and_writable_again(
    own_server: Any, own_queue: Queue, processes: Processes, fake: FakeOllama
) -> None:
    """As after a failover to a standby: it answers, and refuses to write."""
    fake.default = slow()
    api = processes.api()
    workers = [processes.worker("--concurrency", "2") for _ in range(2)]
    own_queue.submit(*(f"task {number}" for number in range(10)))
    fake.wait_for(count=4)
    with administrator(own_server.url("postgres")) as cursor:

        def read_only(on: str) -> None:
            cursor.execute(f"ALTER SYSTEM SET default_transaction_read_only = {on}")
            cursor.execute("SELECT pg_reload_conf()")

        read_only("on")
        try:
            fake.release()
            eventually(
                lambda: all("read-only" in worker.log for worker in workers),
                what="every worker has been refused",
            )
            said = api.http.post("/tasks", json={"prompt": "refused"})
            assert (said.status_code, said.headers.get("Retry-After")) == (503, "2"), said.text
        finally:
            read_only("off")
    check_all_done(own_queue, [*workers, api])

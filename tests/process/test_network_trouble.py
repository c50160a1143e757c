"""The network between our processes and Postgres stalls, breaks, or swallows what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

import db
from tests.support.fake_ollama import FakeOllama, answer, slow
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue
from tests.support.tcp_proxy import TcpProxy

LEASE_SECONDS = 3
SHORT = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": 0.5, "reap_seconds": 0.5}
IMPATIENT = {
    "reply_timeout_seconds": 1,
    "connect_timeout_seconds": 1,
    "pool_size": 2,
    "pool_wait_seconds": 1,
}
# What befalls the connections; all but a cut lasts until proxy.resume().
TROUBLES: dict[str, Callable[[TcpProxy], Any]] = {
    "stall": TcpProxy.stall,
    "half-open": TcpProxy.swallow,
    "cut": TcpProxy.cut,
}


@pytest.fixture
def proxy(database_url: str) -> Iterator[TcpProxy]:
    with TcpProxy(urlsplit(database_url).port or 5432) as between:
        yield between


@pytest.fixture
def processes(processes: Processes) -> Processes:
    processes.configure(worker=SHORT, database=IMPATIENT)
    return processes


@pytest.fixture
def by_proxy(database_url: str, proxy: TcpProxy) -> dict[str, str]:
    """The environment of a process that reaches Postgres through the proxy only."""
    parts = urlsplit(database_url)
    place = f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}"
    return {"DATABASE_URL": urlunsplit(parts._replace(netloc=place))}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_worker_recovers_by_itself_and_loses_no_outcome(
    processes: Processes,
    fake: FakeOllama,
    queue: Queue,
    proxy: TcpProxy,
    by_proxy: dict[str, str],
    name: str,
) -> None:
    """Its leases outlive the trouble: what ended meanwhile is written afterwards, once."""
    processes.configure(worker={**SHORT, "lease_seconds": 60}, database=IMPATIENT)
    fake.default = slow()
    ids = queue.submit(*(f"task {number}" for number in range(6)))
    worker = processes.worker("--concurrency", "3", env=by_proxy)
    fake.wait_for(count=3)
    TROUBLES[name](proxy)
    fake.release()
    if name != "cut":
        eventually(lambda: "action=database_away" in worker.log, what="it has given up waiting")
        fake.wait_for(count=3, outcome="finished")
        assert queue.statuses() == {"RUNNING": 3, "PENDING": 3}
        proxy.resume()
    queue.await_all("SUCCEEDED")
    queue.check()
    assert {queue.row(task_id)["attempt"] for task_id in ids} == {1}
    assert "Traceback" not in worker.log
    assert worker.terminate() == 0


def test_an_outcome_that_was_stored_while_its_reply_was_lost_is_not_stored_again(
    processes: Processes, fake: FakeOllama, queue: Queue, proxy: TcpProxy, by_proxy: dict[str, str]
) -> None:
    # The worker says nothing to Postgres between its claim and its settle.
    quiet = {"lease_seconds": 60, "poll_seconds": 600, "reap_seconds": 600}
    processes.configure(worker={**SHORT, **quiet}, database=IMPATIENT)
    fake.default = slow()
    ids = queue.submit(*(f"task {number}" for number in range(3)))
    worker = processes.worker(env=by_proxy)
    fake.wait_for(count=3)
    queue.await_idle(worker.name)
    proxy.mute()
    fake.release()
    eventually(lambda: queue.count("SUCCEEDED") > 0, what="an outcome is stored")
    before = {task_id: queue.audit(task_id) for task_id in ids}
    eventually(lambda: "no reply from Postgres" in worker.log, what="the worker does not know it")
    proxy.resume()
    queue.await_all("SUCCEEDED")
    (other,) = queue.submit("something new")
    queue.await_status(other, "SUCCEEDED")
    stored = [task_id for task_id in ids if before[task_id][-1]["reason"] == "succeeded"]
    assert [queue.audit(task_id) for task_id in stored] == [before[one] for one in stored]
    assert {queue.row(task_id)["attempt"] for task_id in ids} == {1}
    assert len(fake.calls) == 4
    queue.check()


# The end of a claim's transaction waits for whoever holds the lock.
HOLD_COMMITS = """
CREATE FUNCTION hold_commit() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER hold_commit AFTER UPDATE ON tasks DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (new.reason = 'claimed') EXECUTE FUNCTION hold_commit();
SELECT 1
"""
HELD_COMMITS = """
SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%claim_tasks(%%'
"""


def test_a_claim_whose_reply_was_lost_is_a_lost_hand_out_and_no_failure(
    processes: Processes,
    fake: FakeOllama,
    queue: Queue,
    connect: Callable[[], db.Connection],
    proxy: TcpProxy,
    by_proxy: dict[str, str],
) -> None:
    never = {"poll_seconds": 600, "reap_seconds": 600}
    processes.configure(worker={**SHORT, **never}, database=IMPATIENT)
    queue.ask(HOLD_COMMITS)
    worker = processes.worker(env={**by_proxy, "DATABASE_LISTEN_URL": queue.url})
    queue.await_idle(worker.name)
    with db.transaction(connect()) as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(42)")
        (task_id,) = queue.submit("claimed by nobody who knows")
        eventually(lambda: queue.ask(HELD_COMMITS), what="the claim is about to be committed")
        proxy.mute()
    queue.await_status(task_id, "RUNNING")
    eventually(lambda: "no reply from Postgres" in worker.log, what="the worker does not know it")
    queue.ask("DROP TRIGGER hold_commit ON tasks")
    proxy.resume()
    processes.configure(worker=SHORT)
    processes.worker()
    row = queue.await_final(task_id)
    assert (row["status"], row["attempt"], row["retry_count"]) == ("SUCCEEDED", 2, 0)
    assert queue.story(task_id) == ["created", "claimed", "reaped", "claimed", "succeeded"]
    assert len(fake.calls) == 1
    queue.check()


@pytest.mark.parametrize("name", ["stall", "half-open"])
def test_leases_that_were_lost_meanwhile_are_honoured_as_lost(
    processes: Processes,
    fake: FakeOllama,
    queue: Queue,
    proxy: TcpProxy,
    by_proxy: dict[str, str],
    name: str,
) -> None:
    """While the first worker is cut off, a second one takes its task over and still runs it."""
    fake.on("shared", [slow(1, then=answer("by the first")), slow(then=answer("by the second"))])
    (task_id,) = queue.submit("shared")
    first = processes.worker(env=by_proxy)
    fake.wait_for("shared")
    TROUBLES[name](proxy)
    second = processes.worker()
    fake.wait_for("shared", count=2)
    fake.wait_for("shared", outcome="finished")
    row, audit = queue.row(task_id), queue.audit(task_id)
    assert (row["status"], row["worker"]) == ("RUNNING", second.name)

    proxy.resume()
    eventually(lambda: f"action=lease_lost task_id={task_id}" in first.log, what="it says so")
    assert queue.audit(task_id) == audit
    assert queue.row(task_id)["lease_token"] == row["lease_token"]
    fake.release()
    assert queue.await_final(task_id)["result"] == {"text": "by the second"}
    queue.check()
    (other,) = queue.submit("something new")
    queue.await_status(other, "SUCCEEDED")
    assert first.terminate() == 0


def test_a_worker_whose_heartbeat_alone_is_cut_off_loses_its_leases_and_goes_on(
    processes: Processes, fake: FakeOllama, queue: Queue, proxy: TcpProxy, by_proxy: dict[str, str]
) -> None:
    """It may even take its own task back and hand it to itself: two attempts, one process."""
    fake.on("long", [slow(then=answer("by the first")), slow(then=answer("by the second"))])
    (task_id,) = queue.submit("long")
    worker = processes.worker(env=by_proxy)
    fake.wait_for("long")
    proxy.stall(only="beat")
    fake.wait_for("long", count=2)
    assert queue.row(task_id)["attempt"] == 2
    proxy.resume()
    row = queue.row(task_id)
    eventually(
        lambda: queue.row(task_id)["lease_expires_at"] > row["lease_expires_at"],
        what="the heart beats again",
    )
    eventually(lambda: f"action=lease_lost task_id={task_id}" in worker.log, what="it says so")
    fake.release()
    assert queue.await_final(task_id)["result"] == {"text": "by the second"}
    queue.check()
    assert worker.terminate() == 0


@pytest.mark.parametrize("name", ["stall", "half-open"])
def test_a_listener_that_hears_nothing_more_costs_a_poll_at_most(
    processes: Processes, queue: Queue, proxy: TcpProxy, by_proxy: dict[str, str], name: str
) -> None:
    """Only the listening connection is hit: the one that claims goes on as before."""
    worker = processes.worker(env=by_proxy)
    queue.await_idle(worker.name)
    if name == "stall":
        proxy.stall(only="listen")
    else:
        proxy.swallow(only="listen")
    for prompt in ("first", "second"):
        (task_id,) = queue.submit(prompt)
        queue.await_status(task_id, "SUCCEEDED")
    assert "Traceback" not in worker.log


def test_a_listener_that_was_cut_is_replaced_at_once(
    processes: Processes, queue: Queue, proxy: TcpProxy, by_proxy: dict[str, str]
) -> None:
    never = {"poll_seconds": 600, "reap_seconds": 600}
    processes.configure(worker={**SHORT, **never}, database=IMPATIENT)
    worker = processes.worker(env=by_proxy)
    for prompt in ("first", "second"):
        queue.await_idle(worker.name)
        assert proxy.cut(only="listen") == 1
        eventually(lambda: proxy.open_connections(only="listen") == 1, what="it listens again")
        queue.await_idle(worker.name)
        (task_id,) = queue.submit(prompt)
        queue.await_status(task_id, "SUCCEEDED")
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("name", TROUBLES)
def test_the_api_says_503_and_recovers_by_itself(
    processes: Processes, queue: Queue, proxy: TcpProxy, by_proxy: dict[str, str], name: str
) -> None:
    api = processes.api(env=by_proxy)
    first = api.submit("before")
    TROUBLES[name](proxy)
    if name != "cut":
        read = api.http.get(f"/tasks/{first}")
        written = api.http.post("/tasks", json={"prompt": "x"})
        for said in (read, written):
            assert said.status_code == 503, said.text
            assert said.headers["Retry-After"].isdigit()
            assert said.json()["error"]
        assert api.http.get("/healthz").status_code == 200
        proxy.resume()
    eventually(lambda: api.http.get("/readyz").status_code == 200, what="it is back")
    eventually(lambda: api.http.post("/tasks", json={"prompt": "x"}).status_code == 201)
    assert api.task(first)["status"] == "PENDING"
    assert "Traceback" not in api.log


def test_a_waiting_client_hears_of_the_end_although_the_listener_was_lost(
    processes: Processes, fake: FakeOllama, queue: Queue, proxy: TcpProxy, by_proxy: dict[str, str]
) -> None:
    fake.default = slow()
    api = processes.api(env=by_proxy)
    processes.worker()
    task_id = api.submit("long")
    fake.wait_for("long")
    eventually(lambda: proxy.open_connections(only="changes") == 1)
    proxy.swallow(only="changes")
    fake.release()
    assert api.task(task_id, wait=30)["status"] == "SUCCEEDED"

"""GET /tasks/{id}/events: a snapshot, then each transition once, then the end."""

from __future__ import annotations

import pytest

import db
from tests.support.fake_ollama import FakeOllama, answer, slow, status
from tests.support.processes import Api, Processes, eventually
from tests.support.streams import EventSource as Watcher

psutil = pytest.importorskip("psutil", reason="comes with requirements-local.txt")


def test_a_watcher_gets_a_snapshot_then_each_transition_once_then_the_end(
    api: Api, processes: Processes, fake: FakeOllama
) -> None:
    fake.on("flaky", [status(500), answer("ok")])
    task_id = api.submit("flaky")
    watcher = Watcher(api, f"/tasks/{task_id}/events")
    eventually(lambda: watcher.names() == ["snapshot"])
    processes.worker()
    events = [event for event in watcher.until_end() if event.name != "token"]
    assert events[0].data["status"] == "PENDING"
    assert watcher.reasons() == ["claimed", "retry", "claimed", "succeeded"]
    assert (events[-1].name, events[-1].data) == ("end", {"status": "SUCCEEDED"})
    assert all((event.cursor is not None) == (event.name == "transition") for event in events)


def test_a_watcher_resumes_behind_any_cursor_without_gap_or_repeat(
    api: Api, processes: Processes, fake: FakeOllama
) -> None:
    fake.on("flaky", [status(500), answer("ok")])
    task_id = api.submit("flaky")
    first = Watcher(api, f"/tasks/{task_id}/events")
    eventually(lambda: first.names() == ["snapshot"])
    processes.worker()
    told = [event for event in first.until_end() if event.name == "transition"]
    for place, event in enumerate(told[:-1], start=1):
        again = Watcher(api, f"/tasks/{task_id}/events", **{"Last-Event-ID": str(event.cursor)})
        again.until_end()
        assert again.reasons() == first.reasons()[place:]
        assert "snapshot" not in again.names()
    over = api.http.get(f"/tasks/{task_id}/events", params={"after": str(told[-1].cursor)})
    assert over.status_code == 204


def test_an_unusable_cursor_gets_a_fresh_snapshot(api: Api) -> None:
    task_id = api.submit("anything")
    watcher = Watcher(api, f"/tasks/{task_id}/events?after=nonsense")
    eventually(lambda: watcher.names() == ["snapshot"])


def test_the_stream_of_a_task_that_is_over_is_its_snapshot_and_the_end(
    api: Api, processes: Processes
) -> None:
    task_id = api.submit("anything")
    processes.worker()
    api.await_status(task_id, "SUCCEEDED")
    assert [e.name for e in Watcher(api, f"/tasks/{task_id}/events").until_end()] == [
        "snapshot",
        "end",
    ]


def test_pieces_of_the_answer_come_live_with_their_attempt_and_are_not_stored(
    api: Api, processes: Processes, fake: FakeOllama, conn: db.Connection
) -> None:
    fake.on("story", answer("once upon a time there was", chunks=6, delay=0.5))
    task_id = api.submit("story")
    watcher = Watcher(api, f"/tasks/{task_id}/events")
    eventually(lambda: watcher.names() == ["snapshot"])
    processes.worker()
    tokens = [event.data for event in watcher.until_end() if event.name == "token"]
    assert tokens
    assert {token["attempt"] for token in tokens} == {1}
    # Best effort: the first and the last may be lost, never the order.
    assert "".join(str(token["text"]) for token in tokens) in "once upon a time there was"
    assert db.fetch(conn, "SELECT count(*) AS n FROM audit_log") == [{"n": 3}]


def test_no_piece_is_sent_while_nobody_watches(
    api: Api, processes: Processes, fake: FakeOllama, conn: db.Connection
) -> None:
    fake.on("story", answer("once upon a time there was", chunks=6, delay=0.1))
    worker = processes.worker()
    api.await_status(api.submit("story"), "SUCCEEDED")
    sessions = db.fetch(
        conn,
        "SELECT application_name FROM pg_stat_activity WHERE application_name = %(name)s",
        {"name": f"{worker.name} tokens"},
    )
    assert sessions == []


def test_a_watcher_misses_nothing_when_the_listener_is_killed(
    api: Api, processes: Processes, fake: FakeOllama, conn: db.Connection
) -> None:
    fake.on("long", slow())
    task_id = api.submit("long")
    watcher = Watcher(api, f"/tasks/{task_id}/events")
    eventually(lambda: watcher.names() == ["snapshot"])
    db.fetch(
        conn,
        """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
           WHERE application_name = 'orchestrator changes' AND datname = current_database()""",
    )
    processes.worker()
    fake.wait_for("long")
    fake.release()
    watcher.until_end()
    assert watcher.reasons() == ["claimed", "succeeded"]


def test_another_tenants_task_has_no_stream(api: Api) -> None:
    task_id = api.submit("mine")
    answered = api.http.get(f"/tasks/{task_id}/events", headers={"X-Tenant-Id": "other"})
    assert answered.status_code == 404


def test_streams_that_were_dropped_leave_nothing_behind(api: Api) -> None:
    task_id = api.submit("anything")
    process = psutil.Process(api.pid)

    def open_and_drop(count: int) -> None:
        for _ in range(count):
            with api.http.stream("GET", f"/tasks/{task_id}/events") as answered:
                assert next(answered.iter_lines()) == "event: snapshot"

    open_and_drop(20)
    eventually(lambda: len(process.net_connections("tcp")) < 15)
    before = (process.num_threads(), process.num_fds())
    open_and_drop(500)
    eventually(lambda: process.num_fds() <= before[1] + 2)
    assert process.num_threads() <= before[0] + 2


def test_a_watcher_hears_the_last_word_of_a_task_before_it_hears_of_its_end(
    api: Api, processes: Processes, fake: FakeOllama
) -> None:
    fake.on("anything", answer("one two three four five", chunks=5, delay=0.5))
    task_id = api.submit("anything")
    watcher = Watcher(api, f"/tasks/{task_id}/events")
    eventually(lambda: watcher.names() == ["snapshot"])
    processes.worker()
    *_, last, succeeded, end = watcher.until_end()
    assert (last.name, succeeded.name, end.name) == ("token", "transition", "end")
    assert "one two three four five".endswith(str(last.data["text"]))

"""/runs/{id}/events, as server-sent events and over a WebSocket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import db
from queries.events import Position, here
from queries.operations import requeue_task
from tests.conftest import fresh_database, settings_for
from tests.support import rows, runs
from tests.support.fake_ollama import FakeOllama, answer
from tests.support.processes import Api, Processes, eventually
from tests.support.rows import sql
from tests.support.streams import EventSource, Socket, Watcher

A, B, C = "tool_call.a", "tool_call.b", "approval.c"
Kind = type[Watcher]
NO_MODEL = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def shared_database(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        yield url


@pytest.fixture(scope="module")
def api(shared_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One for all tests that have no worker: each of them has a run of its own."""
    with Processes(shared_database, NO_MODEL, tmp_path_factory.mktemp("api")) as started:
        yield started.api()


@pytest.fixture
def conn(shared_database: str) -> Iterator[db.Connection]:
    """A connection to the database behind the API."""
    settings = settings_for(shared_database)
    with contextlib.closing(db.connect(shared_database, settings.database, "test")) as conn:
        yield conn


@pytest.fixture(params=[EventSource, Socket], ids=["sse", "websocket"])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


def watch(api: Api, kind: Kind, run_id: int, **headers: str) -> Watcher:
    """A watcher that has its snapshot."""
    watcher = kind(api, f"/runs/{run_id}/events", **headers)
    eventually(lambda: watcher.names() == ["snapshot"], what=f"a snapshot: {watcher.refusal}")
    return watcher


def resume(api: Api, kind: Kind, run_id: int, cursor: str, most: int | None = None) -> Watcher:
    return kind(api, f"/runs/{run_id}/events?after={cursor}", most)


def story_since_created(conn: db.Connection, run_id: int) -> list[tuple[str | None, str]]:
    return [entry for entry in runs.story(conn, run_id) if entry[1] != "created"]


def test_a_watcher_gets_a_snapshot_then_each_transition_once_then_the_end(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: [], B: [A]})
    watcher = watch(api, kind, run_id)
    assert watcher.events[0].data == api.http.get(f"/runs/{run_id}").json()
    for step in (A, B):
        runs.finish(conn, run_id, step)
    events = watcher.until_end()
    assert watcher.story() == story_since_created(conn, run_id)
    assert watcher.story()[-1] == (None, "succeeded")
    assert watcher.names() == ["snapshot"] + ["transition"] * 6 + ["end"]
    assert events[-1].data == {"status": "SUCCEEDED"}
    assert all((event.cursor is not None) == (event.name == "transition") for event in events)
    assert kind is EventSource or watcher.close_code == 1000


def test_a_transition_is_shown_as_the_audit_shows_it_and_a_run_is_never_blocked(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: []})
    watcher = watch(api, kind, run_id)
    runs.finish(conn, run_id, A)
    watcher.until_end()
    audit = api.http.get(f"/runs/{run_id}/audit").json()["audit"]
    created, shown = audit[:2], audit[2:]
    assert [entry["to"] for entry in created] == ["RUNNING", "PENDING"]
    told = [event.data for event in watcher.transitions()]
    assert [{**one, "cursor": None} for one in told] == [{**one, "cursor": None} for one in shown]
    own = told[-1]
    assert (own["task_id"], own["from"], own["to"]) == (run_id, "RUNNING", "SUCCEEDED")


def test_a_watcher_resumes_behind_any_cursor_without_gap_or_repeat(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: [], B: [A]})
    first = watch(api, kind, run_id)
    for step in (A, B):
        runs.finish(conn, run_id, step)
    first.until_end()
    for place, cursor in enumerate(first.cursors()[:-1], start=1):
        again = resume(api, kind, run_id, cursor)
        again.until_end()
        assert again.ids() == first.ids()[place:]
        assert again.names()[-1] == "end"
        assert "snapshot" not in again.names()


def test_a_watcher_that_reconnects_after_each_transition_misses_none_and_gets_none_twice(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    steps = [f"tool_call.s{number}" for number in range(5)]
    run_id = runs.submit(conn, {step: [] for step in steps})
    steady = watch(api, kind, run_id)
    told: list[int] = []
    cursor = here(conn, run_id).as_cursor()
    for step in steps:
        runs.finish(conn, run_id, step)
        for _ in range(2):  # claimed, succeeded
            watcher = resume(api, kind, run_id, cursor, most=1)
            watcher.until_end()
            told += watcher.ids()
            cursor = watcher.cursors()[-1]
    last = resume(api, kind, run_id, cursor)
    last.until_end()
    steady.until_end()
    assert told + last.ids() == steady.ids()
    assert steady.story() == story_since_created(conn, run_id)


def test_of_a_run_that_is_over_there_is_its_snapshot_and_the_end(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: []})
    runs.finish(conn, run_id, A)
    late = kind(api, f"/runs/{run_id}/events")
    snapshot, end = late.until_end()
    assert (snapshot.name, snapshot.data["status"]) == ("snapshot", "SUCCEEDED")
    assert (end.name, end.data) == ("end", {"status": "SUCCEEDED"})


def test_who_knows_all_of_a_run_that_is_over_is_told_that_there_is_no_more(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: []})
    runs.finish(conn, run_id, A)
    again = resume(api, kind, run_id, here(conn, run_id).as_cursor())
    again.until_end()
    if kind is EventSource:
        assert (again.status_code, again.names()) == (204, [])
    else:
        assert (again.names(), again.close_code) == (["end"], 1000)


def test_an_end_that_was_undone_ends_no_stream_and_the_next_end_does(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: [], B: [A]})
    first = watch(api, kind, run_id)
    runs.finish(conn, run_id, A, "permanent", error="no such thing")
    assert first.until_end()[-1].data == {"status": "FAILED"}
    begin, end = first.cursors()[0], first.cursors()[-1]
    requeue_task(conn, "default", str(runs.number(conn, run_id, A)))

    from_the_middle = resume(api, kind, run_id, begin)
    from_the_end = resume(api, kind, run_id, end)
    eventually(lambda: (None, "requeued") in from_the_end.story())
    eventually(lambda: (None, "requeued") in from_the_middle.story())
    assert "end" not in from_the_end.names() + from_the_middle.names()

    for step in (A, B):
        runs.finish(conn, run_id, step)
    for watcher, known in ((from_the_middle, 1), (from_the_end, len(first.events) - 2)):
        assert watcher.until_end()[-1].data == {"status": "SUCCEEDED"}
        assert watcher.names().count("end") == 1
        assert watcher.story() == story_since_created(conn, run_id)[known:]
        statuses = [one.data["to"] for one in watcher.transitions() if one.data["step"] is None]
        assert statuses[-2:] == ["RUNNING", "SUCCEEDED"]


def test_who_resumes_while_the_run_goes_on_waits_for_what_comes(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: [], B: [A]})
    first = watch(api, kind, run_id)
    runs.finish(conn, run_id, A)
    eventually(lambda: first.story()[-1:] == [(B, "promoted")])
    again = resume(api, kind, run_id, first.cursors()[-1])
    eventually(lambda: again.status_code in (101, 200), what=f"a stream: {again.status_code}")
    runs.finish(conn, run_id, B)
    assert again.until_end()[-1].name == "end"
    assert again.story() == [(B, "claimed"), (B, "succeeded"), (None, "succeeded")]


def test_an_end_that_was_undone_before_it_could_be_told_ends_no_stream(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: []})
    watcher = watch(api, kind, run_id)
    lease = runs.take(conn, run_id, A)
    eventually(lambda: watcher.reasons() == ["claimed"])
    sql(  # so that nobody is told at once
        conn,
        """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
           WHERE application_name = 'orchestrator changes' AND datname = current_database()""",
    )
    assert rows.settle(conn, lease, "permanent") is not None
    requeue_task(conn, "default", str(lease.task_id))
    eventually(lambda: (None, "requeued") in watcher.story())
    runs.finish(conn, run_id, A)
    assert watcher.until_end()[-1].data == {"status": "SUCCEEDED"}
    assert watcher.story() == story_since_created(conn, run_id)
    assert watcher.names().count("end") == 1


def test_whenever_a_watcher_comes_snapshot_and_transitions_fit_together(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    names = [f"tool_call.s{number}" for number in range(40)]
    run_id = runs.submit(conn, {name: names[:place][-2:-1] for place, name in enumerate(names)})
    watchers = []
    for name in names:
        runs.finish(conn, run_id, name)
        watchers.append(kind(api, f"/runs/{run_id}/events"))
    for watcher in watchers:
        snapshot, *_ = watcher.until_end()
        assert snapshot.name == "snapshot"
        stands = {step["name"]: step["status"] for step in snapshot.data["steps"]}
        stands[None] = snapshot.data["status"]
        for one in watcher.transitions():
            assert stands[one.data["step"]] == one.data["from"], one.data
            stands[one.data["step"]] = one.data["to"]
        assert set(stands.values()) == {"SUCCEEDED"}


def test_a_watcher_of_a_run_that_is_revived_sees_it_go_on(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: []})
    runs.finish(conn, run_id, A, "permanent", error="no such thing")
    requeue_task(conn, "default", str(runs.number(conn, run_id, A)))
    watcher = watch(api, kind, run_id)
    assert watcher.events[0].data["status"] == "RUNNING"
    runs.finish(conn, run_id, A)
    assert watcher.until_end()[-1].data == {"status": "SUCCEEDED"}


def test_an_unusable_cursor_gets_a_fresh_snapshot(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: []})
    now = here(conn, run_id)
    another_cluster = Position("1", now.before, now.now)
    a_future_that_was_restored_away = Position(now.cluster, "9:999999999:", "9:999999999:")
    for cursor in (
        "nonsense",
        another_cluster.as_cursor(),
        a_future_that_was_restored_away.as_cursor(),
    ):
        watcher = resume(api, kind, run_id, cursor)
        eventually(lambda watcher=watcher: watcher.names() == ["snapshot"], what=cursor)


def test_the_stream_of_a_step_has_only_its_own_transitions_and_ends_with_it(
    api: Api, conn: db.Connection
) -> None:
    run_id = runs.submit(conn, {A: [], B: [A], C: [B]})
    watcher = EventSource(api, f"/tasks/{runs.number(conn, run_id, B)}/events")
    eventually(lambda: watcher.names() == ["snapshot"])
    for step in (A, B):
        runs.finish(conn, run_id, step)
    assert watcher.until_end()[-1].data == {"status": "SUCCEEDED"}
    assert watcher.story() == [(B, "promoted"), (B, "claimed"), (B, "succeeded")]
    over = api.http.get(
        f"/tasks/{runs.number(conn, run_id, B)}/events", params={"after": watcher.cursors()[-1]}
    )
    assert over.status_code == 204


def test_pieces_of_answers_of_every_step_come_on_the_runs_stream_with_the_steps_name(
    processes: Processes, fake: FakeOllama, kind: Kind
) -> None:
    api = processes.api()
    names = ["llm_call.one", "llm_call.two"]
    for name in names:
        fake.on(name, answer("once upon a time there was", chunks=6, delay=0.5))
    steps = [{"name": name, "input": {"prompt": name}} for name in names]
    said = api.http.post("/runs", json={"goal": "two stories", "steps": steps}).json()
    watcher = watch(api, kind, said["run_id"])
    processes.worker()
    watcher.until_end()
    tokens = [event.data for event in watcher.events if event.name == "token"]
    assert {token["step"] for token in tokens} == set(names)
    assert {(token["step"], token["task_id"]) for token in tokens} == {
        (step["name"], step["task_id"]) for step in said["steps"]
    }
    assert {token["attempt"] for token in tokens} == {1}


# --- who is let in ---------------------------------------------------------------------------


def test_what_is_not_there_is_not_found(api: Api, conn: db.Connection, kind: Kind) -> None:
    run_id = runs.submit(conn, {A: []})
    lone_task = api.submit("no run")
    for reference in (run_id + 9, runs.number(conn, run_id, A), lone_task, "name", 2**64, "%00"):
        refused = kind(api, f"/runs/{reference}/events")
        refused.until_end()
        assert (refused.status_code, refused.refusal) == (404, {"error": "not found"}), reference


def test_another_tenants_run_is_not_found_and_ones_own_is(
    api: Api, conn: db.Connection, kind: Kind
) -> None:
    run_id = runs.submit(conn, {A: []}, tenant="red")
    refused = kind(api, f"/runs/{run_id}/events")
    refused.until_end()
    assert (refused.status_code, refused.refusal) == (404, {"error": "not found"})
    watch(api, kind, run_id, **{"X-Tenant-Id": "red"})
    ill_named = kind(api, f"/runs/{run_id}/events", **{"X-Tenant-Id": "not a name"})
    ill_named.until_end()
    assert ill_named.status_code == 400


def test_a_page_of_another_origin_cannot_open_a_websocket(api: Api, conn: db.Connection) -> None:
    run_id = runs.submit(conn, {A: []})
    host = api.url.removeprefix("http://")
    for origin in ("http://evil.example", "null", "http://127.0.0.1", f"http://{host}1", "x://y:z"):
        refused = Socket(api, f"/runs/{run_id}/events", Origin=origin)
        refused.until_end()
        assert refused.status_code == 403, origin
        assert "Origin" in refused.refusal["error"]
    watch(api, Socket, run_id, Origin=api.url)


def test_idle_streams_hold_no_database_connection(api: Api, conn: db.Connection) -> None:
    run_id = runs.submit(conn, {A: []})
    watchers = [watch(api, kind, run_id) for kind in (EventSource, Socket) * 10]
    # The pool keeps at most 8; the listener is one more.
    held = sql(
        conn,
        """SELECT count(*) AS n FROM pg_stat_activity
           WHERE datname = current_database() AND application_name LIKE 'orchestrator %%'""",
    )
    assert held[0]["n"] <= 9
    runs.finish(conn, run_id, A)
    for watcher in watchers:
        watcher.until_end()
        assert watcher.story() == story_since_created(conn, run_id)

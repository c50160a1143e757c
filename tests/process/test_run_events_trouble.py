"""Streams of a run's events while something goes wrong: none missing, none twice, none left."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import db
from api import connections, feeds, web_socket
from config import DatabaseSettings, Settings
from queries.events import here
from queries.leases import Lease
from tests.conftest import settings_for
from tests.support import rows, runs
from tests.support.fake_ollama import FakeOllama
from tests.support.processes import Api, Processes, eventually
from tests.support.queue import Queue
from tests.support.rows import sql
from tests.support.served import Served
from tests.support.streams import (
    EventSource,
    Socket,
    Watcher,
    await_snapshot,
    masked,
    open_raw,
    reset,
)

A, B = "tool_call.a", "tool_call.b"
BOTH = pytest.mark.parametrize("kind", [EventSource, Socket], ids=["sse", "websocket"])
Kind = type[Watcher]
Connect = Callable[[], db.Connection]


def watch(api: Any, kind: Kind, run_id: int) -> Watcher:
    watcher = kind(api, f"/runs/{run_id}/events")
    eventually(lambda: watcher.names() == ["snapshot"], what=f"a snapshot: {watcher.refusal}")
    return watcher


def ids_since_created(conn: db.Connection, run_id: int) -> list[int]:
    statement = "SELECT id FROM audit_log WHERE run_id = %(run_id)s AND reason <> 'created'"
    return sorted(row["id"] for row in sql(conn, statement, run_id=run_id))


# --- Postgres --------------------------------------------------------------------------------


@pytest.fixture
def never_by_itself(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """No feed looks before it is told, or knows that it may not have been told."""
    monkeypatch.setattr(feeds, "LONGEST_BLIND_WAIT_SECONDS", 600.0)
    with Served(settings) as served:
        yield served


@BOTH
def test_nothing_is_missed_when_the_listener_is_killed_again_and_again(
    never_by_itself: Served, conn: db.Connection, kind: Kind
) -> None:
    steps = [f"tool_call.s{number}" for number in range(4)]
    run_id = runs.submit(conn, {step: steps[:place][-1:] for place, step in enumerate(steps)})
    watcher = watch(never_by_itself, kind, run_id)
    for step in steps:
        killed = sql(
            conn,
            """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE application_name = 'orchestrator changes' AND datname = current_database()""",
        )
        runs.finish(conn, run_id, step)
        assert len(killed) <= 1
        eventually(lambda step=step: (step, "succeeded") in watcher.story())
    watcher.until_end()
    assert watcher.ids() == ids_since_created(conn, run_id)


@pytest.fixture
def own_processes(own_queue: Queue, fake: FakeOllama, tmp_path: Path) -> Iterator[Processes]:
    with Processes(own_queue.url, fake.url, tmp_path) as started:
        started.configure(database={"pool_wait_seconds": 1})
        yield started


@BOTH
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_nothing_is_missed_when_postgres_restarts(
    own_server: Any, own_queue: Queue, own_processes: Processes, kind: Kind, mode: Any
) -> None:
    api = own_processes.api()
    settings = api_settings(own_queue.url)
    with contextlib.closing(db.connect(*settings)) as conn:
        run_id = runs.submit(conn, {A: [], B: [A]})
        watcher = watch(api, kind, run_id)
        lease = runs.take(conn, run_id, A)
        eventually(lambda: watcher.story() == [(A, "claimed")])
    own_server.stop(mode)
    refused = kind(api, f"/runs/{run_id}/events")
    refused.until_end()
    assert refused.status_code == 503
    assert refused.refusal["error"]
    own_server.start()
    with contextlib.closing(db.connect(*settings)) as conn:
        assert rows.settle(conn, lease, "succeeded") is not None
        runs.finish(conn, run_id, B)
        watcher.until_end()
        assert watcher.ids() == ids_since_created(conn, run_id)
        cursor = watcher.cursors()[0]
        resumed = kind(api, f"/runs/{run_id}/events?after={cursor}")
        resumed.until_end()
        assert resumed.ids() == watcher.ids()[1:]


@BOTH
def test_what_a_crash_of_postgres_undid_hides_nothing_that_comes_after(
    own_server: Any, own_queue: Queue, own_processes: Processes, kind: Kind
) -> None:
    """The numbers of transactions that were not on the disk yet are given out again."""
    api = own_processes.api()
    settings = api_settings(own_queue.url)
    with contextlib.closing(db.connect(*settings)) as conn:
        run_id = runs.submit(conn, {A: []})
        for _ in range(20):  # each has a number, and nothing that the disk is waited for
            sql(conn, "SELECT pg_notify('nobody', '')")
        cursor = here(conn, run_id).as_cursor()
    own_server.restart("immediate")
    with contextlib.closing(db.connect(*settings)) as conn:
        runs.finish(conn, run_id, A)
        watcher = kind(api, f"/runs/{run_id}/events?after={cursor}")
        watcher.until_end()
        assert watcher.ids() == ids_since_created(conn, run_id)


def test_a_feed_that_finds_postgres_away_waits_for_it(
    own_server: Any, own_queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(feeds, "LONGEST_BLIND_WAIT_SECONDS", 0.1)
    with Served(settings_for(own_queue.url)) as served:
        eventually(lambda: httpx.get(f"{served.url}/readyz").status_code == 200)
        with contextlib.closing(db.connect(*api_settings(own_queue.url))) as conn:
            run_id = runs.submit(conn, {A: []})
        watcher = watch(served, Socket, run_id)
        own_server.stop()
        eventually(lambda: "A feed waits" in caplog.text)
        own_server.start()
        with contextlib.closing(db.connect(*api_settings(own_queue.url))) as conn:
            runs.finish(conn, run_id, A)
        watcher.until_end()
        assert watcher.reasons() == ["claimed", "succeeded", "succeeded"]


def api_settings(url: str) -> tuple[str, DatabaseSettings, str]:
    return url, DatabaseSettings(), "tests"


CLAIM = """
UPDATE tasks
SET status = 'RUNNING', reason = 'claimed', due = false, worker = 'w', attempt = attempt + 1,
    delivery_count = delivery_count + 1, lease_token = gen_random_uuid(),
    lease_expires_at = current_instant() + interval '1 minute', started_at = current_instant()
WHERE task_id = %(task_id)s AND status = 'PENDING'
RETURNING lease_token
"""


def test_fifty_writers_that_commit_out_of_order_leave_no_gap_and_no_repeat(
    api: Api, conn: db.Connection, connect: Connect
) -> None:
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    names = [f"tool_call.s{number}" for number in range(150)]
    run_id = runs.submit(conn, {name: [] for name in names})
    numbers = [row["task_id"] for row in runs.step_rows(conn, run_id).values()]
    steady = [watch(api, kind, run_id) for kind in (EventSource, Socket) * 2]
    hasty = [Hasty(api, kind, run_id, conn) for kind in (EventSource, Socket)]
    delays = [chance.random() / 20 for _ in names]
    never = threading.Event()

    def write(writer: int) -> None:
        own = connections_of_writers[writer]
        for place in range(writer, len(numbers), 50):
            with db.transaction(own) as cursor:
                cursor.execute(CLAIM, {"task_id": numbers[place]})
                (row,) = cursor.fetchall()
                never.wait(delays[place])  # others commit meanwhile, with higher numbers
            lease = Lease(numbers[place], row["lease_token"], run_id)
            assert rows.settle(own, lease, "succeeded") is not None

    connections_of_writers = [connect() for _ in range(50)]
    writers = [threading.Thread(target=write, args=(number,)) for number in range(50)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    expected = ids_since_created(conn, run_id)
    assert len(expected) == 301
    for watcher in steady:
        watcher.until_end()
        assert sorted(watcher.ids()) == expected, f"seed {seed}"
        assert watcher.ids() == steady[0].ids(), f"seed {seed}"
        story = watcher.story()
        assert all(story.index((n, "claimed")) < story.index((n, "succeeded")) for n in names)
        assert story[-1] == (None, "succeeded")
    assert steady[0].ids() != expected, f"every commit came in order; seed {seed}"
    for impatient in hasty:
        assert sorted(impatient.until_end()) == expected, f"seed {seed}"


class Hasty(threading.Thread):
    """Hangs up after every few transitions, and resumes, until the end."""

    def __init__(self, api: Api, kind: Kind, run_id: int, conn: db.Connection) -> None:
        super().__init__(daemon=True)
        self._api, self._kind, self._path = api, kind, f"/runs/{run_id}/events"
        self._cursor = here(conn, run_id).as_cursor()
        self._ids: list[int] = []
        self.start()

    def run(self) -> None:
        while True:
            path = f"{self._path}?after={self._cursor}"
            watcher = self._kind(self._api, path, most=7)
            watcher.until_end()
            self._ids += watcher.ids()
            if "end" in watcher.names() or watcher.status_code == 204:
                return
            self._cursor = watcher.cursors()[-1]

    def until_end(self) -> list[int]:
        self.join(60)
        assert not self.is_alive()
        return self._ids


# --- clients ---------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes half a minute takes a moment."""
    monkeypatch.setattr(feeds, "KEEP_ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(connections, "LONGEST_SEND_SECONDS", 1.0)


@pytest.fixture
def served(settings: Settings, quick: None) -> Iterator[Served]:
    with Served(settings) as server:
        yield server


def test_a_silent_stream_says_that_it_is_still_there(served: Served, conn: db.Connection) -> None:
    run_id = runs.submit(conn, {A: []})
    watcher = Socket(served, f"/runs/{run_id}/events")
    eventually(lambda: watcher.names()[:4] == ["snapshot"] + ["keep-alive"] * 3)
    opened = open_raw(served.url, f"/runs/{run_id}/events")
    received = b""
    while received.count(b": still here\n\n") < 3:
        received += opened.recv(65_536)
    opened.close()


def test_the_stream_of_one_step_is_kept_alive_while_only_others_move(
    served: Served, conn: db.Connection
) -> None:
    names = [f"tool_call.s{number}" for number in range(300)]
    run_id = runs.submit(conn, {name: names[:place][-1:] for place, name in enumerate(names)})
    last = runs.number(conn, run_id, names[-1])
    opened = open_raw(served.url, f"/tasks/{last}/events")
    received = await_snapshot(opened)
    opened.settimeout(0.05)  # a fourth of what may pass in silence
    moving = iter(names[:-2])
    while received.count(b": still here\n\n") < 2:
        runs.finish(conn, run_id, next(moving))
        with contextlib.suppress(TimeoutError):
            received += opened.recv(65_536)
    assert b"transition" not in received
    opened.close()


@pytest.mark.parametrize("over", ["sse", "ws"])
def test_the_kernel_gives_up_a_client_that_acknowledges_nothing(
    served: Served, conn: db.Connection, over: str
) -> None:
    opened = open_raw(served.url, f"/runs/{runs.submit(conn, {A: []})}/events", over)
    await_snapshot(opened)
    (connection,) = served.server.server_state.connections
    server_side = connection.transport.get_extra_info("socket")
    longest = server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert longest == connections.LONGEST_SEND_SECONDS * 1000
    opened.close()


@pytest.mark.parametrize("over", ["sse", "ws"])
@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_the_server_still_shows_the_connection_under_a_stream(
    settings: Settings, conn: db.Connection, caplog: Any, over: str, http: Any
) -> None:
    """Red after an upgrade of uvicorn: it has changed what TransportInScope leans on.

    Then a client that stops reading is not let go any more; api/connections.py is to be adapted.
    """
    connections._warn_once.cache_clear()
    with Served(settings, http=http) as served:
        opened = open_raw(served.url, f"/runs/{runs.submit(conn, {A: []})}/events", over)
        await_snapshot(opened)
        assert connections.NO_TRANSPORT not in caplog.text
        opened.close()


def test_a_server_that_hides_its_connections_is_told_of_once_in_the_log(caplog: Any) -> None:
    connections._warn_once.cache_clear()
    for _ in range(3):
        connections.Line({"type": "http"})
    assert [record.message for record in caplog.records] == [connections.NO_TRANSPORT]
    assert "a client that stops reading" in connections.NO_TRANSPORT


BIG = "x" * 200_000


@pytest.mark.parametrize("over", ["sse", "ws"])
def test_a_client_that_does_not_read_is_let_go_and_can_resume(
    served: Served, conn: db.Connection, over: str
) -> None:
    names = [f"tool_call.s{number}" for number in range(60)]
    run_id = runs.submit(conn, {name: names[:place][-1:] for place, name in enumerate(names)})
    start = here(conn, run_id).as_cursor()
    stuck = open_raw(served.url, f"/runs/{run_id}/events?after={start}", over, buffer_bytes=4096)
    eventually(lambda: served.services.feeds._feeds)
    for name in names:  # each error is told in full: more than all buffers hold
        runs.finish(conn, run_id, name, "retry", error=BIG)
        sql(
            conn,
            "UPDATE tasks SET available_at = current_instant() WHERE parent_id = %(run_id)s",
            run_id=run_id,
        )
        runs.finish(conn, run_id, name)
    eventually(lambda: served.connections() == 0)
    eventually(lambda: served.services.feeds._feeds == {})
    stuck.close()
    resumed = EventSource(served, f"/runs/{run_id}/events?after={start}")
    resumed.until_end()
    assert resumed.ids() == ids_since_created(conn, run_id)


def test_a_client_that_sends_without_end_or_much_at_once_is_turned_away(
    api: Api, conn: db.Connection
) -> None:
    run_id = runs.submit(conn, {A: []})
    for message, times in ((b"ping", web_socket.MOST_MESSAGES + 1), (b"x" * 5000, 1)):
        opened = open_raw(api.url, f"/runs/{run_id}/events", "ws")
        await_snapshot(opened)
        opened.sendall(masked(message) * times)
        received = b""
        while piece := opened.recv(65_536):
            received += piece
            if b"\x88\x02" in received:  # a close frame
                break
        assert received.endswith(b"\x88\x02" + (1008).to_bytes(2, "big"))
        opened.close()


def test_what_a_client_says_is_ignored(api: Api, conn: db.Connection) -> None:
    run_id = runs.submit(conn, {A: []})
    opened = open_raw(api.url, f"/runs/{run_id}/events", "ws")
    await_snapshot(opened)
    opened.sendall(masked(b"{}") * web_socket.MOST_MESSAGES)
    runs.finish(conn, run_id, A)
    received = b""
    while b'"event": "end"' not in received:
        piece = opened.recv(65_536)
        assert piece, received
        received += piece
    reset(opened)


# --- the API process -------------------------------------------------------------------------


def test_a_signal_ends_the_process_at_once_however_many_streams_are_open(
    api: Api, conn: db.Connection
) -> None:
    run_id = runs.submit(conn, {A: []})
    watchers = [watch(api, kind, run_id) for kind in (EventSource, Socket) * 3]
    silent = [open_raw(api.url, f"/runs/{run_id}/events", over, 4096) for over in ("sse", "ws")]
    assert api.terminate(25) == -signal.SIGTERM  # as uvicorn ends after a clean stop
    assert "Finished server process" in api.log
    assert "Traceback" not in api.log, api.log
    for watcher in watchers:
        assert watcher.until_end()[0].name == "snapshot"
        assert "end" not in watcher.names()
        assert isinstance(watcher, EventSource) or watcher.close_code == 1012
    for opened in silent:
        opened.close()


def test_clients_that_do_not_read_do_not_keep_the_process_from_ending(
    api: Api, conn: db.Connection
) -> None:
    run_id = runs.submit(conn, {A: []})
    start = here(conn, run_id).as_cursor()
    path = f"/runs/{run_id}/events?after={start}"
    stuck = [open_raw(api.url, path, over, buffer_bytes=4096) for over in ("sse", "ws")]
    watcher = watch(api, EventSource, run_id)
    for _ in range(30):
        runs.finish(conn, run_id, A, "retry", error=BIG)
        sql(
            conn,
            """UPDATE tasks SET available_at = current_instant(), retry_count = 0
               WHERE parent_id = %(run_id)s""",
            run_id=run_id,
        )
    eventually(lambda: len(watcher.ids()) == 60)
    assert api.terminate(25) == -signal.SIGTERM
    for opened in stuck:
        opened.close()


def test_a_process_that_is_allowed_few_open_files_takes_as_many_as_it_may(
    processes: Processes,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        api = processes.api()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(api.pid, resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)

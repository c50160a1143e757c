"""Many watchers at once: each gets all, the process stays responsive, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

import db
from api import connections, feeds, stream_events
from api.event_stream import EventStreamResponse
from api.web_socket import EventSocket
from config import Settings
from tests.support import runs
from tests.support.processes import Api, eventually
from tests.support.rows import sql
from tests.support.served import Served
from tests.support.streams import (
    HANDSHAKE,
    REQUEST,
    EventSource,
    Socket,
    await_snapshot,
    open_raw,
    reset,
    vanish,
)

psutil = pytest.importorskip("psutil", reason="comes with requirements-local.txt")

WATCHERS = 1000
PATIENCE = 150  # seconds; what is not there by then will not come
STEPS = 100
# As they come, whatever surrounds them.
TRANSITION = re.compile(rb'\{"id": (\d+), "task_id"')
END = re.compile(rb'event: end|"event": "end"')


class Crowd:
    """Many clients of one path, half of them over WebSockets, on one thread."""

    def __init__(self, api: Api, path: str, size: int) -> None:
        self._address, self._path, self._size = urlsplit(api.url), path, size
        self.have_begun = 0
        self.ids: list[list[int]] = [[] for _ in range(size)]
        self.ended = 0

    async def watch(self) -> None:
        await asyncio.gather(*(self._watch(number) for number in range(self._size)))

    async def _watch(self, number: int) -> None:
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        request = HANDSHAKE if number % 2 else REQUEST
        writer.write(request.format(path=self._path).encode())
        rest, has_begun = b"", False
        while data := await reader.read(1 << 18):
            rest += data
            if not has_begun and b"snapshot" in rest:
                has_begun = True
                self.have_begun += 1
            if has_ended := END.search(rest):
                self.ended += 1
            last = 0
            for match in TRANSITION.finditer(rest):
                self.ids[number].append(int(match[1]))
                last = match.end()
            rest = rest[max(last, len(rest) - 100) :]
            if has_ended:
                break
        writer.transport.abort()


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_watchers_of_one_busy_run_get_each_transition_once_in_one_order(
    api: Api, conn: db.Connection, connect: Callable[[], db.Connection], many_files: None
) -> None:
    names = [f"tool_call.s{number}" for number in range(STEPS)]
    run_id = runs.submit(conn, {name: [] for name in names})
    crowd = Crowd(api, f"/runs/{run_id}/events", WATCHERS)
    watching = threading.Thread(target=lambda: asyncio.run(crowd.watch()))
    watching.start()
    eventually(lambda: crowd.have_begun == WATCHERS, PATIENCE, "all have their snapshot")

    workers = [connect() for _ in range(4)]

    def work(number: int) -> None:
        for name in names[number::4]:
            runs.finish(workers[number], run_id, name)

    assert api.http.get("/healthz").status_code == 200  # while a thousand wait
    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, number) for number in range(4)]
        for one in working:
            one.result()
            assert api.http.get("/healthz").status_code == 200
    watching.join(PATIENCE)
    assert crowd.ended == WATCHERS

    expected = sql(
        conn,
        "SELECT id FROM audit_log WHERE run_id = %(run_id)s AND reason <> 'created' ORDER BY id",
        run_id=run_id,
    )
    assert sorted(crowd.ids[0]) == [row["id"] for row in expected]
    assert len(expected) == 2 * STEPS + 1
    assert all(ids == crowd.ids[0] for ids in crowd.ids)
    eventually(lambda: len(psutil.Process(api.pid).net_connections("tcp")) < 20)


def test_each_event_is_written_out_once_however_many_watch(
    settings: Settings, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    def dumps(data: Any, **how: Any) -> str:
        written.append(data)
        return json.dumps(data, **how)

    monkeypatch.setattr(stream_events, "json", SimpleNamespace(dumps=dumps))
    run_id = runs.submit(conn, {"tool_call.a": [], "tool_call.b": ["tool_call.a"]})
    with Served(settings) as served:
        path = f"/runs/{run_id}/events"
        watchers = [kind(served, path) for kind in (EventSource, Socket) * 10]
        eventually(lambda: all(watcher.names() == ["snapshot"] for watcher in watchers))
        runs.finish(conn, run_id, "tool_call.a")
        runs.finish(conn, run_id, "tool_call.b")
        for watcher in watchers:
            watcher.until_end()
    transitions = [data["id"] for data in written if "cursor" in data]
    assert transitions == watchers[0].ids()


def test_what_comes_while_a_feed_rests_goes_out_together(
    settings: Settings, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"tool_call.s{number}" for number in range(10)]
    told: list[int] = []
    pass_on = feeds.Feed._pass_on

    def counted(feed: feeds.Feed, batch: feeds.Batch) -> None:
        told.append(len(batch.events))
        pass_on(feed, batch)

    monkeypatch.setattr(feeds, "REST_SECONDS", 2.0)
    monkeypatch.setattr(feeds.Feed, "_pass_on", counted)
    run_id = runs.submit(conn, {name: [] for name in names})
    with Served(settings) as served:
        watcher = watch(served, run_id)
        began = time.monotonic()
        for name in names:
            runs.finish(conn, run_id, name)
        seconds = time.monotonic() - began
        watcher.until_end()
    together = [number for number in told if number]
    assert sum(together) == len(watcher.ids()) == 2 * len(names) + 1
    assert len(together) <= 2 + seconds / 2


# --- nothing is left -------------------------------------------------------------------------

Leave = Callable[[Any], None]
MANNERS: dict[str, Leave] = {"closed": lambda opened: opened.close(), "reset": reset}


def open_and_leave(url: str, path: str, count: int, manners: list[Leave]) -> None:
    """So many streams, half of them WebSockets, open at one time; then each is left."""
    opened = []
    for number in range(count):
        opened.append(open_raw(url, path, "ws" if number % 2 else "sse"))
    for number, one in enumerate(opened):
        if number % 4 < 2:  # the others leave before they have read anything
            await_snapshot(one)
    for number, one in enumerate(opened):
        manners[number // 2 % len(manners)](one)


def test_five_hundred_streams_opened_and_dropped_leave_nothing_in_the_process(
    api: Api, conn: db.Connection, many_files: None
) -> None:
    run_id = runs.submit(conn, {f"tool_call.s{number}": [] for number in range(20)})
    path = f"/runs/{run_id}/events"
    process = psutil.Process(api.pid)

    def sessions() -> int:
        rows = sql(
            conn,
            """SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()
               AND application_name LIKE 'orchestrator %%'""",
        )
        return int(rows[0]["n"])

    for _ in range(2):  # the first time fills pools and caches
        open_and_leave(api.url, path, 500, list(MANNERS.values()))
        eventually(lambda: len(process.net_connections("tcp")) < 15)
    before = process.num_fds()
    for _ in range(4):
        open_and_leave(api.url, path, 500, list(MANNERS.values()))
        eventually(lambda: process.num_fds() <= before + 8)
    assert process.num_threads() < 50  # the pool of threads has 40 at most
    assert sessions() <= 9  # a pool of 8, and the listener
    assert "Traceback" not in api.log, api.log[-5000:]


def test_five_hundred_streams_opened_and_dropped_leave_no_task_and_no_feed(
    settings: Settings,
    conn: db.Connection,
    monkeypatch: pytest.MonkeyPatch,
    many_files: None,
) -> None:
    monkeypatch.setattr(feeds, "KEEP_ALIVE_SECONDS", 0.5)
    monkeypatch.setattr(connections, "LONGEST_SEND_SECONDS", 2.0)
    run_id = runs.submit(conn, {"tool_call.a": []})
    path = f"/runs/{run_id}/events"
    with Served(settings) as served:
        eventually(lambda: served.connections() == 0)
        before = served.tasks()
        # Those who vanish are found out by the next sign of life that is sent to them.
        open_and_leave(served.url, path, 500, [*MANNERS.values(), vanish])
        eventually(lambda: served.connections() == 0)
        eventually(lambda: served.tasks() == before, what=f"{before} tasks")
        eventually(lambda: served.services.feeds._feeds == {})
        assert served.services.changes._waiting == {}
        eventually(lambda: left_of(*PARTS_OF_A_STREAM) == [])


PARTS_OF_A_STREAM = (feeds.Feed, feeds.Watcher, connections.Line, EventStreamResponse, EventSocket)


def left_of(*kinds: type) -> list[str]:
    """What there is of these kinds in this process, by name."""
    gc.collect()
    return [type(one).__name__ for one in gc.get_objects() if type(one) in kinds]


# --- the workers are told who is watched -----------------------------------------------------

A, B = "tool_call.a", "tool_call.b"


class Word:
    """Stands for say_watched: notes what is said, and can be held up while it says it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **pauses: float) -> None:
        self.said: list[list[int]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        monkeypatch.setattr(feeds, "say_watched", self._say)
        for name, seconds in pauses.items():
            monkeypatch.setattr(feeds, name, seconds)

    def _say(self, conn: db.Connection, roots: list[int]) -> None:
        self.said.append(roots)
        self.may_go_on.wait(PATIENCE)


NEVER = 3600.0


def watch(served: Served, run_id: int) -> EventSource:
    watcher = EventSource(served, f"/runs/{run_id}/events")
    eventually(lambda: watcher.names() == ["snapshot"])
    return watcher


def test_a_run_that_is_watched_while_others_are_announced_is_announced_next(
    settings: Settings, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = Word(monkeypatch, SAY_WATCHED_SECONDS=NEVER, SAY_AGAIN_SECONDS=0.01)
    first, second = runs.submit(conn, {A: []}), runs.submit(conn, {A: []})
    with Served(settings) as served:
        word.may_go_on.clear()
        watch(served, first)
        eventually(lambda: word.said == [[first]])
        watch(served, second)
        word.may_go_on.set()
        eventually(lambda: word.said == [[first], [second]])


def test_when_a_worker_begins_only_the_run_it_works_on_is_announced_again(
    settings: Settings, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = Word(monkeypatch, SAY_WATCHED_SECONDS=NEVER, SAY_AGAIN_SECONDS=0.01)
    first, second = runs.submit(conn, {A: []}), runs.submit(conn, {A: []})
    with Served(settings) as served:
        for run_id in (first, second):
            watch(served, run_id)
        eventually(lambda: word.said == [[first], [second]])
        runs.take(conn, second, A)
        eventually(lambda: word.said == [[first], [second], [second]])


def test_however_many_workers_begin_it_is_announced_at_most_once_in_a_while(
    settings: Settings, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = Word(monkeypatch, SAY_WATCHED_SECONDS=NEVER, SAY_AGAIN_SECONDS=NEVER)
    run_id = runs.submit(conn, {A: [], B: [A]})
    with Served(settings) as served:
        watcher = watch(served, run_id)
        eventually(lambda: word.said == [[run_id]])
        for name in (A, B):
            runs.finish(conn, run_id, name)
        watcher.until_end()
        assert word.said == [[run_id]]

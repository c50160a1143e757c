"""Many watchers at once: each gets all, the process stays responsive, and nothing is left."""

from __future__ import annotations

import asyncio
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
    started = time.monotonic()
    watching.start()
    eventually(lambda: crowd.have_begun == WATCHERS, what="all have their snapshot")
    begun = time.monotonic()

    workers = [connect() for _ in range(4)]

    def work(number: int) -> None:
        for name in names[number::4]:
            runs.finish(workers[number], run_id, name)

    slowest = 0.0
    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, number) for number in range(4)]
        while watching.is_alive():
            asked = time.monotonic()
            assert api.http.get("/healthz").status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
            watching.join(0.05)
            assert time.monotonic() < begun + 60, (crowd.have_begun, crowd.ended)
        for one in working:
            one.result()
    took = time.monotonic() - begun
    process = psutil.Process(api.pid)
    assert begun - started + took < 40, f"snapshots {begun - started:.1f} s, run {took:.1f} s"
    assert slowest < 5

    expected = sql(
        conn,
        "SELECT id FROM audit_log WHERE run_id = %(run_id)s AND reason <> 'created' ORDER BY id",
        run_id=run_id,
    )
    assert sorted(crowd.ids[0]) == [row["id"] for row in expected]
    assert len(expected) == 2 * STEPS + 1
    assert all(ids == crowd.ids[0] for ids in crowd.ids)
    eventually(lambda: len(process.net_connections("tcp")) < 20)


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
    memory = process.memory_info().rss
    for _ in range(4):
        open_and_leave(api.url, path, 500, list(MANNERS.values()))
        eventually(lambda: process.num_fds() <= before + 8)
    assert process.num_threads() < 50  # the pool of threads has 40 at most
    assert sessions() <= 9  # a pool of 8, and the listener
    grown = process.memory_info().rss - memory
    assert grown < 4_000_000
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

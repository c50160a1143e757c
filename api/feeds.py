"""Live transitions for any number of watchers: read once per run or lone task and process.

A watcher first joins the feed, then reads where things stand, then takes what the feed brings,
leaving out what it has read already: so nothing is missed and nothing comes twice. A watcher
holds no database connection. One that does not keep up is dropped, and can resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi.concurrency import run_in_threadpool

import db
from api.changes import Changes
from api.database import Database
from api.models import iso_utc
from errors import DatabaseUnavailable
from queries import events
from queries.events import Batch, Position
from queries.tokens import say_watched
from states import Status

logger = logging.getLogger(__name__)

# A lost notification costs so long at most; after a reconnect of the listener all are woken.
LONGEST_BLIND_WAIT_SECONDS = 10.0
AWAY_SECONDS = 1.0
MOST_WAITING = 200  # batches and pieces of answers, for one watcher
SAY_WATCHED_SECONDS = 5.0

Read = Callable[[db.Connection], tuple[dict[str, Any], Position]]


@dataclass(frozen=True)
class StreamEvent:
    """What a watcher gets: snapshot, transition or end; only transitions carry a cursor."""

    name: str
    data: dict[str, Any]
    cursor: str | None = None


class Watcher:
    """One watcher's place in a feed."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[Batch | StreamEvent | None] = asyncio.Queue(MOST_WAITING)

    def put(self, batch: Batch) -> bool:
        """Queue a batch; False when the watcher has fallen too far behind, and is dropped."""
        if not self.arrived.full():
            self.arrived.put_nowait(batch)
            return True
        self.drop()
        return False

    def put_token(self, token: StreamEvent) -> None:
        """Queue a piece of an answer, unless there is much before it already."""
        if self.arrived.qsize() < MOST_WAITING // 2:
            self.arrived.put_nowait(token)

    def drop(self) -> None:
        """End the watcher's stream behind what it has read; it may resume."""
        while not self.arrived.empty():
            self.arrived.get_nowait()
        self.arrived.put_nowait(None)


class Feed:
    """Reads the transitions of one root for its watchers, while it has any."""

    def __init__(self, root_id: int, position: Position, on_claim: Callable[[], None]) -> None:
        self.root_id = root_id
        self._on_claim = on_claim  # a worker begins, and may not know that somebody watches
        self.position = position
        self.watchers: set[Watcher] = set()
        self.task: asyncio.Task[None] | None = None

    async def run(self, database: Database, changes: Changes) -> None:
        with changes.of_task(self.root_id) as changed:
            while True:
                changed.clear()
                seconds = LONGEST_BLIND_WAIT_SECONDS
                try:
                    if await self._read(database):
                        continue
                except DatabaseUnavailable as away:
                    logger.warning("A feed waits: %s", away)
                    seconds = AWAY_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await changed.wait()

    async def _read(self, database: Database) -> bool:
        """Read and pass on a batch; True if there may be more at once."""
        batch = await run_in_threadpool(
            database.run, events.read_events, self.root_id, self.position
        )
        if batch is None:  # another database answers now: every watcher has to begin anew
            for watcher in self.watchers:
                watcher.drop()
            return False
        self.position = batch.end
        if batch.events:
            if any(row["to"] == Status.RUNNING for row, _ in batch.events):
                self._on_claim()
            for watcher in list(self.watchers):
                if not watcher.put(batch):
                    self.watchers.discard(watcher)
        return batch.is_full


class Feeds:
    """All feeds of this process, by root."""

    def __init__(self, database: Database, changes: Changes) -> None:
        self._database = database
        self._changes = changes
        self._feeds: dict[int, Feed] = {}
        self._saying: asyncio.Task[None] | None = None
        self._say_now = asyncio.Event()
        changes.on_token = self._on_token

    @contextlib.asynccontextmanager
    async def watcher(self, root_id: int) -> AsyncIterator[Watcher]:
        """A place in the feed of `root_id`; the feed ends with its last watcher."""
        if root_id not in self._feeds:
            position = await run_in_threadpool(self._database.run, events.here)
            self._begin(root_id, position)
        feed = self._feeds[root_id]
        watcher = Watcher()
        feed.watchers.add(watcher)
        try:
            yield watcher
        finally:
            feed.watchers.discard(watcher)
            if not feed.watchers and self._feeds.get(root_id) is feed:
                del self._feeds[root_id]
                if feed.task is not None:
                    feed.task.cancel()

    def _begin(self, root_id: int, position: Position) -> None:
        if root_id not in self._feeds:  # somebody else may have begun it meanwhile
            feed = self._feeds[root_id] = Feed(root_id, position, self._say_now.set)
            self._say_now.set()
            feed.task = asyncio.create_task(feed.run(self._database, self._changes))
            if self._saying is None or self._saying.done():
                self._saying = asyncio.create_task(self._say_watched())

    async def _say_watched(self) -> None:
        """Ask the workers for pieces of answers, while anybody watches."""
        while self._feeds:
            with contextlib.suppress(DatabaseUnavailable):
                await run_in_threadpool(self._database.run, say_watched, list(self._feeds))
            self._say_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAY_WATCHED_SECONDS):
                    await self._say_now.wait()

    def _on_token(self, piece: dict[str, Any]) -> None:
        feed = self._feeds.get(piece.pop("root_id"))
        for watcher in feed.watchers if feed else ():
            watcher.put_token(StreamEvent("token", piece))

    async def follow(
        self, root_id: int, after: Position | None, read_state: Read, only_task: int | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Snapshot (unless `after` can be resumed), transitions, and the end of `root_id`.

        `only_task` narrows the transitions to one step of a run.
        """
        async with self.watcher(root_id) as watcher:
            position, caught_up = await self._catch_up(root_id, after)
            if position is None:
                state, present = await run_in_threadpool(self._database.run, read_state)
                position = present
                yield StreamEvent("snapshot", state)
                if Status(state["status"]).is_final:
                    yield StreamEvent("end", {"status": state["status"]})
                    return
            async for event in self._live(watcher, caught_up, position):
                if only_task in (None, event.data["task_id"]):
                    yield event
                if _ends(event, only_task or root_id):
                    yield StreamEvent("end", {"status": event.data["to"]})
                    return

    async def _live(
        self, watcher: Watcher, caught_up: list[StreamEvent], position: Position
    ) -> AsyncGenerator[StreamEvent, None]:
        """What was caught up, then what arrives and was not among it, until the end."""
        for event in caught_up:
            yield event
        while (arrived := await watcher.arrived.get()) is not None:
            if isinstance(arrived, StreamEvent):
                yield arrived
                continue
            for event in _unseen(arrived, position):
                yield event
            if not arrived.is_full and events.age(arrived.end.now) > events.age(position.now):
                position = arrived.end

    async def _catch_up(
        self, root_id: int, after: Position | None
    ) -> tuple[Position | None, list[StreamEvent]]:
        """What has come since `after`; no position if that cannot be used."""
        found: list[StreamEvent] = []
        position = after
        while position is not None:
            batch = await run_in_threadpool(
                self._database.run, events.read_events, root_id, position
            )
            if batch is None:
                return None, []
            found += [_transition(row, place) for row, place in batch.events]
            position = batch.end
            if not batch.is_full:
                break
        return position, found


def _unseen(batch: Batch, position: Position) -> list[StreamEvent]:
    """The batch's transitions that are new to a reader at `position`, with cursors of its own."""
    fresh = []
    for row, place in batch.events:
        if not events.sees(position.now, int(row["transaction"])):
            own = Position(place.cluster, position.now, place.now, place.last_id)
            fresh.append(_transition(row, own))
    return fresh


def _transition(row: db.Row, place: Position) -> StreamEvent:
    cursor = place.as_cursor()
    columns = ("id", "task_id", "run_id", "step", "from", "to", "reason")
    data = {column: row[column] for column in columns}
    data |= {"at": iso_utc(row["at"]), "worker": row["worker"], "attempt": row["attempt"]}
    data |= {"detail": row["detail"], "cursor": cursor}
    return StreamEvent("transition", data, cursor)


def _ends(event: StreamEvent, task_id: int) -> bool:
    if event.name != "transition":
        return False
    return event.data["task_id"] == task_id and Status(event.data["to"]).is_final

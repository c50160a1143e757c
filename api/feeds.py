"""Live transitions for any number of watchers: read once per run or lone task and process.

A watcher first joins the feed, then reads where things stand, then takes what the feed brings,
leaving out what it has read already: so nothing is missed and nothing comes twice. Those who
come at once share one reading of where things stand. A watcher holds no database connection. One
that does not keep up is dropped, and can resume.

A stream ends when its run or task has ended and no more is to be told of it. An end that somebody
undid since (a step was requeued) is a transition like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from fastapi.concurrency import run_in_threadpool

import db
from api.alarm import Alarm
from api.changes import Changes
from api.database import Database
from api.stream_events import Bundle, StreamEvent, Told, transitions
from errors import DatabaseUnavailable
from queries import events
from queries.events import Batch, Position
from queries.tokens import say_watched
from states import Status

logger = logging.getLogger(__name__)

# A lost notification costs so long at most; after a reconnect of the listener all are woken.
LONGEST_BLIND_WAIT_SECONDS = 10.0
AWAY_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
MOST_WAITING = 200  # batches and pieces of answers, for one watcher
SAY_WATCHED_SECONDS = 5.0
SAY_AGAIN_SECONDS = 1.0  # each word takes a lock of the whole database for a moment
REST_SECONDS = 0.00008  # per watcher, after a batch: about what it takes to send it to them
SHARED_SECONDS = 1.0  # what no transition tells (a lease, a wait) may be so old in a snapshot

T = TypeVar("T")

NOTHING = Bundle()
Arrived = Told | Bundle | None


@dataclass(frozen=True)
class Subject:
    """What is followed: a run, a lone task, or one step of a run."""

    root_id: int
    task_id: int  # the row whose end is the end of the stream
    read_state: Callable[[db.Connection], dict[str, Any]]
    read_status: Callable[[db.Connection], str]

    def part_of(self, bundle: Bundle) -> Bundle:
        """What of it concerns this subject."""
        if self.task_id == self.root_id:
            return bundle
        return Bundle(event for event in bundle if event.data["task_id"] == self.task_id)


class Watcher:
    """One watcher's place in a feed."""

    def __init__(self, joined: Position) -> None:
        self.joined = joined  # what was told before it came was visible here
        self._arrived: asyncio.Queue[Arrived] = asyncio.Queue(MOST_WAITING)

    def put(self, told: Told) -> bool:
        """Queue a batch; False when the watcher has fallen too far behind, and is dropped."""
        if not self._arrived.full():
            self._arrived.put_nowait(told)
            return True
        self.drop()
        return False

    def put_token(self, token: Bundle) -> None:
        """Queue what is not stored anywhere, unless there is much before it already."""
        if self._arrived.qsize() < MOST_WAITING // 2:
            self._arrived.put_nowait(token)

    def put_sign_of_life(self) -> None:
        """Queue that there was nothing for a while."""
        if not self._arrived.full():
            self._arrived.put_nowait(NOTHING)

    def drop(self) -> None:
        """End the watcher's stream behind what it has read; it may resume."""
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._arrived.put_nowait(None)

    async def next(self) -> list[Arrived]:
        """All that has arrived, once there is something. None: it was dropped."""
        arrived = [await self._arrived.get()]
        while not self._arrived.empty():
            arrived.append(self._arrived.get_nowait())
        return arrived


@dataclass(frozen=True)
class Snapshot:
    """Where a subject stands at a position in the stream of its events."""

    task_id: int
    event: StreamEvent
    position: Position

    def serves(self, subject: Subject, watcher: Watcher) -> bool:
        """Whether it shows all that the watcher's feed will not bring any more."""
        is_late_enough = events.age(self.position.now) >= events.age(watcher.joined.now)
        return is_late_enough and self.task_id == subject.task_id


class Feed:
    """Reads the transitions of one root for its watchers, while it has any."""

    def __init__(self, root_id: int, position: Position, on_claim: Callable[[], None]) -> None:
        self.root_id = root_id
        self._on_claim = on_claim  # a worker begins, and may not know that somebody watches
        self.position = position
        self.told = position  # whatever was told so far was visible here
        self.watchers: set[Watcher] = set()
        self.steps: dict[int, str] = {}  # names, as far as they were seen
        self.task: asyncio.Task[None] | None = None
        self._readings: dict[int, asyncio.Task[Snapshot]] = {}
        self._snapshot: Snapshot | None = None

    async def run(self, database: Database, changes: Changes) -> None:
        """Read on for ever; when that cannot be, all watchers have to begin anew."""
        try:
            await self._read_on(database, changes)
        except Exception:
            logger.exception("A feed of live events broke off")
        finally:
            for watcher in self.watchers:
                watcher.drop()

    async def _read_on(self, database: Database, changes: Changes) -> None:
        with changes.of_task(self.root_id) as changed:
            while True:
                changed.clear()
                seconds = LONGEST_BLIND_WAIT_SECONDS
                try:
                    batch = await run_in_threadpool(
                        database.run, events.read_events, self.root_id, self.position
                    )
                    if batch is None:  # another database answers now
                        return
                    self._pass_on(batch)
                    if batch.is_full:  # there may be more at once
                        continue
                    if batch.events:  # what comes meanwhile goes out together
                        await asyncio.sleep(REST_SECONDS * len(self.watchers))
                except DatabaseUnavailable as away:
                    logger.warning("A feed waits: %s", away)
                    seconds = AWAY_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await changed.wait()

    def _pass_on(self, batch: Batch) -> None:
        self.position = batch.end
        if not batch.events:
            return
        told = Told(self.told, batch)
        self.told = batch.end
        self.steps |= {row["task_id"]: row["step"] for row, _ in batch.events if row["step"]}
        if any(row["to"] == Status.RUNNING for row, _ in batch.events):
            self._on_claim()
        for watcher in list(self.watchers):
            if not watcher.put(told):
                self.watchers.discard(watcher)

    async def snapshot(self, database: Database, subject: Subject, watcher: Watcher) -> Snapshot:
        """Where the subject stands, read after the watcher joined, or as good as that."""
        found = self._snapshot
        if found is None or not found.serves(subject, watcher):
            found = await asyncio.shield(self._reading(database, subject))
            if not found.serves(subject, watcher):  # its reading had begun before
                found = await asyncio.shield(self._reading(database, subject))
        return found

    def _reading(self, database: Database, subject: Subject) -> asyncio.Task[Snapshot]:
        """The reading that is under way, or a new one."""
        reading = self._readings.get(subject.task_id)
        if reading is None or reading.done():
            wanted = run_in_threadpool(database.run, read_snapshot, subject)
            reading = self._readings[subject.task_id] = asyncio.create_task(wanted)
            reading.add_done_callback(partial(self._share, subject.task_id))
        return reading

    def _share(self, task_id: int, reading: asyncio.Task[Snapshot]) -> None:
        if self._readings.get(task_id) is reading:
            del self._readings[task_id]
        if reading.cancelled() or reading.exception() is not None:
            return  # whoever waits for it is told
        snapshot = self._snapshot = reading.result()
        state = snapshot.event.data
        self.steps |= {step["task_id"]: step["name"] for step in state.get("steps", ())}
        asyncio.get_running_loop().call_later(SHARED_SECONDS, self._forget, snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        if self._snapshot is snapshot:
            self._snapshot = None


class Feeds:
    """All feeds of this process, by root."""

    def __init__(self, database: Database, changes: Changes) -> None:
        self._database = database
        self._changes = changes
        self._feeds: dict[int, Feed] = {}
        self._saying: asyncio.Task[None] | None = None
        self._say_now = asyncio.Event()
        self._unsaid: set[int] = set()  # roots whose workers may not know that somebody watches
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        changes.on_token = self._on_token

    def stop(self) -> None:
        """End every stream, and each that begins from now on."""
        if not self.stopping.done():
            self.stopping.set_result(None)
        for feed in self._feeds.values():
            for watcher in feed.watchers:
                watcher.drop()

    @contextlib.asynccontextmanager
    async def watcher(self, root_id: int) -> AsyncIterator[tuple[Feed, Watcher]]:
        """A place in the feed of `root_id`; the feed ends with its last watcher."""
        if not self._is_read(root_id):
            self._begin(root_id, await self._run(events.here, root_id))
        feed = self._feeds[root_id]
        watcher = Watcher(feed.told)
        feed.watchers.add(watcher)
        if self.stopping.done():
            watcher.drop()
        try:
            yield feed, watcher
        finally:
            feed.watchers.discard(watcher)
            if not feed.watchers and self._feeds.get(root_id) is feed:
                del self._feeds[root_id]
                self._say_now.set()  # whoever says it may end
                if feed.task is not None:
                    feed.task.cancel()

    def _is_read(self, root_id: int) -> bool:
        feed = self._feeds.get(root_id)
        return feed is not None and feed.task is not None and not feed.task.done()

    def _begin(self, root_id: int, position: Position) -> None:
        if not self._is_read(root_id):  # somebody else may have begun it meanwhile
            on_claim = partial(self._say_soon, root_id)
            feed = self._feeds[root_id] = Feed(root_id, position, on_claim)
            self._say_soon(root_id)
            feed.task = asyncio.create_task(feed.run(self._database, self._changes))
            if self._saying is None or self._saying.done():
                self._saying = asyncio.create_task(self._say_watched())

    def _say_soon(self, root_id: int) -> None:
        self._unsaid.add(root_id)
        self._say_now.set()

    async def _say_watched(self) -> None:
        """Ask the workers for pieces of answers, while anybody watches.

        Of all roots now and then; in between, of those that are new or where a worker begins.
        """
        now = asyncio.get_running_loop().time
        all_again = now()
        while self._feeds:
            is_for_all = now() >= all_again
            roots = list(self._feeds if is_for_all else self._unsaid & self._feeds.keys())
            # Before the word is out: what comes meanwhile is for the next one.
            self._unsaid.clear()
            self._say_now.clear()
            try:
                if roots:
                    await self._run(say_watched, roots)
            except DatabaseUnavailable:
                all_again = now()
            else:
                all_again = now() + SAY_WATCHED_SECONDS if is_for_all else all_again
            await asyncio.sleep(SAY_AGAIN_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, all_again - now())):
                    await self._say_now.wait()

    def _on_token(self, piece: dict[str, Any]) -> None:
        """Pass on a piece of an answer, or that an agent job's node has begun or ended."""
        if feed := self._feeds.get(piece.pop("root_id")):
            name = "node" if "phase" in piece else "token"
            event = StreamEvent(name, {"step": feed.steps.get(piece["task_id"]), **piece})
            bundle = Bundle((event,))
            for watcher in feed.watchers:
                watcher.put_token(bundle)

    async def is_all_told(self, subject: Subject, after: Position) -> bool:
        """Whether the subject has ended and nothing newer than `after` is to be told of it."""
        batch, status = await self._run(read_after, subject, after)
        if batch is None or not status.is_final or batch.is_full:
            return False
        return not subject.part_of(transitions(batch))

    async def follow(
        self, subject: Subject, after: Position | None
    ) -> AsyncGenerator[Bundle, None]:
        """Snapshot (unless `after` can be resumed), transitions, and the end of the subject.

        An empty bundle says that there was nothing for a while.
        """
        async with self.watcher(subject.root_id) as (feed, watcher):
            position, is_full = after, True
            while position is not None and is_full:
                batch, status = await self._run(read_after, subject, position)
                if batch is None:
                    position = None
                    break
                position, is_full = batch.end, batch.is_full
                if missed := subject.part_of(transitions(batch)):
                    yield missed
            if position is None:
                snapshot = await feed.snapshot(self._database, subject, watcher)
                position, status = snapshot.position, Status(snapshot.event.data["status"])
                yield Bundle((snapshot.event,))
            if status.is_final:
                yield _end(status)
                return
            async with contextlib.aclosing(_live(subject, watcher, position)) as live:
                async for bundle in live:
                    yield bundle

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await run_in_threadpool(self._database.run, function, *args)


async def _live(
    subject: Subject, watcher: Watcher, position: Position
) -> AsyncGenerator[Bundle, None]:
    """What arrives and is new to one who stands at `position`, until the end or he is dropped."""
    ended, is_full = None, False
    silence = Alarm(KEEP_ALIVE_SECONDS, watcher.put_sign_of_life)
    silence.set()
    try:
        while True:
            arrived = await watcher.next()
            parts: list[Bundle] = []
            for one in arrived:
                if one is None:
                    return
                if isinstance(one, Told):
                    fresh, position = one.after(position)
                    is_full = one.is_full
                else:
                    fresh = one
                parts.append(subject.part_of(fresh))
            bundle = parts[0] if len(parts) == 1 else Bundle(chain.from_iterable(parts))
            if status := bundle.statuses.get(subject.task_id):
                ended = status if status.is_final else None  # None: revived
            if bundle or NOTHING in arrived:
                yield bundle
                silence.set()
            if ended and not is_full:
                yield _end(ended)
                return
    finally:
        silence.end()


def _end(status: Status) -> Bundle:
    return Bundle((StreamEvent("end", {"status": status}),))


def read_after(
    conn: db.Connection, subject: Subject, after: Position
) -> tuple[Batch | None, Status]:
    """What came after a position (None: it cannot be used) and the status behind it."""
    with db.transaction(conn, "ISOLATION LEVEL REPEATABLE READ"):
        status = Status(subject.read_status(conn))
        return events.read_events(conn, subject.root_id, after), status


def read_snapshot(conn: db.Connection, subject: Subject) -> Snapshot:
    """Where a subject stands, and the place in the stream of events at which it stands so."""
    with db.transaction(conn, "ISOLATION LEVEL REPEATABLE READ"):
        state, position = subject.read_state(conn), events.here(conn, subject.root_id)
    event = StreamEvent("snapshot", state)
    _ = event.json  # written out here: it may be long, and others wait for the event loop
    return Snapshot(subject.task_id, event, position)

"""The way in: requests that come at the same time are stored by one writer in one transaction.

A lone request is written at once; while it is, others gather and go together. What is
acknowledged is committed. One item that is bad, or whose key another transaction holds, is
tried again alone and holds up no other. One with a name goes alone at once: it may well be taken.

Requests live on the event loop, and what stores them on threads. Both ways between them are taken
once for many: what one turn of the loop has brought goes to the writer as one list, and the
answers to a batch come back in one call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import psycopg2
import psycopg2.errors

import db
from api.database import Database
from connection import impatient
from db import Answer, NewTask, Submitted
from errors import DatabaseUnavailable

logger = logging.getLogger(__name__)

ENDING = "the API is stopping; try again shortly"
LARGEST_BATCH = 200
MOST_WAITING = 10_000
TOO_MANY = f"{MOST_WAITING} submissions are waiting already; try again shortly"
# A batch, and then each of its items alone, waits so long for a key that another transaction
# holds; who waits longer does it in few threads, where only his like wait with him.
IMPATIENT_SECONDS = 0.1
THREADS_FOR_LONE_ITEMS = 2
THREADS_FOR_BLOCKED_ITEMS = 2
BLOCKED = (
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.SerializationFailure,
)

Item = tuple[NewTask, "asyncio.Future[Submitted]"]


class SubmitWriter:
    """Stores tasks for many requests at once. `open` before use, `close` after the last."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # These four are touched by the loop's thread only.
        self._is_ending = False
        self._gathered: list[Item] = []
        self._unnamed = self._named = 0  # how many are not answered yet
        self._waiting: SimpleQueue[list[Item] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="submit-writer", daemon=True)
        self._alone = ThreadPoolExecutor(THREADS_FOR_LONE_ITEMS, "submit-alone")
        self._patient = ThreadPoolExecutor(THREADS_FOR_BLOCKED_ITEMS, "submit-blocked")

    def open(self) -> None:
        """On the event loop that `submit` will be called on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Store what has come, refuse what comes, and end; a second call does nothing.

        On another thread than the loop's, which has to tell the answers.
        """
        self._loop.call_soon_threadsafe(self._begin_to_end)
        self._thread.join()
        self._alone.shutdown()
        self._patient.shutdown()

    async def submit(self, task: NewTask) -> Submitted:
        """Return when it is committed; raises KeyReused, NameInUse or DatabaseUnavailable.

        A client that hangs up takes nothing back: what was handed over here is written.
        """
        if self._is_ending:
            raise DatabaseUnavailable(ENDING)
        stored: asyncio.Future[Submitted] = self._loop.create_future()
        if task.name is None:
            if self._unnamed >= MOST_WAITING:
                raise DatabaseUnavailable(TOO_MANY)
            self._unnamed += 1
            if not self._gathered:
                self._loop.call_soon(self._hand_over)
            self._gathered.append((task, stored))
        else:
            if self._named >= MOST_WAITING:
                raise DatabaseUnavailable(TOO_MANY)
            self._named += 1
            self._alone.submit(self._write_alone, (task, stored))
        return await stored

    def _hand_over(self) -> None:
        """Give the writer what has come in this turn of the loop."""
        self._waiting.put(self._gathered)
        self._gathered = []

    def _begin_to_end(self) -> None:
        """Refuse what comes from now on, and let the writer end behind what has come."""
        self._is_ending = True
        self._hand_over()  # its own turn may come behind this one
        self._waiting.put(None)

    # --- on the writer's thread ---

    def _write_all(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, ended = self._gather(first)
            for start in range(0, len(batch), LARGEST_BATCH):
                self._write(batch[start : start + LARGEST_BATCH])
            if ended:
                return

    def _gather(self, batch: list[Item]) -> tuple[list[Item], bool]:
        """`batch` and what else waits by now; whether the end was among it."""
        while len(batch) < LARGEST_BATCH:
            try:
                items = self._waiting.get_nowait()
            except Empty:
                break
            if items is None:
                return batch, True
            batch += items
        return batch, False

    def _write(self, batch: list[Item]) -> None:
        try:
            answers = self._store([task for task, _ in batch], IMPATIENT_SECONDS)
        except Exception as failed:
            if _blames_one_item(failed):
                for item in batch:
                    self._alone.submit(self._write_alone, item)
            else:
                self._tell(batch, [failed] * len(batch))
        else:
            self._tell(batch, answers)

    # --- on any of the threads ---

    def _write_alone(self, item: Item) -> None:
        """Store one item of a batch that could not be stored; if it is blocked, wait elsewhere."""
        try:
            self._tell([item], self._store([item[0]], IMPATIENT_SECONDS))
        except Exception as failed:
            if isinstance(failed.__cause__, psycopg2.errors.LockNotAvailable):
                self._patient.submit(self._write_patiently, item)
            else:
                self._tell([item], [failed])

    def _write_patiently(self, item: Item) -> None:
        try:
            self._tell([item], self._store([item[0]]))
        except Exception as failed:
            self._tell([item], [failed])

    def _store(self, tasks: list[NewTask], lock_timeout_seconds: float = math.inf) -> list[Answer]:
        with (
            self._database.connection() as conn,
            impatient(conn, lock_timeout_seconds),
        ):
            return db.submit_tasks(conn, tasks)

    def _tell(self, batch: list[Item], answers: Sequence[Answer | Exception]) -> None:
        self._loop.call_soon_threadsafe(self._told, batch, answers)

    # --- on the loop again ---

    def _told(self, batch: list[Item], answers: Sequence[Answer | Exception]) -> None:
        for (task, stored), answer in zip(batch, answers, strict=True):
            if task.name is None:
                self._unnamed -= 1
            else:
                self._named -= 1
            if stored.done():  # cancelled: nobody waits for it any more
                continue
            if isinstance(answer, Exception):
                stored.set_exception(answer)
            else:
                stored.set_result(answer)


def _blames_one_item(failed: Exception) -> bool:
    """Whether Postgres refused a batch for what is in it; then nothing of it was stored."""
    cause = failed.__cause__ if isinstance(failed, DatabaseUnavailable) else failed
    if isinstance(cause, BLOCKED):
        return True
    return isinstance(cause, psycopg2.Error) and not isinstance(failed, DatabaseUnavailable)

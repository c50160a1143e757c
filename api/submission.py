"""The way in: requests that come at the same time are stored by one writer in one transaction.

A lone request is written at once; while it is, others gather and go together. What is
acknowledged is committed. One item that is bad, or whose key another transaction holds, is
tried again alone and holds up no other. One with a name goes alone at once: it may well be taken.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import psycopg2
import psycopg2.errors

import db
from api.database import Database
from connection import impatient
from db import Answer, NewTask, Submitted
from errors import DatabaseUnavailable, OrchestratorError

logger = logging.getLogger(__name__)

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

Item = tuple[NewTask, "Future[Submitted]"]


class SubmitWriter:
    """Stores tasks for many requests at once. `open` before use, `close` after the last."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: queue.Queue[Item | None] = queue.Queue(MOST_WAITING)
        self._places_for_named = threading.BoundedSemaphore(MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="submit-writer", daemon=True)
        self._alone = ThreadPoolExecutor(THREADS_FOR_LONE_ITEMS, "submit-alone")
        self._patient = ThreadPoolExecutor(THREADS_FOR_BLOCKED_ITEMS, "submit-blocked")

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Store what waits, then end."""
        self._waiting.put(None)
        self._thread.join()
        self._alone.shutdown()
        self._patient.shutdown()

    async def submit(self, task: NewTask) -> Submitted:
        """Return when it is committed; raises KeyReused, NameInUse or DatabaseUnavailable."""
        stored: Future[Submitted] = Future()
        if task.name is None:
            try:
                self._waiting.put_nowait((task, stored))
            except queue.Full:
                raise DatabaseUnavailable(TOO_MANY) from None
        else:
            if not self._places_for_named.acquire(blocking=False):
                raise DatabaseUnavailable(TOO_MANY)
            stored.add_done_callback(lambda _: self._places_for_named.release())
            self._alone.submit(self._write_alone, (task, stored))
        # Shielded: a client that hangs up must not take back what is being written.
        return await asyncio.shield(asyncio.wrap_future(stored))

    def _write_all(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, ended = self._gather(first)
            self._write(batch)
            if ended:
                return

    def _gather(self, first: Item) -> tuple[list[Item], bool]:
        """`first` and what else waits by now; whether the end was among it."""
        batch = [first]
        while len(batch) < LARGEST_BATCH:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                break
            if item is None:
                return batch, True
            batch.append(item)
        return batch, False

    def _write(self, batch: list[Item]) -> None:
        try:
            answers = self._store([task for task, _ in batch], IMPATIENT_SECONDS)
        except Exception as failed:
            if _blames_one_item(failed):
                for item in batch:
                    self._alone.submit(self._write_alone, item)
            else:
                for _, stored in batch:
                    stored.set_exception(failed)
        else:
            _tell(batch, answers)

    def _write_alone(self, item: Item) -> None:
        """Store one item of a batch that could not be stored; if it is blocked, wait elsewhere."""
        try:
            _tell([item], self._store([item[0]], IMPATIENT_SECONDS))
        except Exception as failed:
            if isinstance(failed.__cause__, psycopg2.errors.LockNotAvailable):
                self._patient.submit(self._write_patiently, item)
            else:
                item[1].set_exception(failed)

    def _write_patiently(self, item: Item) -> None:
        try:
            _tell([item], self._store([item[0]]))
        except Exception as failed:
            item[1].set_exception(failed)

    def _store(self, tasks: list[NewTask], lock_timeout_seconds: float = math.inf) -> list[Answer]:
        with (
            self._database.connection() as conn,
            impatient(conn, lock_timeout_seconds),
        ):
            return db.submit_tasks(conn, tasks)


def _blames_one_item(failed: Exception) -> bool:
    """Whether Postgres refused a batch for what is in it; then nothing of it was stored."""
    cause = failed.__cause__ if isinstance(failed, DatabaseUnavailable) else failed
    if isinstance(cause, BLOCKED):
        return True
    return isinstance(cause, psycopg2.Error) and not isinstance(failed, DatabaseUnavailable)


def _tell(batch: list[Item], answers: list[Answer]) -> None:
    for (_, stored), answer in zip(batch, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            stored.set_exception(answer)
        else:
            stored.set_result(answer)

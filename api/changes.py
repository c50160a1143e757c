"""Who waits for a task hears of its changes: one LISTEN connection per API process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import select
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import db
from config import Settings
from errors import DatabaseUnavailable
from queries.tokens import TOKENS_CHANNEL

logger = logging.getLogger(__name__)

CHANGED_CHANNEL = "tasks_changed"
PING_SECONDS = 5.0


class Changes:
    """Wakes coroutines when their task changed. A wake-up is a hint: read the row to know.

    The listener hears nothing while Postgres is away, so everybody is woken when it is back;
    and nobody may wait longer than he could bear to miss a wake-up. `on_token` gets the pieces of
    answers that come by.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._waiting: defaultdict[int, set[asyncio.Event]] = defaultdict(set)
        self.on_token: Callable[[dict[str, Any]], None] = lambda piece: None
        self._ended = threading.Event()
        self._end_in, self._end_out = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="changes", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._end_in.close()  # the other end becomes readable
        self._thread.join()
        self._end_out.close()

    @contextlib.contextmanager
    def of_task(self, task_id: int) -> Iterator[asyncio.Event]:
        """An event that is set at each change of the task; the waiter clears it."""
        changed = asyncio.Event()
        self._waiting[task_id].add(changed)
        try:
            yield changed
        finally:
            self._waiting[task_id].discard(changed)
            if not self._waiting[task_id]:
                del self._waiting[task_id]

    def _tell(self, arrived: list[tuple[str, str]]) -> None:
        for channel, payload in arrived:
            if channel == TOKENS_CHANNEL:
                self.on_token(json.loads(payload))
            else:
                self._wake(map(int, payload.split(",")) if payload else list(self._waiting))

    def _wake(self, task_ids: Iterable[int]) -> None:
        for task_id in task_ids:
            for changed in self._waiting.get(task_id, ()):
                changed.set()

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                self._listen_once()
            except DatabaseUnavailable as away:
                logger.warning("Live changes are not heard for now: %s", away)
                self._ended.wait(random.uniform(0.5, 2.0))

    def _listen_once(self) -> None:
        settings = self._settings
        conn = db.listen(
            settings.database_listen_url,
            settings.database,
            "orchestrator changes",
            CHANGED_CHANNEL,
            TOKENS_CHANNEL,
        )
        with contextlib.closing(conn):
            self._loop.call_soon_threadsafe(self._tell, [(CHANGED_CHANNEL, "")])  # was missed
            poller = select.poll()
            poller.register(conn.fileno(), select.POLLIN)
            poller.register(self._end_out.fileno(), select.POLLIN)
            while not self._ended.is_set():
                if not poller.poll(PING_SECONDS * 1000):
                    db.ping(conn)  # a half-open socket is silent for ever
                if arrived := db.heard(conn):
                    self._loop.call_soon_threadsafe(
                        self._tell, [(one.channel, one.payload) for one in arrived]
                    )

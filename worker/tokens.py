"""Sends the pieces of answers that somebody watches, coalesced, on a connection of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import db
from config import Settings
from queries.tokens import send_tokens

logger = logging.getLogger(__name__)

WATCHED_SECONDS = 15.0  # how long one word of a watcher counts
COALESCE_SECONDS = 0.1
LONGEST_PIECE = 1500  # characters; a notification has a limit of 8,000 bytes
MOST_UNSENT = 1000  # pieces; beyond that they are dropped

Source = tuple[int, int, int]  # root_id, task_id, attempt


class TokenSender(threading.Thread):
    """Takes pieces from any thread, and forgets those it cannot send soon."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(name="tokens", daemon=True)
        self._settings = settings
        self._application = f"{name} tokens"
        self._lock = threading.Lock()
        self._watched_until: dict[int, float] = {}
        self._unsent: list[tuple[Source, str]] = []
        self._filled = threading.Event()
        self._conn: db.Connection | None = None

    def watch(self, root_ids: Iterable[int]) -> None:
        """Somebody watches these roots: send their pieces for a while."""
        until = time.monotonic() + WATCHED_SECONDS
        with self._lock:
            now = time.monotonic()
            watched = {root: end for root, end in self._watched_until.items() if end > now}
            self._watched_until = {**watched, **dict.fromkeys(root_ids, until)}

    def put(self, source: Source, text: str) -> None:
        """Queue a piece of an answer, if its root is watched and the queue is not full."""
        if self._watched_until.get(source[0], 0.0) < time.monotonic():
            return
        with self._lock:
            if len(self._unsent) < MOST_UNSENT:
                self._unsent.append((source, text))
        if not self.is_alive():
            self.start()
        self._filled.set()

    def run(self) -> None:
        while True:
            self._filled.wait()
            time.sleep(COALESCE_SECONDS)
            with self._lock:
                unsent, self._unsent = self._unsent, []
                self._filled.clear()
            try:
                self._send(unsent)
            except Exception as failed:  # nobody depends on it
                logger.debug("Pieces of answers were dropped: %s", failed)
                self._conn = None

    def _send(self, unsent: list[tuple[Source, str]]) -> None:
        if self._conn is None or self._conn.closed:
            self._conn = db.connect(
                self._settings.database_url, self._settings.database, self._application
            )
        send_tokens(self._conn, coalesced(unsent))


def coalesced(unsent: list[tuple[Source, str]]) -> list[dict[str, object]]:
    """The pieces of each attempt joined, in order, none longer than LONGEST_PIECE."""
    texts: dict[Source, str] = {}
    for source, text in unsent:
        texts[source] = texts.get(source, "") + text
    return [
        {
            "root_id": root_id,
            "task_id": task_id,
            "attempt": attempt,
            "text": text[start : start + LONGEST_PIECE],
        }
        for (root_id, task_id, attempt), text in texts.items()
        for start in range(0, len(text), LONGEST_PIECE)
    ]

"""Sends what is live and somebody watches: pieces of answers, coalesced, and which node of a job
starts and finishes. It has a connection of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import db
from config import Settings
from errors import words_of
from queries.tokens import send_tokens

logger = logging.getLogger(__name__)

WATCHED_SECONDS = 15.0  # how long one word of a watcher counts
COALESCE_SECONDS = 0.1
LONGEST_PIECE = 1500  # characters; a notification has a limit of 8,000 bytes
MOST_UNSENT = 1000  # pieces; beyond that they are dropped

LONGEST_NODE = 200  # characters of its name
LONGEST_FLUSH_SECONDS = 0.5


class Source(NamedTuple):
    """Whose model speaks: an attempt of a task, in a job with the node that asked."""

    root_id: int
    task_id: int
    attempt: int
    node: str | None = None


class Unsent(NamedTuple):
    """A piece of an answer; or with a `phase`, started or finished, what its node does."""

    source: Source
    text: str = ""
    phase: str | None = None


class TokenSender(threading.Thread):
    """Takes pieces from any thread, and forgets those it cannot send soon."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(name="tokens", daemon=True)
        self._settings = settings
        self._application = f"{name} tokens"
        self._lock = threading.Lock()
        self._watched_until: dict[int, float] = {}
        self._unsent: list[Unsent] = []
        self._filled = threading.Event()
        self._hurried = threading.Event()
        self._all_sent = threading.Event()
        self._conn: db.Connection | None = None

    def watch(self, root_ids: Sequence[int]) -> None:
        """Somebody watches these roots: send their pieces for a while."""
        if not root_ids:
            return
        until = time.monotonic() + WATCHED_SECONDS
        with self._lock:
            now = time.monotonic()
            watched = {root: end for root, end in self._watched_until.items() if end > now}
            self._watched_until = {**watched, **dict.fromkeys(root_ids, until)}

    def put(self, unsent: Unsent) -> None:
        """Queue it, if its root is watched and the queue is not full."""
        if self._watched_until.get(unsent.source.root_id, 0.0) < time.monotonic():
            return
        with self._lock:
            if len(self._unsent) < MOST_UNSENT:
                self._unsent.append(unsent)
                self._all_sent.clear()
            if self.ident is None:  # two threads must not both start it
                self.start()
        self._filled.set()

    def flush(self) -> None:
        """Send what is queued, now: what a task has said is to be heard before its end is.

        For a moment only; a watcher can do without, a settle cannot wait for long.
        """
        if self.ident is None or self._all_sent.is_set():
            return
        self._hurried.set()
        self._all_sent.wait(LONGEST_FLUSH_SECONDS)

    def run(self) -> None:
        while True:
            self._filled.wait()
            self._hurried.wait(COALESCE_SECONDS)
            with self._lock:
                unsent, self._unsent = self._unsent, []
                self._filled.clear()
                self._hurried.clear()
            try:
                self._send(unsent)
            except Exception as failed:  # nobody depends on it
                logger.debug("Pieces of answers were dropped: %s", words_of(failed))
                self._conn = None
            with self._lock:
                if not self._unsent:
                    self._all_sent.set()

    def _send(self, unsent: list[Unsent]) -> None:
        if self._conn is None or self._conn.closed:
            self._conn = db.connect(
                self._settings.database_url, self._settings.database, self._application
            )
        send_tokens(self._conn, coalesced(unsent))


def coalesced(unsent: Iterable[Unsent]) -> list[dict[str, object]]:
    """The pieces of each source joined, none longer than LONGEST_PIECE; in order, and a node's
    between its start and its finish."""
    messages: list[tuple[Source, list[str], str | None]] = []
    texts: dict[Source, list[str]] = {}
    for source, text, phase in unsent:
        if phase is not None:
            texts.pop(source, None)
            messages.append((source, [], phase))
        elif source in texts:
            texts[source].append(text)
        else:
            texts[source] = [text]
            messages.append((source, texts[source], None))
    return [part for message in messages for part in _parts(*message)]


def _parts(source: Source, pieces: list[str], phase: str | None) -> Iterable[dict[str, object]]:
    head: dict[str, object] = {
        "root_id": source.root_id,
        "task_id": source.task_id,
        "attempt": source.attempt,
    }
    if source.node is not None:
        head["node"] = source.node[:LONGEST_NODE]
    if phase is not None:
        return [{**head, "phase": phase}]
    text = "".join(pieces)
    return [
        {**head, "text": text[start : start + LONGEST_PIECE]}
        for start in range(0, len(text), LONGEST_PIECE)
    ]

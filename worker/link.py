"""The main thread's connection to Postgres, and the listener beside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import db
from config import Settings
from queries.schema import ensure_schema
from queries.tokens import WATCHED_CHANNEL

CLAIMABLE_CHANNEL = "tasks_claimable"
PING_SECONDS = 10.0
# A listener that does not answer so long is replaced. A process that was told to stop waits no
# longer than this for any reply.
SHORT_REPLY_SECONDS = 5.0


class Link:
    """Two connections that are opened together when they are needed, and closed together.

    `on_first_open` is called once, when Postgres has answered and its schema is ours.
    """

    def __init__(self, settings: Settings, name: str, on_first_open: Callable[[], None]) -> None:
        self._settings = settings
        self._name = name
        self._on_first_open = on_first_open
        self._conn: db.Connection | None = None
        self._listener: db.Connection | None = None
        self._next_ping = 0.0
        self._is_first = True
        self._is_hurried = False

    def open(self) -> db.Connection:
        """The connection; raises DatabaseUnavailable or SchemaOutdated."""
        if self._conn is None or self._conn.closed:
            self.close()
            self._conn = self._open_both()
        return self._conn

    def _open_both(self) -> db.Connection:
        """Open both, or neither: who claims without ears hears of nothing that becomes due."""
        settings = self._settings
        with contextlib.ExitStack() as opened:
            conn = db.connect(settings.database_url, settings.database, self._name)
            opened.callback(conn.close)
            if self._is_first:  # later a newer schema is no reason to drop what runs
                ensure_schema(conn)
            listener = db.listen(
                settings.database_listen_url,
                settings.database,
                f"{self._name} listen",
                CLAIMABLE_CHANNEL,
                WATCHED_CHANNEL,
            )
            opened.callback(listener.close)
            shorter = min(listener.reply_timeout_seconds, SHORT_REPLY_SECONDS)
            listener.reply_timeout_seconds = shorter
            if self._is_first:
                self._on_first_open()
                self._is_first = False
            opened.pop_all()
        self._listener = listener
        self._next_ping = time.monotonic() + PING_SECONDS
        if self._is_hurried:
            conn.reply_timeout_seconds = shorter
        return conn

    def close(self) -> None:
        for conn in (self._conn, self._listener):
            if conn is not None:
                conn.close()
        self._conn = self._listener = None

    def hurry(self) -> None:
        """From now on wait for no reply for long; may be called from a signal handler."""
        self._is_hurried = True
        if (conn := self._conn) is not None:
            conn.reply_timeout_seconds = min(conn.reply_timeout_seconds, SHORT_REPLY_SECONDS)

    def ear(self) -> int | None:
        """The descriptor on which notifications arrive, if there is one now."""
        return None if self._listener is None else self._listener.fileno()

    def has_heard(self) -> bool:
        """Whether a notification came with the answer to a ping: no descriptor tells of it."""
        return self._listener is not None and bool(self._listener.notifies)

    def hear(self) -> tuple[set[int], list[int]]:
        """What has arrived: who has made something claimable, as backends; roots that somebody
        watches."""
        if self._listener is None:
            return set(), []
        heard = db.heard(self._listener)
        senders = {one.sender for one in heard if one.channel == CLAIMABLE_CHANNEL}
        watched = [
            int(root_id)
            for one in heard
            if one.channel == WATCHED_CHANNEL
            for root_id in one.payload.split(",")
            if root_id.isascii() and root_id.isdigit()
        ]
        return senders, watched

    def ping_listener(self) -> None:
        """A half-open listener is silent for ever: now and then it has to answer."""
        if self._listener is not None and time.monotonic() >= self._next_ping:
            self._next_ping = time.monotonic() + PING_SECONDS
            db.ping(self._listener)

"""Connections lent to the threads of a process."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import psycopg2.extensions

from config import DatabaseSettings
from connection import Connection, connect
from errors import DatabaseUnavailable


class Pool:
    """At most `pool_size` connections, lent to threads; a lender waits, then hears 503's reason.

    Nothing is opened before it is needed, so a process may start while Postgres is away.
    """

    def __init__(self, url: str, settings: DatabaseSettings, application: str) -> None:
        self._url = url
        self._settings = settings
        self._application = application
        self._places = threading.BoundedSemaphore(settings.pool_size)
        self._idle: list[Connection] = []
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a live connection; DatabaseUnavailable when none is to be had in time."""
        if not self._places.acquire(timeout=self._settings.pool_wait_seconds):
            raise DatabaseUnavailable(
                f"all {self._settings.pool_size} database connections are busy; try again shortly"
            )
        try:
            conn = self._take()
            try:
                yield conn
            finally:
                self._give_back(conn)
        finally:
            self._places.release()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection:
        while self._idle:
            conn = self._idle.pop()
            if looks_alive(conn):
                return conn
            conn.close()
        return connect(self._url, self._settings, self._application)

    def _give_back(self, conn: Connection) -> None:
        in_use = conn.info.transaction_status != psycopg2.extensions.TRANSACTION_STATUS_IDLE
        if self._closed or conn.closed or in_use:
            conn.close()
        else:
            self._idle.append(conn)


class _Session(Protocol):
    """A connection of psycopg2, or of psycopg 3."""

    @property
    def closed(self) -> int: ...
    def fileno(self) -> int: ...


def looks_alive(conn: _Session) -> bool:
    """An idle connection with something to read was told goodbye by the server."""
    if conn.closed:
        return False
    poller = select.poll()
    poller.register(conn.fileno(), select.POLLIN)
    return not poller.poll(0)

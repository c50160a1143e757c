"""Connections to Postgres: one statement or several as a transaction, and LISTEN.

A connection is in autocommit mode and has no session state, so that DATABASE_URL may point at
a transaction pooler. `fetch` runs one statement as one transaction in one round trip;
`transaction` spans several. No wait is endless: every wait for the server has a limit, and the
connection that exceeded it is given up.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import psycopg2
import psycopg2.errors
import psycopg2.extensions

from config import DatabaseSettings
from errors import DatabaseUnavailable, words_of

Row = dict[str, Any]


class Cursor(psycopg2.extensions.cursor):
    """Its rows are dicts, made at a fraction of what those of psycopg2's RealDictCursor cost."""

    def execute(self, query: Any, values: Any = None) -> None:
        conn = cast("Connection", self.connection)
        before, conn.before = conn.before, ""
        super().execute(before + query if before else query, values)

    def fetchall(self) -> list[Row]:  # type: ignore[override]
        names = [column.name for column in self.description or ()]
        return [dict(zip(names, row, strict=True)) for row in super().fetchall()]


class Connection(psycopg2.extensions.connection):
    """A connection that knows how long its owner waits for the server."""

    reply_timeout_seconds: float = 30.0
    lock_timeout_seconds: float = 5.0
    before = ""  # goes in front of the next statement, in the same message


# The shortest limit that a connection can have; in between, only a reply or a signal wakes.
LOOK_AGAIN_SECONDS = 0.1


def _wait_with_a_limit(conn: psycopg2.extensions.connection) -> None:
    """psycopg2's wait callback: poll the socket instead of sitting in libpq.

    So Python's signal handlers run at once, and a server that stalls, or a half-open socket,
    costs `reply_timeout_seconds` and not for ever. Raising here closes the connection.
    """
    began = time.monotonic()
    while (state := conn.poll()) != psycopg2.extensions.POLL_OK:
        events = select.POLLIN if state == psycopg2.extensions.POLL_READ else select.POLLOUT
        poller = select.poll()
        poller.register(conn.fileno(), events)
        while not poller.poll(LOOK_AGAIN_SECONDS * 1000):
            # Looked at anew each time: a process that is told to stop shortens it.
            limit = conn.reply_timeout_seconds if isinstance(conn, Connection) else math.inf
            if time.monotonic() - began >= limit:
                raise psycopg2.OperationalError(f"no reply from Postgres in {limit:g} s")


# Answers of Postgres that say nothing about the statement: the server is stopping, full, a
# standby, or somebody holds the row. Everything else psycopg2 raises is a fault of ours.
UNAVAILABLE = (
    psycopg2.OperationalError,
    psycopg2.InterfaceError,
    psycopg2.errors.ReadOnlySqlTransaction,
)


# "Program limit exceeded" is such a fault, though psycopg2 takes it for an OperationalError.
TOO_LARGE_CLASS = "54"


class _UnavailableInPlainWords:
    """Turns the driver's ways to say "not now" into DatabaseUnavailable.

    No generator of contextlib: it is around every statement, and work waits for some of them.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failed: BaseException | None, traceback: object) -> None:
        if not isinstance(failed, UNAVAILABLE):
            return
        if not (failed.pgcode or "").startswith(TOO_LARGE_CLASS):
            reason = words_of(failed)
            raise DatabaseUnavailable(f"the database cannot be used now: {reason}") from failed


unavailable_in_plain_words = _UnavailableInPlainWords()


def connect(url: str, settings: DatabaseSettings, application: str) -> Connection:
    """Open a connection in autocommit mode; DatabaseUnavailable if that is not possible."""

    # The callback is the whole process's: a program that only imports this module to submit
    # over a connection of its own keeps its own way of waiting.
    psycopg2.extensions.set_wait_callback(_wait_with_a_limit)

    class Configured(Connection):
        # While it connects, the wait callback sees the class; afterwards the instance.
        reply_timeout_seconds = settings.connect_timeout_seconds
        lock_timeout_seconds = settings.lock_timeout_seconds

    with unavailable_in_plain_words:
        conn: Connection = psycopg2.connect(
            url,
            connection_factory=Configured,
            application_name=application,
            client_encoding="utf8",
            keepalives_idle=10,
            keepalives_interval=3,
            keepalives_count=3,
            tcp_user_timeout=15_000,
        )
        conn.autocommit = True
    conn.reply_timeout_seconds = settings.reply_timeout_seconds
    return conn


FROZEN_SECONDS = 10


@contextmanager
def impatient(conn: Connection, lock_timeout_seconds: float) -> Iterator[None]:
    """Inside the block, wait for another transaction's lock no longer than this."""
    usual = conn.lock_timeout_seconds
    conn.lock_timeout_seconds = min(usual, lock_timeout_seconds)
    try:
        yield
    finally:
        conn.lock_timeout_seconds = usual


def local_timeouts(lock_timeout_seconds: float, reply_timeout_seconds: float) -> str:
    """Limits of one transaction."""
    return _message_timeouts(lock_timeout_seconds, reply_timeout_seconds) + (
        # A process that is frozen between two messages holds its locks no longer.
        f"SET LOCAL idle_in_transaction_session_timeout = {FROZEN_SECONDS * 1000};"
    )


def _message_timeouts(lock_timeout_seconds: float, reply_timeout_seconds: float) -> str:
    """Limits of a transaction that is one message; the server's own end just before ours."""
    return (
        f"SET LOCAL lock_timeout = {int(lock_timeout_seconds * 1000)};"
        f"SET LOCAL statement_timeout = {int(reply_timeout_seconds * 900)};"
    )


def fetch(conn: Connection, statement: str, values: Mapping[str, Any] | None = None) -> list[Row]:
    """Run `statement` as one transaction, in one round trip, and return its rows."""
    with unavailable_in_plain_words, _cursor(conn) as cursor:
        # Several statements in one message are one implicit transaction.
        limits = _message_timeouts(conn.lock_timeout_seconds, conn.reply_timeout_seconds)
        cursor.execute(limits + statement, values or {})
        return cursor.fetchall() if cursor.description else []


@contextmanager
def transaction(conn: Connection, mode: str = "") -> Iterator[Cursor]:
    """BEGIN with that mode; the block; COMMIT, or ROLLBACK if the block raises.

    It begins with the block's first statement, in the same message: one wait less.
    """
    with unavailable_in_plain_words, _cursor(conn) as cursor:
        limits = local_timeouts(conn.lock_timeout_seconds, conn.reply_timeout_seconds)
        conn.before = f"BEGIN {mode};" + limits
        try:
            yield cursor
        except BaseException:
            if not conn.closed and not conn.before:
                cursor.execute("ROLLBACK")
            conn.before = ""
            raise
        if not conn.before:
            cursor.execute("COMMIT")
        conn.before = ""


def _cursor(conn: Connection) -> Cursor:
    return conn.cursor(cursor_factory=Cursor)


def listen(url: str, settings: DatabaseSettings, application: str, *channels: str) -> Connection:
    """A direct connection that hears `channels`; the caller reads what was said before."""
    conn = connect(url, settings, application)
    with unavailable_in_plain_words, _cursor(conn) as cursor:
        cursor.execute(";".join(f"LISTEN {channel}" for channel in channels))
    return conn


class Heard(NamedTuple):
    """A notification."""

    channel: str
    payload: str
    sender: int  # the backend's process id


def heard(conn: Connection) -> list[Heard]:
    """What has arrived on a listening connection, without waiting."""
    with unavailable_in_plain_words:
        conn.poll()
    arrived = [Heard(one.channel, one.payload, one.pid) for one in conn.notifies]
    conn.notifies.clear()
    return arrived


def ping(conn: Connection) -> None:
    """Ask the server for nothing; DatabaseUnavailable if it does not answer."""
    fetch(conn, "SELECT 1")

"""Connections of psycopg 3, which LangGraph's saver works with, kept to our limits and errors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import psycopg
import psycopg.errors
from psycopg import ClientCursor
from psycopg.abc import PQGen
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

from config import DatabaseSettings, Settings
from connection import TOO_LARGE_CLASS, local_timeouts
from errors import DatabaseUnavailable, LeaseLost, words_of
from queries.jobs import LEASE_IS_GONE

Result = TypeVar("Result")


class Connection(psycopg.Connection[DictRow]):
    """A connection that gives up a server that says nothing, as those of connection.py do."""

    settings = DatabaseSettings()

    @property
    def limits(self) -> str:
        """Those of a transaction, as the first statements of its message."""
        settings = self.settings
        return local_timeouts(settings.lock_timeout_seconds, settings.reply_timeout_seconds)

    def wait(self, gen: PQGen[Result], *args: Any, **named: Any) -> Result:
        try:
            return super().wait(self._within(gen), *args, **named)
        except _Silent:
            self.pgconn.finish()
            seconds = self.settings.reply_timeout_seconds
            raise psycopg.OperationalError(f"no reply from Postgres in {seconds:g} s") from None

    def _within(self, gen: PQGen[Result]) -> PQGen[Result]:
        """The same generator, until the server was silent for too long."""
        ends = time.monotonic() + self.settings.reply_timeout_seconds
        try:
            awaited = next(gen)
            while True:
                ready = yield awaited  # also when a moment has passed in which nothing came
                if time.monotonic() >= ends:
                    raise _Silent
                awaited = gen.send(ready)
        except StopIteration as ended:
            result: Result = ended.value
            return result


class _Silent(Exception):
    """The server has not replied in time."""


CheckpointPool = ConnectionPool[Connection]


def open_pool(settings: Settings) -> CheckpointPool:
    """A pool for the savers of one process. It connects when a connection is asked for."""
    database = settings.database

    class Configured(Connection):
        pass

    Configured.settings = database
    return ConnectionPool(
        settings.database_url,
        connection_class=Configured,
        min_size=0,
        max_size=settings.agents.pool_size,
        timeout=database.pool_wait_seconds,
        # One that asks anew after this makes it try anew, however long the server was away.
        reconnect_timeout=database.pool_wait_seconds / 2,
        open=True,
        name="checkpoints",
        kwargs={
            "autocommit": True,
            "row_factory": dict_row,
            "prepare_threshold": None,
            "application_name": "orchestrator checkpoints",
            "client_encoding": "utf8",
            "connect_timeout": math.ceil(database.connect_timeout_seconds),
            "keepalives_idle": 10,
            "keepalives_interval": 3,
            "keepalives_count": 3,
            "tcp_user_timeout": 15_000,
        },
    )


# Answers of Postgres that say nothing about the statement: see connection.UNAVAILABLE.
UNAVAILABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
)


@contextmanager
def in_plain_words() -> Iterator[None]:
    """Turn the driver's ways to say "not now" into DatabaseUnavailable, and the fence's into
    LeaseLost."""
    try:
        yield
    except psycopg.Error as failed:
        sqlstate = failed.sqlstate or ""
        if sqlstate == LEASE_IS_GONE:
            raise LeaseLost from None
        if not isinstance(failed, UNAVAILABLE) or sqlstate.startswith(TOO_LARGE_CLASS):
            raise
        reason = words_of(failed)
        raise DatabaseUnavailable(f"the database cannot be used now: {reason}") from failed


class Reader(ClientCursor[DictRow]):
    """What LangGraph reads with: each statement is one message and one transaction."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.limits = connection.limits

    def execute(self, query: Any, params: Any = None, **named: Any) -> Self:
        super().execute(self.limits + query, params, **named)
        while self.nextset():
            pass
        return self

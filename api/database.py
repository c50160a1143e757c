"""The API process's way to Postgres: a pool whose schema has been looked at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import db
from config import Settings
from errors import DatabaseUnavailable
from pool import Pool
from queries.schema import ensure_audit_partitions, ensure_schema

P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """Lends connections to a database that has our schema.

    The API may start while Postgres is away: the schema is installed or compared when the first
    connection is to be had.
    """

    def __init__(self, settings: Settings) -> None:
        self._pool = Pool(settings.database_url, settings.database, "orchestrator api")
        self._looked_at = False
        self._looking = threading.Lock()

    @contextmanager
    def connection(self) -> Iterator[db.Connection]:
        """A connection for one transaction; raises DatabaseUnavailable or SchemaOutdated."""
        with self._pool.connection() as conn:
            if not self._looked_at:
                self._look_at_schema(conn)
            yield conn

    def run(
        self,
        function: Callable[Concatenate[db.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `function(connection, …)`."""
        with self.connection() as conn:
            return function(conn, *args, **kwargs)

    def close(self) -> None:
        self._pool.close()

    def _look_at_schema(self, conn: db.Connection) -> None:
        with self._looking:
            if not self._looked_at:
                ensure_schema(conn)
                with contextlib.suppress(DatabaseUnavailable):  # the workers make them as well
                    ensure_audit_partitions(conn)
                self._looked_at = True

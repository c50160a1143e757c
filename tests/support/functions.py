"""Functions of the database as they would be without one of their guards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from db import Connection
from tests.support.rows import sql


@contextmanager
def rewritten(conn: Connection, function: str, changes: Mapping[str, str]) -> Iterator[None]:
    """In the block, each of these pieces of the function's text is another, for everybody."""
    statement = """
        SELECT pg_get_functiondef(oid) AS text FROM pg_proc WHERE proname = %(function)s
    """
    (found,) = sql(conn, statement, function=function)
    changed = found["text"]
    for piece, other in changes.items():
        assert piece in changed
        changed = changed.replace(piece, other)
    sql(conn, changed)
    try:
        yield
    finally:
        sql(conn, found["text"])

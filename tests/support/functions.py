"""Functions of the database: as they would be without a guard, and where they are not yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from config import ROOT
from db import Connection
from tests.support.rows import sql


@contextmanager
def rewritten(conn: Connection, function: str, changes: Mapping[str, str]) -> Iterator[None]:
    """In the block, each of these pieces of the function's text is another, for everybody."""
    statement = """
        SELECT pg_get_functiondef(oid) AS text FROM pg_proc WHERE proname = %(function)s
    """
    (found,) = sql(conn, statement, function=function)
    as_it_is = found["text"].replace("%", "%%")
    changed = as_it_is
    for piece, other in changes.items():
        assert piece in changed
        changed = changed.replace(piece, other)
    sql(conn, changed)
    try:
        yield
    finally:
        sql(conn, as_it_is)


@contextmanager
def borrowed(conn: Connection, *functions: str) -> Iterator[None]:
    """In the block, a database of an older version has these functions of today's."""
    schema = (ROOT / "schema.sql").read_text()
    made = []
    for function in functions:
        found = re.search(rf"^CREATE FUNCTION {function}\(.*?^END \$\$;", schema, re.M | re.S)
        assert found is not None
        sql(conn, found[0])
        made += sql(conn, "SELECT max(oid)::regprocedure::text AS name FROM pg_proc")
    try:
        yield
    finally:
        for function in made:
            sql(conn, f"DROP FUNCTION {function['name']}")

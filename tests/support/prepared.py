"""Questions that tests ask again and again: to plan one takes longer than to answer it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from db import Connection, Row
from tests.support.rows import sql

_prepared: WeakKeyDictionary[Connection, dict[str, str]] = WeakKeyDictionary()


def ask(conn: Connection, statement: str, **values: int) -> list[Row]:
    """As `rows.sql`, but the session keeps the statement and, before long, its plan."""
    names = _prepared.setdefault(conn, {})
    if statement not in names:
        text = statement % {name: f"${place}" for place, name in enumerate(values, start=1)}
        name = f"question_{len(names)}"
        types = f"({', '.join(['bigint'] * len(values))})" if values else ""
        sql(conn, f"PREPARE {name} {types} AS {text}".replace("%", "%%"))
        names[statement] = name
    given = ", ".join(f"%({name})s" for name in values)
    return sql(conn, f"EXECUTE {names[statement]}" + (f"({given})" if given else ""), **values)

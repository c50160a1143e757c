"""The work of the measures: a tool that does nothing but say when it began; and who submits it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence

import db
from bench.common import MeasureFailed, eventually
from config import DatabaseSettings
from db import Connection, NewTask
from queries.runs import NewStep

TOOLS = {"noop": "bench.tool:noop"}  # [tools] of a worker


def noop() -> dict[str, int]:
    """The instant at which it was called, by CLOCK_MONOTONIC."""
    return {"started_ns": time.monotonic_ns()}


def noop_task() -> NewTask:
    return NewTask("default", "tool", {"tool": "noop", "args": {}}, requested_route="none")


def noop_step(name: str, needs: Sequence[str] = ()) -> NewStep:
    return NewStep(name, "tool", {"tool": "noop", "args": {}}, needs)


@contextlib.contextmanager
def connected(url: str) -> Iterator[Connection]:
    """A connection as the product has them."""
    conn = db.connect(url, DatabaseSettings(), "bench")
    try:
        yield conn
    finally:
        conn.close()


COUNT_OPEN = """
SELECT count(*) AS n FROM tasks
WHERE task_id = ANY(%(task_ids)s) AND status IN ('BLOCKED', 'PENDING', 'RUNNING')
"""
READ_STARTS = """
SELECT task_id, (result ->> 'started_ns')::bigint AS started_ns FROM tasks
WHERE task_id = ANY(%(task_ids)s) AND status = 'SUCCEEDED'
"""


def await_starts(conn: Connection, task_ids: Collection[int]) -> dict[int, int]:
    """When the tool was called for each of the tasks, once all have ended."""
    values = {"task_ids": list(task_ids)}
    eventually(lambda: db.fetch(conn, COUNT_OPEN, values)[0]["n"] == 0, what="the end of all tasks")
    started = {row["task_id"]: row["started_ns"] for row in db.fetch(conn, READ_STARTS, values)}
    if len(started) < len(task_ids):
        raise MeasureFailed(f"{len(task_ids) - len(started)} of the tasks have not succeeded")
    return started

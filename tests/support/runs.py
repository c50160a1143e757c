"""Runs in tests: submitted by their edges, and seen as {step: status}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from db import Connection, Row
from queries import runs
from queries.leases import Lease
from queries.runs import NewRun, NewStep
from tests.support import lives, rows
from tests.support.rows import sql

Edges = Mapping[str, Sequence[str]]  # {"c": ["a", "b"]}: c waits for a and b


def new_step(name: str, needs: Sequence[str] = (), **fields: Any) -> NewStep:
    """A call of the tool echo; a name that begins with "approval." waits for a person."""
    kind, payload = "tool", {"tool": "echo", "args": {"said": name}}
    if name.startswith("approval."):
        kind, payload = "approval", {}
    return NewStep(**{"name": name, "kind": kind, "payload": payload, "needs": needs, **fields})


def new_run(edges: Edges, **fields: Any) -> NewRun:
    """A run of such steps, each after those that it needs."""
    steps = [new_step(name, needs) for name, needs in edges.items()]
    return NewRun(**{"tenant": "default", "goal": "a test", "steps": steps, **fields})


def submit(conn: Connection, edges: Edges, **fields: Any) -> int:
    """The number of a new run."""
    return runs.submit_run(conn, new_run(edges, **fields)).task_id


def step_rows(conn: Connection, run_id: int) -> dict[str, Row]:
    """Every column of each step, by its name."""
    statement = "SELECT * FROM tasks WHERE parent_id = %(run_id)s ORDER BY task_id"
    return {row["step"]: row for row in sql(conn, statement, run_id=run_id)}


def statuses(conn: Connection, run_id: int) -> dict[str, str]:
    """The status of each step, and under "" that of the run."""
    steps = {name: row["status"] for name, row in step_rows(conn, run_id).items()}
    return {"": rows.row(conn, run_id)["status"], **steps}


def number(conn: Connection, run_id: int, step: str) -> int:
    return int(step_rows(conn, run_id)[step]["task_id"])


def take(conn: Connection, run_id: int, step: str) -> Lease:
    """RUNNING: claim that step, and nothing else that is due."""
    lease = lives.take(conn, number(conn, run_id, step))
    return Lease(lease.task_id, lease.token, run_id)


def finish(
    conn: Connection, run_id: int, step: str, verdict: str = "succeeded", **fields: Any
) -> None:
    """Claim and settle that step."""
    assert rows.settle(conn, take(conn, run_id, step), verdict, **fields) is not None


def story(conn: Connection, run_id: int) -> list[tuple[str | None, str]]:
    """Step (None: the run itself) and reason of every transition, in the order of the audit."""
    statement = "SELECT step, reason FROM audit_log WHERE run_id = %(run_id)s ORDER BY id"
    return [(row["step"], row["reason"]) for row in sql(conn, statement, run_id=run_id)]

"""Agent jobs for process tests: submitted, decided, and looked at behind the code under test."""

from __future__ import annotations

import json
from typing import Any

import db
from config import DatabaseSettings
from queries.operations import approve_task
from tests.support.processes import eventually
from tests.support.queue import Queue, Row

# Whatever a job leaves behind; `key` puts each in an order that does not change.
TRACES = {
    "checkpoints": "SELECT * FROM checkpoints ORDER BY checkpoint_ns, checkpoint_id",
    "checkpoint_blobs": "SELECT * FROM checkpoint_blobs ORDER BY checkpoint_ns, channel, version",
    "checkpoint_writes": "SELECT * FROM checkpoint_writes ORDER BY checkpoint_id, task_id, idx",
    "job_states": "SELECT * FROM job_states ORDER BY checkpoint_id",
    "model_calls": "SELECT * FROM model_calls ORDER BY call_id",
    "tenant_tokens": "SELECT * FROM tenant_tokens ORDER BY tenant, day",
}


def submit_job(queue: Queue, task: str = "Double a number.", **fields: Any) -> int:
    """Create one agent job; fields are its payload's, or NewTask's."""
    payload: dict[str, Any] = {"task": task, "graph": "team", "max_revisions": 2}
    of_task = {"tenant", "timeout_seconds", "requested_route", "max_retry"}
    payload |= {name: fields.pop(name) for name in list(fields) if name not in of_task}
    (task_id,) = queue.submit("", kind="agent", payload=payload, **fields)
    return task_id


def decide(queue: Queue, task_id: int, approved: bool = True, feedback: str | None = None) -> Row:
    """Decide as the API does; the row that was waiting."""
    row = queue.await_status(task_id, "AWAITING_APPROVAL")
    conn = db.connect(queue.url, DatabaseSettings(), "tests")
    try:
        approve_task(conn, row["tenant"], str(task_id), approved, feedback)
    finally:
        conn.close()
    return row


def traces(queue: Queue) -> dict[str, list[Row]]:
    """All that jobs have written to their own tables."""
    return {name: queue.ask(statement) for name, statement in TRACES.items()}


def nodes_run(queue: Queue, task_id: int) -> list[str]:
    """The nodes that finished, in order, by the checkpoints."""
    rows = queue.ask("SELECT * FROM job_states WHERE task_id = %s ORDER BY checkpoint_id", task_id)
    return [node for row in rows for node in row["nodes"]]


def watched_events(conn: db.Connection, until: Row) -> list[Row]:
    """What a listener to the tokens' channel has heard, once it has heard this."""
    events: list[Row] = []

    def look() -> bool:
        events.extend(json.loads(payload) for _, payload, _ in db.heard(conn))
        return any(event.items() >= until.items() for event in events)

    eventually(look, what=f"{until} is told")
    return events

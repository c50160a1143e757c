"""Brings one task of many to a state, without a worker and past the order of claims."""

from __future__ import annotations

from typing import Any

import db
from config import Retry
from db import Connection
from queries import leases
from queries.leases import Lease, Outcome

# PENDING -> RUNNING (claimed), as claim_tasks does it.
TAKE_TASK = """
UPDATE tasks
SET status = 'RUNNING', reason = 'claimed', due = false, worker = 'w1',
    lease_token = gen_random_uuid(),
    lease_expires_at = current_instant() + interval '1 hour',
    started_at = current_instant(), updated_at = current_instant(),
    attempt = attempt + 1, delivery_count = delivery_count + 1
WHERE task_id = %(task_id)s AND status = 'PENDING'
RETURNING lease_token::text AS token
"""


def take(conn: Connection, task_id: int) -> Lease:
    """RUNNING."""
    (row,) = db.fetch(conn, TAKE_TASK, {"task_id": task_id})
    return Lease(task_id, row["token"])


def end(conn: Connection, task_id: int, verdict: Any, **fields: Any) -> None:
    """Take the task and settle it with that verdict."""
    if verdict == "succeeded":
        fields = {"result": {"text": "done"}, **fields}
    else:
        fields = {"error": f"{verdict}, says the test", **fields}
    outcomes = [(take(conn, task_id), Outcome(verdict, **fields))]
    assert leases.settle_tasks(conn, outcomes, Retry())


INSERT_IN_STATUS = """
INSERT INTO tasks (tenant, kind, payload, parent_id, step, unmet, status, due)
SELECT %(tenant)s, %(kind)s, '{"prompt": "p", "goal": "g"}', run,
       CASE WHEN run IS NOT NULL THEN 'step-' || gen_random_uuid() END,
       (%(status)s = 'BLOCKED' AND run IS NOT NULL)::int, %(status)s::task_status, false
FROM (VALUES (CASE WHEN %(kind)s <> 'run' THEN 0 END)) AS its(run)
RETURNING task_id
"""


def insert(conn: Connection, status: str, tenant: str = "default", kind: str = "approval") -> int:
    """A step that is created BLOCKED or AWAITING_APPROVAL, whose run is not there; or a run."""
    values = {"status": status, "tenant": tenant, "kind": kind}
    return int(db.fetch(conn, INSERT_IN_STATUS, values)[0]["task_id"])


REJECT_TASK = """
UPDATE tasks
SET status = 'FAILED', reason = 'rejected', last_error = 'no', finished_at = current_instant()
WHERE task_id = %(task_id)s
"""


def reject(conn: Connection, task_id: int) -> None:
    """AWAITING_APPROVAL -> FAILED (rejected)."""
    db.fetch(conn, REJECT_TASK, {"task_id": task_id})

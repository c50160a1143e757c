"""What a user does to tasks beside submitting one: a batch, cancel, requeue.

Whether it may be done is decided by the statement that does it, on the row it has locked: so a
cancel and a settle that meet on one row take turns, and the second sees what the first has done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from connection import Connection, Row, fetch, transaction
from db import NewTask, Submitted, number_or_name, submit_tasks_in_tx
from errors import KeyReused, NotFound, StateConflict
from states import Status


@dataclass(frozen=True)
class Changed:
    """A task, as its submitter calls it, and its status after the change."""

    task_id: int | str
    status: Status


# --- batch -----------------------------------------------------------------------------------


def submit_batch(conn: Connection, tasks: Sequence[NewTask]) -> list[Submitted]:
    """Create all of these tasks or none; in order. The first bears the Idempotency-Key of all.

    When the key made a batch before, that one's tasks are the answer; KeyReused if it came with
    another body. Of two that come at once with one key, the second waits for the first.
    """
    while True:
        with transaction(conn) as cursor:
            if first := submit_tasks_in_tx(cursor, tasks[:1]):
                rest = [replace(task, batch_id=first[0].task_id) for task in tasks[1:]]
                return first + submit_tasks_in_tx(cursor, rest)
        # The key is taken. Its holder may have rolled back meanwhile: then insert again.
        if before := _batch_of_key(conn, tasks[0]):
            return before


BATCH_OF_KEY = """
WITH first AS (
    SELECT task_id, status, request_hash
    FROM tasks
    WHERE tenant = %(tenant)s AND idempotency_scope = %(scope)s AND idempotency_key = %(key)s
)
SELECT task_id, status::text, encode(request_hash, 'hex') AS request_hash
FROM first
UNION ALL
SELECT t.task_id, t.status::text, encode(first.request_hash, 'hex')
FROM first JOIN tasks t ON t.batch_id = first.task_id
ORDER BY task_id
"""


def _batch_of_key(conn: Connection, first: NewTask) -> list[Submitted]:
    rows = fetch(
        conn,
        BATCH_OF_KEY,
        {
            "tenant": first.tenant,
            "scope": first.idempotency_scope,
            "key": first.idempotency_key,
        },
    )
    if rows and first.request_hash != bytes.fromhex(rows[0]["request_hash"]):
        raise KeyReused()
    return [Submitted(row["task_id"], row["status"], replayed=True) for row in rows]


# --- one task --------------------------------------------------------------------------------

# By number, or by name: then the newest that bears it.
FIND_TASK = """
SELECT task_id, coalesce(name, task_id::text) AS shown_as, name, status::text, reason
FROM tasks
WHERE tenant = %(tenant)s
  AND (task_id = %(number)s::bigint OR name = %(name)s::text)
  AND kind <> 'run'
ORDER BY task_id DESC
LIMIT 1
"""


def find_task(conn: Connection, tenant: str, reference: str) -> Row:
    """Number, name, status and reason of the tenant's task; NotFound otherwise."""
    rows = fetch(conn, FIND_TASK, {"tenant": tenant, **number_or_name(reference)})
    if not rows:
        raise NotFound()
    return rows[0]


# BLOCKED, PENDING, AWAITING_APPROVAL -> CANCELLED; RUNNING stays so and is asked to stop: from
# then on each way out of it ends in CANCELLED. A final task is left as it is.
CANCEL_UNLESS_FINAL = """
UPDATE tasks
SET status = CASE WHEN status = 'RUNNING' THEN status ELSE 'CANCELLED' END,
    reason = CASE WHEN status = 'RUNNING' THEN reason ELSE 'cancelled' END,
    cancel_requested = true,
    due = false,
    finished_at = CASE WHEN status <> 'RUNNING' THEN current_instant() END,
    updated_at = current_instant()
WHERE task_id = %(task_id)s AND status NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')
RETURNING status::text
"""


def cancel_task(conn: Connection, tenant: str, reference: str) -> Changed:
    """Cancel a task: CANCELLED at once or, while it runs, as soon as its worker hears of it.

    NotFound, or StateConflict when it is final already.
    """
    while True:
        task = find_task(conn, tenant, reference)
        if Status(task["status"]).is_final:
            raise StateConflict(
                f"task {task['shown_as']} is {task['status']} already; "
                "only a task that has not ended can be cancelled"
            )
        if rows := fetch(conn, CANCEL_UNLESS_FINAL, {"task_id": task["task_id"]}):
            return _changed(task, rows[0])
        # It ended between the two statements: look again, to say how.


# FAILED -> PENDING (requeued), due now, as if it had never been tried. What went wrong before is
# in the audit log; `attempt` and what was paid stay.
REQUEUE_IF_DEAD = """
UPDATE tasks
SET status = 'PENDING',
    reason = 'requeued',
    due = true,
    available_at = current_instant(),
    alone = false,
    cancel_requested = false,
    retry_count = 0,
    delivery_count = 0,
    last_error = NULL,
    updated_at = current_instant(),
    finished_at = NULL
WHERE task_id = %(task_id)s AND status = 'FAILED' AND kind <> 'run' AND reason <> 'rejected'
RETURNING status::text
"""


def requeue_task(conn: Connection, tenant: str, reference: str) -> Changed:
    """Give a dead letter a new life; NotFound, or StateConflict when it is no dead letter."""
    while True:
        task = find_task(conn, tenant, reference)
        if task["status"] != Status.FAILED or task["reason"] == "rejected":
            state = "was rejected" if task["reason"] == "rejected" else f"is {task['status']}"
            raise StateConflict(
                f"task {task['shown_as']} {state}; only a dead letter (FAILED) can be requeued"
            )
        if rows := fetch(conn, REQUEUE_IF_DEAD, {"task_id": task["task_id"]}):
            return _changed(task, rows[0])
        # Somebody else requeued it between the two statements: look again, to say so.


def _changed(task: Row, row: Row) -> Changed:
    return Changed(task["name"] or task["task_id"], Status(row["status"]))

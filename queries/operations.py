"""What a user does to tasks beside submitting one: a batch, cancel, approve, requeue.

Whether it may be done is decided by the statement that does it, on the row it has locked: so a
cancel and a settle that meet on one row take turns, and the second sees what the first has done.
What is done to a step is carried on to its run, whose row is locked before: queries/steps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connection import Connection, Cursor, Row, fetch, transaction
from db import NewTask, Submitted, referred_to, submit_batch_in_tx, taken_name_told
from errors import (
    FieldRefused,
    KeyReused,
    NameInUse,
    NotFound,
    StateConflict,
)
from queries.steps import end_steps, lock_runs, revive_run
from states import Kind, Status


@dataclass(frozen=True)
class Changed:
    """A task, as its submitter calls it, and its status after the change."""

    task_id: int | str
    status: Status


# --- batch -----------------------------------------------------------------------------------


def submit_batch(conn: Connection, tasks: Sequence[NewTask]) -> list[Submitted]:
    """Create all of these tasks or none; in order. The first bears the Idempotency-Key of all.

    When the key made a batch before, that one's tasks are the answer; KeyReused if it came with
    another body. Of two that come at once with one key, the second waits for the first. NameInUse
    if one of the tasks has the name of another that has not ended.
    """
    while True:
        if before := _batch_of_key(conn, tasks[0]):
            return before
        try:
            with transaction(conn) as cursor:
                stored = submit_batch_in_tx(cursor, tasks)
                if len(stored) < len(tasks):
                    raise _KeyTaken
                return stored
        except _KeyTaken:
            pass  # by a holder who may have rolled back meanwhile: look again, then insert again
        except NameInUse:
            # Of two that come at once with one key, the second may meet the first's names first.
            if before := _batch_of_key(conn, tasks[0]):
                return before
            raise


class _KeyTaken(Exception):
    """Nothing of the batch is to be stored."""


# No join: where few tasks are in batches, the planner would merge, and read all that are.
BATCH_OF_KEY = """
WITH first AS (
    SELECT task_id, name, status, request_hash
    FROM tasks
    WHERE tenant = %(tenant)s AND idempotency_scope = %(scope)s AND idempotency_key = %(key)s
)
SELECT task_id, name, status::text, encode(request_hash, 'hex') AS request_hash
FROM first
UNION ALL
SELECT task_id, name, status::text, (SELECT encode(request_hash, 'hex') FROM first)
FROM tasks
WHERE batch_id = (SELECT task_id FROM first)
ORDER BY task_id
"""


def _batch_of_key(conn: Connection, first: NewTask) -> list[Submitted]:
    if first.idempotency_key is None:
        return []
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
    return [Submitted(row["task_id"], row["status"], True, row["name"]) for row in rows]


# --- one task --------------------------------------------------------------------------------

# By number, or by name: then the newest that bears it.
FIND_TASK = """
SELECT task_id, coalesce(name, task_id::text) AS shown_as, name, kind, status::text, reason,
       parent_id AS run_id, gate ->> 'artefact' AS artefact
FROM tasks
WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
  AND (task_id = %(number)s::bigint OR name = %(name)s::text)
  AND kind <> 'run'
ORDER BY task_id DESC
LIMIT 1
"""


def find_task(conn: Connection, tenant: str | None, reference: str) -> Row:
    """Number, name, kind, status, reason, run and artefact of the tenant's task (None: of any
    tenant's); NotFound otherwise."""
    rows = fetch(conn, FIND_TASK, referred_to(tenant, reference))
    if not rows:
        raise NotFound()
    return rows[0]


# Names in the audit log, till the end of the transaction, whom it acts for.
ACT_FOR = "SELECT set_config('orchestrator.acts_for', %(by)s, true)"


def _change(cursor: Cursor, statement: str, task: Row, by: str, **values: object) -> Row | None:
    """Run the statement on a task whose run is locked; the task as changed, None if it was not."""
    cursor.execute(ACT_FOR + ";" + statement, {"task_id": task["task_id"], "by": by, **values})
    rows = cursor.fetchall()
    return rows[0] if rows else None


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
RETURNING task_id, parent_id AS run_id, status::text
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
        with transaction(conn) as cursor:
            _lock_run_of(cursor, task)
            if row := _change(cursor, CANCEL_UNLESS_FINAL, task, tenant):
                end_steps(cursor, [row])
                return _changed(task, row)
        # It ended between the two statements: look again, to say how.


# AWAITING_APPROVAL -> SUCCEEDED (approved), FAILED (rejected): an approval step. Of many decisions
# one finds it waiting.
DECIDE_APPROVAL = """
UPDATE tasks
SET status = (CASE WHEN %(approved)s THEN 'SUCCEEDED' ELSE 'FAILED' END)::task_status,
    reason = CASE WHEN %(approved)s THEN 'approved' ELSE 'rejected' END,
    result = decision.result,
    result_bytes = octet_length(decision.result::text),
    last_error = CASE WHEN NOT %(approved)s THEN
        concat_ws(': ', 'rejected', %(feedback)s::text) END,
    finished_at = current_instant(),
    updated_at = current_instant()
FROM (SELECT jsonb_build_object('approved', %(approved)s, 'feedback', %(feedback)s::text)
          AS result) AS decision
WHERE task_id = %(task_id)s AND status = 'AWAITING_APPROVAL' AND kind = 'approval'
RETURNING task_id, parent_id AS run_id, status::text
"""


# AWAITING_APPROVAL -> PENDING (approved, rejected), due now: an agent job, which is told by whoever
# claims it. A decision about an artefact finds only that one waiting.
DECIDE_JOB = """
UPDATE tasks
SET status = 'PENDING',
    reason = CASE WHEN %(approved)s THEN 'approved' ELSE 'rejected' END,
    gate = gate || jsonb_build_object('decision', jsonb_build_object(
        'approved', %(approved)s, 'feedback', %(feedback)s::text)),
    due = true,
    available_at = current_instant(),
    updated_at = current_instant()
WHERE task_id = %(task_id)s AND status = 'AWAITING_APPROVAL' AND kind = 'agent'
  AND (%(artefact)s::text IS NULL OR gate ->> 'artefact' = %(artefact)s)
RETURNING task_id, parent_id AS run_id, status::text
"""

DECIDE = {Kind.APPROVAL: DECIDE_APPROVAL, Kind.AGENT: DECIDE_JOB}


def approve_task(
    conn: Connection,
    tenant: str,
    reference: str,
    approved: bool,
    feedback: str | None,
    artefact: str | None = None,
) -> Changed:
    """Decide what waits for a person; NotFound, or StateConflict when it does not wait.

    An approval step ends; an agent job goes on as soon as a worker has it. With an artefact, it is
    decided only if that is what it asks about.
    """
    decision = {"approved": approved, "feedback": feedback, "artefact": artefact}
    while True:
        task = find_task(conn, tenant, reference)
        _check_decision(task, artefact)
        with transaction(conn) as cursor:
            _lock_run_of(cursor, task)
            statement = DECIDE[Kind(task["kind"])]
            if row := _change(cursor, statement, task, tenant, **decision):
                end_steps(cursor, [row])
                return _changed(task, row)
        # Somebody else decided between the two statements: look again, to say so.


def _check_decision(task: Row, artefact: str | None) -> None:
    """Say why the task cannot be decided now; whether it can, its statement says."""
    name = task["shown_as"]
    if artefact is not None and task["kind"] != Kind.AGENT:
        raise FieldRefused("artefact", f"only an agent job has one, and task {name} is none")
    if task["status"] != Status.AWAITING_APPROVAL or task["kind"] not in DECIDE:
        raise StateConflict(
            f"task {name} is {task['status']}; "
            "only a task that waits for approval can be approved or rejected"
        )
    if artefact not in (None, task["artefact"]):
        raise StateConflict(
            f"what task {name} asks has changed since; look at state.approval of GET /tasks/{name}",
            "artefact",
        )


# FAILED -> PENDING (requeued), due now, as if it had never been tried; an approval that was
# rejected -> AWAITING_APPROVAL. What went wrong before is in the audit log; `attempt` and what was
# paid stay.
REQUEUE_IF_DEAD = """
UPDATE tasks
SET status = (CASE kind WHEN 'approval' THEN 'AWAITING_APPROVAL' ELSE 'PENDING' END)::task_status,
    reason = 'requeued',
    result = NULL,
    result_bytes = NULL,
    due = kind <> 'approval',
    available_at = current_instant(),
    alone = false,
    cancel_requested = false,
    retry_count = 0,
    delivery_count = 0,
    last_error = NULL,
    updated_at = current_instant(),
    finished_at = NULL
WHERE task_id = %(task_id)s AND status = 'FAILED' AND kind <> 'run'
RETURNING task_id, parent_id AS run_id, status::text
"""


def requeue_task(conn: Connection, tenant: str, reference: str) -> Changed:
    """Give a dead letter a new life, or a rejected approval another decision.

    A step takes along the descendants that its death alone had cancelled. NotFound, or
    StateConflict when it is not FAILED, its run was cancelled, or its name another's by now.
    """
    while True:
        task = find_task(conn, tenant, reference)
        if task["status"] != Status.FAILED:
            raise StateConflict(
                f"task {task['shown_as']} is {task['status']}; "
                "only a dead letter (FAILED) can be requeued"
            )
        with transaction(conn) as cursor:
            _refuse_if_cancelled(_lock_run_of(cursor, task))
            with taken_name_told():
                row = _change(cursor, REQUEUE_IF_DEAD, task, tenant)
            if row:
                if row["run_id"]:
                    revive_run(cursor, row["run_id"], row["task_id"])
                return _changed(task, row)
        # Somebody else requeued it between the two statements: look again, to say so.


def _lock_run_of(cursor: Cursor, task: Row) -> Row | None:
    """Before a step is changed: the row of its run, locked. A lone task has none.

    Nor has a step that was purged with its run since; then it is found no more, either.
    """
    runs = lock_runs(cursor, [task["run_id"]]) if task["run_id"] else []
    return runs[0] if runs else None


def _refuse_if_cancelled(run: Row | None) -> None:
    if run and run["cancel_requested"]:
        raise StateConflict(
            f"run {run['task_id']}, of which this is a step, was cancelled; submit a new run"
        )


def _changed(task: Row, row: Row) -> Changed:
    return Changed(task["name"] or task["task_id"], Status(row["status"]))

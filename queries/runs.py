"""Runs: create one with its steps and edges, look one up, list them, cancel one.

A run is the parent row of its steps. It is BLOCKED until they have ended, which every reader sees
as RUNNING. What the end of a step does is in queries/steps.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connection import Connection, Cursor, Row, fetch, transaction
from db import FIRST_OF_KEYS, LARGEST_ID, Submitted, number_or_name
from errors import KeyReused, NotFound, RequestRefused, StateConflict
from queries.listings import (
    MOST_RESULT_BYTES,
    NEWEST_TASKS,
    WANTED_OF_ALL,
    WANTED_OF_TENANT,
    Page,
)
from queries.operations import ACT_FOR, Changed
from queries.steps import END_RUNS, lock_runs
from states import Status

RUN = "run"  # the kind of its row; no task that anybody claims


@dataclass(frozen=True)
class NewStep:
    """A step as it is submitted."""

    name: str
    kind: str
    payload: Mapping[str, Any]
    needs: Sequence[str] = ()  # names of the steps it waits for
    requested_route: str = "none"
    max_retry: int | None = None


@dataclass(frozen=True)
class NewRun:
    """A run as it is submitted, each step after those it needs. As NewTask, it may have a key."""

    tenant: str
    goal: str
    steps: Sequence[NewStep]
    idempotency_scope: str | None = None
    idempotency_key: str | None = None
    request_hash: bytes | None = None


# --- create ----------------------------------------------------------------------------------

# In ascending order, and a run's own is the lowest: so numbers are parents first.
DRAW_NUMBERS = """
SELECT nextval(pg_get_serial_sequence('tasks', 'task_id')) AS task_id
FROM generate_series(1, %(count)s)
ORDER BY task_id
"""

CREATE_RUN = """
INSERT INTO tasks (
    task_id, tenant, kind, payload, status, due, requested_route,
    idempotency_scope, idempotency_key, request_hash)
VALUES (
    %(run_id)s, %(tenant)s, 'run', %(payload)s, 'BLOCKED', false, 'none',
    %(scope)s, %(key)s, decode(%(request_hash)s, 'hex'))
ON CONFLICT (tenant, idempotency_scope, idempotency_key) WHERE idempotency_key IS NOT NULL
    DO NOTHING
RETURNING task_id
"""

CREATE_STEPS = """
INSERT INTO tasks (
    task_id, tenant, kind, parent_id, step, unmet, payload, status, due, requested_route, max_retry)
SELECT s.task_id, %(tenant)s, s.kind, %(run_id)s, s.step, s.unmet, s.payload,
       first.status, first.status = 'PENDING', s.requested_route, s.max_retry
FROM jsonb_to_recordset(%(steps)s::jsonb) AS s(
    task_id bigint, kind text, step text, unmet integer, payload jsonb, requested_route text,
    max_retry integer)
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN s.unmet > 0 THEN 'BLOCKED'
        WHEN s.kind = 'approval' THEN 'AWAITING_APPROVAL'
        ELSE 'PENDING' END::task_status AS status) AS first
ORDER BY s.task_id
"""

CREATE_EDGES = """
INSERT INTO step_edges (task_id, needs)
SELECT e.task_id, e.needs
FROM jsonb_to_recordset(%(edges)s::jsonb) AS e(task_id bigint, needs bigint)
"""


def submit_run(conn: Connection, run: NewRun) -> Submitted:
    """Create a run with its steps; or find the one that its Idempotency-Key has made before.

    KeyReused if the key came with another body. Of two that come at once with one key, the
    second waits for the first.
    """
    if not run.steps:
        raise RequestRefused("a run has at least one step")  # it would never end
    while True:
        with transaction(conn) as cursor:
            run_id = _create_run(cursor, run)
        if run_id is not None:
            return Submitted(run_id, Status.RUNNING, replayed=False)
        # The key is taken. Its holder may have rolled back meanwhile: then insert again.
        if before := _run_of_key(conn, run):
            return before


def _create_run(cursor: Cursor, run: NewRun) -> int | None:
    cursor.execute(DRAW_NUMBERS, {"count": len(run.steps) + 1})
    run_id, *numbers = [row["task_id"] for row in cursor.fetchall()]
    values = {
        "run_id": run_id,
        "tenant": run.tenant,
        "payload": json.dumps({"goal": run.goal}, ensure_ascii=False),
        "scope": run.idempotency_scope,
        "key": run.idempotency_key,
        "request_hash": run.request_hash and run.request_hash.hex(),
    }
    cursor.execute(CREATE_RUN, values)
    if not cursor.fetchall():
        return None
    number_of = {step.name: number for step, number in zip(run.steps, numbers, strict=True)}
    steps = [_step_row(step, number) for step, number in zip(run.steps, numbers, strict=True)]
    edges = [
        {"task_id": number_of[step.name], "needs": number_of[name]}
        for step in run.steps
        for name in step.needs
    ]
    values |= {"steps": json.dumps(steps, ensure_ascii=False), "edges": json.dumps(edges)}
    cursor.execute(CREATE_STEPS + ";" + CREATE_EDGES, values)
    return int(run_id)


def _step_row(step: NewStep, task_id: int) -> Row:
    return {
        "task_id": task_id,
        "kind": step.kind,
        "step": step.name,
        "unmet": len(step.needs),
        "payload": step.payload,
        "requested_route": step.requested_route,
        "max_retry": step.max_retry,
    }


def _run_of_key(conn: Connection, run: NewRun) -> Submitted | None:
    asked = {
        "ordinal": 0,
        "tenant": run.tenant,
        "idempotency_scope": run.idempotency_scope,
        "idempotency_key": run.idempotency_key,
    }
    rows = fetch(conn, FIRST_OF_KEYS, {"tasks": json.dumps([asked])})
    if not rows:
        return None
    (first,) = rows
    if run.request_hash is None or first["request_hash"] != run.request_hash.hex():
        raise KeyReused()
    return Submitted(first["task_id"], _as_shown(first["status"]), replayed=True)


def _as_shown(status: str) -> Status:
    return Status.RUNNING if status == Status.BLOCKED else Status(status)


# --- look ------------------------------------------------------------------------------------

FIND_RUN = """
SELECT task_id, CASE status WHEN 'BLOCKED' THEN 'RUNNING' ELSE status::text END AS status
FROM tasks
WHERE task_id = %(number)s::bigint AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
  AND kind = 'run'
"""


def find_run(conn: Connection, tenant: str | None, reference: str) -> Row:
    """Number and status of the tenant's run (None: of any tenant's); NotFound otherwise."""
    rows = fetch(conn, FIND_RUN, {"tenant": tenant, "number": _number(reference)})
    if not rows:
        raise NotFound()
    return rows[0]


def _number(reference: str) -> int:
    number: int | None = number_or_name(reference)["number"]
    if number is None:
        raise NotFound()
    return number


# The run's row, and behind it those of its steps. Results beyond a sum are left out: each can be
# had by itself.
GET_RUN = """
WITH run AS (
    SELECT task_id FROM tasks
    WHERE task_id = %(number)s::bigint AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
      AND kind = 'run'
),
found AS (
    SELECT task_id FROM run
    UNION ALL
    SELECT t.task_id FROM run JOIN tasks t ON t.parent_id = run.task_id
),
measured AS (
    SELECT t.task_id,
           sum(coalesce(t.result_bytes, pg_column_size(t.result), pg_column_size(t.gate), 0))
               OVER (ORDER BY t.task_id) <= %(most_bytes)s AS has_room
    FROM found JOIN tasks t USING (task_id)
)
SELECT t.task_id, t.tenant, t.step, t.kind,
       CASE WHEN t.kind = 'run' AND t.status = 'BLOCKED' THEN 'RUNNING'
            ELSE t.status::text END AS status,
       t.reason, t.cancel_requested,
       CASE WHEN t.kind IN ('prompt', 'agent') AND t.requested_route <> 'auto'
            THEN t.payload || jsonb_build_object('route', t.requested_route)
            ELSE t.payload END AS payload,
       CASE WHEN m.has_room THEN t.result END AS result,
       (t.result IS NOT NULL OR t.status = 'AWAITING_APPROVAL' AND t.gate IS NOT NULL)
           AND NOT m.has_room AS result_left_out,
       CASE WHEN t.status <> 'AWAITING_APPROVAL' THEN NULL
            WHEN m.has_room THEN t.gate
            ELSE t.gate - 'asks' END AS gate,
       t.last_error, t.retry_count, t.delivery_count, t.attempt, t.worker, t.duration_seconds,
       CASE WHEN t.kind <> 'run' THEN waiting_for(t, %(present_seconds)s) END AS waiting_for,
       t.created_at, t.available_at, t.started_at, t.finished_at,
       ARRAY(SELECT needed.step FROM step_edges e JOIN tasks needed ON needed.task_id = e.needs
             WHERE e.task_id = t.task_id ORDER BY e.needs) AS needs
FROM measured m JOIN tasks t USING (task_id)
ORDER BY t.task_id
"""


def get_run(conn: Connection, tenant: str | None, reference: str, present_seconds: float) -> Row:
    """The tenant's run, with its goal and its steps (each with the names it `needs`); NotFound.

    None: any tenant's. A worker not seen for `present_seconds` has no say in what a step waits for.
    """
    rows = fetch(
        conn,
        GET_RUN,
        {
            "tenant": tenant,
            "number": _number(reference),
            "most_bytes": MOST_RESULT_BYTES,
            "present_seconds": present_seconds,
        },
    )
    if not rows:
        raise NotFound()
    run, *steps = rows
    return {**run, "goal": run["payload"]["goal"], "steps": steps}


PAGE_OF_RUNS = """
page AS (
    SELECT task_id, lead(task_id) OVER (ORDER BY task_id DESC) IS NOT NULL AS has_more,
           row_number() OVER (ORDER BY task_id DESC) AS place
    FROM found
)
SELECT t.task_id, t.tenant, t.payload ->> 'goal' AS goal,
       CASE t.status WHEN 'BLOCKED' THEN 'RUNNING' ELSE t.status::text END AS status,
       t.created_at, t.finished_at, page.has_more,
       (SELECT coalesce(jsonb_object_agg(s.status, s.steps), '{}') FROM (
            SELECT status, count(*) AS steps FROM tasks
            WHERE parent_id = t.task_id GROUP BY status) AS s) AS steps_by_status
FROM page JOIN tasks t USING (task_id)
WHERE page.place <= %(limit)s
ORDER BY t.task_id DESC
"""
LIST_RUNS = WANTED_OF_TENANT + NEWEST_TASKS + PAGE_OF_RUNS
LIST_RUNS_OF_ALL = WANTED_OF_ALL + NEWEST_TASKS + PAGE_OF_RUNS

RUN_STATUSES = (Status.BLOCKED, Status.SUCCEEDED, Status.FAILED, Status.CANCELLED)


def list_runs(
    conn: Connection, tenant: str | None, *, status: Status | None, limit: int, before: int | None
) -> Page:
    """The tenant's runs, newest first; with how many steps are in which status. None: all's."""
    stored = Status.BLOCKED if status == Status.RUNNING else status
    values = {
        "tenant": tenant,
        "kinds": [RUN],
        "statuses": [one.value for one in RUN_STATUSES if stored in (None, one)],
        "limit": limit,
        "before": before or LARGEST_ID,
    }
    rows = fetch(conn, LIST_RUNS_OF_ALL if tenant is None else LIST_RUNS, values)
    return Page(rows, rows[-1]["task_id"] if rows and rows[-1]["has_more"] else None)


LIST_RUN_TRANSITIONS = """
SELECT id, task_id, run_id, step, from_status::text, to_status::text, reason, at, worker, attempt,
       detail
FROM audit_log
WHERE run_id = %(run_id)s AND id > %(after)s
ORDER BY id
LIMIT %(limit)s + 1
"""


def list_run_transitions(conn: Connection, run_id: int, *, limit: int, after: int | None) -> Page:
    """What happened to a run and its steps, oldest first, after the entry of that number."""
    values = {"run_id": run_id, "after": after or 0, "limit": limit}
    rows = fetch(conn, LIST_RUN_TRANSITIONS, values)
    page = rows[:limit]
    return Page(page, page[-1]["id"] if len(rows) > limit else None)


# --- cancel ----------------------------------------------------------------------------------

CANCEL_RUN = """
UPDATE tasks SET cancel_requested = true, updated_at = current_instant()
WHERE task_id = %(run_id)s AND status = 'BLOCKED'
"""

# BLOCKED, PENDING, AWAITING_APPROVAL -> CANCELLED; a RUNNING one is asked to stop.
CANCEL_STEPS = """
UPDATE tasks
SET status = CASE WHEN status = 'RUNNING' THEN status ELSE 'CANCELLED' END,
    reason = CASE WHEN status = 'RUNNING' THEN reason ELSE 'cancelled' END,
    cancel_requested = true,
    due = false,
    finished_at = CASE WHEN status <> 'RUNNING' THEN current_instant() END,
    updated_at = current_instant()
WHERE parent_id = %(run_id)s AND status IN ('BLOCKED', 'PENDING', 'RUNNING', 'AWAITING_APPROVAL')
"""


def cancel_run(conn: Connection, tenant: str, reference: str) -> Changed:
    """Cancel what has not ended: the run is CANCELLED, or RUNNING until its running steps stop.

    NotFound, or StateConflict when it has ended already.
    """
    run_id = find_run(conn, tenant, reference)["task_id"]
    with transaction(conn) as cursor:
        before = lock_runs(cursor, [run_id])
        if not before:  # purged since
            raise NotFound()
        if Status(status := before[0]["status"]).is_final:
            raise StateConflict(
                f"run {run_id} is {status} already; only a run that has not ended can be cancelled"
            )
        effects = (ACT_FOR, CANCEL_RUN, CANCEL_STEPS, END_RUNS)
        cursor.execute(";".join(effects), {"by": tenant, "run_id": run_id, "run_ids": [run_id]})
        (after,) = lock_runs(cursor, [run_id])
    return Changed(run_id, _as_shown(after["status"]))

"""Tasks in Postgres: submit them, look one up, count them.

The statements that change who owns a task are in queries/claims.py and queries/leases.py, those
behind the rest of the HTTP API in queries/operations.py and queries/listings.py. A program whose
data is in the same database submits with `enqueue`, over its own connection. How a statement
reaches Postgres is in connection.py, whose names can be had from here as well.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions

from config import WorkerSettings
from connection import Connection, Cursor, Row, connect, fetch, heard, listen, ping, transaction
from errors import (
    DatabaseUnavailable,
    KeyReused,
    NameInUse,
    NotFound,
    OrchestratorError,
    RequestRefused,
)
from states import Status

__all__ = [
    "LARGEST_ID",
    "SELECT_TASK",
    "Answer",
    "Connection",
    "Cursor",
    "NewTask",
    "Row",
    "Submitted",
    "connect",
    "enqueue",
    "fetch",
    "get_task",
    "heard",
    "listen",
    "metrics",
    "number_or_name",
    "ping",
    "referred_to",
    "submit_batch_in_tx",
    "submit_task",
    "submit_tasks",
    "taken_name_told",
    "transaction",
]


# json.dumps would make another for each call.
_compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


@dataclass  # frozen, a batch of them would take four times as long to make
class NewTask:
    """A task as it is submitted. `request_hash` belongs to `idempotency_key`."""

    tenant: str
    kind: str
    payload: Mapping[str, Any]
    name: str | None = None  # the submitter's own id for it
    metadata: Mapping[str, Any] | None = None
    priority: int = 0
    delay_seconds: float = 0
    max_retry: int | None = None
    timeout_seconds: float | None = None
    requested_route: str = "auto"
    idempotency_scope: str | None = None
    idempotency_key: str | None = None
    request_hash: bytes | None = None
    callback_url: str | None = None


@dataclass
class Submitted:
    """What became of a NewTask: its number, its status, and whether the key knew it already."""

    task_id: int
    status: str
    replayed: bool
    name: str | None = None

    @property
    def shown_as(self) -> int | str:
        """What its submitter calls it."""
        return self.name or self.task_id


# Creates the tasks that are new, each PENDING; a row whose Idempotency-Key is taken is left out
# of the answer. Ids are drawn first, so that an answer can be told to belong to its `ordinal`. Two
# that insert the same names or keys in different orders would deadlock: so they are sorted.
SUBMIT_TASKS = """
WITH submitted AS (
    -- The name of the sequence is looked up once, and not for each row.
    SELECT nextval((SELECT pg_get_serial_sequence('tasks', 'task_id'))) AS task_id, s.*
    FROM jsonb_to_recordset(%(tasks)s::jsonb) AS s(
        ordinal bigint, tenant text, kind text, payload jsonb, name text, metadata jsonb,
        priority smallint, delay_seconds double precision, max_retry integer,
        timeout_seconds double precision, requested_route text,
        idempotency_scope text, idempotency_key text, request_hash text,
        is_behind_first boolean, callback_url text)
),
created AS (
    INSERT INTO tasks (
        task_id, tenant, kind, payload, name, metadata, priority, available_at, due, max_retry,
        timeout_seconds, requested_route, idempotency_scope, idempotency_key, request_hash,
        batch_id, callback_url)
    SELECT task_id, tenant, kind, payload, name, nullif(metadata, 'null'), priority,
           current_instant() + make_interval(secs => delay_seconds), delay_seconds = 0, max_retry,
           timeout_seconds, requested_route, idempotency_scope, idempotency_key,
           decode(request_hash, 'hex'),
           CASE WHEN is_behind_first THEN (SELECT task_id FROM submitted WHERE ordinal = 0) END,
           callback_url
    FROM submitted
    ORDER BY name NULLS FIRST, idempotency_key, task_id
    ON CONFLICT (tenant, idempotency_scope, idempotency_key) WHERE idempotency_key IS NOT NULL
        DO NOTHING
    RETURNING task_id, name, status::text
)
SELECT submitted.ordinal, created.task_id, created.name, created.status
FROM created JOIN submitted USING (task_id)
"""


# The same for one task that waits for nobody.
SUBMIT_TASK = """
SELECT create_task(
    %(tenant)s, %(kind)s, %(payload)s, %(name)s, %(metadata)s, %(priority)s, %(delay_seconds)s,
    %(max_retry)s, %(timeout_seconds)s, %(requested_route)s, %(idempotency_scope)s,
    %(idempotency_key)s, %(request_hash)s, %(callback_url)s) AS task_id
"""


# The tasks that Idempotency-Keys have made, seen with a fresh snapshot.
FIRST_OF_KEYS = """
SELECT asked.ordinal, t.task_id, t.name, t.status::text,
       encode(t.request_hash, 'hex') AS request_hash
FROM jsonb_to_recordset(%(tasks)s::jsonb) AS asked(
    ordinal bigint, tenant text, idempotency_scope text, idempotency_key text)
JOIN tasks t USING (tenant, idempotency_scope, idempotency_key)
"""

Answer = Submitted | OrchestratorError


def submit_tasks(conn: Connection, tasks: Sequence[NewTask]) -> list[Answer]:
    """Create each task unless its Idempotency-Key made one before; one answer per task, in order.

    A Submitted is committed. An error concerns its task alone: KeyReused when the key came with
    another body, DatabaseUnavailable when Postgres went away before it was known. Raises what
    keeps all of them from being stored: NameInUse, too, so submit a task with a name alone.
    """
    answers: dict[int, Answer] = {}
    unknown = list(range(len(tasks)))
    while unknown:
        try:
            with taken_name_told():
                created = _create(conn, tasks, unknown)
        except NameInUse:
            # Of two that come at once with one key, the second may meet the first's name first.
            if not (known := _first_of_keys(conn, tasks, unknown)):
                raise
            answers.update(known)
        else:
            answers.update(created)
        unknown = [ordinal for ordinal in unknown if ordinal not in answers]
        if unknown:
            # Their keys are taken. The holder may have rolled back meanwhile: then insert again.
            try:
                answers.update(_first_of_keys(conn, tasks, unknown))
            except DatabaseUnavailable as away:
                answers.update(dict.fromkeys(unknown, away))
            unknown = [ordinal for ordinal in unknown if ordinal not in answers]
    return [answers[ordinal] for ordinal in range(len(tasks))]


def submit_task(conn: Connection, task: NewTask) -> Submitted:
    """Create one task; NameInUse, or KeyReused if its Idempotency-Key came with another body."""
    answer = submit_tasks(conn, [task])[0]
    if isinstance(answer, OrchestratorError):
        raise answer
    return answer


def submit_batch_in_tx(cursor: Cursor, tasks: Sequence[NewTask]) -> list[Submitted]:
    """Create tasks in the caller's transaction, which belong together: their batch bears the number
    of the first. One whose Idempotency-Key is taken is left out.

    NameInUse leaves the transaction failed.
    """
    batch = _as_json(tasks, range(len(tasks)), are_a_batch=True)
    with taken_name_told():
        cursor.execute(SUBMIT_TASKS, {"tasks": batch})
        created = _created(cursor.fetchall())
    return [created[ordinal] for ordinal in sorted(created)]


LIVE_NAME = "tasks_by_live_name"


@contextlib.contextmanager
def taken_name_told() -> Iterator[None]:
    """Turn the refusal of a name that an unfinished task bears into NameInUse."""
    try:
        yield
    except psycopg2.errors.UniqueViolation as refused:
        if refused.diag.constraint_name != LIVE_NAME:
            raise
        *_, name = (refused.diag.message_detail or "").partition("(tenant, name)=(")
        *_, name = name.partition(")")[0].partition(", ")
        raise NameInUse(name) from refused


def _create(
    conn: Connection, tasks: Sequence[NewTask], ordinals: Sequence[int]
) -> dict[int, Submitted]:
    if len(ordinals) > 1:
        return _created(fetch(conn, SUBMIT_TASKS, {"tasks": _as_json(tasks, ordinals)}))
    (ordinal,) = ordinals
    task = tasks[ordinal]
    (row,) = fetch(conn, SUBMIT_TASK, _as_values(task))
    if row["task_id"] is None:
        return {}
    return {ordinal: Submitted(row["task_id"], Status.PENDING, False, task.name)}


def _created(rows: Iterable[Row]) -> dict[int, Submitted]:
    return {
        row["ordinal"]: Submitted(row["task_id"], row["status"], False, row["name"]) for row in rows
    }


def _first_of_keys(
    conn: Connection, tasks: Sequence[NewTask], ordinals: Sequence[int]
) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for row in fetch(conn, FIRST_OF_KEYS, {"tasks": _as_json(tasks, ordinals)}):
        ordinal, digest = row["ordinal"], tasks[row["ordinal"]].request_hash
        if digest is not None and row["request_hash"] == digest.hex():
            found[ordinal] = Submitted(row["task_id"], row["status"], True, row["name"])
        else:
            found[ordinal] = KeyReused()
    return found


def _as_values(task: NewTask) -> dict[str, Any]:
    metadata = None if task.metadata is None else _compact.encode(task.metadata)
    return {**vars(task), "payload": _compact.encode(task.payload), "metadata": metadata}


def _as_json(tasks: Sequence[NewTask], ordinals: Sequence[int], are_a_batch: bool = False) -> str:
    """The tasks of these ordinals, as SUBMIT_TASKS reads them: what is not there is NULL."""
    rows = []
    for ordinal in ordinals:
        row = {field: value for field, value in vars(tasks[ordinal]).items() if value is not None}
        row["ordinal"] = ordinal
        row["is_behind_first"] = are_a_batch and ordinal > 0
        if "request_hash" in row:
            row["request_hash"] = row["request_hash"].hex()
        rows.append(row)
    return _compact.encode(rows)


SUBMIT_OWN_TASK = """
SELECT submit_task(
    %(prompt)s, tenant => %(tenant)s, priority => %(priority)s::integer,
    delay_seconds => %(delay_seconds)s, max_retry => %(max_retry)s::integer,
    timeout_seconds => %(timeout_seconds)s, requested_route => %(route)s,
    metadata => %(metadata)s, idempotency_key => %(idempotency_key)s)
"""


def enqueue(
    caller: psycopg2.extensions.connection | psycopg2.extensions.cursor,
    prompt: str,
    *,
    tenant: str = "default",
    priority: int = 0,
    delay_seconds: float = 0,
    max_retry: int | None = None,
    timeout_seconds: float | None = None,
    route: str = "auto",
    metadata: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> int:
    """Store a task in the transaction of the caller's own connection; returns its number.

    Nothing is committed here: the task is there once the caller commits, with the caller's own
    data, or never. RequestRefused, or KeyReused when the key came with other arguments, leaves
    the transaction failed, as each error in Postgres does. See submit_task in schema.sql.
    """
    conn = caller.connection if isinstance(caller, psycopg2.extensions.cursor) else caller
    values = {
        "prompt": prompt,
        "tenant": tenant,
        "priority": priority,
        "delay_seconds": delay_seconds,
        "max_retry": max_retry,
        "timeout_seconds": timeout_seconds,
        "route": route,
        "idempotency_key": idempotency_key,
    }
    try:
        values["metadata"] = None if metadata is None else json.dumps(metadata, allow_nan=False)
        with conn.cursor(cursor_factory=psycopg2.extensions.cursor) as cursor:
            cursor.execute(SUBMIT_OWN_TASK, values)
            (row,) = cursor.fetchall()
            return int(row[0])
    except psycopg2.errors.UniqueViolation as refused:
        raise KeyReused(refused.diag.message_primary) from refused
    except (psycopg2.DataError, psycopg2.IntegrityError) as refused:
        raise RequestRefused(refused.diag.message_primary) from refused
    except (TypeError, ValueError) as refused:  # what no text and no JSON can hold
        raise RequestRefused(f"this cannot be stored: {refused}") from refused


# What the API shows of a task t; the payload is long and not shown.
SELECT_TASK = """
SELECT
    t.task_id, t.tenant, t.name, t.kind, t.status::text, t.reason, t.metadata, t.result,
    t.last_error,
    t.requested_route, t.route, t.model, t.cost, t.prompt_tokens, t.completion_tokens, t.truncated,
    t.duration_seconds, t.retry_count, t.delivery_count, t.attempt, t.priority, t.parent_id, t.step,
    t.worker, t.lease_expires_at, t.cancel_requested, t.created_at, t.available_at, t.started_at,
    t.finished_at, t.callback_url, waiting_for(t, %(present_seconds)s) AS waiting_for
"""

# A task by number, or by name: then the newest that bears it. Of an agent job its newest state,
# and what it asks.
NEWEST_TASK = """
WITH found AS (
    SELECT task_id FROM tasks
    WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
      AND (task_id = %(number)s::bigint OR name = %(name)s::text)
      AND kind <> 'run'
    ORDER BY task_id DESC
    LIMIT 1
)
"""
FROM_NEWEST_TASK = """
    , t.gate, job.state AS job_state, job.next_nodes
FROM found JOIN tasks t USING (task_id)
LEFT JOIN LATERAL (
    SELECT state, next_nodes FROM job_states
    WHERE task_id = t.task_id AND t.kind = 'agent' AND next_nodes <> '{__start__}'
    ORDER BY checkpoint_id DESC
    LIMIT 1) AS job ON true
"""
GET_TASK = NEWEST_TASK + SELECT_TASK + FROM_NEWEST_TASK

LARGEST_ID = 2**63 - 1
PRESENT_SECONDS = WorkerSettings().lease_seconds


def get_task(
    conn: Connection, tenant: str | None, reference: str, present_seconds: float = PRESENT_SECONDS
) -> Row:
    """The tenant's task of that number or name (None: of any tenant); NotFound otherwise.

    A worker not seen for `present_seconds` has no say in what the task waits for.
    """
    rows = fetch(
        conn,
        GET_TASK,
        {"present_seconds": present_seconds, **referred_to(tenant, reference)},
    )
    if not rows:
        raise NotFound()
    return rows[0]


def referred_to(tenant: str | None, reference: str) -> Row:
    """What GET_TASK and its like look by; NotFound if it can be nothing's number or name.

    Each tenant has names of its own: without a tenant, only a number tells which task is meant.
    """
    found = number_or_name(reference)
    if tenant is None and found["number"] is None:
        raise NotFound()
    return {"tenant": tenant, **found}


def number_or_name(reference: str) -> Row:
    """A task's number or its name, as the address has it; NotFound if it can be neither."""
    if "\0" in reference:
        raise NotFound()
    if not (reference.isascii() and reference.isdigit()):
        return {"number": None, "name": reference}
    if len(reference) > len(str(LARGEST_ID)) or int(reference) > LARGEST_ID:
        raise NotFound()
    return {"number": int(reference), "name": None}


# One row: the figures of /metrics over the tenant's tasks (all tenants: NULL). Runs are no work.
# They are kept, not counted: see figures in schema.sql.
METRICS = """
WITH part AS (
    SELECT * FROM figures
    WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND kind <> 'run'
    UNION ALL
    SELECT * FROM figure_changes
    WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND kind <> 'run'
),
total AS (
    SELECT jsonb_build_object(
               'BLOCKED', sum(blocked), 'PENDING', sum(pending), 'RUNNING', sum(running),
               'AWAITING_APPROVAL', sum(awaiting_approval), 'SUCCEEDED', sum(succeeded),
               'FAILED', sum(failed), 'CANCELLED', sum(cancelled)) AS by_status,
           coalesce(sum(retries), 0)::bigint AS retries,
           coalesce(sum(reclaimed), 0)::bigint AS reclaimed,
           sum(microseconds)::double precision / nullif(sum(timed) * 1000000, 0)
               AS avg_duration_seconds,
           CASE WHEN sum(paid_local) > 0 THEN round(sum(cost_local), 8)::text END AS local,
           CASE WHEN sum(paid_cloud) > 0 THEN round(sum(cost_cloud), 8)::text END AS cloud
    FROM part
),
by_status AS (
    SELECT coalesce(jsonb_object_agg(key, value), '{}') AS tasks, sum(value::bigint) AS all_tasks
    FROM total CROSS JOIN jsonb_each(by_status)
    WHERE value NOT IN ('null', '0')
)
SELECT by_status.tasks AS by_status,
       coalesce(retries / by_status.all_tasks::double precision, 0) AS avg_retry,
       retries,
       reclaimed AS reclaimed_count,
       avg_duration_seconds,
       jsonb_strip_nulls(jsonb_build_object('local', local, 'cloud', cloud)) AS cost_by_route
FROM total CROSS JOIN by_status
"""


def metrics(conn: Connection, tenant: str | None = None) -> Row:
    """by_status, avg_retry, retries, reclaimed_count, avg_duration_seconds (None: nothing finished
    yet), cost_by_route (money as decimal strings with 8 places)."""
    return fetch(conn, METRICS, {"tenant": tenant})[0]

"""The ledger of an agent job's model calls: tokens are reserved before a call, and used after it.

A call whose end nobody wrote keeps its reservation as spent, so a budget may be used less than it
allows and never more. Who writes here holds the task's lease, and has locked the task's row first:
so the calls of one job are judged one after the other. Behind it, and only where a tenant has a
limit, comes the tenant's row of the day, which judges the calls of all its jobs.

Each public function is one transaction and one message to Postgres. There, each statement sees
what was committed when it began, so the second sees all that the lock of the first waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from connection import Connection, fetch
from errors import BudgetRefused, LeaseLost
from queries.leases import ClaimedTask


@dataclass(frozen=True)
class CallKey:
    """Which call it is: the same when its node runs again."""

    node: str
    node_run: str
    ordinal: int


@dataclass(frozen=True)
class CallReserved:
    """The call may be made; `end_call` or `release_call` is to follow."""

    call_id: int


@dataclass(frozen=True)
class CallReplied:
    """The call was made and paid for before; this is what it brought."""

    reply: str


LOCK_JOB = """
SELECT task_id FROM tasks
WHERE task_id = %(task_id)s AND lease_token = %(token)s::uuid AND status = 'RUNNING'
FOR NO KEY UPDATE
"""

# One row while the lease is held: the reply, or the number of the call, or what refuses it.
RESERVE_CALL = """
WITH held AS (
    SELECT task_id, tenant FROM tasks
    WHERE task_id = %(task_id)s AND lease_token = %(token)s::uuid AND status = 'RUNNING'
),
moment AS (SELECT current_instant() AS at),
replied AS (
    SELECT c.reply FROM held JOIN model_calls c ON c.task_id = held.task_id
    WHERE c.node_run = %(node_run)s AND c.ordinal = %(ordinal)s AND c.reply IS NOT NULL
),
judged AS (
    SELECT held.task_id, held.tenant,
           %(token_budget)s::bigint IS NULL OR %(token_budget)s::bigint >= %(tokens)s + (
               SELECT coalesce(sum(CASE
                   WHEN c.ended_at IS NULL THEN c.reserved_tokens
                   ELSE c.prompt_tokens + c.completion_tokens END), 0)
               FROM model_calls c WHERE c.task_id = held.task_id) AS fits_job
    FROM held
    WHERE NOT EXISTS (SELECT FROM replied)
),
taken AS (
    INSERT INTO tenant_tokens AS d (tenant, day, taken)
    SELECT judged.tenant, (moment.at AT TIME ZONE 'UTC')::date, %(tokens)s
    FROM judged CROSS JOIN moment
    WHERE judged.fits_job AND %(tokens_per_day)s > 0 AND %(tokens)s <= %(tokens_per_day)s
    ON CONFLICT (tenant, day) DO UPDATE SET taken = d.taken + excluded.taken
    WHERE d.taken + excluded.taken <= %(tokens_per_day)s
    RETURNING d.tenant
),
reserved AS (
    INSERT INTO model_calls (task_id, node, node_run, ordinal, reserved_tokens, reserved_at)
    SELECT judged.task_id, %(node)s, %(node_run)s, %(ordinal)s, %(tokens)s, moment.at
    FROM judged CROSS JOIN moment
    WHERE judged.fits_job AND (%(tokens_per_day)s = 0 OR EXISTS (SELECT FROM taken))
    RETURNING call_id
)
SELECT (SELECT reply FROM replied) AS reply,
       (SELECT call_id FROM reserved) AS call_id,
       (SELECT CASE WHEN fits_job THEN 'tenant_tokens_per_day' ELSE 'token_budget' END
        FROM judged) AS refused_by
FROM held
"""


def reserve_call(
    conn: Connection,
    task: ClaimedTask,
    key: CallKey,
    tokens: int,
    token_budget: int | None,
    tokens_per_day: int,
) -> CallReserved | CallReplied:
    """Set aside so many tokens, the most that the call may use, for a call that has not replied.

    Raises LeaseLost, or BudgetRefused where the job's budget or the tenant's day has not as many
    left; `token_budget` None and `tokens_per_day` 0 are no limits.
    """
    values = {
        **_fence(task),
        **vars(key),
        "tokens": tokens,
        "token_budget": token_budget,
        "tokens_per_day": tokens_per_day,
    }
    rows = fetch(conn, LOCK_JOB + ";" + RESERVE_CALL, values)
    if not rows:
        raise LeaseLost
    if rows[0]["reply"] is not None:
        return CallReplied(rows[0]["reply"])
    if rows[0]["call_id"] is None:
        raise BudgetRefused(rows[0]["refused_by"])
    return CallReserved(rows[0]["call_id"])


# A call ends once. Its reply is stored unless another call of the same key has stored one.
END_CALL = """
WITH held AS (
    SELECT task_id, tenant FROM tasks
    WHERE task_id = %(task_id)s AND lease_token = %(token)s::uuid AND status = 'RUNNING'
),
ended AS (
    UPDATE model_calls c
    SET ended_at = current_instant(),
        prompt_tokens = %(prompt_tokens)s,
        completion_tokens = %(completion_tokens)s,
        cost = %(cost)s::numeric,
        route = %(route)s,
        model = %(model)s,
        reply = CASE WHEN NOT EXISTS (
            SELECT FROM model_calls o
            WHERE o.task_id = c.task_id AND o.node_run = c.node_run AND o.ordinal = c.ordinal
              AND o.reply IS NOT NULL) THEN %(reply)s END
    FROM held
    WHERE c.call_id = %(call_id)s AND c.task_id = held.task_id AND c.ended_at IS NULL
    RETURNING c.task_id, held.tenant, (c.reserved_at AT TIME ZONE 'UTC')::date AS day,
              c.prompt_tokens, c.completion_tokens, c.cost, c.route, c.model,
              c.prompt_tokens + c.completion_tokens - c.reserved_tokens AS more_than_reserved
),
job AS (
    UPDATE tasks t
    SET prompt_tokens = t.prompt_tokens + ended.prompt_tokens,
        completion_tokens = t.completion_tokens + ended.completion_tokens,
        cost = CASE WHEN ended.cost IS NULL THEN t.cost ELSE coalesce(t.cost, 0) + ended.cost END,
        route = coalesce(ended.route, t.route),
        model = coalesce(ended.model, t.model)
    FROM ended
    WHERE t.task_id = ended.task_id AND t.lease_token = %(token)s::uuid AND t.status = 'RUNNING'
),
day AS (
    UPDATE tenant_tokens d
    SET taken = greatest(0, d.taken + ended.more_than_reserved)
    FROM ended
    WHERE d.tenant = ended.tenant AND d.day = ended.day AND ended.more_than_reserved <> 0
)
SELECT task_id FROM held
"""


def end_call(
    conn: Connection,
    task: ClaimedTask,
    call_id: int,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    cost: Decimal | None,
    route: str | None,
    model: str | None,
    reply: str | None,
) -> None:
    """Write what a call used, here and in the task; None: it brought no reply, and is paid.

    `reply` is text that Postgres can hold. A second end of a call changes nothing. LeaseLost.
    """
    values = {
        **_fence(task),
        "call_id": call_id,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cost": cost,
        "route": route,
        "model": model,
        "reply": reply,
    }
    if not fetch(conn, LOCK_JOB + ";" + END_CALL, values):
        raise LeaseLost


def release_call(conn: Connection, task: ClaimedTask, call_id: int) -> None:
    """End a call that no server took: nothing was used. LeaseLost."""
    end_call(
        conn,
        task,
        call_id,
        prompt_tokens=0,
        completion_tokens=0,
        cost=None,
        route=None,
        model=None,
        reply=None,
    )


def _fence(task: ClaimedTask) -> dict[str, Any]:
    return {"task_id": task.task_id, "token": task.lease.token}

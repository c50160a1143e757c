"""The ledger of an agent job's model calls: tokens are reserved before a call, and used after it.

A call whose end nobody wrote keeps its reservation as spent, so a budget may be used less than it
allows and never more. Who writes here holds the task's lease, and has locked the task's row first:
so the calls of one job are judged one after the other. Behind it, and only where a tenant has a
limit, comes the tenant's row of the day, which judges the calls of all its jobs.

Each public function is one transaction and one message to Postgres, which calls a function of
schema.sql. There, each statement sees what was committed when it began, so those behind the first
see all that its lock waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg2

from connection import Connection, Row, fetch
from errors import BudgetRefused, LeaseLost
from queries.jobs import LEASE_IS_GONE
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


# One row: the reply, or the number of the call, or what refuses it. See schema.sql.
RESERVE_CALL = """
SELECT reply, call_id, refused_by
FROM reserve_call(
    %(task_id)s, %(token)s::uuid, %(node)s, %(node_run)s, %(ordinal)s, %(tokens)s,
    %(token_budget)s, %(tokens_per_day)s)
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
    (found,) = _fenced(conn, RESERVE_CALL, values)
    if found["reply"] is not None:
        return CallReplied(found["reply"])
    if found["call_id"] is None:
        raise BudgetRefused(found["refused_by"])
    return CallReserved(found["call_id"])


END_CALL = """
SELECT end_call(
    %(task_id)s, %(token)s::uuid, %(call_id)s, %(prompt_tokens)s, %(completion_tokens)s,
    %(cost)s, %(route)s, %(model)s, %(reply)s)
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
    _fenced(conn, END_CALL, values)


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


def _fenced(conn: Connection, statement: str, values: dict[str, Any]) -> list[Row]:
    """The statement's rows; LeaseLost where its function did not find the lease."""
    try:
        return fetch(conn, statement, values)
    except psycopg2.Error as failed:
        if failed.pgcode == LEASE_IS_GONE:
            raise LeaseLost from None
        raise

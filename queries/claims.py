"""The claim: which due tasks a worker takes, and where it sends them.

One statement leases the rows that the worker's policy can run now. Where that depends on how many
are due, or on the calls in flight, one transaction asks for these first, and notes the routes last;
else they are noted when the tasks have begun.
The statements are functions of schema.sql, where Postgres keeps their plans. Workers do not wait
for each other, unless calls in flight are limited: rows that somebody holds are skipped, and the
state predicate is inside the locking SELECT.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from connection import Connection, Cursor, Row, fetch, transaction
from queries.leases import ClaimedTask, Lease


@dataclass(frozen=True)
class Wanted:
    """Tasks a claim may take: those that ask for a route, within a budget shared by a name.

    `min_chars` and `max_chars` bound the prompt, where only some of them can run now.
    """

    requested_route: str
    budget: str
    min_chars: int | None = None
    max_chars: int | None = None


@dataclass(frozen=True)
class Look:
    """The queue just before a claim, for a policy that depends on it."""

    depth: int  # due tasks, counted as far as it matters
    slots: int  # that the worker has free
    in_flight: Mapping[str, int]  # calls per route, of all workers; only if there are limits


class ClaimPolicy(Protocol):
    """What a worker can run now, and where it sends what it claimed: execution/routes.py."""

    has_limits: bool
    depth_that_matters: int

    def routes_at_any_depth(self) -> list[str] | None:
        """What tasks may ask for, if that is the same whatever a look would find, and unlimited;
        or None."""

    def wanted(self, look: Look) -> tuple[list[Wanted], dict[str, int | None]]:
        """What to take, and how much at most of each budget (None: no limit)."""

    def choose(self, tasks: Sequence[ClaimedTask], depth: int) -> list[str | None]:
        """The route of each task, by the `wanted` asked for before; None: it needs none, or it
        cannot run now after all."""


@dataclass  # frozen, it would take three times as long to make, and work waits for it
class Claim:
    """What one claim brought: tasks with their routes."""

    tasks: list[tuple[ClaimedTask, str | None]]
    is_any_left: bool = False  # another claim may find more
    depth: int = 0  # due tasks besides these, as far as a choice depended on that
    next_due_seconds: float | None = None  # until the next delayed task is due; None: there is none
    has_suspect: bool = False  # a task can have its last try now, alone
    last_tenant: str | None = None  # to which the round came; None: nothing is due
    next_from: int | None = None  # where a claim soon after this one may begin
    are_routes_noted: bool = True  # or that is left to note_routes


CLAIM_TASKS = """
SELECT claim_tasks(
    %(worker)s, %(slots)s, %(lease_seconds)s, %(routes)s, %(wanted)s, %(budgets)s,
    %(after_tenant)s, %(depth_limit)s, %(from_task)s) AS told
"""
CLAIM_SUSPECT = "SELECT claim_suspect(%(worker)s, %(lease_seconds)s, %(wanted)s) AS tasks"

# With a limit on calls in flight, claims take turns, so that two cannot both take the last place.
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtext('orchestrator claim'));"
LOOK = "SELECT * FROM look_at_queue(%(depth_limit)s, %(count_in_flight)s)"

# The route was decided for tasks claimed a moment ago. A row that somebody holds meanwhile is left
# out, as by the heartbeat: nobody decides by it, and most settles say it again. The state is asked
# so that no index is used for it: the planner takes it that next to nothing runs, and would read
# in tasks_to_list, which is of few tenants, all that does, or did since it was vacuumed.
SET_ROUTES = """
WITH chosen AS (
    SELECT * FROM jsonb_to_recordset(%(routes)s::jsonb)
        AS chosen(task_id bigint, token uuid, route text)
),
free AS (
    SELECT t.task_id, t.lease_token, chosen.route
    FROM tasks t JOIN chosen ON t.task_id = chosen.task_id AND t.lease_token = chosen.token
    WHERE (t.status = 'RUNNING') IS TRUE
    ORDER BY t.task_id
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE tasks t SET route = free.route
FROM free
WHERE t.task_id = free.task_id AND t.lease_token = free.lease_token
  AND (t.status = 'RUNNING') IS TRUE
"""


def claim_tasks(
    conn: Connection,
    worker: str,
    slots: int,
    lease_seconds: float,
    policy: ClaimPolicy,
    after_tenant: str = "",
    from_task: int = 0,
) -> Claim:
    """Lease up to `slots` due tasks that `policy` wants now; for their routes see note_routes.

    `after_tenant` is the last tenant of the claim before, `from_task` where that one said that this
    may begin: see worker/place.py.
    """
    values = {
        "worker": worker,
        "slots": slots,
        "lease_seconds": lease_seconds,
        "after_tenant": after_tenant,
        "from_task": from_task,
    }
    if (routes := policy.routes_at_any_depth()) is not None:
        return _claim_at_any_depth(conn, policy, routes, values)
    with transaction(conn) as cursor:
        look = _look(cursor, slots, policy)
        wanted, budgets = policy.wanted(look)
        values |= {"wanted": _as_json(wanted), "budgets": json.dumps(budgets), "depth_limit": 0}
        values["routes"] = _as_array(dict.fromkeys(one.requested_route for one in wanted))
        told = _ask(cursor, CLAIM_TASKS, values)["told"]
        claim = _claim(told, policy, look.depth)
        _note_routes(cursor, claim)
        return claim


def _claim_at_any_depth(
    conn: Connection, policy: ClaimPolicy, routes: Sequence[str], values: Row
) -> Claim:
    """In one message. Nobody counts calls in flight, so routes can be noted when all has begun."""
    values |= {"routes": _as_array(routes), "wanted": None, "budgets": None}
    values["depth_limit"] = policy.depth_that_matters + 1
    (row,) = fetch(conn, CLAIM_TASKS, values)
    claim = _claim(row["told"], policy)
    claim.are_routes_noted = all(route is None for _, route in claim.tasks)
    return claim


def note_routes(conn: Connection, claim: Claim) -> None:
    """Write where the tasks of this claim went, if that is not done yet."""
    if not claim.are_routes_noted and (routes := _routes_of(claim)):
        fetch(conn, SET_ROUTES, routes)


def claim_alone(conn: Connection, worker: str, lease_seconds: float, policy: ClaimPolicy) -> Claim:
    """Lease the next suspect, for a process that runs nothing else meanwhile."""
    with transaction(conn) as cursor:
        look = _look(cursor, 1, policy)
        wanted, _ = policy.wanted(look)
        values = {"worker": worker, "lease_seconds": lease_seconds, "wanted": _as_json(wanted)}
        tasks = _claimed_tasks(_ask(cursor, CLAIM_SUSPECT, values)["tasks"])
        claim = Claim(_routed(tasks, policy, look.depth), depth=look.depth)
        _note_routes(cursor, claim)
        return claim


def _ask(cursor: Cursor, statement: str, values: Row) -> Row:
    cursor.execute(statement, values)
    (row,) = cursor.fetchall()
    return row


def _as_json(wanted: Sequence[Wanted]) -> str:
    return json.dumps([vars(one) for one in wanted])


def _as_array(routes: Iterable[str]) -> str:
    """As Postgres reads it: less to parse than ARRAY[...]."""
    return "{" + ",".join(routes) + "}"


def _look(cursor: Cursor, slots: int, policy: ClaimPolicy) -> Look:
    values = {
        "depth_limit": policy.depth_that_matters + slots + 1,
        "count_in_flight": policy.has_limits,
    }
    row = _ask(cursor, (TAKE_TURN if policy.has_limits else "") + LOOK, values)
    return Look(row["depth"], slots, row["in_flight"] or {})


def _claim(told: Sequence[Any], policy: ClaimPolicy, looked: int | None = None) -> Claim:
    """What claim_tasks tells, with the routes that `policy` chooses; `looked` is the depth before,
    if there was a look."""
    columns, last_tenant, is_any_left, depth, has_suspect, next_due_seconds, next_from = told
    tasks = _claimed_tasks(columns)
    # The batch itself is no depth for its own decisions.
    depth = depth or 0 if looked is None else max(0, looked - len(tasks))
    routed = _routed(tasks, policy, depth)
    return Claim(routed, is_any_left, depth, next_due_seconds, has_suspect, last_tenant, next_from)


def _routed(
    tasks: list[ClaimedTask], policy: ClaimPolicy, depth: int
) -> list[tuple[ClaimedTask, str | None]]:
    return list(zip(tasks, policy.choose(tasks, depth), strict=True))


def _note_routes(cursor: Cursor, claim: Claim) -> None:
    if routes := _routes_of(claim):
        cursor.execute(SET_ROUTES, routes)


def _routes_of(claim: Claim) -> Row | None:
    """The values of SET_ROUTES; None: none of the tasks has a route."""
    routed = [
        {**vars(task.lease), "route": route} for task, route in claim.tasks if route is not None
    ]
    return {"routes": json.dumps(routed)} if routed else None


def _claimed_tasks(columns: Sequence[Sequence[Any]] | None) -> list[ClaimedTask]:
    """One list for each column became one task for each row."""
    return [_claimed(*task) for task in zip(*columns or (), strict=True)]


def _claimed(
    task_id: int, token: str, run_id: int | None, kind: str, payload: Any, *others: Any
) -> ClaimedTask:
    """The others are as ClaimedTask has them."""
    return ClaimedTask(
        Lease(task_id, token, run_id),
        run_id or task_id,
        kind,
        payload if isinstance(payload, dict) else {},
        *others,
    )

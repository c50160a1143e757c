"""The claim: which due tasks a worker takes, and where it sends them.

One transaction looks at the queue, asks the worker's policy what it can run now, leases the rows,
and notes the route of each. Workers do not wait for each other, unless calls in flight are limited:
rows that somebody holds are skipped, and the state predicate is inside the locking SELECT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from connection import Connection, Cursor, Row, transaction
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
    """The queue just before a claim."""

    depth: int  # due tasks, counted as far as it matters
    has_suspect: bool  # a task waits for its last try, alone
    slots: int  # that the worker has free
    next_due_seconds: float | None  # until the next delayed task is due; None: there is none
    in_flight: Mapping[str, int]  # calls per route, of all workers; only if there are limits


class ClaimPolicy(Protocol):
    """What a worker can run now, and where it sends what it claimed: execution/routes.py."""

    has_limits: bool
    depth_that_matters: int

    def open_requests(self) -> list[str]:
        """The requested routes of which some tasks can run now."""

    def wanted_at_any_depth(self) -> list[Wanted] | None:
        """What to take, if that is the same whatever a look would find, and unlimited; or None."""

    def wanted(self, look: Look) -> tuple[list[Wanted], dict[str, int | None]]:
        """What to take, and how much at most of each budget (None: no limit)."""

    def choose(self, tasks: Sequence[ClaimedTask], depth: int) -> list[str | None]:
        """The route of each task, by the `wanted` asked for before; None: it needs none, or it
        cannot run now after all."""


@dataclass(frozen=True)
class Claim:
    """What one look at the queue brought: tasks with their routes."""

    tasks: list[tuple[ClaimedTask, str | None]]
    look: Look
    has_suspect: bool = False  # a task can have its last try now, alone
    last_tenant: str | None = None  # the last that was looked at; None: nothing is due


# PENDING tasks whose available_at has come are marked due: the claim's index holds only due
# rows, so a million delayed ones do not stand in its way.
MARK_DUE = """
UPDATE tasks SET due = true
WHERE task_id IN (
    SELECT task_id FROM tasks
    WHERE status = 'PENDING' AND NOT due AND available_at <= (SELECT current_instant())
    ORDER BY available_at
    LIMIT %(sweep_limit)s
    FOR NO KEY UPDATE SKIP LOCKED);
"""

# What a claim has to know first. `depth` is counted only as far as it matters. Each order is that
# of the index to be used: without it the planner, where it expects many such rows, reads the
# table from its beginning until it meets one, past all that is finished.
LOOK = """
SELECT
    (SELECT count(*) FROM (
        SELECT FROM tasks WHERE due AND NOT alone
        ORDER BY requested_route, tenant, priority DESC, task_id
        LIMIT %(depth_limit)s) AS d) AS depth,
    (SELECT task_id FROM tasks
     WHERE due AND alone AND requested_route = ANY(%(open_requests)s)
     ORDER BY task_id LIMIT 1) IS NOT NULL AS has_suspect,
    (SELECT extract(epoch FROM min(available_at) - current_instant())::double precision
     FROM tasks WHERE status = 'PENDING' AND NOT due) AS next_due_seconds,
    CASE WHEN %(count_in_flight)s THEN
        (SELECT jsonb_object_agg(route, calls) FROM (
            SELECT route, count(*) AS calls FROM tasks
            WHERE CASE WHEN status = 'RUNNING' THEN true END AND route IS NOT NULL
            GROUP BY route) AS running)
    END AS in_flight
"""

# The first half of a claim: which rows. Fair between tenants: each of those that have something
# due gives an equal share of the batch, and the scan starts after the tenant that was last
# served. Of each kind of route no more is taken than its budget (NULL: no limit) allows.
CHOOSE_TASKS = """
WITH asked AS (
    SELECT * FROM jsonb_to_recordset(%(wanted)s::jsonb) AS w(
        requested_route text, budget text, min_chars integer, max_chars integer)
),
visited AS MATERIALIZED (
    SELECT place, tenant
    FROM due_tenants(
        (SELECT array_agg(requested_route) FROM asked), %(after_tenant)s, %(slots)s)
),
share AS (
    SELECT ceil(%(slots)s / greatest(count(*), 1)::numeric)::bigint AS size FROM visited
),
locked AS (
    SELECT visited.place, asked.budget, candidate.*
    FROM visited CROSS JOIN asked CROSS JOIN LATERAL (
        SELECT t.task_id, t.priority FROM tasks t
        WHERE t.due AND NOT t.alone
          AND t.requested_route = asked.requested_route AND t.tenant = visited.tenant
          AND (asked.min_chars IS NULL OR prompt_length(t.payload) >= asked.min_chars)
          AND (asked.max_chars IS NULL OR prompt_length(t.payload) <= asked.max_chars)
        ORDER BY t.priority DESC, t.task_id
        LIMIT (SELECT size FROM share)
        FOR NO KEY UPDATE SKIP LOCKED) AS candidate
),
ranked AS (
    SELECT task_id, budget, place, priority,
           row_number() OVER (
               PARTITION BY place ORDER BY priority DESC, task_id) AS place_in_tenant,
           row_number() OVER (
               PARTITION BY budget ORDER BY priority DESC, task_id) AS place_in_budget
    FROM locked
),
chosen AS (
    SELECT task_id FROM ranked
    WHERE place_in_tenant <= (SELECT size FROM share)
      AND place_in_budget <= coalesce((%(budgets)s::jsonb ->> budget)::bigint, %(slots)s)
    ORDER BY place_in_tenant, place
    LIMIT %(slots)s
),
"""

# A suspect that can have its last try now.
FIND_SUSPECT = """
WITH asked AS (
    SELECT * FROM jsonb_to_recordset(%(wanted)s::jsonb) AS w(
        requested_route text, budget text, min_chars integer, max_chars integer)
),
chosen AS (
    SELECT t.task_id FROM tasks t
    WHERE t.due AND t.alone AND EXISTS (
        SELECT FROM asked
        WHERE asked.requested_route = t.requested_route
          AND (asked.min_chars IS NULL OR prompt_length(t.payload) >= asked.min_chars)
          AND (asked.max_chars IS NULL OR prompt_length(t.payload) <= asked.max_chars))
    ORDER BY t.task_id
    LIMIT 1
"""
TELL_SUSPECT = """
)
SELECT EXISTS (SELECT FROM chosen) AS has_suspect
"""
HAS_SUSPECT = FIND_SUSPECT + TELL_SUSPECT

# Instead of CHOOSE_TASKS: one task that no other may share a process with.
LOCK_SUSPECT = """
    FOR NO KEY UPDATE SKIP LOCKED
),
visited AS (SELECT NULL::text AS tenant, 1 AS place),
"""
# The second half: PENDING -> RUNNING (claimed), with a fresh token.
LEASE_CHOSEN = """
claimed AS (
    UPDATE tasks t
    SET status = 'RUNNING', reason = 'claimed', due = false,
        lease_token = gen_random_uuid(),
        lease_expires_at = current_instant() + make_interval(secs => %(lease_seconds)s),
        worker = %(worker)s, started_at = current_instant(), updated_at = current_instant(),
        attempt = attempt + 1, delivery_count = delivery_count + 1
    WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM chosen)) AND t.status = 'PENDING' AND t.due
    RETURNING t.task_id, t.parent_id AS run_id, t.step, t.lease_token::text, t.priority,
              t.tenant, t.kind, t.payload, t.gate, t.requested_route, t.timeout_seconds, t.attempt,
              t.delivery_count, t.retry_count
)
SELECT
    (SELECT json_agg(claimed ORDER BY priority DESC, task_id) FROM claimed) AS tasks,
    (SELECT tenant FROM visited ORDER BY place DESC LIMIT 1) AS last_tenant
"""

CLAIM_TASKS = CHOOSE_TASKS + LEASE_CHOSEN
# Both in one message, where what to take does not depend on the look.
LOOK_AND_CLAIM = CLAIM_TASKS + ", look.* FROM (" + LOOK + ") AS look"
LOOK_COLUMNS = ("depth", "has_suspect", "next_due_seconds")
NOTHING: Row = {"tasks": None, "last_tenant": None}
CLAIM_ALONE = FIND_SUSPECT + LOCK_SUSPECT + LEASE_CHOSEN

# With a limit on calls in flight, claims take turns, so that two cannot both take the last place.
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtext('orchestrator claim'));"

# The route was decided for tasks claimed a moment ago, in the same transaction.
SET_ROUTES = """
UPDATE tasks t SET route = chosen.route
FROM jsonb_to_recordset(%(routes)s::jsonb) AS chosen(task_id bigint, token uuid, route text)
WHERE t.task_id = chosen.task_id AND t.lease_token = chosen.token AND t.status = 'RUNNING'
"""


def claim_tasks(
    conn: Connection,
    worker: str,
    slots: int,
    lease_seconds: float,
    policy: ClaimPolicy,
    after_tenant: str = "",
) -> Claim:
    """Lease up to `slots` due tasks that `policy` wants now, and note the route of each.

    `after_tenant` is the last tenant of the claim before.
    """
    values = {
        "worker": worker,
        "slots": slots,
        "lease_seconds": lease_seconds,
        "after_tenant": after_tenant,
    }
    with transaction(conn) as cursor:
        if (wanted := policy.wanted_at_any_depth()) is not None:
            values |= {**_wanted(wanted, {}), **_asked(slots, policy)}
            row = _ask(cursor, MARK_DUE + LOOK_AND_CLAIM, values)
            look = Look(slots=slots, in_flight={}, **{name: row[name] for name in LOOK_COLUMNS})
        else:
            look = _look(cursor, slots, policy)
            wanted, budgets = policy.wanted(look)
            row = NOTHING
            if look.depth and wanted:
                row = _ask(cursor, CLAIM_TASKS, {**values, **_wanted(wanted, budgets)})
        has_suspect = look.has_suspect and _has_suspect(cursor, wanted)
        # The batch itself is no depth for its own decisions.
        claim = _routed(cursor, row, look, policy, look.depth - len(row["tasks"] or []))
        return replace(claim, has_suspect=has_suspect)


def claim_alone(conn: Connection, worker: str, lease_seconds: float, policy: ClaimPolicy) -> Claim:
    """Lease the next suspect, for a process that runs nothing else meanwhile."""
    with transaction(conn) as cursor:
        look = _look(cursor, 1, policy)
        wanted, budgets = policy.wanted(look)
        values = {"worker": worker, "lease_seconds": lease_seconds, **_wanted(wanted, budgets)}
        row = _ask(cursor, CLAIM_ALONE, values)
        return _routed(cursor, row, look, policy, look.depth)


def _ask(cursor: Cursor, statement: str, values: Row) -> Row:
    cursor.execute(statement, values)
    (row,) = cursor.fetchall()
    return row


def _wanted(wanted: Sequence[Wanted], budgets: Mapping[str, int | None]) -> Row:
    return {
        "wanted": json.dumps([vars(one) for one in wanted]),
        "budgets": json.dumps(budgets),
    }


def _asked(slots: int, policy: ClaimPolicy) -> Row:
    """What LOOK takes."""
    return {
        "sweep_limit": 1000,
        "depth_limit": policy.depth_that_matters + slots + 1,
        "count_in_flight": policy.has_limits,
        "open_requests": policy.open_requests(),
    }


def _look(cursor: Cursor, slots: int, policy: ClaimPolicy) -> Look:
    turn = TAKE_TURN if policy.has_limits else ""
    row = _ask(cursor, turn + MARK_DUE + LOOK, _asked(slots, policy))
    return Look(**{**row, "slots": slots, "in_flight": row["in_flight"] or {}})


def _has_suspect(cursor: Cursor, wanted: Sequence[Wanted]) -> bool:
    return bool(_ask(cursor, HAS_SUSPECT, _wanted(wanted, {}))["has_suspect"])


def _routed(cursor: Cursor, row: Row, look: Look, policy: ClaimPolicy, depth: int) -> Claim:
    """What was leased, with the routes that are noted now; `depth` is that besides the batch."""
    tasks = [_claimed(task) for task in row["tasks"] or []]
    routes = policy.choose(tasks, max(0, depth))
    chosen = [
        {**vars(task.lease), "route": route}
        for task, route in zip(tasks, routes, strict=True)
        if route is not None
    ]
    if chosen:
        cursor.execute(SET_ROUTES, {"routes": json.dumps(chosen)})
    return Claim(list(zip(tasks, routes, strict=True)), look, last_tenant=row["last_tenant"])


def _claimed(row: Row) -> ClaimedTask:
    return ClaimedTask(
        lease=Lease(row["task_id"], row["lease_token"], row["run_id"]),
        root_id=row["run_id"] or row["task_id"],
        tenant=row["tenant"],
        step=row["step"],
        gate=row["gate"],
        kind=row["kind"],
        payload=row["payload"] if isinstance(row["payload"], dict) else {},
        requested_route=row["requested_route"],
        timeout_seconds=row["timeout_seconds"],
        attempt=row["attempt"],
        delivery_count=row["delivery_count"],
        retry_count=row["retry_count"],
    )

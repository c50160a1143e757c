"""Who owns a task: heartbeat, settle, reap; the claim is in claims.py.

Every write after a claim says `task_id, lease_token, status = 'RUNNING'`, so that a worker whose
lease was taken over changes nothing. Each public function is one transaction.

Lock order: the rows of runs whose steps are in the batch, then the tasks, each in ascending
task_id; claim, heartbeat and reaper, and who notes routes, take only rows that nobody holds (SKIP
LOCKED), so only a settle ever waits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from config import Retry
from connection import Connection, Row, fetch
from queries.webhooks import Message
from runs.templates import Reference

Verdict = Literal[
    "succeeded",
    "failure",
    "permanent",
    "deadline",
    "recursion_limit",
    "released",
    "outage",
    "parked",
]


@dataclass(frozen=True)
class Lease:
    """The right to write to one task: its number and the token of one claim."""

    task_id: int
    token: str
    run_id: int | None = field(default=None, compare=False)  # of a step: to be locked first


@dataclass  # frozen, it would take three times as long to make, and thousands are in a second
class ClaimedTask:
    """A task as its worker gets it."""

    lease: Lease
    root_id: int  # its run, or itself
    kind: str
    payload: Mapping[str, Any]
    requested_route: str
    timeout_seconds: float | None
    attempt: int
    delivery_count: int
    retry_count: int
    tenant: str = "default"
    step: str | None = None  # its name in its run
    gate: Mapping[str, Any] | None = None  # what a job asked when it was parked, and the answer
    outputs: Mapping[Reference, Any] = field(default_factory=dict)  # that its payload refers to
    message: Message | None = None  # of a callback: what it brings

    @property
    def task_id(self) -> int:
        return self.lease.task_id

    @property
    def run_id(self) -> int | None:
        return self.lease.run_id


@dataclass  # as above
class Outcome:
    """What came of one attempt. `verdict` is the worker's; what becomes of the task is SQL's."""

    verdict: Verdict
    result: Any = None  # JSON
    error: str | None = None
    route: str | None = None
    model: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: Decimal | None = None
    truncated: bool = False
    delay_seconds: float = 0  # of an outage: when to look again
    gate: Mapping[str, Any] | None = None  # of a job that is parked: what it asks
    max_retry: int | None = None  # None: the settings' own, as below
    max_delay_seconds: float | None = None


class Settled(NamedTuple):
    """What became of a task; its fields are in the order in which SQL tells them."""

    task_id: int
    run_id: int | None
    token: str  # of the lease that ended
    status: str
    reason: str
    attempt: int
    retry_count: int
    delivery_count: int
    delay_seconds: float | None  # of one that is PENDING: until it can run again
    error: str | None
    truncated: bool


@dataclass(frozen=True)
class Beat:
    """The answer to a heartbeat."""

    lost: set[Lease] = field(default_factory=set)  # another worker may own these now
    cancelled: set[Lease] = field(default_factory=set)  # somebody asked to stop these


# Renews the leases that are still ours. A row that a settle of the same process holds is not
# waited for: its token, read without a lock, says whether it is ours. The state is asked as in
# SET_ROUTES.
RENEW_LEASES = """
WITH ours AS (
    SELECT * FROM jsonb_to_recordset(%(leases)s::jsonb) AS l(task_id bigint, token uuid)
),
free AS (
    SELECT t.task_id, t.lease_token
    FROM tasks t JOIN ours ON t.task_id = ours.task_id AND t.lease_token = ours.token
    WHERE (t.status = 'RUNNING') IS TRUE
    ORDER BY t.task_id
    FOR NO KEY UPDATE OF t SKIP LOCKED
),
renewed AS (
    UPDATE tasks t
    SET lease_expires_at = current_instant() + make_interval(secs => %(lease_seconds)s)
    FROM free
    WHERE t.task_id = free.task_id AND t.lease_token = free.lease_token
      AND (t.status = 'RUNNING') IS TRUE
)
SELECT t.task_id, t.lease_token::text AS token, t.cancel_requested
FROM tasks t JOIN ours ON t.task_id = ours.task_id AND t.lease_token = ours.token
WHERE (t.status = 'RUNNING') IS TRUE
"""


def renew_leases(conn: Connection, leases: Sequence[Lease], lease_seconds: float) -> Beat:
    """Renew all leases of a process in one statement; tell which are lost, which cancelled."""
    values = {"leases": json.dumps([vars(lease) for lease in leases])}
    rows = fetch(conn, RENEW_LEASES, {**values, "lease_seconds": lease_seconds})
    alive = {Lease(row["task_id"], row["token"]): row["cancel_requested"] for row in rows}
    return Beat(
        lost=set(leases) - set(alive),
        cancelled={lease for lease, cancel_requested in alive.items() if cancel_requested},
    )


_shortest_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# RUNNING -> wherever the outcome leads, for the holder of the lease only, and what follows from it
# for runs: a function of schema.sql, since a function keeps its plans.
SETTLE_TASKS = """
SELECT settle_tasks(
    %(outcomes)s::jsonb, %(run_ids)s::bigint[], %(max_retry)s, %(max_delay_seconds)s) AS settled
"""


def settle_tasks(
    conn: Connection, outcomes: Sequence[tuple[Lease, Outcome]], retry: Retry
) -> list[Settled]:
    """Write what came of each leased task; a task missing from the answer was no longer ours.

    The end of a step promotes, cancels and ends what depends on it, in the same transaction.
    """
    (row,) = fetch(conn, SETTLE_TASKS, settle_values(outcomes, retry))
    return as_settled(row["settled"])


def settle_values(outcomes: Sequence[tuple[Lease, Outcome]], retry: Retry) -> Row:
    """The values of SETTLE_TASKS."""
    return {
        "outcomes": _shortest_json([_as_row(*pair) for pair in outcomes]),
        "run_ids": list({lease.run_id for lease, _ in outcomes if lease.run_id is not None}),
        "max_retry": retry.max_retry,
        "max_delay_seconds": retry.max_delay_seconds,
    }


def as_settled(told: Sequence[Any] | None) -> list[Settled]:
    """What a settle or the reaper tells, one list for each column, by tasks."""
    return [Settled(*one) for one in zip(*told or [], strict=True)]


def _as_row(lease: Lease, outcome: Outcome) -> Row:
    """What there is of both, and no more: thousands of these are read and written in a second."""
    row: Row = {"task_id": lease.task_id, "token": lease.token}
    for name, value in vars(outcome).items():
        if value:
            row[name] = value
    if outcome.result is not None:
        row["result"] = outcome.result
    if outcome.cost is not None:
        row["cost"] = str(outcome.cost)
    return row


# RUNNING -> PENDING (reaped), FAILED (max_delivery) or CANCELLED, where the lease has run out, and
# what follows from it for runs.
REAP_TASKS = """
SELECT reap_tasks(
    %(max_delivery)s, %(spread_seconds)s, %(sweep_limit)s, %(after)s, %(only)s::bigint) AS settled
"""


def reap_tasks(
    conn: Connection, retry: Retry, spread_seconds: float, after: int = 0, only: int | None = None
) -> list[Settled]:
    """Take back up to 500 tasks whose lease has run out, numbers above `after`, lowest first."""
    values = {
        "max_delivery": retry.max_delivery,
        "spread_seconds": spread_seconds,
        "sweep_limit": 500,
        "after": after,
        "only": only,
    }
    (row,) = fetch(conn, REAP_TASKS, values)
    return as_settled(row["settled"])


EXPIRED_TASKS = """
SELECT task_id FROM tasks
WHERE CASE WHEN status = 'RUNNING' THEN true END AND lease_expires_at < current_instant()
  AND task_id > %(after)s
ORDER BY task_id
LIMIT %(sweep_limit)s
"""


def expired_tasks(conn: Connection, after: int) -> list[int]:
    """Up to 500 tasks whose lease has run out, for a sweep that goes one by one."""
    rows = fetch(conn, EXPIRED_TASKS, {"after": after, "sweep_limit": 500})
    return [row["task_id"] for row in rows]


# Each order is that of an index, so that the planner has no reason to read the table: see LOOK.
HAS_WORK = """
SELECT coalesce(
    (SELECT task_id FROM tasks
     WHERE CASE WHEN status = 'RUNNING' THEN true END ORDER BY task_id LIMIT 1),
    (SELECT task_id FROM tasks WHERE due AND NOT alone
     ORDER BY requested_route, tenant, priority DESC, task_id LIMIT 1),
    (SELECT task_id FROM tasks WHERE due AND alone ORDER BY task_id LIMIT 1),
    (SELECT task_id FROM tasks WHERE status = 'PENDING' AND NOT due
     ORDER BY available_at LIMIT 1)) IS NOT NULL AS has_work
"""


def has_work(conn: Connection) -> bool:
    """Whether anything is PENDING (delayed included) or RUNNING, of any worker."""
    return bool(fetch(conn, HAS_WORK)[0]["has_work"])

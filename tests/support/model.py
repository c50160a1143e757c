"""What must hold of every task at every moment, and what each call is to make of a row.

PROMISES asks Postgres: each row against its audit log, retold from the beginning, and against the
clock. The functions below say in Python what the statements of queries/ say in SQL, column by
column, so that the one checks the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from config import Retry
from db import Connection, Row
from queries.leases import ClaimedTask, Outcome
from tests.support import prepared

FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
FAILURES = ("failure", "permanent", "deadline")
NO_LEASE = {"lease_token": None, "lease_expires_at": None}
STATUS_AFTER = {
    "succeeded": "SUCCEEDED",
    "cancelled": "CANCELLED",
    **dict.fromkeys(("retry", "released", "outage", "reaped"), "PENDING"),
}

# Each promise that is broken, with the task. A life of a task ends with a requeue; a cancel that
# ends a run does not say in the log what the worker's verdict was, so it may have counted.
PROMISES = """
WITH log AS (
    SELECT a.*,
           lag(to_status) OVER told AS before,
           lag(at) OVER told AS at_before,
           count(*) FILTER (WHERE reason = 'requeued') OVER told AS life
    FROM audit_log a
    WHERE task_id > %(floor)s
    WINDOW told AS (PARTITION BY task_id ORDER BY id)
),
lives AS (
    SELECT task_id, life,
           count(*) FILTER (WHERE to_status IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) AS ends,
           count(*) FILTER (WHERE reason = 'claimed')
               - count(*) FILTER (WHERE reason IN ('released', 'outage')) AS deliveries,
           count(*) FILTER (
               WHERE reason IN ('retry', 'max_retry', 'permanent', 'deadline')) AS failures,
           bool_or(from_status = 'RUNNING' AND to_status = 'CANCELLED')::int AS stopped
    FROM log GROUP BY task_id, life
),
story AS (
    SELECT task_id, max(life) AS life,
           (array_agg(to_status ORDER BY id DESC))[1] AS status,
           (array_agg(reason ORDER BY id DESC))[1] AS reason,
           bool_and(from_status IS NOT DISTINCT FROM before) AS is_a_chain,
           bool_and(at_before IS NULL OR at >= at_before) AS goes_forward,
           bool_and(EXISTS (
               SELECT FROM transitions t
               WHERE t.from_status IS NOT DISTINCT FROM log.from_status
                 AND t.to_status = log.to_status AND t.reason = log.reason)) AS is_legal,
           count(*) FILTER (WHERE reason = 'claimed') AS claims,
           array_agg(attempt ORDER BY id) FILTER (WHERE reason = 'claimed') AS attempts,
           count(*) FILTER (WHERE to_status = 'SUCCEEDED') AS successes,
           count(*) FILTER (WHERE reason IN ('reaped', 'max_delivery')) AS reclaims,
           bool_or(from_status = 'RUNNING' AND to_status = 'CANCELLED')::int AS stopped
    FROM log GROUP BY task_id
)
SELECT t.task_id, promise.words
FROM tasks t
LEFT JOIN story s USING (task_id)
LEFT JOIN lives l ON l.task_id = s.task_id AND l.life = s.life
CROSS JOIN LATERAL (
    SELECT t.delivery_count - t.retry_count AS lost,
           coalesce(t.max_retry, %(max_retry)s) AS max_retry) AS has
CROSS JOIN LATERAL (VALUES
    ('the audit ends with the status and the reason of the row',
     s.status = t.status AND s.reason = t.reason),
    ('the audit is one chain of legal transitions', s.is_a_chain AND s.is_legal),
    ('the audit goes forward in time', s.goes_forward),
    ('it was settled once in each life, and succeeded once in all',
     s.successes <= 1 AND (SELECT max(ends) <= 1 FROM lives WHERE lives.task_id = t.task_id)),
    ('attempt counts the claims',
     t.attempt = s.claims
     AND coalesce(s.attempts, '{}') = array(SELECT generate_series(1, t.attempt))),
    ('delivery_count counts the hand-outs that did not come back on purpose',
     t.delivery_count = l.deliveries),
    ('retry_count counts the failures',
     t.retry_count BETWEEN l.failures AND l.failures + l.stopped),
    ('reclaim_count counts what the reaper took',
     t.reclaim_count BETWEEN s.reclaims AND s.reclaims + s.stopped),
    ('no more failures than allowed, and none left to a task that waits',
     t.retry_count <= has.max_retry
     AND (t.status NOT IN ('PENDING', 'RUNNING') OR t.retry_count < has.max_retry)),
    ('no more losses than allowed, and none left to a task that waits',
     has.lost <= %(max_delivery)s
     AND (t.status <> 'PENDING' OR has.lost < %(max_delivery)s)),
    ('a task has its last try alone, and no other',
     t.status <> 'PENDING' OR t.alone = (has.lost = %(max_delivery)s - 1)),
    ('what it died of has happened',
     CASE t.reason
         WHEN 'max_retry' THEN t.retry_count = has.max_retry
         WHEN 'max_delivery' THEN has.lost = %(max_delivery)s
         ELSE true END),
    ('nothing is due before its time', NOT t.due OR t.available_at <= current_instant()),
    ('what waits is due or has its time to come, known to the claim',
     t.status <> 'PENDING' OR t.due OR t.available_at >= t.updated_at),
    ('nothing was done in the future',
     greatest(t.updated_at, t.started_at, t.finished_at) <= current_instant()
     AND t.updated_at >= t.created_at)
) AS promise(words, is_kept)
WHERE is_kept IS NOT TRUE
"""


def broken_promises(conn: Connection, floor: int, retry: Retry) -> list[Row]:
    """The promises that do not hold now, of tasks with numbers above `floor`."""
    caps = {"max_retry": retry.max_retry, "max_delivery": retry.max_delivery}
    return prepared.ask(conn, PROMISES, floor=floor, **caps)


@dataclass
class Paid:
    """What the attempts of a task have used, added up."""

    cost: Decimal | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, row: Row) -> Paid:
        return cls(row["cost"], row["prompt_tokens"], row["completion_tokens"])

    def add(self, outcome: Outcome) -> None:
        if outcome.cost is not None:
            self.cost = (self.cost or Decimal(0)) + outcome.cost
        self.prompt_tokens += outcome.prompt_tokens
        self.completion_tokens += outcome.completion_tokens


# What each call makes of a row: the columns that it changes; None: it refuses.


def claimed(row: Row, task: ClaimedTask, worker: str, now: datetime, until: datetime) -> Row:
    return {
        "status": "RUNNING",
        "reason": "claimed",
        "due": False,
        "lease_token": task.lease.token,
        "lease_expires_at": until,
        "worker": worker,
        "started_at": now,
        "updated_at": now,
        "attempt": row["attempt"] + 1,
        "delivery_count": row["delivery_count"] + 1,
        "route": "local",
    }


def cancelled(row: Row, now: datetime) -> Row | None:
    if row["status"] in FINAL:
        return None
    if row["status"] == "RUNNING":
        return {"cancel_requested": True, "updated_at": now}
    ended = {"status": "CANCELLED", "reason": "cancelled", "due": False, "finished_at": now}
    return {**ended, "cancel_requested": True, "updated_at": now}


def requeued(row: Row, now: datetime) -> Row | None:
    if row["status"] != "FAILED":
        return None
    fresh = {"alone": False, "retry_count": 0, "delivery_count": 0, "last_error": None}
    due = {"due": True, "available_at": now, "updated_at": now, "finished_at": None}
    return {"status": "PENDING", "reason": "requeued", **fresh, **due}


def settled(row: Row, outcome: Outcome, retry: Retry, now: datetime) -> Row:
    """By the holder of its lease."""
    failed = outcome.verdict in FAILURES
    retry_count = row["retry_count"] + failed
    reason: str = outcome.verdict
    if row["cancel_requested"]:
        reason = "cancelled"
    elif outcome.verdict == "failure":
        has_tries_left = retry_count < (row["max_retry"] or retry.max_retry)
        reason = "retry" if has_tries_left else "max_retry"
    status = STATUS_AFTER.get(reason, "FAILED")
    waits = status == "PENDING"
    wait_seconds = min(2**retry_count, retry.max_delay_seconds) if failed else outcome.delay_seconds
    return {
        "status": status,
        "reason": reason,
        "retry_count": retry_count,
        "delivery_count": row["delivery_count"] - (reason in ("released", "outage")),
        "result": outcome.result if status == "SUCCEEDED" else None,
        "result_bytes": len(json.dumps(outcome.result)) if status == "SUCCEEDED" else None,
        "last_error": outcome.error if status != "SUCCEEDED" else None,
        "duration_seconds": (now - row["started_at"]).total_seconds(),
        "cancel_requested": reason == "cancelled",
        "due": waits and wait_seconds == 0,
        "available_at": now + timedelta(seconds=wait_seconds) if waits else row["available_at"],
        **NO_LEASE,
        **_paid(row, outcome),
        "updated_at": now,
        "finished_at": None if waits else now,
    }


def _paid(row: Row, outcome: Outcome) -> Row:
    paid = Paid.of(row)
    paid.add(outcome)
    return vars(paid)


def reaped(row: Row, retry: Retry, now: datetime) -> Row:
    """When its lease has run out."""
    lost = row["delivery_count"] - row["retry_count"]
    reason = "max_delivery" if lost >= retry.max_delivery else "reaped"
    if row["cancel_requested"]:
        reason = "cancelled"
    waits = reason == "reaped"
    told = (
        f"handed out {lost} times and each time the worker was lost; the last was {row['worker']}"
    )
    return {
        "status": STATUS_AFTER.get(reason, "FAILED"),
        "reason": reason,
        "last_error": told if reason == "max_delivery" else row["last_error"],
        "reclaim_count": row["reclaim_count"] + 1,
        "alone": waits and lost == retry.max_delivery - 1,
        "due": waits,
        "available_at": now if waits else row["available_at"],
        **NO_LEASE,
        "updated_at": now,
        "finished_at": None if waits else now,
    }

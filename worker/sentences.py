"""One sentence in the log for each transition that a worker makes or learns of."""

from __future__ import annotations

import logging

from logs import say
from queries.leases import ClaimedTask, Lease, Settled

logger = logging.getLogger("scheduler")

SENTENCES = {
    "succeeded": "Task {0} succeeded.",
    "retry": "Task {0} failed and will be tried again.",
    "released": "Task {0} was handed back.",
    "outage": "Task {0} was handed back: the model server is away.",
    "parked": "Task {0} waits for a person.",
    "reaped": "Task {0} was taken back: its lease ran out.",
    "cancelled": "Task {0} was cancelled.",
    "max_retry": "Task {0} failed for the last time and is a dead letter.",
    "max_delivery": "Task {0} was lost with its worker too often and is a dead letter.",
    "permanent": "Task {0} cannot succeed and is a dead letter.",
    "deadline": "Task {0} ran out of time and is a dead letter.",
    "recursion_limit": "Task {0} took more steps than it may and is a dead letter.",
}


def log_claimed(task: ClaimedTask, route: str | None, worker: str) -> None:
    say(
        logger,
        logging.INFO,
        f"Claimed task {task.task_id}.",
        "claimed",
        task_id=task.task_id,
        worker=worker,
        attempt=task.attempt,
        delivery_count=task.delivery_count,
        route=route,
    )


def log_settled(settled: Settled, worker: str) -> None:
    say(
        logger,
        logging.ERROR if settled.status == "FAILED" else logging.INFO,
        SENTENCES[settled.reason].format(settled.task_id),
        settled.reason,
        task_id=settled.task_id,
        worker=worker,
        attempt=settled.attempt,
        retry_count=settled.retry_count,
        delivery_count=settled.delivery_count,
        delay_seconds=settled.delay_seconds if settled.status == "PENDING" else None,
        error=settled.error,
        truncated=settled.truncated or None,
    )


def log_lost(lease: Lease, worker: str) -> None:
    say(
        logger,
        logging.WARNING,
        f"The lease of task {lease.task_id} is gone: taken over, or its end is written already.",
        "lease_lost",
        task_id=lease.task_id,
        worker=worker,
    )

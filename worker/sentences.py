"""One sentence in the log for each transition that a worker makes or learns of."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from logs import field, line, say, say_all
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


def log_claimed(tasks: Iterable[tuple[ClaimedTask, str | None]], worker: str) -> None:
    """A line for each task, with its route, as `line` writes it, but sooner: there are many."""
    of_worker = field("worker", worker)
    lines = [
        f"Claimed task {task.lease.task_id}. action=claimed task_id={task.lease.task_id}{of_worker}"
        f" attempt={task.attempt} delivery_count={task.delivery_count}{field('route', route)}"
        for task, route in tasks
    ]
    say_all(logger, logging.INFO, lines)


def log_settled(settled: Iterable[Settled], worker: str) -> None:
    """A line for each task; dead letters are errors, and come last."""
    lines: dict[int, list[str]] = {logging.INFO: [], logging.ERROR: []}
    for one in settled:
        lines[logging.ERROR if one.status == "FAILED" else logging.INFO].append(
            line(
                SENTENCES[one.reason].format(one.task_id),
                one.reason,
                task_id=one.task_id,
                worker=worker,
                attempt=one.attempt,
                retry_count=one.retry_count,
                delivery_count=one.delivery_count,
                delay_seconds=one.delay_seconds if one.status == "PENDING" else None,
                error=one.error,
                truncated=one.truncated or None,
            )
        )
    for level, of_level in lines.items():
        say_all(logger, level, of_level)


def log_lost(lease: Lease, worker: str) -> None:
    say(
        logger,
        logging.WARNING,
        f"The lease of task {lease.task_id} is gone: taken over, or its end is written already.",
        "lease_lost",
        task_id=lease.task_id,
        worker=worker,
    )

"""One sentence in the log for each transition that a worker makes or learns of."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from logs import field, line, say_all
from queries.leases import ClaimedTask, Lease, Settled

logger = logging.getLogger("scheduler")

WHAT_BECAME_OF_IT = {
    "succeeded": "succeeded.",
    "retry": "failed and will be tried again.",
    "released": "was handed back.",
    "outage": "was handed back: the model server is away.",
    "parked": "waits for a person.",
    "reaped": "was taken back: its lease ran out.",
    "cancelled": "was cancelled.",
    "max_retry": "failed for the last time and is a dead letter.",
    "max_delivery": "was lost with its worker too often and is a dead letter.",
    "permanent": "cannot succeed and is a dead letter.",
    "deadline": "ran out of time and is a dead letter.",
    "recursion_limit": "took more steps than it may and is a dead letter.",
}
WHY_IT_IS_GONE = "taken over, given up, or its end is written already"


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
    """A line for each task, as `line` writes it, but sooner; dead letters are errors, come last."""
    of_worker = field("worker", worker)
    lines: list[str] = []
    of_dead_letters: list[str] = []
    for one in settled:
        text = (
            f"Task {one.task_id} {WHAT_BECAME_OF_IT[one.reason]}"
            f" action={one.reason} task_id={one.task_id}{of_worker} attempt={one.attempt}"
            f" retry_count={one.retry_count} delivery_count={one.delivery_count}"
        )
        if one.status == "PENDING":
            text += field("delay_seconds", one.delay_seconds)
        if one.error is not None:
            text += field("error", one.error)
        if one.truncated:
            text += " truncated=True"
        (of_dead_letters if one.status == "FAILED" else lines).append(text)
    say_all(logger, logging.INFO, lines)
    say_all(logger, logging.ERROR, of_dead_letters)


def log_lost(lost: Iterable[Lease], worker: str) -> None:
    """A line for each lease, as `line` writes it; with a process's connection it loses all."""
    lines = [
        line(
            f"The lease of task {one.task_id} is gone: {WHY_IT_IS_GONE}.",
            "lease_lost",
            task_id=one.task_id,
            worker=worker,
        )
        for one in lost
    ]
    say_all(logger, logging.WARNING, lines)

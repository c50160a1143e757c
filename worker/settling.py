"""Outcomes into the database, many in one statement; one that is refused holds up no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import psycopg2

import db
from config import Retry
from queries import leases
from queries.leases import Lease, Outcome, Settled

logger = logging.getLogger(__name__)

LARGEST_BATCH = 100
LARGEST_BATCH_CHARACTERS = 16_000_000  # of answers; Postgres takes up to 256 MB in one statement

Finished = tuple[Lease, Outcome]


def batch_to_settle(unsettled: Sequence[Finished]) -> list[Finished]:
    """The first outcomes, as many as one statement can carry; at least one."""
    batch: list[Finished] = []
    characters = 0
    for lease, outcome in unsettled[:LARGEST_BATCH]:
        characters += len(str(outcome.result or ""))
        if batch and characters > LARGEST_BATCH_CHARACTERS:
            break
        batch.append((lease, outcome))
    return batch


def settle_batch(conn: db.Connection, batch: Sequence[Finished], retry: Retry) -> list[Settled]:
    """Write a batch; an outcome that Postgres refuses is replaced by that failure, alone."""
    try:
        return leases.settle_tasks(conn, batch, retry)
    except psycopg2.Error as refused:
        if len(batch) > 1:
            return [one for pair in batch for one in settle_batch(conn, [pair], retry)]
        lease, _ = batch[0]
        logger.error("The outcome of task %s cannot be stored: %s", lease.task_id, refused)
        reason = f"its outcome could not be stored: {type(refused).__name__}"
        return leases.settle_tasks(conn, [(lease, Outcome("failure", error=reason))], retry)

"""Outcomes into the database, many in one statement.

One that Postgres refuses, or whose rows somebody holds, keeps no other from being written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psycopg2.errors

import db
from config import Retry
from connection import impatient
from errors import DatabaseUnavailable, first_line
from queries import leases
from queries.leases import Lease, Outcome, Settled

logger = logging.getLogger(__name__)

# So long a batch waits for rows that somebody holds, and then each part of it alone.
IMPATIENT_SECONDS = 0.5
IMPATIENT_PART_SECONDS = 0.05

LARGEST_BATCH = 500
# Of results and gates; Postgres takes up to 256 MB in one statement.
LARGEST_BATCH_CHARACTERS = 16_000_000

Finished = tuple[Lease, Outcome]


def batch_to_settle(unsettled: Sequence[Finished]) -> list[Finished]:
    """The first outcomes, as many as one statement can carry; at least one."""
    batch = list(unsettled[:LARGEST_BATCH])
    characters = 0
    for place, (_, outcome) in enumerate(batch):
        characters += len(str(outcome.result))
        if outcome.gate:
            characters += len(str(outcome.gate))
        if characters > LARGEST_BATCH_CHARACTERS and place > 0:
            return batch[:place]
    return batch


class Written(NamedTuple):
    """What came of the outcomes that went out in one statement."""

    settled: Sequence[Settled] = ()
    held: Sequence[Finished] = ()  # somebody holds their rows
    refused: Sequence[tuple[Finished, str]] = ()  # with why; their failure cannot be stored either


def settle_batch(
    conn: db.Connection,
    batch: Sequence[Finished],
    retry: Retry,
    patience_seconds: float = IMPATIENT_SECONDS,
) -> list[Written]:
    """Write a batch, in parts if need be; what came of each part, in the order of writing.

    An outcome that cannot be stored is replaced by that failure, alone. An outcome in none of the
    lists was no longer ours to write.
    """
    try:
        settled = _settle_now(conn, batch, retry, patience_seconds)
    except DatabaseUnavailable:
        raise
    except Exception as refused:  # by Postgres, or because no message can be made of it
        if len(batch) == 1:
            return [_settle_refused(conn, batch[0], refused, retry, patience_seconds)]
        parts = [[pair] for pair in batch]
    else:
        if settled is not None:
            return [Written(settled)]
        parts = _parts(batch)
        if len(parts) == 1:
            return [Written(held=batch)]
    return [
        written
        for part in parts
        for written in settle_batch(conn, part, retry, IMPATIENT_PART_SECONDS)
    ]


def _settle_now(
    conn: db.Connection, batch: Sequence[Finished], retry: Retry, patience_seconds: float
) -> list[Settled] | None:
    """What became of a batch, or None, if somebody holds its rows."""
    try:
        with impatient(conn, patience_seconds):
            return leases.settle_tasks(conn, batch, retry)
    except DatabaseUnavailable as away:
        if isinstance(away.__cause__, psycopg2.errors.LockNotAvailable):
            return None
        raise


def _parts(batch: Sequence[Finished]) -> list[list[Finished]]:
    """By run, because the steps of one wait for the same row; lone tasks each for its own."""
    parts: dict[tuple[int | None, int | None], list[Finished]] = {}
    for lease, outcome in batch:
        alone = lease.task_id if lease.run_id is None else None
        parts.setdefault((lease.run_id, alone), []).append((lease, outcome))
    return list(parts.values())


def _settle_refused(
    conn: db.Connection,
    pair: Finished,
    refused: Exception,
    retry: Retry,
    patience_seconds: float,
) -> Written:
    """Write instead of an outcome that it cannot be stored.

    It cannot, if it is refused on both sides of a write that is taken: Postgres may have stored
    nothing until a moment ago, and what is finished is not to be done anew for that.
    """
    (lease, outcome), limits = pair, (retry, patience_seconds)
    reason = f"its outcome could not be stored: {type(refused).__name__}"
    failure = Outcome("failure", error=reason)
    with _taken_back(conn):
        written = _settle_one(conn, pair, failure, *limits)
    if not written.settled:
        return written
    written = _settle_one(conn, pair, outcome, *limits)
    if not written.refused:
        return written
    written = _settle_one(conn, pair, failure, *limits)
    if written.settled:
        why = first_line(refused)
        logger.error("The outcome of task %s cannot be stored: %s", lease.task_id, why)
    return written


def _settle_one(
    conn: db.Connection, pair: Finished, outcome: Outcome, retry: Retry, patience_seconds: float
) -> Written:
    """Write this of the task in `pair`, which is what has to be tried again."""
    try:
        settled = _settle_now(conn, [(pair[0], outcome)], retry, patience_seconds)
    except DatabaseUnavailable:
        raise
    except Exception as refused:
        return Written(refused=[(pair, first_line(refused))])
    return Written(held=[pair]) if settled is None else Written(settled)


class _TakenBack(Exception):
    """Ends a transaction with ROLLBACK."""


@contextmanager
def _taken_back(conn: db.Connection) -> Iterator[None]:
    """Nothing that is written inside the block stays."""
    with suppress(_TakenBack), db.transaction(conn):
        yield
        raise _TakenBack

"""Outcomes into the database, many in one statement.

One that Postgres refuses, or whose rows somebody holds, keeps no other from being written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import psycopg2.errors

import db
from config import Retry
from connection import impatient
from errors import DatabaseUnavailable
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


class NothingStored(Exception):
    """No outcome of a batch can be stored now; the text says why, and quotes none of them."""


class _Written(NamedTuple):
    """What came of a batch."""

    settled: list[Settled]
    held: list[Finished]  # somebody holds their rows
    refused: list[tuple[Finished, Exception]]  # neither they nor their failure can be stored


def settle_batch(
    conn: db.Connection, batch: Sequence[Finished], retry: Retry
) -> tuple[list[Settled], list[Finished]]:
    """Write a batch: what became of it, and what has to be tried again, since its rows are held.

    An outcome that cannot be stored is replaced by that failure, alone. If that cannot be stored
    either, it is in neither list, and its lease is left to run out: but only if others could be
    written, so that it is this row and not the database. Else this raises NothingStored.
    """
    settled, held, refused = _settle(conn, batch, retry, IMPATIENT_SECONDS)
    for (lease, _), error in refused:
        if not settled:
            raise NothingStored(_first_line(error)) from None
        logger.error(
            "Neither the outcome of task %s can be stored nor that it failed; "
            "its lease is left to run out: %s",
            lease.task_id,
            _first_line(error),
        )
    return settled, held


def _settle(
    conn: db.Connection, batch: Sequence[Finished], retry: Retry, patience_seconds: float
) -> _Written:
    try:
        settled = _settle_now(conn, batch, retry, patience_seconds)
    except DatabaseUnavailable:
        raise
    except Exception as refused:  # by Postgres, or because no message can be made of it
        if len(batch) == 1:
            return _settle_refused(conn, batch[0], refused, retry, patience_seconds)
        parts = [[pair] for pair in batch]
    else:
        if settled is not None:
            return _Written(settled, [], [])
        parts = _parts(batch)
        if len(parts) == 1:
            return _Written([], list(batch), [])
    done = [_settle(conn, part, retry, IMPATIENT_PART_SECONDS) for part in parts]
    return _Written(*(list(chain(*of_parts)) for of_parts in zip(*done, strict=True)))


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
) -> _Written:
    """Write instead of an outcome that it cannot be stored."""
    lease, _ = pair
    reason = f"its outcome could not be stored: {type(refused).__name__}"
    failure = (lease, Outcome("failure", error=reason))
    try:
        settled = _settle_now(conn, [failure], retry, patience_seconds)
    except DatabaseUnavailable:
        raise
    except Exception as refused_again:
        return _Written([], [], [(pair, refused_again)])
    if settled is None:
        return _Written([], [pair], [])
    logger.error("The outcome of task %s cannot be stored: %s", lease.task_id, _first_line(refused))
    return _Written(settled, [], [])


def _first_line(refused: Exception) -> str:
    """What Postgres says after it may quote the outcome, and that is no matter for the log."""
    return str(refused).strip().split("\n")[0]

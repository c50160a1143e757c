"""Drain after a long time at full rate, and beside a session that sits in an open transaction.

    python -m bench.churn               # ten minutes
    python -m bench.churn --quick       # one minute
    python -m bench.churn --minutes 3

One worker runs no-op tasks while a few thousand of them wait at any time. Then come drains that
take the table as it is: no VACUUM but autovacuum's, with Postgres' own settings and the table's.
They take turns with drains in a fresh database. After that it goes on for a minute (in the quick
one, 20 s) in which a session holds a snapshot open, so that nothing that dies can be
removed, and the drains beside that session follow.

Dead tuples are pgstattuple's, exact. Finished tasks stay, so the table grows; what of it is bloat
is told by its size when it is rebuilt at the end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench import laden
from bench.common import MeasureFailed, Stage, administrator, ask
from bench.drain import fill
from bench.report import Record, run

QUEUED = 4000  # more are submitted when fewer wait
SUBMITTED = 2000
LOOK_SECONDS = 0.02
MEGABYTE = 1_000_000
EMPTY_INDEX = 8192


@dataclass(frozen=True)
class Length:
    """How much of everything."""

    minutes: float
    held_seconds: float  # beside an open transaction
    drained: int  # tasks of one drain
    repetitions: int


FULL = Length(minutes=10, held_seconds=60, drained=20_000, repetitions=3)
QUICK = Length(minutes=1, held_seconds=20, drained=20_000, repetitions=2)

DEAD_TUPLES = "SELECT dead_tuple_count FROM pgstattuple('tasks')"
LIVE_TASKS = "SELECT tuple_count FROM pgstattuple('tasks')"  # a count would tidy its pages up
LIST_SIZES = """
SELECT 'tasks' AS name, pg_relation_size('tasks') AS bytes
UNION ALL
SELECT indexrelid::regclass::text, pg_relation_size(indexrelid)
FROM pg_index WHERE indrelid = 'tasks'::regclass
ORDER BY name
"""
COUNT_VACUUMS = "SELECT autovacuum_count FROM pg_stat_user_tables WHERE relname = 'tasks'"


def measure(stage: Stage, record: Record, length: Length) -> None:
    record.note(
        f"{length.minutes:g} minutes of churn, "
        f"then {length.held_seconds:g} s beside an open transaction"
    )
    url = stage.database()
    with administrator(url) as cursor:
        cursor.execute("CREATE EXTENSION IF NOT EXISTS pgstattuple")
    laden.drain(stage, url, length.drained)
    note_sizes(record, url, "before")
    churn(stage, record, url, "alone", 60 * length.minutes)
    note_sizes(record, url, "after churn")
    drains(stage, record, url, "after churn", length)
    with open_transaction(url):
        churn(stage, record, url, "beside an open transaction", length.held_seconds)
        note_sizes(record, url, "beside an open transaction")
        drains(stage, record, url, "beside an open transaction", length)
        note_sizes(record, url, "at the end")
    with administrator(url) as cursor:
        cursor.execute("VACUUM FULL tasks")
    note_sizes(record, url, "rebuilt")


def drains(stage: Stage, record: Record, url: str, when: str, length: Length) -> None:
    """In a fresh database and in this one, by turns."""
    for _ in range(length.repetitions):
        fresh = stage.database()
        before = record.add("drain before", laden.drain(stage, fresh, length.drained), "tasks/s")
        stage.drop(fresh)
        rate = laden.drain(stage, url, length.drained, vacuum=False)
        after = record.add(f"drain {when}", rate, "tasks/s")
        record.ratio(f"drain {when} / before", after / before)


def churn(stage: Stage, record: Record, url: str, when: str, seconds: float) -> None:
    """Submit and run tasks for so long, and wait until the last of them has been settled."""
    worker = stage.worker(url, "--concurrency", str(laden.CONCURRENCY))
    with administrator(url) as cursor:
        rows = ask(cursor, laden.AUDIT_ROWS)
        began, submitted = time.monotonic(), 0
        while (gone := time.monotonic() - began) < seconds or ask(cursor, laden.IS_WORK_LEFT):
            if gone < seconds and queued(cursor, rows, submitted) < QUEUED:
                fill(url, SUBMITTED)
                submitted += SUBMITTED
            else:
                time.sleep(LOOK_SECONDS)
            if not worker.is_running():
                raise MeasureFailed(worker.log[-2000:])
        record.add(f"churn {when}", submitted / (time.monotonic() - began), "tasks/s")
        stage.end(worker)


def queued(cursor: Any, rows_before: int, submitted: int) -> float:
    """How many of the submitted tasks wait or run; to count them would itself be a load."""
    later_rows: int = ask(cursor, laden.AUDIT_ROWS) - rows_before - submitted
    return submitted - later_rows / 2


@contextmanager
def open_transaction(url: str) -> Iterator[None]:
    """A session that has read something in a transaction, and does nothing more."""
    with administrator(url) as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM workers")
        yield
        cursor.execute("ROLLBACK")


def note_sizes(record: Record, url: str, when: str) -> None:
    with administrator(url) as cursor:
        record.add(f"dead tuples of tasks, {when}", ask(cursor, DEAD_TUPLES), "rows")
        record.add(f"live tasks, {when}", ask(cursor, LIVE_TASKS), "rows")
        record.add(f"autovacuums of tasks, {when}", ask(cursor, COUNT_VACUUMS), "times")
        cursor.execute(LIST_SIZES)
        for name, size in cursor.fetchall():
            if size > EMPTY_INDEX:
                record.add(f"size of {name}, {when}", size / MEGABYTE, "MB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Drain after churn.")
    parser.add_argument("--quick", action="store_true", help="a minute of churn")
    parser.add_argument("--minutes", type=float, help="so much of it")
    given = parser.parse_args()

    def take(stage: Stage, record: Record, quick: bool) -> None:
        length = QUICK if quick else FULL
        measure(stage, record, replace(length, minutes=given.minutes or length.minutes))

    run("churn", "Churn: a drain after long use at full rate", take, given.quick)


if __name__ == "__main__":
    main()

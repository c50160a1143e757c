"""Every transition of a run or a task, once, in an order in which no effect precedes its cause.

Numbers do not come up in the order of commits: "id > last seen" would skip what commits late. So
a position in the stream is a snapshot of Postgres: new is what is visible now and was not visible
then. A position inside a batch is the two snapshots around it and the last number. Snapshots of
one cluster are ordered in time; its identifier goes into the cursor, because a restored database
may be another cluster, where they mean nothing.

A server that crashes gives the numbers of transactions that left nothing on its disk to others
afterwards. So a position knows of none behind the last that wrote to this very stream: that one
is on the disk, and every number up to it is used up.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

import psycopg2

from connection import Connection, Row, fetch

SNAPSHOT = re.compile(r"\d{1,20}:\d{1,20}:(\d{1,20}(,\d{1,20})*)?")
CURSOR = re.compile(rf"(\d+)\|({SNAPSHOT.pattern})\|({SNAPSHOT.pattern})\|(\d{{1,18}})")


@dataclass(frozen=True)
class Position:
    """How far a reader is: all that `before` sees, and of the rest that `now` sees, numbers up to
    `last_id`."""

    cluster: str
    before: str
    now: str
    last_id: int = 0

    def as_cursor(self) -> str:
        """The position as an opaque word for a client."""
        text = f"{self.cluster}|{self.before}|{self.now}|{self.last_id}"
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def position_of(cursor: str) -> Position | None:
    """The position that a cursor stands for; None if it is none of ours."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        text = base64.urlsafe_b64decode(padded).decode("ascii")
    except (ValueError, binascii.Error):
        return None
    if not (found := CURSOR.fullmatch(text)):
        return None
    cluster, before, *_, last_id = found.groups()
    return Position(cluster, before, text.split("|")[2], int(last_id))


def sees(snapshot: str, transaction: int) -> bool:
    """Whether what `transaction` wrote is visible in `snapshot`; as pg_visible_in_snapshot."""
    first_running, first_unknown, running = snapshot.split(":")
    if transaction < int(first_running):
        return True
    return transaction < int(first_unknown) and str(transaction) not in running.split(",")


def age(snapshot: str) -> tuple[int, int]:
    """Orders the snapshots of one cluster in time: the next number rises, what runs ends."""
    _, first_unknown, running = snapshot.split(":")
    return int(first_unknown), -len(running.split(",") if running else [])


@dataclass(frozen=True)
class Batch:
    """Transitions in order, each with the position after it, and the position after all."""

    events: list[tuple[Row, Position]]
    end: Position
    is_full: bool  # there may be more at once


# The rows of a run go by their index, those of a lone task by its key. Whoever reads does not say
# which it is: one half of each is empty.
FIND_HERE = """
WITH here AS MATERIALIZED (
    SELECT system_identifier::text AS cluster, pg_current_snapshot()::text AS now,
           greatest(
               (SELECT transaction FROM audit_log
                WHERE root_id = %(root_id)s AND run_id IS NOT NULL
                ORDER BY transaction DESC LIMIT 1),
               (SELECT max(transaction) FROM audit_log
                WHERE task_id = %(root_id)s AND run_id IS NULL))::text AS last_writer
    FROM pg_control_system()
)
"""
TELL_HERE = "SELECT * FROM here"
# First what is left of the batch that the position stands in, then what became visible after it.
FIND_EVENTS = """,
stream AS NOT MATERIALIZED (
    SELECT * FROM audit_log WHERE root_id = %(root_id)s AND run_id IS NOT NULL
    UNION ALL
    SELECT * FROM audit_log WHERE task_id = %(root_id)s AND run_id IS NULL
),
found AS (
    SELECT 1 AS phase, s.* FROM stream s
    WHERE s.transaction >= pg_snapshot_xmin(%(before)s::pg_snapshot)
      AND NOT pg_visible_in_snapshot(s.transaction, %(before)s::pg_snapshot)
      AND pg_visible_in_snapshot(s.transaction, %(now)s::pg_snapshot)
      AND s.id > %(last_id)s
    UNION ALL
    SELECT 2 AS phase, s.* FROM stream s
    WHERE s.transaction >= pg_snapshot_xmin(%(now)s::pg_snapshot)
      AND NOT pg_visible_in_snapshot(s.transaction, %(now)s::pg_snapshot)
)
SELECT here.cluster, here.now, here.last_writer, f.phase, f.id, f.task_id, f.run_id, f.step,
       f.from_status::text AS "from", f.to_status::text AS "to", f.reason, f.at, f.worker,
       f.attempt, f.detail, f.transaction::text AS transaction
FROM here LEFT JOIN LATERAL (
    SELECT * FROM found ORDER BY phase, id LIMIT %(most)s) AS f ON true
ORDER BY f.phase, f.id
"""
HERE = FIND_HERE + TELL_HERE
READ_EVENTS = FIND_HERE + FIND_EVENTS

LARGEST_BATCH = 500


def here(conn: Connection, root_id: int) -> Position:
    """The present position: nothing of a run or lone task that is visible now is read after it."""
    (row,) = fetch(conn, HERE, {"root_id": root_id})
    now = _up_to_last_writer(row)
    return Position(row["cluster"], now, now)


def _up_to_last_writer(row: Row) -> str:
    """The snapshot `now`, without the numbers of transactions behind `last_writer`."""
    _, first_unknown, running = row["now"].split(":")
    end = min(int(first_unknown), int(row["last_writer"] or 0) + 1)
    still = [number for number in running.split(",") if number and int(number) < end]
    return f"{still[0] if still else end}:{end}:{','.join(still)}"


def read_events(conn: Connection, root_id: int, after: Position) -> Batch | None:
    """The transitions of a run or lone task after a position; None if that cannot be used."""
    values = {"root_id": root_id, "most": LARGEST_BATCH, **vars(after)}
    try:
        rows = fetch(conn, READ_EVENTS, values)
    except psycopg2.DataError:  # no snapshot at all, or one that was made up
        return None
    cluster, now = rows[0]["cluster"], _up_to_last_writer(rows[0])
    if cluster != after.cluster or age(after.now) > age(rows[0]["now"]):
        return None  # from a future that this database has not had: it was restored since
    events = []
    for row in rows:
        if row["id"] is not None:
            phase = row.pop("phase")
            before, until = (after.before, after.now) if phase == 1 else (after.now, now)
            events.append((row, Position(cluster, before, until, row["id"])))
    is_full = len(events) == LARGEST_BATCH
    end = events[-1][1] if is_full else Position(cluster, now, now)
    return Batch(events, end, is_full)

"""What has ended long ago goes: finished tasks by root, and the audit log month by month.

A root is a lone task, or a run with all its steps and edges; an agent job goes with its checkpoints
and its ledger (queries/checkpoints.py). Each batch is a transaction of its own
and waits for no row: what somebody holds stays for the next time. Lock order: the rows of runs,
then their steps, as everywhere (queries/steps.py); so under the lock of a finished run's row
nobody requeues a step of it, and a run that was requeued before is no longer finished.

Pages of the primary key bound what one statement reads, and need no index on finished_at that every
settle would have to keep up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from psycopg2 import sql

from connection import Connection, fetch, impatient, transaction
from queries.checkpoints import forget_jobs_in_tx
from queries.schema import PARTITION_LOCK_SECONDS

PAGE_ROWS = 10_000  # that one statement looks through
BATCH_ROWS = 1000  # that one transaction deletes; a run goes whole, so it may be one run more

CUTOFF = "SELECT current_instant() - make_interval(days => %(days)s) AS cutoff"

# Numbers are given in the order of creation, and nothing has ended before it was created: behind a
# page of which nothing is old enough there is nothing else that is.
NEXT_PAGE = """
SELECT max(task_id) AS last_id, bool_or(created_at < %(cutoff)s) AS is_old
FROM (
    SELECT task_id, created_at FROM tasks
    WHERE task_id > %(after)s
    ORDER BY task_id
    LIMIT %(page_rows)s
) AS page
"""

# Those behind the first of a batch stay as long as it does: a repeated POST is answered with all of
# them, or makes a new batch.
DELETE_LONE_TASKS = """
WITH old AS (
    SELECT t.task_id FROM tasks t
    WHERE t.task_id > %(after)s AND t.task_id <= %(last_id)s
      AND t.parent_id IS NULL AND t.kind <> 'run'
      AND t.status IN ('SUCCEEDED', 'FAILED', 'CANCELLED') AND t.finished_at < %(cutoff)s
      AND NOT EXISTS (SELECT FROM tasks first WHERE first.task_id = t.batch_id)
    ORDER BY t.task_id
    LIMIT %(batch_rows)s
    FOR UPDATE OF t SKIP LOCKED
)
DELETE FROM tasks t USING old
WHERE t.task_id = old.task_id AND t.status IN ('SUCCEEDED', 'FAILED', 'CANCELLED')
RETURNING t.task_id, t.kind
"""

# As many as have BATCH_ROWS steps together. The state is asked again of the locked row: somebody
# may have requeued a step since.
LOCK_OLD_RUNS = """
WITH old AS (
    SELECT run.task_id FROM tasks run
    WHERE run.task_id > %(after)s AND run.task_id <= %(last_id)s AND run.kind = 'run'
      AND run.status IN ('SUCCEEDED', 'FAILED', 'CANCELLED') AND run.finished_at < %(cutoff)s
    ORDER BY run.task_id
    LIMIT %(batch_rows)s
),
measured AS (
    SELECT old.task_id, sum(own.rows) OVER (ORDER BY old.task_id) - own.rows AS rows_before
    FROM old CROSS JOIN LATERAL (
        SELECT 1 + count(*) AS rows FROM tasks s WHERE s.parent_id = old.task_id) AS own
)
SELECT run.task_id
FROM tasks run JOIN measured USING (task_id)
WHERE measured.rows_before < %(batch_rows)s AND run.kind = 'run'
  AND run.status IN ('SUCCEEDED', 'FAILED', 'CANCELLED') AND run.finished_at < %(cutoff)s
ORDER BY run.task_id
FOR UPDATE OF run SKIP LOCKED
"""

# A run of which anything has not ended stays whole, whatever its own row says.
DELETE_RUNS = """
WITH ended AS (
    SELECT run.task_id FROM unnest(%(run_ids)s::bigint[]) AS run(task_id)
    WHERE NOT EXISTS (
        SELECT FROM tasks s
        WHERE s.parent_id = run.task_id
          AND s.status IN ('BLOCKED', 'PENDING', 'RUNNING', 'AWAITING_APPROVAL'))
),
steps AS (
    DELETE FROM tasks s USING ended WHERE s.parent_id = ended.task_id
    RETURNING s.task_id, s.kind
),
edges AS (
    DELETE FROM step_edges e USING steps WHERE e.task_id = steps.task_id
    RETURNING e.task_id
),
runs AS (
    DELETE FROM tasks run USING ended WHERE run.task_id = ended.task_id
    RETURNING run.task_id
)
SELECT (SELECT count(*) FROM runs) AS runs, (SELECT count(*) FROM steps) AS steps,
       (SELECT count(*) FROM edges) AS edges,
       ARRAY(SELECT task_id FROM steps WHERE kind = 'agent') AS jobs
"""


@dataclass(frozen=True)
class Purged:
    """How much a purge has deleted."""

    tasks: int = 0  # that were no steps
    runs: int = 0
    steps: int = 0
    edges: int = 0

    def __add__(self, more: Purged) -> Purged:
        return Purged(
            self.tasks + more.tasks,
            self.runs + more.runs,
            self.steps + more.steps,
            self.edges + more.edges,
        )


def purge_finished(
    conn: Connection, days: int, page_rows: int = PAGE_ROWS, batch_rows: int = BATCH_ROWS
) -> Purged:
    """Delete what has ended more than so many days ago, with all that belongs to it."""
    cutoff: datetime = fetch(conn, CUTOFF, {"days": days})[0]["cutoff"]
    done = Purged()
    for page in _pages(conn, cutoff, page_rows):
        values = {**page, "cutoff": cutoff, "batch_rows": batch_rows}
        while (deleted := _purge_lone_tasks(conn, values)).tasks:
            done += deleted
        while (deleted_runs := _purge_runs(conn, values)).runs:
            done += deleted_runs
    return done


def _pages(conn: Connection, cutoff: datetime, page_rows: int) -> Iterator[dict[str, int]]:
    """Stretches of numbers, each behind `after` up to `last_id`, as far as anything is old."""
    after = 0
    while True:
        values = {"after": after, "cutoff": cutoff, "page_rows": page_rows}
        (page,) = fetch(conn, NEXT_PAGE, values)
        if not page["is_old"]:
            return
        yield {"after": after, "last_id": page["last_id"]}
        after = page["last_id"]


def _purge_lone_tasks(conn: Connection, values: dict[str, object]) -> Purged:
    with transaction(conn) as cursor:
        cursor.execute(DELETE_LONE_TASKS, values)
        deleted = cursor.fetchall()
        forget_jobs_in_tx(cursor, [row["task_id"] for row in deleted if row["kind"] == "agent"])
        return Purged(tasks=len(deleted))


def _purge_runs(conn: Connection, values: dict[str, object]) -> Purged:
    with transaction(conn) as cursor:
        cursor.execute(LOCK_OLD_RUNS, values)
        run_ids = [row["task_id"] for row in cursor.fetchall()]
        if not run_ids:
            return Purged()
        # A statement of its own: it sees what was committed before the rows were locked.
        cursor.execute(DELETE_RUNS, {"run_ids": run_ids})
        (counts,) = cursor.fetchall()
        forget_jobs_in_tx(cursor, counts.pop("jobs"))
        return Purged(**counts)


# --- the audit log ---------------------------------------------------------------------------

# By its upper bound, as the catalogue has it; the partition for everything else has none.
OLDEST_PARTITION = """
SELECT partition.relname AS name
FROM pg_inherits JOIN pg_class partition ON partition.oid = inhrelid
CROSS JOIN LATERAL substring(
    pg_get_expr(partition.relpartbound, partition.oid) FROM 'TO \\(''([^'']+)''\\)') AS bound
WHERE inhparent = 'audit_log'::regclass
  AND bound::timestamptz <= current_instant() - make_interval(days => %(days)s)
ORDER BY bound::timestamptz
LIMIT 1
"""

# The same turn that ensure_audit_partitions takes.
TAKE_PARTITION_TURN = "SELECT pg_advisory_xact_lock(hashtext('ensure_audit_partitions'))"


def drop_old_audit_partitions(conn: Connection, days: int) -> list[str]:
    """Drop the months of the audit log that ended more than so many days ago; their names.

    Whoever writes to the audit log waits while one is dropped; it does not wait long for them:
    DatabaseUnavailable if somebody reads the log for long.
    """
    dropped: list[str] = []
    with impatient(conn, PARTITION_LOCK_SECONDS):
        while (name := _drop_oldest(conn, days)) is not None:
            dropped.append(name)
    return dropped


def _drop_oldest(conn: Connection, days: int) -> str | None:
    with transaction(conn) as cursor:
        cursor.execute(TAKE_PARTITION_TURN)
        cursor.execute(OLDEST_PARTITION, {"days": days})
        found = cursor.fetchall()
        if not found:
            return None
        name = str(found[0]["name"])
        cursor.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(name)))
        return name

"""What an agent job leaves behind goes: its older checkpoints first, the rest with its task.

Nothing here waits for a row, and nothing of a job that has not finished is touched: whoever could
still write a checkpoint holds the task's row by its lease.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from config import ROOT
from connection import Connection, Cursor, fetch, transaction

BATCH_JOBS = 500  # of which one transaction deletes


def _statement_of(script: str) -> str:
    """The one statement of a psql script, with its variables as parameters of ours."""
    text = (ROOT / "scripts" / script).read_text(encoding="utf-8")
    (statement,) = re.findall(r"^WITH .*?(?=^\\gset$)", text, re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!:):('?)([a-z_]+)\1", r"%(\2)s", statement)


# One fact in one place: an operator runs the file with psql.
PURGE_CHECKPOINTS = _statement_of("purge_checkpoints.sql")


def purge_checkpoints(conn: Connection, days: int, batch_jobs: int = BATCH_JOBS) -> Counter[str]:
    """Delete all but the latest checkpoints of jobs that finished more than so many days ago.

    How much went: jobs, checkpoints, writes, blobs, states.
    """
    done: Counter[str] = Counter()
    after: str | None = ""
    while after is not None:
        values = {"days": days, "after_thread": after, "batch_rows": batch_jobs}
        (row,) = fetch(conn, PURGE_CHECKPOINTS, values)
        after = row.pop("after_thread")
        done.update(row)
    return done


FORGET_JOBS = """
WITH job AS MATERIALIZED (
    SELECT task_id, task_id::text AS thread_id FROM unnest(%(task_ids)s::bigint[]) AS task_id
),
checkpoints_gone AS (
    DELETE FROM checkpoints c USING job WHERE c.thread_id = job.thread_id
),
writes_gone AS (
    DELETE FROM checkpoint_writes w USING job WHERE w.thread_id = job.thread_id
),
blobs_gone AS (
    DELETE FROM checkpoint_blobs b USING job WHERE b.thread_id = job.thread_id
),
states_gone AS (
    DELETE FROM job_states s USING job WHERE s.task_id = job.task_id
)
DELETE FROM model_calls m USING job WHERE m.task_id = job.task_id
"""


def forget_jobs_in_tx(cursor: Cursor, task_ids: Sequence[int]) -> None:
    """Delete all that there is of jobs whose tasks go in the caller's transaction."""
    if task_ids:
        cursor.execute(FORGET_JOBS, {"task_ids": list(task_ids)})


# --- what was left behind --------------------------------------------------------------------

# One purge at a time: a second one would wait for the rows that the first deletes.
TAKE_LOST_JOBS_TURN = "SELECT pg_try_advisory_xact_lock(hashtext('purge_lost_jobs')) AS is_ours"

# Threads that are no number are not ours.
FIND_LOST_JOBS = """
SELECT its.task_id
FROM (
    SELECT thread_id FROM checkpoints
    UNION SELECT thread_id FROM checkpoint_writes
    UNION SELECT thread_id FROM checkpoint_blobs
    UNION SELECT task_id::text FROM job_states
    UNION SELECT task_id::text FROM model_calls
) AS job
CROSS JOIN LATERAL (VALUES (
    CASE WHEN job.thread_id ~ '^[1-9][0-9]{0,17}$' THEN job.thread_id::bigint END)) AS its(task_id)
WHERE its.task_id IS NOT NULL
  AND NOT EXISTS (SELECT FROM tasks t WHERE t.task_id = its.task_id)
ORDER BY its.task_id
LIMIT %(batch_rows)s
"""


def purge_lost_jobs(conn: Connection, batch_jobs: int = BATCH_JOBS) -> int:
    """Delete what is there of jobs whose tasks are gone; of how many jobs."""
    forgotten = 0
    while True:
        with transaction(conn) as cursor:
            cursor.execute(TAKE_LOST_JOBS_TURN)
            if not cursor.fetchall()[0]["is_ours"]:
                return forgotten
            cursor.execute(FIND_LOST_JOBS, {"batch_rows": batch_jobs})
            task_ids = [row["task_id"] for row in cursor.fetchall()]
            forget_jobs_in_tx(cursor, task_ids)
        if not task_ids:
            return forgotten
        forgotten += len(task_ids)


# --- the tenants' counters -------------------------------------------------------------------

# Of a minute and of a day; no request asks for those of the day before yesterday.
DELETE_OLD_COUNTERS = """
WITH requests AS (
    DELETE FROM tenant_requests
    WHERE tenant IN (
        SELECT tenant FROM tenant_requests
        WHERE minute < current_instant() - interval '2 days'
        FOR UPDATE SKIP LOCKED)
    RETURNING tenant
),
tokens AS (
    DELETE FROM tenant_tokens
    WHERE (tenant, day) IN (
        SELECT tenant, day FROM tenant_tokens
        WHERE day < (current_instant() AT TIME ZONE 'UTC')::date - 2
        FOR UPDATE SKIP LOCKED)
    RETURNING tenant
)
SELECT (SELECT count(*) FROM requests) AS requests, (SELECT count(*) FROM tokens) AS tokens
"""


def purge_counters(conn: Connection) -> Counter[str]:
    """Delete what tenants took more than two days ago: rows of requests and of tokens."""
    (row,) = fetch(conn, DELETE_OLD_COUNTERS)
    return Counter(row)

"""Lists, newest first and page by page, and the figures of /stats. Nothing here changes a row.

A page begins after the number on which the page before it ended: what is inserted meanwhile
shifts nothing. No statement sorts or counts more than it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connection import Connection, Row, fetch
from db import LARGEST_ID, SELECT_TASK
from states import Kind, Status

# A page of tasks ends early when their results pass this: 200 of 16 MB are too many. A run leaves
# out results beyond it.
MOST_RESULT_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Page:
    """Some rows of a list; `next_after`: the number to go on after, None at the end."""

    rows: list[Row]
    next_after: int | None


# The middle and the end of two lists: `found` holds one number more than the page may have.
END_OF_PAGE = """
measured AS (
    SELECT t.task_id,
           row_number() OVER newest_first AS place,
           lead(t.task_id) OVER newest_first IS NOT NULL AS has_more,
           sum(coalesce(t.result_bytes, pg_column_size(t.result), 0)) OVER newest_first
               - coalesce(t.result_bytes, pg_column_size(t.result), 0) AS bytes_before
    FROM found JOIN tasks t USING (task_id)
    WINDOW newest_first AS (ORDER BY t.task_id DESC)
),
page AS (
    SELECT task_id, has_more FROM measured
    WHERE place <= %(limit)s AND bytes_before <= %(most_bytes)s
)
"""

FROM_PAGE = """
    , page.has_more
FROM page JOIN tasks t USING (task_id)
ORDER BY t.task_id DESC
"""

# Where a list looks: kinds and statuses of one tenant; or of each tenant those that the figures
# know it to have, or to have had.
WANTED_OF_TENANT = """
WITH wanted AS (
    SELECT %(tenant)s::text AS tenant, asked_kind.kind, asked_status.status::task_status AS status
    FROM unnest(%(kinds)s::text[]) AS asked_kind(kind)
    CROSS JOIN unnest(%(statuses)s::text[]) AS asked_status(status)
),
"""
WANTED_OF_ALL = """
WITH wanted AS (
    SELECT part.tenant, part.kind, stored.status::task_status AS status
    FROM (SELECT * FROM figures UNION ALL SELECT * FROM figure_changes) AS part
    CROSS JOIN LATERAL (VALUES
        ('BLOCKED', blocked), ('PENDING', pending), ('RUNNING', running),
        ('AWAITING_APPROVAL', awaiting_approval), ('SUCCEEDED', succeeded),
        ('FAILED', failed), ('CANCELLED', cancelled)) AS stored(status, tasks)
    WHERE part.kind = ANY(%(kinds)s::text[]) AND stored.status = ANY(%(statuses)s::text[])
      AND stored.tasks > 0
    GROUP BY part.tenant, part.kind, stored.status
),
"""

# The newest of each tenant, kind and status, each from its own stretch of the index; of those the
# newest. First the very newest of some: if more than a page of them have a number, nothing below it
# can be on the page, and of most stretches next to nothing is read. Pairs are compared, since only
# one index has that order: with `status = …` the planner may hope to meet enough of a rare one on
# its way down the primary key.
NEWEST_TASKS = """
sampled AS (
    SELECT head.task_id
    FROM (SELECT tenant, kind, status FROM wanted LIMIT 4 * (%(limit)s + 1)) AS one
    CROSS JOIN LATERAL (
        SELECT task_id FROM tasks
        WHERE tenant = one.tenant AND kind = one.kind
          AND (status, task_id) > (one.status, 0)
          AND (status, task_id) < (one.status, %(before)s)
        ORDER BY status DESC, task_id DESC
        LIMIT 1) AS head
    ORDER BY head.task_id DESC
    LIMIT %(limit)s + 1
),
least AS (
    SELECT CASE WHEN count(*) > %(limit)s THEN min(task_id) ELSE 1 END AS task_id FROM sampled
),
found AS (
    SELECT newest.task_id
    FROM wanted CROSS JOIN LATERAL (
        SELECT task_id FROM tasks
        WHERE tenant = wanted.tenant AND kind = wanted.kind
          AND (status, task_id) >= (wanted.status, (SELECT task_id FROM least))
          AND (status, task_id) < (wanted.status, %(before)s)
        ORDER BY status DESC, task_id DESC
        LIMIT %(limit)s + 1) AS newest
    ORDER BY newest.task_id DESC
    LIMIT %(limit)s + 1
),
"""
# Of all tenants, kinds and statuses: the primary key has that order, and every run that is passed
# over on the way has steps that are not.
NEWEST_OF_ALL = """
WITH found AS (
    SELECT task_id FROM tasks
    WHERE task_id < %(before)s AND kind <> 'run'
    ORDER BY task_id DESC
    LIMIT %(limit)s + 1
),
"""
PAGE_OF_TASKS = END_OF_PAGE + SELECT_TASK + FROM_PAGE
LIST_TASKS = WANTED_OF_TENANT + NEWEST_TASKS + PAGE_OF_TASKS
LIST_TASKS_OF_ALL = WANTED_OF_ALL + NEWEST_TASKS + PAGE_OF_TASKS
LIST_ALL_TASKS = NEWEST_OF_ALL + PAGE_OF_TASKS


def list_tasks(
    conn: Connection,
    tenant: str | None,
    *,
    status: Status | None,
    kind: Kind | None,
    limit: int,
    before: int | None,
    present_seconds: float,
) -> Page:
    """The tenant's tasks with numbers below `before`, newest first; no runs. None: all tenants'."""
    values = {
        "tenant": tenant,
        "statuses": [status] if status else list(Status),
        "kinds": [kind] if kind else list(Kind),
        "limit": limit,
        "before": before or LARGEST_ID,
        "most_bytes": MOST_RESULT_BYTES,
        "present_seconds": present_seconds,
    }
    if tenant is not None:
        statement = LIST_TASKS
    else:
        statement = LIST_TASKS_OF_ALL if status or kind else LIST_ALL_TASKS
    return _page_of_tasks(fetch(conn, statement, values))


DEAD_OF_TENANT = """
WITH wanted AS (SELECT %(tenant)s::text AS tenant),
"""
DEAD_OF_ALL = """
WITH wanted AS (
    SELECT DISTINCT tenant
    FROM (SELECT * FROM figures UNION ALL SELECT * FROM figure_changes) AS part
    WHERE kind <> 'run' AND dead > 0
),
"""

# As in NEWEST_TASKS.
NEWEST_DEAD_LETTERS = """
sampled AS (
    SELECT head.task_id
    FROM (SELECT tenant FROM wanted LIMIT 4 * (%(limit)s + 1)) AS one CROSS JOIN LATERAL (
        SELECT task_id FROM tasks
        WHERE tenant = one.tenant AND task_id < %(before)s
          AND status = 'FAILED' AND kind <> 'run' AND reason <> 'rejected'
        ORDER BY task_id DESC
        LIMIT 1) AS head
    ORDER BY head.task_id DESC
    LIMIT %(limit)s + 1
),
least AS (
    SELECT CASE WHEN count(*) > %(limit)s THEN min(task_id) ELSE 1 END AS task_id FROM sampled
),
found AS (
    SELECT newest.task_id
    FROM wanted CROSS JOIN LATERAL (
        SELECT task_id FROM tasks
        WHERE tenant = wanted.tenant
          AND task_id >= (SELECT task_id FROM least) AND task_id < %(before)s
          AND status = 'FAILED' AND kind <> 'run' AND reason <> 'rejected'
        ORDER BY task_id DESC
        LIMIT %(limit)s + 1) AS newest
    ORDER BY newest.task_id DESC
    LIMIT %(limit)s + 1
),
"""
LIST_DEAD_LETTERS = DEAD_OF_TENANT + NEWEST_DEAD_LETTERS + PAGE_OF_TASKS
LIST_DEAD_LETTERS_OF_ALL = DEAD_OF_ALL + NEWEST_DEAD_LETTERS + PAGE_OF_TASKS


def list_dead_letters(
    conn: Connection, tenant: str | None, *, limit: int, before: int | None, present_seconds: float
) -> Page:
    """The tenant's FAILED tasks, newest first, without runs and rejected approvals.

    None: those of all tenants.
    """
    values = {
        "tenant": tenant,
        "limit": limit,
        "before": before or LARGEST_ID,
        "most_bytes": MOST_RESULT_BYTES,
        "present_seconds": present_seconds,
    }
    statement = LIST_DEAD_LETTERS_OF_ALL if tenant is None else LIST_DEAD_LETTERS
    return _page_of_tasks(fetch(conn, statement, values))


def _page_of_tasks(rows: list[Row]) -> Page:
    return Page(rows, rows[-1]["task_id"] if rows and rows[-1]["has_more"] else None)


LIST_TRANSITIONS = """
SELECT id, task_id, run_id, step, from_status::text, to_status::text, reason, at, worker, attempt,
       detail
FROM audit_log
WHERE task_id = %(task_id)s AND id > %(after)s
ORDER BY id
LIMIT %(limit)s + 1
"""


def list_transitions(conn: Connection, task_id: int, *, limit: int, after: int | None) -> Page:
    """What happened to a task, oldest first, after the entry of that number."""
    rows = fetch(conn, LIST_TRANSITIONS, {"task_id": task_id, "after": after or 0, "limit": limit})
    page = rows[:limit]
    return Page(page, page[-1]["id"] if len(rows) > limit else None)


# One row. A delayed task whose time has come is due, whether or not a worker has marked it so: only
# these are counted, apart from whose they are, so that only the index of what is delayed serves.
READ_QUEUE = """
WITH overdue AS MATERIALIZED (
    SELECT tenant FROM tasks
    WHERE status = 'PENDING' AND NOT due AND available_at <= (SELECT current_instant())
),
late AS (
    SELECT count(*) AS tasks FROM overdue WHERE %(tenant)s::text IS NULL OR tenant = %(tenant)s
),
part AS (
    SELECT due, pending, running, dead FROM figures
    WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND kind <> 'run'
    UNION ALL
    SELECT due, pending, running, dead FROM figure_changes
    WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND kind <> 'run'
),
total AS (
    SELECT coalesce(sum(due), 0)::bigint AS due, coalesce(sum(pending), 0)::bigint AS pending,
           coalesce(sum(running), 0)::bigint AS running, coalesce(sum(dead), 0)::bigint AS dead
    FROM part
)
SELECT due + late.tasks AS depth,
       pending - due - late.tasks AS delayed,
       running,
       dead AS dead_letters
FROM total CROSS JOIN late
"""


def read_queue(conn: Connection, tenant: str | None = None) -> Row:
    """depth (due and waiting), delayed, running, dead_letters; of all tenants: None."""
    return fetch(conn, READ_QUEUE, {"tenant": tenant})[0]


LIST_WORKERS = """
SELECT name, concurrency, running, paused_routes, started_at, seen_at
FROM workers
WHERE seen_at > current_instant() - make_interval(secs => %(present_seconds)s)
ORDER BY started_at, name
"""


def list_workers(conn: Connection, present_seconds: float) -> list[Row]:
    """The workers that were seen lately, the longest running first."""
    return fetch(conn, LIST_WORKERS, {"present_seconds": present_seconds})


def paused_routes(workers: Sequence[Row]) -> dict[str, str]:
    """Every route that one of these workers finds closed, with the word of the last seen."""
    paused: dict[str, str] = {}
    for worker in sorted(workers, key=lambda worker: worker["seen_at"]):
        paused.update(worker["paused_routes"])
    return dict(sorted(paused.items()))

"""Figures that nobody has to count: how many tasks stand where, kept by the statements themselves.

The triggers of schema.sql append what each statement changed to figure_changes; here such rows are
folded into `figures`. Both tables together are exact at every moment, folded or not: the fold is
there to keep the second one short. It waits for nobody, and nobody waits for it.
"""

from __future__ import annotations

from connection import Connection, fetch

PAGE_ROWS = 20_000  # that one statement folds

# Changes never change, and one process at a time folds: so what is taken here was added nowhere
# else. What somebody has not committed yet is not seen, and stays for the next time.
FOLD_FIGURES = """
WITH turn AS (
    SELECT pg_try_advisory_xact_lock(hashtext('fold_figures')) AS is_ours
),
taken AS (
    DELETE FROM figure_changes
    WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM figure_changes WHERE (SELECT is_ours FROM turn) LIMIT %(page_rows)s))
    RETURNING *
),
folded AS (
    INSERT INTO figures AS f (
        tenant, kind, blocked, pending, running, awaiting_approval, succeeded, failed, cancelled,
        due, dead, retries, reclaimed, timed, microseconds,
        paid_local, cost_local, paid_cloud, cost_cloud)
    SELECT tenant, kind,
           coalesce(sum(blocked), 0), coalesce(sum(pending), 0), coalesce(sum(running), 0),
           coalesce(sum(awaiting_approval), 0), coalesce(sum(succeeded), 0),
           coalesce(sum(failed), 0), coalesce(sum(cancelled), 0), coalesce(sum(due), 0),
           coalesce(sum(dead), 0), coalesce(sum(retries), 0), coalesce(sum(reclaimed), 0),
           coalesce(sum(timed), 0), coalesce(sum(microseconds), 0),
           coalesce(sum(paid_local), 0), coalesce(sum(cost_local), 0),
           coalesce(sum(paid_cloud), 0), coalesce(sum(cost_cloud), 0)
    FROM taken
    GROUP BY tenant, kind
    ON CONFLICT (tenant, kind) DO UPDATE SET
        blocked = f.blocked + excluded.blocked,
        pending = f.pending + excluded.pending,
        running = f.running + excluded.running,
        awaiting_approval = f.awaiting_approval + excluded.awaiting_approval,
        succeeded = f.succeeded + excluded.succeeded,
        failed = f.failed + excluded.failed,
        cancelled = f.cancelled + excluded.cancelled,
        due = f.due + excluded.due,
        dead = f.dead + excluded.dead,
        retries = f.retries + excluded.retries,
        reclaimed = f.reclaimed + excluded.reclaimed,
        timed = f.timed + excluded.timed,
        microseconds = f.microseconds + excluded.microseconds,
        paid_local = f.paid_local + excluded.paid_local,
        cost_local = f.cost_local + excluded.cost_local,
        paid_cloud = f.paid_cloud + excluded.paid_cloud,
        cost_cloud = f.cost_cloud + excluded.cost_cloud
)
SELECT count(*) AS changes FROM taken
"""


def fold_figures(conn: Connection, page_rows: int = PAGE_ROWS) -> bool:
    """Fold a page of changes; whether it was full, so that more may be left."""
    (folded,) = fetch(conn, FOLD_FIGURES, {"page_rows": page_rows})
    return bool(folded["changes"] == page_rows)

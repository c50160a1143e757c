"""What the figures are to be: the rows, counted one by one, beside what the product says."""

from __future__ import annotations

from typing import Any

import db
from db import Connection, Row
from queries.listings import read_queue
from tests.support import prepared
from tests.support.rows import sql

METRICS = """
WITH counted AS (
    SELECT * FROM tasks
    WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND kind <> 'run'
)
SELECT
    (SELECT coalesce(jsonb_object_agg(status, n), '{}')
     FROM (SELECT status, count(*) AS n FROM counted GROUP BY status) AS statuses
    ) AS by_status,
    (SELECT coalesce(avg(retry_count), 0)::double precision FROM counted) AS avg_retry,
    (SELECT coalesce(sum(retry_count), 0)::bigint FROM counted) AS retries,
    (SELECT count(*) FROM counted WHERE reclaim_count > 0) AS reclaimed_count,
    (SELECT avg(duration_seconds::numeric)::double precision
     FROM counted WHERE status = 'SUCCEEDED') AS avg_duration_seconds,
    (SELECT coalesce(jsonb_object_agg(route, spent), '{}')
     FROM (SELECT route, round(sum(cost), 8)::text AS spent
           FROM counted WHERE cost IS NOT NULL GROUP BY route) AS routes
    ) AS cost_by_route
"""

QUEUE = """
SELECT
    count(*) FILTER (WHERE due OR available_at <= current_instant()) AS depth,
    count(*) FILTER (WHERE NOT due AND available_at > current_instant()) AS delayed,
    (SELECT count(*) FROM tasks
     WHERE status = 'RUNNING' AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)) AS running,
    (SELECT count(*) FROM tasks
     WHERE status = 'FAILED' AND kind <> 'run' AND reason <> 'rejected'
       AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)) AS dead_letters
FROM tasks
WHERE status = 'PENDING' AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
"""

# All that is kept, of runs as well, by tenant and kind; and the same counted.
KEPT = """
SELECT tenant, kind, sum(blocked) AS blocked, sum(pending) AS pending, sum(running) AS running,
       sum(awaiting_approval) AS awaiting_approval, sum(succeeded) AS succeeded,
       sum(failed) AS failed, sum(cancelled) AS cancelled, sum(due) AS due, sum(dead) AS dead,
       sum(retries) AS retries, sum(reclaimed) AS reclaimed, sum(timed) AS timed,
       sum(microseconds) / 1000000 AS seconds, sum(paid_local) AS paid_local,
       sum(cost_local) AS cost_local, sum(paid_cloud) AS paid_cloud, sum(cost_cloud) AS cost_cloud
FROM (SELECT * FROM figures UNION ALL SELECT * FROM figure_changes) AS part
GROUP BY tenant, kind
"""
COUNTED = """
SELECT tenant, kind, sum((stands = 'BLOCKED')::int) AS blocked,
       sum((stands = 'PENDING')::int) AS pending, sum((stands = 'RUNNING')::int) AS running,
       sum((stands = 'AWAITING_APPROVAL')::int) AS awaiting_approval,
       sum((stands = 'SUCCEEDED')::int) AS succeeded, sum((stands = 'FAILED')::int) AS failed,
       sum((stands = 'CANCELLED')::int) AS cancelled, sum(due::int) AS due,
       sum((stands = 'FAILED' AND reason <> 'rejected')::int) AS dead, sum(retry_count) AS retries,
       sum((reclaim_count > 0)::int) AS reclaimed,
       sum((stands = 'SUCCEEDED' AND duration_seconds IS NOT NULL)::int) AS timed,
       sum(CASE stands WHEN 'SUCCEEDED' THEN duration_seconds::numeric END) AS seconds,
       sum((route = 'local' AND cost IS NOT NULL)::int) AS paid_local,
       sum(CASE route WHEN 'local' THEN cost END) AS cost_local,
       sum((route = 'cloud' AND cost IS NOT NULL)::int) AS paid_cloud,
       sum(CASE route WHEN 'cloud' THEN cost END) AS cost_cloud
FROM (SELECT *, status::text AS stands FROM tasks) AS seen
GROUP BY tenant, kind
"""
TENANTS = "SELECT DISTINCT tenant FROM tasks ORDER BY tenant"


def said(conn: Connection, tenant: str | None) -> dict[str, Any]:
    """The figures as the product has them."""
    return {**db.metrics(conn, tenant), **read_queue(conn, tenant)}


def counted(conn: Connection, tenant: str | None) -> dict[str, Any]:
    """The same, counted."""
    (metrics,), (queue,) = sql(conn, METRICS, tenant=tenant), sql(conn, QUEUE, tenant=tenant)
    return {**metrics, **queue}


def by_group(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """What is not 0 of each tenant and kind."""
    groups = {(row.pop("tenant"), row.pop("kind")): row for row in rows}
    shown = {group: {name: n for name, n in row.items() if n} for group, row in groups.items()}
    return {group: figures for group, figures in shown.items() if figures}


def check_kept(conn: Connection) -> None:
    """Raise AssertionError unless what is kept is what counting gives."""
    kept, is_so = by_group(prepared.ask(conn, KEPT)), by_group(prepared.ask(conn, COUNTED))
    assert kept == is_so, f"{kept} is not {is_so}"


def check(conn: Connection) -> None:
    """check_kept, and what the product says of it: of each tenant, and of all."""
    check_kept(conn)
    for tenant in [None, *(row["tenant"] for row in sql(conn, TENANTS))]:
        is_said, is_so = said(conn, tenant), counted(conn, tenant)
        assert is_said == is_so, f"{is_said} is not {is_so}"

"""What one tenant may ask for: requests in a minute, and tasks that wait."""

from __future__ import annotations

from dataclasses import dataclass

from connection import Connection, fetch
from states import Kind

# One row for each tenant, of the minute in which it last took some. Whoever takes a block takes it
# whole, also beyond the limit: what was taken before is then known from the sum.
TAKE_REQUESTS = """
INSERT INTO tenant_requests AS r (tenant, minute, taken)
VALUES (%(tenant)s, date_trunc('minute', current_instant()), %(block)s)
ON CONFLICT (tenant) DO UPDATE
SET taken = CASE WHEN r.minute >= excluded.minute THEN r.taken ELSE 0 END + excluded.taken,
    minute = greatest(r.minute, excluded.minute)  -- who waited for the row may come from the last
RETURNING taken,
          extract(epoch FROM minute + interval '1 minute' - current_instant())::double precision
              AS seconds_left
"""


@dataclass(frozen=True)
class Block:
    """Some of a tenant's requests in this minute; `seconds_left` of it."""

    requests: int
    seconds_left: float


def take_requests(conn: Connection, tenant: str, most: int, limit: int) -> Block:
    """At most so many requests of those that the tenant has left in this minute, or none."""
    (row,) = fetch(conn, TAKE_REQUESTS, {"tenant": tenant, "block": most})
    left_before = limit - (row["taken"] - most)
    return Block(max(0, min(most, left_before)), row["seconds_left"])


COUNT_QUEUED = """
SELECT count(*) AS queued
FROM unnest(%(kinds)s::text[]) AS asked_kind(kind)
CROSS JOIN unnest('{PENDING,BLOCKED,AWAITING_APPROVAL}'::task_status[]) AS asked_status(status)
CROSS JOIN LATERAL (
    SELECT FROM tasks t
    WHERE t.tenant = %(tenant)s AND t.kind = asked_kind.kind AND t.status = asked_status.status
    LIMIT %(most)s) AS few
"""


def count_queued(conn: Connection, tenant: str, most: int) -> int:
    """How many tasks of the tenant wait for a worker, for other steps or for a person; exact up to
    `most`. Callbacks are left out: it asked for none of their own, and a receiver that is away
    would lock it out."""
    kinds = [kind for kind in Kind if kind is not Kind.CALLBACK]
    values = {"tenant": tenant, "kinds": kinds, "most": most}
    return int(fetch(conn, COUNT_QUEUED, values)[0]["queued"])

"""Who works here: a row per worker process, for people to see. Nothing decides by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from uuid import UUID

from connection import Connection, fetch

REPORT_WORKER = """
INSERT INTO workers (worker_id, name, concurrency, running, paused_routes)
VALUES (%(worker_id)s, %(name)s, %(concurrency)s, %(running)s, %(paused_routes)s)
ON CONFLICT (worker_id) DO UPDATE
SET running = excluded.running,
    paused_routes = excluded.paused_routes,
    seen_at = current_instant()
"""


def report_worker(
    conn: Connection,
    worker_id: UUID,
    name: str,
    concurrency: int,
    running: int,
    paused_routes: Mapping[str, str],
) -> None:
    """Say that this worker lives, how much it runs, and which routes it finds closed and why."""
    fetch(
        conn,
        REPORT_WORKER,
        {
            "worker_id": str(worker_id),
            "name": name,
            "concurrency": concurrency,
            "running": running,
            "paused_routes": json.dumps(paused_routes),
        },
    )


FORGET_WORKERS = """
DELETE FROM workers
WHERE worker_id = %(worker_id)s OR seen_at < current_instant() - interval '1 day'
"""


def forget_worker(conn: Connection, worker_id: UUID) -> None:
    """Take this worker off the list, and those that have been gone for a day."""
    fetch(conn, FORGET_WORKERS, {"worker_id": str(worker_id)})

"""The bare loop in our tables: claim 250, settle 250, two statements, two commits, nothing else.

What no worker can do without, if a task is to be a row of `tasks` that is leased, settled by its
token with its result, and audited: no fairness, no routes, no retries, no heartbeat, no log lines,
and of Python next to nothing.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from typing import Any

import psycopg2

import db
from bench import drain
from bench.peers import gate
from config import DatabaseSettings
from queries.schema import ensure_schema

BATCH = 250
CLAIM = """
UPDATE tasks SET status = 'RUNNING', reason = 'claimed', due = false, lease_token = %(token)s,
    lease_expires_at = now() + interval '30 seconds', worker = %(owner)s, started_at = now(),
    updated_at = now(), attempt = attempt + 1, delivery_count = delivery_count + 1
WHERE task_id = ANY (ARRAY(
    SELECT task_id FROM tasks WHERE due AND NOT alone AND requested_route = 'none'
    ORDER BY tenant, priority DESC, task_id LIMIT %(batch)s FOR NO KEY UPDATE SKIP LOCKED))
RETURNING task_id, payload
"""
SETTLE = """
UPDATE tasks t SET status = 'SUCCEEDED', reason = 'succeeded', result = done.result::jsonb,
    result_bytes = octet_length(done.result), duration_seconds = 0, lease_token = NULL,
    lease_expires_at = NULL, updated_at = now(), finished_at = now()
FROM unnest(%(ids)s::bigint[], %(results)s::text[]) AS done (task_id, result)
WHERE t.task_id = ANY (ARRAY[done.task_id]) AND t.lease_token = %(token)s
"""


def work(cursor: Any) -> None:
    owner, first = f"worker-{os.getpid()}", gate.FirstJob()
    gate.wait()
    while True:
        token = str(uuid.uuid4())
        cursor.execute(CLAIM, {"token": token, "owner": owner, "batch": BATCH})
        if not (rows := cursor.fetchall()):
            gate.ended()
            return
        first.begin()
        ids = [task_id for task_id, _ in rows]
        results = [json.dumps(payload["args"]) for _, payload in rows]
        cursor.execute(SETTLE, {"token": token, "ids": ids, "results": results})


def main() -> None:
    url = os.environ["DATABASE_URL"]
    if sys.argv[1] == "install":
        ensure_schema(db.connect(url, DatabaseSettings(), "bench"))
    elif sys.argv[1] == "fill":
        drain.fill(url, int(sys.argv[2]))
    else:
        conn = psycopg2.connect(url)
        conn.autocommit = True
        with conn.cursor() as cursor:
            work(cursor)


if __name__ == "__main__":
    main()

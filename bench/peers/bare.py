"""The bare loop: psycopg2, a narrow table, claim 500, settle 500, two commits, nothing else.

No audit log, no fence, no result, no limits: how fast this machine lets Python and Postgres be.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psycopg2

from bench.peers import gate

BATCH = 500
INSTALL = """
CREATE TABLE jobs (
    id bigserial PRIMARY KEY,
    status text NOT NULL DEFAULT 'pending',
    payload jsonb NOT NULL,
    available_at timestamptz NOT NULL DEFAULT now(),
    lease_expires_at timestamptz,
    lease_owner text,
    retry_count int NOT NULL DEFAULT 0,
    delivery_count int NOT NULL DEFAULT 0
);
CREATE INDEX jobs_pending ON jobs (available_at, id) WHERE status = 'pending'
"""
FILL = """
INSERT INTO jobs (payload)
SELECT jsonb_build_object('seq', i, 'pad', repeat('x', 176)) FROM generate_series(1, %s) AS i
"""
CLAIM = """
UPDATE jobs SET status = 'leased', lease_owner = %(owner)s,
    lease_expires_at = now() + interval '30 seconds', delivery_count = delivery_count + 1
WHERE id = ANY (ARRAY(
    SELECT id FROM jobs WHERE status = 'pending' AND available_at <= now()
    ORDER BY available_at, id FOR UPDATE SKIP LOCKED LIMIT %(batch)s))
RETURNING id, payload
"""
SETTLE = """
UPDATE jobs SET status = 'done', lease_owner = NULL, lease_expires_at = NULL
FROM unnest(%(ids)s::bigint[]) AS done (id) WHERE jobs.id = done.id AND lease_owner = %(owner)s
"""


def noop(payload: Any) -> Any:
    return payload["seq"]


def work(cursor: Any) -> None:
    owner, first = f"worker-{os.getpid()}", gate.FirstJob()
    gate.wait()
    while True:
        cursor.execute(CLAIM, {"owner": owner, "batch": BATCH})
        if not (rows := cursor.fetchall()):
            gate.ended()
            return
        first.begin()
        for _, payload in rows:
            noop(payload)
        cursor.execute(SETTLE, {"owner": owner, "ids": [number for number, _ in rows]})


def main() -> None:
    conn = psycopg2.connect(os.environ["DATABASE_URL"])
    conn.autocommit = True
    with conn.cursor() as cursor:
        if sys.argv[1] == "install":
            cursor.execute(INSTALL)
        elif sys.argv[1] == "fill":
            cursor.execute(FILL, (int(sys.argv[2]),))
        else:
            work(cursor)


if __name__ == "__main__":
    main()

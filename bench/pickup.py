"""From the commit of a task to the start of its work, on an idle worker; against a bare loop.

    python -m bench.pickup

Both instants are read from CLOCK_MONOTONIC, which all processes of a machine share: the commit when
the submitter's statement has returned, the start by the first thing that the tool does. In the bare
loop the start is when the rows of the claim are there. Either may come a little before the commit:
Postgres wakes the listener before it answers the submitter, in both alike.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import select
import sys
import time
from multiprocessing.connection import Connection as Pipe

import psycopg2

import db
from bench.common import Stage
from bench.report import Record, percentile, run
from bench.tool import TOOLS, await_starts, connected, noop_task

SUBMISSIONS = 200
PAUSE_SECONDS = (0.020, 0.050)
REPETITIONS = 5
QUICK_REPETITIONS = 3
PAYLOAD = json.dumps({"seq": 1, "pad": "x" * 176})

# The bare loop is that of a queue without audit log, fence or retries.
BARE_TABLE = """
CREATE TABLE bare_tasks (
    id bigserial PRIMARY KEY,
    status text NOT NULL DEFAULT 'pending',
    payload jsonb NOT NULL,
    available_at timestamptz NOT NULL DEFAULT now(),
    lease_expires_at timestamptz,
    lease_owner text,
    retry_count int NOT NULL DEFAULT 0,
    delivery_count int NOT NULL DEFAULT 0
);
CREATE INDEX bare_tasks_pending ON bare_tasks (available_at, id) WHERE status = 'pending';
"""
BARE_SUBMIT = """
WITH created AS (INSERT INTO bare_tasks (payload) VALUES (%s) RETURNING id)
SELECT id, pg_notify('bare_tasks', '') FROM created
"""
BARE_CLAIM = """
UPDATE bare_tasks
SET status = 'leased', lease_owner = 'me', lease_expires_at = now() + interval '30 seconds',
    delivery_count = delivery_count + 1
WHERE id = ANY(ARRAY(
    SELECT id FROM bare_tasks WHERE status = 'pending' AND available_at <= now()
    ORDER BY available_at, id FOR UPDATE SKIP LOCKED LIMIT 10))
RETURNING id, payload
"""


def measure(stage: Stage, record: Record, quick: bool) -> None:
    ours, bare = stage.database(), stage.database("template0")
    stage.worker(ours, tools=TOOLS)
    with connected(ours) as conn:
        pickup_ms(conn)  # plans, caches and connections are warm from here on
        for repetition in range(QUICK_REPETITIONS if quick else REPETITIONS):
            loops = {"pickup": lambda: pickup_ms(conn), "bare loop": lambda: bare_pickup_ms(bare)}
            order = list(loops) if repetition % 2 else list(reversed(loops))
            times = {name: loops[name]() for name in order}
            for share in (50, 99):
                own, limit = (percentile(times[name], share) for name in loops)
                record.add(f"pickup p{share}", own, "ms")
                record.add(f"bare loop p{share}", limit, "ms")
                record.ratio(f"p{share} / bare LISTEN and claim", own / limit)


def pauses() -> list[float]:
    """The same for every loop: 20 to 50 ms between two submissions."""
    chosen = random.Random(1)  # noqa: S311
    return [chosen.uniform(*PAUSE_SECONDS) for _ in range(SUBMISSIONS)]


def pickup_ms(conn: db.Connection) -> list[float]:
    """What a worker that waits for work takes to begin each task, in milliseconds."""
    committed = {}
    for pause in pauses():
        time.sleep(pause)
        task_id = db.submit_task(conn, noop_task()).task_id
        committed[task_id] = time.monotonic_ns()
    started = await_starts(conn, list(committed))
    return [(started[task_id] - at) / 1e6 for task_id, at in committed.items()]


# --- the bare loop ---------------------------------------------------------------------------


def bare_pickup_ms(url: str) -> list[float]:
    """The same of a process that listens, and claims with one statement."""
    conn = psycopg2.connect(url)
    conn.autocommit = True
    here, there = multiprocessing.Pipe()
    with conn.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS bare_tasks;" + BARE_TABLE)
        spawn = multiprocessing.get_context("spawn")
        listener = spawn.Process(target=listen_and_claim, args=(url, there), daemon=True)
        listener.start()
        here.recv()  # it listens
        committed = {}
        for pause in pauses():
            time.sleep(pause)
            cursor.execute(BARE_SUBMIT, (PAYLOAD,))
            committed_at = time.monotonic_ns()
            ((task_id, _),) = cursor.fetchall()
            committed[task_id] = committed_at
    started = here.recv()
    listener.join()
    conn.close()
    return [(started[task_id] - at) / 1e6 for task_id, at in committed.items()]


def listen_and_claim(url: str, pipe: Pipe) -> None:
    """Claim at each notification until all are claimed; then tell when each was."""
    conn = psycopg2.connect(url)
    conn.autocommit = True
    started: dict[int, int] = {}
    with conn.cursor() as cursor:
        cursor.execute("LISTEN bare_tasks")
        pipe.send(None)
        while len(started) < SUBMISSIONS:
            select.select([conn], [], [])
            conn.poll()
            while conn.notifies:
                conn.notifies.clear()
                cursor.execute(BARE_CLAIM)
                claimed = cursor.fetchall()
                now = time.monotonic_ns()
                started.update((task_id, now) for task_id, _ in claimed)
    pipe.send(started)
    conn.close()


if __name__ == "__main__":
    run("pickup", "Pickup: from commit to start of the work", measure, "--quick" in sys.argv)

"""A database as it is after long use, made by the database itself: its tasks and their audit log.

Finished tasks are prompts of many tenants, spread over the last sixty days; one in a hundred has
failed, every second came with an Idempotency-Key. Then come tasks that are delayed by a day or
more, and tasks that are due and ask for route cloud, which the measures' workers find paused. Each
has the audit rows that it would have: three if it has finished, else one. They are written in bulk,
so the trigger that writes them does not run meanwhile; all others do. Indexes are built when the
rows are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.common import administrator, ask

CHUNK = 100_000  # rows that one statement makes
CONNECTIONS = 2
DAYS = 60


@dataclass(frozen=True)
class Size:
    """How many tasks there are, and of how many tenants."""

    finished: int
    delayed: int
    pending: int
    tenants: int = 1000

    @property
    def tasks(self) -> int:
        return self.finished + self.delayed + self.pending

    def __str__(self) -> str:
        return (
            f"{self.finished:,} finished, {self.delayed:,} delayed and {self.pending:,} pending "
            f"tasks of {self.tenants:,} tenants"
        )


FULL = Size(10_000_000, 1_000_000, 1_000_000)
QUICK = Size(500_000, 50_000, 50_000)

FINISHED = """
INSERT INTO tasks (
    task_id, tenant, kind, payload, idempotency_scope, idempotency_key, request_hash, status,
    reason, due, worker, started_at, attempt, delivery_count, retry_count, result, result_bytes,
    last_error, route, model, prompt_tokens, completion_tokens, cost, duration_seconds,
    created_at, available_at, updated_at, finished_at)
SELECT n, format('tenant-%%s', n * 7919 %% %(tenants)s), 'prompt',
       jsonb_build_object('prompt', repeat('x', 180), 'seq', n),
       CASE WHEN n %% 2 = 0 THEN 'tasks' END, CASE WHEN n %% 2 = 0 THEN 'key-' || n END,
       CASE WHEN n %% 2 = 0 THEN sha256(n::text::bytea) END,
       (CASE WHEN failed THEN 'FAILED' ELSE 'SUCCEEDED' END)::task_status,
       CASE WHEN failed THEN 'permanent' ELSE 'succeeded' END,
       false, 'worker-' || n %% 4, at + interval '1 second', 1, 1, failed::int,
       CASE WHEN NOT failed THEN jsonb_build_object('text', repeat('y', 80)) END,
       CASE WHEN NOT failed THEN 92 END,
       CASE WHEN failed THEN 'the model is not there' END,
       CASE WHEN n %% 5 = 0 THEN 'cloud' ELSE 'local' END, 'a-model', 50, 20, 0.0002, 1,
       at, at, at + interval '2 seconds', at + interval '2 seconds'
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
CROSS JOIN LATERAL (
    SELECT n %% 100 = 0 AS failed,
           current_instant() - make_interval(days => %(days)s) * (1 - n / %(of)s::double precision)
           - interval '3 seconds' AS at
    OFFSET 0) AS made
"""
FINISHED_AUDIT = """
INSERT INTO audit_log (
    root_id, task_id, tenant, from_status, to_status, reason, at, worker, attempt)
SELECT t.task_id, t.task_id, t.tenant, step.was, step.became, step.reason,
       t.created_at + step.later, CASE WHEN step.was IS NOT NULL THEN t.worker END,
       CASE WHEN step.was IS NOT NULL THEN t.attempt ELSE 0 END
FROM tasks t CROSS JOIN LATERAL (VALUES
    (NULL::task_status, 'PENDING'::task_status, 'created', interval '0'),
    ('PENDING', 'RUNNING', 'claimed', interval '1 second'),
    ('RUNNING', t.status, t.reason, interval '2 seconds')) AS step(was, became, reason, later)
WHERE t.task_id BETWEEN %(first)s AND %(last)s
"""
WAITING = """
INSERT INTO tasks (
    task_id, tenant, kind, payload, priority, due, available_at, requested_route)
SELECT n, format('tenant-%%s', n * 7919 %% %(tenants)s), 'prompt',
       jsonb_build_object('prompt', repeat('x', 180), 'seq', n), n %% 10, %(due)s,
       current_instant() + CASE WHEN %(due)s THEN interval '0'
           ELSE interval '1 day' + interval '30 days' * random() END,
       CASE WHEN %(due)s THEN 'cloud' ELSE 'auto' END
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""
WAITING_AUDIT = """
INSERT INTO audit_log (root_id, task_id, tenant, to_status, reason, at, attempt)
SELECT task_id, task_id, tenant, 'PENDING', 'created', created_at, 0 FROM tasks
WHERE task_id BETWEEN %(first)s AND %(last)s
"""
CROWD = """
INSERT INTO tasks (tenant, kind, payload, priority, requested_route)
SELECT %(tenant)s, 'tool',
       jsonb_build_object('tool', 'echo', 'args', jsonb_build_object('pad', repeat('x', 170))),
       9, 'none'
FROM generate_series(%(first)s, %(last)s)
"""

# The history is older than the partitions that the schema has made.
OLD_PARTITIONS = f"""
SELECT set_config('orchestrator.fake_now', (now() - interval '{DAYS + 1} days')::text, false);
SELECT ensure_audit_partitions()
"""
NEXT_NUMBER = "SELECT setval(pg_get_serial_sequence('tasks', 'task_id'), %s)"

# Without those that a constraint needs: they are kept.
LIST_INDEXES = """
SELECT indexrelid::regclass::text AS name,
       replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON ') AS definition
FROM pg_index
WHERE indrelid IN ('tasks'::regclass, 'audit_log'::regclass)
  AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)
"""

WHILE_FILLED = {"max_wal_size": "16GB", "checkpoint_timeout": "1h"}


def fill(url: str, size: Size) -> None:
    """Make that history in a fresh database."""
    with indexes_built_later(url), audit_left_out(url):
        with administrator(url) as cursor:
            cursor.execute(OLD_PARTITIONS)
        delayed, pending = size.finished + 1, size.finished + size.delayed + 1
        in_chunks(url, FINISHED, FINISHED_AUDIT, 1, size.finished, tenants=size.tenants, days=DAYS)
        for first, last, due in ((delayed, pending - 1, False), (pending, size.tasks, True)):
            in_chunks(url, WAITING, WAITING_AUDIT, first, last, tenants=size.tenants, due=due)
        with administrator(url) as cursor:
            ask(cursor, NEXT_NUMBER, size.tasks)


def add_crowd(url: str, tenant: str, tasks: int) -> None:
    """Due tasks of one tenant, which any worker can run, of the highest priority; without audit."""
    with audit_left_out(url):
        in_chunks(url, CROWD, "", 1, tasks, tenant=tenant)


def in_chunks(url: str, rows: str, audit: str, first: int, last: int, **values: Any) -> None:
    """Run both statements for all numbers from `first` to `last`, over a few connections."""

    def make(chunk: int) -> None:
        numbers = {"first": chunk, "last": min(chunk + CHUNK - 1, last), "of": last}
        with administrator(url) as cursor:
            for statement in filter(None, (rows, audit)):
                cursor.execute(statement, {**values, **numbers})

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for _ in pool.map(make, range(first, last + 1, CHUNK)):
            pass


@contextmanager
def few_checkpoints(url: str) -> Iterator[None]:
    """While the server is filled: hardly a page is written to the log as a whole."""
    with administrator(url) as cursor:
        for name, value in WHILE_FILLED.items():
            cursor.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        cursor.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            for name in WHILE_FILLED:
                cursor.execute(f"ALTER SYSTEM RESET {name}")
            cursor.execute("SELECT pg_reload_conf()")


@contextmanager
def audit_left_out(url: str) -> Iterator[None]:
    with administrator(url) as cursor:
        cursor.execute("ALTER TABLE tasks DISABLE TRIGGER audit_tasks_created")
        try:
            yield
        finally:
            cursor.execute("ALTER TABLE tasks ENABLE TRIGGER audit_tasks_created")


@contextmanager
def indexes_built_later(url: str) -> Iterator[None]:
    with administrator(url) as cursor:
        cursor.execute(LIST_INDEXES)
        indexes = cursor.fetchall()
        for name, _ in indexes:
            cursor.execute(f"DROP INDEX {name}")
    yield
    with administrator(url) as cursor:
        cursor.execute("SET maintenance_work_mem = '1GB'")
        for _, definition in indexes:
            cursor.execute(definition)

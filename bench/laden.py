"""A drain in a database that holds other tasks as well: what bench.drain does in an empty one.

What is measured must not be what the measure does itself. A lock on `tasks` would end an autovacuum
that is at work there, and the next comes a minute later: so the worker is held at its first look
at schema_version. And whoever asks a table full of dead rows whether work is left reads them: so
that is asked only when the audit log has as many rows as it will have in the end.
"""

from __future__ import annotations

import time

from bench.common import (
    MeasureFailed,
    Process,
    Stage,
    administrator,
    ask,
    await_quiet,
    eventually,
)
from bench.drain import await_empty, fill

CONCURRENCY = 512

# Of the tasks that any worker can run; those of a paused route stay. Each order is that of an
# index: where the planner expects many such rows, it would read the table from its beginning.
IS_WORK_LEFT = """
SELECT coalesce(
    (SELECT task_id FROM tasks WHERE due AND NOT alone AND requested_route = 'none'
     ORDER BY tenant, priority DESC, task_id LIMIT 1),
    (SELECT task_id FROM tasks
     WHERE CASE WHEN status = 'RUNNING' THEN true END ORDER BY task_id LIMIT 1)) IS NOT NULL
"""
# Rows of the audit log so far: a task that came, was claimed, and has ended has three.
AUDIT_ROWS = "SELECT last_value FROM audit_log_id_seq"
COUNT_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%schema_version%'
"""
LAST_TASK = "SELECT coalesce(max(task_id), 0) FROM tasks"
COUNT_DONE = "SELECT count(*) FROM tasks WHERE task_id > %s AND status = 'SUCCEEDED'"
COUNT_CLAIMS = """
SELECT count(*) FROM audit_log WHERE task_id > %s AND reason = 'claimed'
"""


def drain(stage: Stage, url: str, tasks: int, vacuum: bool = True) -> float:
    """Tasks per second of one worker, from its release, before any claim, to the last settlement.

    Without `vacuum` the tables are taken as they are.
    """
    with administrator(url) as watcher:
        last = ask(watcher, LAST_TASK)
        fill(url, tasks)
        if vacuum:
            stage.settle(url)
        watcher.execute("CHECKPOINT")
        await_quiet()
        rows = ask(watcher, AUDIT_ROWS) + 2 * tasks  # when all are settled
        worker: Process | None = None
        try:
            with administrator(url) as gate:
                gate.execute("BEGIN; LOCK TABLE schema_version IN ACCESS EXCLUSIVE MODE")
                worker = stage.worker(url, "--concurrency", str(CONCURRENCY))
                eventually(lambda: ask(watcher, COUNT_WAITING) >= 1, what="a worker at the gate")
                gate.execute("COMMIT")
            began = time.monotonic()
            await_empty(
                lambda: ask(watcher, AUDIT_ROWS) < rows or ask(watcher, IS_WORK_LEFT), [worker]
            )
            seconds = time.monotonic() - began
        finally:
            if worker is not None:
                stage.end(worker)
        done, claims = ask(watcher, COUNT_DONE, last), ask(watcher, COUNT_CLAIMS, last)
    if not done == claims == tasks:
        raise MeasureFailed(f"of {tasks} tasks {done} succeeded, by {claims} claims")
    return tasks / seconds

"""A drain in a database that holds other tasks as well: what bench.drain does in an empty one."""

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
from bench.drain import COUNT_WAITING, await_empty, fill

CONCURRENCY = 512

# Of the tasks that any worker can run; those of a paused route stay.
IS_WORK_LEFT = """
SELECT EXISTS (SELECT FROM tasks WHERE due AND NOT alone AND requested_route = 'none')
    OR EXISTS (SELECT FROM tasks WHERE CASE WHEN status = 'RUNNING' THEN true END)
"""
LAST_TASK = "SELECT coalesce(max(task_id), 0) FROM tasks"
COUNT_DONE = "SELECT count(*) FROM tasks WHERE task_id > %s AND status = 'SUCCEEDED'"
COUNT_CLAIMS = """
SELECT count(*) FROM audit_log WHERE task_id > %s AND reason = 'claimed'
"""


def drain(stage: Stage, url: str, tasks: int, vacuum: bool = True) -> float:
    """Tasks per second of one worker, from the release of its first claim to the last settlement.

    Without `vacuum` the tables are taken as they are.
    """
    with administrator(url) as watcher:
        last = ask(watcher, LAST_TASK)
        fill(url, tasks)
        if vacuum:
            stage.settle(url)
        watcher.execute("CHECKPOINT")
        await_quiet()
        worker: Process | None = None
        try:
            with administrator(url) as gate:
                gate.execute("BEGIN; LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
                worker = stage.worker(url, "--concurrency", str(CONCURRENCY))
                eventually(lambda: ask(watcher, COUNT_WAITING) >= 1, what="a worker at the gate")
                gate.execute("COMMIT")
            began = time.monotonic()
            await_empty(lambda: bool(ask(watcher, IS_WORK_LEFT)), [worker])
            seconds = time.monotonic() - began
        finally:
            if worker is not None:
                stage.end(worker)
        done, claims = ask(watcher, COUNT_DONE, last), ask(watcher, COUNT_CLAIMS, last)
    if not done == claims == tasks:
        raise MeasureFailed(f"of {tasks} tasks {done} succeeded, by {claims} claims")
    return tasks / seconds

"""Runs of 1,000 steps: what a hop of a chain costs, how fast a star is done, and their creation.

    python -m bench.runs

A hop is from the start of a step's work to the start of the next one's, by CLOCK_MONOTONIC, as
pickup is measured. A star is one step and 999 that wait for it; its rate, and that of lone tasks of
the same kind, is from the first claim to the last end by the audit log. One worker does all of it.
"""

from __future__ import annotations

import sys
import time

import db
from bench.common import Stage
from bench.pickup import WARM_UP, pickup_ms
from bench.report import Record, percentile, run
from bench.tool import TOOLS, await_starts, connected, noop_step, noop_task
from db import Connection
from queries.runs import NewRun, NewStep, submit_run

STEPS = 1000
CONCURRENCY = 100  # of the worker that drains; more is no faster
REPETITIONS = 5
QUICK_REPETITIONS = 1

STEPS_OF_RUN = "SELECT task_id FROM tasks WHERE parent_id = %(run_id)s ORDER BY task_id"
SPAN = """
SELECT extract(epoch FROM max(at) FILTER (WHERE reason = 'succeeded')
                        - min(at) FILTER (WHERE reason = 'claimed'))::double precision AS seconds
FROM audit_log
WHERE task_id = ANY(%(task_ids)s)
"""


def measure(stage: Stage, record: Record, quick: bool) -> None:
    repetitions = QUICK_REPETITIONS if quick else REPETITIONS
    measure_creation(stage, record, repetitions)
    url = stage.database()
    with connected(url) as conn:
        patient = stage.worker(url, tools=TOOLS)
        pickup_ms(conn, WARM_UP)
        for _ in range(repetitions):
            measure_chain(conn, record)
        stage.end(patient)
        stage.worker(url, "--concurrency", str(CONCURRENCY), tools=TOOLS)
        drain_seconds(conn)
        for _ in range(repetitions):
            measure_star(conn, record)


def measure_creation(stage: Stage, record: Record, repetitions: int) -> None:
    """Without a worker, by the statement behind POST /runs."""
    url = stage.database()
    with connected(url) as conn:
        submit_run(conn, chain())
        for _ in range(repetitions):
            for name, wanted in (("chain", chain()), ("star", star())):
                began = time.monotonic()
                submit_run(conn, wanted)
                took_ms = (time.monotonic() - began) * 1000
                record.add(f"creation of a {name} of {STEPS:,}", took_ms, "ms")
                record.ratio("ms to create 1,000 steps", took_ms)
    stage.drop(url)


def measure_chain(conn: Connection, record: Record) -> None:
    pickup = record.add("pickup p50", percentile(pickup_ms(conn), 50), "ms")
    steps = steps_of(conn, chain())
    started = await_starts(conn, steps)
    hop = (started[steps[-1]] - started[steps[0]]) / 1e6 / (STEPS - 1)
    record.add("a hop of the chain", hop, "ms")
    record.ratio("chain per hop / pickup p50", hop / pickup)


def measure_star(conn: Connection, record: Record) -> None:
    plain = record.add("lone tasks", STEPS / drain_seconds(conn), "tasks/s")
    of_star = record.add("star", STEPS / span(conn, steps_of(conn, star())), "steps/s")
    record.ratio("star / plain drain", of_star / plain)


def drain_seconds(conn: Connection) -> float:
    answers = db.submit_tasks(conn, [noop_task() for _ in range(STEPS)])
    return span(conn, [answer.task_id for answer in answers if isinstance(answer, db.Submitted)])


def span(conn: Connection, task_ids: list[int]) -> float:
    """Seconds from the first claim to the last end of these tasks."""
    await_starts(conn, task_ids)
    return float(db.fetch(conn, SPAN, {"task_ids": task_ids})[0]["seconds"])


def steps_of(conn: Connection, wanted: NewRun) -> list[int]:
    """Submit a run; the numbers of its steps, in order."""
    run_id = submit_run(conn, wanted).task_id
    return [row["task_id"] for row in db.fetch(conn, STEPS_OF_RUN, {"run_id": run_id})]


def chain() -> NewRun:
    """Each step after the one before."""
    return new_run([noop_step(f"s{n}", [f"s{n - 1}"] if n else []) for n in range(STEPS)])


def star() -> NewRun:
    """Every step but the first after that one."""
    return new_run([noop_step(f"s{n}", ["s0"] if n else []) for n in range(STEPS)])


def new_run(steps: list[NewStep]) -> NewRun:
    return NewRun("default", "a measure", steps)


if __name__ == "__main__":
    run("runs", "Runs: hops, stars, creation", measure, "--quick" in sys.argv)

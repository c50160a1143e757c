"""Drain: no-op tasks that wait already, until the last one is settled.   python -m bench.drain

Ours are rows of kind `tool` that call the tool `echo`. Tools are steps of runs, and a run would
add the release of steps to what is measured; so the rows are stored by db.submit_tasks, the
statement of POST /tasks, without a run. All else is as ever: audit log, fence, lease, heartbeat,
result, log lines. Peers have the same payload, of about 200 bytes, in jobs that do nothing.

Everybody's tables are vacuumed and analysed and a checkpoint is made before the start. Peers' time
begins with their first job. Ours begins when the lock is released that has kept the workers from
their first claim, so the first claim counts. It ends when the database shows no job left, which is
looked for so often that the rate is off by a hundredth or two; the bare loop says by itself
when it has claimed nothing any more.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import db
from bench import report
from bench.common import (
    BENCH_DIR,
    PAD,
    ROOT,
    MeasureFailed,
    Process,
    Stage,
    administrator,
    ask,
    await_quiet,
    eventually,
    graphile_node,
    peers_python,
)
from bench.report import Record
from config import DatabaseSettings

TASKS = 20_000
LONGEST_SECONDS = 30
CONCURRENCIES = (4, 32, 128, 512, 1024)
SHORTEST_PAUSE_SECONDS = 0.01

IS_WORK_LEFT = """
SELECT EXISTS (SELECT FROM tasks WHERE due)
    OR EXISTS (SELECT FROM tasks WHERE CASE WHEN status = 'RUNNING' THEN true END)
"""
COUNT_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%tasks%'
"""


@dataclass(frozen=True)
class Peer:
    """A program below bench/peers, and how one sees that it has nothing left to do."""

    name: str
    command: Sequence[str]
    is_work_left: str
    env: dict[str, str] = field(default_factory=dict)


BARE = Peer(
    "bare loop",
    [sys.executable, "-m", "bench.peers.bare"],
    "SELECT EXISTS (SELECT FROM jobs WHERE status = 'pending')",
)
# What a queue on our tables could at best be: see bench/peers/least.py.
LEAST = Peer("bare loop in our tables", [sys.executable, "-m", "bench.peers.least"], IS_WORK_LEFT)


def peers(record: Record, quick: bool) -> list[Peer]:
    """All that can be had on this machine; who is left out is named."""
    found = [BARE] if quick else [BARE, LEAST]
    if quick:
        record.note(f"the {LEAST.name} is left out: quick")
    if python := peers_python():
        command = [str(python), "-m", "bench.peers.pgqueuer_noop"]
        found.append(Peer("PgQueuer", command, "SELECT EXISTS (SELECT FROM pgqueuer)"))
        record.versions["pgqueuer"] = version_of(python, "pgqueuer")
    else:
        record.note("PgQueuer is left out: it could not be installed")
    if node := graphile_node():
        found.append(
            Peer(
                "graphile-worker",
                [str(node), "bench/peers/graphile_noop.js"],
                "SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
                {"NODE_PATH": str(BENCH_DIR / "node" / "node_modules"), "NODE_ENV": "production"},
            )
        )
        package = BENCH_DIR / "node" / "node_modules" / "graphile-worker" / "package.json"
        record.versions["graphile-worker"] = json.loads(package.read_text())["version"]
    else:
        record.note("graphile-worker is left out: no Node.js, or it could not be installed")
    return found


def version_of(python: Path, package: str) -> str:
    (folder,) = python.parent.parent.glob(f"lib/python*/site-packages/{package}-*.dist-info")
    return folder.name.removesuffix(".dist-info").rpartition("-")[2]


# --- a drain of ours ----------------------------------------------------------------------------


def fill(url: str, tasks: int) -> None:
    conn = db.connect(url, DatabaseSettings(), "bench")
    try:
        for first in range(0, tasks, 1000):
            numbers = range(first, min(first + 1000, tasks))
            db.submit_tasks(conn, [noop(number) for number in numbers])
    finally:
        conn.close()


def noop(number: int) -> db.NewTask:
    payload = {"tool": "echo", "args": {"seq": number, "pad": PAD}}
    return db.NewTask("default", "tool", payload, requested_route="none")


def drain_ours(stage: Stage, workers: int, concurrency: int, tasks: int) -> float:
    """Tasks per second."""
    url = stage.database()
    fill(url, tasks)
    stage.settle(url)
    await_quiet()
    started: list[Process] = []
    try:
        with administrator(url) as gate, administrator(url) as watcher:
            gate.execute("BEGIN; LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
            for number in range(workers):
                arguments = ["--concurrency", str(concurrency), "--name", f"bench-{number}"]
                started.append(stage.worker(url, *arguments))
            eventually(lambda: ask(watcher, COUNT_WAITING) >= workers, what="workers at the gate")
            gate.execute("COMMIT")
            began = time.monotonic()
            await_empty(lambda: bool(ask(watcher, IS_WORK_LEFT)), started)
            seconds = time.monotonic() - began
            done = ask(watcher, "SELECT count(*) FROM tasks WHERE status = 'SUCCEEDED'")
            claims = ask(watcher, "SELECT count(*) FROM audit_log WHERE reason = 'claimed'")
        if not done == claims == tasks:
            raise MeasureFailed(f"of {tasks} tasks {done} succeeded, by {claims} claims")
        return tasks / seconds
    finally:
        stage.end(*started)
        stage.drop(url)


def await_empty(is_work_left: Callable[[], bool], workers: Sequence[Process]) -> None:
    """Look every hundredth of the time that has gone: to look costs the database something."""
    began = time.monotonic()
    while is_work_left():
        if (gone := time.monotonic() - began) > 10 * LONGEST_SECONDS:
            raise MeasureFailed(f"still work left: {workers[0].log[-2000:]}")
        time.sleep(max(gone / 100, SHORTEST_PAUSE_SECONDS))


# --- a drain of a peer --------------------------------------------------------------------------


def drain_peer(stage: Stage, peer: Peer, workers: int, jobs: int) -> float:
    """Jobs per second."""
    url = stage.database(template="template0")
    gate = stage.folder / f"gate-{url.rpartition('/')[2]}"
    gate.mkdir()
    env = {**peer.env, "DATABASE_URL": url, "BENCH_GATE": str(gate), "PYTHONPATH": str(ROOT)}
    started: list[Process] = []
    try:
        for step in (["install"], ["fill", str(jobs)]):
            program = stage.process([*peer.command, *step], env)
            if program.wait(120) != 0:
                raise MeasureFailed(f"{peer.name} {step}: {program.log[-2000:]}")
        stage.settle(url)
        await_quiet()
        started = [stage.process([*peer.command, "work"], env) for _ in range(workers)]
        eventually(lambda: len([*gate.glob("ready.*")]) == workers, what=f"{peer.name} is ready")
        with administrator(url) as watcher:
            (gate / "go").touch()
            await_empty(lambda: bool(ask(watcher, peer.is_work_left)), started)
            seen_empty = time.monotonic_ns()
        first = min(instants(gate, "first"))
        if peer in (BARE, LEAST):
            eventually(lambda: len(instants(gate, "last")) == workers, what=f"{peer.name} ended")
        return jobs / ((max(instants(gate, "last"), default=seen_empty) - first) / 1e9)
    finally:
        stage.end(*started)
        stage.drop(url)
        shutil.rmtree(gate)


def instants(gate: Path, which: str) -> list[int]:
    """What workers have left there: nanoseconds of the monotonic clock."""
    return [int(text) for path in gate.glob(f"{which}.*") if (text := path.read_text())]


# --- the measure --------------------------------------------------------------------------------


def choose_concurrency(stage: Stage, record: Record) -> tuple[int, float]:
    """The one that serves best, by a short drain of each, and its tasks per second."""
    rates = {}
    for concurrency in CONCURRENCIES:
        tasks = max(2_000, 10 * concurrency)
        label = f"ours, 1 worker, --concurrency {concurrency}, {tasks:,} tasks"
        rates[concurrency] = record.add(label, drain_ours(stage, 1, concurrency, tasks), "tasks/s")
    best = max(rates, key=lambda concurrency: rates[concurrency])
    return best, rates[best]


def measure(stage: Stage, record: Record, quick: bool) -> None:
    found = peers(record, quick)
    concurrency, rate = choose_concurrency(stage, record)
    tasks = TASKS if rate * LONGEST_SECONDS > TASKS else round(rate * LONGEST_SECONDS, -3)
    tasks = int(tasks)
    record.note(f"ours with --concurrency {concurrency}, {tasks:,} tasks; peers {TASKS:,} jobs")
    for _ in range(2 if quick else 3):
        for workers in (1, 2):
            word = "1 worker" if workers == 1 else f"{workers} workers"
            ours = drain_ours(stage, workers, concurrency, tasks)
            record.add(f"ours, {word}", ours, "tasks/s")
            for peer in found:
                theirs = drain_peer(stage, peer, workers, TASKS)
                record.add(f"{peer.name}, {word}", theirs, "tasks/s")
                record.ratio(f"{word} / {peer.name}", ours / theirs)


if __name__ == "__main__":
    report.run("drain", "Drain of no-op tasks", measure, quick="--quick" in sys.argv)

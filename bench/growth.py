"""A full table beside an empty one: drain, submit, pickup; lists and figures; reaper; fairness.

    python -m bench.growth              # 12 million tasks
    python -m bench.growth --quick      # a twentieth of that

The full table is made as bench.history says. Its million of pending tasks ask for a route that the
workers find paused. Drain, submit and pickup take turns between the two tables. What is read over
HTTP is read by an operator (all tenants) and for one tenant, on one open connection; the slowest
address of each kind is judged, by its median. Fairness is counted in claims that began after
another tenant's task was committed and before it was claimed itself, by the audit log.
"""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from urllib.parse import urlsplit

import db
from bench import history, laden
from bench.common import MeasureFailed, Stage, administrator, ask, await_quiet, eventually
from bench.pickup import pickup_ms
from bench.report import Record, percentile, run
from bench.submit import BATCH, BATCH_CONNECTIONS, CONNECTIONS, QUIET_SECONDS, Bodies, load
from bench.tool import TOOLS, connected
from config import Retry
from db import NewTask
from queries.keys import create_key
from queries.leases import reap_tasks

DRAINED = 20_000
DRAINS = 5  # of each table
TURNS = 4  # of each table, for what is submitted
PAGES = 10  # answers of each address
SLOW_MS = 500.0  # an answer that takes longer is asked for three times only
REAPS = 50
CROWD = 1_000_000
QUICK_CROWD = 100_000
NEWCOMERS = 20
GREEDY = "greedy"
NEW_TENANTS = ("a-newcomer", "z-newcomer")  # in front of the greedy one's name, and behind it

# By the goal that each address belongs to; the first asks nothing of Postgres, for comparison.
READ = {
    "GET /healthz": ("/healthz",),
    "GET /metrics": ("/metrics",),
    "GET /stats": ("/stats",),
    "GET /dead-letters": ("/dead-letters",),
    "GET /tasks": (
        "/tasks",
        "/tasks?limit=200",
        "/tasks?status=SUCCEEDED",
        "/tasks?status=PENDING&kind=prompt",
        "/tasks?status=RUNNING",
    ),
}
READERS = {"all tenants": {}, "one tenant": {"X-Tenant-Id": "tenant-7"}}

# Claims of the greedy tenant's tasks that could see a task which was committed before `after`.
CLAIMS_BEFORE = """
SELECT count(DISTINCT transaction) FROM audit_log
WHERE id > %s AND tenant = %s AND reason = 'claimed' AND transaction >= %s::text::xid8
  AND transaction < (SELECT transaction FROM audit_log WHERE task_id = %s AND reason = 'claimed')
"""
LAST_ENTRY = "SELECT last_value FROM audit_log_id_seq"
NEXT_TRANSACTION = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
IS_CLAIMED = "SELECT EXISTS (SELECT FROM audit_log WHERE task_id = %s AND reason = 'claimed')"


def measure(stage: Stage, record: Record, quick: bool) -> None:
    full = fill(stage, record, history.QUICK if quick else history.FULL)
    compare(stage, record, full, quick)


def fill(stage: Stage, record: Record, size: history.Size) -> str:
    """The address of a database with that history."""
    url = stage.database()
    began = time.monotonic()
    with history.few_checkpoints(url):
        history.fill(url, size)
    stage.settle(url)
    record.note(f"{size}, with their audit log; made in {time.monotonic() - began:.0f} s")
    return url


def compare(stage: Stage, record: Record, full: str, quick: bool) -> None:
    """All measures, in the full table and in empty ones."""
    for _ in range(DRAINS):  # two of one table differ by more than it takes to miss the goal
        measure_drain(stage, record, full, DRAINED)
    for _ in range(1 if quick else 3):
        measure_submit(stage, record, full, 3 if quick else 6)
    measure_pickup(stage, record, full, 1 if quick else 5)
    measure_reads(stage, record, full)
    measure_reaper(record, full)
    measure_fairness(stage, record, full, QUICK_CROWD if quick else CROWD)


# --- drain, submit, pickup -----------------------------------------------------------------------


def measure_drain(stage: Stage, record: Record, full: str, tasks: int) -> None:
    """By turns; which table comes first changes from one repetition to the next."""
    urls = {"empty table": stage.database(), "full table": full}
    name = "drain of the full table / of the empty"
    is_even = len(record.ratios.get(name, ())) % 2 == 0
    for table in urls if is_even else reversed(urls):
        record.add(f"drain, {table}", laden.drain(stage, urls[table], tasks), "tasks/s")
    found = {table: record.figures[f"drain, {table}"][-1] for table in urls}
    record.ratio(name, found["full table"] / found["empty table"])
    stage.drop(urls["empty table"])


def measure_submit(stage: Stage, record: Record, full: str, seconds: float) -> None:
    """Over HTTP, without a worker beside; in short turns, since a machine changes its pace."""
    urls = {"empty table": stage.database(), "full table": full}
    apis = {table: stage.api(url) for table, url in urls.items()}
    bodies = Bodies(stage.folder)

    def rates(path: str, body: Path, connections: int) -> dict[str, float]:
        """Requests per second in each table."""
        found: dict[str, list[float]] = {table: [] for table in apis}
        for turn in range(1 + TURNS):
            await_quiet(QUIET_SECONDS)
            for table in list(apis) if turn % 2 else list(reversed(apis)):
                address = apis[table].url + path
                answered = load(stage, address, body, seconds / TURNS, connections)
                found[table].append(answered["per_second"])
        return {table: mean(per_turn[1:]) for table, per_turn in found.items()}  # one to warm up

    alone = rates("/tasks", bodies.task, CONNECTIONS)
    batches = rates("/tasks/batch", bodies.batch, BATCH_CONNECTIONS)
    for table in urls:
        record.add(f"POST /tasks, {table}", alone[table], "requests/s")
        rate = BATCH * batches[table]
        record.add(f"POST /tasks/batch of {BATCH:,}, {table}", rate, "tasks/s")
    for name, found in (("submit", alone), ("batches", batches)):
        ratio = found["full table"] / found["empty table"]
        record.ratio(f"{name} to the full table / to the empty", ratio)
    stage.end(*apis.values())
    stage.drop(urls["empty table"])


def measure_pickup(stage: Stage, record: Record, full: str, repetitions: int) -> None:
    """Each table has an idle worker of its own all the time."""
    empty = stage.database()
    urls = {"empty table": empty, "full table": full}
    workers = [stage.worker(url, tools=TOOLS) for url in urls.values()]
    with connected(empty) as one, connected(full) as other:
        connections = dict(zip(urls, (one, other), strict=True))
        for conn in connections.values():
            pickup_ms(conn)  # to warm up
        for repetition in range(repetitions):
            order = list(urls) if repetition % 2 else list(reversed(urls))
            times = {table: pickup_ms(connections[table]) for table in order}
            for share in (50, 99):
                found = {table: percentile(times[table], share) for table in urls}
                for table, value in found.items():
                    record.add(f"pickup p{share}, {table}", value, "ms")
                ratio = f"pickup p{share} of the full table / of the empty"
                record.ratio(ratio, found["full table"] / found["empty table"])
    stage.end(*workers)
    stage.drop(empty)


# --- what is read --------------------------------------------------------------------------------


def measure_reads(stage: Stage, record: Record, full: str) -> None:
    with connected(full) as conn:
        key = create_key(conn, None)
    api = stage.api(full)
    for kind, paths in READ.items():
        slowest = 0.0
        for reader, headers in READERS.items():
            for path in paths:
                times = answers_ms(api.url, path, {"X-API-Key": key, **headers}, record)
                median = record.add(f"GET {path}, {reader}", percentile(times, 50), "ms")
                slowest = max(slowest, median)
        record.ratio(f"ms {kind}", slowest)
    stage.end(api)


def answers_ms(url: str, path: str, headers: Mapping[str, str], record: Record) -> list[float]:
    """How long answers take on one connection, in milliseconds; the first does not count.

    What was refused is noted, and not asked for again: the time it took is then all there is.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    times: list[float] = []
    while len(times) < 1 + (PAGES if not times or times[-1] < SLOW_MS else 3):
        began = time.perf_counter()
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        answer.read()
        times.append(1000 * (time.perf_counter() - began))
        if answer.status != 200:
            record.note(f"GET {path} was answered with {answer.status}")
            return times[-1:]
    connection.close()
    return times[1:]


def measure_reaper(record: Record, full: str) -> None:
    """A pass that finds nothing, as the worker makes it every few seconds."""
    times = []
    with connected(full) as conn:
        for _ in range(REAPS):
            began = time.perf_counter()
            if reap_tasks(conn, Retry(), spread_seconds=1):
                raise MeasureFailed("there was something to reap")
            times.append(1000 * (time.perf_counter() - began))
    record.add("reaper with nothing to do, p99", percentile(times, 99), "ms")
    record.ratio(
        "ms of a reaper with nothing to do",
        record.add("reaper with nothing to do, p50", percentile(times, 50), "ms"),
    )


# --- fairness ------------------------------------------------------------------------------------


def measure_fairness(stage: Stage, record: Record, full: str, crowd: int) -> None:
    """One tenant has very many tasks of the highest priority; others bring one of the lowest."""
    history.add_crowd(full, GREEDY, crowd)
    stage.settle(full)
    record.note(f"fairness: beside {crowd:,} queued tasks of one tenant")
    worker = stage.worker(full, "--concurrency", str(laden.CONCURRENCY))
    with administrator(full) as watcher, connected(full) as conn:
        watcher.execute(LAST_ENTRY)
        for number in range(NEWCOMERS):
            last = ask(watcher, LAST_ENTRY)
            payload = {"tool": "echo", "args": {"seq": number}}
            tenant = NEW_TENANTS[number % len(NEW_TENANTS)]
            newcomer = NewTask(tenant, "tool", payload, requested_route="none")
            task_id = db.submit_task(conn, newcomer).task_id
            began = time.monotonic()
            after = ask(watcher, NEXT_TRANSACTION)
            eventually(partial(ask, watcher, IS_CLAIMED, task_id), what="a claim")
            record.add("until a newcomer's claim", 1000 * (time.monotonic() - began), "ms")
            claims = ask(watcher, CLAIMS_BEFORE, last, GREEDY, after, task_id)
            record.add("claims before a newcomer's", claims, "claims")
    record.ratio("claims before a newcomer's", max(record.figures["claims before a newcomer's"]))
    stage.end(worker)


if __name__ == "__main__":
    run("growth", "Growth: a full table beside an empty one", measure, "--quick" in sys.argv)

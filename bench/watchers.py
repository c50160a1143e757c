"""1,000 streams of events on one busy run, from one API process.   python -m bench.watchers

The watchers are one cheap process (bench.crowd). When all of them have their snapshot, a worker
starts to work on the run; each step makes two events. Busy means that four steps of 100 ms run at
any time, as those that wait for a model do; in a rush the steps do nothing, and a worker ends them
as fast as it can. The time is from the event's `at`, which is before its commit, to the read of a
watcher: the database's clock is compared with CLOCK_MONOTONIC once. 250 ms is the goal for the busy
run.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from bench.common import (
    MeasureFailed,
    Process,
    Stage,
    administrator,
    ask,
    await_quiet,
    eventually,
    process_figures,
)
from bench.report import Record, run
from bench.tool import TOOLS, connected
from queries.runs import NewRun, NewStep, submit_run

WATCHERS = 1000
PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Pace:
    name: str
    steps: int
    tool: str
    args: dict[str, float]
    concurrency: int

    def run(self) -> NewRun:
        call = {"tool": self.tool, "args": self.args}
        steps = [NewStep(f"s{number}", "tool", call, ()) for number in range(self.steps)]
        return NewRun("default", "a measure", steps)


BUSY = Pace("busy run", 300, "sleep", {"seconds": 0.1}, 4)
RUSH = Pace("rush", 1000, "noop", {}, 100)


def measure(stage: Stage, record: Record, quick: bool) -> None:
    url = stage.database()
    api = stage.api(url)
    for _ in range(1 if quick else 3):
        for pace in (BUSY,) if quick else (BUSY, RUSH):
            watch(stage, record, url, api, pace)


def watch(stage: Stage, record: Record, url: str, api: Process, pace: Pace) -> None:
    with connected(url) as conn:
        run_id = submit_run(conn, pace.run()).task_id
    await_quiet()
    address = f"{api.url}/runs/{run_id}/events"
    command = [sys.executable, "-m", "bench.crowd", address, "--watchers", str(WATCHERS)]
    crowd = stage.process([*command, "--ahead", repr(clock_ahead(url))])
    opened = told(crowd, 0)
    record.add(f"{pace.name}: all {WATCHERS:,} have their snapshot", opened["opened_seconds"], "s")
    cpu = process_figures(api.pid)[0]
    worker = stage.worker(url, "--concurrency", str(pace.concurrency), tools=TOOLS)
    found = told(crowd, 1)
    cpu = process_figures(api.pid)[0] - cpu
    stage.end(worker, crowd)
    expected = 2 * pace.steps + 1
    if not found["fewest"] == found["most"] == found["events"] == expected:
        raise MeasureFailed(f"{expected} events were to come: {found}")
    for word in ("p50", "p99", "max"):
        record.add(f"{pace.name}: an event is with a watcher, {word}", found[f"{word}_ms"], "ms")
    per_event = 1e6 * cpu / (expected * WATCHERS)
    record.add(f"{pace.name}: CPU of the API, per event and watcher", per_event, "µs")
    record.add(f"{pace.name}: longest round of the client", found["longest_round_ms"], "ms")
    record.ratio(f"ms at p99, {pace.name}", found["p99_ms"])


def clock_ahead(url: str) -> float:
    """Seconds that the database's clock is ahead of ours, by the quickest of some answers."""
    found = []
    with administrator(url) as cursor:
        for _ in range(20):
            before = time.monotonic()
            instant = ask(cursor, "SELECT extract(epoch FROM clock_timestamp())::float8")
            after = time.monotonic()
            found.append((after - before, instant - (before + after) / 2))
    return float(min(found)[1])


def told(crowd: Process, line: int) -> dict[str, float]:
    """What the watchers have said so far."""
    lines = eventually(
        lambda: said if len(said := crowd.log.splitlines()) > line else not crowd.is_running(),
        PATIENCE_SECONDS,
        "the watchers",
    )
    if not isinstance(lines, list) or not lines[line].startswith("{"):
        raise MeasureFailed(f"the watchers: {crowd.log[-2000:]}")
    found: dict[str, float] = json.loads(lines[line])
    return found


if __name__ == "__main__":
    run("watchers", "Watchers: 1,000 streams of one run", measure, "--quick" in sys.argv)

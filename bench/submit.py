"""Submit: tasks in over HTTP, beside an endpoint that does nothing.   python -m bench.submit

64 connections of one client in a process of its own, each request with an Idempotency-Key of its
own, against one uvicorn process as run.sh starts it. The empty endpoint takes the same body in a
FastAPI application that has nothing of ours. A lone request is one connection on an idle server.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import psycopg2.extensions

from bench import report
from bench.apps.plain import INSERT, INSTALL
from bench.common import PAD, MeasureFailed, Process, Stage, administrator, await_quiet
from bench.report import Record, percentile

CONNECTIONS = 64
BATCH = 1000
BATCH_CONNECTIONS = 2
LONE_INSERTS = 500
QUIET_SECONDS = 3
TASK = {"prompt": PAD, "metadata": {"seq": 12345}}


class Bodies:
    """The files that hold what is sent."""

    def __init__(self, folder: Path) -> None:
        self.task, self.batch = folder / "task.json", folder / "batch.json"
        self.task.write_text(json.dumps(TASK))
        self.batch.write_text(json.dumps({"tasks": [TASK] * BATCH}))


def load(
    stage: Stage, address: str, body: Path, seconds: float, connections: int
) -> dict[str, Any]:
    """What bench.load has found; every answer is to be a 201."""
    command = [sys.executable, "-m", "bench.load", address, "--body", str(body)]
    command += ["--keys", secrets.token_hex(4), "--seconds", str(seconds)]
    command += ["--connections", str(connections)]
    client = stage.process(command)
    if client.wait(seconds + 60) != 0:
        raise MeasureFailed(client.log[-2000:])
    found: dict[str, Any] = json.loads(client.log.splitlines()[-1])
    if found["refused"] or not found["answered"]:
        raise MeasureFailed(f"{address}: {found}")
    return found


def lone_inserts(url: str) -> float:
    """Milliseconds of one INSERT with its commit, by psycopg2 and without HTTP: the median."""
    psycopg2.extensions.set_wait_callback(None)  # ours, which a client of its own would not have
    latencies = []
    with administrator(url) as cursor:
        for _ in range(LONE_INSERTS):
            began = time.perf_counter()
            cursor.execute(INSERT, (json.dumps(TASK),))
            cursor.fetchall()
            latencies.append(time.perf_counter() - began)
    return 1000 * percentile(latencies, 50)


class Repetition:
    """One round: a fresh database, three servers, everything once."""

    def __init__(self, stage: Stage, record: Record, seconds: float) -> None:
        self.stage, self.record, self.seconds = stage, record, seconds
        self.bodies = Bodies(stage.folder)
        self.url = stage.database()
        with administrator(self.url) as cursor:
            cursor.execute(INSTALL)

    def take(self) -> None:
        # What is compared comes one right after the other, so that both find the same machine.
        plain = self.stage.api(self.url, "bench.apps.plain:app", "/openapi.json")
        beside = self.stage.api(self.url, "bench.apps.ours:app")
        ours = self.stage.api(self.url)
        empty = self.under_load("empty endpoint", plain, "/nothing")
        found = self.under_load("POST /tasks", ours, "/tasks")
        self.under_load("empty endpoint behind our middlewares", beside, "/nothing")
        self.under_load("endpoint with a plain INSERT", plain, "/insert")
        lone_insert = self.alone("endpoint with a plain INSERT", plain, "/insert")
        lone = self.alone("POST /tasks", ours, "/tasks")
        lone_empty = self.alone("empty endpoint", plain, "/nothing")
        insert = self.record.add("lone INSERT without HTTP, p50", lone_inserts(self.url), "ms")
        self.batches(ours)
        self.stage.end(plain, beside, ours)
        self.record.ratio("POST /tasks / empty endpoint", found["per_second"] / empty["per_second"])
        self.record.ratio(
            "p99 of POST /tasks / of empty endpoint", found["p99_ms"] / empty["p99_ms"]
        )
        self.record.ratio("lone POST / endpoint with a plain INSERT", lone / lone_insert)
        self.record.ratio("lone POST - empty endpoint / INSERT", (lone - lone_empty) / insert)
        self.stage.drop(self.url)

    def under_load(self, label: str, server: Process, path: str) -> dict[str, Any]:
        load(self.stage, server.url + path, self.bodies.task, 1, CONNECTIONS)  # to warm up
        await_quiet(QUIET_SECONDS)
        found = load(self.stage, server.url + path, self.bodies.task, self.seconds, CONNECTIONS)
        self.record.add(label, found["per_second"], "requests/s")
        self.record.add(f"{label}, p50", found["p50_ms"], "ms")
        self.record.add(f"{label}, p99", found["p99_ms"], "ms")
        return found

    def alone(self, label: str, server: Process, path: str) -> float:
        await_quiet(QUIET_SECONDS)
        found = load(self.stage, server.url + path, self.bodies.task, self.seconds / 2, 1)
        self.record.add(f"{label}, lone, p99", found["p99_ms"], "ms")
        return self.record.add(f"{label}, lone, p50", found["p50_ms"], "ms")

    def batches(self, server: Process) -> None:
        await_quiet(QUIET_SECONDS)
        address = server.url + "/tasks/batch"
        found = load(self.stage, address, self.bodies.batch, self.seconds, BATCH_CONNECTIONS)
        label = f"POST /tasks/batch of {BATCH:,}, {BATCH_CONNECTIONS} connections"
        rate = self.record.add(label, BATCH * found["per_second"], "tasks/s")
        self.record.ratio("batch tasks/s", rate)


def measure(stage: Stage, record: Record, quick: bool) -> None:
    for _ in range(2 if quick else 5):
        Repetition(stage, record, 3).take()


if __name__ == "__main__":
    report.run("submit", "Submit over HTTP", measure, quick="--quick" in sys.argv)

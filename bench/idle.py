"""What an idle worker and an idle API cost, and how long they take to be ready.

    python -m bench.idle

Transactions are those that Postgres counts for the database (pg_stat_database) over 20 s, read from
another database; without a worker there are none. CPU and resident memory are the kernel's figures
of the process. A worker is ready when its row is in `workers`: its connections are open, and it
claims. The API is ready when /readyz says so. Both find a database with our schema.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from bench.common import (
    Process,
    Stage,
    administrator,
    ask,
    await_quiet,
    eventually,
    process_figures,
)
from bench.report import Record, run

WATCHED_SECONDS = 20.0
SETTLED_SECONDS = 5.0  # after its start
REPETITIONS = 5
QUICK_REPETITIONS = 2
QUICK_WATCHED_SECONDS = 10.0
MEGABYTE = 1_000_000

COUNT_WORKERS = "SELECT count(*) FROM workers"
COUNT_TRANSACTIONS = """
SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s
"""


def measure(stage: Stage, record: Record, quick: bool) -> None:
    watched_seconds = QUICK_WATCHED_SECONDS if quick else WATCHED_SECONDS
    if find_spec("rich"):  # which none of our requirements ask for
        record.note("rich is installed beside, so httpx imports its command line: some 3 MB")
    with model_server() as model_url:
        for _ in range(QUICK_REPETITIONS if quick else REPETITIONS):
            measure_worker(stage, record, model_url, watched_seconds)
            measure_api(stage, record)


def measure_worker(stage: Stage, record: Record, model_url: str, watched_seconds: float) -> None:
    url = stage.database()
    await_quiet()
    began = time.monotonic()
    worker = stage.process(
        [sys.executable, "scheduler.py"],
        {**stage.environment(url), "OLLAMA_URL": model_url},
    )
    with administrator(url) as cursor:
        eventually(lambda: ask(cursor, COUNT_WORKERS) > 0, what="the worker")
    seconds = record.add("worker: ready after", time.monotonic() - began, "s")
    record.ratio("worker ready after s", seconds)
    time.sleep(SETTLED_SECONDS)
    watch(stage, record, worker, url, watched_seconds)
    stage.end(worker)
    stage.drop(url)


def watch(stage: Stage, record: Record, worker: Process, url: str, seconds: float) -> None:
    """Look at an idle worker for a while."""
    name = url.rpartition("/")[2]
    with administrator(stage.server_url) as cursor:
        transactions = ask(cursor, COUNT_TRANSACTIONS, name)
        cpu = cpu_seconds(worker.pid)
        time.sleep(seconds)
        transactions = ask(cursor, COUNT_TRANSACTIONS, name) - transactions
    cpu = cpu_seconds(worker.pid) - cpu
    rate = record.add("worker: transactions", transactions / seconds, "/s")
    share = record.add("worker: CPU", 100 * cpu / seconds, "%")
    megabytes = record.add("worker: resident", process_figures(worker.pid)[1] / MEGABYTE, "MB")
    record.ratio("transactions/s", rate)
    record.ratio("CPU percent", share)
    record.ratio("worker MB", megabytes)


def cpu_seconds(pid: int) -> float:
    """What the threads of a process have used, to the nanosecond: /proc/PID/stat counts in ticks,
    of which an idle worker needs none in 20 s."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def measure_api(stage: Stage, record: Record) -> None:
    url = stage.database()
    await_quiet()
    began = time.monotonic()
    api = stage.api(url)
    seconds = record.add("API: ready after", time.monotonic() - began, "s")
    time.sleep(SETTLED_SECONDS)
    megabytes = record.add("API: resident", process_figures(api.pid)[1] / MEGABYTE, "MB")
    record.ratio("API ready after s", seconds)
    record.ratio("API MB", megabytes)
    stage.end(api)
    stage.drop(url)


class Yes(BaseHTTPRequestHandler):
    """A model server that is there, and is asked for nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def model_server() -> Iterator[str]:
    """The address of a server that answers probes: an idle worker has nothing to retry."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Yes)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    run("idle", "Idle: what waiting costs, and the start", measure, "--quick" in sys.argv)

"""One worker process: python scheduler.py [--concurrency N] [--drain] [--name NAME]

The main thread owns the database connection that claims and settles, and goes round:

    settle   write what has come of the tasks that ended, fenced by their lease tokens
    reap     every few seconds, take back tasks whose lease ran out, of any worker
    claim    lease as many due tasks as slots are free
    route    decide for each: local or cloud
    execute  hand it to the runner, which streams from the model on a thread of its own

and then sleeps until a slot is free, a notification comes, something becomes due, or the poll is
due: the poll is the truth, a notification only shortens the wait. The heartbeat thread has a
connection of its own; it renews all leases of the process in one statement, starts before the
first claim and ends after the last write.

SIGTERM or SIGINT: stop claiming, let running tasks end for `worker.grace_seconds`, hand the rest
back, exit 0. A second one hands them back at once.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until main() listens, Ctrl-C simply ends the process. As a KeyboardInterrupt in the middle
    # of an import it can be swallowed there (seen: 7 of 120), and the worker would start.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import logging
import os
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import psycopg2

import db
from config import ConfigError, Routing, Settings, current_config, load_config
from errors import DatabaseUnavailable, SchemaOutdated
from execution.runner import Finished, Runner
from logs import say, set_up_logs
from queries import leases
from queries.leases import ClaimedTask, Lease, Outcome, Settled
from queries.schema import ensure_audit_partitions, ensure_schema

logger = logging.getLogger("scheduler")

# Reaped tasks come back spread over so many seconds, so that tasks which went down with one
# process do not all meet again in the next.
REAPED_SPREAD_SECONDS = 3.0
SETTLE_BATCH = 100
LONGEST_RECONNECT_PAUSE_SECONDS = 5.0
PARTITIONS_EVERY_SECONDS = 3600.0
# After the grace period, so long the worker tries to write that it hands its tasks back.
HAND_BACK_SECONDS = 5.0


def decide_route(
    payload: Mapping[str, Any], metrics: Mapping[str, Any], routing: Routing | None = None
) -> str:
    """ "cloud" for a long prompt or a deep queue, else "local"; what is missing counts as small.

    payload["prompt"] is the text, metrics["by_status"]["PENDING"] the number of due tasks that
    wait. `routing` defaults to this process's settings.
    """
    limits = routing or current_config().routing
    prompt = payload.get("prompt")
    length = len(prompt) if isinstance(prompt, str) else 0
    depth = (metrics.get("by_status") or {}).get("PENDING") or 0
    if length > limits.prompt_threshold or depth > limits.pending_threshold:
        return "cloud"
    return "local"


class Held:
    """The leases this process holds, shared by the main thread and the heartbeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[Lease, ClaimedTask] = {}
        self._being_settled: set[Lease] = set()

    def add(self, tasks: Iterable[ClaimedTask]) -> None:
        with self._lock:
            self._tasks.update((task.lease, task) for task in tasks)

    def begin_settling(self, held: Iterable[Lease]) -> None:
        """From here on the settle statement tells whether a lease is ours, not the heartbeat."""
        with self._lock:
            self._being_settled.update(held)

    def drop_settled(self, lease: Lease) -> bool:
        """Forget a lease whose outcome was written or refused; False if it was lost before."""
        with self._lock:
            self._being_settled.discard(lease)
            return self._tasks.pop(lease, None) is not None

    def drop_lost(self, lease: Lease) -> bool:
        """Forget a lease that the heartbeat found gone; False if it is being settled."""
        with self._lock:
            if lease in self._being_settled:
                return False
            return self._tasks.pop(lease, None) is not None

    def leases(self) -> list[Lease]:
        with self._lock:
            return list(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


class Heartbeat(threading.Thread):
    """Renews all leases of the process, every `heartbeat_seconds`, on its own connection.

    1. takes the leases held now,
    2. renews them in one statement,
    3. stops the work of those that are lost or asked to be cancelled.

    When Postgres is away it tries again each second: a lease may still be ours.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._worker = worker
        self._ended = threading.Event()
        self._conn: db.Connection | None = None

    def run(self) -> None:
        pause = self._worker.settings.worker.heartbeat_seconds
        while not self._ended.wait(pause):
            try:
                self.beat_once()
                pause = self._worker.settings.worker.heartbeat_seconds
            except Exception as failed:  # a heartbeat that dies costs every lease
                say(logger, logging.WARNING, f"The heartbeat failed: {failed}.", "database_away")
                self._disconnect()
                pause = 1.0
        self._disconnect()

    def beat_once(self) -> None:
        held = self._worker.held.leases()
        if not held:
            return
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
        beat = leases.renew_leases(self._conn, held, self._worker.settings.worker.lease_seconds)
        for lease in held:
            if lease.task_id in beat.lost:
                self._worker.lose(lease)
            elif lease.task_id in beat.cancelled:
                self._worker.runner.stop(lease)

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _connect(self) -> db.Connection:
        settings = self._worker.settings
        # A beat that waits longer than this would come too late for the lease.
        limit = settings.worker.lease_seconds / 4
        conn = db.connect(settings.database_url, settings.database, f"{self._worker.name} beat")
        conn.reply_timeout_seconds = min(limit, settings.database.reply_timeout_seconds)
        conn.lock_timeout_seconds = min(limit, settings.database.lock_timeout_seconds)
        return conn

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None


class Worker:
    """One worker process's state. `run` goes round until it is stopped; see the module's text."""

    def __init__(self, settings: Settings, name: str, concurrency: int) -> None:
        self.settings = settings
        self.name = name
        self.concurrency = concurrency
        self.held = Held()
        self.runner = Runner(settings, self.wake)
        self.stop_signals = 0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._conn: db.Connection | None = None
        self._listener: db.Connection | None = None
        self._unsettled: list[Finished] = []
        self._last_tenant = ""
        self._next_reap = 0.0
        self._next_partitions = 0.0
        self._sleep_seconds = 0.0

    # --- going round -------------------------------------------------------------------------

    def run(self, drain: bool = False) -> None:
        """Go round until a stop signal comes or, with `drain`, until no work is left anywhere."""
        heartbeat = Heartbeat(self)
        heartbeat.start()
        self.runner.open()
        try:
            while not self.stop_signals and not (drain and self._is_drained()):
                self.run_once()
                self._sleep()
            self._finish()
        finally:
            # First the runner, then the heartbeat: a lease is renewed until its last write.
            self.runner.close()
            heartbeat.end()
            self._disconnect()

    def run_once(self) -> None:
        """Settle, reap, claim, route, start; when Postgres is away, keep all and come back."""
        self._sleep_seconds = self._jittered(self.settings.worker.poll_seconds)
        try:
            conn = self._connection()
            self.settle(conn)
            self.reap(conn)
            self.claim_and_start(conn)
            until_reap = max(self._next_reap - time.monotonic(), 0)
            self._sleep_seconds = min(self._sleep_seconds, until_reap)
        except DatabaseUnavailable as away:
            say(logger, logging.WARNING, f"No work for now: {away}.", "database_away")
            self._disconnect()
            self._sleep_seconds = random.uniform(0.2, 1.0)
        except psycopg2.Error:  # a fault of ours must not end the worker: others need its slots
            logger.exception("A statement was refused")
            self._sleep_seconds = 1.0

    def settle(self, conn: db.Connection) -> None:
        """Write every outcome there is; what cannot be written now is kept for the next round."""
        self._unsettled += self.runner.take_finished()
        while self._unsettled:
            batch = self._unsettled[:SETTLE_BATCH]
            self.held.begin_settling(lease for lease, _ in batch)
            settled = self._settle_batch(conn, batch)
            del self._unsettled[: len(batch)]
            written = {one.task_id: one for one in settled}
            for lease, _ in batch:
                if lease.task_id in written:
                    log_settled(written[lease.task_id], self.name)
                if self.held.drop_settled(lease) and lease.task_id not in written:
                    log_lost(lease, self.name)

    def reap(self, conn: db.Connection) -> None:
        """Take back expired leases, page by page, when it is time for that."""
        if time.monotonic() < self._next_reap:
            return
        self._next_reap = time.monotonic() + self._jittered(self.settings.worker.reap_seconds)
        after = 0
        while page := leases.reap_tasks(conn, self.settings.retry, REAPED_SPREAD_SECONDS, after):
            after = max(reaped.task_id for reaped in page)
            for reaped in page:
                log_settled(reaped, self.name)
        if time.monotonic() >= self._next_partitions:
            ensure_audit_partitions(conn)
            self._next_partitions = time.monotonic() + PARTITIONS_EVERY_SECONDS

    def claim_and_start(self, conn: db.Connection) -> None:
        """Lease as many tasks as slots are free, decide the route of each, and start them."""
        free = self.concurrency - len(self.held)
        if free <= 0 or self.stop_signals:
            return
        claim = leases.claim_tasks(
            conn,
            self.name,
            free,
            self.settings.worker.lease_seconds,
            self.settings.routing.pending_threshold,
            self._last_tenant,
        )
        claimed = {task.task_id for task in claim.tasks}
        for lease in self.held.leases():
            if lease.task_id in claimed:  # it was taken back, and is now ours by another token
                self.lose(lease)
        self.held.add(claim.tasks)
        self._last_tenant = claim.last_tenant or ""
        metrics = {"by_status": {"PENDING": claim.depth}}
        for task in claim.tasks:
            route = task.requested_route
            if route == "auto":
                route = decide_route(task.payload, metrics, self.settings.routing)
            log_claimed(task, route, self.name)
            self.runner.start(task, route)
        if claim.next_due_seconds is not None:
            self._sleep_seconds = min(self._sleep_seconds, max(claim.next_due_seconds, 0))

    def lose(self, lease: Lease) -> None:
        """Stop the work of a lease that another worker may hold by now."""
        if self.held.drop_lost(lease):
            log_lost(lease, self.name)
            self.runner.stop(lease)

    # --- sleeping and waking -----------------------------------------------------------------

    def wake(self) -> None:
        """End the main thread's sleep; callable from any thread and from a signal handler."""
        with contextlib.suppress(BlockingIOError):  # it is full of wake-ups already
            self._wake_in.send(b"w")

    def _sleep(self) -> None:
        """Until a wake-up, a notification, or the end of the time that run_once allowed."""
        listener = self._listener
        poller = select.poll()
        poller.register(self._wake_out.fileno(), select.POLLIN)
        if listener is not None:
            poller.register(listener.fileno(), select.POLLIN)
        poller.poll(self._sleep_seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass
        try:
            if listener is not None:
                db.heard(listener)
        except DatabaseUnavailable:
            self._disconnect()

    def _jittered(self, seconds: float) -> float:
        return seconds * random.uniform(0.75, 1.0)

    # --- ending ------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Let what runs end for the grace period, hand back the rest, write all of it."""
        say(logger, logging.INFO, "Stopping.", "stopping", worker=self.name, running=len(self.held))
        deadline = time.monotonic() + self.settings.worker.grace_seconds
        handed_back = False
        while len(self.held):
            overdue = self.stop_signals > 1 or time.monotonic() >= deadline
            if overdue and not handed_back:
                handed_back = True
                deadline = time.monotonic() + HAND_BACK_SECONDS
                for lease in self.held.leases():
                    self.runner.stop(lease)
            elif overdue and time.monotonic() >= deadline:
                return  # nobody to write to: the leases run out and another worker takes over
            self._settle_or_wait()

    def _settle_or_wait(self) -> None:
        try:
            self.settle(self._connection())
            self._sleep_seconds = 0.5
        except DatabaseUnavailable as away:
            say(logger, logging.WARNING, f"Cannot settle now: {away}.", "database_away")
            self._disconnect()
            self._sleep_seconds = 0.2
        if len(self.held):
            self._sleep()

    def _is_drained(self) -> bool:
        try:
            return not len(self.held) and not leases.has_work(self._connection())
        except DatabaseUnavailable:
            return False

    # --- the database ------------------------------------------------------------------------

    def _connection(self) -> db.Connection:
        """The main thread's connection, with a listener beside it; new ones after a failure."""
        if self._conn is None or self._conn.closed:
            settings = self.settings
            self._conn = db.connect(settings.database_url, settings.database, self.name)
            ensure_schema(self._conn)
            self._listener = db.listen(
                settings.database_listen_url,
                settings.database,
                f"{self.name} listen",
                "tasks_claimable",
            )
        return self._conn

    def _disconnect(self) -> None:
        for conn in (self._conn, self._listener):
            if conn is not None:
                conn.close()
        self._conn = self._listener = None

    def _settle_batch(self, conn: db.Connection, batch: list[Finished]) -> list[Settled]:
        """Write a batch; an outcome that Postgres refuses is replaced by that failure, alone."""
        try:
            return leases.settle_tasks(conn, batch, self.settings.retry)
        except psycopg2.Error as refused:
            if len(batch) > 1:
                return [one for pair in batch for one in self._settle_batch(conn, [pair])]
            lease, _ = batch[0]
            logger.error("The outcome of task %s cannot be stored: %s", lease.task_id, refused)
            reason = f"its outcome could not be stored: {type(refused).__name__}"
            failure = Outcome("failure", error=reason)
            return leases.settle_tasks(conn, [(lease, failure)], self.settings.retry)


# --- logs: one sentence per transition -------------------------------------------------------

SENTENCES = {
    "succeeded": "Task {0} succeeded.",
    "retry": "Task {0} failed and will be tried again.",
    "released": "Task {0} was handed back.",
    "outage": "Task {0} was handed back: the model server is away.",
    "reaped": "Task {0} was taken back: its lease ran out.",
    "cancelled": "Task {0} was cancelled.",
    "max_retry": "Task {0} failed for the last time and is a dead letter.",
    "max_delivery": "Task {0} was lost with its worker too often and is a dead letter.",
    "permanent": "Task {0} cannot succeed and is a dead letter.",
    "deadline": "Task {0} ran out of time and is a dead letter.",
}


def log_claimed(task: ClaimedTask, route: str, worker: str) -> None:
    say(
        logger,
        logging.INFO,
        f"Claimed task {task.task_id}.",
        "claimed",
        task_id=task.task_id,
        worker=worker,
        attempt=task.attempt,
        delivery_count=task.delivery_count,
        route=route,
    )


def log_settled(settled: Settled, worker: str) -> None:
    say(
        logger,
        logging.ERROR if settled.status == "FAILED" else logging.INFO,
        SENTENCES[settled.reason].format(settled.task_id),
        settled.reason,
        task_id=settled.task_id,
        worker=worker,
        attempt=settled.attempt,
        retry_count=settled.retry_count,
        delivery_count=settled.delivery_count,
        delay_seconds=settled.delay_seconds if settled.status == "PENDING" else None,
        error=settled.error,
    )


def log_lost(lease: Lease, worker: str) -> None:
    say(
        logger,
        logging.WARNING,
        f"The lease of task {lease.task_id} is lost; whatever came of it is void.",
        "lease_lost",
        task_id=lease.task_id,
        worker=worker,
    )


# --- the process -----------------------------------------------------------------------------


def main() -> int:
    """Run one worker; 0 after a clean stop, 1 when it cannot start."""
    stopper = Stopper()  # before anything slow, so that an early SIGTERM is not lost
    args = parse_arguments()
    set_up_logs()
    try:
        settings = load_config()
        worker = Worker(
            settings, args.name or default_name(), args.concurrency or settings.worker.concurrency
        )
        stopper.stops(worker)
        say(
            logger, logging.INFO, "Worker started.", "started",
            worker=worker.name, concurrency=worker.concurrency,
        )  # fmt: skip
        worker.run(drain=args.drain)
    except (ConfigError, SchemaOutdated) as refused:
        logger.error("%s", refused)
        return 1
    say(logger, logging.INFO, "Worker stopped.", "stopped", worker=worker.name)
    return 0


class Stopper:
    """Counts stop signals for the worker, also those that come before there is one."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._signals = 0
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def stops(self, worker: Worker) -> None:
        self._worker = worker
        worker.stop_signals = self._signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._worker is not None:
            self._worker.stop_signals = self._signals
            self._worker.wake()


def default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One worker of Agent Orchestrator.")
    parser.add_argument("--concurrency", type=_at_least_one, help="tasks it runs at a time")
    parser.add_argument("--drain", action="store_true", help="exit when no work is left")
    parser.add_argument("--name", help="how it appears in logs and in a task's `worker`")
    return parser.parse_args()


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("this is to be a whole number, 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())

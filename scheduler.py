"""One worker process: python scheduler.py [--concurrency N] [--drain] [--name NAME]

The main thread goes round:

    reap     every few seconds, take back tasks whose lease ran out, of any worker
    claim    lease as many due tasks as slots are free
    route    decide for each: local or cloud
    execute  hand it to the runner, which streams from the model on a thread of its own, and runs
             each agent job in another

and then sleeps until a slot is free, a notification comes, something becomes due, or the poll is
due: the poll is the truth, a notification only shortens the wait. Two threads stand beside it, each
with a connection of its own. The settler writes what has come of the tasks that ended, fenced by
their lease tokens, and where a step has ended claims a task in its place. The heartbeat renews all
leases of the process in one statement; it begins before the first claim and ends after the last
write.

SIGTERM or SIGINT: stop claiming, let running tasks end for `worker.grace_seconds` (an agent job
ends at its next node boundary, for another worker to go on with), hand the rest back, exit 0. A
second one hands them back at once.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until main() listens, Ctrl-C simply ends the process. As a KeyboardInterrupt in the middle
    # of an import it can be swallowed there (seen: 7 of 120), and the worker would start.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import gc
import logging
import random
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg2

import db
from config import ConfigError, Routing, Settings, current_config, load_config
from errors import DatabaseUnavailable, SchemaOutdated, words_of
from execution.routes import Routes
from execution.runner import Runner
from logs import say, set_up_logs
from queries import leases
from queries.leases import ClaimedTask, Settled
from queries.schema import ensure_audit_partitions
from queries.workers import forget_worker, report_worker
from worker.arguments import default_name, parse_arguments
from worker.claiming import Claimer
from worker.doorbell import Doorbell
from worker.ending import Stopper, end_now
from worker.folding import Folding
from worker.heartbeat import Heartbeat
from worker.held import Held
from worker.link import Link
from worker.sentences import log_settled
from worker.settler import Settler
from worker.suspects import SuspectProcess
from worker.tokens import Source, TokenSender, Unsent

logger = logging.getLogger("scheduler")

# Reaped tasks come back spread over this share of a lease, so that tasks which went down with one
# process do not all meet again in the next.
REAPED_SPREAD = 0.1
SUSPECT_IDLE_SECONDS = 3.0
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


class Worker:
    """One worker process's state. `run` goes round until it is stopped; see the module's text."""

    def __init__(
        self, settings: Settings, name: str, concurrency: int, alone: bool = False
    ) -> None:
        self.settings = settings
        self.name = name
        self.worker_id = uuid.uuid4()
        self.concurrency = concurrency
        self.alone = alone
        self.held = Held()
        self.routes = Routes(settings.routing, decide_route)
        self._tokens = TokenSender(settings, name)
        self._doorbell = Doorbell()
        self.runner = Runner(
            settings,
            self.routes,
            lambda: self._settler.ring(),
            self._pass_on,
            self._report_soon,
            self._tell_of_node,
        )
        self._suspects = SuspectProcess(name, settings.worker)
        self.claimer = Claimer(
            settings,
            name,
            concurrency,
            self.held,
            self.routes,
            self.runner,
            self._doorbell.ring,
            self._suspects.start,
            alone,
        )
        self._settler = Settler(
            settings,
            name,
            self.held,
            self.runner.take_finished,
            self._tokens.flush,  # what a task has said is heard before its end
            self.claimer.settle_and_claim,
            self.claimer.note_free_slots,
        )
        self._heartbeat = Heartbeat(settings, name, self.held, self.runner.stop, self._report)
        self._link = Link(settings, name, on_first_open=self._begin_to_hold)
        self.stop_signals = 0
        self._next_reap = 0.0
        self._next_partitions = 0.0
        self._folding = Folding()
        self._sleep_seconds = 0.0

    # --- going round -------------------------------------------------------------------------

    def run(self, drain: bool = False) -> None:
        """Go round until a stop signal comes or, with `drain`, until no work is left anywhere."""
        self.runner.open()
        self.claimer.is_draining = drain
        try:
            while not self.stop_signals and not (drain and self._is_drained()):
                self.run_once()
                self._sleep()
            self._finish()
        finally:
            # First the work, then the heartbeat: a lease is renewed until its last write.
            self._suspects.end(lambda: self.stop_signals)
            self.runner.close()
            self._settler.end()
            self._heartbeat.end()
            self._say_goodbye()
            self._link.close()

    def run_once(self) -> None:
        """Reap, claim, route, start; when Postgres is away, come back."""
        self._sleep_seconds = self._jittered(self.settings.worker.poll_seconds)
        try:
            conn = self._link.open()
            self.reap(conn)
            pause_seconds = self.claimer.claim_and_start(conn, until=self._next_reap)
            self._sleep_seconds = min(self._sleep_seconds, pause_seconds)
            self._make_partitions(conn)
            self._folding.fold(conn)
            self._link.ping_listener()
            until_reap = max(self._next_reap - time.monotonic(), 0)
            self._sleep_seconds = min(self._sleep_seconds, until_reap)
        except DatabaseUnavailable as away:
            say(logger, logging.WARNING, f"No work for now: {away}.", "database_away")
            self._link.close()
            self._sleep_seconds = random.uniform(0.2, 1.0)
        except (ConfigError, SchemaOutdated):
            raise
        except Exception:  # a fault of ours must not end the worker, and its tasks with it
            logger.exception("This round failed")
            self._link.close()
            self._sleep_seconds = 1.0

    def reap(self, conn: db.Connection) -> None:
        """Take back expired leases, page by page, when it is time for that."""
        if time.monotonic() < self._next_reap:
            return
        self._next_reap = time.monotonic() + self._jittered(self.settings.worker.reap_seconds)
        for page in self._reap_all(conn):
            log_settled(page, self.name)

    def _make_partitions(self, conn: db.Connection) -> None:
        """Now and then; if somebody holds the audit log, the next time will do."""
        if time.monotonic() < self._next_partitions:
            return
        self._next_partitions = time.monotonic() + self._jittered(PARTITIONS_EVERY_SECONDS)
        try:
            ensure_audit_partitions(conn)
        except (DatabaseUnavailable, psycopg2.Error) as failed:
            logger.warning("The audit log's next partitions are not made yet: %s", words_of(failed))

    def _reap_all(self, conn: db.Connection) -> Iterator[list[Settled]]:
        """Page by page; a row that Postgres refuses to change is left out, and said loudly."""
        spread, after = REAPED_SPREAD * self.settings.worker.lease_seconds, 0
        try:
            while page := leases.reap_tasks(conn, self.settings.retry, spread, after):
                after = max(reaped.task_id for reaped in page)
                yield page
        except psycopg2.Error:
            logger.exception("Expired leases cannot be taken back together; trying one by one")
            for task_id in leases.expired_tasks(conn, after):
                try:
                    yield leases.reap_tasks(conn, self.settings.retry, spread, only=task_id)
                except psycopg2.Error:
                    logger.exception("The lease of task %s cannot be taken back", task_id)

    def _begin_to_hold(self) -> None:
        """Before the first claim: what keeps leases alive and writes what comes of them."""
        self._settler.begin()
        self._heartbeat.begin()

    # --- sleeping and waking -----------------------------------------------------------------

    def stop(self, signals: int) -> None:
        """Told to stop, for the so-manieth time; called from a signal handler."""
        self.stop_signals = signals
        self.claimer.stop()
        self._link.hurry()
        self._settler.hurry()
        self._doorbell.ring()

    def _sleep(self) -> None:
        """Until a ring, a notification that is news, or the end of what run_once allowed."""
        until = time.monotonic() + self._sleep_seconds
        while True:
            seconds = 0.0 if self._link.has_heard() else max(until - time.monotonic(), 0.0)
            is_rung = self._doorbell.wait(seconds, self._link.ear())
            if self._hears_news() or is_rung or time.monotonic() >= until:
                return

    def _hears_news(self) -> bool:
        """Whether something may have become claimable that the settler has not claimed itself."""
        try:
            senders, watched = self._link.hear()
            self._tokens.watch(watched)
            return self.claimer.is_left(senders)
        except DatabaseUnavailable:
            self._link.close()
        except Exception:
            logger.exception("What was heard makes no sense")
            self._link.close()
        return True

    def _pass_on(self, task: ClaimedTask, node: str | None, piece: str) -> None:
        """A piece of an answer came, on the runner's thread."""
        source = Source(task.root_id, task.task_id, task.attempt, node)
        self._tokens.put(Unsent(source, text=piece))

    def _tell_of_node(self, task: ClaimedTask, node: str, phase: str) -> None:
        """A node of a job has started or finished, in the job's thread."""
        source = Source(task.root_id, task.task_id, task.attempt, node)
        self._tokens.put(Unsent(source, phase=phase))

    def _jittered(self, seconds: float) -> float:
        return seconds * random.uniform(0.75, 1.0)

    # --- ending ------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Let what runs end for the grace period, hand back the rest, write all of it."""
        say(logger, logging.INFO, "Stopping.", "stopping", worker=self.name, running=len(self.held))
        self._suspects.pass_on(self.stop_signals)
        self.runner.drain()
        deadline = time.monotonic() + self.settings.worker.grace_seconds
        handed_back = False
        while len(self.held):
            overdue = self.stop_signals > 1 or time.monotonic() >= deadline
            self._suspects.pass_on(self.stop_signals)
            if overdue and not handed_back:
                handed_back = True
                deadline = time.monotonic() + HAND_BACK_SECONDS
                self.runner.stop(self.held.leases())
            elif overdue and time.monotonic() >= deadline:
                return  # nobody to write to: the leases run out and another worker takes over
            self._sleep_seconds = 0.5
            self._sleep()

    def _is_drained(self) -> bool:
        """Whether nothing is left to do; for a suspect's process, nothing that it may do."""
        try:
            if self.alone:
                idle_seconds = time.monotonic() - self.claimer.last_start
                return not len(self.held) and idle_seconds > SUSPECT_IDLE_SECONDS
            return not len(self.held) and not leases.has_work(self._link.open())
        except (DatabaseUnavailable, psycopg2.Error):
            return False

    # --- the database ------------------------------------------------------------------------

    def _report_soon(self) -> None:
        """A route has opened or paused, on the runner's thread."""
        self._heartbeat.nudge()
        self._doorbell.ring()

    def _report(self, conn: db.Connection) -> None:
        """Say that this worker lives; called by the heartbeat, on its connection."""
        running, paused = len(self.held), self.routes.paused()
        report_worker(conn, self.worker_id, self.name, self.concurrency, running, paused)

    def _say_goodbye(self) -> None:
        """Leave the list of workers; if that cannot be, it is forgotten after a day."""
        with contextlib.suppress(DatabaseUnavailable):
            forget_worker(self._link.open(), self.worker_id)


# --- the process -----------------------------------------------------------------------------


def main() -> int:
    """Run one worker; 0 after a clean stop, 1 when it cannot start."""
    stopper = Stopper()  # before anything slow, so that an early SIGTERM is not lost
    args = parse_arguments()
    set_up_logs()
    try:
        settings = load_config()
        worker = Worker(
            settings,
            args.name or default_name(),
            args.concurrency or settings.worker.concurrency,
            args.alone,
        )
        stopper.stops(worker.stop)
        say(
            logger, logging.INFO, "Worker started.", "started",
            worker=worker.name, concurrency=worker.concurrency,
        )  # fmt: skip
        gc.freeze()  # what the process has by now stays: no collection need look at it again
        gc.set_threshold(10_000)  # a batch of tasks leaves thousands of objects, and no cycles
        worker.run(drain=args.drain or args.alone)
    except (ConfigError, SchemaOutdated) as refused:
        logger.error("%s", refused)
        return 1
    finally:
        stopper.end()
    say(logger, logging.INFO, "Worker stopped.", "stopped", worker=worker.name)
    if worker.runner.leaves_behind():
        end_now(0)  # a node that listens to nothing would keep the interpreter from ending
    return 0


if __name__ == "__main__":
    sys.exit(main())

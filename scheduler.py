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
their lease tokens. The heartbeat renews all leases of the process in one statement; it begins
before the first claim and ends after the last write.

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
from errors import DatabaseUnavailable, SchemaOutdated
from execution.routes import Routes
from execution.runner import Runner
from logs import say, set_up_logs
from queries import claims, leases
from queries.leases import ClaimedTask, Outcome, Settled
from queries.schema import ensure_audit_partitions
from queries.workers import forget_worker, report_worker
from worker.arguments import default_name, parse_arguments
from worker.doorbell import Doorbell
from worker.ending import Stopper, end_now
from worker.folding import Folding
from worker.heartbeat import Heartbeat
from worker.held import Held
from worker.link import Link
from worker.messages import with_message
from worker.outputs import GIVEN_BACK_SECONDS, with_outputs
from worker.place import Place
from worker.sentences import log_claimed, log_lost, log_settled
from worker.settler import Settler
from worker.suspects import SuspectProcess
from worker.tokens import Source, TokenSender, Unsent

logger = logging.getLogger("scheduler")

# Reaped tasks come back spread over this share of a lease, so that tasks which went down with one
# process do not all meet again in the next.
REAPED_SPREAD = 0.1
FULL_ROUTE_POLL_SECONDS = 0.5
LARGEST_CLAIM = 250  # more would keep the first of them waiting for the last
OVERDUE_SECONDS = 0.5
CONTENDED_SECONDS = 0.05  # the first pause after a claim that others were faster at
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
        self._settler = Settler(
            settings,
            name,
            self.held,
            self.runner.take_finished,
            self._tokens.flush,  # what a task has said is heard before its end
            self._note_free_slots,
        )
        self._heartbeat = Heartbeat(settings, name, self.held, self.runner.stop, self._report)
        self._link = Link(settings, name, on_first_open=self._begin_to_hold)
        self.stop_signals = 0
        self._suspects = SuspectProcess(name, settings.worker)
        self._place = Place()
        self._wants_slots = True  # or nothing is due that they could take
        self._is_draining = False
        self._contended = 0
        self._last_start = time.monotonic()
        self._next_reap = 0.0
        self._next_partitions = 0.0
        self._folding = Folding()
        self._sleep_seconds = 0.0

    # --- going round -------------------------------------------------------------------------

    def run(self, drain: bool = False) -> None:
        """Go round until a stop signal comes or, with `drain`, until no work is left anywhere."""
        self.runner.open()
        self._is_draining = drain
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
            self.claim_and_start(conn)
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
            logger.warning("The audit log's next partitions are not made yet: %s", failed)

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

    def claim_and_start(self, conn: db.Connection) -> None:
        """Lease as many tasks as slots are free, and start each on its route.

        A claim shares its slots between tenants; what one tenant leaves, the next claim fills.
        """
        # What ends while it claims frees a slot that the next look finds, if anything is left.
        self._wants_slots = self._is_draining or self.routes.has_limits
        while (free := self._free_slots()) > 0 and not self.stop_signals:
            claim = self._claim(conn, min(free, LARGEST_CLAIM))
            log_claimed(claim.tasks, self.name)  # first: it names a task that kills its process
            for task, route in claim.tasks:
                self._start(conn, task, route)
            claims.note_routes(conn, claim)
            if (next_due := claim.next_due_seconds) is not None:
                # What is overdue still is a row that somebody holds: no reason to hurry.
                pause = next_due if next_due > 0 else OVERDUE_SECONDS
                self._sleep_seconds = min(self._sleep_seconds, pause)
            if claim.has_suspect and not self.alone:
                self._suspects.start()
            self._note_contention(claim)
            # Of what others make due from now on, a notification tells; of a call's end, nobody.
            is_any_left = claim.is_any_left or (self.routes.has_limits and claim.depth > 0)
            self._wants_slots = self._is_draining or is_any_left
            if not claim.tasks or not is_any_left:
                return
            if time.monotonic() >= self._next_reap:  # the settler frees slots all the time
                self._sleep_seconds = 0.0
                return

    def _free_slots(self) -> int:
        """How many; where there is none, the settler tells of the next."""
        if len(self.held) >= self.concurrency:
            self._wants_slots = True  # first, and then a look at what came before that
        return self.concurrency - len(self.held)

    def _note_contention(self, claim: claims.Claim) -> None:
        """If nothing was to be had for others' locks or calls, look again soon."""
        if claim.tasks:
            self._contended = 0
        elif claim.depth and self.routes.has_limits:
            # Another worker's call has to end first, and nobody notifies of that.
            self._sleep_seconds = min(self._sleep_seconds, FULL_ROUTE_POLL_SECONDS)
        elif claim.last_tenant is not None:
            pause = self._jittered(CONTENDED_SECONDS * 2 ** min(self._contended, 10))
            self._sleep_seconds = min(self._sleep_seconds, pause)
            self._contended += 1

    def _begin_to_hold(self) -> None:
        """Before the first claim: what keeps leases alive and writes what comes of them."""
        self._settler.begin()
        self._heartbeat.begin()

    def _claim(self, conn: db.Connection, free: int) -> claims.Claim:
        lease_seconds = self.settings.worker.lease_seconds
        if self.alone:
            claim = claims.claim_alone(conn, self.name, lease_seconds, self.routes)
        else:
            place, began = self._place, time.monotonic()
            begins = (place.after_tenant, place.from_task())
            claim = claims.claim_tasks(conn, self.name, free, lease_seconds, self.routes, *begins)
            place.note(claim, time.monotonic() - began)
        if len(self.held):  # else none of them can be ours already
            self._drop_taken_back({task.task_id for task, _ in claim.tasks})
        self.held.add(task for task, _ in claim.tasks)
        return claim

    def _drop_taken_back(self, claimed: set[int]) -> None:
        """Some were taken back from us and are ours again by another token."""
        lost = self.held.drop_lost(one for one in self.held.leases() if one.task_id in claimed)
        self.runner.stop(lost)
        log_lost(lost, self.name)

    def _start(self, conn: db.Connection, task: ClaimedTask, route: str | None) -> None:
        self._last_start = time.monotonic()
        if route is None and task.requested_route != "none":
            # Its route closed, or filled up, between the look and the claim.
            ready: ClaimedTask | Outcome = Outcome("released", delay_seconds=GIVEN_BACK_SECONDS)
        elif task.kind == "callback":
            ready = with_message(conn, task, self.settings)
        else:
            ready = with_outputs(conn, task)
        if isinstance(ready, Outcome):
            self.runner.end(task.lease, ready)
        else:
            self.runner.start(ready, route)

    # --- sleeping and waking -----------------------------------------------------------------

    def stop(self, signals: int) -> None:
        """Told to stop, for the so-manieth time; called from a signal handler."""
        self.stop_signals = signals
        self._link.hurry()
        self._settler.hurry()
        self._doorbell.ring()

    def _note_free_slots(self, is_any_to_come_back: bool) -> None:
        """Outcomes were written. Of a task that comes back later no notification tells."""
        if is_any_to_come_back or self._wants_slots or self.stop_signals:
            self._doorbell.ring()

    def _sleep(self) -> None:
        """Until a ring, a notification, or the end of the time that run_once allowed."""
        seconds = 0.0 if self._link.has_heard() else self._sleep_seconds
        self._doorbell.wait(seconds, self._link.ear())
        try:
            self._tokens.watch(self._link.watched())
        except DatabaseUnavailable:
            self._link.close()
        except Exception:
            logger.exception("What was heard makes no sense")
            self._link.close()

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
                idle_seconds = time.monotonic() - self._last_start
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

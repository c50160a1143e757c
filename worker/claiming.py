"""Claims tasks for one worker and hands them to its runner.

Two threads do. The main one claims when slots are free and something may be due. The settler takes,
in the transaction that ends a step of a run, a task for its slot: so the next step of a chain costs
no commit and no notification of its own. They take turns: while the main thread claims, the settler
only settles, and while the settler claims, the main thread waits a moment. Longer it need not wait:
what they share is safe with both, and the settler fills no slot but that of the step it ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psycopg2

import db
from config import Settings
from connection import impatient
from errors import DatabaseUnavailable, words_of
from queries import claims
from queries.claims import Claim, ClaimPolicy
from queries.leases import ClaimedTask, Lease, Outcome, Settled
from worker.held import Held
from worker.messages import with_message
from worker.outputs import GIVEN_BACK_SECONDS, with_outputs
from worker.place import Place
from worker.sentences import log_claimed, log_lost
from worker.settling import IMPATIENT_PART_SECONDS, Finished

logger = logging.getLogger("scheduler")

FULL_ROUTE_POLL_SECONDS = 0.5
LARGEST_CLAIM = 250  # more would keep the first of them waiting for the last
OVERDUE_SECONDS = 0.5
TURN_SECONDS = 0.1  # that the main thread waits for the settler, whose connection may be silent
SHORT_TURN_SECONDS = 0.001  # that the settler waits for the main thread, which may just be done
SOON_SECONDS = 0.05  # so much sooner than it knows, something due is news to the main thread
CONTENDED_SECONDS = 0.05  # the first pause after a claim that others were faster at


class Runner(Protocol):
    """What carries tasks out: execution/runner.py."""

    def start(self, task: ClaimedTask, route: str | None) -> None: ...

    def end(self, lease: Lease, outcome: Outcome) -> None: ...

    def stop(self, leases: Sequence[Lease]) -> None: ...


class Claimer:
    """Fills the slots of one worker.

    `on_left` is called, on any thread, when there is something that the main thread is to claim,
    `on_suspect` when a task can have its last try now, in a process of its own.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        concurrency: int,
        held: Held,
        policy: ClaimPolicy,
        runner: Runner,
        on_left: Callable[[], None],
        on_suspect: Callable[[], None],
        alone: bool = False,
    ) -> None:
        self._settings = settings
        self._name = name
        self._concurrency = concurrency
        self._held = held
        self._policy = policy
        self._runner = runner
        self._on_left = on_left
        self._on_suspect = on_suspect
        self._alone = alone
        self.is_draining = False
        self.last_start = time.monotonic()
        self._is_stopped = False
        self._place = Place()
        self._contended = 0
        self._wants_slots = True  # or nothing is due that they could take
        self._turn = threading.Lock()
        # The settler's backend, if its last claim has left nothing of what it had made due.
        self._all_taken_by: int | None = None
        # What the last claim has seen, of either thread, and the main thread acts on.
        self._has_suspect = False
        self._due_at = math.inf  # when the next delayed task is due, by the monotonic clock
        self._awaited = math.inf  # what of that the main thread knows

    def stop(self) -> None:
        """Claim nothing from now on; may be called from a signal handler."""
        self._is_stopped = True

    # --- the main thread ---------------------------------------------------------------------

    def claim_and_start(self, conn: db.Connection, until: float) -> float:
        """Lease as many tasks as slots are free, and start each on its route.

        The seconds after which there may be more; inf: somebody tells of it. It begins no other
        claim after `until`, by the monotonic clock: the worker has other duties.

        A claim shares its slots between tenants; what one tenant leaves, the next claim fills.
        """
        has_turn = self._turn.acquire(timeout=TURN_SECONDS)
        try:
            return self._claim_and_start(conn, until)
        finally:
            if has_turn:
                self._turn.release()

    def _claim_and_start(self, conn: db.Connection, until: float) -> float:
        pause_seconds = math.inf
        self._all_taken_by = None  # a backend to come could have its number
        # What ends while it claims frees a slot that the next look finds, if anything is left.
        self._wants_slots = self.is_draining or self._policy.has_limits
        while (free := self._free_slots()) > 0 and not self._is_stopped:
            claim = self._claim(conn, min(free, LARGEST_CLAIM))
            self._begin(conn, claim)
            self._note_routes(conn, claim)
            pause_seconds = self._contention_pause(claim)
            # Of what others make due from now on, a notification tells; of a call's end, nobody.
            is_any_left = claim.is_any_left or (self._policy.has_limits and claim.depth > 0)
            self._wants_slots = self.is_draining or is_any_left
            if not claim.tasks or not is_any_left:
                break
            if time.monotonic() >= until:  # the settler frees slots all the time
                pause_seconds = 0.0
                break
        if self._has_suspect:
            self._has_suspect = False
            self._on_suspect()
        return min(pause_seconds, self._await_due())

    def _await_due(self) -> float:
        """The seconds until the next delayed task is due; what is due, any claim will see."""
        self._awaited = self._due_at
        seconds = self._due_at - time.monotonic()
        return seconds if seconds > 0 else math.inf

    def _free_slots(self) -> int:
        """How many; where there is none, the settler tells of the next."""
        if len(self._held) >= self._concurrency:
            self._wants_slots = True  # first, and then a look at what came before that
        return self._concurrency - len(self._held)

    def _claim(self, conn: db.Connection, slots: int) -> Claim:
        lease_seconds = self._settings.worker.lease_seconds
        if self._alone:
            return claims.claim_alone(conn, self._name, lease_seconds, self._policy)
        begins, began = self._place.begins(), time.monotonic()
        claim = claims.claim_tasks(conn, self._name, slots, lease_seconds, self._policy, *begins)
        self._place.note(claim, time.monotonic() - began)
        return claim

    def _contention_pause(self, claim: Claim) -> float:
        """The seconds until something may be had that was not for others' locks or calls."""
        if claim.tasks:
            self._contended = 0
        elif claim.depth and self._policy.has_limits:
            return FULL_ROUTE_POLL_SECONDS  # another worker's call has to end, and nobody tells
        elif claim.last_tenant is not None:
            longest: float = CONTENDED_SECONDS * 2 ** min(self._contended, 10)
            self._contended += 1
            return longest * random.uniform(0.75, 1.0)
        return math.inf

    # --- the settler -------------------------------------------------------------------------

    def settle_and_claim(
        self, conn: db.Connection, batch: Sequence[Finished]
    ) -> list[Settled] | None:
        """Write what came of a step of a run, which may make others due, and lease a task for its
        slot, in one transaction.

        None: nothing is written, and nothing claimed. It is not worth it, or not this thread's
        turn, or it cannot be done so; to settle without a claim may be possible.
        """
        settled = None
        if self._is_worth_a_claim(batch) and self._turn.acquire(timeout=SHORT_TURN_SECONDS):
            try:
                settled = self._settle_and_claim(conn, batch)
            finally:
                self._turn.release()
        if settled is None:
            self._all_taken_by = None  # of what is settled alone, a notification is to tell
        return settled

    def _is_worth_a_claim(self, batch: Sequence[Finished]) -> bool:
        if len(batch) > 1:  # two threads do that sooner, each over its connection
            return False
        (lease, _) = batch[0]
        return lease.run_id is not None and not (self._alone or self._is_stopped)

    def _has_slot_of(self, lease: Lease) -> bool:
        """Whether it still takes up a slot: of one that was found lost, the slot is another's."""
        return lease in self._held and len(self._held) <= self._concurrency

    def _settle_and_claim(
        self, conn: db.Connection, batch: Sequence[Finished]
    ) -> list[Settled] | None:
        if not self._has_slot_of(batch[0][0]):
            return None
        begins, began = self._place.begins(), time.monotonic()
        lease_seconds, retry = self._settings.worker.lease_seconds, self._settings.retry
        try:
            with impatient(conn, IMPATIENT_PART_SECONDS):
                done = claims.settle_and_claim(
                    conn, batch, retry, self._name, lease_seconds, self._policy, *begins
                )
        except Exception:  # whichever half it is about, that will tell when it is done alone
            self._all_taken_by = None
            self._on_left()
            if conn.closed:
                raise
            return None
        if done is None:
            return None
        settled, claim = done
        self._place.note(claim, time.monotonic() - began)
        self._begin(conn, claim)
        with contextlib.suppress(DatabaseUnavailable):  # what is settled has to be told
            self._note_routes(conn, claim)
        self._all_taken_by = None if claim.is_any_left else conn.info.backend_pid
        if claim.is_any_left:
            self._wants_slots = True  # never False here: the main thread may have left something
        if self._has_suspect or self._due_at < self._awaited - SOON_SECONDS:
            self._on_left()
        return settled

    def is_left(self, senders: set[int]) -> bool:
        """Whether something may be left of what these backends say has become claimable."""
        if not senders:
            return False
        if not self._turn.acquire(timeout=TURN_SECONDS):  # the settler knows it by its answer
            return True
        self._turn.release()
        return senders != {self._all_taken_by}

    def note_free_slots(self, is_any_to_come_back: bool) -> None:
        """Outcomes were written. Of a task that comes back later no notification tells."""
        is_wanted = self._wants_slots and len(self._held) < self._concurrency
        if is_any_to_come_back or is_wanted or self._is_stopped:
            self._on_left()

    # --- both --------------------------------------------------------------------------------

    def _begin(self, conn: db.Connection, claim: Claim) -> None:
        """Hold what was claimed, and start each task on its route; see what else is coming."""
        if len(self._held):  # else none of them can be ours already
            self._drop_taken_back({task.task_id for task, _ in claim.tasks})
        self._held.add(task for task, _ in claim.tasks)
        log_claimed(claim.tasks, self._name)  # first: it names a task that kills its process
        for task, route in claim.tasks:
            self._start(conn, task, route)
        self._has_suspect = claim.has_suspect and not self._alone
        self._due_at = math.inf
        if (next_due := claim.next_due_seconds) is not None:
            # What is overdue still is a row that somebody holds: no reason to hurry.
            self._due_at = time.monotonic() + (next_due if next_due > 0 else OVERDUE_SECONDS)

    def _note_routes(self, conn: db.Connection, claim: Claim) -> None:
        """Say where they went. It is no fault of theirs, nor of the round's, if a row refuses that:
        all have begun, nobody decides by it, and most settles say it again."""
        try:
            claims.note_routes(conn, claim)
        except psycopg2.Error as refused:
            routed = sum(route is not None for _, route in claim.tasks)
            logger.warning("The routes of %s tasks are not noted: %s", routed, words_of(refused))

    def _drop_taken_back(self, claimed: set[int]) -> None:
        """Some were taken back from us and are ours again by another token."""
        lost = self._held.drop_lost(one for one in self._held.leases() if one.task_id in claimed)
        self._runner.stop(lost)
        log_lost(lost, self._name)

    def _start(self, conn: db.Connection, task: ClaimedTask, route: str | None) -> None:
        self.last_start = time.monotonic()
        if self._is_stopped:  # while it was claimed
            ready: ClaimedTask | Outcome = Outcome("released")
        elif route is None and task.requested_route != "none":
            # Its route closed, or filled up, between the look and the claim.
            ready = Outcome("released", delay_seconds=GIVEN_BACK_SECONDS)
        elif task.kind == "callback":
            ready = with_message(conn, task, self._settings)
        else:
            ready = with_outputs(conn, task)
        if isinstance(ready, Outcome):
            self._runner.end(task.lease, ready)
        else:
            self._runner.start(ready, route)

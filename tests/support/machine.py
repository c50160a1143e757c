"""The queue as a Hypothesis state machine: its rules are what users, workers and time do.

Three workers, each with its own connection and its own idea of what it holds, share a queue and a
clock that stands until a rule advances it. Each rule checks the whole table: a row that it was
not allowed to touch has not changed, the others as tests/support/model.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import db
from db import Connection, NewTask, Row
from errors import KeyReused, StateConflict
from queries import claims, leases, operations
from queries.figures import fold_figures
from queries.leases import ClaimedTask, Lease, Outcome
from tests.support import counted, model, rows
from tests.support.rows import LEASE_SECONDS, RETRY

BASE = datetime(2026, 1, 1, tzinfo=UTC)
VERDICTS = ("succeeded", "failure", "permanent", "deadline", "released", "outage")

new_tasks = st.builds(
    rows.new_task,
    tenant=st.sampled_from(["amber", "beryl", "coral"]),
    priority=st.sampled_from([0, 0, 5, 9]),
    delay_seconds=st.sampled_from([0, 0, 0, 5, 60]),
    max_retry=st.sampled_from([None, None, 1, 2]),
)
outcomes = st.builds(
    Outcome,
    verdict=st.sampled_from(VERDICTS),
    result=st.just({"text": "done"}),
    error=st.just("it went wrong"),
    cost=st.none() | st.decimals(0, 100, places=8),
    prompt_tokens=st.integers(0, 10**12),
    completion_tokens=st.integers(0, 10**12),
    delay_seconds=st.sampled_from([0, 5]),
)
keys = st.sampled_from([None, None, "k1", "k2"])
bodies = st.sampled_from([b"one", b"one", b"other"])
workers = st.integers(0, 2)
indexes = st.integers(0, 50)


def order_of_claims(row: Row) -> tuple[int, int]:
    return -row["priority"], row["task_id"]


class QueueMachine(RuleBasedStateMachine):
    """A subclass fills `connections`, of three workers and of the user."""

    connections: Sequence[Connection]

    def __init__(self) -> None:
        super().__init__()
        *self.workers, self.user = self.connections
        self.set_clock(BASE)
        rows.sql(self.user, "TRUNCATE tasks")
        next_id = "SELECT nextval(pg_get_serial_sequence('tasks', 'task_id')) AS id"
        self.floor = rows.sql(self.user, next_id)[0]["id"]  # the audit log keeps older stories
        self.rows: dict[int, Row] = {}
        self.paid: dict[int, model.Paid] = {}  # of every task that was acknowledged
        self.keys: dict[tuple[Any, ...], tuple[bytes, list[int]]] = {}
        self.beliefs: list[dict[Lease, datetime]] = [{}, {}, {}]  # until when each thinks it holds
        self.ever_held: list[list[Lease]] = [[], [], []]
        self.last_tenants = ["", "", ""]
        self.is_sound = True

    def set_clock(self, instant: datetime) -> None:
        self.clock = instant
        for conn in self.connections:
            rows.set_clock(conn, instant.isoformat())

    def look(self) -> tuple[dict[int, Row], set[int]]:
        """The rows before this step, and the numbers of those that it has changed or created."""
        self.is_sound = False  # until the promises have been checked
        before = self.rows
        found = rows.sql(self.user, "SELECT * FROM tasks ORDER BY task_id")
        self.rows = {row["task_id"]: row for row in found}
        assert set(before) <= set(self.rows), "a task is gone"
        return before, {task for task, row in self.rows.items() if row != before.get(task)}

    def check_untouched(self) -> None:
        assert self.look()[1] == set()

    def check_became(self, wanted: dict[int, Row]) -> None:
        """These rows have changed in just these columns, and no other row has."""
        before, changed = self.look()
        after = {task: {**before[task], **columns} for task, columns in wanted.items()}
        assert {task: self.rows[task] for task in after} == after
        assert changed <= set(after)

    @initialize(batch=st.lists(new_tasks, min_size=2, max_size=4))
    def begin(self, batch: list[NewTask]) -> None:
        self.submit_batch(batch, None, b"one")
        self.advance(60)
        self.claim(0, 2)

    # --- what the user does --------------------------------------------------------------------

    @rule(task=new_tasks, key=keys, body=bodies)
    def submit(self, task: NewTask, key: str | None, body: bytes) -> None:
        self._submit(lambda tasks: [db.submit_task(self.user, *tasks)], [task], key, body)

    @rule(tasks=st.lists(new_tasks, min_size=2, max_size=4), key=keys, body=bodies)
    def submit_batch(self, tasks: list[NewTask], key: str | None, body: bytes) -> None:
        tasks = [replace(task, tenant="amber") for task in tasks]
        self._submit(lambda tasks: operations.submit_batch(self.user, tasks), tasks, key, body)

    def _submit(
        self,
        call: Callable[[list[NewTask]], list[db.Submitted]],
        tasks: list[NewTask],
        key: str | None,
        body: bytes,
    ) -> None:
        whole = tasks[0].tenant, len(tasks) > 1, key
        if key:
            scope = "batch" if len(tasks) > 1 else "tasks"
            how = {"idempotency_scope": scope, "idempotency_key": key, "request_hash": body}
            tasks[0] = replace(tasks[0], **how)
        try:
            told = [(one.task_id, one.status, one.replayed) for one in call(tasks)]
        except KeyReused:
            assert self.keys[whole][0] != body
            self.check_untouched()
            return
        if whole in self.keys:
            first_body, first = self.keys[whole]
            assert first_body == body
            assert told == [(task, self.rows[task]["status"], True) for task in first]
            self.check_untouched()
            return
        created = [task for task, *_ in told]
        assert [answer for _, *answer in told] == [["PENDING", False]] * len(tasks)
        if key:
            self.keys[whole] = body, created
        self.paid.update((task, model.Paid()) for task in created)
        assert self.look()[1] == set(created)

    @rule(which=indexes)
    def cancel(self, which: int) -> None:
        row = list(self.rows.values())[which % len(self.rows)]
        self._operate(operations.cancel_task, row, model.cancelled(row, self.clock))

    @rule(which=indexes)
    def requeue(self, which: int) -> None:
        """A dead letter; if there is none, another task, which is refused."""
        dead = [row for row in self.rows.values() if row["status"] == "FAILED"]
        choice = dead or list(self.rows.values())
        row = choice[which % len(choice)]
        self._operate(operations.requeue_task, row, model.requeued(row, self.clock))

    def _operate(self, call: Callable[..., Any], row: Row, wanted: Row | None) -> None:
        try:
            answer = call(self.user, row["tenant"], str(row["task_id"]))
        except StateConflict:
            assert wanted is None
            self.check_untouched()
        else:
            assert wanted is not None
            assert answer.status == wanted.get("status", row["status"])
            self.check_became({row["task_id"]: wanted})

    # --- what time does ------------------------------------------------------------------------

    @precondition(lambda self: any(self.beliefs))
    @rule(who=workers, slots=st.integers(0, 4))
    def freeze(self, who: int, slots: int) -> None:
        """One worker stands still; the others renew their leases and take its tasks over."""
        self.advance(29)
        for other in {0, 1, 2} - {who}:
            self.heartbeat(other)
        self.advance(2)
        self.reap((who + 1) % 3)
        if slots:
            self.claim((who + 1) % 3, slots)

    @rule(seconds=st.sampled_from([1, 4, 29, 30, 31, 90]))
    def advance(self, seconds: int) -> None:
        self.set_clock(self.clock + timedelta(seconds=seconds))
        self.check_untouched()

    # --- what workers do -----------------------------------------------------------------------

    @precondition(lambda self: self._became_due(alone=False))
    @rule(who=workers, slots=st.integers(1, 4))
    def claim(self, who: int, slots: int) -> None:
        found = rows.claim(self.workers[who], slots, f"w{who}", after_tenant=self.last_tenants[who])
        self.last_tenants[who] = found.last_tenant or self.last_tenants[who]
        could = self._became_due(alone=False)
        taken = [task.task_id for task in found.tasks]
        assert len(set(taken)) == len(taken) <= slots
        assert set(taken) <= set(could)
        assert bool(taken) == bool(could)
        for row in (could[task] for task in taken):
            left = [other for task, other in could.items() if task not in taken]
            mine = [other for other in left if other["tenant"] == row["tenant"]]
            assert all(order_of_claims(other) > order_of_claims(row) for other in mine)
        self._hold(who, found.tasks)

    @precondition(lambda self: self._became_due(alone=True))
    @rule(who=workers)
    def claim_alone(self, who: int) -> None:
        policy = rows.Everything()
        found = claims.claim_alone(self.workers[who], f"w{who}", LEASE_SECONDS, policy)
        taken = [task for task, _ in found.tasks]
        assert [task.task_id for task in taken] == sorted(self._became_due(alone=True))[:1]
        self._hold(who, taken)

    def _became_due(self, alone: bool) -> dict[int, Row]:
        """The tasks among which a claim could choose, before it did."""
        return {
            task: row
            for task, row in self.rows.items()
            if row["status"] == "PENDING"
            and row["available_at"] <= self.clock
            and row["alone"] == alone
        }

    def _hold(self, who: int, taken: Iterable[ClaimedTask]) -> None:
        until = self.clock + timedelta(seconds=LEASE_SECONDS)
        due = {**self._became_due(alone=True), **self._became_due(alone=False)}
        wanted: dict[int, Row] = {task: {"due": True} for task in due}
        for task in taken:
            row = self.rows[task.task_id]
            wanted[task.task_id] = model.claimed(row, task, f"w{who}", self.clock, until)
            tokens = {lease.token for held in self.ever_held for lease in held}
            assert task.lease.token not in tokens
            self.ever_held[who].append(task.lease)
            self.beliefs[who][task.lease] = until
        self.check_became(wanted)

    @precondition(lambda self: any(self.beliefs))
    @rule(who=workers)
    def heartbeat(self, who: int) -> None:
        until = self.clock + timedelta(seconds=LEASE_SECONDS)
        believed = set(self.beliefs[who])
        held = {lease for lease in believed if self._holds(lease)}
        beat = leases.renew_leases(self.workers[who], list(believed), LEASE_SECONDS)
        assert beat.lost == believed - held
        asked = {lease for lease in held if self.rows[lease.task_id]["cancel_requested"]}
        assert beat.cancelled == asked
        self.check_became({lease.task_id: {"lease_expires_at": until} for lease in held})
        # In its order: the same game is to be played again when a failure is repeated.
        self.beliefs[who] = {lease: until for lease in self.beliefs[who] if lease in held}

    def _held(self) -> list[tuple[int, Lease]]:
        """Which worker thinks that it holds which lease."""
        return [(who, lease) for who, beliefs in enumerate(self.beliefs) for lease in beliefs]

    def _holds(self, lease: Lease) -> bool:
        row = self.rows[lease.task_id]
        return bool(row["status"] == "RUNNING" and row["lease_token"] == lease.token)

    @precondition(lambda self: self._held())
    @rule(which=indexes, outcome=outcomes)
    def settle(self, which: int, outcome: Outcome) -> None:
        held = self._held()
        who, lease = held[which % len(held)]
        self._settle(who, [lease], outcome)

    @precondition(lambda self: self._held())
    @rule(which=indexes)
    def fail(self, which: int) -> None:
        self.settle(which, Outcome("failure", error="it went wrong"))

    @rule(who=workers, which=indexes, outcome=outcomes)
    def settle_what_it_held_once(self, who: int, which: int, outcome: Outcome) -> None:
        if once := self.ever_held[who]:
            self._settle(who, [once[which % len(once)]], outcome)

    @precondition(lambda self: any(self.ever_held))
    @rule(who=workers, outcome=outcomes)
    def settle_all_it_ever_held(self, who: int, outcome: Outcome) -> None:
        self._settle(who, self.ever_held[who], outcome)

    def _settle(self, who: int, several: list[Lease], outcome: Outcome) -> None:
        wanted = {}
        for lease in filter(self._holds, several):
            row = self.rows[lease.task_id]
            wanted[lease.task_id] = model.settled(row, outcome, RETRY, self.clock)
            self.paid[lease.task_id].add(outcome)
        pairs = [(lease, outcome) for lease in several]
        settled = leases.settle_tasks(self.workers[who], pairs, RETRY)
        told = {one.task_id: (one.status, one.reason) for one in settled}
        assert told == {task: (row["status"], row["reason"]) for task, row in wanted.items()}
        self.check_became(wanted)
        for lease in several:
            self.beliefs[who].pop(lease, None)

    @rule(who=workers)
    def reap(self, who: int) -> None:
        wanted = {
            task: model.reaped(row, RETRY, self.clock)
            for task, row in self.rows.items()
            if row["status"] == "RUNNING" and row["lease_expires_at"] < self.clock
        }
        told = {one.task_id: one.reason for one in rows.reap(self.workers[who])}
        assert told == {task: row["reason"] for task, row in wanted.items()}
        self.check_became(wanted)

    # --- what holds at every moment ------------------------------------------------------------

    @invariant()
    def the_figures_are_what_counting_gives(self) -> None:
        counted.check_kept(self.user)
        fold_figures(self.user, 2)  # some; the next look finds the sum of what is folded and not

    @invariant()
    def every_promise_is_kept(self) -> None:
        assert model.broken_promises(self.user, self.floor, RETRY) == []

    @invariant()
    def every_acknowledged_task_is_there_with_what_was_paid_for_it(self) -> None:
        assert {task: model.Paid.of(row) for task, row in self.rows.items()} == self.paid

    @invariant()
    def who_thinks_it_holds_a_lease_that_has_not_run_out_holds_it_alone(self) -> None:
        live = [
            (lease, until)
            for beliefs in self.beliefs
            for lease, until in beliefs.items()
            if until >= self.clock
        ]
        assert len({lease.task_id for lease, _ in live}) == len(live)
        assert [lease for lease, _ in live if not self._holds(lease)] == []
        expiries = [self.rows[lease.task_id]["lease_expires_at"] for lease, _ in live]
        assert expiries == [until for _, until in live]
        self.is_sound = True

    def teardown(self) -> None:
        """Whatever has happened, a worker that comes now ends every task."""
        passes = 0
        while self.is_sound and self._unfinished():
            passes += 1
            assert passes <= 2 + len(self.rows)
            self.advance(90)
            self.reap(0)
            self.claim(0, 3 * len(self.rows))
            self.claim_alone(0)
            self._settle(0, list(self.beliefs[0]), Outcome("succeeded", result={}))
            self.is_sound = True

    def _unfinished(self) -> set[int]:
        return {task for task, row in self.rows.items() if row["status"] not in model.FINAL}

"""Runs as a Hypothesis state machine: its rules are what users, workers and crashes do to steps.

After each rule the whole table is compared with tests/support/run_model.py, and every promise is
looked at. In the end a worker and a person come who do what there is to do: then all has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from config import Retry
from db import Connection
from errors import StateConflict
from queries import claims, leases, operations, runs
from queries.figures import fold_figures
from queries.leases import ClaimedTask, Lease, Outcome, Settled
from tests.support import counted, proof, rows
from tests.support.run_model import RUNS, Run
from tests.support.runs import submit

# Two failures or two losses are the end of a step, and what failed is due again at once.
RETRY = Retry(max_retry=2, max_delivery=2, max_delay_seconds=0.000001)
VERDICTS = ("succeeded", "succeeded", "succeeded", "failure", "permanent", "deadline", "released",
            "outage")  # fmt: skip

indexes = st.integers(0, 63)
verdicts = st.sampled_from(VERDICTS)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    """Steps of which each may need any that stand before it; every fourth is an approval."""
    edges: dict[str, list[str]] = {}
    for number in range(draw(st.integers(1, 7))):
        prefix = draw(st.sampled_from(["", "", "", "approval."]))
        likely = draw(st.sampled_from([1, 2, 2, 3]))  # how many of three throws make an edge
        needs = [name for name in edges if draw(st.integers(1, 3)) <= likely]
        edges[f"{prefix}s{number}"] = needs if draw(st.integers(0, 4)) else []
    return edges


def outcomes_of(verdicts: Mapping[Lease, str]) -> list[tuple[Lease, Outcome]]:
    return [
        (lease, Outcome(verdict, {"text": "done"}, "it went wrong"))  # type: ignore[arg-type]
        for lease, verdict in verdicts.items()
    ]


class RunMachine(RuleBasedStateMachine):
    """A subclass fills `connections`, of the worker and of the user."""

    connections: Sequence[Connection]

    def __init__(self) -> None:
        super().__init__()
        self.worker, self.user = self.connections
        rows.sql(self.user, "TRUNCATE tasks, step_edges, audit_log")
        self.runs: dict[int, Run] = {}
        self.names: dict[int, tuple[int, str]] = {}  # of each step: its run, and its name there
        self.held: list[Lease] = []
        self.once_held: list[Lease] = []
        self.is_sound = True

    @initialize(graph=graphs())
    def begin(self, graph: dict[str, list[str]]) -> None:
        self.submit(graph)
        self.claim(2)

    # --- what users do -------------------------------------------------------------------------

    @precondition(lambda self: len(self.runs) < 3)
    @rule(graph=graphs())
    def submit(self, graph: dict[str, list[str]]) -> None:
        run_id = submit(self.user, graph)
        self.runs[run_id] = Run.of(graph)
        self.names |= {run_id + 1 + n: (run_id, name) for n, name in enumerate(graph)}

    @rule(which=indexes)
    def cancel_a_step(self, which: int) -> None:
        task_id, run, name = self._any_step(which)
        self._ask(run.cancel_step(name), operations.cancel_task, task_id)

    @precondition(lambda self: len(self.runs) > 1)
    @rule(which=indexes)
    def cancel_a_run(self, which: int) -> None:
        run_id = sorted(self.runs)[which % len(self.runs)]
        self._ask(self.runs[run_id].cancel(), runs.cancel_run, run_id)

    @precondition(lambda self: self._shown("AWAITING_APPROVAL"))
    @rule(which=indexes, approved=st.sampled_from([True, True, False]))
    def decide(self, which: int, approved: bool) -> None:
        task_id, run, name = self._any_step(which, "AWAITING_APPROVAL")
        allowed = run.decide(name, approved)
        self._ask(allowed, operations.approve_task, task_id, approved, None)

    @rule(which=indexes, approved=st.booleans())
    def decide_what_may_not_wait(self, which: int, approved: bool) -> None:
        task_id, run, name = self._any_step(which)
        allowed = run.decide(name, approved)
        self._ask(allowed, operations.approve_task, task_id, approved, None)

    @precondition(lambda self: self._shown("FAILED"))
    @rule(which=indexes)
    def requeue(self, which: int) -> None:
        task_id, run, name = self._any_step(which, "FAILED")
        self._ask(run.requeue(name), operations.requeue_task, task_id)

    @rule(which=indexes)
    def requeue_what_may_not_be_dead(self, which: int) -> None:
        task_id, run, name = self._any_step(which)
        self._ask(run.requeue(name), operations.requeue_task, task_id)

    def _ask(self, allowed: bool, call: Callable[..., Any], number: int, *args: Any) -> None:
        try:
            call(self.user, "default", str(number), *args)
        except StateConflict:
            assert not allowed
        else:
            assert allowed

    def _shown(self, status: str | None = None) -> list[int]:
        """The numbers of the steps that are to show this status; None: any."""
        looks = {run_id: run.look() for run_id, run in self.runs.items()}
        return [
            task_id
            for task_id, (run_id, name) in self.names.items()
            if status in (None, looks[run_id][name])
        ]

    def _any_step(self, which: int, status: str | None = None) -> tuple[int, Run, str]:
        choice = self._shown(status)
        task_id = choice[which % len(choice)]
        run_id, name = self.names[task_id]
        return task_id, self.runs[run_id], name

    # --- what workers do -----------------------------------------------------------------------

    @precondition(lambda self: self._claimable(alone=False))
    @rule(slots=st.integers(1, 4))
    def claim(self, slots: int) -> None:
        could = self._claimable(alone=False)
        tasks = rows.claim(self.worker, slots).tasks
        assert [task.task_id for task in tasks] == could[:slots]
        self._hold(tasks)

    @precondition(lambda self: self._claimable(alone=True))
    @rule()
    def claim_alone(self) -> None:
        could = self._claimable(alone=True)
        found = claims.claim_alone(self.worker, "w1", rows.LEASE_SECONDS, rows.Everything())
        assert [task.task_id for task, _ in found.tasks] == could[:1]
        self._hold([task for task, _ in found.tasks])

    def _claimable(self, alone: bool) -> list[int]:
        pending = self._shown("PENDING")
        return [task_id for task_id in pending if (self._step(task_id).lost == 1) == alone]

    def _step(self, task_id: int) -> Any:
        run_id, name = self.names[task_id]
        return self.runs[run_id].steps[name]

    def _hold(self, tasks: Sequence[ClaimedTask]) -> None:
        for task in tasks:
            assert (task.run_id, task.step) == self.names[task.task_id]
            self._step(task.task_id).begin()
            self.held.append(task.lease)

    @precondition(lambda self: self.held)
    @rule(which=indexes, verdict=verdicts)
    def settle(self, which: int, verdict: str) -> None:
        self._settle({self.held[which % len(self.held)]: verdict})

    @precondition(lambda self: len(self.held) > 1)
    @rule(several=st.lists(verdicts, min_size=2, max_size=4), and_claim=st.booleans())
    def settle_several_at_once(self, several: list[str], and_claim: bool) -> None:
        verdicts = dict(zip(self.held, several, strict=False))
        if and_claim:
            self._settle_and_claim(verdicts)
        else:
            self._settle(verdicts)

    @precondition(lambda self: self.once_held)
    @rule(which=indexes, verdict=verdicts)
    def settle_what_was_taken_back(self, which: int, verdict: str) -> None:
        """Late, beside what is held; it changes nothing."""
        late = self.once_held[which % len(self.once_held)]
        self._settle({late: verdict, **dict.fromkeys(self.held[:1], "succeeded")})

    def _settle_and_claim(self, verdicts: dict[Lease, str]) -> None:
        done = claims.settle_and_claim(
            self.worker, outcomes_of(verdicts), RETRY, "w1", rows.LEASE_SECONDS,
            rows.Everything(), "", 0,
        )  # fmt: skip
        assert done is not None
        settled, claim = done
        self._note(settled, verdicts)
        could = self._claimable(alone=False)
        assert [task.task_id for task, _ in claim.tasks] == could[: len(verdicts)]
        self._hold([task for task, _ in claim.tasks])

    def _settle(self, verdicts: dict[Lease, str]) -> None:
        self._note(leases.settle_tasks(self.worker, outcomes_of(verdicts), RETRY), verdicts)

    def _note(self, settled: list[Settled], verdicts: dict[Lease, str]) -> None:
        ours = [lease for lease in verdicts if lease in self.held]
        told = {one.task_id: one.token for one in settled}
        assert told == {lease.task_id: lease.token for lease in ours}
        for lease in ours:
            self._end(lease, verdicts[lease])

    def _end(self, lease: Lease, verdict: str) -> None:
        step = self._step(lease.task_id)
        assert step.fate == RUNS
        step.end(verdict, RETRY)
        self.held.remove(lease)
        self.once_held.append(lease)

    @precondition(lambda self: self.held)
    @rule(how_many=st.integers(1, 3))
    def crash(self, how_many: int) -> None:
        lost = self.held[:how_many]
        for lease in lost:
            rows.expire(self.worker, lease.task_id)
        reaped = rows.reap(self.worker, RETRY)
        assert sorted(one.task_id for one in reaped) == sorted(one.task_id for one in lost)
        for lease in lost:
            self._end(lease, "reaped")

    # --- what holds at every moment ------------------------------------------------------------

    @invariant()
    def the_figures_are_what_counting_gives(self) -> None:
        counted.check_kept(self.user)
        fold_figures(self.user, 2)  # some; the next look finds the sum of what is folded and not

    @invariant()
    def every_row_is_as_the_model_has_it(self) -> None:
        self.is_sound = False  # until all has been checked
        wanted, found = {}, {}
        for run_id, run in self.runs.items():
            wanted[run_id] = (run.look(), run.unmet(), run.reasons_of_death(), run.is_cancelled)
            found[run_id] = ({}, {}, {}, None)
        for row in rows.sql(self.user, "SELECT * FROM tasks ORDER BY task_id"):
            run_id, name = row["parent_id"] or row["task_id"], row["step"] or ""
            shown, unmet, reasons, _ = found[run_id]
            shown[name] = row["status"]
            if not name:
                found[run_id] = (shown, unmet, reasons, row["cancel_requested"])
                continue
            unmet[name] = row["unmet"]
            if row["status"] == "CANCELLED":
                reasons[name] = row["reason"]
        assert found == wanted

    @invariant()
    def every_promise_is_kept(self) -> None:
        proof.check(self.user, retry=RETRY)
        self.is_sound = True

    def teardown(self) -> None:
        """Whatever has happened, a worker and a person that come now end every run."""
        passes = 0
        while self.is_sound and (self._unended()):
            passes += 1
            assert passes <= 2 + len(self.names)
            for task_id in self._shown("AWAITING_APPROVAL"):
                run_id, name = self.names[task_id]
                self._ask(self.runs[run_id].decide(name, True), operations.approve_task, task_id,
                          True, None)  # fmt: skip
            if self._claimable(alone=False):
                self.claim(100)
            while self._claimable(alone=True):
                self.claim_alone()
            self._settle(dict.fromkeys(self.held, "succeeded"))
            self.every_row_is_as_the_model_has_it()
            self.is_sound = True
        if self.is_sound:
            proof.check(self.user, retry=RETRY, ended=True)

    def _unended(self) -> bool:
        return any(run.look()[""] == "BLOCKED" for run in self.runs.values())

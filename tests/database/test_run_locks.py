"""Settle, cancel, approve, requeue, reap and claim meet in one run, in both orders.

The first has done all but its COMMIT when the second comes: tests/support/stage.py. Whoever may
change a second row of a run has locked the run's own row before, so of two such the second waits,
and then sees what the first has done. Claim, heartbeat and reaper wait for nobody.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from db import Connection
from errors import StateConflict
from queries import leases, operations, runs
from queries.leases import Lease
from tests.support import proof, rows
from tests.support.functions import rewritten
from tests.support.rows import RETRY, sql
from tests.support.runs import statuses, step_rows, story, submit
from tests.support.stage import AT_ONCE, Stage

GATE = "approval.x"
JOIN = {"a": [], "b": [], "c": ["a", "b"]}  # c waits for two
GATED = {"a": [], GATE: [], "c": ["a", GATE]}


# --- what they meet on -----------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A run, and the leases that were once taken on its steps."""

    run_id: int
    leases: Mapping[str, Lease]


def begin(conn: Connection, edges: Mapping[str, list[str]], slots: int) -> Scene:
    run_id = submit(conn, edges)
    taken = {str(task.step): task.lease for task in rows.claim(conn, slots).tasks}
    assert len(taken) == slots
    return Scene(run_id, taken)


def both_run(conn: Connection) -> Scene:
    """a and b are RUNNING."""
    return begin(conn, JOIN, 2)


def one_runs(conn: Connection) -> Scene:
    """a is RUNNING, b PENDING."""
    return begin(conn, JOIN, 1)


def gated(conn: Connection) -> Scene:
    """a is RUNNING, the approval waits for a person."""
    return begin(conn, GATED, 1)


def alone(conn: Connection) -> Scene:
    """a is RUNNING, and the only step."""
    return begin(conn, {"a": []}, 1)


def pair(conn: Connection) -> Scene:
    """a and b are RUNNING, and all that there is."""
    return begin(conn, {"a": [], "b": []}, 2)


def b_expired(conn: Connection) -> Scene:
    """a and b are RUNNING; the lease of b has run out."""
    scene = both_run(conn)
    rows.expire(conn, scene.leases["b"].task_id)
    return scene


def b_dead(conn: Connection) -> Scene:
    """a is RUNNING, b FAILED and c CANCELLED for it."""
    scene = both_run(conn)
    rows.settle(conn, scene.leases["b"], "permanent")
    return scene


# --- what meets ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """One thing that somebody does, and its answer in a word."""

    words: str
    does: Callable[[Connection, Scene], str]

    def __call__(self, conn: Connection, scene: Scene) -> str:
        try:
            return str(self.does(conn, scene))
        except StateConflict:
            return "refused"


def settles(step: str, verdict: str = "succeeded") -> Act:
    def does(conn: Connection, scene: Scene) -> str:
        settled = rows.settle(conn, scene.leases[step], verdict)
        return settled.status if settled else "lost"

    return Act(f"a worker settles {step} as {verdict}", does)


def on_step(words: str, step: str, call: Callable[..., Any], *args: Any) -> Act:
    def does(conn: Connection, scene: Scene) -> str:
        task_id = scene.run_id + list(step_rows(conn, scene.run_id)).index(step) + 1
        return str(call(conn, "default", str(task_id), *args).status)

    return Act(f"a user {words} {step}", does)


def cancels(step: str) -> Act:
    return on_step("cancels", step, operations.cancel_task)


def requeues(step: str) -> Act:
    return on_step("requeues", step, operations.requeue_task)


def renews(step: str) -> Act:
    def does(conn: Connection, scene: Scene) -> str:
        beat = leases.renew_leases(conn, [scene.leases[step]], 30)
        return "lost" if beat.lost else "alive"

    return Act(f"a worker renews the lease of {step}", does)


approves = on_step("approves", GATE, operations.approve_task, True, None)
rejects = on_step("rejects", GATE, operations.approve_task, False, None)
cancels_run = Act(
    "a user cancels the run",
    lambda conn, scene: str(runs.cancel_run(conn, "default", str(scene.run_id)).status),
)
reaps = Act("the reaper comes", lambda conn, scene: "reaped" if rows.reap(conn) else "nothing")
claims = Act("a claim comes", lambda conn, scene: f"claimed {len(rows.claim(conn, 5).tasks)}")


# --- two -------------------------------------------------------------------------------------

WAITS, PASSES = "waits", "passes"
RUN = ""
Meeting = tuple[Any, ...]
# The scene; the first and its answer; the second, whether it waits, its answer; what the run and
# its steps are when both are done: R(un), a, b (or the approval), c.
MEETINGS: list[Meeting] = [
    # The lost wake-up: two last dependencies of c, each of which sees the other unfinished.
    (both_run, settles("a"), "SUCCEEDED", settles("b"), WAITS, "SUCCEEDED", "B S S P"),
    (both_run, settles("b"), "SUCCEEDED", settles("a"), WAITS, "SUCCEEDED", "B S S P"),
    (gated, settles("a"), "SUCCEEDED", approves, WAITS, "SUCCEEDED", "B S S P"),
    (gated, approves, "SUCCEEDED", settles("a"), WAITS, "SUCCEEDED", "B S S P"),
    # The same of the run's end.
    (pair, settles("a"), "SUCCEEDED", settles("b"), WAITS, "SUCCEEDED", "S S S"),
    (pair, settles("b"), "SUCCEEDED", settles("a", "permanent"), WAITS, "FAILED", "F F S"),
    (one_runs, settles("a"), "SUCCEEDED", cancels("b"), WAITS, "CANCELLED", "C S C C"),
    (one_runs, cancels("b"), "CANCELLED", settles("a"), WAITS, "SUCCEEDED", "C S C C"),
    (alone, settles("a"), "SUCCEEDED", cancels_run, WAITS, "refused", "S S"),
    (alone, cancels_run, "RUNNING", settles("a"), WAITS, "CANCELLED", "C C"),
    # Two deaths, and a death beside a success.
    (both_run, settles("a", "permanent"), "FAILED", settles("b", "permanent"), WAITS, "FAILED",
     "F F F C"),
    (both_run, settles("a", "permanent"), "FAILED", settles("b"), WAITS, "SUCCEEDED", "F F S C"),
    (both_run, settles("b"), "SUCCEEDED", settles("a", "permanent"), WAITS, "FAILED", "F F S C"),
    (gated, settles("a"), "SUCCEEDED", rejects, WAITS, "FAILED", "F S F C"),
    (gated, rejects, "FAILED", settles("a"), WAITS, "SUCCEEDED", "F S F C"),
    (gated, approves, "SUCCEEDED", rejects, WAITS, "refused", "B R S B"),
    (gated, rejects, "FAILED", approves, WAITS, "refused", "B R F C"),
    # A cancel of a sibling that runs.
    (both_run, settles("a"), "SUCCEEDED", cancels("b"), WAITS, "RUNNING", "B S R B"),
    (both_run, cancels("b"), "RUNNING", settles("a"), WAITS, "SUCCEEDED", "B S R B"),
    (both_run, cancels("b"), "RUNNING", settles("b"), WAITS, "CANCELLED", "B R C C"),
    # A cancel of the run.
    (both_run, settles("a"), "SUCCEEDED", cancels_run, WAITS, "RUNNING", "B S R C"),
    (both_run, cancels_run, "RUNNING", settles("a"), WAITS, "CANCELLED", "B C R C"),
    (gated, approves, "SUCCEEDED", cancels_run, WAITS, "RUNNING", "B R S C"),
    (gated, cancels_run, "RUNNING", approves, WAITS, "refused", "B R C C"),
    (both_run, cancels_run, "RUNNING", cancels_run, WAITS, "RUNNING", "B R R C"),
    (one_runs, cancels_run, "RUNNING", cancels("b"), WAITS, "refused", "B R C C"),
    (one_runs, cancels("b"), "CANCELLED", cancels_run, WAITS, "RUNNING", "B R C C"),
    # A requeue.
    (b_dead, settles("a"), "SUCCEEDED", requeues("b"), WAITS, "PENDING", "B S P B"),
    (b_dead, requeues("b"), "PENDING", settles("a"), WAITS, "SUCCEEDED", "B S P B"),
    (b_dead, settles("a", "permanent"), "FAILED", requeues("b"), WAITS, "PENDING", "B F P C"),
    (b_dead, requeues("b"), "PENDING", settles("a", "permanent"), WAITS, "FAILED", "B F P C"),
    (b_dead, requeues("b"), "PENDING", requeues("b"), WAITS, "refused", "B R P B"),
    (b_dead, requeues("b"), "PENDING", cancels_run, WAITS, "RUNNING", "B R C C"),
    (b_dead, cancels_run, "RUNNING", requeues("b"), WAITS, "refused", "B R F C"),
    # The reaper passes by what is held, and is waited for.
    (b_expired, settles("a"), "SUCCEEDED", reaps, PASSES, "nothing", "B S R B"),
    (b_expired, settles("b"), "SUCCEEDED", reaps, PASSES, "nothing", "B R S B"),
    (b_expired, cancels("a"), "RUNNING", reaps, PASSES, "nothing", "B R R B"),
    (b_expired, cancels_run, "RUNNING", reaps, PASSES, "nothing", "B R R C"),
    (b_expired, renews("b"), "alive", reaps, PASSES, "nothing", "B R R B"),
    (b_expired, reaps, "reaped", reaps, PASSES, "nothing", "B R P B"),
    (b_expired, reaps, "reaped", settles("a"), WAITS, "SUCCEEDED", "B S P B"),
    (b_expired, reaps, "reaped", settles("b"), WAITS, "lost", "B R P B"),
    (b_expired, reaps, "reaped", cancels_run, WAITS, "RUNNING", "B R C C"),
    # Claim and heartbeat need no run: they pass by what is held, and get the rest.
    (one_runs, settles("a"), "SUCCEEDED", claims, PASSES, "claimed 1", "B S R B"),
    (one_runs, cancels_run, "RUNNING", claims, PASSES, "claimed 0", "B R C C"),
    (one_runs, claims, "claimed 1", cancels_run, WAITS, "RUNNING", "B R R C"),
    (one_runs, claims, "claimed 1", cancels("b"), WAITS, "RUNNING", "B R R B"),
    (b_dead, requeues("b"), "PENDING", claims, PASSES, "claimed 0", "B R P B"),
    (both_run, settles("a"), "SUCCEEDED", renews("b"), PASSES, "alive", "B S R B"),
    (both_run, cancels_run, "RUNNING", renews("b"), PASSES, "alive", "B R R C"),
]  # fmt: skip


def meeting_name(meeting: Meeting) -> str:
    scene, first, _, second, waits, *_ = meeting
    return f"{second.words} and {waits} after {first.words} while {scene.__name__}"


def short(conn: Connection, scene: Scene) -> str:
    return " ".join(status[0] for status in statuses(conn, scene.run_id).values())


@pytest.mark.parametrize("meeting", MEETINGS, ids=meeting_name)
def test_of_two_in_one_run_the_second_waits_or_passes_and_gets_the_right_answer(
    stage: Stage, meeting: Meeting
) -> None:
    bring, first, first_answer, second, waits, second_answer, ends = meeting
    scene = bring(stage.witness)
    with stage.held_back(first, scene) as ahead:
        if waits == WAITS:
            pid, behind = stage.start(second, scene)
            assert stage.await_lock(pid, behind) in ("transactionid", "tuple")
        else:
            conn = stage.connect()
            conn.lock_timeout_seconds = AT_ONCE
            assert second(conn, scene) == second_answer
    assert ahead.result() == first_answer
    if waits == WAITS:
        assert behind.result(20) == second_answer
    assert short(stage.witness, scene) == ends
    proof.check(stage.witness, floor=scene.run_id - 1)


def test_whoever_never_waits_never_waits_in_any_meeting() -> None:
    passing = {second.words for _, _, _, second, waits, *_ in MEETINGS if waits == PASSES}
    waiting = {second.words for _, _, _, second, waits, *_ in MEETINGS if waits == WAITS}
    assert passing == {reaps.words, claims.words, renews("b").words}
    assert not passing & waiting


# --- the danger when a guard is off ----------------------------------------------------------


# What settle_tasks would be like if it locked no run.
NO_LOCK = {"WHERE task_id = ANY(run_ids)": "WHERE false"}


def test_without_the_lock_on_the_run_the_step_behind_two_last_parents_is_never_promoted(
    stage: Stage,
) -> None:
    scene = both_run(stage.witness)
    with rewritten(stage.witness, "settle_tasks", NO_LOCK):
        with stage.held_back(settles("a"), scene):
            pid, behind = stage.start(settles("b"), scene)
            stage.await_lock(pid, behind)  # for the row of c
        behind.result(20)
    assert short(stage.witness, scene) == "B S S B"
    assert proof.faults(stage.witness) != {}


def test_without_the_lock_on_the_run_it_never_ends_when_two_last_steps_do(stage: Stage) -> None:
    scene = pair(stage.witness)
    with (
        rewritten(stage.witness, "settle_tasks", NO_LOCK),
        stage.held_back(settles("a"), scene),
    ):
        assert settles("b")(stage.connect(), scene) == "SUCCEEDED"
    assert short(stage.witness, scene) == "B S S"
    assert proof.faults(stage.witness) != {}


# --- several runs ----------------------------------------------------------------------------


def settle_all(conn: Connection, several: list[Lease]) -> list[int]:
    outcomes = [(lease, leases.Outcome("succeeded", result={})) for lease in several]
    return [one.task_id for one in leases.settle_tasks(conn, outcomes, RETRY)]


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "last first"])
def test_a_settle_that_waits_for_a_run_has_locked_no_later_run_and_no_step(
    stage: Stage, turned: bool
) -> None:
    low, high = pair(stage.witness), pair(stage.witness)
    several = [high.leases["a"], low.leases["b"]]
    with stage.held_back(settles("a"), low):
        pid, behind = stage.start(settle_all, several[::-1] if turned else several)
        stage.await_lock(pid, behind)
        assert stage.is_free(high.run_id)
        assert all(stage.is_free(lease.task_id) for lease in several)
    assert sorted(behind.result(20)) == [low.leases["b"].task_id, high.leases["a"].task_id]
    assert [short(stage.witness, scene) for scene in (low, high)] == ["S S S", "B S R"]


def test_the_reaper_passes_by_a_run_that_is_held_and_takes_what_belongs_to_others(
    stage: Stage,
) -> None:
    held, free = b_expired(stage.witness), b_expired(stage.witness)
    lone = rows.claimed(stage.witness).task_id
    rows.expire(stage.witness, lone)
    with stage.held_back(settles("a"), held):
        conn = stage.connect()
        conn.lock_timeout_seconds = AT_ONCE
        reaped = [one.task_id for one in rows.reap(conn)]
    assert sorted(reaped) == [free.leases["b"].task_id, lone]
    assert [one.task_id for one in rows.reap(stage.witness)] == [held.leases["b"].task_id]


def test_a_held_run_with_more_expired_steps_than_a_sweep_takes_starves_no_other_run(
    stage: Stage,
) -> None:
    many = begin(stage.witness, {f"s{n}": [] for n in range(501)}, 501)
    free = b_expired(stage.witness)
    expire_all = """
        UPDATE tasks SET lease_expires_at = current_instant() - interval '1 second'
        WHERE parent_id = %(run_id)s
    """
    sql(stage.witness, expire_all, run_id=many.run_id)
    with stage.held_back(holds_the_run, many):
        assert [one.task_id for one in rows.reap(stage.connect())] == [free.leases["b"].task_id]


# --- many ------------------------------------------------------------------------------------

PILE = [
    settles("a"), settles("b"), approves, rejects, cancels("b"), cancels("c"), cancels_run,
    requeues("dead"),
]  # fmt: skip
PILED = {"a": [], "b": [], "dead": [], GATE: [], "c": ["a", "b"], "d": ["c", GATE], "e": ["dead"]}


@pytest.mark.parametrize("seed", range(6))
def test_all_who_change_a_run_queue_up_behind_one_another_and_all_get_their_turn(
    stage: Stage, seed: int
) -> None:
    scene = begin(stage.witness, PILED, 3)
    rows.settle(stage.witness, scene.leases["dead"], "permanent")
    others = random.Random(seed).sample(PILE, len(PILE))
    with stage.held_back(holds_the_run, scene):
        queue = [stage.start(act, scene) for act in others]
        for pid, call in queue:
            stage.await_lock(pid, call)
    answers = {act.words: call.result(20) for act, (_, call) in zip(others, queue, strict=True)}
    assert sorted((answers[approves.words], answers[rejects.words])) in (
        ["SUCCEEDED", "refused"], ["FAILED", "refused"], ["refused", "refused"],
    )  # fmt: skip
    proof.check(stage.witness, floor=scene.run_id - 1)


def holds_the_run(conn: Connection, scene: Scene) -> None:
    statement = "UPDATE tasks SET updated_at = current_instant() WHERE task_id = %(run_id)s"
    sql(conn, statement, run_id=scene.run_id)


ROUNDS = 12


def play(conn: Connection, seed: int, rounds: threading.Barrier, runs_of: list[list[int]]) -> None:
    """Users and workers in one, in a hurry: anything on any step of the same two runs at a time."""
    dice = random.Random(seed)
    held: list[Lease] = []

    def in_any(act: Act, scenes: list[Scene]) -> None:
        act(conn, dice.choice(scenes))

    def settle(lease: Lease, verdict: str) -> None:
        rows.settle(conn, lease, verdict)

    for run_ids in runs_of:
        rounds.wait(60)
        scenes = [Scene(run_id, {}) for run_id in run_ids]
        moves: list[Callable[[], Any]] = [
            lambda: held.extend(task.lease for task in rows.claim(conn, 3).tasks),
            lambda: settle_all(conn, dice.sample(held, len(held))),
            lambda: [settle(lease, dice.choice(["permanent", "released"])) for lease in held[-2:]],
            lambda: leases.renew_leases(conn, held, dice.choice([-1.0, 30.0])),
            lambda: rows.reap(conn),
            lambda: in_any(requeues(dice.choice(list(PILED))), scenes),  # noqa: B023
            lambda: in_any(dice.choice([approves, approves, rejects]), scenes),  # noqa: B023
        ]
        for _ in range(20):
            dice.choice(moves)()
        in_any(cancels(dice.choice(list(PILED))), scenes)
        in_any(cancels_run, scenes)
    sql(conn, "SELECT pg_stat_force_next_flush()")


def deadlocks(conn: Connection) -> int:
    statement = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    return int(sql(conn, statement)[0]["deadlocks"])


def test_everything_at_once_in_a_few_runs_ends_without_a_deadlock_and_keeps_every_promise(
    stage: Stage,
) -> None:
    runs_of = [[submit(stage.witness, PILED) for _ in range(2)] for _ in range(ROUNDS)]
    before = deadlocks(stage.connect())
    rounds = threading.Barrier(6)
    calls = [stage.start(play, seed, rounds, runs_of)[1] for seed in range(6)]
    assert [failed for call in calls if (failed := call.exception(120))] == []
    assert deadlocks(stage.connect()) == before
    proof.check(stage.witness, floor=runs_of[0][0] - 1)
    run_ids = [run_id for several in runs_of for run_id in several]
    reasons = {reason for run_id in run_ids for _, reason in story(stage.witness, run_id)}
    assert {"promoted", "succeeded", "permanent", "dependency_failed", "requeued"} <= reasons

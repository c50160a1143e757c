"""Cancel, settle, reap, requeue, claim, noting and heartbeat meet on the same rows, in both orders.

The first has done all but its COMMIT when the second comes: tests/support/stage.py. Claim, noting,
heartbeat and reaper never wait for a row; of the others, rows are locked in the order of their
numbers, so that no two can wait for each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import db
from db import Connection
from errors import DatabaseUnavailable, StateConflict
from queries import claims, leases, operations
from queries.claims import Claim
from queries.leases import ClaimedTask, Lease, Outcome, Verdict
from tests.support import model, rows
from tests.support.functions import rewritten
from tests.support.rows import RETRY
from tests.support.stage import AT_ONCE, Stage

# --- two on one row --------------------------------------------------------------------------


def cancel(conn: Connection, lease: Lease) -> str:
    try:
        return operations.cancel_task(conn, "default", str(lease.task_id)).status
    except StateConflict:
        return "refused"


def requeue(conn: Connection, lease: Lease) -> str:
    try:
        return operations.requeue_task(conn, "default", str(lease.task_id)).status
    except StateConflict:
        return "refused"


def settle(conn: Connection, lease: Lease) -> str:
    settled = rows.settle(conn, lease, "succeeded")
    return settled.status if settled else "lost"


def reap(conn: Connection, lease: Lease) -> str:
    return "reaped" if rows.reap(conn) else "nothing"


def claim(conn: Connection, lease: Lease) -> str:
    return "claimed" if rows.claim(conn).tasks else "nothing"


def heartbeat(conn: Connection, lease: Lease) -> str:
    beat = leases.renew_leases(conn, [lease], 30)
    return "lost" if beat.lost else "asked to stop" if beat.cancelled else "alive"


def note_route(conn: Connection, lease: Lease) -> str:
    """As a worker does, when the task has begun."""
    task = ClaimedTask(lease, lease.task_id, "prompt", {}, "auto", None, 1, 1, 0)
    claims.note_routes(conn, Claim([(task, "cloud")], are_routes_noted=False))
    return "noted" if rows.row(conn, lease.task_id)["route"] == "cloud" else "left out"


def running(conn: Connection) -> Lease:
    """Its lease has run out, so the reaper wants it, too."""
    lease = rows.claimed(conn).lease
    rows.expire(conn, lease.task_id)
    return lease


def pending(conn: Connection) -> Lease:
    """Handed back by a worker that does not know it."""
    lease = rows.claimed(conn).lease
    rows.settle(conn, lease, "released")
    return lease


def dead(conn: Connection) -> Lease:
    lease = rows.claimed(conn).lease
    rows.settle(conn, lease, "permanent")
    return lease


Meeting = tuple[Any, ...]
# The task is; the first, and its answer; then the second, whether it waits, and its answer; what
# the task is when both are done, and why. Who does not wait sees it as it was before the first.
MEETINGS: list[Meeting] = [
    (running, cancel, "RUNNING", cancel, "waits", "RUNNING", "RUNNING", "claimed"),
    (running, cancel, "RUNNING", settle, "waits", "CANCELLED", "CANCELLED", "cancelled"),
    (running, cancel, "RUNNING", reap, "passes", "nothing", "RUNNING", "claimed"),
    (running, cancel, "RUNNING", heartbeat, "passes", "alive", "RUNNING", "claimed"),
    (running, cancel, "RUNNING", claim, "passes", "nothing", "RUNNING", "claimed"),
    (running, cancel, "RUNNING", requeue, "passes", "refused", "RUNNING", "claimed"),
    (running, cancel, "RUNNING", note_route, "passes", "left out", "RUNNING", "claimed"),
    (running, settle, "SUCCEEDED", note_route, "passes", "left out", "SUCCEEDED", "succeeded"),
    (running, reap, "reaped", note_route, "passes", "left out", "PENDING", "reaped"),
    (running, heartbeat, "alive", note_route, "passes", "left out", "RUNNING", "claimed"),
    (running, note_route, "noted", cancel, "waits", "RUNNING", "RUNNING", "claimed"),
    (running, note_route, "noted", settle, "waits", "SUCCEEDED", "SUCCEEDED", "succeeded"),
    (running, note_route, "noted", reap, "passes", "nothing", "RUNNING", "claimed"),
    (running, settle, "SUCCEEDED", cancel, "waits", "refused", "SUCCEEDED", "succeeded"),
    (running, settle, "SUCCEEDED", settle, "waits", "lost", "SUCCEEDED", "succeeded"),
    (running, settle, "SUCCEEDED", reap, "passes", "nothing", "SUCCEEDED", "succeeded"),
    (running, settle, "SUCCEEDED", heartbeat, "passes", "alive", "SUCCEEDED", "succeeded"),
    (running, settle, "SUCCEEDED", claim, "passes", "nothing", "SUCCEEDED", "succeeded"),
    (running, settle, "SUCCEEDED", requeue, "passes", "refused", "SUCCEEDED", "succeeded"),
    (running, reap, "reaped", cancel, "waits", "CANCELLED", "CANCELLED", "cancelled"),
    (running, reap, "reaped", settle, "waits", "lost", "PENDING", "reaped"),
    (running, reap, "reaped", reap, "passes", "nothing", "PENDING", "reaped"),
    (running, reap, "reaped", heartbeat, "passes", "alive", "PENDING", "reaped"),
    (running, reap, "reaped", claim, "passes", "nothing", "PENDING", "reaped"),
    (running, reap, "reaped", requeue, "passes", "refused", "PENDING", "reaped"),
    (running, heartbeat, "alive", cancel, "waits", "RUNNING", "RUNNING", "claimed"),
    (running, heartbeat, "alive", settle, "waits", "SUCCEEDED", "SUCCEEDED", "succeeded"),
    (running, heartbeat, "alive", reap, "passes", "nothing", "RUNNING", "claimed"),
    (running, heartbeat, "alive", heartbeat, "passes", "alive", "RUNNING", "claimed"),
    (running, heartbeat, "alive", claim, "passes", "nothing", "RUNNING", "claimed"),
    (pending, claim, "claimed", cancel, "waits", "RUNNING", "RUNNING", "claimed"),
    (pending, claim, "claimed", claim, "passes", "nothing", "RUNNING", "claimed"),
    (pending, claim, "claimed", settle, "passes", "lost", "RUNNING", "claimed"),
    (pending, claim, "claimed", heartbeat, "passes", "lost", "RUNNING", "claimed"),
    (pending, claim, "claimed", reap, "passes", "nothing", "RUNNING", "claimed"),
    (pending, claim, "claimed", note_route, "passes", "left out", "RUNNING", "claimed"),
    (pending, cancel, "CANCELLED", cancel, "waits", "refused", "CANCELLED", "cancelled"),
    (pending, cancel, "CANCELLED", claim, "passes", "nothing", "CANCELLED", "cancelled"),
    (pending, cancel, "CANCELLED", settle, "passes", "lost", "CANCELLED", "cancelled"),
    (pending, cancel, "CANCELLED", requeue, "passes", "refused", "CANCELLED", "cancelled"),
    (dead, requeue, "PENDING", requeue, "waits", "refused", "PENDING", "requeued"),
    (dead, requeue, "PENDING", cancel, "passes", "refused", "PENDING", "requeued"),
    (dead, requeue, "PENDING", claim, "passes", "nothing", "PENDING", "requeued"),
    (dead, requeue, "PENDING", settle, "passes", "lost", "PENDING", "requeued"),
    (dead, requeue, "PENDING", heartbeat, "passes", "lost", "PENDING", "requeued"),
    (dead, requeue, "PENDING", reap, "passes", "nothing", "PENDING", "requeued"),
]


def meeting_name(meeting: Meeting) -> str:
    state, first, _, second, waits, *_ = meeting
    return f"{second.__name__} {waits} while {first.__name__} has a {state.__name__} task"


@pytest.mark.parametrize("meeting", MEETINGS, ids=meeting_name)
def test_of_two_on_one_row_the_second_waits_or_passes_and_gets_the_right_answer(
    stage: Stage, meeting: Meeting
) -> None:
    state, first, first_answer, second, waits, second_answer, status, reason = meeting
    lease = state(stage.witness)
    with stage.held_back(first, lease) as ahead:
        if waits == "waits":
            pid, behind = stage.start(second, lease)
            assert stage.await_lock(pid, behind) in ("transactionid", "tuple")
        else:
            conn = stage.connect()
            conn.lock_timeout_seconds = AT_ONCE
            assert second(conn, lease) == second_answer
    assert ahead.result() == first_answer
    if waits == "waits":
        assert behind.result(20) == second_answer
    found = rows.row(stage.witness, lease.task_id)
    assert (found["status"], found["reason"]) == (status, reason)
    assert model.broken_promises(stage.witness, lease.task_id - 1, RETRY) == []


def test_whoever_never_waits_for_a_row_never_waits_in_any_meeting() -> None:
    waiting = {second.__name__ for _, _, _, second, waits, *_ in MEETINGS if waits == "waits"}
    assert waiting == {"cancel", "settle", "requeue"}


# --- several rows ----------------------------------------------------------------------------


def settle_all(conn: Connection, several: list[Lease]) -> list[int]:
    outcomes = [(lease, Outcome("succeeded", result={})) for lease in several]
    return [one.task_id for one in leases.settle_tasks(conn, outcomes, RETRY)]


def two_running(conn: Connection) -> list[Lease]:
    return [rows.claimed(conn).lease for _ in range(2)]


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "last first"])
def test_a_settle_that_waits_for_a_row_has_locked_none_with_a_higher_number(
    stage: Stage, turned: bool
) -> None:
    low, high = two_running(stage.witness)
    several = [high, low] if turned else [low, high]
    with stage.held_back(heartbeat, low):
        pid, behind = stage.start(settle_all, several)
        stage.await_lock(pid, behind)
        assert stage.is_free(high.task_id)
    assert sorted(behind.result(20)) == [low.task_id, high.task_id]


def test_with_another_order_in_the_statement_it_would_have_locked_one(
    stage: Stage,
) -> None:
    order = "ORDER BY task_id\n    ),\n    settled AS ("
    turned = order.replace("task_id", "task_id DESC")
    low, high = two_running(stage.witness)
    with rewritten(stage.witness, "settle_tasks", {order: turned}):
        with stage.held_back(heartbeat, low):
            pid, behind = stage.start(settle_all, [high, low])
            stage.await_lock(pid, behind)
            assert not stage.is_free(high.task_id)
        behind.result(20)


def meddle(conn: Connection, asked: int, renewed: int, taken: int, paid: int) -> None:
    """What a user, the heartbeat, the reaper and a job's model calls write, in one transaction."""
    with db.transaction(conn) as cursor:
        cursor.execute("UPDATE tasks SET cancel_requested = true WHERE task_id = %s", (asked,))
        cursor.execute(
            "UPDATE tasks SET lease_expires_at = current_instant() WHERE task_id = %s", (renewed,)
        )
        cursor.execute(
            "UPDATE tasks SET status = 'PENDING', reason = 'reaped', due = true,"
            " lease_token = NULL, lease_expires_at = NULL, reclaim_count = 1 WHERE task_id = %s",
            (taken,),
        )
        cursor.execute("UPDATE tasks SET prompt_tokens = 5 WHERE task_id = %s", (paid,))


@pytest.mark.parametrize(
    ("verdict", "ends"),
    [("succeeded", ("SUCCEEDED", "succeeded")), ("failure", ("PENDING", "retry"))],
)
def test_a_settle_judges_each_of_many_rows_as_whoever_held_it_has_left_it(
    stage: Stage, verdict: Verdict, ends: tuple[str, str]
) -> None:
    several = [rows.claimed(stage.witness).lease for _ in range(9)]
    asked, renewed, taken, paid = (lease.task_id for lease in several[1::2])
    outcomes = [
        (lease, Outcome(verdict, result={"n": 1}, error="e", prompt_tokens=7)) for lease in several
    ]
    with stage.held_back(meddle, asked, renewed, taken, paid):
        pid, behind = stage.start(leases.settle_tasks, outcomes, RETRY)
        stage.await_lock(pid, behind)
    told = {one.task_id: (one.status, one.reason) for one in behind.result(20)}
    others = {lease.task_id: ends for lease in several}
    del others[taken]
    assert told == {**others, asked: ("CANCELLED", "cancelled")}
    assert rows.row(stage.witness, taken)["reason"] == "reaped"
    for lease in several:
        seen = rows.row(stage.witness, lease.task_id)
        is_taken, is_paid = lease.task_id == taken, lease.task_id == paid
        assert seen["prompt_tokens"] == (0 if is_taken else 12 if is_paid else 7)
        assert (seen["result"] is None) == (seen["status"] != "SUCCEEDED")
    assert model.broken_promises(stage.witness, several[0].task_id - 1, RETRY) == []


def test_two_settles_of_the_same_rows_in_opposite_order_do_not_deadlock(stage: Stage) -> None:
    low, high = two_running(stage.witness)
    with stage.held_back(heartbeat, low):
        calls = [stage.start(settle_all, several) for several in ([low, high], [high, low])]
        for pid, call in calls:
            stage.await_lock(pid, call)
    settled = sorted(sorted(call.result(20)) for _, call in calls)
    assert settled == [[], [low.task_id, high.task_id]]


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "last first"])
def test_a_writer_that_waits_for_a_key_has_stored_no_later_key(stage: Stage, turned: bool) -> None:
    scope = {"idempotency_scope": "tasks", "request_hash": b"same"}
    a, b = (rows.new_task(idempotency_key=key, **scope) for key in ("a", "b"))
    with stage.held_back(db.submit_tasks, [a]) as ahead:
        pid, behind = stage.start(db.submit_tasks, [b, a] if turned else [a, b])
        stage.await_lock(pid, behind)
        conn = stage.connect()
        conn.lock_timeout_seconds = AT_ONCE
        (of_b,) = db.submit_tasks(conn, [b])
    answers = behind.result(20)
    assert [answer.replayed for answer in answers] == [True, True]
    assert {answer.task_id for answer in answers} == {ahead.result()[0].task_id, of_b.task_id}


class WithLimits(rows.Everything):
    has_limits = True


def claim_with_limits(conn: Connection) -> int:
    return len(claims.claim_tasks(conn, "w1", 1, 30, WithLimits()).tasks)


def test_claims_that_share_a_limit_take_turns_but_wait_for_nobody_else(stage: Stage) -> None:
    lease = pending(stage.witness)
    with stage.held_back(cancel, lease):
        conn = stage.connect()
        conn.lock_timeout_seconds = AT_ONCE
        assert claim_with_limits(conn) == 0
    rows.submit(stage.witness)
    with stage.held_back(claim_with_limits) as ahead:
        pid, behind = stage.start(claim_with_limits)
        assert stage.await_lock(pid, behind) == "advisory"
    assert (ahead.result(), behind.result(20)) == (1, 0)


# --- all at once -----------------------------------------------------------------------------


def play(conn: Connection, seed: int, task_ids: list[int]) -> None:
    """A user and worker in one, in a hurry: anything on any of these tasks, 150 times."""
    dice = random.Random(seed)
    held: list[Lease] = []
    for _ in range(150):
        anything = Lease(dice.choice(task_ids), "")
        moves: list[Callable[[], Any]] = [
            lambda: held.extend(task.lease for task in rows.claim(conn, 3).tasks),
            lambda: settle_all(conn, dice.sample(held, len(held))),
            lambda: [rows.settle(conn, lease, "permanent") for lease in held[-2:]],
            lambda: leases.renew_leases(conn, held, dice.choice([-1.0, 30.0])),
            lambda task=anything: requeue(conn, task),
            lambda task=anything: cancel(conn, task) if dice.random() < 0.1 else None,
            lambda: rows.reap(conn),
        ]
        dice.choice(moves)()


def test_everything_at_once_on_a_few_rows_ends_without_a_deadlock_and_keeps_every_promise(
    stage: Stage,
) -> None:
    task_ids = [rows.submit(stage.witness) for _ in range(12)]
    calls = [stage.start(play, seed, task_ids)[1] for seed in range(6)]
    failures = [failed for call in calls if (failed := call.exception(60))]
    assert [f for f in failures if isinstance(f, DatabaseUnavailable)] == []
    assert failures == []
    assert model.broken_promises(stage.witness, min(task_ids) - 1, RETRY) == []

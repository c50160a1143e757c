"""queries/leases.py: the token is the only right to write; heartbeat and reaper."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

import db
from config import Retry
from db import Connection
from queries import leases
from queries.leases import ClaimedTask, Lease, Outcome
from tests.support import rows
from tests.support.functions import rewritten
from tests.support.rows import RETRY, claimed, expire, row, set_clock, settle

BASE = datetime(2026, 1, 1, tzinfo=UTC)
VERDICTS = ["succeeded", "failure", "permanent", "deadline", "released", "outage"]
NOBODYS_TOKEN = "00000000-0000-4000-8000-000000000000"


def state(conn: Connection, task_id: int) -> tuple[rows.Row, list[rows.Row]]:
    """Everything that a late worker must not change."""
    return row(conn, task_id), rows.audit(conn, task_id)


def taken_over(conn: Connection) -> tuple[ClaimedTask, ClaimedTask]:
    """A task that w1 held too long and that w2 holds now: (the stale claim, the fresh one)."""
    stale = claimed(conn, "w1")
    expire(conn, stale.task_id)
    rows.reap(conn)
    return stale, rows.claim_only(conn, stale.task_id, "w2")


# --- settle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_worker_that_lost_its_lease_changes_nothing_while_another_works(
    conn: Connection, verdict: str
) -> None:
    stale, fresh = taken_over(conn)
    before = state(conn, stale.task_id)
    assert settle(conn, stale.lease, verdict, cost=Decimal(1), completion_tokens=9) is None
    assert state(conn, stale.task_id) == before
    assert settle(conn, fresh.lease, verdict) is not None


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_worker_that_lost_its_lease_changes_nothing_after_another_has_finished(
    conn: Connection, verdict: str
) -> None:
    stale, fresh = taken_over(conn)
    settle(conn, fresh.lease, "succeeded", result={"text": "of the second"})
    before = state(conn, stale.task_id)
    assert settle(conn, stale.lease, verdict, cost=Decimal(1), completion_tokens=9) is None
    assert state(conn, stale.task_id) == before


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_task_is_settled_once_however_often_its_outcome_is_written(
    conn: Connection, verdict: str
) -> None:
    task = claimed(conn)
    assert settle(conn, task.lease, verdict) is not None
    before = state(conn, task.task_id)
    assert settle(conn, task.lease, verdict) is None
    assert settle(conn, task.lease, "succeeded") is None
    assert state(conn, task.task_id) == before


def test_a_worker_whose_task_was_reaped_and_waits_changes_nothing(conn: Connection) -> None:
    task = claimed(conn)
    expire(conn, task.task_id)
    rows.reap(conn)
    before = state(conn, task.task_id)
    assert settle(conn, task.lease, "succeeded") is None
    assert state(conn, task.task_id) == before


def test_the_token_of_one_task_is_no_right_to_another(conn: Connection) -> None:
    first, second = claimed(conn), claimed(conn)
    before = state(conn, second.task_id)
    assert settle(conn, Lease(second.task_id, first.lease.token), "succeeded") is None
    assert state(conn, second.task_id) == before


def test_an_expired_lease_that_nobody_took_over_still_settles(conn: Connection) -> None:
    task = claimed(conn)
    expire(conn, task.task_id)
    assert settle(conn, task.lease, "succeeded") is not None
    assert rows.reap(conn) == []


def test_one_stale_outcome_in_a_batch_does_not_keep_the_others_from_being_written(
    conn: Connection,
) -> None:
    stale, fresh = taken_over(conn)
    other = claimed(conn)
    outcomes = [(task.lease, Outcome("succeeded", result={})) for task in (stale, other)]
    settled = leases.settle_tasks(conn, outcomes, RETRY)
    assert [one.task_id for one in settled] == [other.task_id]
    assert row(conn, fresh.task_id)["status"] == "RUNNING"


@pytest.mark.parametrize("stale_first", [True, False])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_worker_that_got_its_lost_task_back_writes_only_what_came_of_the_fresh_lease(
    conn: Connection, verdict: str, stale_first: bool
) -> None:
    stale, fresh = taken_over(conn)
    outcomes = [
        (stale.lease, Outcome(verdict, error="old", result={"text": "old"}, cost=Decimal(9))),  # type: ignore[arg-type]
        (fresh.lease, Outcome("succeeded", result={"text": "new"}, cost=Decimal(1))),
    ]
    settled = leases.settle_tasks(conn, outcomes if stale_first else outcomes[::-1], RETRY)
    assert [(one.task_id, one.status) for one in settled] == [(fresh.task_id, "SUCCEEDED")]
    seen = row(conn, fresh.task_id)
    assert (seen["result"], seen["cost"]) == ({"text": "new"}, 1)


def test_without_the_token_in_the_statement_a_late_worker_would_have_won(
    conn: Connection,
) -> None:
    # The control of the tests above: it is the token that holds the late worker back.
    stale, _ = taken_over(conn)
    with rewritten(conn, "settle_tasks", {"AND t.lease_token IS NOT DISTINCT FROM o.token": ""}):
        assert settle(conn, stale.lease, "succeeded") is not None


# --- heartbeat -------------------------------------------------------------------------------


def test_a_heartbeat_renews_all_leases_of_a_process_from_now_on(conn: Connection) -> None:
    set_clock(conn, BASE.isoformat())
    tasks = [claimed(conn) for _ in range(3)]
    set_clock(conn, (BASE + timedelta(seconds=10)).isoformat())
    beat = leases.renew_leases(conn, [task.lease for task in tasks], 30)
    assert (beat.lost, beat.cancelled) == (set(), set())
    ends = {row(conn, task.task_id)["lease_expires_at"] for task in tasks}
    assert ends == {BASE + timedelta(seconds=40)}


def test_a_heartbeat_renews_a_lease_that_ran_out_and_that_nobody_took(conn: Connection) -> None:
    task = claimed(conn)
    expire(conn, task.task_id)
    assert leases.renew_leases(conn, [task.lease], 30).lost == set()
    assert rows.reap(conn) == []


def test_a_heartbeat_tells_which_leases_are_lost_and_leaves_their_rows_alone(
    conn: Connection,
) -> None:
    stale, fresh = taken_over(conn)
    settled, kept = claimed(conn), claimed(conn)
    settle(conn, settled.lease, "succeeded")
    before = state(conn, fresh.task_id)
    held = [stale.lease, settled.lease, kept.lease, Lease(2**40, NOBODYS_TOKEN)]
    beat = leases.renew_leases(conn, held, 3600)
    assert beat.lost == set(held) - {kept.lease}
    assert state(conn, fresh.task_id) == before


def test_a_heartbeat_tells_which_tasks_are_to_be_cancelled_and_renews_them_too(
    conn: Connection,
) -> None:
    wanted, other = claimed(conn), claimed(conn)
    rows.ask_to_cancel(conn, wanted.task_id)
    expire(conn, wanted.task_id)
    beat = leases.renew_leases(conn, [wanted.lease, other.lease], 30)
    assert (beat.lost, beat.cancelled) == (set(), {wanted.lease})
    assert rows.reap(conn) == []  # it still runs, until its worker has stopped it


def test_a_heartbeat_does_not_wait_for_a_row_that_a_settle_holds(
    conn: Connection, connect: Callable[[], Connection]
) -> None:
    held, free = claimed(conn), claimed(conn)
    for task in (held, free):
        expire(conn, task.task_id)
    conn.lock_timeout_seconds = 0.5  # a heartbeat that waits fails
    with db.transaction(connect()) as cursor:
        cursor.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (held.task_id,))
        beat = leases.renew_leases(conn, [held.lease, free.lease], 3600)
    assert beat.lost == set()  # its token is still there, whoever holds the row
    assert [reaped.task_id for reaped in rows.reap(conn)] == [held.task_id]


def test_a_heartbeat_without_leases_is_no_fault(conn: Connection) -> None:
    assert leases.renew_leases(conn, [], 30) == leases.Beat()


# --- reaper ----------------------------------------------------------------------------------


def test_the_reaper_takes_back_what_ran_out_and_nothing_else(conn: Connection) -> None:
    lost, alive = claimed(conn), claimed(conn)
    expire(conn, lost.task_id)
    assert [(one.task_id, one.reason) for one in rows.reap(conn)] == [(lost.task_id, "reaped")]
    seen = row(conn, lost.task_id)
    assert (seen["status"], seen["reason"], seen["reclaim_count"]) == ("PENDING", "reaped", 1)
    assert (seen["attempt"], seen["delivery_count"], seen["retry_count"]) == (1, 1, 0)
    assert seen["lease_token"] is seen["lease_expires_at"] is None
    assert row(conn, alive.task_id)["status"] == "RUNNING"
    assert rows.reap(conn) == []


def test_a_task_whose_worker_was_lost_three_times_is_a_dead_letter(conn: Connection) -> None:
    task_id = rows.submit(conn)
    for attempt in (1, 2, 3):
        task = rows.claim_only(conn, task_id, f"w{attempt}")
        assert (task.attempt, task.delivery_count) == (attempt, attempt)
        expire(conn, task_id)
        (reaped,) = rows.reap(conn)
    assert (reaped.status, reaped.reason) == ("FAILED", "max_delivery")
    seen = row(conn, task_id)
    assert (seen["delivery_count"], seen["retry_count"], seen["reclaim_count"]) == (3, 0, 3)
    assert "handed out 3 times" in seen["last_error"]
    assert "w3" in seen["last_error"]
    assert rows.reasons(conn, task_id)[-2:] == ["claimed", "max_delivery"]


def test_failures_and_hand_backs_between_two_losses_are_no_losses(conn: Connection) -> None:
    task_id = rows.submit(conn, max_retry=10)
    for verdict in ("failure", "lost", "released", "outage", "failure", "lost", "failure"):
        task = rows.claim_only(conn, task_id)
        if verdict == "lost":
            expire(conn, task_id)
            assert [one.reason for one in rows.reap(conn)] == ["reaped"]
        else:
            settle(conn, task.lease, verdict)
            rows.make_due(conn, task_id)
    rows.claim_only(conn, task_id)
    expire(conn, task_id)
    assert [one.reason for one in rows.reap(conn)] == ["max_delivery"]
    seen = row(conn, task_id)
    assert (seen["attempt"], seen["delivery_count"], seen["retry_count"]) == (8, 6, 3)


def test_the_cap_of_lost_hand_outs_comes_from_the_settings(conn: Connection) -> None:
    task = claimed(conn)
    expire(conn, task.task_id)
    assert [one.reason for one in rows.reap(conn, Retry(max_delivery=1))] == ["max_delivery"]


def test_a_lost_task_that_was_to_be_cancelled_is_cancelled(conn: Connection) -> None:
    task = claimed(conn)
    rows.ask_to_cancel(conn, task.task_id)
    expire(conn, task.task_id)
    assert [(one.status, one.reason) for one in rows.reap(conn)] == [("CANCELLED", "cancelled")]
    assert row(conn, task.task_id)["finished_at"] is not None


def test_what_the_reaper_takes_back_is_spread_over_some_seconds(conn: Connection) -> None:
    tasks = [claimed(conn) for _ in range(30)]
    for task in tasks:
        expire(conn, task.task_id)
    delays = [one.delay_seconds for one in leases.reap_tasks(conn, RETRY, 3.0)]
    assert len(set(delays)) > 20
    assert all(0 <= delay <= 3 for delay in delays)


def test_the_reaper_goes_forward_by_number_and_can_be_kept_to_one_task(conn: Connection) -> None:
    first, second, third = (claimed(conn).task_id for _ in range(3))
    for task_id in (first, second, third):
        expire(conn, task_id)
    assert [one.task_id for one in rows.reap(conn, only=second)] == [second]
    assert [one.task_id for one in rows.reap(conn, after=first)] == [third]
    assert [one.task_id for one in rows.reap(conn)] == [first]


def test_a_row_that_somebody_holds_does_not_hold_up_the_reaper(
    conn: Connection, connect: Callable[[], Connection]
) -> None:
    held, free = claimed(conn), claimed(conn)
    for task in (held, free):
        expire(conn, task.task_id)
    conn.lock_timeout_seconds = 0.5
    with db.transaction(connect()) as cursor:
        cursor.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (held.task_id,))
        assert [one.task_id for one in rows.reap(conn)] == [free.task_id]
    assert [one.task_id for one in rows.reap(conn)] == [held.task_id]


# --- drain -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "is_work"),
    [
        ("PENDING", True), ("RUNNING", True), ("BLOCKED", False), ("AWAITING_APPROVAL", False),
        ("SUCCEEDED", False), ("FAILED", False), ("CANCELLED", False),
    ],
)  # fmt: skip
def test_there_is_work_while_something_is_pending_or_running(
    conn: Connection, status: str, is_work: bool
) -> None:
    assert not leases.has_work(conn)
    rows.bring_to(conn, status)
    assert leases.has_work(conn) is is_work


def test_a_delayed_task_is_work_too(conn: Connection) -> None:
    rows.submit(conn, delay_seconds=3600)
    assert leases.has_work(conn)

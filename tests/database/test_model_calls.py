"""queries/model_calls.py: tokens are reserved before a call, and no budget is ever exceeded."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

import db
from db import Connection, Row
from errors import BudgetRefused, LeaseLost
from queries import model_calls
from queries.leases import ClaimedTask, Lease
from queries.model_calls import CallKey, CallReplied, CallReserved
from tests.conftest import administrator
from tests.support import rows
from tests.support.rows import sql
from tests.support.stage import Stage

Connect = Callable[[], Connection]
KEY = CallKey("coder", "run-1", 0)


@pytest.fixture(autouse=True)
def _empty_ledger(database_url: str) -> None:
    with administrator(database_url) as cursor:
        cursor.execute("TRUNCATE model_calls, tenant_tokens")


def job(conn: Connection, **fields: Any) -> ClaimedTask:
    return rows.claimed(conn, **{"kind": "agent", "payload": {"task": "t"}, **fields})


def jobs(conn: Connection, count: int, **fields: Any) -> list[ClaimedTask]:
    for _ in range(count):
        rows.submit(conn, **{"kind": "agent", "payload": {"task": "t"}, **fields})
    return rows.claim(conn, count).tasks


def key(ordinal: int) -> CallKey:
    return replace(KEY, ordinal=ordinal)


def reserve(
    conn: Connection,
    task: ClaimedTask,
    tokens: int,
    *,
    which: CallKey = KEY,
    budget: int | None = None,
    per_day: int = 0,
) -> int:
    """The number of a call that may be made."""
    reserved = model_calls.reserve_call(conn, task, which, tokens, budget, per_day)
    assert isinstance(reserved, CallReserved)
    return reserved.call_id


def refused(conn: Connection, task: ClaimedTask, tokens: int, **limits: Any) -> str:
    with pytest.raises(BudgetRefused) as told:
        reserve(conn, task, tokens, **limits)
    return told.value.which


USAGE: dict[str, Any] = {
    "prompt_tokens": 10,
    "completion_tokens": 20,
    "cost": Decimal("0.00000001"),
    "route": "local",
    "model": "m:1",
    "reply": "print('é 🙂')",
}


def end(conn: Connection, task: ClaimedTask, call_id: int, **changed: Any) -> None:
    model_calls.end_call(conn, task, call_id, **{**USAGE, **changed})


def calls(conn: Connection) -> list[Row]:
    return sql(conn, "SELECT * FROM model_calls ORDER BY call_id")


def days(conn: Connection) -> dict[str, int]:
    found = sql(conn, "SELECT day::text, taken FROM tenant_tokens ORDER BY day")
    return {row["day"]: row["taken"] for row in found}


def taken(conn: Connection) -> int:
    """By all tenants, on all days."""
    return int(sql(conn, "SELECT coalesce(sum(taken), 0) AS n FROM tenant_tokens")[0]["n"])


def used(conn: Connection, task: ClaimedTask) -> tuple[int, int, Decimal | None]:
    row = rows.row(conn, task.task_id)
    return row["prompt_tokens"], row["completion_tokens"], row["cost"]


# --- one call --------------------------------------------------------------------------------


def test_a_call_is_reserved_before_it_and_written_with_what_it_used_after_it(
    conn: Connection,
) -> None:
    task = job(conn)
    call_id = reserve(conn, task, 100)
    (call,) = calls(conn)
    assert {**call, "reserved_at": None} == {
        "call_id": call_id,
        "task_id": task.task_id,
        **vars(KEY),
        "reserved_tokens": 100,
        **dict.fromkeys(("reserved_at", "ended_at", "prompt_tokens", "completion_tokens")),
        **dict.fromkeys(("cost", "route", "model", "reply")),
    }
    end(conn, task, call_id)
    (call,) = calls(conn)
    assert {name: call[name] for name in USAGE} == USAGE
    assert call["ended_at"] >= call["reserved_at"]


def test_the_task_has_the_tokens_the_cost_and_the_model_of_all_its_calls(conn: Connection) -> None:
    task = job(conn)
    assert used(conn, task) == (0, 0, None)
    end(conn, task, reserve(conn, task, 100), cost=None)
    assert used(conn, task) == (10, 20, None)
    end(conn, task, reserve(conn, task, 100, which=key(1)), cost=Decimal("0.1"))
    end(conn, task, reserve(conn, task, 100, which=key(2)), route="cloud", cost=Decimal("0.2"))
    assert used(conn, task) == (30, 60, Decimal("0.3"))
    row = rows.row(conn, task.task_id)
    assert (row["route"], row["model"]) == ("cloud", "m:1")
    rows.settle(conn, task.lease, "succeeded")
    assert used(conn, task) == (30, 60, Decimal("0.3"))


def test_a_node_that_runs_again_gets_the_reply_and_reserves_nothing(conn: Connection) -> None:
    stale = job(conn)
    end(conn, stale, reserve(conn, stale, 100, budget=100, per_day=100))
    again = taken_over(conn, stale)
    replied = model_calls.reserve_call(conn, again, KEY, 100, 100, 100)
    assert replied == CallReplied(USAGE["reply"])
    assert len(calls(conn)) == 1
    assert taken(conn) == 30


def test_an_empty_reply_is_one_as_well(conn: Connection) -> None:
    task = job(conn)
    end(conn, task, reserve(conn, task, 100), reply="")
    assert model_calls.reserve_call(conn, task, KEY, 100, None, 0) == CallReplied("")


def test_a_reply_is_that_of_its_own_call(conn: Connection) -> None:
    first, second = jobs(conn, 2)
    end(conn, first, reserve(conn, first, 100))
    reserve(conn, second, 100)
    reserve(conn, first, 100, which=key(1))
    reserve(conn, first, 100, which=replace(KEY, node_run="run-2"))


def test_a_call_that_failed_is_paid_and_may_be_made_again(conn: Connection) -> None:
    task = job(conn)
    end(conn, task, reserve(conn, task, 70, budget=100), reply=None)
    assert used(conn, task)[:2] == (10, 20)
    assert refused(conn, task, 71, budget=100) == "token_budget"
    end(conn, task, reserve(conn, task, 70, budget=100))
    assert model_calls.reserve_call(conn, task, KEY, 70, 100, 0) == CallReplied(USAGE["reply"])


def test_a_call_that_no_server_took_uses_nothing(conn: Connection) -> None:
    task = job(conn)
    model_calls.release_call(conn, task, reserve(conn, task, 100, budget=100, per_day=100))
    assert used(conn, task) == (0, 0, None)
    assert rows.row(conn, task.task_id)["model"] is None
    assert taken(conn) == 0
    reserve(conn, task, 100, budget=100, per_day=100)


def test_a_call_whose_end_nobody_wrote_stays_spent(conn: Connection) -> None:
    stale = job(conn)
    reserve(conn, stale, 60, budget=100, per_day=100)
    again = taken_over(conn, stale)
    assert refused(conn, again, 41, budget=100) == "token_budget"
    assert refused(conn, again, 41, per_day=100) == "tenant_tokens_per_day"
    reserve(conn, again, 40, budget=100, per_day=100)


def test_a_second_end_of_a_call_changes_nothing(conn: Connection) -> None:
    task = job(conn)
    call_id = reserve(conn, task, 100, per_day=1000)
    end(conn, task, call_id)
    before = calls(conn), used(conn, task), taken(conn)
    end(conn, task, call_id, prompt_tokens=99, reply="another")
    model_calls.release_call(conn, task, call_id)
    assert (calls(conn), used(conn, task), taken(conn)) == before


def test_the_call_of_another_job_is_not_ended(conn: Connection) -> None:
    first, second = jobs(conn, 2)
    call_id = reserve(conn, first, 100)
    end(conn, second, call_id)
    assert calls(conn)[0]["ended_at"] is None
    assert used(conn, second) == (0, 0, None)


def test_of_two_calls_with_one_key_the_first_reply_stays_and_both_are_paid(
    conn: Connection,
) -> None:
    task = job(conn)
    first, second = reserve(conn, task, 100), reserve(conn, task, 100)
    end(conn, task, second, reply="of the faster")
    end(conn, task, first, reply="of the slower")
    assert [call["reply"] for call in calls(conn)] == [None, "of the faster"]
    assert used(conn, task)[:2] == (20, 40)


def test_numbers_of_calls_and_tokens_may_be_large(conn: Connection) -> None:
    task = job(conn)
    sql(conn, "SELECT setval(pg_get_serial_sequence('model_calls', 'call_id'), 1::bigint << 33)")
    call_id = reserve(conn, task, 2**40, budget=2**41, per_day=2**41)
    end(conn, task, call_id, prompt_tokens=2**39, completion_tokens=2**38)
    assert used(conn, task)[:2] == (2**39, 2**38)
    assert taken(conn) == 2**39 + 2**38


# --- budgets ---------------------------------------------------------------------------------


def test_the_last_token_of_a_budget_may_be_reserved_and_no_more(conn: Connection) -> None:
    task = job(conn)
    assert refused(conn, task, 101, budget=100) == "token_budget"
    reserve(conn, task, 60, budget=100)
    assert refused(conn, task, 41, budget=100) == "token_budget"
    reserve(conn, task, 40, budget=100)
    assert refused(conn, task, 1, budget=100) == "token_budget"
    assert [call["reserved_tokens"] for call in calls(conn)] == [60, 40]


def test_the_last_token_of_a_tenants_day_may_be_reserved_and_no_more(conn: Connection) -> None:
    first, second = jobs(conn, 2)
    (other,) = jobs(conn, 1, tenant="other")
    assert refused(conn, first, 101, per_day=100) == "tenant_tokens_per_day"
    reserve(conn, first, 60, per_day=100)
    assert refused(conn, second, 41, per_day=100) == "tenant_tokens_per_day"
    reserve(conn, second, 40, per_day=100)
    assert refused(conn, first, 1, per_day=100) == "tenant_tokens_per_day"
    reserve(conn, other, 100, per_day=100)
    assert len(calls(conn)) == 3
    assert taken(conn) == 200


def test_what_a_call_did_not_use_can_be_reserved_again(conn: Connection) -> None:
    task = job(conn)
    end(conn, task, reserve(conn, task, 100, budget=100, per_day=100))
    limits = {"budget": 100, "per_day": 100, "which": key(1)}
    assert refused(conn, task, 71, **limits) == "token_budget"
    reserve(conn, task, 70, **limits)


def test_a_call_that_used_more_than_it_reserved_is_counted_whole(conn: Connection) -> None:
    task = job(conn)
    end(conn, task, reserve(conn, task, 5, budget=100, per_day=100))
    assert taken(conn) == 30
    assert refused(conn, task, 71, which=key(1), budget=100) == "token_budget"


def test_what_the_budget_of_the_job_refuses_takes_nothing_from_the_tenant(
    conn: Connection,
) -> None:
    task = job(conn)
    assert refused(conn, task, 50, budget=49, per_day=100) == "token_budget"
    assert refused(conn, task, 101, budget=101, per_day=100) == "tenant_tokens_per_day"
    assert calls(conn) == []
    assert days(conn) == {}


def test_without_a_limit_for_tenants_their_day_is_not_counted(conn: Connection) -> None:
    task = job(conn)
    end(conn, task, reserve(conn, task, 100))
    assert days(conn) == {}


def test_a_day_ends_at_midnight_utc_and_what_is_left_goes_back_to_the_day_it_came_from(
    conn: Connection,
) -> None:
    sql(conn, "SET timezone = 'Asia/Tokyo'")
    rows.set_clock(conn, "2026-03-01 23:59:59+00")
    task = job(conn)
    late = reserve(conn, task, 100, per_day=100)
    rows.set_clock(conn, "2026-03-02 00:00:00+00")
    reserve(conn, task, 100, which=key(1), per_day=100)
    end(conn, task, late)
    assert days(conn) == {"2026-03-01": 30, "2026-03-02": 100}


# --- the fence -------------------------------------------------------------------------------


def taken_over(conn: Connection, stale: ClaimedTask) -> ClaimedTask:
    rows.expire(conn, stale.task_id)
    rows.reap(conn)
    return rows.claim_only(conn, stale.task_id, "w2")


def waits_again(conn: Connection, stale: ClaimedTask) -> None:
    rows.expire(conn, stale.task_id)
    rows.reap(conn)


def settled(conn: Connection, stale: ClaimedTask) -> None:
    rows.settle(conn, stale.lease, "succeeded")


LOSSES = [taken_over, waits_again, settled]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_worker_that_lost_its_lease_writes_nothing(
    conn: Connection, lose: Callable[[Connection, ClaimedTask], Any]
) -> None:
    stale = job(conn)
    call_id = reserve(conn, stale, 100, per_day=1000)
    lose(conn, stale)
    before = calls(conn), taken(conn), rows.row(conn, stale.task_id)
    with pytest.raises(LeaseLost):
        reserve(conn, stale, 1, which=key(1), per_day=1000)
    with pytest.raises(LeaseLost):
        end(conn, stale, call_id)
    with pytest.raises(LeaseLost):
        model_calls.release_call(conn, stale, call_id)
    assert (calls(conn), taken(conn), rows.row(conn, stale.task_id)) == before


def test_a_reply_is_not_given_to_a_worker_that_lost_its_lease(conn: Connection) -> None:
    stale = job(conn)
    end(conn, stale, reserve(conn, stale, 100))
    taken_over(conn, stale)
    with pytest.raises(LeaseLost):
        model_calls.reserve_call(conn, stale, KEY, 100, None, 0)


def test_a_job_that_is_to_be_cancelled_still_writes_what_its_call_used(conn: Connection) -> None:
    task = job(conn)
    call_id = reserve(conn, task, 100)
    rows.ask_to_cancel(conn, task.task_id)
    end(conn, task, call_id)
    assert used(conn, task)[:2] == (10, 20)


def test_nobodys_token_is_no_lease(conn: Connection) -> None:
    task = job(conn)
    forged = replace(task, lease=Lease(task.task_id, "00000000-0000-4000-8000-000000000000"))
    with pytest.raises(LeaseLost):
        reserve(conn, forged, 1)


# --- two at once -----------------------------------------------------------------------------


@contextlib.contextmanager
def reserved_but_not_committed(
    conn: Connection, task: ClaimedTask, tokens: int, budget: int | None, per_day: int
) -> Iterator[None]:
    values = {
        "task_id": task.task_id,
        "token": task.lease.token,
        **vars(key(1)),
        "tokens": tokens,
        "token_budget": budget,
        "tokens_per_day": per_day,
    }
    with db.transaction(conn) as cursor:
        cursor.execute(model_calls.RESERVE_CALL, values)
        (found,) = cursor.fetchall()
        assert found["call_id"] is not None
        yield


def try_to_reserve(conn: Connection, task: ClaimedTask, budget: int | None, per_day: int) -> str:
    try:
        model_calls.reserve_call(conn, task, KEY, 60, budget, per_day)
    except BudgetRefused as told:
        return told.which
    return "reserved"


def test_two_calls_of_one_job_do_not_both_fit_into_its_last_tokens(
    stage: Stage, connect: Connect
) -> None:
    task = job(stage.witness)
    with reserved_but_not_committed(connect(), task, 60, 100, 0):
        pid, second = stage.start(try_to_reserve, task, 100, 0)
        stage.await_lock(pid, second)
    assert second.result(20) == "token_budget"


def test_two_jobs_of_one_tenant_do_not_both_fit_into_its_last_tokens(
    stage: Stage, connect: Connect
) -> None:
    first, other = jobs(stage.witness, 2)
    with reserved_but_not_committed(connect(), first, 60, None, 100):
        pid, second = stage.start(try_to_reserve, other, None, 100)
        stage.await_lock(pid, second)
    assert second.result(20) == "tenant_tokens_per_day"


def test_a_lease_that_is_taken_over_while_a_call_waits_for_the_row_is_lost(
    stage: Stage, connect: Connect
) -> None:
    task = job(stage.witness)
    with db.transaction(connect()) as cursor:
        cursor.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (task.task_id,))
        pid, second = stage.start(try_to_reserve, task, None, 0)
        stage.await_lock(pid, second)
        cursor.execute(
            "UPDATE tasks SET status = 'PENDING', reason = 'released', lease_token = NULL, "
            "lease_expires_at = NULL WHERE task_id = %s",
            (task.task_id,),
        )
    with pytest.raises(LeaseLost):
        second.result(20)
    assert calls(stage.witness) == []


ENOUGH, MOST_AT_ONCE = 100_000, 90


def spend(conn: Connection, task: ClaimedTask, thread: int, budget: int, per_day: int) -> str:
    """Call until the smallest call is refused; by what."""
    chance = random.Random(f"{task.task_id} {thread}")
    for ordinal in range(1000):
        which = CallKey("coder", f"run-{thread}", ordinal)
        tokens = chance.randint(1, MOST_AT_ONCE)
        try:
            call_id = reserve(conn, task, tokens, which=which, budget=budget, per_day=per_day)
        except BudgetRefused as told:
            if tokens == 1:
                return told.which
            continue
        match chance.randint(0, 3):
            case 0:
                model_calls.release_call(conn, task, call_id)
            case 1:
                end(conn, task, call_id, prompt_tokens=0, completion_tokens=tokens // 2)
            case 2:
                end(conn, task, call_id, prompt_tokens=tokens, completion_tokens=0)
            case _:
                pass  # nobody writes its end
    raise AssertionError("nothing ever refused a call")


def spent_by(conn: Connection, task: ClaimedTask) -> int:
    statement = """
        SELECT coalesce(sum(coalesce(prompt_tokens + completion_tokens, reserved_tokens)), 0)
            AS spent
        FROM model_calls WHERE task_id = %(task_id)s
    """
    return int(sql(conn, statement, task_id=task.task_id)[0]["spent"])


@pytest.mark.parametrize(
    ("refused_by", "budget", "per_day"),
    [("token_budget", 1000, ENOUGH), ("tenant_tokens_per_day", ENOUGH, 4000)],
)
def test_four_jobs_of_a_tenant_with_three_calls_at_once_use_up_their_budget_and_never_more(
    connect: Connect,
    conn: Connection,
    threads: ThreadPoolExecutor,
    refused_by: str,
    budget: int,
    per_day: int,
) -> None:
    leased = jobs(conn, 4)
    running = [
        threads.submit(spend, connect(), task, thread, budget, per_day)
        for task in leased
        for thread in range(3)
    ]
    assert {one.result(60) for one in running} == {refused_by}
    spent = [spent_by(conn, task) for task in leased]
    assert sum(spent) == taken(conn)
    assert spent == [budget] * 4 if refused_by == "token_budget" else sum(spent) == per_day
    for task in leased:
        mine = [call for call in calls(conn) if call["task_id"] == task.task_id]
        assert used(conn, task)[:2] == (
            sum(call["prompt_tokens"] or 0 for call in mine),
            sum(call["completion_tokens"] or 0 for call in mine),
        )

"""queries/leases.py, claim_tasks: who gets what, in which order, and how much is left."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

import db
from db import Connection
from queries import claims
from queries.claims import Wanted
from tests.support import rows
from tests.support.functions import rewritten
from tests.support.rows import claim, row, set_clock, submit
from tests.support.stage import Stage

BASE = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True, params=["in one message", "after a look"])
def way_to_claim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's policy decides between the two."""
    monkeypatch.setattr(rows.Everything, "looks_first", request.param == "after a look")


def numbers(found: rows.Claim) -> list[int]:
    return [task.task_id for task in found.tasks]


def test_the_oldest_task_goes_first(conn: Connection) -> None:
    tasks = [submit(conn) for _ in range(3)]
    assert [numbers(claim(conn)) for _ in range(4)] == [[task] for task in tasks] + [[]]


def test_a_higher_priority_goes_before_a_lower_number(conn: Connection) -> None:
    low, high, highest, also_high = (submit(conn, priority=p) for p in (0, 5, 9, 5))
    assert numbers(claim(conn, 3)) == [highest, high, also_high]
    assert numbers(claim(conn, 3)) == [low]


@pytest.mark.parametrize("tenants", [1, 2, 3, 7])
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5])
def test_never_more_tasks_are_claimed_than_slots_are_free(
    conn: Connection, slots: int, tenants: int
) -> None:
    for number in range(20):
        submit(conn, tenant=f"t{number % tenants}")
    found = claim(conn, slots)
    assert len(found.tasks) == slots
    running = db.metrics(conn)["by_status"]
    assert running == {"RUNNING": slots, "PENDING": 20 - slots}


def test_a_claimed_task_is_running_with_a_lease_and_its_counters_have_gone_up(
    conn: Connection,
) -> None:
    task_id = submit(conn, timeout_seconds=7, requested_route="cloud", payload={"prompt": "p"})
    set_clock(conn, "2026-01-01T00:00:00Z")
    sql_now = "UPDATE tasks SET available_at = current_instant()"
    rows.sql(conn, sql_now)
    (task,) = claim(conn, worker="host-1", lease_seconds=45).tasks
    seen = row(conn, task_id)
    assert (seen["status"], seen["reason"], seen["worker"]) == ("RUNNING", "claimed", "host-1")
    assert seen["lease_token"] == task.lease.token
    assert seen["lease_expires_at"] == BASE + timedelta(seconds=45)
    assert seen["started_at"] == BASE
    assert not seen["due"]
    assert (seen["attempt"], seen["delivery_count"], seen["retry_count"]) == (1, 1, 0)
    assert (task.attempt, task.delivery_count, task.retry_count) == (1, 1, 0)
    assert (task.kind, task.payload, task.requested_route) == ("prompt", {"prompt": "p"}, "cloud")
    assert task.timeout_seconds == 7


def test_every_claim_takes_a_token_that_no_claim_had_before(conn: Connection) -> None:
    task_id = submit(conn)
    tokens = set()
    for _ in range(20):
        task = rows.claim_only(conn, task_id)
        tokens.add(task.lease.token)
        rows.settle(conn, task.lease, "released")
    assert len(tokens) == 20
    assert row(conn, task_id)["attempt"] == 20


# --- what is not yet due ---------------------------------------------------------------------


def test_a_delayed_task_is_handed_out_at_its_time_and_not_before(conn: Connection) -> None:
    set_clock(conn, BASE.isoformat())
    task_id = submit(conn, delay_seconds=60)
    early = claim(conn)
    assert (early.tasks, early.depth, early.next_due_seconds) == ([], 0, 60)
    set_clock(conn, (BASE + timedelta(seconds=45)).isoformat())
    assert claim(conn).next_due_seconds == 15
    set_clock(conn, (BASE + timedelta(seconds=60)).isoformat())
    on_time = claim(conn)
    assert (numbers(on_time), on_time.next_due_seconds) == ([task_id], None)


def test_a_delayed_task_of_a_high_priority_does_not_stand_in_the_way(conn: Connection) -> None:
    for _ in range(5):
        submit(conn, priority=9, delay_seconds=3600)
    due = submit(conn)
    found = claim(conn, 4)
    assert numbers(found) == [due]
    assert found.next_due_seconds == pytest.approx(3600, abs=60)


def test_what_became_due_competes_by_priority_with_what_was_due(conn: Connection) -> None:
    submit(conn)
    urgent = submit(conn, priority=1, delay_seconds=3600)
    rows.make_due(conn, urgent)
    assert numbers(claim(conn)) == [urgent]


# --- depth -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("due", "slots", "depth"), [(0, 2, 0), (2, 2, 0), (3, 2, 1), (7, 2, 5)])
def test_the_depth_counts_due_tasks_without_the_batch_itself(
    conn: Connection, due: int, slots: int, depth: int
) -> None:
    for _ in range(due):
        submit(conn)
    submit(conn, delay_seconds=3600)
    assert claim(conn, slots, depth_wanted=5).depth == depth


def test_the_depth_is_counted_only_as_far_as_it_matters(conn: Connection) -> None:
    for _ in range(30):
        submit(conn)
    assert claim(conn, 2, depth_wanted=5).depth == 6  # more than 5; how many more, nobody asks


def test_running_and_final_tasks_are_no_depth(conn: Connection) -> None:
    for status in ("RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "BLOCKED"):
        rows.bring_to(conn, status)
    assert claim(conn).depth == 0


# --- whether to look again -------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7, 30])
@pytest.mark.parametrize("of_tenants", [(), (1,), (5,), (5, 1, 1), (1, 2, 3, 4), (1,) * 9])
def test_who_claims_until_a_claim_says_that_nothing_is_left_has_all(
    conn: Connection, of_tenants: tuple[int, ...], slots: int
) -> None:
    for number, tasks in enumerate(of_tenants):
        for _ in range(tasks):
            submit(conn, tenant=f"t{number}", priority=tasks)
    after = ""
    for _ in range(sum(of_tenants) + 1):
        found = claim(conn, slots, after_tenant=after)
        after = found.last_tenant or ""
        if not found.is_any_left:
            break
    assert rows.sql(conn, "SELECT count(*) AS n FROM tasks WHERE due") == [{"n": 0}]


def test_a_claim_that_leaves_slots_free_needs_no_second_one(conn: Connection) -> None:
    for number in range(3):
        submit(conn, tenant=f"t{number}")
    found = claim(conn, 6)
    assert (len(found.tasks), found.is_any_left) == (3, False)


def test_what_somebody_else_holds_may_be_left(
    conn: Connection, connect: Callable[[], Connection]
) -> None:
    """A claim locks more than it takes; or it rolls back: and of neither a notification tells."""
    held, free = submit(conn), submit(conn)
    with db.transaction(connect()) as cursor:
        cursor.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (held,))
        found = claim(conn, 5)
        assert (numbers(found), found.is_any_left) == ([free], True)
    assert numbers(claim(conn, 5)) == [held]


def test_a_claim_with_slots_for_all_that_is_due_takes_all(conn: Connection) -> None:
    """Of every tenant and route, the highest priority first, and says that nothing is left."""
    low = [submit(conn, tenant=tenant) for tenant in ("b", "a")]
    high = submit(conn, tenant="c", priority=7, requested_route="cloud")
    submit(conn, delay_seconds=60)
    found = claim(conn, 3)
    assert (numbers(found), found.is_any_left) == ([high, *low], False)
    assert 59 < (found.next_due_seconds or 0) <= 60


def test_what_is_due_on_a_route_that_nobody_wants_takes_no_slot(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        submit(conn, requested_route="cloud")
    local = [submit(conn, requested_route="local", tenant=tenant) for tenant in ("a", "b")]
    monkeypatch.setattr(rows.Everything, "_everything", lambda self: [Wanted("local", "local")])
    found = claim(conn, 2)
    assert (sorted(numbers(found)), found.is_any_left) == (local, False)
    assert claim(conn, 2).last_tenant is None


def test_a_task_that_has_just_become_due_is_claimed_with_the_others(conn: Connection) -> None:
    set_clock(conn, BASE.isoformat())
    later, now = submit(conn, delay_seconds=60), submit(conn)
    set_clock(conn, (BASE + timedelta(seconds=61)).isoformat())
    found = claim(conn, 2)
    assert (numbers(found), found.next_due_seconds) == ([later, now], None)


def test_one_page_of_overdue_tasks_becomes_due_at_a_claim_and_one_at_a_look(
    conn: Connection,
) -> None:
    pages = 2 if rows.Everything.looks_first else 1
    set_clock(conn, BASE.isoformat())
    for _ in range(5):
        db.submit_tasks(conn, [rows.new_task(delay_seconds=60) for _ in range(500)])
    set_clock(conn, (BASE + timedelta(seconds=61)).isoformat())
    found = claim(conn, 1)
    assert len(found.tasks) == 1
    (due,) = rows.sql(conn, "SELECT count(*) AS n FROM tasks WHERE due")
    assert due["n"] == 1000 * pages - 1
    assert (found.next_due_seconds or 0) < 0  # the rest is overdue, and looked for soon


def test_a_claim_tells_each_column_of_each_task_as_it_is(conn: Connection) -> None:
    task_id = submit(conn, tenant="acme", requested_route="cloud", timeout_seconds=7)
    rows.settle(conn, claim(conn).tasks[0].lease, "failure")
    for _ in range(2):
        rows.make_due(conn, task_id)
        (task,) = claim(conn).tasks
        rows.settle(conn, task.lease, "released")
    rows.make_due(conn, task_id)
    (task,) = claim(conn).tasks
    stored = row(conn, task_id)
    told = {name: value for name, value in vars(task).items() if name in stored}
    assert told == {name: stored[name] for name in told}
    assert len(told) == 10
    assert (task.attempt, task.delivery_count, task.retry_count) == (4, 2, 1)
    assert (task.lease.token, task.root_id) == (str(stored["lease_token"]), task_id)


def test_no_two_claims_have_a_token_in_common_whatever_the_random_numbers(conn: Connection) -> None:
    """Somebody else in the same session may set the seed, again and again."""
    task_id = submit(conn)
    tokens = set()
    for _ in range(3):
        rows.sql(conn, "SELECT setseed(0.5)")
        (task,) = claim(conn).tasks
        tokens.add(task.lease.token)
        rows.settle(conn, task.lease, "released")
        rows.make_due(conn, task_id)
    assert len(tokens) == 3


def test_tokens_of_one_claim_differ_and_those_of_two_have_other_random_bits(
    conn: Connection,
) -> None:
    for _ in range(4):
        submit(conn)
    tokens = [[task.lease.token for task in claim(conn, 2).tasks] for _ in range(2)]
    assert len({*tokens[0], *tokens[1]}) == 4
    assert tokens[0][0][:13] == tokens[0][1][:13] != tokens[1][0][:13]


def test_what_a_budget_has_kept_back_is_left(conn: Connection) -> None:
    for _ in range(3):
        submit(conn)
    policy = rows.Everything()
    policy.has_limits, policy.budgets = True, {"all": 2}
    found = claims.claim_tasks(conn, "w1", 9, 30.0, policy)
    assert (len(found.tasks), found.is_any_left) == (2, True)


# --- tenants ---------------------------------------------------------------------------------


def test_each_tenant_with_due_tasks_gets_an_equal_share_of_the_batch(conn: Connection) -> None:
    tenant_of = {submit(conn, tenant="big"): "big" for _ in range(50)}
    tenant_of |= {submit(conn, tenant="small"): "small" for _ in range(50)}
    shares = Counter(tenant_of[task] for task in numbers(claim(conn, 10)))
    assert shares == {"big": 5, "small": 5}


def test_a_tenant_with_many_tasks_does_not_starve_one_with_few(conn: Connection) -> None:
    for _ in range(50):
        submit(conn, tenant="big", priority=9)
    small = submit(conn, tenant="small")
    after, served = "", []
    for _ in range(2):
        found = claim(conn, 1, after_tenant=after)
        after = found.last_tenant or ""
        served += numbers(found)
    assert small in served


def test_a_worker_with_one_slot_goes_round_the_tenants(conn: Connection) -> None:
    tenants = ("a", "b", "c")
    tenant_of = {submit(conn, tenant=t): t for t in tenants for _ in range(3)}
    after, served = "", ""
    for _ in range(9):
        found = claim(conn, 1, after_tenant=after)
        after = found.last_tenant or ""
        served += tenant_of[numbers(found)[0]]
    assert served == "abcabcabc"
    assert claim(conn, 1, after_tenant=after).last_tenant is None


def test_priority_orders_the_tasks_of_one_tenant_and_not_the_tenants(conn: Connection) -> None:
    submit(conn, tenant="b", priority=9)
    first = submit(conn, tenant="a", priority=0)
    second = submit(conn, tenant="a", priority=1)
    assert numbers(claim(conn, 1)) == [second]
    assert numbers(claim(conn, 1)) == [first]


# --- many at once ----------------------------------------------------------------------------


def test_a_row_that_somebody_holds_is_left_out_and_not_waited_for(
    conn: Connection, connect: Callable[[], Connection]
) -> None:
    held, free = submit(conn), submit(conn)
    conn.lock_timeout_seconds = 0.5
    with db.transaction(connect()) as cursor:
        cursor.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (held,))
        assert numbers(claim(conn, 2)) == [free]
    assert numbers(claim(conn, 2)) == [held]


# Between the count of what is due and the lock on it: here a claim waits for the test.
HELD_AFTER_ITS_COUNT = {
    "IF waiting = 0 THEN": "PERFORM pg_advisory_xact_lock_shared(4712); IF waiting = 0 THEN"
}


@contextmanager
def held_after_its_count(stage: Stage, slots: int) -> Iterator[Future[rows.Claimed]]:
    """A claim that has counted what is due, and takes it after the block."""
    with rewritten(stage.witness, "claim_tasks", HELD_AFTER_ITS_COUNT):
        rows.sql(stage.witness, "SELECT pg_advisory_lock(4712)")
        try:
            pid, claiming = stage.start(claim, slots)
            assert stage.await_lock(pid, claiming) == "advisory"
            yield claiming
        finally:
            rows.sql(stage.witness, "SELECT pg_advisory_unlock(4712)")
        claiming.result(20)


@pytest.mark.parametrize(("more", "is_any_left"), [(0, False), (1, False), (2, True), (9, True)])
def test_a_claim_of_all_takes_no_more_than_its_slots_of_what_comes_while_it_looks(
    conn: Connection, stage: Stage, more: int, is_any_left: bool
) -> None:
    for number in range(3):
        submit(conn, tenant=f"t{number}")
    with held_after_its_count(stage, 4) as claiming:
        for number in range(more):
            submit(
                conn, tenant=f"t{number}", requested_route=("auto", "local", "cloud")[number % 3]
            )
    found = claiming.result()
    assert len(found.tasks) == min(4, 3 + more)
    assert found.is_any_left == is_any_left
    expected = {"RUNNING": min(4, 3 + more), "PENDING": max(0, more - 1)}
    assert db.metrics(conn)["by_status"] == {status: n for status, n in expected.items() if n}


def test_a_claim_of_all_looks_again_if_others_took_something_while_it_looked(
    conn: Connection, stage: Stage
) -> None:
    """Of them it cannot know whether they have left anything."""
    tasks = [submit(conn) for _ in range(3)]
    with held_after_its_count(stage, 4) as claiming:
        rows.sql(conn, "UPDATE tasks SET due = false WHERE task_id = %(first)s", first=tasks[0])
    found = claiming.result()
    assert (numbers(found), found.is_any_left) == (tasks[1:], True)


def test_workers_that_claim_at_once_never_get_the_same_task(
    conn: Connection, connect: Callable[[], Connection]
) -> None:
    workers, tasks = 6, 300
    for number in range(tasks):
        submit(conn, tenant=f"t{number % 3}", priority=number % 2)
    conns = [connect() for _ in range(workers)]
    together = threading.Barrier(workers)

    def work(number: int) -> list[int]:
        together.wait()
        got: list[int] = []
        for slots in itertools.cycle((1, 3, 7)):
            found = claim(conns[number], slots, f"w{number}")
            got += numbers(found)
            if found.last_tenant is None:
                return got
        raise AssertionError

    with ThreadPoolExecutor(workers) as pool:
        shares = list(pool.map(work, range(workers)))
    claimed = [task for share in shares for task in share]
    assert len(claimed) == len(set(claimed)) == tasks
    assert rows.sql(conn, "SELECT max(attempt) AS most FROM tasks") == [{"most": 1}]
    assert len([share for share in shares if share]) > 1

"""claim_tasks with from_task: a claim that begins behind what was taken a moment ago."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import db
from db import Connection
from queries import claims, leases
from queries.claims import Wanted
from queries.leases import Outcome
from tests.support import rows
from tests.support.plans import plan_of
from tests.support.rows import sql, submit

SETTLED, BATCH = 10_000, 100
CLAIM = {
    "worker": "w1",
    "slots": 4,
    "lease_seconds": 30,
    "routes": "{none}",
    "wanted": None,
    "budgets": None,
    "after_tenant": "default",
    "depth_limit": 10,
}


def claim(conn: Connection, slots: int, from_task: int = 0, after: str = "") -> claims.Claim:
    return claims.claim_tasks(conn, "w1", slots, 30, rows.Everything(), after, from_task)


def numbers(found: claims.Claim) -> list[int]:
    return [task.task_id for task, _ in found.tasks]


def test_the_next_claim_may_begin_at_the_lowest_number_that_this_one_took(
    conn: Connection,
) -> None:
    tasks = [submit(conn) for _ in range(6)]
    first = claim(conn, 3)
    assert (numbers(first), first.next_from) == (tasks[:3], tasks[0])
    second = claim(conn, 3, tasks[0])
    assert (numbers(second), second.next_from) == (tasks[3:], tasks[3])


def test_a_full_claim_takes_nothing_below_where_it_begins(conn: Connection) -> None:
    tasks = [submit(conn) for _ in range(6)]
    found = claim(conn, 2, tasks[3])
    assert (numbers(found), found.next_from) == (tasks[3:5], tasks[3])


def test_a_claim_that_would_not_be_full_looks_at_everything(conn: Connection) -> None:
    tasks = [submit(conn) for _ in range(6)]
    assert numbers(claim(conn, 4, tasks[3])) == tasks[:4]
    assert numbers(claim(conn, 4, tasks[5] + 1)) == tasks[4:]
    assert claim(conn, 4, tasks[5]).next_from is None


@pytest.mark.parametrize("higher", [9, 1])
def test_where_priorities_differ_a_claim_looks_at_everything(conn: Connection, higher: int) -> None:
    """Or younger tasks of the usual one would go first, whenever those of a higher run out."""
    old = [submit(conn) for _ in range(4)]
    high = [submit(conn, priority=higher) for _ in range(3)]
    young = [submit(conn) for _ in range(4)]
    first = claim(conn, 2)
    assert (numbers(first), first.next_from) == (high[:2], None)
    second = claim(conn, 2, high[1])
    assert numbers(second) == [high[2], old[0]]
    assert numbers(claim(conn, 9, young[0])) == old[1:] + young


def test_only_a_round_that_came_to_every_tenant_says_where_to_begin(conn: Connection) -> None:
    """Or it would begin behind what another tenant has waited with for longer."""
    tasks = [submit(conn, tenant=f"t{n % 4}") for n in range(16)]
    some = claim(conn, 3, after="t0")
    assert (len(some.tasks), some.last_tenant, some.next_from) == (3, "t3", None)
    every = claim(conn, 8, after="t3")
    assert every.next_from == tasks[0]
    assert {task.tenant for task, _ in every.tasks} == {"t0", "t1", "t2", "t3"}


def test_a_claim_within_a_budget_does_not_say_where_to_begin(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its budget had no room for waits in front of that."""
    monkeypatch.setattr(rows.Everything, "looks_first", True)
    within = [Wanted("auto", "all")], {"all": 2}
    monkeypatch.setattr(rows.Everything, "wanted", lambda self, look: within)
    for _ in range(4):
        submit(conn)
    found = claim(conn, 2)
    assert (len(found.tasks), found.next_from) == (2, None)


def settle_many(conn: Connection) -> int:
    """Run tasks, batch after batch; returns where the next claim may begin."""
    submit(conn, requested_route="none")  # so that more is due than a claim takes
    for _ in range(SETTLED // BATCH):
        db.submit_tasks(conn, [rows.new_task(requested_route="none") for _ in range(BATCH)])
        last = claim(conn, BATCH)
        done = [(task.lease, Outcome("succeeded", result=1)) for task, _ in last.tasks]
        assert len(leases.settle_tasks(conn, done, rows.RETRY)) == BATCH
    assert last.next_from is not None
    return last.next_from


@pytest.fixture(params=["never analysed", "analysed when empty", "analysed when all waited"])
def known(request: pytest.FixtureRequest, own_connect: Callable[[], Connection]) -> Connection:
    """What the planner knows; of what comes later it knows nothing."""
    conn = own_connect()
    if request.param == "analysed when all waited":
        db.submit_tasks(conn, [rows.new_task(requested_route="none") for _ in range(BATCH)])
    if request.param != "never analysed":
        sql(conn, "ANALYZE tasks")
    return conn


def test_beside_an_old_snapshot_nothing_is_read_that_was_settled_since(
    known: Connection, own_connect: Callable[[], Connection]
) -> None:
    """By the plans that the first claim has made, of an empty table, and that are kept."""
    with db.transaction(own_connect(), "ISOLATION LEVEL REPEATABLE READ") as reader:
        reader.execute("SELECT count(*) FROM workers")  # from now on nothing dead is removed
        begins = settle_many(known)
        db.submit_tasks(known, [rows.new_task(requested_route="none") for _ in range(BATCH)])
        pages = {
            start: plan_of(known, claims.CLAIM_TASKS, {**CLAIM, "from_task": start}).pages
            for start in (0, begins)
        }
        leased = [vars(task.lease) for task, _ in claim(known, 4, begins).tasks]
        routes = {"routes": json.dumps([{**lease, "route": "local"} for lease in leased])}
        noting = plan_of(known, claims.SET_ROUTES, routes)
        renewal = {"leases": json.dumps(leased), "lease_seconds": 30}
        renewing = plan_of(known, leases.RENEW_LEASES, renewal)
    assert pages[0] > SETTLED / 15  # a control: whoever looks at everything reads them, twice
    assert pages[begins] < 200
    assert max(noting.pages, renewing.pages) < 100

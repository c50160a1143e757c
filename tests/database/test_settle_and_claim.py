"""settle_and_claim: what ends, and what begins in its place, in one transaction."""

from __future__ import annotations

import dataclasses

import psycopg2
import pytest

from db import Connection
from errors import DatabaseUnavailable
from queries import claims
from queries.claims import Claim
from queries.leases import ClaimedTask, Lease, Outcome, Settled
from tests.support import rows
from tests.support.functions import rewritten
from tests.support.rows import RETRY, sql
from tests.support.runs import statuses, submit, take
from tests.support.stage import AT_ONCE, Stage

NOBODYS_TOKEN = "00000000-0000-4000-8000-000000000000"
CHAIN = {"a": [], "b": ["a"], "c": ["b"]}
FAN = {"a": [], "b": ["a"], "c": ["a"], "d": ["a"]}


def settle_and_claim(
    conn: Connection, *leases: Lease, verdict: str = "succeeded", after_tenant: str = ""
) -> tuple[list[Settled], Claim]:
    outcomes = [
        (lease, Outcome(verdict, {"text": "done"}, "it went wrong"))  # type: ignore[arg-type]
        for lease in leases
    ]
    done = claims.settle_and_claim(
        conn, outcomes, RETRY, "w1", rows.LEASE_SECONDS, rows.Everything(), after_tenant, 0
    )
    assert done is not None
    return done


def tasks(claim: Claim) -> list[ClaimedTask]:
    return [task for task, _ in claim.tasks]


def transactions(conn: Connection, run_id: int) -> dict[tuple[str | None, str], str]:
    """The transaction of every transition of a run, by step and reason."""
    statement = "SELECT step, reason, xmin::text AS xid FROM audit_log WHERE run_id = %(run_id)s"
    return {(row["step"], row["reason"]): row["xid"] for row in sql(conn, statement, run_id=run_id)}


def test_the_end_of_a_step_and_the_claim_of_the_next_are_one_transaction(conn: Connection) -> None:
    run_id = submit(conn, CHAIN)
    lease = take(conn, run_id, "a")
    settled, claim = settle_and_claim(conn, lease)
    assert [one.task_id for one in settled] == [lease.task_id]
    (task,) = tasks(claim)
    assert (task.step, task.run_id, task.attempt) == ("b", run_id, 1)
    assert not claim.is_any_left
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "a": "SUCCEEDED", "b": "RUNNING", "c": "BLOCKED",
    }  # fmt: skip
    seen = transactions(conn, run_id)
    assert len({seen["a", "succeeded"], seen["b", "promoted"], seen["b", "claimed"]}) == 1
    assert rows.settle(conn, task.lease, "succeeded") is not None


def test_it_claims_as_many_as_it_was_given_outcomes_and_says_that_more_is_left(
    conn: Connection,
) -> None:
    run_id = submit(conn, FAN)
    _, claim = settle_and_claim(conn, take(conn, run_id, "a"))
    assert [task.step for task in tasks(claim)] == ["b"]
    assert claim.is_any_left
    first = tasks(claim)[0].lease
    _, claim = settle_and_claim(conn, first, take(conn, run_id, "c"))
    assert [task.step for task in tasks(claim)] == ["d"]
    assert not claim.is_any_left


def test_what_it_claims_it_shares_between_tenants_as_every_claim_does(conn: Connection) -> None:
    lease = rows.claimed(conn).lease
    for tenant in ("greedy", "greedy", "greedy", "newcomer"):
        rows.submit(conn, tenant=tenant)
    _, claim = settle_and_claim(conn, lease, after_tenant="greedy")
    assert [task.tenant for task in tasks(claim)] == ["newcomer"]
    assert claim.last_tenant == "newcomer"


@pytest.mark.parametrize("verdict", ["released", "failure", "permanent", "succeeded"])
def test_whatever_came_of_a_task_its_slot_is_filled(conn: Connection, verdict: str) -> None:
    lease = rows.claimed(conn, priority=1).lease
    other = rows.submit(conn, priority=9)
    _, claim = settle_and_claim(conn, lease, verdict=verdict)
    assert [task.task_id for task in tasks(claim)] == [other]


def test_a_task_that_is_handed_back_can_be_claimed_again_by_another_token(conn: Connection) -> None:
    lease = rows.claimed(conn).lease
    settled, claim = settle_and_claim(conn, lease, verdict="released")
    assert [one.status for one in settled] == ["PENDING"]
    (again,) = tasks(claim)
    assert again.task_id == lease.task_id
    assert again.lease.token != lease.token
    assert rows.settle(conn, lease, "succeeded") is None
    assert rows.settle(conn, again.lease, "succeeded") is not None


def test_an_outcome_of_a_lease_that_was_taken_over_writes_nothing_and_the_claim_goes_on(
    conn: Connection,
) -> None:
    run_id = submit(conn, CHAIN)
    lost = dataclasses.replace(take(conn, run_id, "a"), token=NOBODYS_TOKEN)
    other = rows.submit(conn)
    settled, claim = settle_and_claim(conn, lost)
    assert settled == []
    assert [task.task_id for task in tasks(claim)] == [other]
    assert statuses(conn, run_id)["a"] == "RUNNING"


def test_what_cannot_be_stored_claims_nothing(conn: Connection) -> None:
    run_id = submit(conn, CHAIN)
    lease = take(conn, run_id, "a")
    other = rows.submit(conn)
    outcome = Outcome("succeeded", result={"text": "\0"})
    with pytest.raises(psycopg2.Error):
        claims.settle_and_claim(conn, [(lease, outcome)], RETRY, "w1", 30, rows.Everything(), "", 0)
    assert statuses(conn, run_id)["a"] == "RUNNING"
    assert rows.row(conn, other)["status"] == "PENDING"


def test_a_claim_that_fails_settles_nothing(conn: Connection) -> None:
    run_id = submit(conn, CHAIN)
    lease = take(conn, run_id, "a")
    with (
        rewritten(
            conn, "claim_tasks", {"FOR look IN 1..2 LOOP": "ASSERT false; FOR look IN 1..2 LOOP"}
        ),
        pytest.raises(psycopg2.Error),
    ):
        settle_and_claim(conn, lease)
    assert statuses(conn, run_id)["a"] == "RUNNING"
    finish_again, claim = settle_and_claim(conn, lease)
    assert len(finish_again) == 1
    assert [task.step for task in tasks(claim)] == ["b"]


def test_of_two_in_one_run_the_second_waits_and_claims_what_both_have_made_due(
    stage: Stage,
) -> None:
    run_id = submit(stage.witness, {"a": [], "b": [], "c": ["a", "b"]})
    a, b = (take(stage.witness, run_id, step) for step in "ab")
    with stage.held_back(settle_and_claim, a) as ahead:
        conn = stage.connect()
        conn.lock_timeout_seconds = AT_ONCE
        with pytest.raises(DatabaseUnavailable):
            settle_and_claim(conn, b)
        assert statuses(stage.witness, run_id)["b"] == "RUNNING"
        pid, behind = stage.start(settle_and_claim, b)
        stage.await_lock(pid, behind)
    assert tasks(ahead.result()[1]) == []
    settled, claim = behind.result(20)
    assert [one.task_id for one in settled] == [b.task_id]
    assert [task.step for task in tasks(claim)] == ["c"]


def test_two_that_fill_their_slots_at_once_take_different_tasks(stage: Stage) -> None:
    first, second = (rows.claimed(stage.witness).lease for _ in range(2))
    waiting = {rows.submit(stage.witness) for _ in range(2)}
    with stage.held_back(settle_and_claim, first) as ahead:
        conn = stage.connect()
        conn.lock_timeout_seconds = AT_ONCE
        _, claim = settle_and_claim(conn, second)
    taken = [*tasks(claim), *tasks(ahead.result()[1])]
    assert len(taken) == 2
    assert {task.task_id for task in taken} == waiting


@pytest.mark.parametrize("hides", ["has_limits", "looks_first"])
def test_where_a_claim_takes_more_than_one_message_nothing_is_done(
    conn: Connection, hides: str
) -> None:
    lease = rows.claimed(conn).lease
    policy = rows.Everything()
    setattr(policy, hides, True)
    outcomes = [(lease, Outcome("succeeded", {"text": "done"}))]
    assert claims.settle_and_claim(conn, outcomes, RETRY, "w1", 30, policy, "", 0) is None
    assert rows.row(conn, lease.task_id)["status"] == "RUNNING"

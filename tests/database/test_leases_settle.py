"""queries/leases.py, settle_tasks: what each verdict makes of a task, its counters, its money."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg2.errors
import pytest

import db
from config import Retry
from connection import Cursor
from db import Connection
from queries import leases
from queries.leases import Outcome
from tests.support import rows
from tests.support import runs as graphs
from tests.support.functions import rewritten
from tests.support.rows import RETRY, claimed, row, set_clock, settle, sql

BASE = datetime(2026, 1, 1, tzinfo=UTC)
COUNTERS = ("attempt", "delivery_count", "retry_count")

# verdict: the status and reason it leads to, delivery_count and retry_count after one attempt
VERDICTS = [
    ("succeeded", "SUCCEEDED", "succeeded", 1, 0),
    ("failure", "PENDING", "retry", 1, 1),
    ("permanent", "FAILED", "permanent", 1, 1),
    ("deadline", "FAILED", "deadline", 1, 1),
    ("released", "PENDING", "released", 0, 0),
    ("outage", "PENDING", "outage", 0, 0),
]


@pytest.mark.parametrize(
    ("verdict", "status", "reason", "deliveries", "failures"),
    VERDICTS,
    ids=[v[0] for v in VERDICTS],
)
def test_a_verdict_leads_to_its_status_and_counts_what_it_is_to_count(
    conn: Connection, verdict: str, status: str, reason: str, deliveries: int, failures: int
) -> None:
    task = claimed(conn)
    settled = settle(conn, task.lease, verdict)
    seen = row(conn, task.task_id)
    assert (seen["status"], seen["reason"]) == (status, reason)
    assert [seen[counter] for counter in COUNTERS] == [1, deliveries, failures]
    assert seen["lease_token"] is seen["lease_expires_at"] is None
    assert (seen["finished_at"] is not None) == (status != "PENDING")
    assert settled is not None
    assert (settled.status, settled.reason) == (status, reason)
    assert (settled.attempt, settled.delivery_count, settled.retry_count) == (
        1,
        deliveries,
        failures,
    )


def test_a_success_keeps_its_result_and_forgets_the_errors_before_it(conn: Connection) -> None:
    task = claimed(conn)
    settle(conn, task.lease, "failure", error="first")
    assert row(conn, task.task_id)["last_error"] == "first"
    assert row(conn, task.task_id)["result"] is None
    rows.make_due(conn, task.task_id)
    again = rows.claim_only(conn, task.task_id)
    settle(conn, again.lease, "succeeded", result={"text": "answer"})
    seen = row(conn, task.task_id)
    assert (seen["result"], seen["last_error"]) == ({"text": "answer"}, None)
    assert [seen[counter] for counter in COUNTERS] == [2, 2, 1]


# --- failures and their delays ---------------------------------------------------------------


def test_three_failures_wait_two_and_four_seconds_and_end_in_a_dead_letter(
    conn: Connection,
) -> None:
    set_clock(conn, BASE.isoformat())
    task = claimed(conn)
    for failures, delay in ((1, 2), (2, 4)):
        settled = settle(conn, task.lease, "failure")
        seen = row(conn, task.task_id)
        assert settled is not None
        assert settled.delay_seconds == delay
        assert seen["available_at"] == seen["updated_at"] + timedelta(seconds=delay)
        assert (seen["status"], seen["retry_count"]) == ("PENDING", failures)
        set_clock(conn, seen["available_at"].isoformat())
        task = rows.claim_only(conn, task.task_id)
    settle(conn, task.lease, "failure", error="the third")
    seen = row(conn, task.task_id)
    assert (seen["status"], seen["reason"], seen["last_error"]) == (
        "FAILED",
        "max_retry",
        "the third",
    )
    assert [seen[counter] for counter in COUNTERS] == [3, 3, 3]
    assert rows.claim(conn).tasks == []


def test_the_tasks_own_max_retry_goes_before_the_settings(conn: Connection) -> None:
    once = claimed(conn, max_retry=1)
    settled = settle(conn, once.lease, "failure")
    assert settled is not None
    assert settled.reason == "max_retry"
    patient = claimed(conn, max_retry=4)
    settled = settle(conn, patient.lease, "failure", Retry(max_retry=1))
    assert settled is not None
    assert settled.reason == "retry"


@pytest.mark.parametrize(
    ("failures_before", "delay"), [(4, 32), (5, 60), (6, 60), (100, 60), (1_100, 60), (10_000, 60)]
)
def test_the_delay_doubles_up_to_its_cap_and_never_overflows(
    conn: Connection, failures_before: int, delay: float
) -> None:
    task = claimed(conn, max_retry=1_000_000)
    sql(conn, "UPDATE tasks SET retry_count = %(n)s", n=failures_before)
    settled = settle(conn, task.lease, "failure")
    assert settled is not None
    assert (settled.delay_seconds, settled.retry_count) == (delay, failures_before + 1)


def test_the_cap_of_the_delay_comes_from_the_settings(conn: Connection) -> None:
    task = claimed(conn)
    settled = settle(conn, task.lease, "failure", Retry(max_delay_seconds=1.5))
    assert settled is not None
    assert settled.delay_seconds == 1.5


# --- hand-backs ------------------------------------------------------------------------------


def test_a_task_that_is_handed_back_can_be_claimed_at_once(conn: Connection) -> None:
    task = claimed(conn)
    settle(conn, task.lease, "released")
    assert rows.claim_only(conn, task.task_id, "w2").attempt == 2


def test_a_task_that_met_an_outage_waits_as_long_as_it_was_told(conn: Connection) -> None:
    set_clock(conn, BASE.isoformat())
    task = claimed(conn)
    settle(conn, task.lease, "outage", delay_seconds=7, route="local", error="refused")
    seen = row(conn, task.task_id)
    assert seen["available_at"] == BASE + timedelta(seconds=7)
    assert (seen["last_error"], seen["route"]) == ("refused", "local")
    assert rows.audit(conn, task.task_id)[-1]["detail"] == {"error": "refused", "delay_seconds": 7}


def test_however_many_outages_burn_no_retry_and_no_delivery(conn: Connection) -> None:
    task_id = rows.submit(conn)
    for attempt in range(1, 31):
        task = rows.claim_only(conn, task_id)
        settle(conn, task.lease, "outage")
        seen = row(conn, task_id)
        assert [seen[counter] for counter in COUNTERS] == [attempt, 0, 0]
    assert seen["status"] == "PENDING"


# --- cancel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [verdict[0] for verdict in VERDICTS])
def test_a_task_that_is_to_be_cancelled_ends_cancelled_whatever_the_verdict(
    conn: Connection, verdict: str
) -> None:
    task = claimed(conn)
    rows.ask_to_cancel(conn, task.task_id)
    paid: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 7, "cost": Decimal("0.7")}
    settled = settle(conn, task.lease, verdict, route="cloud", model="m", **paid)
    assert settled is not None
    assert (settled.status, settled.reason) == ("CANCELLED", "cancelled")
    seen = row(conn, task.task_id)
    assert (seen["prompt_tokens"], seen["completion_tokens"]) == (5, 7)
    assert (seen["cost"], seen["route"], seen["model"]) == (Decimal("0.7"), "cloud", "m")
    assert seen["result"] is None
    assert seen["cancel_requested"]
    assert seen["finished_at"] is not None
    assert rows.claim(conn).tasks == []


# --- money and time --------------------------------------------------------------------------


def test_tokens_and_cost_add_up_exactly_over_the_attempts(conn: Connection) -> None:
    task_id = rows.submit(conn, max_retry=100)
    for _ in range(10):
        task = rows.claim_only(conn, task_id)
        settle(
            conn, task.lease, "failure", Retry(max_delay_seconds=0.001),
            prompt_tokens=3, completion_tokens=1, cost=Decimal("0.1"), route="local", model="m",
        )  # fmt: skip
        rows.make_due(conn, task_id)
    last = rows.claim_only(conn, task_id)
    settle(conn, last.lease, "succeeded", completion_tokens=1, cost=Decimal("0.00000000000000001"))
    seen = row(conn, task_id)
    assert (seen["prompt_tokens"], seen["completion_tokens"]) == (30, 11)
    assert seen["cost"] == Decimal("1.00000000000000001")  # ten times 0.1 as floats is not 1
    assert (seen["route"], seen["model"]) == ("local", "m")


def test_an_attempt_that_cost_nothing_known_leaves_the_cost_as_it_was(conn: Connection) -> None:
    task = claimed(conn)
    settle(conn, task.lease, "failure")
    assert row(conn, task.task_id)["cost"] is None
    rows.make_due(conn, task.task_id)
    settle(conn, rows.claim_only(conn, task.task_id).lease, "succeeded", cost=Decimal("0"))
    assert row(conn, task.task_id)["cost"] == 0


def test_the_duration_is_that_of_the_last_attempt(conn: Connection) -> None:
    set_clock(conn, BASE.isoformat())
    task = claimed(conn)
    set_clock(conn, (BASE + timedelta(seconds=100)).isoformat())
    settle(conn, task.lease, "released")
    again = rows.claim_only(conn, task.task_id)
    set_clock(conn, (BASE + timedelta(seconds=101.5)).isoformat())
    settle(conn, again.lease, "succeeded")
    assert row(conn, task.task_id)["duration_seconds"] == 1.5


@pytest.mark.parametrize("text", ["ü€🙂", "a\nb", "'; DROP TABLE tasks; --", "%s %(x)s", "\\u0041"])
def test_an_answer_and_an_error_are_kept_character_by_character(
    conn: Connection, text: str
) -> None:
    good = claimed(conn)
    settle(conn, good.lease, "succeeded", result={"text": text})
    assert row(conn, good.task_id)["result"] == {"text": text}
    bad = claimed(conn)
    settle(conn, bad.lease, "permanent", error=text)
    assert row(conn, bad.task_id)["last_error"] == text


def test_many_tasks_are_settled_in_one_statement_each_by_its_own_verdict(conn: Connection) -> None:
    tasks = [rows.submit(conn) for _ in range(6)]
    held = {task.task_id: task.lease for task in rows.claim(conn, 6).tasks}
    outcomes = [
        (held[task_id], Outcome(verdict[0], error="e", result={"n": task_id}))  # type: ignore[arg-type]
        for task_id, verdict in zip(reversed(tasks), VERDICTS, strict=True)
    ]
    settled = {one.task_id: one for one in leases.settle_tasks(conn, outcomes, RETRY)}
    for task_id, (_, status, reason, _, _) in zip(reversed(tasks), VERDICTS, strict=True):
        assert (settled[task_id].status, settled[task_id].reason) == (status, reason)
    assert row(conn, tasks[-1])["result"] == {"n": tasks[-1]}
    assert db.metrics(conn)["by_status"] == {"SUCCEEDED": 1, "PENDING": 3, "FAILED": 2}


def test_a_settle_is_one_message_whatever_follows_from_it(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = graphs.submit(conn, {"a": [], "b": ["a"]})
    settled = [graphs.take(conn, run_id, "a"), rows.claimed(conn).lease]
    sent: list[str] = []
    execute = Cursor.execute
    monkeypatch.setattr(
        Cursor, "execute", lambda self, *call: sent.append(call[0]) or execute(self, *call)
    )
    outcomes = [(lease, Outcome("succeeded", result={})) for lease in settled]
    assert len(leases.settle_tasks(conn, outcomes, RETRY)) == 2
    assert len(sent) == 1
    assert graphs.statuses(conn, run_id) == {"": "BLOCKED", "a": "SUCCEEDED", "b": "PENDING"}


def test_a_step_is_not_settled_if_what_follows_from_it_is_refused(conn: Connection) -> None:
    run_id = graphs.submit(conn, {"a": [], "b": ["a"]})
    lease = graphs.take(conn, run_id, "a")
    refused = {"'AWAITING_APPROVAL' ELSE 'PENDING' END": "'AWAITING_APPROVAL' ELSE 'RUNNING' END"}
    with rewritten(conn, "end_steps", refused), pytest.raises(psycopg2.errors.CheckViolation):
        settle(conn, lease, "succeeded")
    assert graphs.statuses(conn, run_id) == {"": "BLOCKED", "a": "RUNNING", "b": "BLOCKED"}
    assert settle(conn, lease, "succeeded") is not None


def test_nothing_to_settle_is_no_fault(conn: Connection) -> None:
    assert leases.settle_tasks(conn, [], RETRY) == []

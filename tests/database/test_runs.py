"""Runs: promotion, the end, cancel and revival, in the transaction that causes them."""

from __future__ import annotations

import psycopg2
import pytest

from db import Connection
from errors import KeyReused, NotFound, RequestRefused, StateConflict
from queries import leases, operations, runs
from queries.leases import Outcome
from queries.runs import NewRun
from queries.steps import read_outputs
from runs.templates import Reference
from tests.support import rows
from tests.support.rows import RETRY
from tests.support.runs import (
    finish,
    new_run,
    new_step,
    number,
    statuses,
    step_rows,
    story,
    submit,
    take,
)

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


# --- creation --------------------------------------------------------------------------------


def test_what_depends_on_nothing_can_run_at_once_and_all_else_waits(conn: Connection) -> None:
    edges = {"a": [], "approval.x": [], "b": ["a"], "approval.y": ["a", "b"]}
    run_id = submit(conn, edges)
    assert statuses(conn, run_id) == {
        "": "BLOCKED",
        "a": "PENDING",
        "approval.x": "AWAITING_APPROVAL",
        "b": "BLOCKED",
        "approval.y": "BLOCKED",
    }
    assert {name: row["unmet"] for name, row in step_rows(conn, run_id).items()} == {
        "a": 0, "approval.x": 0, "b": 1, "approval.y": 2,
    }  # fmt: skip


def test_numbers_and_audit_tell_the_run_first_and_then_parents_before_children(
    conn: Connection,
) -> None:
    run_id = submit(conn, DIAMOND)
    assert [row["task_id"] for row in step_rows(conn, run_id).values()] == [
        run_id + n for n in (1, 2, 3, 4)
    ]
    assert story(conn, run_id) == [(step, "created") for step in (None, "a", "b", "c", "d")]


def test_a_step_that_is_submitted_before_what_it_needs_is_refused_by_the_database(
    conn: Connection,
) -> None:
    steps = [new_step("b", ["a"]), new_step("a")]
    with pytest.raises(psycopg2.errors.CheckViolation, match="parents_have_lower_numbers"):
        runs.submit_run(conn, NewRun("default", "backwards", steps))
    assert rows.count_tasks(conn) == 0


def test_a_step_exists_once_in_its_run_and_a_refused_run_leaves_nothing(conn: Connection) -> None:
    steps = [new_step("a"), new_step("a")]
    with pytest.raises(psycopg2.errors.UniqueViolation, match="tasks_by_step"):
        runs.submit_run(conn, NewRun("default", "twice", steps))
    assert rows.count_tasks(conn) == 0


def test_a_run_without_steps_which_would_never_end_is_refused(conn: Connection) -> None:
    with pytest.raises(RequestRefused):
        runs.submit_run(conn, NewRun("default", "nothing to do", []))
    assert rows.count_tasks(conn) == 0


KEY = {"idempotency_scope": "runs", "idempotency_key": "k", "request_hash": b"1"}


def test_one_key_makes_one_run_whose_status_the_second_request_hears(conn: Connection) -> None:
    first = runs.submit_run(conn, new_run({"a": []}, **KEY))
    finish(conn, first.task_id, "a")
    again = runs.submit_run(conn, new_run({"a": []}, **KEY))
    assert (again.task_id, again.status, again.replayed) == (first.task_id, "SUCCEEDED", True)
    assert rows.count_tasks(conn) == 2


def test_a_key_with_another_body_is_refused_and_stores_nothing(conn: Connection) -> None:
    submit(conn, {"a": []}, **KEY)
    with pytest.raises(KeyReused):
        submit(conn, {"a": [], "b": []}, **{**KEY, "request_hash": b"2"})
    assert rows.count_tasks(conn) == 2


def test_a_run_is_found_by_its_own_tenant_only_and_is_no_task(conn: Connection) -> None:
    run_id = submit(conn, {"a": []}, tenant="one")
    assert runs.find_run(conn, "one", str(run_id))["status"] == "RUNNING"
    for call in (runs.find_run, runs.cancel_run):
        with pytest.raises(NotFound):
            call(conn, "two", str(run_id))
        with pytest.raises(NotFound):
            call(conn, "one", str(run_id + 1))  # its step
    with pytest.raises(NotFound):
        operations.find_task(conn, "one", str(run_id))


def test_a_step_shows_the_input_that_it_was_submitted_with(conn: Connection) -> None:
    steps = [
        new_step("far", kind="prompt", payload={"prompt": "p"}, requested_route="cloud"),
        new_step("any", kind="prompt", payload={"prompt": "p"}, requested_route="auto"),
        new_step("tool"),
    ]
    run_id = runs.submit_run(conn, NewRun("default", "inputs", steps)).task_id
    shown = runs.get_run(conn, "default", str(run_id), 30)["steps"]
    assert [step["payload"] for step in shown] == [
        {"prompt": "p", "route": "cloud"},
        {"prompt": "p"},
        {"tool": "echo", "args": {"said": "tool"}},
    ]


# --- promotion and the end -------------------------------------------------------------------


def test_a_step_is_promoted_when_the_last_that_it_needs_has_succeeded(conn: Connection) -> None:
    run_id = submit(conn, DIAMOND)
    finish(conn, run_id, "a")
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "a": "SUCCEEDED", "b": "PENDING", "c": "PENDING", "d": "BLOCKED",
    }  # fmt: skip
    finish(conn, run_id, "b")
    assert statuses(conn, run_id)["d"] == "BLOCKED"
    finish(conn, run_id, "c")
    assert statuses(conn, run_id)["d"] == "PENDING"
    finish(conn, run_id, "d")
    assert statuses(conn, run_id)[""] == "SUCCEEDED"
    assert story(conn, run_id)[-4:] == [
        ("d", "promoted"), ("d", "claimed"), ("d", "succeeded"), (None, "succeeded"),
    ]  # fmt: skip


def test_two_last_parents_settled_by_one_statement_promote_their_child_once(
    conn: Connection,
) -> None:
    run_id = submit(conn, {"a": [], "b": [], "c": ["a", "b"]})
    tasks = rows.claim(conn, 10).tasks
    done = Outcome("succeeded", result={})
    leases.settle_tasks(conn, [(task.lease, done) for task in tasks], RETRY)
    assert statuses(conn, run_id)["c"] == "PENDING"
    assert story(conn, run_id).count(("c", "promoted")) == 1
    assert step_rows(conn, run_id)["c"]["unmet"] == 0


def test_null_is_a_result_with_which_a_step_succeeds(conn: Connection) -> None:
    run_id = submit(conn, {"a": [], "b": ["a"]})
    finish(conn, run_id, "a", result=None)
    assert statuses(conn, run_id) == {"": "BLOCKED", "a": "SUCCEEDED", "b": "PENDING"}
    assert read_outputs(conn, run_id, [Reference("a")]) == {Reference("a"): None}


def test_results_beyond_a_sum_are_left_out_of_a_run_however_well_they_are_packed(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_RESULT_BYTES", 150_000)
    run_id = submit(conn, {"a": [], "b": [], "c": []})
    for step in ("a", "b", "c"):
        finish(conn, run_id, step, result="x" * 100_000)
    shown = runs.get_run(conn, "default", str(run_id), 30)["steps"]
    assert [step["result_left_out"] for step in shown] == [False, True, True]
    assert [len(step["result"] or "") for step in shown] == [100_000, 0, 0]


def test_a_retry_or_a_release_of_a_step_promotes_and_ends_nothing(conn: Connection) -> None:
    run_id = submit(conn, {"a": [], "b": ["a"]})
    for verdict in ("failure", "released", "outage"):
        finish(conn, run_id, "a", verdict)
        assert statuses(conn, run_id) == {"": "BLOCKED", "a": "PENDING", "b": "BLOCKED"}
        rows.make_due(conn, number(conn, run_id, "a"))


def test_a_failed_step_cancels_its_descendants_and_other_branches_finish(
    conn: Connection,
) -> None:
    run_id = submit(conn, {"a": [], "b": ["a"], "c": ["b"], "x": [], "y": ["x"]})
    finish(conn, run_id, "a", "permanent")
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "a": "FAILED", "b": "CANCELLED", "c": "CANCELLED",
        "x": "PENDING", "y": "BLOCKED",
    }  # fmt: skip
    assert step_rows(conn, run_id)["c"]["reason"] == "dependency_failed"


def test_a_run_with_a_failed_step_ends_failed_when_the_other_branches_have_ended(
    conn: Connection,
) -> None:
    run_id = submit(conn, {"x": [], "y": ["x"], "a": [], "b": ["a"]})
    finish(conn, run_id, "x")
    finish(conn, run_id, "a", "permanent")
    assert statuses(conn, run_id)[""] == "BLOCKED"
    finish(conn, run_id, "y")
    assert statuses(conn, run_id)[""] == "FAILED"
    assert story(conn, run_id)[-1] == (None, "dependency_failed")


def test_the_last_lost_hand_out_of_a_step_carries_its_death_on_to_the_run(
    conn: Connection,
) -> None:
    run_id = submit(conn, {"a": [], "b": ["a"]})
    for _ in range(RETRY.max_delivery):
        task = rows.claim_only(conn, number(conn, run_id, "a"))
        rows.expire(conn, task.task_id)
        rows.reap(conn)
    assert statuses(conn, run_id) == {"": "FAILED", "a": "FAILED", "b": "CANCELLED"}
    assert story(conn, run_id)[-3:] == [
        ("a", "max_delivery"), ("b", "dependency_failed"), (None, "dependency_failed"),
    ]  # fmt: skip


# --- approval --------------------------------------------------------------------------------


def test_an_approval_is_promoted_to_wait_for_a_person_and_its_feedback_is_its_output(
    conn: Connection,
) -> None:
    run_id = submit(conn, {"a": [], "approval.x": ["a"], "b": ["approval.x"]})
    finish(conn, run_id, "a")
    gate = number(conn, run_id, "approval.x")
    assert rows.row(conn, gate)["status"] == "AWAITING_APPROVAL"
    changed = operations.approve_task(conn, "default", str(gate), True, "go on")
    assert changed.status == "SUCCEEDED"
    assert rows.row(conn, gate)["result"] == {"approved": True, "feedback": "go on"}
    assert rows.audit(conn, gate)[-1]["detail"] == {"by": "default", "feedback": "go on"}
    finish(conn, run_id, "b")
    assert statuses(conn, run_id)[""] == "SUCCEEDED"


def test_a_rejected_approval_ends_what_waits_for_it_and_is_no_dead_letter(
    conn: Connection,
) -> None:
    run_id = submit(conn, {"approval.x": [], "b": ["approval.x"]})
    gate = number(conn, run_id, "approval.x")
    operations.approve_task(conn, "default", str(gate), False, "too dear")
    assert statuses(conn, run_id) == {"": "FAILED", "approval.x": "FAILED", "b": "CANCELLED"}
    assert rows.row(conn, gate)["last_error"] == "rejected: too dear"
    with pytest.raises(StateConflict, match="is FAILED"):
        operations.approve_task(conn, "default", str(gate), True, None)


def test_a_rejected_approval_that_is_requeued_asks_again(conn: Connection) -> None:
    run_id = submit(conn, {"approval.x": [], "b": ["approval.x"]})
    gate = str(number(conn, run_id, "approval.x"))
    operations.approve_task(conn, "default", gate, False, None)
    assert operations.requeue_task(conn, "default", gate).status == "AWAITING_APPROVAL"
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "approval.x": "AWAITING_APPROVAL", "b": "BLOCKED",
    }  # fmt: skip
    operations.approve_task(conn, "default", gate, True, None)
    assert statuses(conn, run_id)["b"] == "PENDING"


def test_another_kind_of_task_that_waits_for_a_person_is_no_approval_step(
    conn: Connection,
) -> None:
    task_id = rows.insert_as(conn, "AWAITING_APPROVAL")
    with pytest.raises(StateConflict):
        operations.approve_task(conn, "default", str(task_id), True, None)


def test_what_does_not_wait_for_a_person_cannot_be_approved(conn: Connection) -> None:
    run_id = submit(conn, {"a": [], "approval.x": ["a"]})
    for step in ("a", "approval.x"):
        with pytest.raises(StateConflict, match="only a task that waits"):
            operations.approve_task(conn, "default", str(number(conn, run_id, step)), True, None)


# --- cancel ----------------------------------------------------------------------------------


def test_a_cancelled_run_cancels_all_that_has_not_begun_and_waits_for_what_runs(
    conn: Connection,
) -> None:
    run_id = submit(conn, {"a": [], "approval.x": [], "b": ["a"], "c": []})
    lease = take(conn, run_id, "a")
    assert runs.cancel_run(conn, "default", str(run_id)).status == "RUNNING"
    assert runs.cancel_run(conn, "default", str(run_id)).status == "RUNNING"
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "a": "RUNNING", "approval.x": "CANCELLED", "b": "CANCELLED",
        "c": "CANCELLED",
    }  # fmt: skip
    settled = rows.settle(conn, lease, "succeeded")
    assert settled is not None
    assert settled.status == "CANCELLED"
    assert set(statuses(conn, run_id).values()) == {"CANCELLED"}
    with pytest.raises(StateConflict, match=f"run {run_id} is CANCELLED already"):
        runs.cancel_run(conn, "default", str(run_id))


def test_a_cancelled_run_in_which_nothing_runs_has_ended_at_once(conn: Connection) -> None:
    run_id = submit(conn, DIAMOND)
    assert runs.cancel_run(conn, "default", str(run_id)).status == "CANCELLED"
    assert set(statuses(conn, run_id).values()) == {"CANCELLED"}


def test_a_step_cancelled_by_a_person_takes_its_descendants_along(conn: Connection) -> None:
    run_id = submit(conn, {"a": [], "b": ["a"], "c": ["b"]})
    operations.cancel_task(conn, "default", str(number(conn, run_id, "b")))
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "a": "PENDING", "b": "CANCELLED", "c": "CANCELLED",
    }  # fmt: skip
    finish(conn, run_id, "a")
    assert statuses(conn, run_id)[""] == "CANCELLED"
    assert story(conn, run_id)[-1] == (None, "cancelled")


# --- revival ---------------------------------------------------------------------------------


def test_a_requeued_step_revives_exactly_what_its_death_alone_had_cancelled(
    conn: Connection,
) -> None:
    edges = {"a": [], "b": [], "a1": ["a"], "ab": ["a", "b"], "a2": ["a1"], "ab2": ["ab", "a2"],
             "p": ["a"], "p1": ["p"]}  # fmt: skip
    run_id = submit(conn, edges)
    operations.cancel_task(conn, "default", str(number(conn, run_id, "p")))
    for step in ("a", "b"):
        finish(conn, run_id, step, "permanent")
    assert statuses(conn, run_id)[""] == "FAILED"
    operations.requeue_task(conn, "default", str(number(conn, run_id, "a")))
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "a": "PENDING", "b": "FAILED", "a1": "BLOCKED", "ab": "CANCELLED",
        "a2": "BLOCKED", "ab2": "CANCELLED", "p": "CANCELLED", "p1": "CANCELLED",
    }  # fmt: skip
    operations.requeue_task(conn, "default", str(number(conn, run_id, "b")))
    assert [statuses(conn, run_id)[step] for step in ("ab", "ab2", "p", "p1")] == [
        "BLOCKED", "BLOCKED", "CANCELLED", "CANCELLED",
    ]  # fmt: skip
    for step in ("a", "b", "a1", "ab", "a2", "ab2"):
        finish(conn, run_id, step)
    assert statuses(conn, run_id)[""] == "CANCELLED"  # p was cancelled by a person


def test_what_succeeded_while_a_step_was_dead_counts_when_it_is_revived(conn: Connection) -> None:
    run_id = submit(conn, {"a": [], "b": [], "c": ["a", "b"]})
    finish(conn, run_id, "a", "permanent")
    finish(conn, run_id, "b")
    assert statuses(conn, run_id)["c"] == "CANCELLED"
    operations.requeue_task(conn, "default", str(number(conn, run_id, "a")))
    assert step_rows(conn, run_id)["c"]["unmet"] == 1
    finish(conn, run_id, "a")
    assert statuses(conn, run_id)["c"] == "PENDING"


def test_a_step_of_a_cancelled_run_stays_dead(conn: Connection) -> None:
    run_id = submit(conn, {"a": [], "b": []})
    dead = str(number(conn, run_id, "a"))
    finish(conn, run_id, "a", "permanent")
    lease = take(conn, run_id, "b")
    runs.cancel_run(conn, "default", str(run_id))
    with pytest.raises(StateConflict, match=f"run {run_id}, of which this is a step, was"):
        operations.requeue_task(conn, "default", dead)
    rows.settle(conn, lease, "released")
    with pytest.raises(StateConflict, match=f"run {run_id}, of which this is a step, was"):
        operations.requeue_task(conn, "default", dead)
    assert statuses(conn, run_id)[""] == "CANCELLED"

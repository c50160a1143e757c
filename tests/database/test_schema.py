"""schema.sql is the referee: no illegal step and no impossible row, whatever code asks for it."""

from __future__ import annotations

from typing import Any

import psycopg2
import psycopg2.errors
import pytest

import db
from db import Connection
from states import Status
from tests.database import test_keys
from tests.support import rows
from tests.support.rows import bring_to, sql

STATUSES = [status.value for status in Status]


def test_the_enum_of_postgres_and_the_enum_of_python_are_the_same_in_the_same_order(
    conn: Connection,
) -> None:
    # Red after a state was added on one side: add it to schema.sql (with a migration) and to
    # states.py.
    found = sql(conn, "SELECT unnest(enum_range(NULL::task_status))::text AS status")
    assert [entry["status"] for entry in found] == STATUSES


# --- the state machine -----------------------------------------------------------------------

# Everything a row of the new status needs, so that no CHECK but only the state machine objects.
STEP = """
UPDATE tasks SET
    status = %(to)s::task_status,
    reason = %(reason)s,
    parent_id = coalesce(parent_id, 0),
    step = coalesce(step, 'step-' || task_id),
    unmet = (%(to)s = 'BLOCKED')::int,
    due = false,
    cancel_requested = false,
    lease_token = CASE WHEN %(to)s = 'RUNNING' THEN gen_random_uuid() END,
    lease_expires_at = CASE WHEN %(to)s = 'RUNNING' THEN current_instant() END,
    worker = coalesce(worker, 'w1'),
    started_at = coalesce(started_at, current_instant()),
    finished_at = CASE WHEN %(to)s IN ('SUCCEEDED', 'FAILED', 'CANCELLED')
                  THEN current_instant() END,
    result = coalesce(result, '{}'),
    last_error = coalesce(last_error, 'said the test')
WHERE task_id = %(task_id)s
"""
CREATE = """
INSERT INTO tasks (kind, payload, parent_id, step, unmet, status, reason, due, lease_token,
                   lease_expires_at, worker, started_at, finished_at, result, last_error)
SELECT 'prompt', '{}', 0, 'one', (%(to)s = 'BLOCKED')::int, %(to)s::task_status, %(reason)s, false,
       CASE WHEN %(to)s = 'RUNNING' THEN gen_random_uuid() END,
       CASE WHEN %(to)s = 'RUNNING' THEN current_instant() END, 'w1', current_instant(),
       CASE WHEN %(to)s IN ('SUCCEEDED', 'FAILED', 'CANCELLED') THEN current_instant() END,
       '{}', 'said the test'
"""


def transitions(conn: Connection) -> set[tuple[str | None, str, str]]:
    found = sql(conn, "SELECT from_status::text, to_status::text, reason FROM transitions")
    return {(entry["from_status"], entry["to_status"], entry["reason"]) for entry in found}


def accepted_steps(
    conn: Connection, statement: str, pairs: list[tuple[str, str]], **values: Any
) -> set[tuple[str, str]]:
    """Which (status, reason) `statement` can write; each is tried alone and taken back."""
    accepted, objections = set(), set()
    with db.transaction(conn) as cursor:
        for to, reason in pairs:
            cursor.execute("SAVEPOINT before")
            try:
                cursor.execute(statement, {"to": to, "reason": reason, **values})
                accepted.add((to, reason))
            except psycopg2.errors.CheckViolation as refused:
                objections.add(refused.diag.constraint_name)
            cursor.execute("ROLLBACK TO before")
    assert objections == {"transitions"}
    return accepted


def every_step(conn: Connection) -> list[tuple[str, str]]:
    reasons = {reason for _, _, reason in transitions(conn)} | {"", "unheard_of"}
    assert len(reasons) > 20
    return [(to, reason) for to in STATUSES for reason in sorted(reasons)]


@pytest.mark.parametrize("status", STATUSES)
def test_the_database_takes_every_legal_step_out_of_a_state_and_refuses_every_other(
    conn: Connection, status: str
) -> None:
    task_id = bring_to(conn, status)
    own_reason = rows.row(conn, task_id)["reason"]
    # To write what is there already is no step; with a new lease token it is one.
    steps = [
        step for step in every_step(conn) if step != (status, own_reason) or status == "RUNNING"
    ]
    legal = {(to, reason) for before, to, reason in transitions(conn) if before == status}
    assert accepted_steps(conn, STEP, steps, task_id=task_id) == legal
    assert rows.row(conn, task_id)["status"] == status


def test_a_task_is_created_only_in_the_states_in_which_a_task_can_begin(conn: Connection) -> None:
    legal = {(to, reason) for before, to, reason in transitions(conn) if before is None}
    assert legal == {(s, "created") for s in ("PENDING", "BLOCKED", "AWAITING_APPROVAL")}
    assert accepted_steps(conn, CREATE, every_step(conn)) == legal


def test_one_illegal_step_takes_back_the_legal_ones_of_its_statement(conn: Connection) -> None:
    pending, failed = bring_to(conn, "PENDING"), bring_to(conn, "BLOCKED")
    statement = """
        UPDATE tasks SET status = 'FAILED', reason = 'expired', due = false, last_error = 'late',
                         finished_at = current_instant(), unmet = 0
    """
    with pytest.raises(psycopg2.errors.CheckViolation, match="cannot go from BLOCKED to FAILED"):
        sql(conn, statement)
    assert [rows.row(conn, task)["status"] for task in (pending, failed)] == ["PENDING", "BLOCKED"]


def test_a_lease_cannot_change_hands_without_a_claim(conn: Connection) -> None:
    task_id = bring_to(conn, "RUNNING")
    with pytest.raises(psycopg2.errors.CheckViolation, match="from RUNNING to RUNNING"):
        sql(conn, "UPDATE tasks SET lease_token = gen_random_uuid(), worker = 'thief'")
    assert rows.row(conn, task_id)["worker"] == "w1"


# --- rows that cannot be ---------------------------------------------------------------------

# Constraint, the state it starts from, and a change that makes the row impossible.
IMPOSSIBLE = [
    ("tenant_is_a_name", "PENDING", "tenant = ''"),
    ("tenant_is_a_name", "PENDING", "tenant = 'a b'"),
    ("tenant_is_a_name", "PENDING", "tenant = repeat('x', 65)"),
    ("tenant_is_a_name", "PENDING", "tenant = E'a\\n'"),
    ("name_is_a_name_and_no_number", "PENDING", "name = '17'"),
    ("name_is_a_name_and_no_number", "PENDING", "name = ''"),
    ("name_is_a_name_and_no_number", "PENDING", "name = 'ü'"),
    ("step_has_a_run", "PENDING", "step = 'a'"),
    ("step_has_a_run", "PENDING", "parent_id = 1"),
    ("key_has_scope_and_hash", "PENDING", "idempotency_key = 'k'"),
    ("key_has_scope_and_hash", "PENDING", "idempotency_scope = 'tasks'"),
    ("key_has_scope_and_hash", "PENDING", "idempotency_key = 'k', idempotency_scope = 'tasks'"),
    ("key_has_scope_and_hash", "PENDING", "request_hash = '\\x00'"),
    ("key_is_not_empty", "PENDING",
     "idempotency_key = '', idempotency_scope = 'tasks', request_hash = '\\x00'"),
    ("priority_is_a_digit", "PENDING", "priority = -1"),
    ("priority_is_a_digit", "PENDING", "priority = 10"),
    ("own_limits_allow_a_try", "PENDING", "max_retry = 0"),
    ("own_limits_allow_a_try", "PENDING", "timeout_seconds = 0"),
    ("route_is_known", "PENDING", "requested_route = 'moon'"),
    ("route_is_known", "PENDING", "route = 'moon'"),
    ("route_is_known", "PENDING", "route = 'auto'"),
    ("counters_count_up", "PENDING", "retry_count = -1"),
    ("counters_count_up", "PENDING", "delivery_count = -1"),
    ("counters_count_up", "PENDING", "delivery_count = 1"),
    ("counters_count_up", "PENDING", "reclaim_count = -1"),
    ("counters_count_up", "PENDING", "prompt_tokens = -1"),
    ("counters_count_up", "PENDING", "completion_tokens = -1"),
    ("cost_is_no_debt", "PENDING", "cost = -0.00001"),
    ("only_pending_is_due", "RUNNING", "due = true"),
    ("only_pending_is_due", "BLOCKED", "due = true"),
    ("only_pending_is_due", "SUCCEEDED", "due = true"),
    ("running_is_leased", "RUNNING", "lease_token = NULL"),
    ("running_is_leased", "RUNNING", "lease_expires_at = NULL"),
    ("running_is_leased", "RUNNING", "worker = NULL"),
    ("running_is_leased", "RUNNING", "started_at = NULL"),
    ("running_is_leased", "PENDING", "lease_token = gen_random_uuid()"),
    ("running_is_leased", "PENDING", "lease_expires_at = current_instant()"),
    ("running_is_leased", "SUCCEEDED", "lease_expires_at = current_instant()"),
    ("only_running_is_asked_to_cancel", "PENDING", "cancel_requested = true"),
    ("only_running_is_asked_to_cancel", "SUCCEEDED", "cancel_requested = true"),
    ("final_is_finished", "SUCCEEDED", "finished_at = NULL"),
    ("final_is_finished", "FAILED", "finished_at = NULL"),
    ("final_is_finished", "CANCELLED", "finished_at = NULL"),
    ("final_is_finished", "PENDING", "finished_at = current_instant()"),
    ("final_is_finished", "RUNNING", "finished_at = current_instant()"),
    ("succeeded_has_a_result", "SUCCEEDED", "result = NULL"),
    ("failed_has_an_error", "FAILED", "last_error = NULL"),
    ("only_a_step_depends", "BLOCKED", "parent_id = NULL, step = NULL"),
    ("only_a_step_depends", "CANCELLED", "unmet = -1"),
    ("blocked_waits_for_something", "BLOCKED", "unmet = 0"),
    ("run_is_no_step", "BLOCKED", "kind = 'run'"),
    ("nobody_works_on_an_approval", "PENDING", "kind = 'approval'"),
    ("nobody_works_on_an_approval", "RUNNING", "kind = 'approval'"),
    ("nothing_unmet_has_begun", "PENDING", "unmet = 1, parent_id = 1, step = 'a'"),
    ("nothing_unmet_has_begun", "SUCCEEDED", "unmet = 1, parent_id = 1, step = 'a'"),
    ("only_running_is_asked_to_cancel", "BLOCKED", "cancel_requested = true"),
    ("run_only_waits_and_ends", "PENDING", "kind = 'run'"),
    ("run_only_waits_and_ends", "RUNNING", "kind = 'run'"),
    ("run_only_waits_and_ends", "AWAITING_APPROVAL",
     "kind = 'run', parent_id = NULL, step = NULL"),
    ("only_a_job_has_a_gate", "PENDING", "gate = '{}'"),
    ("parked_job_asks_something", "AWAITING_APPROVAL", "kind = 'agent'"),
    ("nobody_is_told_of_a_callback", "PENDING", "kind = 'callback', callback_url = 'http://a'"),
]  # fmt: skip

# Constraint, and a row that another table does not take.
IMPOSSIBLE_ELSEWHERE = [
    ("call_uses_no_less_than_nothing",
     "INSERT INTO model_calls (task_id, node, node_run, ordinal, reserved_tokens)"
     " VALUES (1, 'coder', 'coder:1', 0, -1)"),
    ("ended_call_has_its_tokens",
     "INSERT INTO model_calls (task_id, node, node_run, ordinal, reserved_tokens, ended_at)"
     " VALUES (1, 'coder', 'coder:1', 0, 9, current_instant())"),
    ("only_an_ended_call_has_a_reply",
     "INSERT INTO model_calls (task_id, node, node_run, ordinal, reserved_tokens, reply)"
     " VALUES (1, 'coder', 'coder:1', 0, 9, 'yes')"),
    ("secret_tenant_is_a_name",
     "INSERT INTO webhook_secrets (tenant, secret) VALUES ('a b', sha256('a'))"),
    ("secret_is_long",
     "INSERT INTO webhook_secrets (tenant, secret) VALUES ('a', 'short')"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "status", "change"), IMPOSSIBLE, ids=[" ".join(case) for case in IMPOSSIBLE]
)
def test_a_row_that_cannot_be_is_refused(
    conn: Connection, constraint: str, status: str, change: str
) -> None:
    task_id = bring_to(conn, status)
    with pytest.raises(psycopg2.errors.CheckViolation) as refused:
        sql(conn, f"UPDATE tasks SET {change} WHERE task_id = {task_id}")  # noqa: S608
    assert refused.value.diag.constraint_name == constraint


@pytest.mark.parametrize(
    ("constraint", "insert"), IMPOSSIBLE_ELSEWHERE, ids=[name for name, _ in IMPOSSIBLE_ELSEWHERE]
)
def test_another_table_refuses_a_row_that_cannot_be(
    conn: Connection, constraint: str, insert: str
) -> None:
    with pytest.raises(psycopg2.errors.CheckViolation) as refused:
        sql(conn, insert)
    assert refused.value.diag.constraint_name == constraint


def test_no_check_of_any_table_is_without_a_row_that_it_refuses(conn: Connection) -> None:
    found = sql(conn, """
        SELECT conname FROM pg_constraint
        WHERE contype = 'c' AND connamespace = 'public'::regnamespace
    """)  # fmt: skip
    of_other_tables = {"parents_have_lower_numbers"}  # test_runs.py
    of_other_tables |= {case[0] for case in (*test_keys.IMPOSSIBLE, *IMPOSSIBLE_ELSEWHERE)}
    checked = {case[0] for case in IMPOSSIBLE} | of_other_tables
    assert {entry["conname"] for entry in found} == checked


def test_the_rows_that_the_statements_write_pass_every_check(conn: Connection) -> None:
    # The control of the test above: the states themselves are no impossible rows.
    tasks = [bring_to(conn, status) for status in ("BLOCKED", "AWAITING_APPROVAL", "RUNNING")]
    tasks += [bring_to(conn, status) for status in ("SUCCEEDED", "FAILED", "CANCELLED", "PENDING")]
    assert len(set(tasks)) == rows.count_tasks(conn) == len(STATUSES)


TWICE = [
    ("tasks_pkey", "task_id = 1"),
    ("tasks_idempotency",
     "idempotency_key = 'k', idempotency_scope = 'tasks', request_hash = '\\x00'"),
    ("tasks_by_step", "parent_id = 9, step = 'a'"),
    ("tasks_by_live_name", "name = 'n'"),
]  # fmt: skip


@pytest.mark.parametrize(("index", "same"), TWICE, ids=[index for index, _ in TWICE])
def test_what_is_unique_exists_once(conn: Connection, index: str, same: str) -> None:
    for _ in range(2):
        rows.submit(conn)
    with pytest.raises(psycopg2.errors.UniqueViolation) as refused:
        sql(conn, f"UPDATE tasks SET {same}")  # noqa: S608
    assert refused.value.diag.constraint_name == index


def test_two_tasks_may_bear_one_name_and_two_tenants_one_key(conn: Connection) -> None:
    rows.submit(conn, tenant="a")
    rows.submit(conn, tenant="b")
    sql(conn, """
        UPDATE tasks SET name = 'n', idempotency_key = 'k', idempotency_scope = 'tasks',
                         request_hash = '\\x00'
    """)  # fmt: skip
    assert rows.count_tasks(conn) == 2


# --- numbers ---------------------------------------------------------------------------------


def test_numbers_above_two_to_the_31_work_through_submit_claim_settle_and_reap(
    own_conn: Connection,
) -> None:
    conn, start = own_conn, 2**31 + 5
    sql(conn, f"ALTER TABLE tasks ALTER COLUMN task_id RESTART WITH {start}")
    assert rows.submit(conn) == start
    task = rows.claim_only(conn, start)
    assert rows.settle(conn, task.lease, "succeeded") is not None
    assert db.get_task(conn, "default", str(start))["status"] == "SUCCEEDED"
    lost = rows.claimed(conn)
    rows.expire(conn, lost.task_id)
    assert [reaped.task_id for reaped in rows.reap(conn)] == [start + 1]
    assert rows.reasons(conn, start + 1) == ["created", "claimed", "reaped"]


def test_every_number_that_counts_is_a_bigint(conn: Connection) -> None:
    found = sql(conn, """
        SELECT table_name || '.' || column_name AS name FROM information_schema.columns
        WHERE table_schema = 'public' AND data_type IN ('integer', 'smallint')
          AND table_name IN ('tasks', 'audit_log', 'step_edges')
    """)  # fmt: skip
    few = {"tasks.priority", "tasks.max_retry", "tasks.unmet"}  # the last: limits.max_run_edges
    assert {entry["name"] for entry in found} == few


def test_the_largest_number_there_can_be_is_found(own_conn: Connection) -> None:
    sql(own_conn, f"ALTER TABLE tasks ALTER COLUMN task_id RESTART WITH {2**63 - 1}")
    assert rows.submit(own_conn) == 2**63 - 1
    assert db.get_task(own_conn, "default", str(2**63 - 1))["task_id"] == 2**63 - 1

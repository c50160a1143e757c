"""A function keeps its plans: one that was made for tables that were all but empty has to be good
when they are full, before anybody has counted what is in them.
"""

from __future__ import annotations

import pytest

import db
from db import Connection
from queries import leases
from queries.leases import Outcome
from tests.conftest import administrator
from tests.support import rows, runs
from tests.support.plans import Plan, nodes, plans_inside_functions
from tests.support.rows import RETRY, sql

MANY = 400
# A transition is looked up among the thirteen that lead out of RUNNING.
MOST_COMPARED = 20 * MANY
FILL = """
INSERT INTO tasks (kind, payload, status, reason, due, result, finished_at)
SELECT 'tool', '{}', 'SUCCEEDED', 'succeeded', false, '{}', current_instant()
FROM generate_series(1, 30000);
"""


def warm_up(conn: Connection, url: str, counted: str = "waiting") -> Connection:
    """Settle a few steps and tasks while there is next to nothing; then fill the table.

    The planner knows of nothing, of a few that have ended, or of a few that wait.
    """
    if counted == "ended":
        for _ in range(3):
            rows.settle(conn, rows.claimed(conn).lease, "succeeded")
        sql(conn, "ANALYZE tasks")
    few = runs.submit(conn, {"a": [], "b": ["a"], "c": ["a"]})
    with administrator(url) as cursor:
        for table in ("tasks", "step_edges", "transitions"):
            cursor.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
        cursor.execute("VACUUM ANALYZE" if counted == "waiting" else "ANALYZE transitions")
        for step, verdict in (("a", "succeeded"), ("b", "permanent"), ("c", "succeeded")):
            assert rows.settle(conn, runs.take(conn, few, step), verdict)
        assert runs.statuses(conn, few)[""] == "FAILED"
        for _ in range(8):  # after five, Postgres may keep one for all values
            assert rows.settle(conn, rows.claimed(conn).lease, "succeeded")
            assert rows.reap(conn) == []
        # To disable a trigger would make everybody plan anew.
        cursor.execute("SET session_replication_role = replica")
        cursor.execute(FILL)
    return conn


@pytest.fixture(params=["nothing", "ended", "waiting"])
def warm(request: pytest.FixtureRequest, own_database: str, own_conn: Connection) -> Connection:
    return warm_up(own_conn, own_database, request.param)


def settle_many(conn: Connection, verdict: str = "succeeded") -> list[Plan]:
    """Claim whatever is due, settle all of it at once; the plans of that."""
    taken = rows.claim(conn, MANY).tasks
    assert len(taken) == MANY
    fields = {"result": {}} if verdict == "succeeded" else {"error": "it went wrong"}
    outcomes = [(task.lease, Outcome(verdict, **fields)) for task in taken]  # type: ignore[arg-type]
    with plans_inside_functions(conn) as plans:
        assert len(leases.settle_tasks(conn, outcomes, RETRY)) == MANY
    return plans


def goes_through_the_outcomes_by_number(settle: Plan) -> bool:
    """So it locks the tasks in that order; a plan the other way round would take another."""
    (update,) = (node for node in settle.nodes if node["Node Type"] == "ModifyTable")
    (join,) = update["Plans"]
    outer, inner = join["Plans"][:2]
    return (
        (join["Node Type"], inner["Node Type"]) == ("Nested Loop", "Index Scan")
        and inner["Index Name"] == "tasks_pkey"
        and [node["Sort Key"] for node in nodes(outer) if "Sort Key" in node] == [["o_1.task_id"]]
        and not any("Join Type" in node for node in nodes(outer))
    )


def assert_good(plans: list[Plan]) -> None:
    assert [plan.scans_of_whole_tables() for plan in plans if plan.scans_of_whole_tables()] == []
    assert max(plan.most_rows_read() for plan in plans) <= 2 * MANY
    assert max(plan.most_rows_compared() for plan in plans) <= MOST_COMPARED


def test_a_settle_of_many_tasks_reads_those_and_no_other(warm: Connection) -> None:
    db.submit_tasks(warm, [rows.new_task() for _ in range(MANY)])
    plans = settle_many(warm)
    (settle,) = (plan for plan in plans if "jsonb_to_recordset" in plan.text)
    assert goes_through_the_outcomes_by_number(settle)
    assert any(plan.is_of_a_trigger() for plan in plans)
    assert_good(plans)


@pytest.mark.parametrize("verdict", ["succeeded", "permanent"])
def test_the_end_of_many_steps_reads_their_dependents_and_no_other(
    warm: Connection, verdict: str
) -> None:
    first = {f"a{n}": [] for n in range(MANY)}
    runs.submit(warm, {**first, **{f"b{n}": [f"a{n}"] for n in range(MANY)}})
    plans = settle_many(warm, verdict)
    changed = "counted" if verdict == "succeeded" else "doomed"
    assert any(changed in plan.text for plan in plans)
    assert_good(plans)


def test_the_end_of_a_run_reads_its_last_step_and_no_other(warm: Connection) -> None:
    for _ in range(MANY):
        runs.submit(warm, {"a": []})
    plans = settle_many(warm)
    assert any("ended" in plan.text and "UPDATE" in plan.text for plan in plans)
    assert_good(plans)


def test_the_end_of_one_step_of_many_reads_none_that_have_ended(warm: Connection) -> None:
    first = {f"a{n}": [] for n in range(MANY)}
    run_id = runs.submit(warm, {**first, "b": ["a0"], "c": ["b"], "d": ["c"]})
    settle_many(warm)
    lease = runs.take(warm, run_id, "b")
    with plans_inside_functions(warm) as plans:
        assert rows.settle(warm, lease, "succeeded")
    assert_good(plans)
    assert max(plan.most_rows_read() for plan in plans if not plan.is_of_a_trigger()) <= 5


def test_a_reap_of_many_steps_and_tasks_reads_those_and_no_other(warm: Connection) -> None:
    runs.submit(warm, {f"a{n}": [] for n in range(MANY // 2)})
    db.submit_tasks(warm, [rows.new_task() for _ in range(MANY // 2)])
    assert len(rows.claim(warm, MANY, lease_seconds=0).tasks) == MANY
    with plans_inside_functions(warm) as plans:
        assert len(rows.reap(warm)) == MANY
    assert_good(plans)


def test_without_the_settings_of_the_function_a_plan_that_it_keeps_is_a_bad_one(
    own_database: str, own_conn: Connection
) -> None:
    sql(own_conn, "ALTER FUNCTION settle_tasks RESET ALL")
    warm_up(own_conn, own_database)
    db.submit_tasks(own_conn, [rows.new_task() for _ in range(MANY)])
    plans = settle_many(own_conn)
    with pytest.raises(AssertionError):
        assert_good(plans)

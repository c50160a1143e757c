"""audit_log: every transition, in order, for ever; and the clock that dates it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg2.errors
import pytest

from config import Retry
from db import Connection
from queries.schema import ensure_audit_partitions
from tests.support import rows
from tests.support.plans import plans_inside_functions
from tests.support.rows import reasons, set_clock, sql

PARTITIONS = """
SELECT c.relname AS name, pg_get_expr(c.relpartbound, c.oid) AS bounds
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'audit_log'::regclass
ORDER BY c.relname
"""
PARTITION_OPTIONS = """
SELECT c.reloptions::text AS options
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'audit_log'::regclass
"""


def partitions(conn: Connection) -> list[str]:
    return [entry["name"] for entry in sql(conn, PARTITIONS)]


def names_of_months(first: datetime, count: int) -> list[str]:
    months = [(first.year * 12 + first.month - 1 + ahead) for ahead in range(count)]
    return [f"audit_log_{month // 12}_{month % 12 + 1:02}" for month in months]


# --- the story of a task ---------------------------------------------------------------------


def test_the_whole_life_of_a_task_is_told_in_order(conn: Connection) -> None:
    task = rows.claimed(conn, "w1", tenant="acme")
    rows.settle(conn, task.lease, "failure", Retry(max_delay_seconds=0.001))
    rows.make_due(conn, task.task_id)
    again = rows.claim_only(conn, task.task_id, "w2")
    rows.expire(conn, task.task_id)
    rows.reap(conn)
    last = rows.claim_only(conn, task.task_id, "w3")
    rows.settle(conn, last.lease, "succeeded")
    told = [
        (
            entry["from_status"],
            entry["to_status"],
            entry["reason"],
            entry["worker"],
            entry["attempt"],
        )
        for entry in rows.audit(conn, task.task_id)
    ]
    assert told == [
        (None, "PENDING", "created", None, 0),
        ("PENDING", "RUNNING", "claimed", "w1", 1),
        ("RUNNING", "PENDING", "retry", "w1", 1),
        ("PENDING", "RUNNING", "claimed", "w2", 2),
        ("RUNNING", "PENDING", "reaped", "w2", 2),
        ("PENDING", "RUNNING", "claimed", "w3", 3),
        ("RUNNING", "SUCCEEDED", "succeeded", "w3", 3),
    ]
    assert {entry["tenant"] for entry in rows.audit(conn, task.task_id)} == {"acme"}
    assert again.lease.token != task.lease.token


def test_each_state_of_the_story_begins_where_the_one_before_ended(conn: Connection) -> None:
    for status in rows.BRING_TO:
        task_id = rows.bring_to(conn, status)
        story = rows.audit(conn, task_id)
        froms = [entry["from_status"] for entry in story]
        assert froms == [None, *(entry["to_status"] for entry in story[:-1])]
        assert story[-1]["to_status"] == rows.row(conn, task_id)["status"]
        assert story[-1]["reason"] == rows.row(conn, task_id)["reason"]
        rows.sql(conn, "TRUNCATE tasks")  # the audit stays


def test_a_failure_is_remembered_with_its_error_and_its_delay(conn: Connection) -> None:
    task = rows.claimed(conn)
    rows.settle(conn, task.lease, "failure", error="the model said no")
    detail = rows.audit(conn, task.task_id)[-1]["detail"]
    assert detail == {"error": "the model said no", "delay_seconds": 2}


def test_a_dead_letter_is_remembered_with_its_error(conn: Connection) -> None:
    task = rows.claimed(conn)
    rows.settle(conn, task.lease, "permanent", error="no such model")
    assert rows.audit(conn, task.task_id)[-1]["detail"] == {"error": "no such model"}


def test_a_heartbeat_a_due_date_and_a_wish_to_cancel_are_no_transitions(conn: Connection) -> None:
    delayed = rows.submit(conn, delay_seconds=3600)
    running = rows.claimed(conn).task_id
    rows.make_due(conn, delayed)
    rows.expire(conn, running)
    rows.ask_to_cancel(conn, running)
    sql(conn, "UPDATE tasks SET due = true WHERE status = 'PENDING'")
    assert (reasons(conn, delayed), reasons(conn, running)) == (["created"], ["created", "claimed"])


def test_a_transition_that_is_rolled_back_leaves_no_trace(conn: Connection) -> None:
    task_id = rows.submit(conn)
    with pytest.raises(psycopg2.errors.DivisionByZero):
        sql(conn, """
            UPDATE tasks SET status = 'CANCELLED', reason = 'cancelled', due = false,
                             finished_at = current_instant();
            SELECT 1 / 0
        """)  # fmt: skip
    assert reasons(conn, task_id) == ["created"]


def test_a_statement_over_many_rows_writes_one_audit_row_for_each(conn: Connection) -> None:
    tasks = [rows.submit(conn) for _ in range(50)]
    assert len(rows.claim(conn, 50).tasks) == 50
    assert all(reasons(conn, task_id) == ["created", "claimed"] for task_id in tasks)
    claimed = """
        SELECT task_id FROM audit_log WHERE task_id = ANY(%(tasks)s) AND reason = 'claimed'
        ORDER BY id
    """
    assert [entry["task_id"] for entry in sql(conn, claimed, tasks=tasks)] == tasks


def test_whoever_acts_for_a_person_leaves_his_name_at_every_transition(conn: Connection) -> None:
    task = rows.claimed(conn)
    sql(conn, "SELECT set_config('orchestrator.acts_for', 'ann', false)")
    rows.settle(conn, task.lease, "succeeded")
    sql(conn, "RESET orchestrator.acts_for")
    details = [entry["detail"] for entry in rows.audit(conn, task.task_id)]
    assert details == [{}, {}, {"by": "ann"}]


def test_the_plan_kept_from_a_few_rows_compares_no_row_of_many_with_each_other(
    conn: Connection,
) -> None:
    for _ in range(7):
        rows.claimed(conn)
    tasks = [rows.submit(conn, tenant="many") for _ in range(500)]
    with plans_inside_functions(conn) as plans:
        end = """
            UPDATE tasks SET status = 'CANCELLED', reason = 'cancelled', due = false,
                             finished_at = current_instant()
            WHERE task_id = ANY(%(tasks)s)
        """
        sql(conn, end, tasks=tasks)
    assert [reasons(conn, task_id) for task_id in tasks[::100]] == [["created", "cancelled"]] * 5
    compared = [
        node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Join Filter", 0)
        for plan in plans
        for node in plan.nodes
    ]
    assert 500 <= max(compared) <= 5_000


# --- append-only -----------------------------------------------------------------------------

CHANGES = ["UPDATE {} SET reason = 'forged'", "DELETE FROM {}", "TRUNCATE {}"]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_written_can_be_changed_or_taken_back(conn: Connection, change: str) -> None:
    task_id = rows.submit(conn)
    # One row in the partition for what has no month, too.
    set_clock(conn, "2099-01-01T00:00:00Z")
    rows.submit(conn)
    set_clock(conn, None)
    before = sql(conn, "SELECT count(*) AS n FROM audit_log")
    found = sql(conn, "SELECT DISTINCT tableoid::regclass::text AS name FROM audit_log")
    filled = [entry["name"] for entry in found]
    assert len(filled) >= 2
    for table in ["audit_log", *(partitions(conn) if "TRUNCATE" in change else filled)]:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="append-only"):
            sql(conn, change.format(table))
    assert sql(conn, "SELECT count(*) AS n FROM audit_log") == before
    assert reasons(conn, task_id) == ["created"]


def test_an_old_month_goes_by_dropping_its_partition(own_conn: Connection) -> None:
    task_id = rows.submit(own_conn)
    month = sql(own_conn, "SELECT tableoid::regclass::text AS name FROM audit_log")[0]["name"]
    sql(own_conn, f"DROP TABLE {month}")
    assert rows.audit(own_conn, task_id) == []
    assert rows.row(own_conn, task_id)["status"] == "PENDING"


# --- months ----------------------------------------------------------------------------------


def test_there_are_partitions_for_this_month_the_next_two_and_everything_else(
    own_conn: Connection,
) -> None:
    this_month = sql(own_conn, "SELECT current_instant() AS at")[0]["at"].astimezone(UTC)
    assert partitions(own_conn) == sorted([*names_of_months(this_month, 3), "audit_log_other"])


def test_no_partition_is_vacuumed_for_what_is_only_added_to_it(own_conn: Connection) -> None:
    options = sql(own_conn, PARTITION_OPTIONS)
    assert len(options) == 4
    assert {entry["options"] for entry in options} == {"{autovacuum_vacuum_insert_threshold=-1}"}


def test_partitions_that_are_there_are_not_made_again(own_conn: Connection) -> None:
    before = partitions(own_conn)
    assert ensure_audit_partitions(own_conn) == 0
    assert partitions(own_conn) == before


def test_time_goes_on_and_each_new_month_gets_its_partition(own_conn: Connection) -> None:
    set_clock(own_conn, "2040-11-30T23:59:59Z")
    assert ensure_audit_partitions(own_conn) == 3
    set_clock(own_conn, "2040-12-01T00:00:00Z")
    assert ensure_audit_partitions(own_conn) == 1
    made = [name for name in partitions(own_conn) if "_204" in name]
    assert made == names_of_months(datetime(2040, 11, 1, tzinfo=UTC), 4)
    task_id = rows.submit(own_conn)
    where = "SELECT tableoid::regclass::text AS name FROM audit_log WHERE task_id = %(task_id)s"
    assert sql(own_conn, where, task_id=task_id) == [{"name": "audit_log_2040_12"}]


def test_eight_processes_that_make_partitions_at_once_make_each_once(
    own_conn: Connection, own_connect: Callable[[], Connection]
) -> None:
    conns = [own_connect() for _ in range(8)]
    for conn in conns:
        set_clock(conn, "2050-05-05T00:00:00Z")
    together = threading.Barrier(8)

    def make(conn: Connection) -> int:
        together.wait()
        return ensure_audit_partitions(conn)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(make, conns)) == 3
    assert [name for name in partitions(own_conn) if "_2050" in name] == [
        "audit_log_2050_05", "audit_log_2050_06", "audit_log_2050_07",
    ]  # fmt: skip


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
def test_a_month_begins_at_midnight_utc_whatever_the_sessions_time_zone(
    own_conn: Connection, zone: str
) -> None:
    sql(own_conn, "SELECT set_config('TimeZone', %(zone)s, false)", zone=zone)
    set_clock(own_conn, "2031-03-31T23:30:00Z")  # the clocks of summer have changed in between
    assert ensure_audit_partitions(own_conn) == 3
    sql(own_conn, "SET TimeZone = 'UTC'")
    bounds = [entry["bounds"] for entry in sql(own_conn, PARTITIONS) if "_2031" in entry["name"]]
    assert bounds == [
        f"FOR VALUES FROM ('2031-0{month}-01 00:00:00+00') TO ('2031-0{month + 1}-01 00:00:00+00')"
        for month in (3, 4, 5)
    ]


def test_a_row_whose_month_has_no_partition_is_kept_in_audit_log_other(
    own_conn: Connection,
) -> None:
    set_clock(own_conn, "2077-07-07T00:00:00Z")
    task_id = rows.submit(own_conn)
    found = sql(own_conn, "SELECT task_id, at FROM audit_log_other")
    assert found == [{"task_id": task_id, "at": datetime(2077, 7, 7, tzinfo=UTC)}]


def test_a_month_that_audit_log_other_has_begun_stays_there_and_the_next_gets_its_own(
    own_conn: Connection,
) -> None:
    set_clock(own_conn, "2077-07-07T00:00:00Z")
    task_id = rows.submit(own_conn)
    assert ensure_audit_partitions(own_conn) == 2
    made = [name for name in partitions(own_conn) if "_2077" in name]
    assert made == ["audit_log_2077_08", "audit_log_2077_09"]
    assert reasons(own_conn, task_id) == ["created"]


# --- the only clock --------------------------------------------------------------------------


def test_a_clock_that_stands_dates_the_row_the_lease_and_the_audit(conn: Connection) -> None:
    base = datetime(2026, 1, 1, 12, tzinfo=UTC)
    set_clock(conn, base.isoformat())
    task_id = rows.submit(conn, delay_seconds=10)
    set_clock(conn, (base + timedelta(seconds=9, milliseconds=999)).isoformat())
    assert rows.claim(conn).tasks == []
    set_clock(conn, (base + timedelta(seconds=10)).isoformat())
    task = rows.claim_only(conn, task_id)
    seen = rows.row(conn, task_id)
    assert seen["created_at"] == base
    assert seen["started_at"] == base + timedelta(seconds=10)
    assert seen["lease_expires_at"] == base + timedelta(seconds=10 + rows.LEASE_SECONDS)
    set_clock(conn, (base + timedelta(seconds=17)).isoformat())
    rows.settle(conn, task.lease, "succeeded")
    seen = rows.row(conn, task_id)
    assert seen["finished_at"] == base + timedelta(seconds=17)
    assert seen["duration_seconds"] == 7
    assert [entry["at"] for entry in rows.audit(conn, task_id)] == [
        base, base + timedelta(seconds=10), base + timedelta(seconds=17),
    ]  # fmt: skip


def test_a_lease_ends_after_its_seconds_and_not_at_them(conn: Connection) -> None:
    base = datetime(2026, 1, 1, tzinfo=UTC)
    set_clock(conn, base.isoformat())
    task = rows.claimed(conn)
    set_clock(conn, (base + timedelta(seconds=rows.LEASE_SECONDS)).isoformat())
    assert rows.reap(conn) == []
    set_clock(conn, (base + timedelta(seconds=rows.LEASE_SECONDS, microseconds=1)).isoformat())
    assert [reaped.task_id for reaped in rows.reap(conn)] == [task.task_id]


def test_a_clock_that_stands_in_one_session_runs_in_the_others(
    conn: Connection, connect: Callable[[], Connection]
) -> None:
    set_clock(conn, "2000-01-01T00:00:00Z")
    other = connect()
    ask = "SELECT current_instant() AS at, clock_timestamp() AS clock"
    assert sql(conn, ask)[0]["at"].year == 2000
    times = sql(other, ask)[0]
    assert timedelta(0) <= times["clock"] - times["at"] < timedelta(seconds=10)


def test_a_lease_that_is_taken_late_in_a_transaction_is_not_born_old(conn: Connection) -> None:
    times = sql(conn, "SELECT pg_sleep(0.05); SELECT current_instant() - now() AS age")[0]
    assert times["age"] >= timedelta(seconds=0.05)


def test_a_statement_that_changes_very_many_rows_is_audited_in_time(conn: Connection) -> None:
    # Once the audit compared each changed row with each other: this took two minutes, and the
    # statement was given up at its limit of half of one.
    rows.submit(conn)
    rows.sql(conn, CANCEL_ALL)  # the trigger's plan is made for one row and kept
    rows.sql(
        conn,
        "INSERT INTO tasks (kind, payload) SELECT 'prompt', '{}' FROM generate_series(1, 30000)",
    )
    before = rows.sql(conn, COUNT_CANCELLED)[0]["n"]
    rows.sql(conn, CANCEL_ALL)
    assert rows.sql(conn, COUNT_CANCELLED) == [{"n": before + 30_000}]


COUNT_CANCELLED = "SELECT count(*) AS n FROM audit_log WHERE reason = 'cancelled'"
CANCEL_ALL = """
UPDATE tasks
SET status = 'CANCELLED', reason = 'cancelled', due = false, finished_at = current_instant()
WHERE status = 'PENDING'
"""

"""The proof of chaos.sh sees what it is for: a sound history passes, and each fault is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest

import db
from db import Connection
from local.chaos_plan import PlannedRun, PlannedStep, make_plan
from local.chaos_proof import ALWAYS, AT_THE_END, FULFILLED, STORED, Caps, ask, compare
from queries import operations, runs
from tests.conftest import fresh_database, settings_for
from tests.support import rows
from tests.support.rows import RETRY
from tests.support.runs import number, submit

CAPS = Caps(RETRY.max_retry, RETRY.max_delivery)
DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


def finish_all(conn: Connection, verdict: str = "succeeded") -> None:
    while tasks := rows.claim(conn, 50).tasks:
        for task in tasks:
            rows.settle(conn, task.lease, verdict)


def play(conn: Connection) -> list[int]:
    """Five runs to their ends: good, dead, dead and revived, cancelled, lost with its workers."""
    good = submit(conn, DIAMOND)
    finish_all(conn)
    dead = submit(conn, DIAMOND)
    finish_all(conn, "permanent")
    revived = submit(conn, {"a": [], "approval.x": [], "c": ["a", "approval.x"]})
    finish_all(conn, "deadline")
    operations.requeue_task(conn, "default", str(number(conn, revived, "a")))
    finish_all(conn)
    operations.approve_task(conn, "default", str(number(conn, revived, "approval.x")), True, None)
    finish_all(conn)
    cancelled = submit(conn, DIAMOND)
    (task,) = rows.claim(conn).tasks
    runs.cancel_run(conn, "default", str(cancelled))
    rows.settle(conn, task.lease, "succeeded")
    lost = submit(conn, {"a": []})
    for _ in range(RETRY.max_delivery):
        rows.expire(conn, rows.claim_only(conn, lost + 1).task_id)
        rows.reap(conn)
    return [good, dead, revived, cancelled, lost]


@pytest.fixture(scope="module")
def played(server_url: str) -> Iterator[tuple[str, list[int]]]:
    """A database in which all that has happened, and the numbers of its runs."""
    with fresh_database(server_url) as url:
        conn = db.connect(url, settings_for(url).database, "tests")
        yield url, play(conn)
        conn.close()


@pytest.fixture
def spoilt(played: tuple[str, list[int]]) -> Iterator[Any]:
    """A connection on which anything can be done to that history, and is undone after the test."""
    conn = psycopg2.connect(played[0])
    with conn.cursor() as cursor:
        cursor.execute("ALTER TABLE tasks DISABLE TRIGGER ALL")
        cursor.execute("SET LOCAL session_replication_role = replica")  # no trigger of audit_log
        cursor.execute(
            "SELECT conname FROM pg_constraint WHERE conrelid = 'tasks'::regclass AND contype = 'c'"
        )
        for (name,) in cursor.fetchall():
            cursor.execute(f"ALTER TABLE tasks DROP CONSTRAINT {name}")
    yield conn
    conn.rollback()
    conn.close()


def broken(conn: Any) -> list[str]:
    return [answer.holds for answer in ask(conn, ALWAYS + AT_THE_END, CAPS) if answer.at_fault]


def test_nothing_is_at_fault_in_a_sound_history(spoilt: Any) -> None:
    assert broken(spoilt) == []


OF = {question.holds: question for question in ALWAYS + AT_THE_END}
# By the question that is to find it. The runs are given by their numbers, b and d are steps of the
# good one; in the dead one, b and d are CANCELLED.
FAULTS_OF = {
    "the audit of each row is one unbroken chain": [
        "DELETE FROM audit_log WHERE {b}",
        "DELETE FROM audit_log WHERE {b} AND reason = 'created'",
        "DELETE FROM audit_log WHERE {b} AND reason = 'claimed'",
        "DELETE FROM audit_log WHERE {b} AND reason = 'succeeded'",
        "UPDATE tasks SET status = 'SUCCEEDED', reason = 'succeeded' WHERE task_id = {lost} + 1",
        "UPDATE tasks SET reason = 'approved' WHERE {b}",
    ],
    "each transition is a legal one": [
        "UPDATE audit_log SET reason = 'approved' WHERE {b} AND reason = 'claimed'",
        "UPDATE audit_log SET to_status = 'RUNNING' WHERE {b} AND reason = 'created'",
    ],
    "the audit of each row goes forward": [
        "UPDATE audit_log SET at = at - interval '1 minute' WHERE {b} AND reason = 'succeeded'",
    ],
    "what SUCCEEDED has exactly one success": [
        """
        INSERT INTO audit_log (root_id, task_id, tenant, to_status, reason, attempt)
        SELECT root_id, task_id, tenant, to_status, reason, attempt FROM audit_log
        WHERE {b} AND reason = 'succeeded'
        """,
    ],
    "the counters of each row agree": [
        "UPDATE tasks SET attempt = 2 WHERE {b}",
        "UPDATE tasks SET retry_count = 1 WHERE {b}",
        "UPDATE tasks SET delivery_count = 0 WHERE {b}",
        "UPDATE tasks SET reclaim_count = 1 WHERE {b}",
        "UPDATE audit_log SET attempt = 7 WHERE {b} AND reason = 'claimed'",
    ],
    "what died, died by the rules": [
        "UPDATE tasks SET delivery_count = 2 WHERE task_id = {lost} + 1",
        "UPDATE tasks SET reason = 'max_retry' WHERE task_id = {dead} + 1",
    ],
    "no step could run before": [
        "UPDATE audit_log SET to_status = 'PENDING' WHERE {b} AND reason = 'created'",
        "UPDATE tasks SET started_at = created_at WHERE {b}",
        "INSERT INTO step_edges VALUES ({good} + 3, {good} + 2)",
    ],
    "each step counts the dependencies": [
        "UPDATE tasks SET unmet = 1 WHERE {b}",
        "UPDATE tasks SET unmet = 0 WHERE task_id = {dead} + 2",
    ],
    "each step was promoted once": [
        "DELETE FROM audit_log WHERE {d} AND reason = 'promoted'",
        "UPDATE audit_log SET transaction = '5' WHERE {d} AND reason = 'promoted'",
        "UPDATE audit_log SET reason = 'promoted' WHERE {d} AND reason = 'claimed'",
    ],
    "what depends on a dead step": [
        "UPDATE tasks SET status = 'BLOCKED', finished_at = NULL WHERE task_id = {dead} + 2",
        "UPDATE tasks SET status = 'CANCELLED', reason = 'dependency_failed' WHERE {b}",
    ],
    "each run has the status": [
        "UPDATE tasks SET status = 'SUCCEEDED' WHERE task_id = {dead}",
        "UPDATE tasks SET status = 'FAILED' WHERE task_id = {cancelled}",
        "UPDATE tasks SET status = 'BLOCKED', finished_at = NULL WHERE task_id = {good}",
        "UPDATE tasks SET status = 'PENDING', finished_at = NULL WHERE {b}",
        "DELETE FROM tasks WHERE parent_id = {good}",
    ],
    "each run ended with its last step": [
        """
        UPDATE audit_log SET transaction = '5'
        WHERE task_id = {good} AND reason = 'succeeded'
        """,
    ],
    "every run and every step has ended": [
        "UPDATE tasks SET status = 'BLOCKED' WHERE task_id = {good}",
        "UPDATE tasks SET status = 'RUNNING' WHERE {b}",
    ],
    "no row is leased": [
        "UPDATE tasks SET lease_token = gen_random_uuid() WHERE {b}",
        "UPDATE tasks SET due = true WHERE {b}",
    ],
    "each result was brought by the last worker": [
        """
        UPDATE tasks SET payload = '{{"tool": "flaky"}}', result = '{{"attempt": 2}}' WHERE {b}
        """,
    ],
}
FAULTS = [(fault, statement) for fault, several in FAULTS_OF.items() for statement in several]


@pytest.mark.parametrize(("fault", "statement"), FAULTS)
def test_a_fault_that_is_planted_is_found(
    spoilt: Any, played: tuple[str, list[int]], fault: str, statement: str
) -> None:
    names = ("good", "dead", "revived", "cancelled", "lost")
    numbers = dict(zip(names, played[1], strict=True))
    steps = {"b": f"task_id = {numbers['good'] + 2}", "d": f"task_id = {numbers['good'] + 4}"}
    with spoilt.cursor() as cursor:
        cursor.execute(statement.format(**numbers, **steps))
        assert cursor.rowcount > 0
    assert [holds for holds in broken(spoilt) if holds.startswith(fault)] != []


def test_there_is_a_fault_for_each_question() -> None:
    asked = {holds for fault in FAULTS_OF for holds in OF if holds.startswith(fault)}
    assert asked == set(OF)


# --- what was planned ------------------------------------------------------------------------


def planned(edges: dict[str, list[str]], **fates: Any) -> PlannedRun:
    steps = [
        PlannedStep(name, {}, tuple(needs), fates.get(name, "succeeds"))
        for name, needs in edges.items()
    ]
    return PlannedRun("a test", tuple(steps), 0, None)


def missed(conn: Any, played: tuple[str, list[int]], **changes: PlannedRun) -> list[str]:
    good, dead, revived, cancelled, lost = played[1]
    plans = {
        "good": (good, planned(DIAMOND)),
        "dead": (dead, planned(DIAMOND, a="permanent")),
        "revived": (revived, planned(
            {"a": [], "approval.x": [], "c": ["a", "approval.x"]}, **{"approval.x": "approved"})),
        "cancelled": (cancelled, planned(DIAMOND)),
        "lost": (lost, planned({"a": []})),
    }  # fmt: skip
    runs_of = {run_id: changes.get(name, run) for name, (run_id, run) in plans.items()}
    answers = compare(conn, runs_of, {cancelled})
    return [answer.holds for answer in answers if answer.at_fault]


def test_what_came_as_planned_is_no_fault_and_neither_is_a_dead_letter_by_the_rules(
    spoilt: Any, played: tuple[str, list[int]]
) -> None:
    assert missed(spoilt, played) == []


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (planned(DIAMOND, b="permanent"), FULFILLED),
        (planned(DIAMOND, b="max_retry"), FULFILLED),
        (planned({**DIAMOND, "d": ["b"]}), STORED),
        (planned({**DIAMOND, "e": []}), STORED),
    ],
)
def test_what_came_otherwise_than_planned_is_found(
    spoilt: Any, played: tuple[str, list[int]], run: PlannedRun, fault: str
) -> None:
    assert missed(spoilt, played, good=run) == [fault]


def test_a_run_that_is_gone_is_found(spoilt: Any, played: tuple[str, list[int]]) -> None:
    with spoilt.cursor() as cursor:
        cursor.execute(
            "DELETE FROM tasks WHERE %(good)s IN (task_id, parent_id)", {"good": played[1][0]}
        )
    assert missed(spoilt, played) == [STORED]


def test_one_seed_makes_one_plan() -> None:
    first, again, other = (make_plan(seed, 60, 40, 3, 2.0) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first.runs) == 40
    fates = {step.fate for run in first.runs for step in run.steps}
    assert {"succeeds", "max_retry", "approved"} <= fates
    assert {blow.place for blow in first.blows} == {0, 1, 2}
    assert {blow.frozen_seconds is None for blow in first.blows} == {True, False}

"""Runs of any shape under anything that can happen, and large ones to their ends.

A failure prints the steps that led to it and its seed; STATE_MACHINE_SEED=… repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest

from db import Connection
from queries import leases, operations, runs, steps
from queries.leases import Outcome
from tests.conftest import administrator, fresh_database
from tests.support import proof, rows
from tests.support.functions import rewritten
from tests.support.rows import RETRY, sql
from tests.support.runs import Edges, submit

pytest.register_assert_rewrite("tests.support.run_machine")
REASON = "needs hypothesis: pip install -r requirements-dev.txt"
hypothesis = pytest.importorskip("hypothesis", reason=REASON)
stateful = pytest.importorskip("hypothesis.stateful", reason=REASON)
machine = pytest.importorskip("tests.support.run_machine", reason=REASON)

Connect = Callable[[], Connection]


@pytest.fixture(scope="module")
def module_database(server_url: str) -> Iterator[str]:
    """Here even the audit log can be emptied: each game is to be judged by its own."""
    with fresh_database(server_url) as url:
        with administrator(url) as cursor:
            cursor.execute("SELECT relid::text FROM pg_partition_tree('audit_log')")
            for (table,) in cursor.fetchall():
                cursor.execute(f"DROP TRIGGER append_only_truncate ON {table}")
        yield url


@pytest.fixture
def database_url(module_database: str) -> str:
    with administrator(module_database) as cursor:
        cursor.execute("TRUNCATE tasks, step_edges, audit_log")
    return module_database


# --- small ones, and whatever can happen to them ---------------------------------------------


def run_machine(connect: Connect, seed: int, **settings: Any) -> None:
    """Play that many games, each of up to forty steps."""

    class Machine(machine.RunMachine):
        connections = (connect(), connect())

    usual = {
        "stateful_step_count": 40,
        "deadline": None,
        "database": None,
        "print_blob": True,
        "report_multiple_bugs": False,
        "suppress_health_check": list(hypothesis.HealthCheck),
    }
    stateful.run_state_machine_as_test(
        hypothesis.seed(seed)(Machine), settings=hypothesis.settings(**{**usual, **settings})
    )


def test_whatever_happens_to_its_steps_a_run_is_what_they_make_it_and_comes_to_its_end(
    connect: Connect,
) -> None:
    seed = int(os.environ.get("STATE_MACHINE_SEED", random.randrange(2**32)))
    print(f"STATE_MACHINE_SEED={seed}")  # noqa: T201
    run_machine(connect, seed, max_examples=30)


# Each guard, where it stands in its statement, and what the statement is like without it.
GUARDS = {
    "two parents in one batch": (
        None, "end_steps", "t.unmet - met.times AS unmet", "t.unmet - 1 AS unmet"),
    "what is cancelled is not promoted": (
        None, "end_steps", "t.status = 'BLOCKED' AND t.unmet", "t.unmet"),
    "death goes all the way down": (
        None, "end_steps", "needs = doomed.task_id",
        "needs = doomed.task_id AND doomed.task_id = ANY(dead)"),
    "a run waits for those that wait for a person": (
        None, "end_runs", ", 'AWAITING_APPROVAL'", ""),
    "another dead ancestor forbids revival": (
        steps, "REVIVE_DESCENDANTS", " EXCEPT SELECT task_id FROM doomed", ""),
    "an approval asks again": (
        operations, "REQUEUE_IF_DEAD", "WHEN 'approval' THEN 'AWAITING_APPROVAL'", ""),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name", "guard", "without"), GUARDS.values(), ids=GUARDS.keys())
def test_without_a_guard_the_same_machine_finds_what_goes_wrong(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType | None,
    name: str,
    guard: str,
    without: str,
) -> None:
    changed: AbstractContextManager[None] = nullcontext()
    if module is None:  # a function of the database
        changed = rewritten(connect(), name, {guard: without})
    else:
        statement = getattr(module, name)
        assert guard in statement
        for where in (steps, runs, operations):
            if hasattr(where, name):
                monkeypatch.setattr(where, name, statement.replace(guard, without))
    generated_only = [hypothesis.Phase.generate]  # no shrinking
    # A promise, or the database itself:
    with changed, pytest.raises(Exception):  # noqa: B017, PT011
        run_machine(connect, seed=1, max_examples=200, phases=generated_only)


# --- large ones, and many --------------------------------------------------------------------


def chain(length: int) -> Edges:
    return {f"s{n}": [f"s{n - 1}"] if n else [] for n in range(length)}


def star(points: int) -> Edges:
    return {"centre": [], **{f"s{n}": ["centre"] for n in range(points - 1)}}


def funnel(steps: int) -> Edges:
    before = {f"s{n}": [] for n in range(steps - 1)}
    return {**before, "last": list(before)}


def any_graph(dice: random.Random) -> Edges:
    """Layers of diamonds, fans and chains."""
    edges: dict[str, list[str]] = {}
    for number in range(dice.randint(1, 14)):
        before = list(edges)[-dice.choice([1, 3, 14]) :]
        how_many = min(len(before), dice.choice([0, 1, 1, 2, 3]))
        edges[f"s{number}"] = dice.sample(before, how_many)
    return edges


THOUSANDS = {"chain": chain(1000), "star": star(1000), "funnel": funnel(1000)}
UNENDED = "SELECT 1 FROM tasks WHERE parent_id IS NULL AND finished_at IS NULL LIMIT 1"


def work(conn: Connection, batch: int, verdict_of: Callable[[], str]) -> None:
    """Claim and settle a batch at a time until every run has ended."""
    while sql(conn, UNENDED):
        if tasks := rows.claim(conn, batch).tasks:
            outcomes = [
                (task.lease, Outcome(verdict_of(), {"text": ""}, "it failed"))  # type: ignore[arg-type]
                for task in tasks
            ]
            assert len(leases.settle_tasks(conn, outcomes, RETRY)) == len(tasks)


def work_in_threads(connect: Connect, threads: int, verdict_of: Callable[[], str]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        calls = [pool.submit(work, connect(), 20, verdict_of) for _ in range(threads)]
        for call in calls:
            call.result(120)


@pytest.mark.parametrize("edges", THOUSANDS.values(), ids=THOUSANDS.keys())
def test_a_run_of_a_thousand_steps_succeeds(
    connect: Connect, conn: Connection, edges: Edges
) -> None:
    run_id = submit(conn, edges)
    work_in_threads(connect, 2, lambda: "succeeded")
    assert rows.row(conn, run_id)["status"] == "SUCCEEDED"
    proof.check(conn, ended=True)


@pytest.mark.parametrize("edges", THOUSANDS.values(), ids=THOUSANDS.keys())
def test_a_death_a_requeue_and_a_cancel_reach_all_of_a_thousand_steps(
    conn: Connection, edges: Edges
) -> None:
    run_id = submit(conn, edges)
    (first,) = rows.claim(conn, 1).tasks
    rows.settle(conn, first.lease, "permanent")
    others = sum(not needs for needs in edges.values()) - 1
    left = "SELECT count(*) AS n FROM tasks WHERE parent_id = %(run_id)s AND finished_at IS NULL"
    assert sql(conn, left, run_id=run_id)[0]["n"] == others
    proof.check(conn)
    operations.requeue_task(conn, "default", str(first.task_id))
    assert sql(conn, left, run_id=run_id)[0]["n"] == len(edges)
    proof.check(conn)
    assert runs.cancel_run(conn, "default", str(run_id)).status == "CANCELLED"
    proof.check(conn, ended=True)


def test_two_hundred_runs_settled_in_batches_by_four_workers_all_end_as_they_should(
    connect: Connect, conn: Connection
) -> None:
    dice = random.Random(7)
    for _ in range(200):
        submit(conn, any_graph(dice))
    # Each thread throws the same dice: which step fails is up to chance, and to nobody here.
    work_in_threads(connect, 4, lambda: "permanent" if dice.random() < 0.05 else "succeeded")
    proof.check(conn, ended=True)
    found = "SELECT DISTINCT status::text FROM tasks WHERE kind = 'run' ORDER BY 1"
    assert [row["status"] for row in sql(conn, found)] == ["FAILED", "SUCCEEDED"]

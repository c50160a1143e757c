"""The tests' own view of the queue, beside the code under test: whole rows, audit, invariants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import psycopg2
import psycopg2.extras

import db
from config import DatabaseSettings
from tests.support import runs
from tests.support.processes import eventually
from tests.support.runs import Edges

Row = dict[str, Any]
FAILURES = ("retry", "max_retry", "permanent", "deadline", "recursion_limit")
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")

# What a worker may have asked last before it sleeps: its claim, or what comes behind that.
LAST_OF_A_ROUND = "claim_tasks|SET route|^COMMIT$|ensure_audit_partitions|fold_figures"


class Queue:
    """One test database. While Postgres is away a look is an AssertionError: not yet."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._conn: Any = None

    def submit(self, *prompts: str, **fields: Any) -> list[int]:
        """Create one prompt task each; fields are NewTask's."""
        defaults = {"tenant": "default", "kind": "prompt"}
        tasks = [
            db.NewTask(**{**defaults, "payload": {"prompt": prompt}, **fields})
            for prompt in prompts
        ]
        conn = db.connect(self.url, DatabaseSettings(), "tests")
        try:
            answers = db.submit_tasks(conn, tasks)
        finally:
            conn.close()
        return [answer.task_id for answer in answers if isinstance(answer, db.Submitted)]

    def submit_run(self, edges: Edges) -> int:
        """Create a run of calls of the tool echo; its number."""
        conn = db.connect(self.url, DatabaseSettings(), "tests")
        try:
            return runs.submit(conn, edges)
        finally:
            conn.close()

    def ask(self, statement: str, *values: Any) -> list[Row]:
        """The rows of a statement, run at once and committed."""
        try:
            if self._conn is None or self._conn.closed:
                self._conn = psycopg2.connect(self.url, application_name="tests")
                self._conn.autocommit = True
            with self._conn.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
                cursor.execute(statement, values)
                return [dict(row) for row in cursor] if cursor.description else []
        except (psycopg2.OperationalError, psycopg2.InterfaceError) as away:
            self.close()
            raise AssertionError(f"Postgres is away: {away}") from away

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- one task ---

    def row(self, task_id: int) -> Row:
        (row,) = self.ask("SELECT * FROM tasks WHERE task_id = %s", task_id)
        return row

    def audit(self, task_id: int) -> list[Row]:
        return self.ask("SELECT * FROM audit_log WHERE task_id = %s ORDER BY id", task_id)

    def story(self, task_id: int) -> list[str]:
        """The reasons of its transitions, in order."""
        return [entry["reason"] for entry in self.audit(task_id)]

    def await_status(self, task_id: int, status: str, seconds: float = 30) -> Row:
        def look() -> Row:
            row = self.row(task_id)
            assert row["status"] == status, row
            return row

        return eventually(look, seconds, f"task {task_id} is {status}")

    def await_final(self, task_id: int, seconds: float = 30) -> Row:
        """The task once nothing more will happen to it."""

        def look() -> Row:
            row = self.row(task_id)
            assert row["status"] in FINAL, row
            return row

        return eventually(look, seconds, f"task {task_id} has ended")

    # --- all tasks ---

    def expire_leases_of_the_dead(self) -> list[Row]:
        """End the leases of workers that are gone now, so that nobody waits for their ends."""
        return self.ask(
            "UPDATE tasks SET lease_expires_at = current_instant() - interval '1 second'"
            " WHERE status = 'RUNNING' AND lease_expires_at > current_instant() AND NOT EXISTS ("
            " SELECT FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = tasks.worker)"
            " RETURNING task_id"
        )

    def await_loss(self) -> None:
        """Until Postgres has seen that a worker with a task is gone, whose lease then ends."""
        eventually(self.expire_leases_of_the_dead, what="a task has lost its worker")

    def count(self, status: str) -> int:
        found = self.ask("SELECT count(*) AS n FROM tasks WHERE status::text = %s", status)
        return int(found[0]["n"])

    def statuses(self) -> dict[str, int]:
        rows = self.ask("SELECT status::text, count(*) AS n FROM tasks GROUP BY 1")
        return {row["status"]: row["n"] for row in rows}

    def await_all(self, status: str, seconds: float = 60) -> None:
        """Until every task has this status."""

        def look() -> bool:
            found = self.statuses()
            assert set(found) == {status}, found
            return True

        eventually(look, seconds, f"all tasks are {status}")

    def await_idle(self, worker: str) -> None:
        """Until that worker listens, has looked for work and found none."""
        eventually(
            lambda: (
                self.ask(
                    "SELECT 1 FROM pg_stat_activity WHERE application_name = %s"
                    " AND datname = current_database()"
                    " AND query ~ %s AND state = 'idle'",
                    worker,
                    LAST_OF_A_ROUND,
                )
                and self.ask(
                    "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state = 'idle'",
                    f"{worker} listen",
                )
            ),
            what=f"{worker} is idle",
        )

    def check(self, task_ids: Collection[int] | None = None) -> None:
        """Each audit log is legal and complete, agrees with its row, and settles at most once."""
        allowed = "SELECT from_status::text, to_status::text, reason FROM transitions"
        legal = {tuple(row.values()) for row in self.ask(allowed)}
        logs: defaultdict[int, list[Row]] = defaultdict(list)
        try:  # in one snapshot, for others may be at work
            self.ask("BEGIN ISOLATION LEVEL REPEATABLE READ")
            for entry in self.ask("SELECT * FROM audit_log ORDER BY id"):
                logs[entry["task_id"]].append(entry)
            rows = {row["task_id"]: row for row in self.ask("SELECT * FROM tasks")}
        finally:
            self.ask("COMMIT")
        assert set(logs) == set(rows)
        for task_id in task_ids or rows:
            check_story(rows[task_id], logs[task_id], legal)


def check_story(row: Row, log: Sequence[Row], legal: Collection[tuple[Any, ...]]) -> None:
    """Raise AssertionError where a row and its audit log do not tell one legal story."""
    told = [(entry["from_status"], entry["to_status"], entry["reason"]) for entry in log]
    reasons = [entry["reason"] for entry in log]
    assert [step for step in told if step not in legal] == [], (row["task_id"], told)
    assert [step[0] for step in told] == [None, *(step[1] for step in told[:-1])], told
    assert (told[-1][1], told[-1][2]) == (row["status"], row["reason"]), (row, told)
    assert sum(step[1] in FINAL for step in told) <= 1, f"settled twice: {told}"
    assert [entry["at"] for entry in log] == sorted(entry["at"] for entry in log), log
    assert [e["attempt"] for e in log if e["reason"] == "claimed"] == [
        *range(1, row["attempt"] + 1)
    ], (row, told)
    handed_back = sum(map(reasons.count, ("released", "outage", "parked")))
    assert row["delivery_count"] == row["attempt"] - handed_back, (row, told)
    failures = sum(map(reasons.count, FAILURES))
    assert row["retry_count"] == failures, (row, told)
    lost = reasons.count("reaped") + reasons.count("max_delivery")
    assert row["reclaim_count"] == lost, (row, told)


def most_running_at_once(log: Sequence[Row]) -> int:
    """How many tasks were RUNNING together, by an audit log that one process alone has written."""
    running = most = 0
    for entry in log:
        running += (entry["to_status"] == "RUNNING") - (entry["from_status"] == "RUNNING")
        most = max(most, running)
    return most

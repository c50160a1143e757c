"""Factories that bring a row of `tasks` to a state, through the statements of the product.

What no statement reaches yet (BLOCKED, AWAITING_APPROVAL, a request to cancel) is brought about
by a legal INSERT or UPDATE that the audit trigger accepts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import db
from api.models import PromptTask
from api.requests import canonical_hash
from config import Retry
from db import Connection, NewTask, Row
from queries import claims, leases
from queries.claims import Look, Wanted
from queries.leases import ClaimedTask, Lease, Outcome, Settled

RETRY = Retry()
LEASE_SECONDS = 30.0
_prompts = itertools.count(1)


def sql(conn: Connection, statement: str, **values: Any) -> list[Row]:
    """Run a statement of the test's own."""
    return db.fetch(conn, statement, values)


def row(conn: Connection, task_id: int) -> Row:
    """Every column of the task."""
    (found,) = sql(conn, "SELECT * FROM tasks WHERE task_id = %(task_id)s", task_id=task_id)
    return found


def count_tasks(conn: Connection) -> int:
    return int(sql(conn, "SELECT count(*) AS n FROM tasks")[0]["n"])


def audit(conn: Connection, task_id: int) -> list[Row]:
    """The task's audit rows in the order of their ids."""
    statement = "SELECT * FROM audit_log WHERE task_id = %(task_id)s ORDER BY id"
    return sql(conn, statement, task_id=task_id)


def reasons(conn: Connection, task_id: int) -> list[str]:
    return [entry["reason"] for entry in audit(conn, task_id)]


def set_clock(conn: Connection, instant: str | None) -> None:
    """Let this connection's clock stand at `instant`; None: let it run again."""
    sql(
        conn,
        "SELECT set_config('orchestrator.fake_now', %(instant)s, false)",
        instant=instant or "",
    )


def new_task(**fields: Any) -> NewTask:
    """A prompt task that differs from every other by its prompt."""
    plain = {"tenant": "default", "kind": "prompt", "payload": {"prompt": f"{next(_prompts)}"}}
    return NewTask(**{**plain, **fields})


def submit(conn: Connection, **fields: Any) -> int:
    """PENDING."""
    return db.submit_task(conn, new_task(**fields)).task_id


class Everything:
    """A claim policy: whatever is due, on route local."""

    has_limits = False
    looks_first = False  # or in the message of the claim

    def __init__(self, depth_that_matters: int = 5) -> None:
        self.depth_that_matters = depth_that_matters
        self.budgets: dict[str, int | None] = {}
        self.depth = 0  # as the choice of routes saw it

    def routes_at_any_depth(self) -> list[str] | None:
        if self.looks_first or self.has_limits:
            return None
        return [one.requested_route for one in self._everything()]

    def wanted(self, look: Look) -> tuple[list[Wanted], dict[str, int | None]]:
        self.depth = look.depth
        return self._everything(), self.budgets

    def _everything(self) -> list[Wanted]:
        return [Wanted(route, "all") for route in ("auto", "local", "cloud", "none")]

    def choose(self, tasks: Sequence[ClaimedTask], depth: int) -> list[str | None]:
        self.depth = depth
        return ["local" for _ in tasks]


@dataclass(frozen=True)
class Claimed:
    """What one look at the queue brought."""

    tasks: list[ClaimedTask]
    depth: int  # besides this batch
    next_due_seconds: float | None
    last_tenant: str | None
    is_any_left: bool


def claim(
    conn: Connection,
    slots: int = 1,
    worker: str = "w1",
    lease_seconds: float = LEASE_SECONDS,
    depth_wanted: int = 5,
    after_tenant: str = "",
) -> Claimed:
    """One look at the queue by `worker`, which takes whatever is due."""
    policy = Everything(depth_wanted)
    found = claims.claim_tasks(conn, worker, slots, lease_seconds, policy, after_tenant)
    claims.note_routes(conn, found)
    tasks = [task for task, _ in found.tasks]
    return Claimed(
        tasks, policy.depth, found.next_due_seconds, found.last_tenant, found.is_any_left
    )


def claimed(conn: Connection, worker: str = "w1", **fields: Any) -> ClaimedTask:
    """RUNNING: submit a task and claim it; nothing else may be due."""
    task_id = submit(conn, **fields)
    return claim_only(conn, task_id, worker)


def claim_only(conn: Connection, task_id: int, worker: str = "w1") -> ClaimedTask:
    """RUNNING again: claim the one task that is due, a suspect as well."""
    policy = Everything()
    tasks = claim(conn, 2, worker).tasks
    tasks += [task for task, _ in claims.claim_alone(conn, worker, LEASE_SECONDS, policy).tasks]
    (task,) = tasks
    assert task.task_id == task_id
    return task


def settle(
    conn: Connection, lease: Lease, verdict: str, retry: Retry = RETRY, **fields: Any
) -> Settled | None:
    """Settle one task; None: its lease was not the one that holds it."""
    if verdict == "succeeded":
        fields = {"result": {"text": "done"}, **fields}
    elif verdict not in ("released",):
        fields = {"error": f"{verdict}, says the test", **fields}
    settled = leases.settle_tasks(conn, [(lease, Outcome(verdict, **fields))], retry)  # type: ignore[arg-type]
    return settled[0] if settled else None


def reap(conn: Connection, retry: Retry = RETRY, **others: Any) -> list[Settled]:
    """One page of the reaper; what it takes back is due at once."""
    return leases.reap_tasks(conn, retry, 0.0, **others)


def expire(conn: Connection, task_id: int) -> None:
    """Let the lease have run out a second ago."""
    statement = """
        UPDATE tasks SET lease_expires_at = current_instant() - interval '1 second'
        WHERE task_id = %(task_id)s AND status = 'RUNNING'
    """
    sql(conn, statement, task_id=task_id)


def make_due(conn: Connection, task_id: int) -> None:
    """Let the time come at which a delayed task may run."""
    statement = """
        UPDATE tasks SET available_at = current_instant() - interval '1 second'
        WHERE task_id = %(task_id)s AND status = 'PENDING'
    """
    sql(conn, statement, task_id=task_id)


def ask_to_cancel(conn: Connection, task_id: int) -> None:
    statement = "UPDATE tasks SET cancel_requested = true WHERE task_id = %(task_id)s"
    sql(conn, statement, task_id=task_id)


def claim_this(conn: Connection, task_id: int) -> ClaimedTask:
    """RUNNING: claim a task among others; what else was due runs from now on, too."""
    for _ in range(100):
        for task in claim(conn, 500).tasks:
            if task.task_id == task_id:
                return task
    raise AssertionError(f"task {task_id} is not due: {row(conn, task_id)}")


def finish(conn: Connection, task_id: int, verdict: str = "succeeded", **fields: Any) -> None:
    """SUCCEEDED, or where the verdict leads."""
    assert settle(conn, claim_this(conn, task_id).lease, verdict, **fields) is not None


def request_hash(**body: Any) -> bytes:
    """What POST /tasks stores of such a body."""
    return canonical_hash(PromptTask(**body).as_hashed())


def insert_as(conn: Connection, status: str) -> int:
    """A step that is created as BLOCKED or AWAITING_APPROVAL; its run is not there."""
    statement = """
        INSERT INTO tasks (kind, payload, parent_id, step, unmet, status, due)
        VALUES ('prompt', '{"prompt": "waits"}', 0, %(step)s, (%(status)s = 'BLOCKED')::int,
                %(status)s::task_status, false)
        RETURNING task_id
    """
    step = f"step-{next(_prompts)}"
    return int(sql(conn, statement, status=status, step=step)[0]["task_id"])


def _cancelled(conn: Connection) -> int:
    task = claimed(conn)
    ask_to_cancel(conn, task.task_id)
    settle(conn, task.lease, "released")
    return task.task_id


def _settled(verdict: str) -> Callable[[Connection], int]:
    def bring(conn: Connection) -> int:
        task = claimed(conn)
        settle(conn, task.lease, verdict)
        return task.task_id

    return bring


BRING_TO: dict[str, Callable[[Connection], int]] = {
    "BLOCKED": lambda conn: insert_as(conn, "BLOCKED"),
    "PENDING": submit,
    "RUNNING": lambda conn: claimed(conn).task_id,
    "AWAITING_APPROVAL": lambda conn: insert_as(conn, "AWAITING_APPROVAL"),
    "SUCCEEDED": _settled("succeeded"),
    "FAILED": _settled("permanent"),
    "CANCELLED": _cancelled,
}


def bring_to(conn: Connection, status: str) -> int:
    """The number of a new task that has this status; nothing else may be due."""
    task_id = BRING_TO[status](conn)
    assert row(conn, task_id)["status"] == status
    return task_id

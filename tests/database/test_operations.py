"""queries/operations.py: batch, cancel and requeue, alone and against each other on one row."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import db
from config import DatabaseSettings, Retry
from db import Connection, NewTask, Submitted
from errors import KeyReused, NotFound, StateConflict
from queries import leases, operations
from queries.leases import ClaimedTask, Outcome
from queries.operations import cancel_task, requeue_task, submit_batch
from tests.conftest import fresh_database
from tests.support import jobs, rows, runs
from tests.support.processes import eventually

Connect = Callable[[], Connection]
RETRY = Retry()


def submit(conn: Connection, prompt: str = "p", **fields: Any) -> int:
    fields = {"tenant": "default", "kind": "prompt", "payload": {"prompt": prompt}, **fields}
    return db.submit_task(conn, NewTask(**fields)).task_id


def claim(conn: Connection, slots: int = 1) -> list[ClaimedTask]:
    return rows.claim(conn, slots).tasks


def running(conn: Connection, **fields: Any) -> ClaimedTask:
    task_id = submit(conn, **fields)
    (task,) = claim(conn)
    assert task.task_id == task_id
    return task


def settle(conn: Connection, task: ClaimedTask, verdict: Any, **fields: Any) -> Any:
    fields.setdefault("error", None if verdict == "succeeded" else "it went wrong")
    fields.setdefault("result", {"text": "done"} if verdict == "succeeded" else None)
    settled = leases.settle_tasks(conn, [(task.lease, Outcome(verdict, **fields))], RETRY)
    return settled[0] if settled else None


def dead(conn: Connection, **fields: Any) -> int:
    task = running(conn, **fields)
    settle(conn, task, "permanent")
    return task.task_id


def row(conn: Connection, task_id: int) -> db.Row:
    (found,) = db.fetch(conn, "SELECT * FROM tasks WHERE task_id = %(id)s", {"id": task_id})
    return found


def story(conn: Connection, task_id: int) -> list[str]:
    statement = "SELECT reason FROM audit_log WHERE task_id = %(id)s ORDER BY id"
    return [entry["reason"] for entry in db.fetch(conn, statement, {"id": task_id})]


def someone_waits_for_a_lock(conn: Connection) -> bool:
    statement = """
        SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'
    """
    return bool(db.fetch(conn, statement))


class Meanwhile:
    """Runs a call on a thread of its own; `result` is what came of it, an error included."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._outcome: list[Any] = []

        def run() -> None:
            try:
                self._outcome.append(call(*args))
            except Exception as failed:
                self._outcome.append(failed)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(20)
        return self._outcome[0]


@contextmanager
def holding(conn: Connection, statement: str, values: dict[str, Any]) -> Iterator[list[db.Row]]:
    """Run a statement, and commit it only after the block."""
    with db.transaction(conn) as cursor:
        cursor.execute(statement, values)
        yield cursor.fetchall()


def settling(task: ClaimedTask) -> tuple[str, dict[str, Any]]:
    """The statement and the values with which settle_tasks writes a success."""
    sent: list[tuple[str, dict[str, Any]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "fetch", lambda conn, *call: sent.append(call) or [{"settled": None}])
        outcome = Outcome("succeeded", result={"text": "done"})
        leases.settle_tasks(None, [(task.lease, outcome)], RETRY)  # type: ignore[arg-type]
    return sent[0]


# --- cancel ----------------------------------------------------------------------------------


def test_a_task_that_waits_is_cancelled_at_once_and_never_claimed(conn: Connection) -> None:
    task_id = submit(conn)
    changed = cancel_task(conn, "default", str(task_id))
    assert (changed.task_id, changed.status) == (task_id, "CANCELLED")
    assert row(conn, task_id)["finished_at"] is not None
    assert claim(conn) == []
    assert story(conn, task_id) == ["created", "cancelled"]


@pytest.mark.parametrize("step", ["approval.gate", "behind"])
def test_what_waits_for_somebody_else_is_cancelled_at_once(conn: Connection, step: str) -> None:
    run_id = runs.submit(conn, {"approval.gate": [], "behind": ["approval.gate"]})
    task_id = runs.number(conn, run_id, step)
    assert cancel_task(conn, "default", str(task_id)).status == "CANCELLED"
    assert story(conn, task_id) == ["created", "cancelled"]


@pytest.mark.parametrize("verdict", ["succeeded", "failure", "permanent", "released", "outage"])
def test_whatever_comes_of_a_task_that_was_asked_to_stop_it_ends_cancelled(
    conn: Connection, verdict: str
) -> None:
    task = running(conn)
    for _ in range(2):  # a second request changes nothing
        assert cancel_task(conn, "default", str(task.task_id)).status == "RUNNING"
    beat = leases.renew_leases(conn, [task.lease], 30)
    assert beat.cancelled == {task.lease}
    assert settle(conn, task, verdict, prompt_tokens=3).status == "CANCELLED"
    after = row(conn, task.task_id)
    assert (after["prompt_tokens"], after["result"]) == (3, None)
    assert story(conn, task.task_id) == ["created", "claimed", "cancelled"]


def test_a_task_whose_worker_died_after_the_cancel_ends_cancelled(conn: Connection) -> None:
    task = running(conn)
    cancel_task(conn, "default", str(task.task_id))
    expire = "UPDATE tasks SET lease_expires_at = current_instant() - interval '1 s'"
    db.fetch(conn, expire)
    leases.reap_tasks(conn, RETRY, 0)
    assert row(conn, task.task_id)["status"] == "CANCELLED"


@pytest.mark.parametrize("verdict", ["succeeded", "permanent"])
def test_a_task_that_has_ended_cannot_be_cancelled(conn: Connection, verdict: str) -> None:
    task = running(conn)
    settle(conn, task, verdict)
    before = row(conn, task.task_id)
    with pytest.raises(StateConflict, match=f"task {task.task_id} is {before['status']} already"):
        cancel_task(conn, "default", str(task.task_id))
    assert row(conn, task.task_id) == before


@pytest.mark.parametrize("operation", [cancel_task, requeue_task])
def test_a_task_of_another_tenant_is_not_found(
    conn: Connection, operation: Callable[..., Any]
) -> None:
    task_id = dead(conn)
    for reference in (str(task_id), "nobody", str(2**63), "9" * 5000, "nul\0"):
        with pytest.raises(NotFound):
            operation(conn, "other", reference)
    assert story(conn, task_id) == ["created", "claimed", "permanent"]


def test_a_name_means_the_newest_task_that_bears_it(conn: Connection) -> None:
    ids = [rows.bring_to(conn, "SUCCEEDED"), submit(conn)]
    db.fetch(conn, "UPDATE tasks SET name = 'report' WHERE task_id = ANY(%(ids)s)", {"ids": ids})
    assert cancel_task(conn, "default", "report").task_id == "report"
    assert [row(conn, task_id)["status"] for task_id in ids] == ["SUCCEEDED", "CANCELLED"]


def test_a_cancel_that_meets_a_settle_waits_for_it_and_is_then_too_late(connect: Connect) -> None:
    worker, user, witness = connect(), connect(), connect()
    task = running(worker)
    with holding(worker, *settling(task)) as settled:
        (told,) = map(leases.Settled, *settled[0]["settled"])
        assert (told.task_id, told.status) == (task.task_id, "SUCCEEDED")
        cancel = Meanwhile(cancel_task, user, "default", str(task.task_id))
        eventually(lambda: someone_waits_for_a_lock(witness))
    assert isinstance(cancel.result(), StateConflict)
    assert row(witness, task.task_id)["result"] == {"text": "done"}
    assert story(witness, task.task_id) == ["created", "claimed", "succeeded"]


def test_a_settle_that_meets_a_cancel_waits_for_it_and_then_obeys(connect: Connect) -> None:
    worker, user, witness = connect(), connect(), connect()
    task = running(worker)
    with holding(user, operations.CANCEL_UNLESS_FINAL, {"task_id": task.task_id}) as cancelled:
        assert cancelled[0]["status"] == "RUNNING"
        success = Meanwhile(settle, worker, task, "succeeded")
        eventually(lambda: someone_waits_for_a_lock(witness))
    assert success.result().status == "CANCELLED"
    assert row(witness, task.task_id)["result"] is None
    assert story(witness, task.task_id) == ["created", "claimed", "cancelled"]


def test_a_cancel_that_meets_a_claim_waits_for_it_and_then_asks_the_worker(
    connect: Connect,
) -> None:
    worker, user, witness = connect(), connect(), connect()
    task_id = submit(worker)
    take = """
        UPDATE tasks
        SET status = 'RUNNING', reason = 'claimed', due = false, attempt = 1, worker = 'w1',
            lease_token = gen_random_uuid(), lease_expires_at = current_instant(),
            started_at = current_instant()
        WHERE task_id = %(task_id)s
        RETURNING status
    """
    with holding(worker, take, {"task_id": task_id}):
        cancel = Meanwhile(cancel_task, user, "default", str(task_id))
        eventually(lambda: someone_waits_for_a_lock(witness))
    assert cancel.result().status == "RUNNING"
    assert row(witness, task_id)["cancel_requested"] is True
    assert story(witness, task_id) == ["created", "claimed"]


# The clock is read between the reaper's snapshot and its row locks: here it waits for the test.
SLOW_CLOCK = """
CREATE OR REPLACE FUNCTION current_instant() RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(42);
    RETURN clock_timestamp();
END $$
"""


def test_a_cancel_between_the_reapers_look_and_its_lock_is_obeyed(server_url: str) -> None:
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(fresh_database(server_url))
        worker, user, clock, witness = (
            stack.enter_context(contextlib.closing(db.connect(url, DatabaseSettings(), "test")))
            for _ in range(4)
        )
        task = running(worker)
        expire = "UPDATE tasks SET lease_expires_at = current_instant() - interval '1 s'"
        db.fetch(worker, expire)
        db.fetch(worker, SLOW_CLOCK)
        with holding(clock, "SELECT pg_advisory_xact_lock(42)", {}):
            reap = Meanwhile(leases.reap_tasks, worker, RETRY, 0)
            eventually(lambda: someone_waits_for_a_lock(witness))
            db.fetch(user, "UPDATE tasks SET cancel_requested = true")
        assert [one.status for one in reap.result()] == ["CANCELLED"]
        assert story(witness, task.task_id) == ["created", "claimed", "cancelled"]


def test_a_claim_passes_by_a_task_that_is_just_being_cancelled(connect: Connect) -> None:
    worker, user = connect(), connect()
    first, second = submit(worker), submit(worker)
    with holding(user, operations.CANCEL_UNLESS_FINAL, {"task_id": first}):
        assert [task.task_id for task in claim(worker, slots=2)] == [second]
    assert row(worker, first)["status"] == "CANCELLED"


# --- requeue ---------------------------------------------------------------------------------


def test_a_dead_letter_gets_a_new_life_with_fresh_counters(conn: Connection) -> None:
    task = running(conn, max_retry=1)
    settle(conn, task, "failure", prompt_tokens=5, route="local")
    assert row(conn, task.task_id)["reason"] == "max_retry"
    assert requeue_task(conn, "default", str(task.task_id)).status == "PENDING"
    after = row(conn, task.task_id)
    fresh = ("retry_count", "delivery_count", "last_error", "finished_at", "alone")
    assert [after[column] for column in fresh] == [0, 0, None, None, False]
    assert (after["attempt"], after["prompt_tokens"], after["due"]) == (1, 5, True)
    (again,) = claim(conn)
    assert (again.task_id, again.attempt, again.delivery_count) == (task.task_id, 2, 1)
    assert settle(conn, again, "succeeded").status == "SUCCEEDED"
    assert row(conn, task.task_id)["last_error"] is None
    lives = ["created", "claimed", "max_retry", "requeued", "claimed", "succeeded"]
    assert story(conn, task.task_id) == lives


def test_only_a_dead_letter_can_be_requeued(conn: Connection) -> None:
    waits = submit(conn)
    with pytest.raises(StateConflict, match=f"task {waits} is PENDING; only a dead letter"):
        requeue_task(conn, "default", str(waits))
    (task,) = claim(conn)
    with pytest.raises(StateConflict, match="is RUNNING"):
        requeue_task(conn, "default", str(waits))
    settle(conn, task, "succeeded")
    with pytest.raises(StateConflict, match="is SUCCEEDED"):
        requeue_task(conn, "default", str(waits))
    assert "requeued" not in story(conn, waits)


def test_of_two_requeues_at_once_one_gives_a_new_life_and_the_other_hears_of_it(
    connect: Connect,
) -> None:
    first, second, witness = connect(), connect(), connect()
    task_id = dead(first)
    with holding(first, operations.REQUEUE_IF_DEAD, {"task_id": task_id}):
        late = Meanwhile(requeue_task, second, "default", str(task_id))
        eventually(lambda: someone_waits_for_a_lock(witness))
    assert isinstance(late.result(), StateConflict)
    assert story(witness, task_id).count("requeued") == 1


# --- decide ----------------------------------------------------------------------------------


def test_a_decision_holds_only_for_what_the_job_asks_when_it_is_written(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id, seen = jobs.parked(conn, "default", {"code": "first"})
    stale = operations.find_task(conn, "default", str(task_id))
    operations.approve_task(conn, "default", str(task_id), False, None)
    jobs.park(conn, task_id, {"code": "second"})
    looks = iter([stale])  # as one who looked before the job went on and asked again
    look = operations.find_task
    monkeypatch.setattr(operations, "find_task", lambda *asked: next(looks, None) or look(*asked))
    with pytest.raises(StateConflict, match="has changed since"):
        operations.approve_task(conn, "default", str(task_id), True, None, seen)
    after = row(conn, task_id)
    assert (after["status"], "decision" in after["gate"]) == ("AWAITING_APPROVAL", False)


def test_a_decision_that_meets_another_waits_for_it_and_is_then_too_late(connect: Connect) -> None:
    first, second, witness = connect(), connect(), connect()
    task_id, artefact = jobs.parked(first, "default", {"code": "x"})
    values = {"task_id": task_id, "approved": True, "feedback": "yes", "artefact": artefact}
    with holding(first, operations.DECIDE_JOB, values):
        late = Meanwhile(
            operations.approve_task, second, "default", str(task_id), False, "no", artefact
        )
        eventually(lambda: someone_waits_for_a_lock(witness))
    assert isinstance(late.result(), StateConflict)
    assert row(witness, task_id)["gate"]["decision"] == {"approved": True, "feedback": "yes"}
    assert story(witness, task_id) == ["created", "claimed", "parked", "approved"]


# --- batch -----------------------------------------------------------------------------------


def batch(*prompts: str, key: str | None = None, digest: bytes = b"same") -> list[NewTask]:
    tasks = [NewTask("default", "prompt", {"prompt": prompt}) for prompt in prompts]
    if key is not None:
        by_key = {"idempotency_scope": "batch", "idempotency_key": key, "request_hash": digest}
        tasks[0] = NewTask("default", "prompt", {"prompt": prompts[0]}, **by_key)  # type: ignore[arg-type]
    return tasks


def test_a_batch_is_stored_in_its_order(conn: Connection) -> None:
    stored = submit_batch(conn, batch("a", "b", "c"))
    ids = [one.task_id for one in stored]
    assert ids == sorted(ids)
    assert [row(conn, task_id)["payload"]["prompt"] for task_id in ids] == ["a", "b", "c"]
    assert {(one.status, one.replayed) for one in stored} == {("PENDING", False)}


def test_of_a_batch_that_postgres_refuses_in_part_nothing_is_stored(conn: Connection) -> None:
    count = "SELECT count(*) AS n FROM tasks"
    before = db.fetch(conn, count)
    bad = [*batch("a", "b", key="k"), NewTask("no name!", "prompt", {"prompt": "c"})]
    with pytest.raises(Exception, match="tenant_is_a_name"):
        submit_batch(conn, bad)
    assert db.fetch(conn, count) == before
    assert not submit_batch(conn, batch("a", key="k"))[0].replayed


def test_a_batch_that_comes_again_finds_its_tasks_and_their_present_status(
    conn: Connection,
) -> None:
    first = submit_batch(conn, batch("a", "b", "c", key="k"))
    submit(conn, "of another request")
    cancel_task(conn, "default", str(first[1].task_id))
    again = submit_batch(conn, batch("a", "b", "c", key="k"))
    assert [one.task_id for one in again] == [one.task_id for one in first]
    assert [one.status for one in again] == ["PENDING", "CANCELLED", "PENDING"]
    assert all(one.replayed for one in again)


def test_a_key_of_a_batch_with_another_body_is_refused(conn: Connection) -> None:
    submit_batch(conn, batch("a", key="k"))
    with pytest.raises(KeyReused):
        submit_batch(conn, batch("a", "b", key="k", digest=b"other"))


def test_a_batch_that_meets_its_double_waits_and_makes_no_second_one(connect: Connect) -> None:
    first, second, witness = connect(), connect(), connect()
    with db.transaction(first) as cursor:
        stored = db.submit_batch_in_tx(cursor, batch("a", key="k"))
        double = Meanwhile(submit_batch, second, batch("a", key="k"))
        eventually(lambda: someone_waits_for_a_lock(witness))
    assert double.result() == [Submitted(stored[0].task_id, "PENDING", replayed=True)]


def test_a_batch_whose_double_rolls_back_is_stored_itself(connect: Connect) -> None:
    first, second, witness = connect(), connect(), connect()
    with contextlib.suppress(ZeroDivisionError), db.transaction(first) as cursor:
        db.submit_batch_in_tx(cursor, batch("a", key="k"))
        double = Meanwhile(submit_batch, second, batch("a", "b", key="k"))
        eventually(lambda: someone_waits_for_a_lock(witness))
        raise ZeroDivisionError
    assert [one.replayed for one in double.result()] == [False, False]

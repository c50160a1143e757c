"""worker/settling.py: an outcome whose rows somebody holds keeps no other from being written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import db
from config import Settings
from db import Connection
from queries import leases
from queries.leases import Lease, Outcome
from tests.support import rows, runs
from tests.support.rows import RETRY
from tests.support.stage import Connect
from worker.held import Held
from worker.settler import Settler
from worker.settling import LARGEST_BATCH_CHARACTERS, batch_to_settle, settle_batch

DONE = Outcome("succeeded", result={"text": "done"})
HOLD = "SELECT FROM tasks WHERE task_id = ANY(%(held)s) ORDER BY task_id FOR UPDATE"


def test_a_batch_is_as_large_as_one_statement_can_carry() -> None:
    half = "x" * (LARGEST_BATCH_CHARACTERS // 2)
    large = [
        Outcome("succeeded", result={"text": half}),
        Outcome("parked", gate={"asks": half}),
    ]
    unsettled = [(Lease(number, ""), outcome) for number, outcome in enumerate(large + large)]
    for number in range(4):
        assert batch_to_settle(unsettled[number:]) == [unsettled[number]]
    small = [(lease, DONE) for lease, _ in unsettled]
    assert batch_to_settle(small) == small


def test_outcomes_whose_run_or_row_is_held_wait_and_all_others_are_written(
    conn: Connection, connect: Connect
) -> None:
    held_run, free_run = runs.submit(conn, {"a": [], "b": []}), runs.submit(conn, {"a": []})
    held_up = [runs.take(conn, held_run, "a"), runs.take(conn, held_run, "b")]
    written = [runs.take(conn, free_run, "a"), rows.claimed(conn).lease]
    held_up.append(rows.claimed(conn).lease)
    batch = [(lease, DONE) for lease in [*held_up, *written]]
    with db.transaction(connect()) as cursor:
        cursor.execute(HOLD, {"held": [held_run, held_up[-1].task_id]})
        settled, again = settle_batch(conn, batch, RETRY)
        assert {one.task_id for one in settled} == {lease.task_id for lease in written}
        assert [lease for lease, _ in again] == held_up
        assert runs.statuses(conn, free_run)[""] == "SUCCEEDED"
    settled, again = settle_batch(conn, again, RETRY)
    assert (len(settled), again) == (3, [])
    assert runs.statuses(conn, held_run) == {"": "SUCCEEDED", "a": "SUCCEEDED", "b": "SUCCEEDED"}


UNSTORABLE = {
    "a NUL": {"text": "\0"},
    "half a character": {"text": "\ud83d"},
    "no JSON": {"text": {1, 2}},
    "no number": float("nan"),
}


@pytest.mark.parametrize("result", UNSTORABLE.values(), ids=UNSTORABLE.keys())
def test_an_outcome_that_cannot_be_stored_becomes_a_failure_beside_one_that_can(
    conn: Connection, result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = rows.claimed(conn).lease, rows.claimed(conn).lease
    batch = [(bad, Outcome("succeeded", result=result)), (good, DONE)]
    settled, again = settle_batch(conn, batch, RETRY)
    assert again == []
    assert {(one.task_id, one.reason) for one in settled} == {
        (bad.task_id, "retry"),
        (good.task_id, "succeeded"),
    }
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.startswith(f"The outcome of task {bad.task_id} cannot be stored: ")
    assert "\n" not in told, "Postgres quotes the outcome, and answers are never logged"
    assert "its outcome could not be stored" in rows.row(conn, bad.task_id)["last_error"]


@contextmanager
def unwritable(conn: Connection, task_id: int) -> Iterator[None]:
    """Let Postgres refuse whatever is written to that row."""
    rows.sql(
        conn,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'this row is broken'; END $$;"
        "CREATE TRIGGER broken BEFORE UPDATE ON tasks FOR EACH ROW"
        f" WHEN (OLD.task_id = {task_id:d}) EXECUTE FUNCTION refuse()",
    )
    yield
    rows.sql(conn, "DROP TRIGGER broken ON tasks; DROP FUNCTION refuse()")


@pytest.fixture
def settler_of(settings: Settings) -> Iterator[Callable[[Held, list[Any]], Settler]]:
    """A settler, not started, that takes what is in the list."""
    made: list[Settler] = []

    def settler_of(held: Held, finished: list[Any]) -> Settler:
        def take() -> list[Any]:
            taken, finished[:] = finished[:], []
            return taken

        made.append(Settler(settings, "w", held, take, lambda: None, lambda is_any: None))
        return made[-1]

    yield settler_of
    for one in made:
        one._disconnect()


def test_an_outcome_that_cannot_be_stored_nor_its_failure_is_given_up_and_delays_no_other(
    conn: Connection,
    connect: Connect,
    settler_of: Callable[[Held, list[Any]], Settler],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody can write to such a row: its lease runs out, and it is tried from the start."""
    claimed = [rows.claimed(conn) for _ in range(4)]
    bad, *good, held_up = [task.lease for task in claimed]
    run_id = runs.submit(conn, {"a": []})
    step = runs.take(conn, run_id, "a")
    held = Held()
    held.add(claimed)
    finished = [(lease, DONE) for lease in (bad, *good, step, held_up)]
    settler = settler_of(held, finished)
    with unwritable(conn, bad.task_id):
        with db.transaction(connect()) as cursor:
            cursor.execute(HOLD, {"held": [held_up.task_id]})
            assert settler._settle_safely() is not None
            assert [lease for lease, _ in settler._unsettled] == [held_up]
            assert held.leases() == [held_up]  # the heartbeat renews no other
        assert settler._settle_safely() is None  # there is nothing more to do
        assert len(held) == 0
    for lease in (*good, step, held_up):
        assert rows.row(conn, lease.task_id)["status"] == "SUCCEEDED"
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"task {bad.task_id} " in told
    assert "this row is broken" in told
    assert rows.row(conn, bad.task_id)["lease_token"] == bad.token
    rows.expire(conn, bad.task_id)
    (reaped,) = leases.reap_tasks(conn, RETRY, 0)
    assert (reaped.task_id, reaped.reason) == (bad.task_id, "reaped")


@pytest.mark.parametrize("tasks", [1, 3])
def test_what_keeps_every_outcome_from_being_stored_loses_none_of_them(
    conn: Connection,
    settler_of: Callable[[Held, list[Any]], Settler],
    caplog: pytest.LogCaptureFixture,
    tasks: int,
) -> None:
    """It is the database then, and not the row: nobody is to do what was paid once more."""
    claimed = [rows.claimed(conn) for _ in range(tasks)]
    leases = [task.lease for task in claimed]
    held = Held()
    held.add(claimed)
    told = Outcome("succeeded", result={"text": "an answer that no log is to have"})
    settler = settler_of(held, [(lease, told) for lease in leases])
    refuses = (
        "ALTER TABLE tasks ADD CONSTRAINT nothing CHECK (finished_at IS NULL AND retry_count = 0)"
    )
    rows.sql(conn, refuses)
    assert settler._settle_safely() is not None
    assert held.leases() == leases  # the heartbeat goes on to renew them
    rows.sql(conn, "ALTER TABLE tasks DROP CONSTRAINT nothing")
    assert 'violates check constraint "nothing"' in caplog.text
    assert "an answer" not in caplog.text
    assert "Failing row" not in caplog.text
    assert settler._settle_safely() is None
    assert len(held) == 0
    assert {rows.row(conn, lease.task_id)["status"] for lease in leases} == {"SUCCEEDED"}


def test_an_outcome_that_postgres_refuses_becomes_a_failure_beside_one_that_is_held(
    conn: Connection, connect: Connect
) -> None:
    refused, held = rows.claimed(conn).lease, rows.claimed(conn).lease
    batch: list[tuple[Lease, Outcome]] = [
        (refused, Outcome("succeeded", result={"text": "\0"})),
        (held, DONE),
    ]
    with db.transaction(connect()) as cursor:
        cursor.execute(HOLD, {"held": [held.task_id]})
        settled, again = settle_batch(conn, batch, RETRY)
    assert [(one.task_id, one.reason) for one in settled] == [(refused.task_id, "retry")]
    assert [lease for lease, _ in again] == [held]

"""worker/settling.py: an outcome whose rows somebody holds keeps no other from being written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import db
from config import Retry, Settings
from db import Connection
from queries import leases
from queries.leases import Lease, Outcome, Settled
from tests.support import rows, runs
from tests.support.rows import RETRY
from tests.support.stage import Connect
from worker.held import Held
from worker.settler import HELD_UP_SECONDS, Settler
from worker.settling import LARGEST_BATCH_CHARACTERS, Finished, batch_to_settle, settle_batch

DONE = Outcome("succeeded", result={"text": "done"})
HOLD = "SELECT FROM tasks WHERE task_id = ANY(%(held)s) ORDER BY task_id FOR UPDATE"


def written_of(conn: Connection, batch: list[Finished]) -> tuple[list[Settled], list[Finished]]:
    """What became of a batch, and what is held up; none of it may be refused."""
    parts = settle_batch(conn, batch, RETRY)
    assert not any(part.refused for part in parts)
    settled = [one for part in parts for one in part.settled]
    return settled, [pair for part in parts for pair in part.held]


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
        settled, again = written_of(conn, batch)
        assert {one.task_id for one in settled} == {lease.task_id for lease in written}
        assert [lease for lease, _ in again] == held_up
        assert runs.statuses(conn, free_run)[""] == "SUCCEEDED"
    settled, again = written_of(conn, again)
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
    settled, again = written_of(conn, batch)
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
    try:
        yield
    finally:
        rows.sql(conn, "DROP TRIGGER broken ON tasks; DROP FUNCTION refuse()")


def begin_outage(conn: Connection) -> None:
    """From here on Postgres stores no outcome, and no failure."""
    check = "CHECK (finished_at IS NULL AND retry_count = 0) NOT VALID"
    rows.sql(conn, f"ALTER TABLE tasks ADD CONSTRAINT nothing {check}")


def end_outage(conn: Connection) -> None:
    rows.sql(conn, "ALTER TABLE tasks DROP CONSTRAINT IF EXISTS nothing")


class Settling:
    """A settler, not started, with what it holds and a round at a time."""

    def __init__(self, settings: Settings, conn: Connection) -> None:
        self.conn = conn
        self.held = Held()
        self._finished: list[Finished] = []
        self.settler = Settler(
            settings,
            "w",
            self.held,
            self._take,
            before=lambda: None,
            settle_and_claim=lambda conn, batch: None,
            on_settled=lambda is_any: None,
        )

    def claim(self, count: int) -> list[Lease]:
        claimed = [rows.claimed(self.conn) for _ in range(count)]
        self.held.add(claimed)
        return [task.lease for task in claimed]

    def end(self, *leases: Lease, outcome: Outcome = DONE) -> None:
        self._finished += [(lease, outcome) for lease in leases]

    def round(self, after_seconds: float = 0) -> float | None:
        """Settle when so much time has passed; for how long it wants to pause then."""
        self.settler._refused._due -= after_seconds
        return self.settler._settle_safely()

    def statuses(self, leases: Sequence[Lease]) -> list[str]:
        return [rows.row(self.conn, lease.task_id)["status"] for lease in leases]

    def _take(self) -> list[Finished]:
        taken, self._finished = self._finished, []
        return taken


@pytest.fixture
def settling(settings: Settings, conn: Connection) -> Iterator[Settling]:
    made = Settling(settings, conn)
    yield made
    made.settler._disconnect()
    end_outage(conn)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_an_outcome_that_cannot_be_stored_nor_its_failure_is_given_up_and_delays_no_other(
    conn: Connection, connect: Connect, settling: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can write to such a row: its lease runs out, and it is tried from the start."""
    bad, *good, held_up = settling.claim(4)
    run_id = runs.submit(conn, {"a": []})
    step = runs.take(conn, run_id, "a")
    settling.end(bad, *good, step, held_up)
    with unwritable(conn, bad.task_id):
        with db.transaction(connect()) as cursor:
            cursor.execute(HOLD, {"held": [held_up.task_id]})
            assert settling.round() == HELD_UP_SECONDS
            assert settling.held.leases() == [bad, held_up]
            assert settling.statuses([*good, step]) == ["SUCCEEDED"] * 3
        assert settling.round(after_seconds=1) is None  # there is nothing more to do
        assert len(settling.held) == 0  # the heartbeat renews none of them
    assert settling.statuses([held_up]) == ["SUCCEEDED"]
    kept, given_up = errors_in(caplog)
    assert "they are kept and tried again" in kept
    assert "its lease is left to run out" in given_up
    for told in (kept, given_up):
        assert f"task {bad.task_id}" in told
        assert "this row is broken" in told
    assert rows.row(conn, bad.task_id)["lease_token"] == bad.token
    rows.expire(conn, bad.task_id)
    (reaped,) = leases.reap_tasks(conn, RETRY, 0)
    assert (reaped.task_id, reaped.reason) == (bad.task_id, "reaped")


def test_an_outcome_that_fills_a_batch_and_is_refused_holds_up_none_behind_it(
    conn: Connection, settling: Settling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.settling.LARGEST_BATCH_CHARACTERS", 1)
    bad, *good = settling.claim(3)
    settling.end(bad, *good)
    with unwritable(conn, bad.task_id):
        assert settling.round()
        assert settling.statuses(good) == ["SUCCEEDED"] * 2
        assert settling.held.leases() == [bad]
        assert settling.round(after_seconds=1) is None
    assert len(settling.held) == 0


def test_a_refused_outcome_is_kept_until_another_is_stored_however_long_that_takes(
    conn: Connection, settling: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = settling.claim(2)
    settling.end(bad)
    with unwritable(conn, bad.task_id):
        for _ in range(3):
            pause_seconds = settling.round(after_seconds=1)
            assert pause_seconds == pytest.approx(1, abs=0.5)
            assert settling.held.leases() == [bad, good]  # the heartbeat goes on to renew them
        settling.end(good)
        assert settling.round(after_seconds=1) is None
    assert len(settling.held) == 0
    assert len(errors_in(caplog)) == 4
    assert "its lease is left to run out" in errors_in(caplog)[-1]


def test_a_refused_outcome_is_tried_each_second_whatever_else_is_written_or_held_up(
    conn: Connection,
    connect: Connect,
    settling: Settling,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In between it keeps no others from being written in one statement, nor fills the log."""
    monkeypatch.setattr("worker.refused.TRY_AGAIN_SECONDS", 60.0)  # so long is no second
    statements: list[list[Lease]] = []
    settle_tasks = leases.settle_tasks

    def seen(conn: Connection, batch: list[Finished], retry: Retry) -> list[Settled]:
        statements.append([lease for lease, _ in batch])
        return settle_tasks(conn, batch, retry)

    bad, held_up, *good = settling.claim(6)
    settling.end(bad)
    with unwritable(conn, bad.task_id), db.transaction(connect()) as cursor:
        cursor.execute(HOLD, {"held": [held_up.task_id]})
        assert settling.round()
        monkeypatch.setattr(leases, "settle_tasks", seen)
        settling.end(held_up)
        assert settling.round() == HELD_UP_SECONDS
        for pair in (good[:2], good[2:]):
            settling.end(*pair)
            assert settling.round() == HELD_UP_SECONDS
        assert settling.statuses(good) == ["SUCCEEDED"] * 4
        assert statements == [
            [held_up],
            [held_up, *good[:2]], [held_up], good[:1], good[1:2],
            [held_up, *good[2:]], [held_up], good[2:3], good[3:],
        ]  # fmt: skip
    assert len(errors_in(caplog)) == 1


@pytest.mark.parametrize("tasks", [1, 3])
def test_what_keeps_every_outcome_from_being_stored_loses_none_of_them(
    conn: Connection, settling: Settling, caplog: pytest.LogCaptureFixture, tasks: int
) -> None:
    """It is the database then, and not the row: nobody is to do what was paid once more."""
    finished = settling.claim(tasks)
    told = Outcome("succeeded", result={"text": "an answer that no log is to have"})
    settling.end(*finished, outcome=told)
    begin_outage(conn)
    for _ in range(3):
        assert settling.round(after_seconds=1) == pytest.approx(1, abs=0.5)
        assert settling.held.leases() == finished  # the heartbeat goes on to renew them
    end_outage(conn)
    assert 'violates check constraint "nothing"' in caplog.text
    assert "an answer" not in caplog.text
    assert "Failing row" not in caplog.text
    assert len(errors_in(caplog)) == 3  # of all that are refused together one line
    assert settling.round(after_seconds=1) is None
    assert len(settling.held) == 0
    assert set(settling.statuses(finished)) == {"SUCCEEDED"}


def test_an_outage_that_begins_and_ends_amid_writes_loses_no_finished_work(
    conn: Connection, settling: Settling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored before an outcome is refused, or after it, says nothing alone."""
    settle_tasks = leases.settle_tasks
    statements = itertools.count()
    outage = range(0)

    def in_between(conn: Connection, batch: list[Finished], retry: Retry) -> list[Settled]:
        statement = next(statements)
        if statement == outage.start:
            begin_outage(settling.conn)
        if statement == outage.stop:
            end_outage(settling.conn)
        return settle_tasks(conn, batch, retry)

    monkeypatch.setattr(leases, "settle_tasks", in_between)
    monkeypatch.setattr("worker.settling.LARGEST_BATCH", 2)
    for begins in range(3):
        for lasts in range(1, 9):
            outage, statements = range(begins, begins + lasts), itertools.count()
            finished = settling.claim(4)
            settling.end(*finished)
            for _ in range(9):
                settling.round(after_seconds=1)
            assert len(settling.held) == 0
            assert settling.statuses(finished) == ["SUCCEEDED"] * 4, outage


def test_a_refused_outcome_whose_lease_was_lost_meanwhile_is_forgotten(
    conn: Connection, settling: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    (lost,) = settling.claim(1)
    settling.end(lost)
    begin_outage(conn)
    assert settling.round()
    rows.expire(conn, lost.task_id)
    leases.reap_tasks(conn, RETRY, 0)
    assert settling.round(after_seconds=1) is None
    assert len(settling.held) == 0
    assert f"The lease of task {lost.task_id} is gone" in caplog.text
    assert "left to run out" not in caplog.text


def test_an_outcome_that_postgres_refuses_becomes_a_failure_beside_one_that_is_held(
    conn: Connection, connect: Connect
) -> None:
    refused, held = rows.claimed(conn).lease, rows.claimed(conn).lease
    batch: list[Finished] = [
        (refused, Outcome("succeeded", result={"text": "\0"})),
        (held, DONE),
    ]
    with db.transaction(connect()) as cursor:
        cursor.execute(HOLD, {"held": [held.task_id]})
        settled, again = written_of(conn, batch)
    assert [(one.task_id, one.reason) for one in settled] == [(refused.task_id, "retry")]
    assert [lease for lease, _ in again] == [held]

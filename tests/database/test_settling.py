"""worker/settling.py: an outcome whose rows somebody holds keeps no other from being written."""

from __future__ import annotations

import db
from db import Connection
from queries.leases import Lease, Outcome
from tests.support import rows, runs
from tests.support.rows import RETRY
from tests.support.stage import Connect
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

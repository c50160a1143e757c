"""The stream of transitions: none missing, none twice, whatever the order of commits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

import db
from queries.events import Position, here, position_of, read_events

Connect = Callable[[], db.Connection]

RUN = 7  # the root of all rows here; the audit log asks for no task behind it

APPEND = """
INSERT INTO audit_log (root_id, run_id, task_id, tenant, to_status, reason, attempt)
VALUES (coalesce(%(run)s, %(task)s), %(run)s, %(task)s, 'default', 'PENDING', 'created', 0)
"""


def append(conn: db.Connection, task: int, run: int | None = RUN) -> None:
    db.fetch(conn, APPEND, {"run": run, "task": task})


def begin(conn: db.Connection) -> None:
    db.fetch(conn, "COMMIT; BEGIN")


def read_all(conn: db.Connection, after: Position, root: int = RUN) -> list[tuple[int, Position]]:
    """Everything that is new, with the position behind each."""
    found: list[tuple[int, Position]] = []
    while True:
        batch = read_events(conn, root, after)
        assert batch is not None
        found += [(row["task_id"], place) for row, place in batch.events]
        after = batch.end
        if not batch.is_full:
            return [*found, (0, after)]


def test_a_row_that_commits_late_is_read_late_and_not_skipped(
    conn: db.Connection, connect: Connect
) -> None:
    slow, fast = connect(), connect()
    start = here(conn, RUN)
    slow.autocommit = False
    with db.transaction(slow):
        append(slow, 1)
        append(fast, 2)
        first, (_, after_first) = read_all(conn, start)
        assert first[0] == 2
    second, (_, end) = read_all(conn, after_first)
    assert second[0] == 1
    assert read_all(conn, end)[:-1] == []


def test_a_reader_may_stop_behind_any_row_and_resume_without_gap_or_repeat(
    conn: db.Connection, connect: Connect
) -> None:
    slow = connect()
    start = here(conn, RUN)
    append(conn, 1)
    with db.transaction(slow):
        append(slow, 2)
        for task in (3, 4, 5):
            append(conn, task)
        early = read_all(conn, start)
    assert [task for task, _ in early[:-1]] == [1, 3, 4, 5]
    for count, (_, place) in enumerate(early[:-1], start=1):
        rest = [task for task, _ in read_all(conn, place)[:-1]]
        assert sorted(rest) == sorted({2, 3, 4, 5} - {task for task, _ in early[:count]})
        assert len(rest) == len(set(rest))


def test_fifty_writers_that_commit_out_of_order_leave_no_gap_and_no_repeat(
    conn: db.Connection, connect: Connect
) -> None:
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    delays = [chance.random() / 50 for _ in range(200)]
    start = here(conn, RUN)

    def write(writer: int) -> None:
        own = connect()
        for number in range(4):
            with db.transaction(own):
                append(own, writer * 10 + number + 1)
                ended.wait(delays[(writer * 4 + number) % 200])

    ended = threading.Event()
    writers = [threading.Thread(target=write, args=(n,)) for n in range(50)]
    for writer in writers:
        writer.start()
    seen: list[int] = []
    position = start
    while any(writer.is_alive() for writer in writers):
        *rows, (_, position) = read_all(conn, position)
        seen += [task for task, _ in rows]
    *rows, _ = read_all(conn, position)
    seen += [task for task, _ in rows]
    expected = sorted(writer * 10 + number + 1 for writer in range(50) for number in range(4))
    assert sorted(seen) == expected, f"seed {seed}"


def test_a_position_knows_of_no_transaction_that_wrote_nothing_here(
    conn: db.Connection, connect: Connect
) -> None:
    """After a crash of the server its number may be another's, who writes here."""
    append(conn, 1)
    start = here(conn, RUN)
    slow = connect()
    with db.transaction(slow):
        append(slow, 2)
        db.fetch(conn, "SELECT pg_notify('nobody', '')")  # has a number, and is done
        assert here(conn, RUN) == start
        assert read_all(conn, start) == [(0, start)]
    rows = read_all(conn, start)
    assert [task for task, _ in rows] == [2, 0]
    (writer,) = db.fetch(conn, "SELECT max(transaction::text::bigint) AS last FROM audit_log")
    db.fetch(conn, "SELECT pg_notify('nobody', '')")
    for place in (rows[-1][1], here(conn, RUN)):
        _, first_unknown, _ = place.now.split(":")
        assert int(first_unknown) == writer["last"] + 1


@pytest.mark.parametrize("run", [70, None])
def test_the_last_writer_is_the_one_with_the_highest_number(
    conn: db.Connection, run: int | None
) -> None:
    for number in ("9", "10"):
        db.fetch(
            conn,
            """INSERT INTO audit_log
                   (root_id, run_id, task_id, tenant, to_status, reason, attempt, transaction)
               VALUES (70, %(run)s, 70, 'default', 'PENDING', 'created', 0, %(number)s::xid8)""",
            {"run": run, "number": number},
        )
    assert here(conn, 70).now == "11:11:"


def test_more_rows_than_a_batch_holds_come_in_several(conn: db.Connection) -> None:
    start = here(conn, RUN)
    db.fetch(
        conn,
        """INSERT INTO audit_log (root_id, run_id, task_id, tenant, to_status, reason, attempt)
           SELECT %(root)s, %(root)s, n, 'default', 'PENDING', 'created', 0
           FROM generate_series(1, 1234) AS n""",
        {"root": RUN},
    )
    assert [task for task, _ in read_all(conn, start)[:-1]] == list(range(1, 1235))


def test_a_lone_task_has_a_stream_of_its_own_and_a_step_is_in_that_of_its_run(
    conn: db.Connection,
) -> None:
    starts = {root: here(conn, root) for root in (RUN, 5, 6)}
    append(conn, 5, run=None)
    append(conn, 6)
    append(conn, 5, run=None)
    told = {root: [task for task, _ in read_all(conn, starts[root], root)] for root in starts}
    assert told == {RUN: [6, 0], 5: [5, 5, 0], 6: [0]}


def test_a_cursor_carries_its_position(conn: db.Connection) -> None:
    position = here(conn, RUN)
    assert position_of(position.as_cursor()) == position


def test_what_is_no_cursor_is_no_position() -> None:
    for nonsense in ("", "x", "é", "MQ==", "a" * 5000, "%%%"):
        assert position_of(nonsense) is None


def test_a_position_of_another_cluster_or_of_the_future_cannot_be_used(conn: db.Connection) -> None:
    now = here(conn, RUN)
    foreign = Position("1", now.before, now.now)
    ahead = Position(now.cluster, "9:999999999:", "9:999999999:")
    crooked = Position(now.cluster, "9:1:", "9:1:")
    for unusable in (foreign, ahead, crooked):
        assert read_events(conn, RUN, unusable) is None

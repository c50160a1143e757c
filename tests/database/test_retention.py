"""What a purge deletes, what it leaves, and that it is in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import db
from db import Connection
from errors import DatabaseUnavailable, NotFound
from queries import operations, runs
from queries.operations import submit_batch
from queries.retention import Purged, drop_old_audit_partitions, purge_finished
from queries.schema import ensure_audit_partitions
from tests.conftest import administrator
from tests.database.test_audit import partitions
from tests.support import lives, rows
from tests.support.rows import BRING_TO, set_clock, sql
from tests.support.runs import finish, new_run, number, statuses, submit, take
from tests.support.stage import AT_ONCE, Stage

FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
LONG_AGO = "2020-01-01T00:00:00Z"
DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
A_DIAMOND = Purged(runs=1, steps=4, edges=4)


@pytest.fixture(autouse=True)
def no_edges(module_database: str) -> None:
    """The tests of a module share a database; an edge without its step would be another one's."""
    with administrator(module_database) as cursor:
        cursor.execute("TRUNCATE step_edges")


@pytest.fixture
def past(connect: Callable[[], Connection]) -> Connection:
    """A connection on which it is long ago."""
    conn = connect()
    set_clock(conn, LONG_AGO)
    return conn


def numbers(conn: Connection) -> list[int]:
    return [row["task_id"] for row in sql(conn, "SELECT task_id FROM tasks ORDER BY task_id")]


def run_numbers(run_id: int) -> list[int]:
    """Of a diamond's run and steps."""
    return [*range(run_id, run_id + 5)]


def orphans(conn: Connection) -> list[Any]:
    """Steps without their run, and edges without one of their steps."""
    steps = """
        SELECT task_id FROM tasks s
        WHERE parent_id IS NOT NULL AND NOT EXISTS (
            SELECT FROM tasks run WHERE run.task_id = s.parent_id)
    """
    edges = """
        SELECT task_id, needs FROM step_edges e
        WHERE 2 <> (SELECT count(*) FROM tasks t WHERE t.task_id IN (e.task_id, e.needs))
    """
    return sql(conn, steps) + sql(conn, edges)


def ended_task(conn: Connection, **fields: Any) -> int:
    task_id = rows.submit(conn, **fields)
    lives.end(conn, task_id, "succeeded")
    return task_id


def dead_task(conn: Connection) -> int:
    return BRING_TO["FAILED"](conn)


def ended_run(conn: Connection, verdict: str = "succeeded") -> int:
    """A diamond that ended so; what depends on a dead step is cancelled."""
    run_id = submit(conn, DIAMOND)
    for step in DIAMOND if verdict == "succeeded" else "a":
        finish(conn, run_id, step, verdict)
    return run_id


def dead_run(conn: Connection) -> int:
    return ended_run(conn, "permanent")


# --- what goes and what stays ----------------------------------------------------------------


@pytest.mark.parametrize("status", BRING_TO)
def test_of_lone_tasks_only_those_go_that_have_ended(
    conn: Connection, past: Connection, status: str
) -> None:
    task_id = BRING_TO[status](past)
    assert purge_finished(conn, 30) == Purged(tasks=1 if status in FINAL else 0)
    assert numbers(conn) == ([] if status in FINAL else [task_id])


@pytest.mark.parametrize(
    ("now", "goes"), [("2020-01-31T00:00:00Z", False), ("2020-01-31T00:00:00.000001Z", True)]
)
def test_the_days_are_counted_from_the_end_by_the_database_s_clock(
    past: Connection, now: str, goes: bool
) -> None:
    set_clock(past, "2019-06-01T00:00:00Z")  # when they are created
    task, run_id = rows.claimed(past), submit(past, {"a": []})
    lease = take(past, run_id, "a")
    set_clock(past, LONG_AGO)  # when they end
    rows.settle(past, task.lease, "succeeded")
    rows.settle(past, lease, "succeeded")
    set_clock(past, now)
    assert purge_finished(past, 30) == (Purged(tasks=1, runs=1, steps=1) if goes else Purged())


@pytest.mark.parametrize("ended", [ended_run, dead_run])
def test_a_run_goes_with_all_its_steps_and_edges(
    conn: Connection, past: Connection, ended: Callable[[Connection], int]
) -> None:
    kept, gone = submit(past, DIAMOND), ended(past)
    assert purge_finished(conn, 30) == A_DIAMOND
    assert numbers(conn) == run_numbers(kept)
    assert len(sql(conn, "SELECT * FROM step_edges")) == 4
    assert orphans(conn) == []
    with pytest.raises(NotFound):
        runs.find_run(conn, "default", str(gone))


def test_a_run_that_goes_on_keeps_the_steps_that_ended_long_ago(
    conn: Connection, past: Connection
) -> None:
    run_id = submit(past, DIAMOND)
    for step in "abc":
        finish(past, run_id, step)
    assert purge_finished(conn, 30) == Purged()
    finish(conn, run_id, "d")
    assert purge_finished(conn, 30) == Purged()  # it has ended just now
    assert set(statuses(conn, run_id).values()) == {"SUCCEEDED"}


def test_a_run_whose_row_is_wrong_stays_whole_while_a_step_of_it_is_leased(
    conn: Connection, past: Connection
) -> None:
    wrong = dead_run(past)
    sql(
        past,
        "UPDATE tasks SET status = 'PENDING', reason = 'requeued', finished_at = NULL"
        " WHERE task_id = %(task_id)s",
        task_id=number(past, wrong, "a"),
    )
    take(past, wrong, "a")
    ended_run(past)
    assert purge_finished(conn, 30) == A_DIAMOND
    assert numbers(conn) == run_numbers(wrong)


@pytest.mark.parametrize(("page_rows", "batch_rows"), [(1, 1), (3, 2), (7, 100), (1000, 5)])
def test_however_small_pages_and_batches_are_all_that_is_old_goes(
    conn: Connection, past: Connection, page_rows: int, batch_rows: int
) -> None:
    kept = []
    for _ in range(3):
        ended_run(past)
        ended_task(past)
        kept += run_numbers(submit(past, DIAMOND))
    kept.append(rows.submit(conn))
    done = purge_finished(conn, 30, page_rows, batch_rows)
    assert done == Purged(tasks=3, runs=3, steps=12, edges=12)
    assert numbers(conn) == kept
    assert orphans(conn) == []


COUNT_DELETED = """
CREATE TABLE deleted (transaction xid8, rows bigint);
CREATE FUNCTION count_deleted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO deleted SELECT pg_current_xact_id(), count(*) FROM gone;
    RETURN NULL;
END $$;
CREATE TRIGGER count_deleted AFTER DELETE ON tasks REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION count_deleted();
"""


def test_a_transaction_deletes_no_more_than_a_batch_and_the_rest_of_one_run(
    own_conn: Connection,
) -> None:
    sql(own_conn, COUNT_DELETED)
    set_clock(own_conn, LONG_AGO)
    for _ in range(5):
        ended_run(own_conn)
    for _ in range(25):
        ended_task(own_conn)
    set_clock(own_conn, None)
    purge_finished(own_conn, 30, batch_rows=12)
    sums = "SELECT sum(rows)::int AS n FROM deleted GROUP BY transaction ORDER BY n"
    batches = [row["n"] for row in sql(own_conn, sums) if row["n"]]
    assert batches == [1, 10, 12, 12, 15]
    assert numbers(own_conn) == []


# --- keys and batches ------------------------------------------------------------------------

KEY = {"idempotency_scope": "batch", "idempotency_key": "k", "request_hash": b"h"}


def batch(conn: Connection) -> list[int]:
    """Three tasks under one key: new, or the ones of before."""
    tasks = [rows.new_task(**KEY), rows.new_task(), rows.new_task()]
    return [one.task_id for one in submit_batch(conn, tasks)]


def test_the_key_of_a_purged_task_is_free_again(conn: Connection, past: Connection) -> None:
    first = ended_task(past, **KEY)
    assert db.submit_task(conn, rows.new_task(**KEY)).replayed
    purge_finished(conn, 30)
    again = db.submit_task(conn, rows.new_task(**{**KEY, "request_hash": b"another"}))
    assert (again.replayed, again.task_id > first) == (False, True)


def test_the_key_of_a_purged_run_is_free_again(conn: Connection, past: Connection) -> None:
    run = new_run({"a": []}, **KEY)
    first = runs.submit_run(past, run)
    finish(past, first.task_id, "a")
    assert runs.submit_run(conn, run).replayed
    purge_finished(conn, 30)
    assert not runs.submit_run(conn, run).replayed


@pytest.mark.parametrize(
    ("ended", "kept"), [((1, 2), (0, 1, 2)), ((0, 1), (2,)), ((0, 1, 2), ()), ((0,), (1, 2))]
)
def test_a_batch_sent_again_is_answered_with_all_of_it_or_made_anew(
    conn: Connection, past: Connection, ended: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    """What is behind the first stays as long as the first does, which has the key."""
    first = batch(past)
    for place in ended:
        lives.end(past, first[place], "succeeded")
    purge_finished(conn, 30, page_rows=2)
    assert numbers(conn) == [first[place] for place in kept]
    again = batch(conn)
    assert len(again) == 3
    assert (again == first) == (0 in kept)
    assert set(again) <= set(numbers(conn))


# --- others at the same time -----------------------------------------------------------------


def purge(conn: Connection) -> Purged:
    """As one that may not wait for anybody."""
    conn.lock_timeout_seconds = AT_ONCE
    return purge_finished(conn, 30)


Act = Callable[..., Any]


def requeue(conn: Connection, task_id: int) -> Any:
    return operations.requeue_task(conn, "default", str(task_id)).status


def cancel_run(conn: Connection, run_id: int) -> Any:
    return runs.cancel_run(conn, "default", str(run_id)).status


def test_a_dead_letter_that_is_requeued_while_a_purge_looks_stays(
    conn: Connection, past: Connection, stage: Stage
) -> None:
    task_id, other = dead_task(past), dead_task(past)
    with stage.held_back(requeue, task_id):
        assert purge(conn) == Purged(tasks=1)
    assert numbers(conn) == [task_id]
    assert other not in numbers(conn)
    assert rows.row(conn, task_id)["status"] == "PENDING"
    assert purge(conn) == Purged()


def test_a_run_whose_step_is_requeued_while_a_purge_looks_stays_whole(
    conn: Connection, past: Connection, stage: Stage
) -> None:
    run_id = dead_run(past)
    dead_run(past)
    with stage.held_back(requeue, number(conn, run_id, "a")):
        assert purge(conn) == A_DIAMOND
    assert numbers(conn) == run_numbers(run_id)
    assert statuses(conn, run_id) == {
        "": "BLOCKED", "a": "PENDING", "b": "BLOCKED", "c": "BLOCKED", "d": "BLOCKED",
    }  # fmt: skip
    assert purge(conn) == Purged()
    assert orphans(conn) == []


GATE_OF_DELETES = """
CREATE CONSTRAINT TRIGGER gate_of_deletes AFTER DELETE ON tasks DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION stop_at_the_gate();
"""


@pytest.fixture(scope="module")
def gate_of_deletes(gate: None, module_database: str) -> None:
    with administrator(module_database) as cursor:
        cursor.execute(GATE_OF_DELETES)


@pytest.mark.usefixtures("gate_of_deletes")
@pytest.mark.parametrize(
    ("dead", "offset", "act"),
    [(dead_task, 0, requeue), (dead_run, 1, requeue), (dead_run, 0, cancel_run)],
    ids=["a task", "a step", "a run"],
)
def test_whoever_comes_for_what_is_just_being_purged_finds_nothing(
    conn: Connection, past: Connection, stage: Stage, dead: Act, offset: int, act: Act
) -> None:
    task_id = dead(past) + offset
    with stage.held_back(purge_finished, 30):
        pid, second = stage.start(act, task_id)
        stage.await_lock(pid, second)
    with pytest.raises(NotFound):
        second.result(20)
    assert numbers(conn) == []


@pytest.mark.usefixtures("gate_of_deletes")
@pytest.mark.parametrize("dead", [dead_task, dead_run])
def test_work_goes_on_while_a_purge_holds_what_it_deletes(
    conn: Connection, past: Connection, stage: Stage, dead: Act
) -> None:
    dead(past)
    lease = rows.claimed(conn).lease
    run_id = submit(conn, DIAMOND)
    with stage.held_back(purge_finished, 30):
        conn.lock_timeout_seconds = AT_ONCE
        assert rows.settle(conn, lease, "succeeded") is not None
        finish(conn, run_id, "a")
        assert len(rows.claim(conn, 2).tasks) == 2
        assert rows.reap(conn) == []
    assert statuses(conn, run_id)["b"] == "RUNNING"


@pytest.mark.usefixtures("gate_of_deletes")
def test_of_two_purges_at_once_the_second_takes_what_the_first_does_not_hold(
    conn: Connection, past: Connection, stage: Stage
) -> None:
    for _ in range(3):
        ended_task(past)
        ended_run(past)
    with stage.held_back(purge_finished, 30, 10_000, 2) as first:
        assert purge(conn) == Purged(tasks=1, runs=3, steps=12, edges=12)
    assert first.result() == Purged(tasks=2)
    assert numbers(conn) == []
    assert orphans(conn) == []


def test_purges_requeues_and_workers_at_once_leave_nothing_half(
    conn: Connection, past: Connection, connect: Callable[[], Connection]
) -> None:
    for _ in range(30):
        dead_run(past)
        dead_task(past)
    every = numbers(conn)
    dead = [row["task_id"] for row in sql(conn, "SELECT task_id FROM tasks WHERE kind <> 'run'"
            " AND status = 'FAILED' ORDER BY task_id")]  # fmt: skip
    conns = [connect() for _ in range(4)]
    together = threading.Barrier(4)

    def purges(own: Connection) -> Purged:
        together.wait()
        return purge_finished(own, 30, 20, 6)

    def requeues(own: Connection) -> int:
        together.wait()
        revived = 0
        for task_id in reversed(dead):
            try:
                requeue(own, task_id)
                revived += 1
                rows.claim(own, 1)
            except NotFound:
                continue
        return revived

    with ThreadPoolExecutor(4) as pool:
        purging = [pool.submit(purges, own) for own in conns[:2]]
        requeuing = [pool.submit(requeues, own) for own in conns[2:3]]
        together.wait()
        done = purging[0].result(60) + purging[1].result(60)
        revived = requeuing[0].result(60)
    assert done.tasks + done.runs + revived == 60
    assert len(numbers(conn)) == len(every) - done.tasks - done.runs - done.steps
    assert done.steps == 4 * done.runs
    assert orphans(conn) == []
    unended = "SELECT count(*) AS n FROM tasks WHERE parent_id IS NULL AND finished_at IS NULL"
    assert sql(conn, unended)[0]["n"] == revived


# --- the audit log ---------------------------------------------------------------------------


def months(conn: Connection, *instants: str) -> None:
    """Let there be the partitions of these instants and the two months behind each."""
    for instant in instants:
        set_clock(conn, instant)
        ensure_audit_partitions(conn)


@pytest.mark.parametrize(
    ("now", "days", "dropped"),
    [
        ("2031-03-30T23:59:59Z", 30, ["2031_01"]),
        ("2031-03-31T00:00:00Z", 30, ["2031_01", "2031_02"]),
        ("2031-03-02T00:00:00Z", 1, ["2031_01", "2031_02"]),
        ("2031-03-01T12:00:00Z", 1, ["2031_01"]),
        ("2031-03-31T23:59:59Z", 36_500, []),
    ],
)
def test_a_month_goes_once_all_of_it_is_old_enough_and_the_current_one_never(
    own_conn: Connection, now: str, days: int, dropped: list[str]
) -> None:
    months(own_conn, "2031-01-15T00:00:00Z", now)
    before = partitions(own_conn)
    gone = drop_old_audit_partitions(own_conn, days)
    of_the_test = [name for name in gone if "_2031_" in name]  # beside the months of its machine
    assert of_the_test == [f"audit_log_{month}" for month in dropped]
    assert partitions(own_conn) == [name for name in before if name not in gone]
    assert "audit_log_other" in partitions(own_conn)
    assert drop_old_audit_partitions(own_conn, days) == []


def test_a_task_that_lives_longer_than_its_first_months_goes_on_without_them(
    own_conn: Connection,
) -> None:
    months(own_conn, "2031-01-15T00:00:00Z")
    task_id = rows.submit(own_conn)
    months(own_conn, "2031-06-15T00:00:00Z")
    drop_old_audit_partitions(own_conn, 30)
    assert rows.reasons(own_conn, task_id) == []
    rows.finish(own_conn, task_id)
    assert rows.reasons(own_conn, task_id) == ["claimed", "succeeded"]


def test_a_reader_of_the_log_is_not_waited_for_and_holds_up_no_writer(
    own_conn: Connection, own_connect: Callable[[], Connection]
) -> None:
    months(own_conn, "2031-01-15T00:00:00Z", "2031-06-15T00:00:00Z")
    before = partitions(own_conn)
    own_conn.lock_timeout_seconds = 600  # as patient as nothing in here may be
    with db.transaction(own_connect()) as reader:
        reader.execute("SELECT count(*) FROM audit_log")
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            drop_old_audit_partitions(own_conn, 30)
        rows.submit(own_conn)
    assert partitions(own_conn) == before
    assert "audit_log_2031_01" in drop_old_audit_partitions(own_conn, 30)


def test_purges_at_once_drop_each_month_once(
    own_conn: Connection, own_connect: Callable[[], Connection]
) -> None:
    months(own_conn, "2031-01-15T00:00:00Z", "2032-06-15T00:00:00Z")
    conns = [own_connect() for _ in range(4)]
    for conn in conns:
        set_clock(conn, "2032-06-15T00:00:00Z")
        conn.lock_timeout_seconds = 20
    together = threading.Barrier(4)

    def drop(conn: Connection) -> list[str]:
        together.wait()
        return drop_old_audit_partitions(conn, 30)

    with ThreadPoolExecutor(4) as pool:
        dropped = [name for names in pool.map(drop, conns) for name in names]
    assert sorted(name for name in dropped if "_2031" in name) == [
        "audit_log_2031_01", "audit_log_2031_02", "audit_log_2031_03",
    ]  # fmt: skip

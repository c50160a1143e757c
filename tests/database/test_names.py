"""Names of tasks: the unique index decides who bears one, whatever meets it at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import db
from db import Connection, NewTask, Submitted
from errors import KeyReused, NameInUse
from queries.operations import cancel_task, requeue_task, submit_batch
from tests.support import lives, rows
from tests.support.processes import eventually

Connect = Callable[[], Connection]


def job(name: str | None = "t1", key: str | None = None, digest: bytes = b"x") -> NewTask:
    by_key: dict[str, Any] = {}
    if key is not None:
        by_key = {"idempotency_scope": "s", "idempotency_key": key, "request_hash": digest}
    return NewTask("default", "agent", {"task": "t"}, name=name, **by_key)


def someone_waits_for_a_lock(conn: Connection) -> bool:
    statement = """
        SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'
    """
    return bool(rows.sql(conn, statement))


def test_a_taken_name_is_told_with_the_name(conn: Connection) -> None:
    first = db.submit_task(conn, job())
    assert (first.name, first.shown_as) == ("t1", "t1")
    with pytest.raises(NameInUse, match="another task named t1 has not ended") as refused:
        db.submit_task(conn, job())
    assert refused.value.name == "t1"
    with pytest.raises(NameInUse) as refused:
        submit_batch(conn, [job(None), job("t0"), job("t1")])
    assert refused.value.name == "t1"
    assert rows.count_tasks(conn) == 1


@pytest.mark.parametrize("name", ["", "7", "a b", "x" * 65, "a\n"])
def test_what_is_no_name_is_refused_by_postgres_as_well(conn: Connection, name: str) -> None:
    with pytest.raises(Exception, match="name_is_a_name_and_no_number"):
        db.submit_task(conn, job(name))


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_who_meets_a_name_that_is_being_taken_waits_for_how_that_ends(
    connect: Connect, threads: ThreadPoolExecutor, ending: str
) -> None:
    first, second, witness = connect(), connect(), connect()
    with first.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(db.SUBMIT_TASKS, {"tasks": db._as_json([job()], [0])})
        meets = threads.submit(db.submit_task, second, job())
        eventually(lambda: someone_waits_for_a_lock(witness))
        cursor.execute(ending)
    if ending == "COMMIT":
        with pytest.raises(NameInUse):
            meets.result(20)
    else:
        assert not meets.result(20).replayed
    assert rows.count_tasks(witness) == 1


def test_who_meets_a_name_whose_task_is_just_ending_gets_it(
    connect: Connect, threads: ThreadPoolExecutor
) -> None:
    first, second, witness = connect(), connect(), connect()
    task_id = db.submit_task(first, job()).task_id
    cancel = "UPDATE tasks SET status = 'CANCELLED', reason = 'cancelled', due = false, finished_at = current_instant()"  # noqa: E501
    with db.transaction(first) as cursor:
        cursor.execute(cancel)
        meets = threads.submit(db.submit_task, second, job())
        eventually(lambda: someone_waits_for_a_lock(witness))
    assert meets.result(20).task_id > task_id
    assert db.get_task(witness, "default", "t1")["status"] == "PENDING"


def test_a_requeue_finds_the_name_taken_and_changes_nothing(conn: Connection) -> None:
    old = db.submit_task(conn, job()).task_id
    lives.end(conn, old, "permanent")
    db.submit_task(conn, job())
    before = rows.row(conn, old)
    with pytest.raises(NameInUse):
        requeue_task(conn, "default", str(old))
    assert rows.row(conn, old) == before
    cancel_task(conn, "default", "t1")
    assert requeue_task(conn, "default", str(old)).status == "PENDING"


@pytest.fixture
def name_looked_at_first(own_connect: Connect) -> Connect:
    """A database in which the index of names is older than that of keys, as after a restore: what
    inserts looks into its indexes in the order of their age."""
    definition = "SELECT indexdef FROM pg_indexes WHERE indexname = 'tasks_idempotency'"
    conn = own_connect()
    (found,) = rows.sql(conn, definition)
    rows.sql(conn, "DROP INDEX tasks_idempotency")
    rows.sql(conn, found["indexdef"])
    return own_connect


def at_once(connections: list[Connection], call: Callable[[Connection], Any]) -> list[Any]:
    together = threading.Barrier(len(connections))

    def run(conn: Connection) -> Any:
        together.wait()
        return call(conn)

    with ThreadPoolExecutor(len(connections)) as pool:
        return list(pool.map(run, connections))


def test_doubles_with_a_key_are_one_task_though_they_meet_the_name_first(
    name_looked_at_first: Connect,
) -> None:
    connections = [name_looked_at_first() for _ in range(12)]
    for turn in range(20):
        task = job(f"t{turn}", key=f"k{turn}")
        answers = at_once(connections, lambda conn, task=task: db.submit_task(conn, task))  # type: ignore[misc]
        assert sorted(answer.replayed for answer in answers) == [False] + [True] * 11
        assert len({answer.task_id for answer in answers}) == 1
        batch = [job(f"b{turn}", key=f"b{turn}"), job(f"c{turn}")]
        stored = at_once(connections, lambda conn, batch=batch: submit_batch(conn, batch))  # type: ignore[misc]
        assert len({tuple(one.task_id for one in each) for each in stored}) == 1


def test_a_key_with_another_body_is_told_before_the_name(conn: Connection) -> None:
    first = db.submit_task(conn, job(key="k"))
    assert db.submit_task(conn, job(key="k")) == Submitted(first.task_id, "PENDING", True, "t1")
    with pytest.raises(KeyReused):
        db.submit_task(conn, job(key="k", digest=b"other"))


def test_batches_that_take_the_same_names_in_any_order_do_not_break_each_other(
    own_connect: Connect,
) -> None:
    connections = [own_connect() for _ in range(12)]
    for turn in range(5):
        names = [f"n{turn}-{number}" for number in range(20)]

        def post(conn: Connection, names: list[str] = names) -> bool:
            own = names if connections.index(conn) % 2 else names[::-1]
            try:
                return bool(submit_batch(conn, [job(name) for name in own]))
            except NameInUse:
                return False

        assert sum(at_once(connections, post)) == 1

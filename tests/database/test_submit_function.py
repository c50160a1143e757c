"""submit_task of schema.sql, and db.enqueue: a task stored in the caller's own transaction."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extras
import pytest

import db
from config import Settings
from db import Connection
from errors import KeyReused, RequestRefused
from tests.support.processes import eventually


@pytest.fixture
def program(settings: Settings) -> Iterator[Any]:
    """The connection of a program that knows nothing of ours; it commits for itself."""
    with contextlib.closing(psycopg2.connect(settings.database_url)) as conn:
        yield conn


def tasks(conn: Connection) -> list[db.Row]:
    return db.fetch(conn, "SELECT * FROM tasks ORDER BY task_id")


def test_a_task_is_there_when_the_callers_transaction_is_committed_and_not_before(
    program: Any, conn: Connection
) -> None:
    with program.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE orders (id int)")
        cursor.execute("INSERT INTO orders VALUES (7)")
        cursor.execute("SELECT submit_task('Thank the customer of order 7.', priority => 5)")
        (task_id,) = cursor.fetchone()
    assert tasks(conn) == []
    program.commit()
    (task,) = tasks(conn)
    assert (task["task_id"], task["status"], task["priority"]) == (task_id, "PENDING", 5)
    assert task["payload"] == {"prompt": "Thank the customer of order 7."}
    assert (task["kind"], task["tenant"], task["due"]) == ("prompt", "default", True)


def test_a_rollback_of_the_caller_takes_the_task_with_it(program: Any, conn: Connection) -> None:
    task_id = db.enqueue(program, "never to be")
    program.rollback()
    assert tasks(conn) == []
    assert db.fetch(conn, "SELECT 1 FROM audit_log WHERE task_id = %(id)s", {"id": task_id}) == []


def test_a_worker_wakes_at_the_commit(program: Any, conn: Connection, settings: Settings) -> None:
    listener = db.listen(
        settings.database_listen_url, settings.database, "listener", "tasks_claimable"
    )
    with contextlib.closing(listener):
        db.enqueue(program, "wake up")
        db.ping(listener)
        assert db.heard(listener) == []
        program.commit()
        (heard,) = eventually(lambda: db.heard(listener))
        assert heard[:2] == ("tasks_claimable", "")


def test_python_has_the_same_arguments(program: Any, conn: Connection) -> None:
    task_id = db.enqueue(
        program,
        "p",
        tenant="acme",
        priority=9,
        delay_seconds=60,
        max_retry=7,
        timeout_seconds=1.5,
        route="cloud",
        metadata={"ü": [1, None]},
        idempotency_key="k",
    )
    program.commit()
    (task,) = tasks(conn)
    columns = ("task_id", "tenant", "priority", "due", "max_retry", "timeout_seconds")
    assert [task[column] for column in columns] == [task_id, "acme", 9, False, 7, 1.5]
    assert (task["requested_route"], task["metadata"]) == ("cloud", {"ü": [1, None]})
    assert (task["available_at"] - task["created_at"]).total_seconds() == pytest.approx(60, abs=1)
    assert (task["idempotency_scope"], task["idempotency_key"]) == ("sql", "k")


CURSORS = [psycopg2.extensions.cursor, psycopg2.extras.RealDictCursor, psycopg2.extras.DictCursor]


@pytest.mark.parametrize("factory", CURSORS)
def test_any_cursor_of_the_caller_will_do_and_keeps_its_rows(
    program: Any, conn: Connection, factory: Any
) -> None:
    with program.cursor(cursor_factory=factory) as cursor:
        cursor.execute("SELECT 1 AS one")
        task_id = db.enqueue(cursor, "p")
        assert len(cursor.fetchall()) == 1
    program.commit()
    assert [task["task_id"] for task in tasks(conn)] == [task_id]


REFUSED: dict[str, dict[str, Any]] = {
    "prompt: it is empty": {"prompt": " \n"},
    "tenant: ": {"tenant": "no name!"},
    "priority: it is to be 0 to 9": {"priority": 10},
    "delay_seconds: ": {"delay_seconds": -1},
    "delay_seconds: it is": {"delay_seconds": float("nan")},
    "delay_seconds: it is to be": {"delay_seconds": float("inf")},
    "max_retry: ": {"max_retry": 0},
    "timeout_seconds: ": {"timeout_seconds": 0},
    "timeout_seconds: it is": {"timeout_seconds": float("nan")},
    "requested_route: ": {"route": "none"},
    "metadata: ": {"metadata": [1]},
    "idempotency_key: ": {"idempotency_key": ""},
    "idempotency_key: it is": {"idempotency_key": "ü"},
    "idempotency_key: it is to": {"idempotency_key": "x" * 256},
    "cannot be stored": {"prompt": "nul\0"},
    "this cannot be stored": {"prompt": "half \ud800"},
    "this cannot": {"metadata": {"n": float("nan")}},
    "unsupported Unicode": {"metadata": {"text": "nul\0"}},
    "null value in column": {"tenant": None},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_a_task_is_refused_in_plain_words(
    program: Any, conn: Connection, words: str
) -> None:
    with pytest.raises(RequestRefused, match=words):
        db.enqueue(program, **{"prompt": "p", **REFUSED[words]})
    program.rollback()
    assert tasks(conn) == []


def test_the_same_key_and_arguments_make_one_task(program: Any, conn: Connection) -> None:
    first = db.enqueue(program, "p", idempotency_key="k", metadata={"a": 1, "b": 2})
    assert db.enqueue(program, "p", idempotency_key="k", metadata={"b": 2, "a": 1}) == first
    program.commit()
    assert db.enqueue(program, "p", idempotency_key="k", metadata={"a": 1, "b": 2}) == first
    assert db.enqueue(program, "p", idempotency_key="k", tenant="other") != first
    program.commit()
    assert len(tasks(conn)) == 2


@pytest.mark.parametrize(
    "other",
    [{"prompt": "q"}, {"priority": 1}, {"delay_seconds": 1}, {"max_retry": 1}, {"metadata": {}},
     {"timeout_seconds": 1}, {"route": "local"}],
)  # fmt: skip
def test_a_key_with_other_arguments_is_refused(
    program: Any, conn: Connection, other: dict[str, Any]
) -> None:
    db.enqueue(program, "p", idempotency_key="k")
    program.commit()
    with pytest.raises(KeyReused, match="other arguments"):
        db.enqueue(program, **{"prompt": "p", **other}, idempotency_key="k")
    program.rollback()
    assert len(tasks(conn)) == 1


def test_a_key_of_the_http_api_is_another_key(program: Any, conn: Connection) -> None:
    by_key = {"idempotency_scope": "tasks", "idempotency_key": "k", "request_hash": b"x"}
    db.submit_task(conn, db.NewTask("default", "prompt", {"prompt": "p"}, **by_key))  # type: ignore[arg-type]
    db.enqueue(program, "p", idempotency_key="k")
    program.commit()
    assert len(tasks(conn)) == 2


@pytest.mark.parametrize("commits", [True, False])
def test_of_two_with_one_key_at_once_the_second_waits_for_the_first(
    program: Any, conn: Connection, settings: Settings, commits: bool
) -> None:
    first = db.enqueue(program, "p", idempotency_key="k")
    second: list[int] = []

    def run() -> None:
        with contextlib.closing(psycopg2.connect(settings.database_url)) as other:
            second.append(db.enqueue(other, "p", idempotency_key="k"))
            other.commit()

    thread = threading.Thread(target=run)
    thread.start()
    waits = """
        SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'
    """
    eventually(lambda: db.fetch(conn, waits))
    (program.commit if commits else program.rollback)()
    thread.join(20)
    assert (second[0] == first) == commits
    assert [task["task_id"] for task in tasks(conn)] == second


def test_the_function_works_whatever_the_callers_search_path(
    program: Any, conn: Connection
) -> None:
    with program.cursor() as cursor:
        cursor.execute("SET search_path = pg_catalog")
        cursor.execute("SELECT public.submit_task('p')")
    program.commit()
    assert len(tasks(conn)) == 1


def test_a_role_with_the_rights_that_schema_sql_names_can_submit(
    program: Any, conn: Connection
) -> None:
    role = "test_submitter"
    with program.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute(f"GRANT SELECT, INSERT ON tasks TO {role}")
        cursor.execute(f"GRANT SELECT ON transitions TO {role}")
        cursor.execute(f"GRANT INSERT ON audit_log, figure_changes TO {role}")
        cursor.execute(f"SET ROLE {role}")
        cursor.execute("SELECT submit_task('p', idempotency_key => 'k')")
        cursor.execute("SELECT submit_task('p', idempotency_key => 'k')")
        cursor.execute("RESET ROLE")
    program.rollback()  # the role is gone with it


def test_enqueue_leaves_the_way_of_waiting_of_the_callers_process_alone() -> None:
    probe = "import db, psycopg2.extensions as e; assert e.get_wait_callback() is None"
    subprocess.run([sys.executable, "-c", probe], check=True)

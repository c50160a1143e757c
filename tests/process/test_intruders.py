"""What other sessions of the same database do must not stop the workers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import psycopg2
import pytest

import db
from errors import DatabaseUnavailable
from tests.support.fake_ollama import FakeOllama, echo, slow
from tests.support.functions import rewritten
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue

Connect = Callable[[], db.Connection]

SLOWLY = "PERFORM pg_sleep(10);"


def test_a_missing_partition_behind_an_open_transaction_stops_no_worker(
    processes: Processes, queue: Queue, connect: Connect
) -> None:
    (coming,) = queue.ask(
        "SELECT relname FROM pg_class WHERE relname ~ '^audit_log_20.*[0-9]$'"
        " ORDER BY relname DESC LIMIT 1"
    )
    queue.ask(f"DROP TABLE {coming['relname']}")
    with db.transaction(connect()) as cursor:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        cursor.execute("SELECT count(*) FROM audit_log")
        worker = processes.worker()
        ids = queue.submit(*(f"task {number}" for number in range(5)))
        queue.await_all("SUCCEEDED")
        eventually(lambda: "partitions are not made yet" in worker.log)
    assert {queue.row(task_id)["attempt"] for task_id in ids} == {1}


def test_a_process_that_is_frozen_in_the_middle_of_a_claim_lets_go_of_the_turn(
    processes: Processes, queue: Queue, connect: Connect
) -> None:
    """Where calls are limited, claims take turns: the frozen one's transaction is ended."""
    processes.configure(routing={"local_max_in_flight": 2})
    with pytest.raises(DatabaseUnavailable), db.transaction(connect()) as frozen:  # noqa: PT012
        frozen.execute("SELECT pg_advisory_xact_lock(hashtext('orchestrator claim'))")
        processes.worker()
        (task_id,) = queue.submit("task")
        queue.await_status(task_id, "SUCCEEDED")


def test_an_overdue_task_that_somebody_holds_makes_no_worker_spin(
    processes: Processes, queue: Queue, connect: Connect
) -> None:
    queue.ask("ALTER TABLE tasks DISABLE TRIGGER USER")
    (held,) = queue.submit("held", delay_seconds=0.2)
    with db.transaction(connect()) as cursor:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        cursor.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (held,))
        processes.worker()
        eventually(lambda: overdue_by(queue, held) > 0.5)
        before = rounds(queue)
        eventually(lambda: overdue_by(queue, held) > 3.5)
        # This test's own looks are about 150 of them; a worker that spins makes thousands.
        assert rounds(queue) - before < 500
    queue.ask("ALTER TABLE tasks ENABLE TRIGGER USER")
    queue.await_status(held, "SUCCEEDED")


def overdue_by(queue: Queue, task_id: int) -> float:
    statement = "SELECT extract(epoch FROM clock_timestamp() - available_at) AS s FROM tasks"
    return float(queue.ask(f"{statement} WHERE task_id = %s", task_id)[0]["s"])


def rounds(queue: Queue) -> int:
    statement = "SELECT xact_commit AS n FROM pg_stat_database WHERE datname = current_database()"
    return int(queue.ask(statement)[0]["n"])


def test_a_notification_that_makes_no_sense_harms_no_worker(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.default = slow()
    ids = queue.submit("one", "two")
    worker = processes.worker()
    fake.wait_for(count=2)
    for payload in ("", ",", "x", "1,,2", "٣", "1" * 500):
        queue.ask("SELECT pg_notify('tasks_watched', %s)", payload)
        queue.ask("SELECT pg_notify('tasks_claimable', %s)", payload)
    (another,) = queue.submit("another")
    fake.wait_for("another")
    fake.release()
    queue.await_all("SUCCEEDED")
    assert worker.is_running()
    assert {queue.row(task_id)["attempt"] for task_id in (*ids, another)} == {1}


def test_a_newer_schema_stops_no_worker_that_runs_and_no_outcome_is_lost(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.default = slow()
    ids = queue.submit("one", "two")
    worker = processes.worker()
    fake.wait_for(count=2)
    queue.ask("INSERT INTO schema_version SELECT max(version) + 1 FROM schema_version")
    queue.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
        worker.name,
    )
    fake.release()
    queue.await_all("SUCCEEDED")
    assert {queue.row(task_id)["attempt"] for task_id in ids} == {1}
    assert worker.terminate() == 0


def test_a_run_whose_row_somebody_holds_holds_up_no_other_task_of_its_worker(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.default = echo
    run_id = queue.submit_run({"a": [], "b": ["a"]})
    with psycopg2.connect(queue.url) as operator, operator.cursor() as cursor:
        cursor.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (run_id,))
        processes.worker("--concurrency", "2")
        for prompt in ("one", "two", "three"):
            (task_id,) = queue.submit(prompt)
            queue.await_status(task_id, "SUCCEEDED")
        assert queue.row(run_id + 1)["status"] == "RUNNING"
    queue.await_status(run_id, "SUCCEEDED")


def test_a_settle_that_claims_and_gets_no_answer_holds_up_no_other_claim_of_its_worker(
    processes: Processes, fake: FakeOllama, queue: Queue, connect: Connect
) -> None:
    conn = connect()
    moment = "moment := current_instant();"
    with rewritten(conn, "settle_tasks", {moment: SLOWLY + moment}):
        run_id = queue.submit_run({"a": [], "b": ["a"]})
        processes.worker("--concurrency", "4")
        queue.await_status(run_id + 1, "RUNNING")
        eventually(lambda: queue.ask("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"))
        for task_id in queue.submit("one", "two"):
            queue.await_status(task_id, "RUNNING")
        assert queue.row(run_id + 1)["status"] == "RUNNING"
    queue.await_status(run_id, "SUCCEEDED")


def test_a_second_signal_hands_a_suspect_back_at_once_too(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker={"lease_seconds": 30, "heartbeat_seconds": 1, "grace_seconds": 600})
    fake.default = slow()
    (suspect,) = queue.submit("suspect")
    queue.ask("UPDATE tasks SET alone = true, delivery_count = 2, attempt = 2")
    worker = processes.worker()
    fake.wait_for("suspect")
    worker.signal(signal.SIGTERM)
    eventually(lambda: "action=stopping" in worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    row: dict[str, Any] = queue.row(suspect)
    assert (row["status"], row["reason"], row["delivery_count"]) == ("PENDING", "released", 2)


def test_a_row_that_postgres_refuses_is_quoted_by_neither_process(
    processes: Processes, queue: Queue
) -> None:
    """Not in what is behind a request, nor in what is behind a round."""
    secret = "a prompt that no log is to have"
    queue.ask("ALTER TABLE tasks ADD CONSTRAINT unclaimed CHECK (status <> 'RUNNING') NOT VALID")
    queue.submit(secret)
    worker = processes.worker()
    eventually(lambda: 'violates check constraint "unclaimed"' in worker.log)
    queue.ask("ALTER TABLE tasks ADD CONSTRAINT unwanted CHECK (false) NOT VALID")
    api = processes.api()
    assert api.http.post("/tasks", json={"prompt": secret}).status_code == 500
    # It is logged by our handler of faults and by uvicorn.
    eventually(lambda: api.log.count('violates check constraint "unwanted"') == 2)
    for log in (worker.log, api.log):
        assert "Traceback" in log
        assert secret not in log
        assert "Failing row" not in log

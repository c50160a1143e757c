"""Callbacks in the database: when one is queued, what it brings, and how it is signed."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import db
from config import ROOT, Retry, Settings
from db import Connection, Row
from errors import DatabaseUnavailable, RequestRefused
from queries import leases, webhooks
from queries.keys import create_key
from queries.leases import ClaimedTask, Outcome
from queries.listings import list_dead_letters
from queries.operations import cancel_task, requeue_task
from tests.conftest import administrator
from tests.support import rows, runs
from tests.support.rows import sql
from worker import messages

URL = "https://hooks.example/a?b=c"
Connect = Callable[[], Connection]


@pytest.fixture
def database_url(module_database: str) -> str:
    """No task, key or secret in it."""
    with administrator(module_database) as cursor:
        cursor.execute("TRUNCATE tasks, api_keys, tickets, webhook_secrets")
    return module_database


def tell(conn: Connection, *task_ids: int, url: str | None = URL) -> None:
    """Whoever submitted these wants to know of their end."""
    statement = "UPDATE tasks SET callback_url = %(url)s WHERE task_id = ANY(%(task_ids)s)"
    sql(conn, statement, url=url, task_ids=list(task_ids))


def told(conn: Connection, **fields: Any) -> int:
    """PENDING, and somebody wants to know of its end."""
    task_id = rows.submit(conn, **fields)
    tell(conn, task_id)
    return task_id


def running(conn: Connection) -> ClaimedTask:
    task_id = told(conn)
    return rows.claim_this(conn, task_id)


def callbacks(conn: Connection) -> list[Row]:
    return sql(conn, "SELECT * FROM tasks WHERE kind = 'callback' ORDER BY task_id")


def of_tasks(conn: Connection) -> list[int]:
    """Which tasks the callbacks are about."""
    return [row["payload"]["task_id"] for row in callbacks(conn)]


# --- when one is queued ----------------------------------------------------------------------


def settled(verdict: str, retry: Retry = rows.RETRY) -> Callable[[Connection], int]:
    def end(conn: Connection) -> int:
        task = running(conn)
        assert rows.settle(conn, task.lease, verdict, retry) is not None
        return task.task_id

    return end


def cancelled_before_it_began(conn: Connection) -> int:
    task_id = told(conn)
    cancel_task(conn, "default", str(task_id))
    return task_id


def cancelled_while_it_ran(conn: Connection) -> int:
    task = running(conn)
    cancel_task(conn, "default", str(task.task_id))
    rows.settle(conn, task.lease, "released")
    return task.task_id


def lost(retry: Retry, is_cancelled: bool = False) -> Callable[[Connection], int]:
    def end(conn: Connection) -> int:
        task = running(conn)
        if is_cancelled:
            cancel_task(conn, "default", str(task.task_id))
        rows.expire(conn, task.task_id)
        rows.reap(conn, retry)
        return task.task_id

    return end


ENDS: dict[str, tuple[Callable[[Connection], int], str, str]] = {
    "succeeded": (settled("succeeded"), "SUCCEEDED", "succeeded"),
    "permanent": (settled("permanent"), "FAILED", "permanent"),
    "last retry": (settled("failure", Retry(max_retry=1)), "FAILED", "max_retry"),
    "deadline": (settled("deadline"), "FAILED", "deadline"),
    "recursion limit": (settled("recursion_limit"), "FAILED", "recursion_limit"),
    "cancelled before it began": (cancelled_before_it_began, "CANCELLED", "cancelled"),
    "cancelled while it ran": (cancelled_while_it_ran, "CANCELLED", "cancelled"),
    "lost too often": (lost(Retry(max_delivery=1)), "FAILED", "max_delivery"),
    "cancelled and lost": (lost(Retry(), is_cancelled=True), "CANCELLED", "cancelled"),
}


@pytest.mark.parametrize(("end", "status", "reason"), ENDS.values(), ids=ENDS.keys())
def test_each_way_to_end_queues_one_callback_in_the_same_transaction(
    conn: Connection, end: Callable[[Connection], int], status: str, reason: str
) -> None:
    task_id = end(conn)
    ended = rows.row(conn, task_id)
    assert (ended["status"], ended["reason"]) == (status, reason)
    (queued,) = callbacks(conn)
    assert queued["payload"] == {"task_id": task_id, "url": URL}
    assert (queued["status"], queued["due"], queued["requested_route"]) == ("PENDING", True, "none")
    assert (queued["callback_url"], queued["parent_id"], queued["name"]) == (None, None, None)
    assert rows.reasons(conn, queued["task_id"]) == ["created"]
    (same,) = sql(
        conn,
        "SELECT count(DISTINCT xmin::text) AS n FROM tasks WHERE task_id = ANY(%(ids)s)",
        ids=[task_id, queued["task_id"]],
    )
    assert same["n"] == 1  # both rows are of one transaction


@pytest.mark.parametrize("verdict", ["failure", "released", "outage"])
def test_what_is_no_end_queues_none(conn: Connection, verdict: str) -> None:
    task = running(conn)
    rows.settle(conn, task.lease, verdict)
    assert rows.row(conn, task.task_id)["status"] == "PENDING"
    assert callbacks(conn) == []


def test_a_task_that_comes_back_from_a_lost_worker_or_parks_has_not_ended(
    conn: Connection,
) -> None:
    task = running(conn)
    rows.expire(conn, task.task_id)
    rows.reap(conn)
    job = rows.claim_this(conn, told(conn, kind="agent", payload={"task": "t"}))
    rows.settle(conn, job.lease, "parked", gate={"interrupt": "i", "asks": 1, "artefact": "a"})
    assert rows.row(conn, job.task_id)["status"] == "AWAITING_APPROVAL"
    leases.renew_leases(conn, [task.lease], 30)
    assert callbacks(conn) == []


def test_a_callback_takes_the_tenant_and_the_priority_of_its_task(conn: Connection) -> None:
    task_id = told(conn, tenant="acme", priority=7)
    rows.finish(conn, task_id)
    (queued,) = callbacks(conn)
    assert (queued["tenant"], queued["priority"]) == ("acme", 7)


def test_a_batch_that_ends_in_one_statement_queues_one_for_each_that_asked(
    conn: Connection,
) -> None:
    asked = [told(conn) for _ in range(5)]
    silent = [rows.submit(conn) for _ in range(5)]
    tasks = rows.claim(conn, 10).tasks
    verdicts = ["succeeded", "permanent", "failure", "succeeded", "released"] * 2
    outcomes = [
        (task.lease, Outcome(verdict, result={}, error="e"))  # type: ignore[arg-type]
        for task, verdict in zip(sorted(tasks, key=lambda one: one.task_id), verdicts, strict=True)
    ]
    assert len(leases.settle_tasks(conn, outcomes, rows.RETRY)) == 10
    ended = [asked[0], asked[1], asked[3]]
    assert of_tasks(conn) == ended
    assert {rows.row(conn, task_id)["status"] for task_id in silent} >= {"SUCCEEDED", "FAILED"}


def test_steps_that_end_with_their_run_queue_theirs(conn: Connection) -> None:
    run_id = runs.submit(conn, {"a": [], "b": ["a"], "c": ["b"]})
    tell(conn, runs.number(conn, run_id, "b"), runs.number(conn, run_id, "c"))
    runs.finish(conn, run_id, "a", "permanent")
    assert runs.statuses(conn, run_id)["c"] == "CANCELLED"
    assert of_tasks(conn) == [runs.number(conn, run_id, "b"), runs.number(conn, run_id, "c")]


def test_an_end_that_is_not_committed_queues_nothing(conn: Connection, connect: Connect) -> None:
    """Nobody can be killed between the two: they are one statement."""
    task_id = told(conn)
    end = """
        UPDATE tasks SET status = 'CANCELLED', reason = 'cancelled', due = false,
                         finished_at = current_instant()
        WHERE task_id = %(task_id)s
    """
    other = connect()
    with contextlib.suppress(ZeroDivisionError), db.transaction(conn) as cursor:
        cursor.execute(end, {"task_id": task_id})
        cursor.execute("SELECT count(*) AS n FROM tasks WHERE kind = 'callback'")
        assert cursor.fetchall()[0]["n"] == 1
        assert callbacks(other) == []
        raise ZeroDivisionError
    assert callbacks(conn) == []
    assert rows.row(conn, task_id)["status"] == "PENDING"


def test_a_task_that_is_requeued_and_ends_again_is_told_of_again(conn: Connection) -> None:
    task_id = told(conn)
    rows.finish(conn, task_id, "permanent")
    assert of_tasks(conn) == [task_id]
    requeue_task(conn, "default", str(task_id))
    assert of_tasks(conn) == [task_id]
    first, again = rows.claim(conn, 2).tasks
    assert first.task_id == task_id
    assert again.kind == "callback"
    rows.settle(conn, first.lease, "succeeded")
    assert of_tasks(conn) == [task_id, task_id]


def test_a_change_of_what_has_ended_already_queues_nothing(conn: Connection) -> None:
    task_id = told(conn)
    rows.finish(conn, task_id, "permanent")
    both = told(conn)
    touch = """
        UPDATE tasks
        SET metadata = '{"touched": true}',
            status = CASE WHEN task_id = %(both)s THEN 'CANCELLED' ELSE status END,
            reason = CASE WHEN task_id = %(both)s THEN 'cancelled' ELSE reason END,
            due = due AND task_id <> %(both)s,
            finished_at = coalesce(finished_at, current_instant())
        WHERE task_id IN (%(task_id)s, %(both)s)
    """
    sql(conn, touch, task_id=task_id, both=both)
    assert of_tasks(conn) == [task_id, both]


def test_nobody_is_told_of_the_end_of_a_callback(conn: Connection) -> None:
    rows.finish(conn, told(conn))
    (queued,) = callbacks(conn)
    rows.finish(conn, queued["task_id"], "permanent")
    assert len(callbacks(conn)) == 1


# --- what it brings --------------------------------------------------------------------------


def claimed_callback(conn: Connection, task_id: int) -> ClaimedTask:
    (queued,) = [row for row in callbacks(conn) if row["payload"]["task_id"] == task_id]
    return rows.claim_this(conn, queued["task_id"])


def test_its_message_is_the_task_as_it_is_shown_and_the_tenants_secret(
    conn: Connection, settings: Settings
) -> None:
    task_id = told(conn, tenant="acme", metadata={"order": 7})
    rows.finish(conn, task_id, result={"text": "Gr\u00fc\u00dfe"})
    secret, _ = webhooks.make_secret(conn, "acme")
    webhooks.make_secret(conn, "other")
    ready = messages.with_message(conn, claimed_callback(conn, task_id), settings)
    assert isinstance(ready, ClaimedTask)
    assert ready.message is not None
    shown = ready.message.body.decode()
    assert f'"id":{task_id},"tenant":"acme"' in shown
    assert '"result":{"text":"Gr\u00fc\u00dfe"}' in shown
    sender = ready.message.sender
    assert sender.secret == base64.b64decode(secret.removeprefix("whsec_"))
    assert not sender.keys_exist
    create_key(conn, "acme")
    assert webhooks.read_sender(conn, "nobody").keys_exist
    assert webhooks.read_sender(conn, "nobody").secret is None


def test_the_time_it_is_signed_with_is_the_databases(conn: Connection) -> None:
    rows.set_clock(conn, "2026-11-29 12:00:00.75+00")
    assert webhooks.read_sender(conn, "acme").at_seconds == 1795953600


def test_a_task_that_is_gone_makes_its_callback_a_dead_letter_in_plain_words(
    conn: Connection, settings: Settings
) -> None:
    task_id = told(conn)
    rows.finish(conn, task_id)
    task = claimed_callback(conn, task_id)
    sql(conn, "DELETE FROM tasks WHERE task_id = %(task_id)s", task_id=task_id)
    ready = messages.with_message(conn, task, settings)
    assert isinstance(ready, Outcome)
    assert ready.verdict == "permanent"
    assert ready.error == f"task {task_id} is gone, so there is nothing to tell of it"


def test_no_callback_brings_the_task_of_another_tenant(
    conn: Connection, settings: Settings
) -> None:
    task_id = rows.submit(conn, tenant="other")
    payload = {"task_id": task_id, "url": URL}
    forged = rows.submit(conn, kind="callback", payload=payload, requested_route="none")
    ready = messages.with_message(conn, rows.claim_this(conn, forged), settings)
    assert isinstance(ready, Outcome)
    assert ready.verdict == "permanent"


def test_what_cannot_be_read_now_is_given_back_and_what_cannot_be_shown_is_tried_again(
    conn: Connection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = told(conn)
    rows.finish(conn, task_id)
    task = claimed_callback(conn, task_id)

    def away(*_: Any) -> Any:
        raise DatabaseUnavailable

    def broken(*_: Any) -> Any:
        raise ValueError("deep inside: SECRET")

    with monkeypatch.context() as patch:
        patch.setattr(messages, "read_sender", away)
        ready = messages.with_message(conn, task, settings)
    assert isinstance(ready, Outcome)
    assert ready.verdict == "released"
    monkeypatch.setattr(messages, "task_json", broken)
    ready = messages.with_message(conn, task, settings)
    assert isinstance(ready, Outcome)
    own = settings.callbacks
    assert (ready.verdict, ready.max_retry, ready.max_delay_seconds) == (
        "failure", own.max_retry, own.max_delay_seconds,
    )  # fmt: skip
    assert "SECRET" not in str(ready.error)


def test_a_callback_fails_by_its_own_policy_and_then_is_a_dead_letter(conn: Connection) -> None:
    task_id = told(conn)
    rows.finish(conn, task_id)
    waits = []
    own = {"max_retry": 5, "max_delay_seconds": 9.0}
    for _ in range(5):
        task = claimed_callback(conn, task_id)
        ended = rows.settle(conn, task.lease, "failure", Retry(max_retry=2), **own)
        assert ended is not None
        waits.append(ended.delay_seconds)
        rows.make_due(conn, task.task_id)
    assert (ended.status, ended.reason) == ("FAILED", "max_retry")
    assert waits == [2, 4, 8, 9, None]
    (dead,) = list_dead_letters(conn, "default", limit=9, before=None, present_seconds=30).rows
    assert (dead["kind"], dead["task_id"]) == ("callback", task.task_id)


# --- secrets ---------------------------------------------------------------------------------


def test_a_secret_is_random_long_and_replaced_by_the_next(conn: Connection) -> None:
    first, replaced = webhooks.make_secret(conn, "acme")
    assert not replaced
    second, replaced = webhooks.make_secret(conn, "acme")
    assert replaced
    assert first != second
    assert second.startswith("whsec_")
    raw = base64.b64decode(second.removeprefix("whsec_"), validate=True)
    assert len(raw) == 32
    assert webhooks.read_sender(conn, "acme").secret == raw


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, "\u00fc", "a\n"])
def test_what_no_tenant_can_be_called_gets_no_secret(conn: Connection, tenant: str) -> None:
    with pytest.raises(RequestRefused, match="a tenant's name is"):
        webhooks.make_secret(conn, tenant)


def admin(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "admin.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_prints_the_secret_once_and_says_what_became_of_the_earlier_one(
    conn: Connection, database_url: str
) -> None:
    for lines in (2, 3):
        made = admin(database_url, "webhooks", "secret", "--tenant", "acme")
        assert (made.returncode, made.stderr) == (0, "")
        secret, *rest = made.stdout.splitlines()
        assert 1 + len(rest) == lines
        raw = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        assert webhooks.read_sender(conn, "acme").secret == raw
    assert "takes the place of an earlier one" in rest[-1]
    refused = admin(database_url, "webhooks", "secret", "--tenant", "a b")
    assert refused.returncode == 1
    assert "a tenant's name is" in refused.stderr
    assert admin(database_url, "webhooks", "secret").returncode == 2

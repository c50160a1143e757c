"""DELETE /tasks/{id} and POST /tasks/{id}/requeue."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from db import Connection
from tests.support import lives
from tests.support.client import Client, refused

Call = Callable[[int | str], httpx.Response]


@pytest.fixture
def cancel(client: Client) -> Call:
    headers = {"X-Tenant-Id": client.tenant}
    return lambda task_id: client.http.delete(f"/tasks/{task_id}", headers=headers)


@pytest.fixture
def requeue(client: Client) -> Call:
    headers = {"X-Tenant-Id": client.tenant}
    return lambda task_id: client.http.post(f"/tasks/{task_id}/requeue", headers=headers)


def test_a_task_that_waits_is_cancelled_at_once(client: Client, cancel: Call) -> None:
    task_id = client.submit()
    answer = cancel(task_id)
    assert answer.status_code == 200
    assert answer.json() == {"task_id": task_id, "status": "CANCELLED"}
    task = client.task(task_id)
    assert (task["status"], task["result"], task["error"]) == ("CANCELLED", None, None)
    assert task["finished_at"] is not None


def test_a_task_that_runs_is_asked_to_stop_as_often_as_one_likes(
    client: Client, conn: Connection, cancel: Call
) -> None:
    task_id = client.submit()
    lives.take(conn, task_id)
    for _ in range(2):
        answer = cancel(task_id)
        assert answer.status_code == 202
        assert answer.json() == {"task_id": task_id, "status": "RUNNING"}
    assert client.task(task_id)["cancel_requested"] is True


@pytest.mark.parametrize("verdict", ["succeeded", "permanent"])
def test_a_task_that_has_ended_cannot_be_cancelled(
    client: Client, conn: Connection, cancel: Call, verdict: str
) -> None:
    task_id = client.submit()
    lives.end(conn, task_id, verdict)
    before = client.task(task_id)
    said = refused(cancel(task_id), 409)
    assert f"task {task_id} is {before['status']} already" in said
    assert client.task(task_id) == before


def test_a_cancelled_task_cannot_be_cancelled_again(client: Client, cancel: Call) -> None:
    task_id = client.submit()
    cancel(task_id)
    assert "CANCELLED already" in refused(cancel(task_id), 409)


def test_a_dead_letter_runs_again_with_fresh_counters_and_no_error(
    client: Client, conn: Connection, requeue: Call
) -> None:
    task_id = client.submit()
    lives.end(conn, task_id, "permanent")
    assert client.task(task_id)["error"]["type"] == "permanent"
    answer = requeue(task_id)
    assert answer.status_code == 200
    assert answer.json() == {"task_id": task_id, "status": "PENDING"}
    task = client.task(task_id)
    assert (task["error"], task["finished_at"], task["waiting_for"]) == (None, None, None)
    assert (task["retry_count"], task["delivery_count"], task["attempt"]) == (0, 0, 1)
    lives.end(conn, task_id, "succeeded")
    assert client.task(task_id)["error"] is None


def test_what_has_not_failed_cannot_be_requeued(
    client: Client, conn: Connection, requeue: Call
) -> None:
    waits = client.submit()
    assert f"task {waits} is PENDING" in refused(requeue(waits), 409)
    lives.end(conn, waits, "succeeded")
    assert f"task {waits} is SUCCEEDED" in refused(requeue(waits), 409)


@pytest.mark.parametrize("reference", [2**63, "9" * 5000, "nobody", "%00", "%F0%9F%90%98", "-1"])
def test_what_is_not_there_is_not_found(cancel: Call, requeue: Call, reference: int | str) -> None:
    assert refused(cancel(reference), 404) == "not found"
    assert refused(requeue(reference), 404) == "not found"


def test_a_task_of_another_tenant_is_not_found(
    module_api: object, client: Client, conn: Connection, cancel: Call, requeue: Call
) -> None:
    stranger = Client(client.http, f"{client.tenant}-stranger")
    theirs, dead = stranger.submit(), stranger.submit()
    lives.end(conn, dead, "permanent")
    assert refused(cancel(theirs), 404) == "not found"
    assert refused(requeue(dead), 404) == "not found"
    assert stranger.task(theirs)["status"] == "PENDING"
    assert stranger.task(dead)["status"] == "FAILED"

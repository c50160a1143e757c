"""GET /tasks/{id}: everything there is to know about a task, now or when it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import pytest

from db import Connection
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.processes import Api, eventually

FIELDS = {
    "task_id", "status", "result", "id", "tenant", "kind", "error", "route", "model", "cost",
    "prompt_tokens", "completion_tokens", "truncated", "duration_seconds", "retry_count",
    "delivery_count", "attempt", "priority", "run_id", "step", "state", "waiting_for", "worker",
    "lease_expires_at", "cancel_requested", "callback_url", "metadata", "created_at",
    "available_at", "started_at", "finished_at",
}  # fmt: skip
TIMES = ("lease_expires_at", "created_at", "available_at", "started_at", "finished_at")


def instant(text: str) -> datetime:
    assert text.endswith("Z"), text
    moment = datetime.fromisoformat(text)
    assert moment.tzinfo == UTC
    return moment


# --- what is shown ---------------------------------------------------------------------------


def test_a_new_task_shows_every_field_of_the_contract_and_no_other(client: Client) -> None:
    task = client.task(client.submit())
    assert set(task) == FIELDS
    assert task["task_id"] == task["id"]
    assert (task["status"], task["kind"], task["priority"]) == ("PENDING", "prompt", 0)
    assert [task[count] for count in ("retry_count", "delivery_count", "attempt")] == [0, 0, 0]
    assert (task["prompt_tokens"], task["completion_tokens"]) == (0, 0)
    assert task["truncated"] is task["cancel_requested"] is False
    empty = FIELDS - {"task_id", "status", "id", "kind", "priority", "retry_count", "attempt"}
    empty -= {"delivery_count", "prompt_tokens", "completion_tokens", "truncated"}
    empty -= {"cancel_requested", "created_at", "available_at", "tenant"}
    assert {field: task[field] for field in empty} == dict.fromkeys(empty)


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"])
def test_every_status_shows_the_same_fields(client: Client, conn: Connection, status: str) -> None:
    task_id = client.submit()
    if status != "PENDING":
        held = rows.claim_this(conn, task_id)
        if status == "CANCELLED":
            rows.ask_to_cancel(conn, task_id)
        if status != "RUNNING":
            rows.settle(conn, held.lease, "succeeded" if status == "SUCCEEDED" else "permanent")
    task = client.task(task_id)
    assert (set(task), task["status"]) == (FIELDS, status)
    assert (task["finished_at"] is None) == (status in ("PENDING", "RUNNING"))
    assert (task["result"] is None) == (status != "SUCCEEDED")
    assert task["cancel_requested"] == (status == "CANCELLED")


def test_a_running_task_shows_who_works_on_it_and_until_when(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit()
    rows.claim_this(conn, task_id)
    task = client.task(task_id)
    assert (task["worker"], task["attempt"], task["delivery_count"]) == ("w1", 1, 1)
    leased = instant(task["lease_expires_at"]) - instant(task["started_at"])
    assert leased.total_seconds() == pytest.approx(rows.LEASE_SECONDS, abs=1)


def test_a_task_that_succeeded_shows_its_answer_and_its_price(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit(metadata={"from": "cron"}, priority=2)
    rows.finish(
        conn, task_id, result={"text": "Grüße 🙂"}, route="cloud", model="qwen3:14b",
        prompt_tokens=3, completion_tokens=7, cost=Decimal("0.0007"), truncated=True,
    )  # fmt: skip
    task = client.task(task_id)
    assert (task["status"], task["result"]) == ("SUCCEEDED", {"text": "Grüße 🙂"})
    assert (task["route"], task["model"]) == ("cloud", "qwen3:14b")
    assert (task["prompt_tokens"], task["completion_tokens"], task["truncated"]) == (3, 7, True)
    assert task["cost"] == "0.00070000"
    assert (task["metadata"], task["priority"]) == ({"from": "cron"}, 2)
    assert task["duration_seconds"] >= 0
    assert task["error"] is task["waiting_for"] is task["lease_expires_at"] is None


@pytest.mark.parametrize(
    ("cost", "shown"),
    [("0", "0.00000000"), ("1", "1.00000000"), ("0.00000001", "0.00000001"),
     ("123456789012.5", "123456789012.50000000"), ("1E-7", "0.00000010"),
     ("0.000000004", "0.00000000"), ("0.30000000000000004", "0.30000000")],
)  # fmt: skip
def test_money_has_eight_places_and_no_exponent(
    client: Client, conn: Connection, cost: str, shown: str
) -> None:
    task_id = client.submit()
    rows.finish(conn, task_id, cost=Decimal(cost))
    assert client.task(task_id)["cost"] == shown


def test_times_are_iso_8601_in_utc_and_in_the_order_of_a_life(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit()
    rows.sql(conn, "SET TimeZone = 'Asia/Kathmandu'")
    rows.finish(conn, task_id)
    task = client.task(task_id)
    told = [instant(task[name]) for name in ("created_at", "started_at", "finished_at")]
    assert told == sorted(told)
    assert abs((told[-1] - datetime.now(UTC)).total_seconds()) < 60
    assert [name for name in TIMES if task[name] is None] == ["lease_expires_at"]


def test_a_task_that_failed_shows_the_reason_and_what_was_said(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit()
    rows.finish(conn, task_id, "permanent", error="no such model; run: ollama pull x")
    error = {"type": "permanent", "message": "no such model; run: ollama pull x"}
    task = client.task(task_id)
    assert (task["error"], task["retry_count"]) == (error, 1)


def test_a_task_that_will_be_tried_again_shows_why_and_that_it_waits(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit()
    rows.finish(conn, task_id, "failure", error="the answer broke off")
    task = client.task(task_id)
    assert task["error"] == {"type": "retry", "message": "the answer broke off"}
    assert (task["status"], task["waiting_for"]) == ("PENDING", "backoff")
    waits = instant(task["available_at"]) - datetime.now(UTC)
    assert -5 < waits.total_seconds() <= 2


def test_a_task_whose_model_is_away_waits_for_its_backend(client: Client, conn: Connection) -> None:
    task_id = client.submit()
    rows.finish(conn, task_id, "outage", route="local", delay_seconds=60, error="refused")
    task = client.task(task_id)
    assert (task["status"], task["waiting_for"]) == ("PENDING", "backend local")
    assert (task["delivery_count"], task["retry_count"], task["attempt"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("status", "waiting_for"), [("BLOCKED", "dependencies"), ("AWAITING_APPROVAL", "approval")]
)
def test_a_task_that_cannot_run_yet_shows_what_it_waits_for(
    module_api: Api, conn: Connection, status: str, waiting_for: str
) -> None:
    task_id = rows.insert_as(conn, status)
    assert Client(module_api.http, "default").task(task_id)["waiting_for"] == waiting_for


# --- what is not found -----------------------------------------------------------------------

NO_IDS = [
    "abc", "-1", "0", "99999999999999999999", "9223372036854775807", "9223372036854775808", "1.5",
    "1e3", "+1", " 1", "1 ", "1;", "0x1", "\u0661", "\uff11", "²", "\0", "1\0", "null", "x" * 64,
    "x" * 65, "9" * 5000, "é", "🙂", "1,2", "1' OR '1'='1", "%31", "\n",
]  # fmt: skip


@pytest.mark.parametrize("reference", NO_IDS, ids=[repr(i)[:24] for i in NO_IDS])
def test_what_is_no_number_of_a_task_is_not_found(
    module_api: Api, conn: Connection, reference: str
) -> None:
    rows.submit(conn)
    client = Client(module_api.http, "default")
    assert refused(client.get(quote(reference, safe="")), 404) == "not found"


@pytest.mark.parametrize("raw", ["%00", "%FF", "%ED%A0%80", "%", "%zz", "1/2"])
def test_an_address_of_any_bytes_is_not_found(client: Client, raw: str) -> None:
    refused(client.http.get(f"{client.http.base_url}/tasks/{raw}"), 404)


def test_another_tenants_task_is_not_found_and_looks_like_none(
    client: Client, module_api: Api
) -> None:
    task_id = client.submit()
    for tenant in ("default", f"{client.tenant}x", client.tenant.upper()):
        other = Client(module_api.http, tenant)
        theirs, none = other.get(task_id), other.get(2**40)
        assert (theirs.status_code, theirs.content) == (404, none.content)
        refused(other.get(task_id, wait=1), 404)
    assert client.task(task_id)["id"] == task_id


# --- waiting ---------------------------------------------------------------------------------


@contextmanager
def waiting(client: Client, task_id: int, seconds: float) -> Iterator[Any]:
    """A GET with ?wait= that is under way; its answer and how long it took."""

    def ask() -> tuple[dict[str, Any], float]:
        begun = time.monotonic()
        return client.task(task_id, wait=seconds), time.monotonic() - begun

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask)


def test_a_get_that_waits_is_answered_when_the_task_ends_and_not_later(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit()
    with waiting(client, task_id, 30) as answer:
        held = rows.claim_this(conn, task_id)  # a change, but not the end
        assert not answer.done()
        rows.settle(conn, held.lease, "succeeded")
        task, seconds = answer.result()
    assert (task["status"], task["result"]) == ("SUCCEEDED", {"text": "done"})
    assert seconds < 10


@pytest.mark.parametrize("verdict", ["permanent", "deadline"])
def test_every_end_of_a_task_ends_the_wait(client: Client, conn: Connection, verdict: str) -> None:
    task_id = client.submit()
    with waiting(client, task_id, 30) as answer:
        rows.finish(conn, task_id, verdict)
        task, seconds = answer.result()
    assert task["status"] == "FAILED"
    assert seconds < 10


def test_a_get_whose_task_does_not_end_is_answered_after_its_seconds(client: Client) -> None:
    with waiting(client, client.submit(), 0.6) as answer:
        task, seconds = answer.result()
    assert task["status"] == "PENDING"
    assert 0.6 <= seconds < 5


def test_a_task_that_has_ended_is_shown_at_once(client: Client, conn: Connection) -> None:
    task_id = client.submit()
    rows.finish(conn, task_id)
    with waiting(client, task_id, 30) as answer:
        assert answer.result()[1] < 5


def test_a_task_that_does_not_exist_is_not_waited_for(client: Client) -> None:
    begun = time.monotonic()
    refused(client.get(2**40, wait=30), 404)
    assert time.monotonic() - begun < 10


def test_fifty_that_wait_for_one_task_are_all_answered_when_it_ends(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit()
    with ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(client.task, task_id, wait=30) for _ in range(50)]
        others = client.submit()  # those that wait take nothing from those that do not
        assert client.task(others)["status"] == "PENDING"
        assert not any(answer.done() for answer in answers)
        rows.finish(conn, task_id)
        done = eventually(lambda: all(answer.done() for answer in answers), 20)
    assert done
    assert {answer.result()["status"] for answer in answers} == {"SUCCEEDED"}


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "-inf", "1e400", "abc", "", "true", "60.5"])
def test_a_wait_that_makes_no_sense_is_refused(client: Client, wait: str) -> None:
    refused(client.get(client.submit(), wait=wait), 400, 422, field="wait")


@pytest.mark.parametrize("wait", ["0", "0.0", "-0"])
def test_a_wait_of_no_time_is_no_wait(client: Client, wait: str) -> None:
    assert client.task(client.submit(), wait=wait)["status"] == "PENDING"

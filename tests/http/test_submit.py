"""POST /tasks: what is accepted, what comes back, what is stored."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from db import Connection
from tests.support import rows
from tests.support.client import JSON, Client
from tests.support.processes import Api

EXAMPLE = "Write one sentence about durable queues."


def test_a_prompt_is_answered_201_with_its_number_and_its_status(client: Client) -> None:
    answer = client.post({"prompt": EXAMPLE})
    assert answer.status_code == 201
    task_id = answer.json()["task_id"]
    assert isinstance(task_id, int)
    assert answer.json() == {"task_id": task_id, "status": "PENDING"}
    assert "idempotency-replayed" not in answer.headers


def test_an_acknowledged_task_is_a_row_that_can_be_claimed(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit(prompt=EXAMPLE)
    row = rows.row(conn, task_id)
    assert (row["status"], row["kind"], row["tenant"]) == ("PENDING", "prompt", client.tenant)
    assert row["payload"] == {"prompt": EXAMPLE}
    assert row["due"]
    assert rows.reasons(conn, task_id) == ["created"]


def test_numbers_go_up(client: Client) -> None:
    first, second = client.submit(), client.submit()
    assert second > first


def test_without_a_tenant_header_the_tenant_is_default(module_api: Api, conn: Connection) -> None:
    answer = module_api.http.post("/tasks", json={"prompt": EXAMPLE})
    assert rows.row(conn, answer.json()["task_id"])["tenant"] == "default"


# --- optional fields -------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, str]] = {
    "priority": (9, "priority"),
    "max_retry": (7, "max_retry"),
    "timeout_seconds": (12.5, "timeout_seconds"),
    "route": ("cloud", "requested_route"),
    "metadata": ({"from": "cron", "n": [1, 2.5, None, True, {"ü": "€"}]}, "metadata"),
}


@pytest.mark.parametrize("field", OPTIONS)
def test_what_is_asked_for_is_stored(client: Client, conn: Connection, field: str) -> None:
    value, column = OPTIONS[field]
    task_id = client.submit(**{field: value})
    assert rows.row(conn, task_id)[column] == value


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [("priority", 0, 9), ("max_retry", 1, 10_000), ("timeout_seconds", 0.001, 604_800),
     ("delay_seconds", 0, 31_536_000)],
)  # fmt: skip
def test_the_smallest_and_the_largest_number_are_accepted(
    client: Client, field: str, least: float, most: float
) -> None:
    client.submit(**{field: least})
    client.submit(**{field: most})


def test_a_delayed_task_becomes_available_so_many_seconds_after_its_creation(
    client: Client, conn: Connection
) -> None:
    row = rows.row(conn, client.submit(delay_seconds=90))
    waits = row["available_at"] - row["created_at"]
    assert abs(waits - timedelta(seconds=90)) < timedelta(seconds=1)
    assert not row["due"]


def test_what_is_not_asked_for_is_left_to_the_settings(client: Client, conn: Connection) -> None:
    row = rows.row(conn, client.submit())
    assert (row["priority"], row["requested_route"], row["route"]) == (0, "auto", None)
    assert row["max_retry"] is row["timeout_seconds"] is row["metadata"] is None
    assert row["idempotency_key"] is row["request_hash"] is row["name"] is None


@pytest.mark.parametrize("field", ["max_retry", "timeout_seconds", "metadata"])
def test_null_means_not_asked_for(client: Client, field: str) -> None:
    client.submit(**{field: None})


def test_an_empty_object_is_metadata_and_not_nothing(client: Client, conn: Connection) -> None:
    assert rows.row(conn, client.submit(metadata={}))["metadata"] == {}


# --- text ------------------------------------------------------------------------------------

TEXTS = {
    "other scripts": "Grüße 你好 🙂",
    "control characters": "a\tb\r\nc\x1b[31m\x7f",
    "what a template language would read": "{{ x }} %s %(y)s $1 {0}",
    "what SQL would read": "'; DROP TABLE tasks; --",
    "what JSON would read": '"}\\u0041\\n',
    "a byte order mark and a no-break space": "\ufeff\u00a0x",
    "space around it": "  x  ",
    "the last character of Unicode": "\U0010ffff\uffff",
}


@pytest.mark.parametrize("prompt", TEXTS.values(), ids=TEXTS.keys())
def test_a_prompt_is_kept_character_by_character(
    client: Client, conn: Connection, prompt: str
) -> None:
    assert rows.row(conn, client.submit(prompt=prompt))["payload"] == {"prompt": prompt}


def test_a_surrogate_pair_is_one_character(client: Client, conn: Connection) -> None:
    answer = client.post_raw(b'{"prompt": "\\ud83d\\ude42"}', **JSON)
    assert rows.row(conn, answer.json()["task_id"])["payload"] == {"prompt": "🙂"}


def test_a_prompt_at_the_limit_is_stored_whole(client: Client, conn: Connection) -> None:
    prompt = "€" * (1024 * 1024 // 3) + "x"
    assert len(prompt.encode()) == 1024 * 1024
    assert rows.row(conn, client.submit(prompt=prompt))["payload"] == {"prompt": prompt}


def test_metadata_at_the_limit_and_as_deep_as_may_be_is_shown_as_it_came(client: Client) -> None:
    deepest: Any = "x"
    for _ in range(99):
        deepest = [deepest]
    metadata = {"deep": deepest, "big": 10**1000, "fill": ""}
    sent = '{"deep":' + "[" * 99 + '"x"' + "]" * 99 + ',"big":1' + "0" * 1000 + ',"fill":""}'
    metadata["fill"] = "x" * (16 * 1024 - len(sent))
    assert client.task(client.submit(metadata=metadata))["metadata"] == metadata


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "application/a+json"]
)
def test_any_json_content_type_will_do(client: Client, content_type: str) -> None:
    assert client.post_raw(b'{"prompt":"x"}', **{"Content-Type": content_type}).status_code == 201

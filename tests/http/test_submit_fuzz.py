"""Whatever JSON comes in, the answer is 201 and one row, or a 4xx and none; never a 5xx."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from db import Connection
from tests.support import rows
from tests.support.client import JSON, Client, refused

hypothesis = pytest.importorskip(
    "hypothesis", reason="needs hypothesis: pip install -r requirements-dev.txt"
)
st = hypothesis.strategies

SETTINGS = {
    "deadline": None,
    "database": None,
    "derandomize": True,  # the same bodies in every run
    "suppress_health_check": list(hypothesis.HealthCheck),
}

text = st.text(st.characters(codec=None), max_size=8)  # lone surrogates and NUL, too
numbers = st.integers() | st.floats() | st.integers(0, 10) | st.floats(0, 10)
plain = st.none() | st.booleans() | numbers | text
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)
common = {
    "priority": numbers | values,
    "delay_seconds": numbers | values,
    "max_retry": numbers | values,
    "timeout_seconds": numbers | values,
    "route": st.sampled_from(["auto", "local", "cloud"]) | values,
    "metadata": st.dictionaries(text, values, max_size=4) | values,
    "callback_url": st.sampled_from(["https://example.com/", "http://[::", "http://0x7f.1"]) | text,
    "unknown": st.nothing() | values,
}
own = {
    "task_id": st.sampled_from(["a", "b", "7", "c" * 65]) | text,
    "require_approval": st.booleans() | values,
    "token_budget": numbers | values,
    "max_revisions": numbers | values,
    "graph": st.sampled_from(["team", "nothing"]) | text,
}
bodies = (
    values
    | st.fixed_dictionaries({"prompt": text | values}, optional=common)
    | st.fixed_dictionaries({"task": text | values}, optional={**common, **own})
    | st.fixed_dictionaries({"task": st.just("t")}, optional=own)
    | st.fixed_dictionaries({}, optional={"prompt": text, "task": text, **own})
)
segments = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1)
keys = st.none() | st.sampled_from(["a", "b", "c"])


def numbers_as_floats(value: Any) -> Any:
    """jsonb keeps numbers as decimals and gives 4e+16 back as 40000000000000000."""
    return json.loads(json.dumps(value), parse_int=float)


@hypothesis.settings(max_examples=500, **SETTINGS)
@hypothesis.given(body=bodies, key=keys)
def test_any_json_is_stored_or_refused_in_plain_words(
    client: Client, conn: Connection, body: Any, key: str | None
) -> None:
    before = rows.count_tasks(conn)
    headers = JSON | ({} if key is None else {"Idempotency-Key": key})
    answer = client.post_raw(json.dumps(body).encode(), **headers)
    stored = rows.count_tasks(conn) - before
    if answer.status_code == 201:
        assert stored == 1
        task = client.task(answer.json()["task_id"])
        assert task["status"] == "PENDING"
        assert task["kind"] == ("agent" if "task" in body else "prompt")
        assert task["task_id"] == (body.get("task_id") or task["id"])
        assert task["callback_url"] == body.get("callback_url")
        assert numbers_as_floats(task["metadata"]) == numbers_as_floats(body.get("metadata"))
    else:
        assert stored == 0
        if answer.status_code != 200:  # a replay
            refused(answer, 400, 409, 413, 422)


@hypothesis.settings(max_examples=100, **SETTINGS)
@hypothesis.given(body=st.binary(max_size=40))
def test_any_bytes_are_refused_in_plain_words(
    client: Client, conn: Connection, body: bytes
) -> None:
    before = rows.count_tasks(conn)
    refused(client.post_raw(body, **JSON), 400, 422)
    assert rows.count_tasks(conn) == before


@hypothesis.settings(max_examples=150, **SETTINGS)
@hypothesis.given(
    reference=st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1)
)
def test_any_reference_to_no_task_is_not_found(client: Client, reference: str) -> None:
    hypothesis.assume(reference not in (".", ".."))  # a client takes these out itself
    refused(client.get(quote(reference, safe="")), 404)

"""POST /tasks refuses what it cannot store or was not asked for, says why, and stores nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from db import Connection
from tests.support import rows
from tests.support.client import JSON, Client, refused
from tests.support.processes import Api

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def nothing_is_stored(conn: Connection) -> Iterator[None]:
    before = rows.count_tasks(conn)
    yield
    assert rows.count_tasks(conn) == before


FIELDS: list[tuple[str, Any]] = [
    # prompt
    ("prompt", ""), ("prompt", " \t\r\n\u00a0\u3000"), ("prompt", None), ("prompt", 17),
    ("prompt", True), ("prompt", ["x"]), ("prompt", {"text": "x"}), ("prompt", "a\0b"),
    ("prompt", "\0"),
    # numbers
    ("priority", -1), ("priority", 10), ("priority", 1.5), ("priority", 1.0), ("priority", "1"),
    ("priority", True), ("priority", None), ("priority", 10**400),
    ("delay_seconds", -1), ("delay_seconds", -1e-9), ("delay_seconds", 31_536_001),
    ("delay_seconds", 1e308), ("delay_seconds", "1"), ("delay_seconds", True),
    ("delay_seconds", None), ("delay_seconds", 10**400),
    ("max_retry", 0), ("max_retry", -1), ("max_retry", 10_001), ("max_retry", 1.5),
    ("max_retry", "3"), ("max_retry", True), ("max_retry", 2**31),
    ("timeout_seconds", 0), ("timeout_seconds", -5), ("timeout_seconds", 604_801),
    ("timeout_seconds", "5"), ("timeout_seconds", False),
    # words and objects
    ("route", "moon"), ("route", ""), ("route", "AUTO"), ("route", None), ("route", 1),
    ("metadata", []), ("metadata", "x"), ("metadata", 1), ("metadata", {"a": "b\0"}),
    ("metadata", {"a\0": 1}), ("metadata", {"a": [{"b": ["\0"]}]}),
    # what is not known here
    ("prompts", "x"), ("task_id", 1), ("status", "SUCCEEDED"), ("tenant", "other"), ("", 1),
    ("idempotency_key", "k"), ("__proto__", {}), ("a\0b", 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=[f"{f} {v!r:.20}" for f, v in FIELDS])
def test_a_field_that_cannot_be_meant_is_refused_by_its_name(
    client: Client, field: str, value: Any
) -> None:
    answer = client.post({"prompt": "x"} | {field: value})
    said = refused(answer, 400, 422, field=field or "body")
    assert said.startswith(f"{field or 'body'}: ")


def test_a_missing_prompt_is_refused_by_its_name(client: Client) -> None:
    refused(client.post({}), 422, field="prompt")
    refused(client.post({"priority": 1}), 422, field="prompt")


def test_every_field_that_is_to_blame_is_named(client: Client) -> None:
    answer = client.post({"prompt": "", "priority": 10, "unknown": 1})
    refused(answer, 422, field="priority")
    named = [problem["field"] for problem in answer.json()["detail"]]
    assert sorted(named) == ["priority", "prompt", "unknown"]


def test_what_was_sent_is_not_sent_back(client: Client) -> None:
    answer = client.post({"prompt": "my secret", "priority": "my secret"})
    assert "my secret" not in answer.text


RAW: dict[str, tuple[bytes, str | None]] = {
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', "prompt"),
    "the other half": (b'{"prompt": "x \\udc00 y"}', "prompt"),
    "half a pair in metadata": (b'{"prompt": "x", "metadata": {"a": ["\\ud800"]}}', "metadata"),
    "half a pair in a key of metadata": (
        b'{"prompt": "x", "metadata": {"\\ud800": 1}}', "metadata"),
    "half a pair in the name of a field": (b'{"prompt": "x", "\\ud800": 1}', None),
    "NaN in metadata": (b'{"prompt": "x", "metadata": {"a": NaN}}', "metadata"),
    "infinity in metadata": (b'{"prompt": "x", "metadata": {"a": [-Infinity]}}', "metadata"),
    "a number that is infinite": (b'{"prompt": "x", "metadata": {"a": 1e400}}', "metadata"),
    "a delay that is not a number": (b'{"prompt": "x", "delay_seconds": NaN}', "delay_seconds"),
    "a timeout without end": (b'{"prompt": "x", "timeout_seconds": Infinity}', "timeout_seconds"),
    "a number of 5,000 digits": (
        b'{"prompt": "x", "metadata": {"a": ' + b"9" * 5000 + b"}}", None),
    "nothing": (b"", "body"),
    "an empty object": (b"{}", "prompt"),
    "a list": (b'[{"prompt": "x"}]', "body"),
    "a text": (b'"x"', "body"),
    "null": (b"null", "body"),
    "a number": (b"17", "body"),
    "half an object": (b'{"prompt": "x"', None),
    "single quotes": (b"{'prompt': 'x'}", None),
    "a trailing comma": (b'{"prompt": "x",}', None),
    "two objects": (b'{"prompt": "x"}{"prompt": "y"}', None),
    "a raw line break in a text": (b'{"prompt": "a\nb"}', None),
    "a raw NUL": (b'{"prompt": "a\0b"}', None),
    "bytes that are not UTF-8": (b'{"prompt": "\xff\xfe"}', None),
    "UTF-8 of half a surrogate pair": (b'{"prompt": "\xed\xa0\x80"}', None),
    "not JSON at all": (b"\x89PNG\r\n", None),
}  # fmt: skip


@pytest.mark.parametrize(("body", "field"), RAW.values(), ids=RAW.keys())
def test_a_body_that_is_no_task_is_refused(client: Client, body: bytes, field: str | None) -> None:
    refused(client.post_raw(body, **JSON), 400, 422, field=field)


@pytest.mark.parametrize("depth", [101, 256, 500, 1_000, 5_000, 49_000])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_body_that_is_nested_too_deeply_is_refused(
    client: Client, depth: int, key: str | None
) -> None:
    headers = JSON | ({} if key is None else {"Idempotency-Key": key})
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opening * depth + (b"1" if opening != b"[" else b"") + closing * depth
        body = b'{"prompt": "x", "metadata": {"a": ' + nested + b"}}"
        assert "nested" in refused(client.post_raw(body, **headers), 400, 422)
    refused(client.post_raw(b"[" * depth, **headers), 400, 422)


CONTENT_TYPES: dict[str, tuple[dict[str, str], bytes]] = {
    "no content type": ({}, b'{"prompt": "x"}'),
    "text": ({"Content-Type": "text/plain"}, b'{"prompt": "x"}'),
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, b"prompt=x"),
    "JSON that curl -d sends as a form": (
        {"Content-Type": "application/x-www-form-urlencoded"}, b'{"prompt": "x"}'),
    "a form with parts": (
        {"Content-Type": "multipart/form-data; boundary=b"},
        b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--\r\n'),
    "a content type that is none": ({"Content-Type": "json"}, b'{"prompt": "x"}'),
}  # fmt: skip


@pytest.mark.parametrize(("headers", "body"), CONTENT_TYPES.values(), ids=CONTENT_TYPES.keys())
def test_a_body_that_does_not_say_it_is_json_is_refused_with_the_header_to_send(
    client: Client, headers: dict[str, str], body: bytes
) -> None:
    assert "Content-Type: application/json" in refused(client.post_raw(body, **headers), 422)


# --- too large -------------------------------------------------------------------------------


def test_a_prompt_above_its_limit_is_refused_with_the_limits_name(client: Client) -> None:
    for prompt in ("x" * (MIB + 1), "€" * (MIB // 3 + 1)):
        said = refused(client.post({"prompt": prompt}), 413, field="prompt")
        assert "limits.max_prompt_bytes (1048576 bytes)" in said


def test_metadata_above_its_limit_is_refused_with_the_limits_name(client: Client) -> None:
    answer = client.post(metadata={"a": "x" * 16 * 1024})
    assert "limits.max_metadata_bytes" in refused(answer, 413, field="metadata")


def test_a_body_above_its_limit_is_refused_with_the_limits_name(client: Client) -> None:
    body = b'{"prompt": "x"}' + b" " * 8 * MIB
    assert "limits.max_body_bytes" in refused(client.post_raw(body, **JSON), 413)


def test_a_body_that_does_not_say_how_long_it_is_is_refused_at_the_limit(client: Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "x"}'
        for _ in range(9):
            yield b" " * MIB

    assert "limits.max_body_bytes" in refused(client.post_raw(pieces(), **JSON), 413)


def test_a_body_at_its_limit_is_read(client: Client) -> None:
    body = b'{"prompt": ""}'
    body += b" " * (8 * MIB - len(body))
    refused(client.post_raw(body, **JSON), 422, field="prompt")


# --- whose, and where ------------------------------------------------------------------------

TENANTS = {
    "empty": b"", "a space": b"a b", "a dot": b"a.b", "too long": b"x" * 65,
    "an umlaut": "ü".encode(), "latin-1": b"\xfc", "a tab": b"a\tb", "SQL": b"' OR 1=1 --",
}  # fmt: skip


@pytest.mark.parametrize("tenant", TENANTS.values(), ids=TENANTS.keys())
def test_a_tenant_that_is_no_name_is_refused(module_api: Api, tenant: bytes) -> None:
    headers = [(b"X-Tenant-Id", tenant)]
    for method, path in (("POST", "/tasks"), ("GET", "/tasks/1"), ("GET", "/metrics")):
        answer = module_api.http.request(method, path, json={"prompt": "x"}, headers=headers)
        assert "X-Tenant-Id" in refused(answer, 400, 422)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("PUT", "/tasks", 405), ("PATCH", "/tasks/1", 405), ("POST", "/metrics", 405),
     ("POST", "/task", 404), ("GET", "/nowhere", 404), ("GET", "/tasks/1/nothing", 404)],
)  # fmt: skip
def test_an_address_or_a_method_that_is_not_there_is_refused_in_the_same_shape(
    module_api: Api, method: str, path: str, status: int
) -> None:
    answer: httpx.Response = module_api.http.request(method, path, json={"prompt": "x"})
    refused(answer, status)
    assert (status == 405) == ("allow" in answer.headers)

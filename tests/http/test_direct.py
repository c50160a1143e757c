"""What is answered on the short way in is answered as FastAPI would: the same is sent both ways.

FastAPI takes any kind of JSON, as application/anything+json; the short way takes application/json.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from pydantic import TypeAdapter
from starlette.types import Message, Receive, Scope, Send

from api.direct import Direct, DirectRoute, announces_json
from api.gate import KEY_IN_SCOPE
from api.models import PromptTask, TaskStatus
from main import create_app
from states import Status
from tests.http.test_submit_refused import FIELDS, RAW
from tests.support.client import Client

SHORT, LONG = "application/json", "application/x+json"
TASK = {"prompt": "Say something."}
JOB = {"task": "Write something.", "require_approval": True}

BODIES: dict[str, bytes] = {
    **{
        f"{field} {value!r:.20}": json.dumps(TASK | {field: value}).encode()
        for field, value in FIELDS
    },
    **{name: body for name, (body, _) in RAW.items()},
    "a prompt": json.dumps(TASK).encode(),
    "an agent job": json.dumps(JOB).encode(),
    "both": json.dumps(TASK | JOB).encode(),
    "an unknown graph": json.dumps(JOB | {"graph": "nothing"}).encode(),
    "too long a prompt": json.dumps({"prompt": "x" * 1_100_000}).encode(),
    "too much metadata": json.dumps(TASK | {"metadata": {"a": "x" * 20_000}}).encode(),
    "UTF-16": json.dumps(TASK).encode("utf-16"),
    "a doubled field": b'{"prompt": "x", "prompt": "y"}',
    "deep": b'{"prompt": "x", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    "too many values": b'{"prompt": "x", "metadata": {"x": [' + b"[]," * 60_000 + b"1]}}",
    "too many bytes": b'{"prompt": "' + b"x" * 9_000_000 + b'"}',
    "a callback to nowhere": json.dumps(TASK | {"callback_url": "ftp://x"}).encode(),
}  # fmt: skip
HEADERS: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "an ill-formed tenant": [(b"X-Tenant-Id", b"a b")],
    "an ill-formed key": [(b"Idempotency-Key", b"\xfc")],
    "an empty key": [(b"Idempotency-Key", b"")],
    "two keys": [(b"Idempotency-Key", b"b" * 300), (b"Idempotency-Key", b"a")],
    "a page of another origin": [(b"Origin", b"https://example.com")],
}


def both_ways(client: Client, path: str, body: Any, *headers: tuple[bytes, bytes]) -> list[Any]:
    """Status, headers and body of the two answers; a task's number stands for all numbers."""
    answers = []
    for kind in (SHORT, LONG):
        content = iter([body]) if body is None or len(body) > 8_500_000 else body
        sent = [(b"Content-Type", kind.encode()), *headers]
        if b"X-Tenant-Id" not in dict(headers):
            sent.append((b"X-Tenant-Id", client.tenant.encode()))
        answer = client.http.post(path, content=content, headers=sent)
        told = {name: value for name, value in answer.headers.items() if name != "date"}
        told.pop("content-length", None)
        answers.append((answer.status_code, told, without_numbers(answer)))
    return answers


def without_numbers(answer: httpx.Response) -> Any:
    said = answer.json()
    for task in said.get("tasks", [said]):
        if isinstance(task.get("task_id"), int):
            task["task_id"] = 1
    return said


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_task_is_answered_the_same_on_both_ways(client: Client, body: bytes) -> None:
    short, long = both_ways(client, "/tasks", body)
    assert short == long


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_batch_is_answered_the_same_on_both_ways(client: Client, body: bytes) -> None:
    short, long = both_ways(client, "/tasks/batch", b'{"tasks": [{"prompt": "x"}, %s]}' % body)
    assert short == long


@pytest.mark.parametrize("path", ["/tasks", "/tasks/batch"])
@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS.keys())
def test_headers_mean_the_same_on_both_ways(
    client: Client, path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    body = json.dumps(TASK if path == "/tasks" else {"tasks": [TASK]}).encode()
    short, long = both_ways(client, path, body, *headers)
    assert short == long


def test_a_key_of_the_one_way_is_known_on_the_other(client: Client) -> None:
    key = (b"Idempotency-Key", b"k")
    short, long = both_ways(client, "/tasks", json.dumps(TASK).encode(), key)
    assert [short[0], long[0]] == [201, 200]
    short, long = both_ways(client, "/tasks/batch", b'{"tasks": [{"prompt": "x"}]}', key)
    assert [short[0], long[0]] == [201, 200]
    assert long[1]["idempotency-replayed"] == "true"


# --- the middleware alone ---------------------------------------------------------------------


class Behind:
    """Stands for FastAPI: notes what came through to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        assert (await receive())["type"] == "http.disconnect"  # what comes behind it, comes through


def ask(path: str, kind: str, *pieces: bytes) -> tuple[list[Message], list[bytes]]:
    """What is answered on the short way, and the bodies that went on to FastAPI."""

    async def route(body: PromptTask, *_: Any) -> TaskStatus:
        return TaskStatus(task_id=len(body.prompt), status=Status.PENDING)

    behind, answered = Behind(), list[Message]()
    direct = Direct(behind, {"/tasks": DirectRoute(route, TypeAdapter(PromptTask))})
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", kind.encode())],
        "state": {"services": None},
        KEY_IN_SCOPE: None,
    }
    coming: Iterator[Message] = iter(
        [
            *({"type": "http.request", "body": piece, "more_body": True} for piece in pieces[:-1]),
            *({"type": "http.request", "body": piece} for piece in pieces[-1:]),
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Message:
        return next(coming)

    async def send(message: Message) -> None:
        answered.append(message)

    asyncio.run(direct(scope, receive, send))
    return answered, behind.bodies


def test_a_plain_request_does_not_reach_fastapi() -> None:
    (start, body), behind = ask("/tasks", SHORT, b'{"prompt":', b'"four"}')
    assert (start["status"], body["body"]) == (201, b'{"task_id":4,"status":"PENDING"}')
    assert not behind


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": 1}', b"\xff", b"[" * 100_000])
def test_what_is_not_plain_reaches_fastapi_as_it_came(body: bytes) -> None:
    assert ask("/tasks", SHORT, body[:1], body[1:]) == ([], [body])


@pytest.mark.parametrize(
    ("path", "kind"), [("/tasks", LONG), ("/tasks", "text/plain"), ("/tasks/", SHORT)]
)
def test_another_path_or_kind_reaches_fastapi(path: str, kind: str) -> None:
    assert ask(path, kind, b'{"prompt": "x"}') == ([], [b'{"prompt": "x"}'])


def test_who_hangs_up_before_the_end_of_the_body_submits_nothing() -> None:
    """What came so far may be JSON all the same."""
    coming: Iterator[Message] = iter(
        [
            {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Message:
        return next(coming)

    direct = Direct(_unreachable, {"/tasks": DirectRoute(_unreachable, TypeAdapter(PromptTask))})
    headers = [(b"content-type", SHORT.encode())]
    scope = {"type": "http", "method": "POST", "path": "/tasks", "headers": headers}
    asyncio.run(direct(scope, receive, _unreachable))
    assert next(coming, None) is None


async def _unreachable(*_: Any) -> Any:
    raise AssertionError("nothing was to be called")


@pytest.mark.parametrize("kind", [SHORT, "Application/JSON", "application/json; charset=utf-8"])
def test_the_usual_spellings_of_json_are_taken(kind: str) -> None:
    assert announces_json({"headers": [(b"content-type", kind.encode())]})


def test_a_direct_route_is_the_route_that_fastapi_has() -> None:
    app: FastAPI = create_app()
    (routes,) = (one.kwargs["routes"] for one in app.user_middleware if one.cls is Direct)
    known = {
        (context.path, context.endpoint)
        for context in iter_route_contexts(app.routes)
        if context.methods == {"POST"}
    }
    assert {(path, route.function) for path, route in routes.items()} <= known

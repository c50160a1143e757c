"""The short way in: what is asked for most does not go through all of FastAPI.

The routes named here are routes of the application like all others. But a request to one of them
that is as it should be is read, checked and answered by this middleware, which calls the route's
own function. Any other goes on to FastAPI with the body that was read, and is refused there: so
each refusal has one wording. tests/http/test_direct.py sends the same to both and compares.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.gate import KEY_IN_SCOPE, path_of
from api.headers import header
from api.problems import answer_to, http_answer
from api.tenants import tenant_of_connection, tenant_of_request
from errors import OrchestratorError


@dataclass(frozen=True)
class DirectRoute:
    """A route that takes (body, response, services, tenant, idempotency_key), and its body."""

    function: Callable[..., Awaitable[BaseModel]]
    body: TypeAdapter[Any]
    status_code: int = 201


class Direct:
    """Middleware, behind all others: answers the POSTs to some paths itself."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, DirectRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(path_of(scope)) if is_post else None
        if route is None or not announces_json(scope):
            await self._app(scope, receive, send)
            return
        try:
            read = await whole_body(receive)
            answer: Response | None = await self._answer(route, scope, read)
        except ClientDisconnect:
            return
        except OrchestratorError as refused:
            answer = answer_to(refused)
        except HTTPException as refused:  # by the limit of bodies
            answer = http_answer(scope, refused)
        if answer is None:
            await self._app(scope, repeated(read, receive), send)
        else:
            await answer(scope, receive, send)

    async def _answer(self, route: DirectRoute, scope: Scope, read: bytes) -> Response | None:
        """What the route says; None: FastAPI is to say what is wrong with the body."""
        try:
            given = json.loads(read)
        except (ValueError, RecursionError):
            return None
        tenant = await tenant_of_request(
            await tenant_of_connection(scope[KEY_IN_SCOPE], header(scope, b"x-tenant-id"))
        )
        try:
            body = route.body.validate_python(given)
        except ValidationError:
            return None
        answer = JsonAnswer(route.status_code)
        key = header(scope, b"idempotency-key")
        services = scope["state"]["services"]
        answer.write(await route.function(body, answer, services, tenant, key))
        return answer


class JsonAnswer(Response):
    """A response whose body comes last; until then a route may set its status and headers."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.background = None
        self.raw_headers = [(b"content-type", b"application/json")]

    def write(self, model: BaseModel) -> None:
        self.body = model.__pydantic_serializer__.to_json(model)
        self.raw_headers.append((b"content-length", b"%d" % len(self.body)))


def announces_json(scope: Scope) -> bool:
    """Whether the body is JSON by its header; FastAPI knows more spellings, and refuses others."""
    kind = header(scope, b"content-type")
    return kind is not None and kind.partition(";")[0].strip().lower() == "application/json"


async def whole_body(receive: Receive) -> bytes:
    pieces = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def repeated(body: bytes, receive: Receive) -> Receive:
    """A `receive` that brings this body first."""
    is_told = False

    async def receive_again() -> Message:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again

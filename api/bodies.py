"""Request bodies that are too long, or hold too many values, are refused before they are parsed."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.headers import header
from api.problems import BODY_TOO_LARGE, problem


class BodyLimit:
    """Answers 413 in our shape, which the limit that FastAPI brings along does not.

    A body is parsed and validated on the event loop, where everybody waits for it. What that
    costs depends on its values more than on its bytes: too many are 422.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_values: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_values = max_values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = header(scope, b"content-length") or "0"
        if announced.isascii() and announced.isdigit() and int(announced) > self._max_bytes:
            await problem(413, BODY_TOO_LARGE)(scope, receive, send)
            return
        received, pieces = 0, list[bytes]()

        async def receive_up_to_the_limit() -> Message:
            nonlocal received
            message = await receive()
            piece = message.get("body", b"")
            received += len(piece)
            if received > self._max_bytes:
                raise HTTPException(413)
            pieces.append(piece)
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._count_values(b"".join(pieces))
                pieces.clear()
            return message

        await self._app(scope, receive_up_to_the_limit, send)

    def _count_values(self, body: bytes) -> None:
        most = self._max_values
        if len(body) > most and has_more_values(body, most):
            raise HTTPException(
                422, f"the body holds more than {most} values (limits.max_body_values)"
            )


def has_more_values(body: bytes, most: int) -> bool:
    """Whether JSON holds more than so many lists, objects, texts, numbers, … at any depth.

    It is counted without parsing it: each value but the first stands behind one of [ { , outside
    of texts. (An empty list or object counts twice.)
    """
    outside = body
    if b"\0" not in body:  # else it is UTF-16, and its texts are counted as if they were JSON
        marked = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if marked.count(b'"') > 4 * most:  # each value has two of them, and its key two more
            return True
        outside = b"".join(marked.split(b'"')[::2])
    return 1 + sum(outside.count(mark) for mark in (b"[", b"{", b",")) > most

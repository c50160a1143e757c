"""Server-sent events over one response: https://html.spec.whatwg.org/multipage/server-sent-events.html

A comment when there was nothing for KEEP_ALIVE_SECONDS keeps proxies from closing the connection.
A client that takes nothing for LONGEST_SEND_SECONDS is let go; what it missed it gets by resuming.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Annotated

from fastapi import Header, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.connections import Line
from api.feeds import Subject
from api.services import ApiServices
from api.stream_events import Bundle
from errors import OrchestratorError
from queries import events
from queries.keys import ApiKey

logger = logging.getLogger(__name__)

STILL_HERE = b": still here\n\n"
PIECE_BYTES = 65_536  # a long snapshot goes in pieces, each once the client has taken the last

Bundles = AsyncGenerator[Bundle, None]

After = Annotated[str | None, Query(description="resume behind this cursor")]
LastEventId = Annotated[str | None, Header()]


async def events_of(
    services: ApiServices, subject: Subject, cursor: str | None, key: ApiKey | None
) -> Response:
    """The stream of a subject's events from `cursor` on, while `key` is good.

    204 if it is over and all of it known.
    """
    feeds = services.feeds
    position = events.position_of(cursor) if cursor else None
    if position and await feeds.is_all_told(subject, position):
        return Response(status_code=204)
    told = services.keys.while_admitted(feeds.follow(subject, position), key)
    return EventStreamResponse(told, feeds.stopping)


class EventStreamResponse(Response):
    """Sends events as they come, until they end, the client is gone or the process stops."""

    media_type = "text/event-stream"

    def __init__(self, events: Bundles, stopping: asyncio.Future[None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = Line(scope)
        await line.carry(self._send_all(send, line), _disconnected(receive), self._stopping)

    async def _send_all(self, send: Send, line: Line) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with breaking_off_told():
            async with contextlib.aclosing(self._events) as bundles:
                async for bundle in bundles:
                    for piece in _pieces(bundle.text):
                        with line.patience:
                            await send(
                                {"type": "http.response.body", "body": piece, "more_body": True}
                            )
        with line.patience:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _pieces(text: bytes) -> Iterable[bytes]:
    if len(text) <= PIECE_BYTES:
        return (text or STILL_HERE,)
    return (text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES))


@contextlib.contextmanager
def breaking_off_told() -> Iterator[None]:
    """A stream that cannot go on ends here, and the client resumes it."""
    try:
        yield
    except OrchestratorError as reason:
        logger.warning("A stream of events breaks off: %s", reason)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Server-sent events over one response: https://html.spec.whatwg.org/multipage/server-sent-events.html

A comment every KEEP_ALIVE_SECONDS keeps proxies from closing the connection. A client that takes
nothing for LONGEST_SEND_SECONDS is let go; what it missed it gets by resuming.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.feeds import StreamEvent

KEEP_ALIVE_SECONDS = 15.0
LONGEST_SEND_SECONDS = 30.0


class EventStreamResponse(Response):
    """Sends the events of an async iterator as they come, until it ends or the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[StreamEvent, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        listening = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, listening):
                task.cancel()
            await asyncio.gather(sending, listening, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(_with_keep_alive(self._events)) as chunks:
            async for chunk in chunks:
                async with asyncio.timeout(LONGEST_SEND_SECONDS):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_keep_alive(
    events: AsyncGenerator[StreamEvent, None],
) -> AsyncGenerator[bytes, None]:
    """The events as text, and a comment whenever there was none for a while."""
    upcoming: asyncio.Task[StreamEvent | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_SECONDS)
            if not done:
                yield b": still here\n\n"
                continue
            event, upcoming = upcoming.result(), None
            if event is None:
                return
            yield _as_text(event)
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
        await events.aclose()


async def _next(events: AsyncIterator[StreamEvent]) -> StreamEvent | None:
    return await anext(events, None)


def _as_text(event: StreamEvent) -> bytes:
    lines = [f"event: {event.name}"]
    if event.cursor is not None:
        lines.append(f"id: {event.cursor}")
    lines.append(f"data: {json.dumps(event.data, ensure_ascii=False)}")
    return ("\n".join(lines) + "\n\n").encode()

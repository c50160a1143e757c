"""The same events over a WebSocket: one text frame {"event": …, "data": {…}} for each.

A browser's code sees no pings, so a frame keep-alive comes when there was nothing for
KEEP_ALIVE_SECONDS: a client that gets no frame for twice as long has lost its connection. What a
client sends is ignored; one that sends much is turned away.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import WebSocket, WebSocketDisconnect

from api import connections
from api.connections import Line
from api.event_stream import Bundles, breaking_off_told

STILL_HERE = '{"event": "keep-alive", "data": {}}'

# What a client may send: pings of its own, and nothing that takes room.
MOST_MESSAGES = 60
PER_SECONDS = 60.0
LONGEST_MESSAGE = 4096

# https://www.iana.org/assignments/websocket: 1012 and 1013 tell a client to come again.
ENDED, UNWANTED, RESTARTS, RESUME = 1000, 1008, 1012, 1013


class EventSocket:
    """Sends events as they come, until they end, the client is gone or the process stops."""

    def __init__(
        self, websocket: WebSocket, events: Bundles, stopping: asyncio.Future[None]
    ) -> None:
        self._websocket = websocket
        self._events = events
        self._stopping = stopping
        self._code: int | None = None  # None: the client is gone

    async def serve(self) -> None:
        """From the handshake to the close."""
        line = Line(self._websocket.scope)
        with contextlib.suppress(WebSocketDisconnect):
            await self._websocket.accept()
            await line.carry(self._send_all(line), self._listen(), self._stopping)
            if self._code is not None:
                await self._close(RESTARTS if self._stopping.done() else self._code, line)

    async def _send_all(self, line: Line) -> None:
        last = ""
        with breaking_off_told():
            async with contextlib.aclosing(self._events) as bundles:
                async for bundle in bundles:
                    with line.patience:
                        for event in bundle:
                            await self._websocket.send_text(event.frame)
                        if not bundle:
                            await self._websocket.send_text(STILL_HERE)
                    last = bundle[-1].name if bundle else ""
        self._code = ENDED if last == "end" else RESUME

    async def _listen(self) -> None:
        """Until the client is gone, or has sent too much."""
        now = asyncio.get_running_loop().time
        since, messages = now(), 0
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            if now() > since + PER_SECONDS:
                since, messages = now(), 0
            messages += 1
            length = len(message.get("text") or message.get("bytes") or "")
            if messages > MOST_MESSAGES or length > LONGEST_MESSAGE:
                self._code = UNWANTED
                return

    async def _close(self, code: int, line: Line) -> None:
        try:
            async with asyncio.timeout(connections.LONGEST_SEND_SECONDS):
                await self._websocket.close(code)
        except TimeoutError:
            await line.cut()

"""The connections under streams: how each ends, whoever ends it, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from api.alarm import Alarm

logger = logging.getLogger(__name__)

# A client that takes nothing for so long is let go, and so is one that the network has lost.
LONGEST_SEND_SECONDS = 30.0
STOP_SECONDS = 1.0  # for the last words to a client when the process stops

TRANSPORT = "orchestrator.transport"
NO_TRANSPORT = (
    "The server does not show the connection under a stream of events, as uvicorn did when this "
    "was written (receive.__self__.transport). Streams work; but a client that stops reading, or "
    "that the network has lost, keeps its connection until it or the server ends"
)
MOST_OPEN_FILES = 65_536


class TransportInScope:
    """Middleware: lets a stream see the transport that the server writes its answer to.

    No interface tells a server to cut a connection: it waits, for ever, until the client has
    taken what was written before. Under a server that shows no transport, streams do without, and
    the log says so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server_side = getattr(receive, "__self__", None)
        scope[TRANSPORT] = getattr(server_side, "transport", None)
        await self._app(scope, receive, send)


class Line:
    """The connection to the client of one stream."""

    patience: Alarm  # of `carry`; to be set while something is sent

    def __init__(self, scope: Scope) -> None:
        self._transport: asyncio.Transport | None = scope.get(TRANSPORT)
        if self._transport is None:
            _warn_once(NO_TRANSPORT)
        self._let_the_kernel_notice()

    async def cut(self) -> None:
        """End it at once; what was not sent yet is lost. Whoever listens hears of it."""
        self._abort()
        await asyncio.sleep(STOP_SECONDS)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _let_the_kernel_notice(self) -> None:
        """Give up a client that acknowledges nothing, instead of sending to it for 15 minutes."""
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        transport = self._transport
        connected = None if transport is None else transport.get_extra_info("socket")
        if option is not None and connected is not None:
            with contextlib.suppress(OSError, ValueError):  # no TCP, or gone already
                milliseconds = int(LONGEST_SEND_SECONDS * 1000)
                connected.setsockopt(socket.IPPROTO_TCP, option, milliseconds)

    async def carry(
        self,
        sending: Coroutine[Any, Any, None],
        listening: Coroutine[Any, Any, None],
        stopping: asyncio.Future[None],
    ) -> None:
        """Until one of the two ends, or the process is to stop; then neither goes on."""
        sender = asyncio.create_task(sending)
        tasks = {sender, asyncio.create_task(listening)}

        def give_up() -> None:
            self._abort()
            asyncio.get_running_loop().call_later(STOP_SECONDS, sender.cancel)

        self.patience = Alarm(LONGEST_SEND_SECONDS, give_up)
        try:
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await asyncio.wait(tasks, timeout=STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                # A client that takes nothing does not keep the process from ending.
                asyncio.get_running_loop().call_later(STOP_SECONDS, self._abort)
        finally:
            self.patience.end()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error


@lru_cache(maxsize=1)
def _warn_once(what_is_lost: str) -> None:
    logger.warning(what_is_lost)


@contextlib.contextmanager
def cared_for(stop_streams: Callable[[], None]) -> Iterator[None]:
    """Room for many connections; and streams end when the process is told to stop.

    The server waits for all answers to end before it says that it stops, and streams do not.
    """
    _raise_limit_of_open_files()
    loop = asyncio.get_running_loop()
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if callable(before):  # the server's own
                replaced[number] = before
                signal.signal(number, _then(loop, stop_streams, before))
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)


def _then(
    loop: asyncio.AbstractEventLoop,
    stop_streams: Callable[[], None],
    before: Callable[[int, FrameType | None], Any],
) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop_streams)
        before(number, frame)

    return handle


def _raise_limit_of_open_files() -> None:
    """Each watcher is an open file, and the usual limit is 1,024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, MOST_OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))

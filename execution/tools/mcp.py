"""Tools of MCP servers, by the official SDK (`mcp`, version 2), which is imported when needed.

A server is started, or connected to, by the first call, and the session is kept for later ones. A
session that is gone is replaced; calls that still wait for an answer of the old one keep it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from config import McpServer, Settings
from execution.errors import Failure, Permanent, not_installed
from execution.tools.context import ToolContext
from execution.tools.results import storable_result
from execution.tools.threads import in_thread

logger = logging.getLogger(__name__)

LONGEST_CLOSE_SECONDS = 6.0  # the SDK ends a command in 2 + 2 s


@dataclass(frozen=True)
class RemoteTool:
    """One tool of a server."""

    name: str
    remote_name: str
    session: Session

    async def call(self, args: Mapping[str, Any], context: ToolContext) -> Any:
        """Its structured content, else its text; raises Failure or Permanent."""
        result = await self.session.call_tool(self.remote_name, dict(args), _meta(context))
        # It may be large: not on the loop's thread.
        read = partial(self._read, result, context.settings.limits.max_result_bytes)
        return await in_thread(f"result of {self.name}", read)

    def _read(self, result: Any, max_bytes: int) -> Any:
        value = _value(result)
        if result.is_error:
            raise Failure(f"the tool {self.name} failed: {value}")
        return storable_result(value, max_bytes)


class McpServers:
    """One session for each server that tools name, however many tools do."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sessions: dict[McpServer, Session] = {}

    def tool(self, name: str, server: McpServer) -> RemoteTool:
        place = server.model_copy(update={"tool": None})
        if place not in self._sessions:
            seconds = self._settings.mcp.start_timeout_seconds
            self._sessions[place] = Session(place, seconds)
        return RemoteTool(name, server.tool or name, self._sessions[place])

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions.values()))


@dataclass(eq=False)
class _Link:
    """An open client, or one that is being opened, the task that keeps it, and who needs it."""

    opening: asyncio.Future[Any]  # of the client
    enough: asyncio.Event
    keeper: asyncio.Task[None]
    calls: int = 0
    is_replaced: bool = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.end_unless_needed()

    def end_unless_needed(self) -> None:
        if self.is_replaced and not self.calls:
            self.enough.set()


class _Gone(Exception):
    """The session ended under a call."""


class Session:
    """A connection to one server, opened when needed. Belongs to one event loop.

    The SDK's client has to be opened and closed by the same asyncio task: a keeper of our own,
    which no call's cancellation touches.
    """

    def __init__(self, server: McpServer, start_timeout_seconds: float) -> None:
        self._server = server
        self._start_timeout_seconds = start_timeout_seconds
        self._link: _Link | None = None
        self._links: set[_Link] = set()  # the one before, too, while calls wait there

    async def call_tool(self, name: str, args: dict[str, Any], meta: dict[str, Any]) -> Any:
        """The SDK's CallToolResult; a session that turns out to be gone is replaced, once.

        Cancelling this tells the server that nobody waits for the answer.
        """
        sdk = _sdk()
        is_fresh = self._link is None
        while True:
            link = self._link = self._link or self._open(sdk)
            with link.in_use():
                client = await asyncio.shield(link.opening)
                try:
                    return await _while_kept(link.keeper, client.call_tool(name, args, meta=meta))
                except _Gone as gone:
                    ended: Exception = gone
                except sdk.MCPError as refused:
                    if not self._is_gone(sdk, refused.code, is_fresh):
                        raise _refusal(sdk, refused) from refused
                    ended = refused
                self._replace(link)
            if is_fresh:
                raise Failure(f"the MCP server {self._place} went away: {ended}") from ended
            is_fresh = True

    def _is_gone(self, sdk: Any, code: int, is_fresh: bool) -> bool:
        """Whether an error means that the session is no more, and not that the call is refused."""
        if code == sdk.SESSION_UNKNOWN:  # of a server that was restarted, or of one that refuses
            return self._server.url is not None and not is_fresh
        return bool(code == sdk.CONNECTION_CLOSED)

    async def close(self) -> None:
        """End the session; a server that does not end in time is left alone."""
        for link in self._links:
            link.enough.set()
        keepers = [link.keeper for link in self._links]
        if keepers:
            await asyncio.wait(keepers, timeout=LONGEST_CLOSE_SECONDS)
        for keeper in keepers:
            keeper.cancel()

    @property
    def _place(self) -> str:
        """How errors name it: without what may be secret, arguments and the end of a URL."""
        if self._server.url is not None:
            return urlsplit(self._server.url).hostname or "behind a URL"
        return PurePath((self._server.command or ("",))[0]).name

    def _open(self, sdk: Any) -> _Link:
        opening: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Those who wait have it raised; if nobody does any more, it is nobody's concern.
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        enough = asyncio.Event()
        keeper = asyncio.create_task(self._keep(sdk, opening, enough))
        link = _Link(opening, enough, keeper)
        self._links.add(link)
        keeper.add_done_callback(lambda _: self._links.discard(link))
        return link

    def _replace(self, link: _Link) -> None:
        """Let the next call open another session, beside this one as long as calls wait there."""
        link.is_replaced = True
        if self._link is link:
            self._link = None

    async def _keep(self, sdk: Any, opening: asyncio.Future[Any], enough: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._start_timeout_seconds):
                    client = await sdk.open_client(stack, self._server, self._start_timeout_seconds)
                opening.set_result(client)
                await enough.wait()
        except BaseException as failed:  # also the groups of errors that the SDK raises
            if self._link is not None and self._link.opening is opening:
                self._link = None
            if not opening.done():
                opening.set_exception(self._cannot_open(failed))
            else:  # whoever had a call there is told that it is gone
                logger.info("The session with the MCP server %s ended: %r", self._place, failed)
            if isinstance(failed, asyncio.CancelledError):
                raise

    def _cannot_open(self, failed: BaseException) -> Failure:
        if isinstance(failed, TimeoutError):
            words = f"not within {self._start_timeout_seconds:g} s"
        else:
            words = _innermost(failed)
        return Failure(f"the MCP server {self._place} cannot be reached: {words}")


async def _while_kept(keeper: asyncio.Task[None], call: Coroutine[Any, Any, Any]) -> Any:
    """What the call returns or raises; _Gone if the session ends before that."""
    calling = asyncio.create_task(call)
    try:
        await asyncio.wait({calling, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise _Gone("the session ended")
        return calling.result()
    finally:
        if not calling.done():
            calling.cancel()
            _ending.add(calling)  # it tells the server, in its own time
            calling.add_done_callback(_ending.discard)


_ending: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks by weak references only


def _meta(context: ToolContext) -> dict[str, Any]:
    """For servers that want to do each thing once."""
    return {
        "agent-orchestrator/idempotency-key": context.idempotency_key,
        "agent-orchestrator/attempt": context.attempt,
    }


def _value(result: Any) -> Any:
    if result.structured_content is not None:
        return result.structured_content
    if all(block.type == "text" for block in result.content):
        return "\n".join(block.text for block in result.content)
    return [
        block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content
    ]


def _refusal(sdk: Any, refused: Any) -> Failure | Permanent:
    said = f"the MCP server refused the call: {refused.message}"
    if refused.code in sdk.WILL_NOT_CHANGE:
        return Permanent(said)
    return Failure(said)


def _innermost(failed: BaseException) -> str:
    """The SDK's task groups wrap what went wrong, often more than once."""
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return f"{type(failed).__name__}: {failed}"


def _sdk() -> Any:
    try:
        from execution.tools import mcp_sdk
    except ImportError as missing:
        raise not_installed("a tool of an MCP server", "mcp", missing) from missing
    return mcp_sdk

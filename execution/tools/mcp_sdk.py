"""The part of the MCP client that needs the SDK; imported by the first call, see mcp.py."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND

from config import McpServer

__all__ = ["CONNECTION_CLOSED", "SESSION_UNKNOWN", "WILL_NOT_CHANGE", "MCPError", "open_client"]

# What the SDK makes of a 404: a server behind a URL that was restarted does not know the session
# any more. A server that takes a call for none uses the same number.
SESSION_UNKNOWN = INVALID_REQUEST
WILL_NOT_CHANGE = (INVALID_PARAMS, METHOD_NOT_FOUND)


async def open_client(stack: AsyncExitStack, server: McpServer, timeout_seconds: float) -> Client:
    """A client that is connected to `server`, closed with `stack`."""
    if server.command is not None:
        return await stack.enter_async_context(Client(_command(server)))
    http = await stack.enter_async_context(
        httpx2.AsyncClient(
            headers=_headers(server),
            # An answer may take as long as its task may.
            timeout=httpx2.Timeout(timeout_seconds, read=None),
            trust_env=False,
        )
    )
    transport = streamable_http_client(server.url or "", http_client=http)
    return await stack.enter_async_context(Client(transport))


def _command(server: McpServer) -> StdioServerParameters:
    program, *arguments = server.command or ()
    env = {name: os.environ[name] for name in server.env if name in os.environ}
    return StdioServerParameters(command=program, args=arguments, env=env)


def _headers(server: McpServer) -> dict[str, str]:
    token = os.environ.get(server.token_env or "")
    return {"Authorization": f"Bearer {token}"} if token else {}

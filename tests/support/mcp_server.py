"""A real MCP server, made with the SDK: python mcp_server.py FOLDER [PORT].

On its standard input and output, or on a port. It writes what happens to it into files of FOLDER.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

FOLDER = Path(sys.argv[1])
server = MCPServer("for tests", log_level="CRITICAL")


def note(name: str, text: object = "once") -> None:
    with (FOLDER / name).open("a") as file:
        file.write(f"{text}\n")


@server.tool()
def add(a: int, b: int) -> int:
    return a + b


@server.tool()
def person(name: str) -> dict[str, Any]:
    return {"name": name, "tags": ["a\0b"]}


@server.tool(structured_output=False)
def say(text: str) -> str:
    return text


@server.tool()
def fail(text: str) -> str:
    raise ToolError(text)


@server.tool(structured_output=False)
def meta(ctx: Context) -> str:
    given = ctx.request_context.meta or {}
    return str(dict(given).get("agent-orchestrator/idempotency-key"))


@server.tool(structured_output=False)
def secret(name: str) -> str:
    return os.environ.get(name, "none")


@server.tool()
def refuse(code: int) -> str:
    note("refused", code)
    raise MCPError(code, "not like this")


@server.tool()
def die() -> str:
    os._exit(3)


@server.tool()
async def wait(seconds: float) -> str:
    """So long, or until somebody makes the file `let_go`."""
    note("waiting")
    try:
        with anyio.move_on_after(seconds):
            while not (FOLDER / "let_go").exists():
                await anyio.sleep(0.02)
    except BaseException as ended:
        note("cancelled", type(ended).__name__)
        raise
    return "waited"


if __name__ == "__main__":
    note("started", os.getpid())
    if len(sys.argv) > 2:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
    note("ended")

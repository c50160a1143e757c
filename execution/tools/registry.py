"""All tools of a worker by name, from `[tools]` of config.toml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from config import Settings
from execution.tools.context import ToolContext
from execution.tools.functions import load_function
from execution.tools.mcp import McpServers


class Tool(Protocol):
    async def call(self, args: Mapping[str, Any], context: ToolContext) -> Any:
        """The result, storable; may raise anything."""
        ...


class Registry:
    """The tools of one worker. Functions are imported at once, servers are asked when needed."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError if a function cannot be a tool."""
        self._servers = McpServers(settings)
        self._tools: dict[str, Tool] = {
            name: load_function(name, entry)
            if isinstance(entry, str)
            else self._servers.tool(name, entry.mcp)
            for name, entry in settings.tools.items()
        }

    def find(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def names(self) -> list[str]:
        return sorted(self._tools)

    async def close(self) -> None:
        """End the sessions with servers."""
        await self._servers.close()

"""What a prompt needs of a model server, whatever API it speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

OnPiece = Callable[[str], None]


@dataclass(frozen=True)
class Completion:
    """An answer, whole. Counts are the server's own; 0 where it told none."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    truncated: bool  # the model did not see all of the prompt


class Backend(Protocol):
    """Calls the server behind one route; may be used by many coroutines of one event loop.

    Cancelling a call drops its connection, which ends the generation.
    """

    async def probe(self) -> None:
        """Return if the server answers; raises Outage if it does not."""

    async def complete(
        self,
        model: str,
        prompt: str,
        on_piece: OnPiece,
        schema: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Return the model's answer to `prompt`; raises Outage, Failure or Permanent.

        `on_piece` is told each piece as it comes. The server is asked to keep to the JSON schema,
        if there is one; not every server and model does.
        """

    async def close(self) -> None:
        """End what is open."""

"""What a tool is told about its call, and how it says that trying again is of no use."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from config import Settings


class PermanentError(Exception):
    """Raised by a tool: the step fails at once, and is not tried again."""


@dataclass(frozen=True)
class ToolContext:
    """One call of a tool. A function gets it by a parameter of this type, whatever its name.

    `idempotency_key` is the same for all attempts of a step, so that what the tool sets off
    elsewhere can be set off once. `attempt` counts how often the step was handed out, from 1.
    """

    idempotency_key: str
    attempt: int
    task_id: int
    settings: Settings = field(repr=False)
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more: return or raise, soon."""
        return self._cancelled.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep for so long, or until the call is cancelled; returns whether it is.

        For plain functions; an async one awaits asyncio.sleep, which ends with a CancelledError.
        """
        return self._cancelled.wait(seconds)

    def cancel(self) -> None:
        """Set the flag; called by the worker."""
        self._cancelled.set()

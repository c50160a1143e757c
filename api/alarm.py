"""A timer that is set and cleared at every event, for every watcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls `ring` each time that it was set, and neither set again nor cleared, for `seconds`.

    A timer of the event loop for each wait would nearly always be cancelled unused, and two of them
    cost more than all else that is done to bring a watcher an event. This one looks at most once in
    `seconds` whether it is due.
    """

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._ring = seconds, ring
        self._due: float | None = None
        self._timer = self._loop.call_later(seconds, self._look)

    def set(self) -> None:
        self._due = self._loop.time() + self._seconds

    def clear(self) -> None:
        self._due = None

    def end(self) -> None:
        """It never rings any more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._due is not None and self._due <= now:
            self.set()
            self._ring()
        # Whatever is set from now on is not due before that.
        look_again = now + self._seconds if self._due is None else self._due
        self._timer = self._loop.call_at(look_again, self._look)

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *_: object) -> None:
        self.clear()

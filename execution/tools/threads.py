"""Calls plain functions in threads of their own, which nobody has to wait for.

One thread for each call, not a pool: a function that never returns takes no place from others, and
does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEAF_SECONDS = 2.0  # what still runs so long after it was cancelled does not listen


class Thread(Generic[T]):
    """One call, already begun. Belongs to the event loop that made it."""

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def result(self) -> T:
        """What the function returned or raised. Cancelling this leaves the thread to itself."""
        try:
            value, error = await self._ended
        except asyncio.CancelledError:
            self._loop.call_later(DEAF_SECONDS, self._say_if_deaf)
            raise
        if error is not None:
            raise error
        returned: T = value
        return returned

    def _say_if_deaf(self) -> None:
        if self._thread.is_alive():
            logger.warning("The thread of %s was cancelled and does not listen", self._thread.name)

    def _run(self) -> None:
        value, error = None, None
        try:
            value = self._function()
        except BaseException as raised:  # whatever it is, it is the caller's, not the process's
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._end, value, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result((value, error))


async def in_thread(name: str, function: Callable[[], T]) -> T:
    """The result of `function`, called in a thread of its own."""
    return await Thread(name, function).result()

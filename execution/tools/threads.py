"""Calls plain functions in threads of their own, which nobody has to wait for.

One thread for each call, not a pool: a function that never returns takes no place from others, and
does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEAF_SECONDS = 2.0  # what still runs so long after it was cancelled does not listen


def _nothing() -> None:
    pass


class Thread(Generic[T]):
    """One call, already begun. Belongs to the event loop that made it.

    `on_cancel` is called by that loop when nobody waits for the result any more, `afterwards` by
    the thread when the result is on its way.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], T],
        on_cancel: Callable[[], None] = _nothing,
        afterwards: Callable[[], None] = _nothing,
    ) -> None:
        self._function = function
        self._on_cancel = on_cancel
        self._afterwards = afterwards
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def result(self) -> T:
        """What the function returned or raised. Cancelling this leaves the thread to itself."""
        try:
            value, error = await self._ended
        except asyncio.CancelledError:
            self._on_cancel()
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
        try:
            self._afterwards()
        except BaseException:
            logger.exception("What %s left behind cannot be ended", self._thread.name)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result((value, error))


async def in_thread(name: str, function: Callable[[], T]) -> T:
    """The result of `function`, called in a thread of its own."""
    return await Thread(name, function).result()


class OwnLoop:
    """An event loop of one thread, for something async that may block: it blocks nobody else.

    `run` and `close` are for the thread, `cancel` is for others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runner: asyncio.Runner | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    def run(self, awaitable: Awaitable[T]) -> T:
        """What it returns or raises; a CancelledError if `cancel` is called, or was."""
        self._runner = asyncio.Runner()
        loop = self._runner.get_loop()
        task = loop.create_task(_awaited(awaitable))
        with self._lock:
            self._task = task
            if self._is_cancelled:
                task.cancel()
        return loop.run_until_complete(task)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._task is not None:
                with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                    self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        """Cancel what still runs on the loop, and close it."""
        if self._runner is not None:
            self._runner.close()


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable

"""Calls plain functions in threads, which nobody has to wait for.

Each call has a thread to itself: a function that never returns takes no place from others, and does
not keep the process from ending. A thread whose call has returned is kept for the next one for some
seconds, since to start one costs more than most calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEAF_SECONDS = 2.0  # what still runs so long after it was cancelled does not listen
IDLE_SECONDS = 5.0  # so long a thread waits for its next call


class _Caller(threading.Thread):
    """A thread that makes one call after the other, each in a fresh context, until it is idle."""

    # The one that was busy last is at the end, and is taken first.
    _idle: ClassVar[list[_Caller]] = []
    _lock = threading.Lock()

    def __init__(self, name: str, is_last: bool) -> None:
        super().__init__(name=name, daemon=True)
        self._is_last = is_last
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    @classmethod
    def begin(cls, name: str, call: Callable[[], None], is_last: bool) -> None:
        """Make a call that raises nothing; after the last, the thread ends."""
        with cls._lock:
            caller = cls._idle.pop() if cls._idle and not is_last else None
        if caller is not None:
            caller.name = name
            caller._calls.put(call)
            return
        caller = cls(name, is_last)
        caller._calls.put(call)
        caller.start()

    def run(self) -> None:
        while (call := self._next()) is not None:
            contextvars.Context().run(call)
            del call  # and what it holds
            asyncio.set_event_loop(None)  # that it may have left behind
            if self._is_last:
                return
            self.name = "idle"
            with self._lock:
                self._idle.append(self)

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._calls.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with self._lock:
                if self in self._idle:
                    self._idle.remove(self)
                    return None
        return self._calls.get()  # somebody has just taken it


def _nothing() -> None:
    pass


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Thread(Generic[T]):
    """One call, already begun; any event loop may wait for what comes of it, once.

    `on_cancel` is called by that loop when it waits no more, `afterwards` by the thread when the
    result is on its way. `is_last`: in a thread that begins and ends with it.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], T],
        on_cancel: Callable[[], None] = _nothing,
        afterwards: Callable[[], None] = _nothing,
        is_last: bool = False,
    ) -> None:
        self._name = name
        self._function = function
        self._on_cancel = on_cancel
        self._afterwards = afterwards
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_running = True
        _Caller.begin(name, self._run, is_last)

    async def outcome(self) -> tuple[Any, BaseException | None]:
        """What the function returned, or else raised: so a CancelledError is not taken for ours.

        Cancelling this leaves the thread to itself.
        """
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        try:
            # The thread says that it has ended, and then looks for a waiter: one sees the other.
            while (outcome := self._outcome) is None:
                await waiter
        except asyncio.CancelledError:
            self._on_cancel()
            loop.call_later(DEAF_SECONDS, self._say_if_deaf)
            raise
        return outcome

    async def result(self) -> T:
        """What the function returned or raised. Cancelling this leaves the thread to itself."""
        value, error = await self.outcome()
        if error is not None:
            raise error
        returned: T = value
        return returned

    def _say_if_deaf(self) -> None:
        if self._is_running:
            logger.warning("The thread of %s was cancelled and does not listen", self._name)

    def _run(self) -> None:
        value, error = None, None
        try:
            value = self._function()
        except BaseException as raised:  # whatever it is, it is the caller's, not the process's
            error = raised
        self._outcome = (value, error)
        if (waiter := self._waiter) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)
        try:
            self._afterwards()
        except BaseException:
            logger.exception("What %s left behind cannot be ended", self._name)
        self._is_running = False


async def in_thread(name: str, function: Callable[[], T]) -> T:
    """The result of `function`, called in a thread."""
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
        try:
            return loop.run_until_complete(task)
        finally:
            if asyncio.iscoroutine(awaitable):
                awaitable.close()  # that was cancelled before it had begun

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

"""Tools for tests: well-behaved ones, and every way to misbehave that came to mind."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, Field

from execution.tools import PermanentError, ToolContext
from execution.tools.functions import returns_at_once

RELEASED = threading.Event()  # lets `deaf` go


class Address(BaseModel):
    street: str
    number: int


def add(a: int, b: int = 2) -> int:
    return a + b


async def add_async(a: int, b: int = 2) -> int:
    await asyncio.sleep(0)
    return a + b


def typed(
    day: date,
    share: Annotated[float, Field(gt=0, le=1)],
    address: Address,
    mode: Literal["fast", "slow"] = "fast",
    tags: list[str] | None = None,
) -> list[Any]:
    return [day.isoformat(), share, address.street, mode, tags]


def numbers(**numbers: int) -> int:
    return sum(numbers.values())


def told(word: str, call: ToolContext | None = None) -> dict[str, Any]:
    assert call is not None
    return {"word": word, "key": call.idempotency_key, "attempt": call.attempt}


def counted(call: ToolContext, **numbers: int) -> list[int]:
    return [call.attempt, *numbers.values()]


@returns_at_once
def marked(number: int) -> int:
    return number


class Greeter:
    def __call__(self, name: str) -> str:
        return f"Hello, {name}"


greet = Greeter()


def timed(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@timed
async def decorated(a: int) -> int:
    await asyncio.sleep(0)
    return a


# --- results ---------------------------------------------------------------------------------


def give(what: str) -> Any:
    """Something that is hard to store."""
    endless: list[Any] = []
    endless.append(endless)
    wide: list[Any] = ["x" * 100]
    for _ in range(60):
        wide = [wide, wide]
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    things: dict[str, Any] = {
        "nothing": None,
        "tuple": (1, 2.5, True, "ü"),
        "dirty": {"a\0b": ["c\ud800d", {"\udfff": "\0"}]},
        "nan": [float("nan")],
        "infinity": {"a": float("-inf")},
        "set": {1, 2},
        "bytes": b"x",
        "object": object(),
        "class": int,
        "number key": {1: "a"},
        "endless": endless,
        "wide": wide,
        "deep": deep,
        "huge number": 10**5000,
        "large": "ü" * 600,
        "large key": {"k" * 1200: 1},
        "many": [0] * 2000,
    }
    return things[what]


# --- errors ----------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("bad\0 value"),
    "silent": ValueError,
    "key": lambda: KeyError("k"),
    "permanent": lambda: PermanentError("no such customer"),
    "cancelled": lambda: asyncio.CancelledError("not ours"),
    "timeout": lambda: TimeoutError("not ours"),
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt("ctrl-c"),
    "generator": lambda: GeneratorExit("over"),
    "stop": lambda: StopIteration(1),
    "async stop": lambda: StopAsyncIteration(1),
    "base": lambda: BaseException("all of it"),
    "memory": MemoryError,
    "recursion": lambda: RecursionError("too deep"),
    "unprintable": Unprintable,
    "group": lambda: ExceptionGroup("both", [ValueError("one")]),
}


def fail(how: str) -> NoReturn:
    raise ERRORS[how]()


async def fail_async(how: str) -> NoReturn:
    await asyncio.sleep(0)
    raise ERRORS[how]()


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


async def exit_from_a_task_of_its_own() -> str:
    async def leave() -> None:
        sys.exit(3)

    leaving = asyncio.create_task(leave())
    # Or asyncio prints it in the middle of another test, whenever the garbage is collected; Python
    # 3.11 cannot print an exception while it parses something (gh-106905).
    leaving.add_done_callback(asyncio.Task.exception)
    await asyncio.wait({leaving})
    return "still here"


class Slow(Exception):
    was_released = False

    def __str__(self) -> str:
        self.was_released = self.was_released or RELEASED.wait(600)
        return "slow"


def fail_slowly() -> NoReturn:
    """Raise an error whose text takes for ever."""
    raise Slow


def note(what: int) -> None:
    """Tell that it was called."""
    SEEN.append(f"note: {what}")


def die() -> None:
    """Take the whole worker along."""
    os._exit(7)


# --- time ------------------------------------------------------------------------------------


def listen(context: ToolContext, seconds: float = 600) -> str:
    """Wait, and tell a file's worth of the world how it ended."""
    told_to_stop = context.wait(seconds)
    SEEN.append(f"listen: {told_to_stop}, {context.cancelled}")
    return "woken" if told_to_stop else "slept"


SEEN: list[str] = []


def deaf(seconds: float = 600) -> str:
    """Hear nothing until the test lets go."""
    RELEASED.wait(seconds)
    SEEN.append("deaf: done")
    return "done"


async def deaf_async(seconds: float = 600) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not RELEASED.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            SEEN.append("deaf_async: heard and went on")
    SEEN.append("deaf_async: done")
    return "done"


async def block(seconds: float = 600) -> str:
    """Hold up the event loop that runs it, which an async function ought not to do."""
    RELEASED.wait(seconds)
    SEEN.append("block: done")
    return "done"


async def leave_a_task_behind() -> str:
    async def linger() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            SEEN.append("linger: ended")

    LEFT.append(asyncio.create_task(linger()))
    await asyncio.sleep(0)
    return "done"


LEFT: list[asyncio.Task[None]] = []


# --- what cannot be a tool -------------------------------------------------------------------

no_function = 5


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    return int(a)


def positional(a: int, /) -> int:
    return a


def starred(*a: int) -> int:
    return len(a)


def unknown_type(a: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    return int(a)

"""execution/tools/threads.py: a thread makes one call after the other, and never two at once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from execution.tools import threads
from execution.tools.threads import Thread, in_thread
from tests.support.processes import eventually

SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


@pytest.fixture(autouse=True)
def nobody_idle(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of idle threads of this test's own."""
    idle: list[Any] = []
    monkeypatch.setattr(threads._Caller, "_idle", idle)
    return idle


def run(*calls: Callable[[], Any], idle: list[Any]) -> list[Any]:
    """What these calls return, each begun when the thread of the one before waits for it."""

    async def all_of_them() -> list[Any]:
        results = []
        for number, call in enumerate(calls):
            results.append(await in_thread(f"call {number}", call))
            eventually(lambda: idle)
        return results

    return asyncio.run(all_of_them())


def test_a_thread_whose_call_has_returned_or_raised_makes_the_next_one_by_its_name(
    nobody_idle: list[Any],
) -> None:
    def fail() -> None:
        raise SystemExit(3)

    def who() -> tuple[threading.Thread, str]:
        this = threading.current_thread()
        return this, this.name

    async def failing() -> None:
        with pytest.raises(SystemExit):
            await in_thread("fails", fail)
        eventually(lambda: nobody_idle)

    (first,) = run(who, idle=nobody_idle)
    asyncio.run(failing())
    (second,) = run(who, idle=nobody_idle)
    assert first[0] is second[0]
    assert (first[1], second[1], first[0].name) == ("call 0", "call 0", "idle")


def test_a_call_that_does_not_return_keeps_its_thread_to_itself(nobody_idle: list[Any]) -> None:
    release = threading.Event()

    async def beside(stuck: Callable[[], Coroutine[Any, Any, Any]]) -> threading.Thread:
        waits = asyncio.create_task(stuck())
        await asyncio.sleep(0)
        other = await in_thread("other", threading.current_thread)
        release.set()
        assert await waits is not other
        return other

    def wait() -> threading.Thread:
        release.wait(20)
        return threading.current_thread()

    asyncio.run(beside(lambda: in_thread("stuck", wait)))
    eventually(lambda: len(nobody_idle) == 2)


def test_a_call_sees_no_context_variable_of_the_one_before(nobody_idle: list[Any]) -> None:
    assert run(lambda: SEEN.set("this") and None, SEEN.get, idle=nobody_idle) == [None, "nothing"]


def test_an_idle_thread_ends_after_a_while_and_the_last_call_of_one_at_once(
    nobody_idle: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def last() -> threading.Thread:
        return await Thread("last", threading.current_thread, is_last=True).result()

    monkeypatch.setattr(threads, "IDLE_SECONDS", 1.0)
    (usual,) = run(threading.current_thread, idle=nobody_idle)
    assert asyncio.run(last()) is not usual
    eventually(lambda: not nobody_idle)
    usual.join(20)
    monkeypatch.setattr(threads, "IDLE_SECONDS", 600)
    of_its_own = asyncio.run(last())
    of_its_own.join(20)
    assert not of_its_own.is_alive()

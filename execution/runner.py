"""Carries out claimed tasks on one event loop in a thread of its own.

The worker's main thread hands tasks in (`start`), stops them (`stop`), and takes what came of
them (`take_finished`); it never waits for a task. No task touches the database.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Awaitable, Callable

from config import Settings
from execution.errors import Failure, Outage, Permanent
from execution.ollama import OllamaClient
from execution.prompt import run_prompt
from execution.text import error_text
from queries.leases import ClaimedTask, Lease, Outcome

logger = logging.getLogger(__name__)

Finished = tuple[Lease, Outcome]


class Runner:
    """Runs tasks until they end, are stopped, or meet their deadline.

    `on_finished` is called from the loop's thread each time there is something to take.
    """

    def __init__(self, settings: Settings, on_finished: Callable[[], None]) -> None:
        self._settings = settings
        self._on_finished = on_finished
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._running: dict[Lease, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="runner", daemon=True)
        self._ollama = OllamaClient(settings.ollama, settings.limits.max_result_bytes)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the loop; what still runs is cancelled and reports nothing more."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def start(self, task: ClaimedTask, route: str) -> None:
        """Begin `task`; its outcome will be among the finished."""
        self._loop.call_soon_threadsafe(self._begin, task, route)

    def stop(self, lease: Lease) -> None:
        """Cancel the work of this lease, if it still runs; it ends with verdict released."""
        self._loop.call_soon_threadsafe(self._cancel, lease)

    def take_finished(self) -> list[Finished]:
        """What has ended since the last call."""
        taken: list[Finished] = []
        while not self._finished.empty():
            taken.append(self._finished.get_nowait())
        return taken

    def _begin(self, task: ClaimedTask, route: str) -> None:
        self._running[task.lease] = self._loop.create_task(self._run(task, route))

    def _cancel(self, lease: Lease) -> None:
        if (running := self._running.get(lease)) is not None:
            # After its first step: a coroutine cancelled before that never runs, nor reports.
            self._loop.call_soon(running.cancel)

    async def _run(self, task: ClaimedTask, route: str) -> None:
        seconds = task.timeout_seconds or self._settings.worker.task_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                outcome = await self._carry_out(task, route)
        except TimeoutError:
            outcome = Outcome("deadline", error=f"it ran longer than {seconds:g} s", route=route)
        except asyncio.CancelledError:
            outcome = Outcome("released")
        self._running.pop(task.lease, None)
        self._finished.put((task.lease, outcome))
        self._on_finished()

    async def _carry_out(self, task: ClaimedTask, route: str) -> Outcome:
        """The handler's outcome; whatever it raises becomes one too."""
        max_bytes = self._settings.limits.max_error_bytes
        try:
            return await self._handler(task, route)
        except Outage as ended:
            delay = ended.retry_after_seconds or self._settings.worker.reap_seconds
            text = error_text(ended, max_bytes)
            return Outcome("outage", error=text, route=route, delay_seconds=delay)
        except Permanent as ended:
            return Outcome("permanent", error=error_text(ended, max_bytes), route=route)
        except Failure as ended:
            return Outcome("failure", error=error_text(ended, max_bytes), route=route)
        except Exception as failed:  # a handler's fault is a failure of its task, not of the worker
            logger.exception("The handler of task %s failed", task.task_id)
            text = error_text(f"{type(failed).__name__}: {failed}", max_bytes)
            return Outcome("failure", error=text, route=route)

    def _handler(self, task: ClaimedTask, route: str) -> Awaitable[Outcome]:
        if task.kind == "prompt":
            return run_prompt(task, route, self._ollama, self._settings)
        raise Permanent(f"this worker does not know tasks of kind {task.kind!r}; update it")

    async def _close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._ollama.close()

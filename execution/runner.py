"""Carries out claimed tasks on one event loop in a thread of its own.

The worker's main thread hands tasks in (`start`) and stops them (`stop`), its settler takes what
came of them (`take_finished`) and hands in as well; neither ever waits for a task. Where a task is
handed in, a tool that returns at once is called, and the thread of any other function begun, which
says itself when it has succeeded: a turn of the loop would take longer. The loop sees to deadlines,
stops and errors; for threads that were begun it looks a moment later, when most have ended. Only
agent jobs touch the database, from their own threads and over connections of their own; no other
task does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from config import Settings
from errors import words_of
from execution.backends import backend_of
from execution.callback import run_callback
from execution.errors import CallEnded, Failure, Outage, Permanent
from execution.jobs import JobCalls, OnNode
from execution.prompt import run_prompt
from execution.refusals import MOST_REFUSALS, Refusals
from execution.routes import ROUTES, Routes
from execution.text import error_text
from execution.tool import ToolCalls
from execution.tools.threads import Thread
from logs import say
from queries.leases import ClaimedTask, Lease, Outcome, Verdict

logger = logging.getLogger(__name__)

Finished = tuple[Lease, Outcome]
OnPiece = Callable[[ClaimedTask, str | None, str], None]  # a node of a job, a piece of an answer

LONGEST_CLOSE_SECONDS = 10.0
# A server that goes away so often under the same prompt may be brought down by it.
MOST_HANG_UPS = 5
LOOK_SECONDS = 0.05  # after which the loop looks for threads that were begun and still run


class End:
    """The end of one task, told once: by the thread of its tool or by the loop, who is first."""

    def __init__(self, tell: Callable[[Outcome], None]) -> None:
        self.began = time.monotonic()  # by the clock of the loop
        self._tell = tell
        self._told = threading.Lock()  # taken by the first, and never given back

    @property
    def is_told(self) -> bool:
        return self._told.locked()

    def __call__(self, outcome: Outcome) -> None:
        if self._told.acquire(blocking=False):
            self._tell(outcome)


class Runner:
    """Runs tasks until they end, are stopped, or meet their deadline.

    Tells `routes` what it learns of the servers behind them, and probes those that are away.
    `on_piece` is told each piece of an answer, with the node of a job that asked for it, `on_node`
    what starts and finishes in a job, `on_route` that a route has opened or paused; `on_finished`
    is called each time there is something to take.
    """

    def __init__(
        self,
        settings: Settings,
        routes: Routes,
        on_finished: Callable[[], None],
        on_piece: OnPiece,
        on_route: Callable[[], None] = lambda: None,
        on_node: OnNode = lambda task, node, phase: None,
    ) -> None:
        self._settings = settings
        self._routes = routes
        self._on_finished = on_finished
        self._on_piece = on_piece
        self._on_route = on_route
        self._finished: deque[Finished] = deque()
        self._to_begin: deque[tuple[ClaimedTask, str | None, Thread[Any] | None, End]] = deque()
        self._is_waking = False
        self._is_looking = False
        self._running: dict[Lease, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._go_round, name="runner", daemon=True)
        self._backends = {name: backend_of(settings, name) for name in ROUTES}
        self._tools = ToolCalls(settings)
        self._jobs = JobCalls(settings, on_piece, on_node)
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._hang_ups: Counter[int] = Counter()  # by task
        self._refusals = Refusals()

    def open(self) -> None:
        """Begin: first of all, every route is probed."""
        self._thread.start()
        for name in ROUTES:
            self._loop.call_soon_threadsafe(self._begin_probing, name, 0.0)

    def close(self) -> None:
        """End the loop; what still runs is cancelled and reports nothing more.

        A loop that does not answer is left behind: the process can end without it.
        """
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        try:
            closing.result(LONGEST_CLOSE_SECONDS)
            self._thread.join(LONGEST_CLOSE_SECONDS)
        except Exception as failed:
            logger.exception("The runner cannot be closed in order: %s", type(failed).__name__)

    def start(self, task: ClaimedTask, route: str | None) -> None:
        """Begin `task`; its outcome will be among the finished, at once if it takes no time."""
        end = End(partial(self.end, task.lease))
        begun = self._tools.begin(task, end, self._wake) if task.kind == "tool" else None
        if isinstance(begun, Outcome):
            end(begun)
            return
        self._to_begin.append((task, route, begun, end))
        if begun is None:
            self._wake()
        elif not self._is_looking:
            self._is_looking = True
            self._tell(self._loop.call_later, LOOK_SECONDS, self._look)

    def end(self, lease: Lease, outcome: Outcome) -> None:
        """Count a task among the finished."""
        self._finished.append((lease, outcome))
        self._on_finished()

    def stop(self, leases: Sequence[Lease]) -> None:
        """Cancel the work of these leases that still runs; it ends with verdict released."""
        if leases:  # of many that are stopped together, the loop wakes once
            self._tell(self._cancel, leases)

    def drain(self) -> None:
        """Let agent jobs end at their next node boundary, with verdict released."""
        self._tell(self._jobs.drain)

    def leaves_behind(self) -> bool:
        """Whether something still runs that does not listen, and would keep the process."""
        return self._jobs.leaves_behind()

    def take_finished(self) -> list[Finished]:
        """What has ended since the last call; one thread may ask."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _go_round(self) -> None:
        """Run the loop until it is stopped, whatever else tries to end it."""
        while True:
            try:
                self._loop.run_forever()
                break
            except BaseException:  # a SystemExit, say, goes through asyncio to here
                logger.exception("Something tried to end the runner")
        self._loop.close()

    def _tell(self, what: Callable[..., object], *about: object) -> None:
        """Have the loop do that; one that is closed has nothing left that it could be done to."""
        try:
            self._loop.call_soon_threadsafe(what, *about)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _wake(self) -> None:
        if not self._is_waking:  # of many that are started together, the first wakes the loop
            self._is_waking = True
            self._tell(self._begin_all)

    def _look(self) -> None:
        self._is_looking = False
        self._begin_all()

    def _begin_all(self) -> None:
        self._is_waking = False
        while self._to_begin:
            task, route, begun, end = self._to_begin.popleft()
            if not end.is_told:
                running = self._loop.create_task(self._run(task, route, begun, end))
                self._running[task.lease] = running

    def _cancel(self, leases: Sequence[Lease]) -> None:
        self._begin_all()
        for lease in leases:
            if (running := self._running.get(lease)) is not None:
                # After its first step: a coroutine cancelled before that never runs, nor reports.
                self._loop.call_soon(running.cancel)

    async def _run(
        self, task: ClaimedTask, route: str | None, begun: Thread[Any] | None, end: End
    ) -> None:
        seconds = task.timeout_seconds or self._settings.worker.task_timeout_seconds
        try:
            async with asyncio.timeout_at(end.began + seconds):
                outcome = await self._carry_out(task, route, begun)
        except TimeoutError:
            outcome = Outcome("deadline", error=f"it ran longer than {seconds:g} s", route=route)
        except asyncio.CancelledError:
            outcome = Outcome("released")
        if task.kind == "callback":
            own = self._settings.callbacks
            outcome = replace(
                outcome, max_retry=own.max_retry, max_delay_seconds=own.max_delay_seconds
            )
        self._running.pop(task.lease, None)
        end(outcome)

    async def _carry_out(
        self, task: ClaimedTask, route: str | None, begun: Thread[Any] | None
    ) -> Outcome:
        """The handler's outcome; whatever it raises becomes one too."""
        max_bytes = self._settings.limits.max_error_bytes
        began = self._refusals.begin()
        try:
            outcome = await self._handler(task, route, begun)
        except Outage as ended:
            if self._is_refused_for_its_own_sake(task, route, ended):
                times = f"more than {MOST_REFUSALS} times, while it answers other prompts"
                text = error_text(f"{ended}: refused {times}", max_bytes)
                return Outcome("failure", error=text, route=route)
            self._pause(route, ended)
            if self._brings_down_its_server(task, ended):
                times = f"{MOST_HANG_UPS} times under this prompt"
                return Outcome("failure", error=error_text(f"{ended}, {times}", max_bytes))
            return self._outcome_of("outage", ended, route)
        except Permanent as ended:
            outcome = self._outcome_of("permanent", ended, route)
        except Failure as ended:
            outcome = self._outcome_of("failure", ended, route)
        except Exception as failed:  # a handler's fault is a failure of its task, not of the worker
            logger.exception("The handler of task %s failed", task.task_id)
            text = error_text(f"{type(failed).__name__}: {words_of(failed)}", max_bytes)
            outcome = Outcome("failure", error=text, route=route)
        if route is not None:
            self._routes.worked(route)
            self._refusals.answered(route, task.task_id, began)
        return outcome

    def _outcome_of(self, verdict: Verdict, ended: CallEnded, route: str | None) -> Outcome:
        """A call that brought nothing; what it used was paid all the same."""
        prompt_tokens, completion_tokens = ended.prompt_tokens, ended.completion_tokens
        cost = None
        if route is not None and prompt_tokens + completion_tokens:
            cost = self._settings.cost.of_call(route, prompt_tokens, completion_tokens)
        return Outcome(
            verdict,
            error=error_text(ended, self._settings.limits.max_error_bytes),
            route=route,
            model=ended.model,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=cost,
        )

    def _brings_down_its_server(self, task: ClaimedTask, ended: Outage) -> bool:
        """Whether the server has hung up on this task so often, here, that it is to blame."""
        if not ended.hung_up:
            return False
        self._hang_ups[task.task_id] += 1
        if self._hang_ups[task.task_id] < MOST_HANG_UPS:
            return False
        del self._hang_ups[task.task_id]
        return True

    def _is_refused_for_its_own_sake(
        self, task: ClaimedTask, route: str | None, ended: Outage
    ) -> bool:
        """Whether a route that serves others has refused this task so often, here."""
        if route is None or not ended.refused:
            return False
        return self._refusals.is_to_blame(route, task.task_id, by_overload=not ended.alarm)

    def _handler(
        self, task: ClaimedTask, route: str | None, begun: Thread[Any] | None
    ) -> Awaitable[Outcome]:
        if task.kind == "prompt" and route is not None:
            tell = partial(self._on_piece, task, None)
            return run_prompt(task, route, self._backends[route], self._settings, tell)
        if task.kind == "tool":
            return self._tools.run(task, begun)
        if task.kind == "agent" and route is not None:
            return self._jobs.run(task, route, self._backends[route])
        if task.kind == "callback":
            return run_callback(task, self._settings)
        raise Permanent(f"this worker does not know tasks of kind {task.kind!r}; update it")

    # --- routes whose server is away -----------------------------------------------------------

    def _pause(self, route: str | None, ended: Outage) -> None:
        """Close the route of a call that found its server away, and begin to probe it."""
        if route is None or route in self._probes:
            return
        wait_seconds = self._routes.pause(route, str(ended), ended.retry_after_seconds)
        _log_paused(route, ended, wait_seconds)
        self._on_route()
        self._begin_probing(route, wait_seconds)

    def _begin_probing(self, route: str, wait_seconds: float) -> None:
        self._probes[route] = self._loop.create_task(self._probe(route, wait_seconds))

    async def _probe(self, route: str, wait_seconds: float) -> None:
        """Ask the server after each wait whether it is there again, then open the route."""
        while True:
            await asyncio.sleep(wait_seconds)
            try:
                await self._backends[route].probe()
                break
            except Outage as ended:
                away = ended
            except Exception as failed:  # a library's, say: the route must not be forgotten
                away = Outage(f"{type(failed).__name__}: {failed}", alarm=True)
            self._refusals.away(route)
            wait_seconds = self._routes.pause(route, str(away), away.retry_after_seconds)
            _log_paused(route, away, wait_seconds)
            self._on_route()
        del self._probes[route]
        self._routes.open(route)
        say(logger, logging.INFO, f"Route {route} is open.", "route_open", route=route)
        self._on_route()

    async def _close(self) -> None:
        self._begin_all()
        await asyncio.sleep(0)  # what was begun last has its first step, and so hears of its end
        running = [*self._running.values(), *self._probes.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._tools.close()
        await self._jobs.close()
        for backend in self._backends.values():
            await backend.close()


def _log_paused(route: str, ended: Outage, wait_seconds: float) -> None:
    say(
        logger,
        logging.ERROR if ended.alarm else logging.WARNING,
        f"Route {route} is paused.",
        "route_paused",
        route=route,
        probe_in_seconds=wait_seconds,
        error=str(ended),
    )

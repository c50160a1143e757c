"""Agent jobs as the runner sees them: each in a thread of its own, on connections that they share.

The first of them imports what they need (LangGraph, psycopg 3) and opens the connections, in its
thread: a worker that is given none does without both.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from config import Settings
from execution.agent.signals import Signals
from execution.backends.interface import Backend
from execution.errors import not_installed
from execution.tools.threads import Thread, in_thread
from queries.leases import ClaimedTask, Outcome

if TYPE_CHECKING:
    from execution.agent.job import Shared

OnText = Callable[[ClaimedTask, str, str], None]  # a node's name, a piece of what its model says
OnNode = Callable[[ClaimedTask, str, str], None]  # a node's name, "started" or "finished"

# A stopped job that listens has ended long before.
LONGEST_LISTENING_SECONDS = 2.0


class JobCalls:
    """Runs agent jobs from the runner's loop, whose thread does nothing of theirs but model calls.

    `on_text` is told what the models of their nodes say, piece by piece, `on_node` which node of
    theirs has started or finished; both from any thread.
    """

    def __init__(self, settings: Settings, on_text: OnText, on_node: OnNode) -> None:
        self._settings = settings
        self._on_text = on_text
        self._on_node = on_node
        self._opening = threading.Lock()
        self._shared: Shared | None = None
        self._running: set[Signals] = set()
        self._is_draining = False
        self._threads: set[threading.Thread] = set()

    async def run(self, task: ClaimedTask, route: str, backend: Backend) -> Outcome:
        """Carry on with a job; raises the errors of execution/errors.py.

        When this is cancelled it ends at once: the job is told, its model calls are cancelled, and
        nobody waits until its node listens.
        """
        signals = Signals()
        if self._is_draining:
            signals.drain()
        self._running.add(signals)
        loop = asyncio.get_running_loop()
        run = partial(self._run, task, route, backend, loop, signals)
        try:
            title = f"agent job {task.task_id}"
            return await Thread(title, run, on_cancel=signals.stop, is_last=True).result()
        finally:
            self._running.discard(signals)

    def drain(self) -> None:
        """Let each job end before its next node, to be handed to another worker."""
        self._is_draining = True
        for signals in self._running:
            signals.drain()

    async def close(self) -> None:
        """Close the connections, once the jobs that listen have ended."""
        await in_thread("end of the agent jobs", self._close)

    def leaves_behind(self) -> bool:
        """Whether a job's thread still runs, which listens to nothing."""
        return bool(self._threads)

    def _run(
        self,
        task: ClaimedTask,
        route: str,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        signals: Signals,
    ) -> Outcome:
        this = threading.current_thread()
        self._threads.add(this)
        try:
            shared = self._open()
            from execution.agent.job import Job
            from execution.agent.model import Calls

            on_text, on_node = partial(self._on_text, task), partial(self._on_node, task)
            calls = Calls(
                task,
                route,
                backend,
                self._settings,
                shared.ledger,
                loop,
                signals,
                on_text,
                shared.frames,
            )
            return Job(task, route, shared, calls, signals, on_node).run()
        finally:
            self._threads.discard(this)

    def _open(self) -> Shared:
        with self._opening:
            if self._shared is None:
                try:
                    from execution.agent.job import Shared
                except ImportError as missing:
                    package = missing.name or "langgraph"
                    raise not_installed("an agent job", package, missing) from missing
                self._shared = Shared(self._settings)
            return self._shared

    def _close(self) -> None:
        give_up = time.monotonic() + LONGEST_LISTENING_SECONDS
        for thread in list(self._threads):
            thread.join(max(0.0, give_up - time.monotonic()))
        with self._opening:
            if self._shared is not None:
                self._shared.close()

"""One worker for many tests: each of them has prompts of its own, so they do not meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.fake_ollama import Behaviour, FakeOllama
from tests.support.processes import Processes, Worker
from tests.support.queue import Queue, Row


class Bench:
    """A queue, a scripted model server, and a worker that is replaced when a test has broken it."""

    def __init__(self, queue: Queue, fake: FakeOllama, folder: Path) -> None:
        self.queue, self.fake = queue, fake
        self.processes = Processes(queue.url, fake.url, folder)
        self.worker: Worker | None = None
        self._arguments: tuple[str, ...] = ()

    def start(self, *arguments: str, **sections: dict[str, Any]) -> None:
        self._arguments = arguments
        self.processes.configure(**sections)
        self.worker = self.processes.worker(*arguments)

    def check_worker(self) -> None:
        """The worker has outlived the test."""
        if self.worker is not None and not self.worker.is_running():
            log = self.worker.log
            self.worker = self.processes.worker(*self._arguments)
            raise AssertionError(f"the worker has died:\n{log[-3000:]}")

    def play(self, prompt: str, *behaviours: Behaviour, **fields: Any) -> Row:
        """Submit a task to which the model server answers so; the row once it is final."""
        if behaviours:
            self.fake.on(prompt, list(behaviours))
        (task_id,) = self.queue.submit(prompt, **fields)
        row = self.queue.await_final(task_id)
        self.queue.check([task_id])
        return row

    def calls(self, prompt: str) -> int:
        return len(self.fake.calls_for(prompt))

"""A suspect's last try, in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable

from config import ROOT, WorkerSettings
from logs import say

logger = logging.getLogger(__name__)

# After its grace period, so long it may take to hand its task back and end.
UNWILLING_SECONDS = 10.0


class SuspectProcess:
    """A second worker process that runs suspects, one at a time, while there are any.

    A suspect is a task whose workers were lost so often that one more loss makes it a dead
    letter. Whatever it does to its process, no other task is in there.
    """

    def __init__(self, name: str, settings: WorkerSettings) -> None:
        self._name = f"{name}-alone"
        self._pause_seconds = settings.lease_seconds / 3
        self._longest_end_seconds = settings.grace_seconds + UNWILLING_SECONDS
        self._next_start = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._passed_on = 0

    def start(self) -> None:
        """Start it, unless it runs already or was started a moment ago."""
        if (self._child and self._child.poll() is None) or time.monotonic() < self._next_start:
            return
        self._next_start = time.monotonic() + self._pause_seconds
        say(logger, logging.INFO, "A suspect gets its last try alone.", "alone", worker=self._name)
        command = [sys.executable, str(ROOT / "scheduler.py"), "--alone", "--concurrency", "1"]
        self._child = subprocess.Popen(
            [*command, "--name", self._name],
            start_new_session=True,  # a Ctrl-C reaches it through us, once
        )

    def pass_on(self, stop_signals: int) -> None:
        """Ask it to stop as often as this worker was asked."""
        while self._child is not None and self._passed_on < stop_signals:
            self._passed_on += 1
            self._child.terminate()

    def end(self, stop_signals: Callable[[], int]) -> None:
        """Ask it to stop, and wait until it has; what does not stop in time is killed."""
        if self._child is None:
            return
        deadline = time.monotonic() + self._longest_end_seconds
        while self._child.poll() is None:
            self.pass_on(max(stop_signals(), 1))
            if time.monotonic() >= deadline:
                self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=0.1)

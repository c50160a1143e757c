"""A suspect's last try, in a process of its own."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

from config import ROOT
from logs import say

logger = logging.getLogger(__name__)


class SuspectProcess:
    """A second worker process that runs suspects, one at a time, while there are any.

    A suspect is a task whose workers were lost so often that one more loss makes it a dead
    letter. Whatever it does to its process, no other task is in there.
    """

    def __init__(self, name: str, pause_seconds: float) -> None:
        self._name = f"{name}-alone"
        self._pause_seconds = pause_seconds
        self._next_start = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._is_asked = False

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

    def terminate(self) -> None:
        """Ask it to stop, as this worker was asked."""
        if self._child is not None and not self._is_asked:
            self._is_asked = True
            self._child.terminate()

    def end(self) -> None:
        """Ask it to stop, and wait until it has."""
        self.terminate()
        if self._child is not None:
            self._child.wait()

"""The processes that run.sh starts: ended by their own ids, restarted when they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from local.output import fresh_log, say, tail

ROOT = Path(__file__).resolve().parent.parent
FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # who ran for so long starts again without delay
POLL_SECONDS = 0.1


class Child:
    """One Python program in a session of its own, so that a terminal's Ctrl-C misses it.

    Its output goes to the terminal behind its name, or to a file if one is given.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str],
        grace_seconds: float,
        log_file: Path | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self.grace_seconds = grace_seconds
        self.log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._started_at = 0.0
        self._delay_seconds = FIRST_DELAY_SECONDS
        self._restart_at: float | None = None

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start it, from the main thread only: its life is tied to the thread that starts it."""
        if self.log_file is None:
            self._launch(subprocess.PIPE)
            self._reader = threading.Thread(target=self._pass_output_on, daemon=True)
            self._reader.start()
        else:
            with fresh_log(self.log_file) as log:
                self._launch(log)
        self._started_at = time.monotonic()
        self._restart_at = None

    def tend(self) -> None:
        """Start it again if it died, after a delay that grows while it keeps dying."""
        if self.exit_code is None:
            return
        now = time.monotonic()
        if self._restart_at is None:
            delay = self._next_delay(ran_seconds=now - self._started_at)
            say(f"The {self.name} ended ({self.describe_end()}). Starting it again in {delay:g} s.")
            self._restart_at = now + delay
        elif now >= self._restart_at:
            self.start()

    def stop(self, hurries: Callable[[], int]) -> None:
        """Ask it to end, ask again whenever `hurries` has risen, and kill it after its grace."""
        process = self._process
        if process is None:
            return
        deadline = time.monotonic() + self.grace_seconds
        asked = hurries()
        process.terminate()
        while process.poll() is None:
            if hurries() > asked:
                asked = hurries()
                process.terminate()
            if time.monotonic() > deadline:
                say(f"The {self.name} did not end within {self.grace_seconds:g} s: killing it.")
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(POLL_SECONDS)
        if self._reader is not None:
            self._reader.join(timeout=1)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def describe_end(self) -> str:
        """Its exit code or its signal, in words."""
        code = self.exit_code
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def log_tail(self) -> str:
        """The end of its log, if that is a file; else it was on the terminal already."""
        if self.log_file is None:
            return ""
        return f"\n{self.log_file} ends with:\n{tail(self.log_file.read_text(errors='replace'))}"

    def _launch(self, output: int | IO[bytes]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "local.tied", str(os.getpid()), *self.arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _pass_output_on(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        with process.stdout as output:
            for line in output:
                say(f"{self.name:6} | {line.decode(errors='replace').rstrip()}")

    def _next_delay(self, ran_seconds: float) -> float:
        if ran_seconds > HEALTHY_SECONDS:
            self._delay_seconds = FIRST_DELAY_SECONDS
        delay = self._delay_seconds
        self._delay_seconds = min(2 * delay, LONGEST_DELAY_SECONDS)
        return delay

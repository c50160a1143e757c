"""Where workers of peers wait for the start, and leave the instant of their first job."""

from __future__ import annotations

import os
import time
from pathlib import Path

GATE = Path(os.environ.get("BENCH_GATE", "."))


def wait() -> None:
    """Say that this worker is loaded, and return when all are to start."""
    (GATE / f"ready.{os.getpid()}").touch()
    while not (GATE / "go").exists():
        time.sleep(0.002)


def ended() -> None:
    """Leave the instant at which this worker found nothing left, if it can tell."""
    (GATE / f"last.{os.getpid()}").write_text(str(time.monotonic_ns()))


class FirstJob:
    """`begin` is called by every job; only the first of a process costs anything."""

    def __init__(self) -> None:
        self._is_past = False

    def begin(self) -> None:
        if not self._is_past:
            self._is_past = True
            (GATE / f"first.{os.getpid()}").write_text(str(time.monotonic_ns()))

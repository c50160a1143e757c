"""Where workers of peers wait for the start, and leave the instants of their jobs.

A submitter leaves there when each of its submissions had returned.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

GATE = Path(os.environ.get("BENCH_GATE", "."))
PAUSES = "pauses.json"  # of a submitter, in seconds, one before each submission


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

    def begin(self, _number: int = 0) -> None:
        if not self._is_past:
            self._is_past = True
            (GATE / f"first.{os.getpid()}").write_text(str(time.monotonic_ns()))


class Instants:
    """Lines of a job's number and an instant: of its start, or of its submission."""

    def __init__(self, which: str) -> None:
        self._file = (GATE / f"{which}.{os.getpid()}").open("a", buffering=1)

    def note(self, number: int) -> None:
        now = time.monotonic_ns()
        self._file.write(f"{number} {now}\n")


def at_begin() -> Callable[[int], None]:
    """What a job calls first, with its number."""
    return Instants("start").note if os.environ.get("BENCH_EACH") else FirstJob().begin


def paused_numbers() -> Iterator[int]:
    """The number of each job that is to be submitted, when it is time for it."""
    for number, pause in enumerate(json.loads((GATE / PAUSES).read_text())):
        time.sleep(pause)
        yield number

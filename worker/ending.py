"""The end of a process: the signals that ask for it, and what would keep it from coming."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper:
    """Counts stop signals for the worker, also those that come before there is one."""

    def __init__(self) -> None:
        self._stop: Callable[[int], None] | None = None
        self._signals = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def stops(self, stop: Callable[[int], None]) -> None:
        """From now on call `stop` with the number of signals that have come."""
        self._stop = stop
        if self._signals:
            stop(self._signals)

    def end(self) -> None:
        """The worker has ended: no signal changes the exit code of its process any more.

        While Python ends, it gives each signal its default back, which kills, but leaves those
        alone that are ignored.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._stop is not None:
            self._stop(self._signals)


def end_now(exit_code: int) -> NoReturn:
    """End without waiting for any thread; what was logged is written first."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)

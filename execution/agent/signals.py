"""What a job is told from outside its thread: to end at its next node boundary, or at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any


class Signals:
    """Of one attempt of one job; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._is_draining = False
        self._request_drain: Callable[[], None] | None = None
        self._calls: set[Future[Any]] = set()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def stop(self) -> None:
        """End at once: the model calls under way are cancelled, and no other is made."""
        self._stopped.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def drain(self) -> None:
        """End before the next node."""
        with self._lock:
            self._is_draining = True
            request = self._request_drain
        if request is not None:
            request()

    def on_drain(self, request: Callable[[], None]) -> None:
        """Call this when the job is to drain; at once, if it is already."""
        with self._lock:
            self._request_drain = request
            is_draining = self._is_draining
        if is_draining:
            request()

    @contextmanager
    def calling(self, call: Future[Any]) -> Iterator[None]:
        """While the block waits for this call, `stop` cancels it."""
        with self._lock:
            self._calls.add(call)
        if self.is_stopped:
            call.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def pause(self, seconds: float) -> None:
        """Sleep so long, or until the job is stopped."""
        self._stopped.wait(seconds)

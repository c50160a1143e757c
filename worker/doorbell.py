"""What the main thread sleeps on: any thread, and a signal handler, can ring."""

from __future__ import annotations

import contextlib
import select
import socket


class Doorbell:
    """A ring is kept until somebody waits for it."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of rings already
            self._in.send(b"r")

    def wait(self, seconds: float, also: int | None) -> None:
        """Until a ring, something to read on the descriptor `also`, or the end of the time."""
        poller = select.poll()
        poller.register(self._out.fileno(), select.POLLIN)
        if also is not None:
            poller.register(also, select.POLLIN)
        ready = dict(poller.poll(seconds * 1000))
        if self._out.fileno() in ready:  # else nothing is to be taken
            with contextlib.suppress(BlockingIOError):
                while self._out.recv(4096):
                    pass

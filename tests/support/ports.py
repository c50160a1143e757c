"""Ports for tests that run beside each other: no two processes of tests are given the same one."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from functools import cache

# Below the ports from which systems choose for port 0 and for connections that go out: nothing
# takes one of these by chance between free_port() and whoever is to listen there.
RANGE = range(20_000, 32_000)
BLOCK = 200


class NoPortIsFree(Exception):
    """Every block of ports is another process's, or all ports of ours are in use."""


@cache
def _keeper() -> socket.socket:
    """Holds the first port of a block, which makes the block ours for as long as we live."""
    for first in RANGE[::BLOCK]:
        keeper = socket.socket()
        with contextlib.suppress(OSError):
            keeper.bind(("127.0.0.1", first))
            return keeper
        keeper.close()
    raise NoPortIsFree


@cache
def _ours() -> Iterator[int]:
    first = int(_keeper().getsockname()[1])
    return itertools.cycle(range(first + 1, first + BLOCK))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what is left of a connection that was closed is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port on which nobody listens, and which is not given again for a long time."""
    for port in itertools.islice(_ours(), BLOCK):
        if _is_free(port):
            return port
    raise NoPortIsFree

"""Which ports of this machine are taken."""

from __future__ import annotations

import socket

LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def is_listening(port: int) -> bool:
    """Something accepts connections on this port of localhost, over IPv4 or IPv6."""
    return any(_accepts(family, host, port) for family, host in LOOPBACKS)


def free_port() -> int:
    """A port that nobody listens on now; the caller must expect to lose a race for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _accepts(family: socket.AddressFamily, host: str, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            return probe.connect_ex((host, port)) == 0
    except OSError:  # this machine has no IPv6
        return False

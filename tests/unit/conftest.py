"""What the unit tests share: names that lead where a test wants them to."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What each name leads to: one list of addresses for each look-up, the last one for ever."""
    answers: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in answers:
            return real(host, port, *args, **more)
        rounds = answers[name]
        addresses = rounds.pop(0) if len(rounds) > 1 else rounds[0]
        return [
            (
                socket.AF_INET6 if ":" in one else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (one, port),
            )
            for one in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return answers

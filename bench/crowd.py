"""Many watchers of one stream of events who cost little: raw sockets, one loop, one process.

    python -m bench.crowd ADDRESS --watchers 1000 --ahead 1764460000.5

It writes two lines of JSON: one when every watcher has its snapshot, and one when every stream has
ended: how many of its events came to how many, and how long after their `at` each watcher had them.
`at` is the database's clock before the commit, so the commit is part of it; `--ahead` is what that
clock is ahead of CLOCK_MONOTONIC, in seconds. A watcher has an event when the read that brings its
last byte has returned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import resource
import select
import socket
import time
from array import array
from datetime import datetime
from urllib.parse import urlsplit

from bench.report import percentile
from local.output import say

LARGEST_READ = 1 << 20
LONGEST_SILENCE_SECONDS = 30.0
TRANSITION = re.compile(rb'data: \{"id": (\d+),')
INSTANT = re.compile(rb'"at": "([^"]+)"')
END_OF_EVENT = b"\n\n"
FRAME = re.compile(rb"\r\n[0-9a-f]+\r\n")  # between two pieces of an answer without a length


class Crowd:
    """All watchers; what each has read is parsed and forgotten."""

    def __init__(self, address: str, watchers: int, ahead: float) -> None:
        self._ahead = ahead
        self._poll = select.epoll()
        self._sockets = [self._connected(address) for _ in range(watchers)]
        self._numbers = {one.fileno(): number for number, one in enumerate(self._sockets)}
        self._rest = [b""] * watchers
        self._at: dict[bytes, float] = {}  # of each event that anybody has seen
        self.seen = [0] * watchers
        self.latencies = array("d")
        self.longest_round = 0.0
        self.have_snapshot: set[int] = set()
        self.ended: set[int] = set()

    def _connected(self, address: str) -> socket.socket:
        parts = urlsplit(address)
        connected = socket.create_connection((parts.hostname or "", parts.port or 80))
        connected.sendall(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        connected.setblocking(False)
        self._poll.register(connected, select.EPOLLIN)
        return connected

    def read_until(self, done: set[int]) -> None:
        """Read on until `done` has all watchers."""
        while len(done) < len(self._sockets):
            ready = self._poll.poll(LONGEST_SILENCE_SECONDS)
            if not ready:
                raise TimeoutError(f"silence; only {len(done)} of {len(self._sockets)} came so far")
            began = time.monotonic()
            for fileno, _ in ready:
                self._read(self._numbers[fileno])
            self.longest_round = max(self.longest_round, time.monotonic() - began)

    def _read(self, number: int) -> None:
        data = self._sockets[number].recv(LARGEST_READ)
        now = time.monotonic() + self._ahead
        if not data:
            raise ConnectionError(f"a stream broke off: {self._rest[number][-500:]!r}")
        data = FRAME.sub(b"", self._rest[number] + data)
        end = data.rfind(END_OF_EVENT) + len(END_OF_EVENT)
        if end < len(END_OF_EVENT):
            self._rest[number] = data
            return
        self._rest[number] = data[end:]
        for event in TRANSITION.finditer(data, 0, end):
            if (at := self._at.get(event[1])) is None:
                at = self._at[event[1]] = instant_of(data, event.end())
            self.latencies.append(now - at)
            self.seen[number] += 1
        if number not in self.have_snapshot and data.find(b"event: snapshot") >= 0:
            self.have_snapshot.add(number)
        if data.find(b"event: end\n", 0, end) >= 0:
            self.ended.add(number)
            self._poll.unregister(self._sockets[number])

    def found(self) -> dict[str, float]:
        milliseconds = [1000 * latency for latency in self.latencies]
        return {
            "events": len(self._at),
            "fewest": min(self.seen),
            "most": max(self.seen),
            "p50_ms": percentile(milliseconds, 50),
            "p99_ms": percentile(milliseconds, 99),
            "max_ms": max(milliseconds),
            "longest_round_ms": 1000 * self.longest_round,
            "cpu_seconds": time.process_time(),
        }


def instant_of(data: bytes, start: int) -> float:
    """Seconds since the epoch, of the event whose text goes on at `start`."""
    found = INSTANT.search(data, start)
    if found is None:
        raise ValueError("an event without an instant")
    return datetime.fromisoformat(found[1].decode()).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description="Watchers for a measure.")
    parser.add_argument("address")
    parser.add_argument("--watchers", type=int, required=True)
    parser.add_argument("--ahead", type=float, required=True)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began = time.monotonic()
    crowd = Crowd(given.address, given.watchers, given.ahead)
    crowd.read_until(crowd.have_snapshot)
    say(json.dumps({"opened_seconds": time.monotonic() - began}))
    crowd.longest_round = 0.0
    crowd.read_until(crowd.ended)
    say(json.dumps(crowd.found()))


if __name__ == "__main__":
    main()

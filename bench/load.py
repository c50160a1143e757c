"""A client that is cheap: POSTs over open connections, in a process of its own.

    python -m bench.load ADDRESS --body FILE --seconds 5 --connections 64 --keys TEXT

Each request has an Idempotency-Key of its own. It writes one line of JSON: how many were answered
as they should be, how many were not, the seconds, and the latencies in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvloop

from bench.report import percentile
from local.output import say

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
END_OF_HEAD = b"\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection, which asks again as soon as it is answered."""

    def __init__(self, requests: Iterator[bytes], deadline: float) -> None:
        self._requests, self._deadline = requests, deadline
        self._received = b""
        self._sent_at = 0.0
        self.latencies: list[float] = []
        self.refused = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        if time.perf_counter() >= self._deadline:
            self._transport.close()
            return
        request = next(self._requests)
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        end = received.find(END_OF_HEAD)
        if end < 0:
            return
        length = LENGTH.search(received, 0, end + 2)
        if length is None:
            raise ValueError("an answer without a length")
        if len(received) < end + len(END_OF_HEAD) + int(length[1]):
            return
        self.latencies.append(time.perf_counter() - self._sent_at)
        self.refused += not received.startswith(b"HTTP/1.1 201")
        self._received = b""
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def requests_to(address: str, body: bytes, keys: str) -> Iterator[bytes]:
    """The same request again and again, but for its key."""
    parts = urlsplit(address)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nIdempotency-Key: {keys}-"
    ).encode()
    for number in itertools.count():
        yield b"%b%d\r\n\r\n%b" % (head, number, body)


async def load(address: str, body: bytes, keys: str, seconds: float, connections: int) -> None:
    parts = urlsplit(address)
    loop = asyncio.get_running_loop()
    requests = requests_to(address, body, keys)
    began = time.perf_counter()
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(
            lambda: Client(requests, began + seconds), parts.hostname or "", parts.port or 80
        )
        clients.append(client)
    await asyncio.gather(*(client.ended for client in clients))
    took = time.perf_counter() - began
    latencies = [latency for client in clients for latency in client.latencies]
    refused = sum(client.refused for client in clients)
    found = {
        "answered": len(latencies) - refused,
        "refused": refused,
        "per_second": (len(latencies) - refused) / took,
        "p50_ms": 1000 * percentile(latencies, 50),
        "p99_ms": 1000 * percentile(latencies, 99),
    }
    say(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Load for a measure.")
    parser.add_argument("address")
    parser.add_argument("--body", type=Path, required=True)
    parser.add_argument("--keys", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--connections", type=int, required=True)
    given = parser.parse_args()
    body = given.body.read_bytes()
    uvloop.run(load(given.address, body, given.keys, given.seconds, given.connections))


if __name__ == "__main__":
    main()

"""Clients of live events: over server-sent events and over a WebSocket, one and many."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as connect_websocket

from tests.support.processes import Api

NO_TIME_TO_LINGER = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() send a reset
TCP_REPAIR = 19  # a socket that closes in this mode tells its peer nothing


@dataclass(frozen=True)
class Event:
    name: str
    data: dict[str, Any]
    cursor: str | None


class Watcher(threading.Thread):
    """Reads a stream of events until its end, or until so many transitions were read."""

    def __init__(self, api: Api, path: str, most: int | None = None, **headers: str) -> None:
        super().__init__(daemon=True)
        self.events: list[Event] = []
        self.status_code = 0  # of the answer, or of the handshake
        self.close_code: int | None = None  # of a WebSocket
        self.refusal: Any = None  # the body of an answer that is no stream
        self._api, self._path, self._most, self._headers = api, path, most, headers
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError, OSError):  # the API ends with its test
            for event in self._read():
                self.events.append(event)
                if self._most is not None and len(self.transitions()) >= self._most:
                    return

    def _read(self) -> Iterator[Event]:
        raise NotImplementedError

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def transitions(self) -> list[Event]:
        return [event for event in self.events if event.name == "transition"]

    def reasons(self) -> list[str]:
        return [event.data["reason"] for event in self.transitions()]

    def ids(self) -> list[int]:
        return [event.data["id"] for event in self.transitions()]

    def story(self) -> list[tuple[str | None, str]]:
        """Step (None: the run itself) and reason of each transition."""
        return [(event.data["step"], event.data["reason"]) for event in self.transitions()]

    def cursors(self) -> list[str]:
        return [str(event.cursor) for event in self.transitions()]

    def until_end(self, seconds: float = 30) -> list[Event]:
        self.join(seconds)
        assert not self.is_alive(), self.names()
        return self.events


class EventSource(Watcher):
    """Over server-sent events."""

    def _read(self) -> Iterator[Event]:
        url, fields = f"{self._api.url}{self._path}", dict[str, str]()
        with httpx.stream("GET", url, headers=self._headers, timeout=60) as answered:
            self.status_code = answered.status_code
            if answered.headers.get("content-type") == "application/json":
                self.refusal = json.loads(answered.read())
                return
            for line in answered.iter_lines():
                if line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif fields:
                    yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
                    fields = {}


class Socket(Watcher):
    """Over a WebSocket."""

    def _read(self) -> Iterator[Event]:
        url = f"ws{self._api.url.removeprefix('http')}{self._path}"
        try:
            with connect_websocket(
                url,
                additional_headers=self._headers,
                proxy=None,
                max_size=None,
                close_timeout=0.1,  # one that hangs up early leaves frames unread
            ) as opened:
                self.status_code = 101
                with contextlib.suppress(ConnectionClosed):
                    for frame in opened:
                        said = json.loads(frame)
                        yield Event(said["event"], said["data"], said["data"].get("cursor"))
                self.close_code = opened.close_code
        except InvalidStatus as refused:
            self.status_code = refused.response.status_code
            self.refusal = json.loads(refused.response.body)


# --- raw connections, which can be left in every bad manner ----------------------------------

HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
REQUEST = "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"


def open_raw(url: str, path: str, over: str = "sse", buffer_bytes: int | None = None) -> Any:
    """A stream just asked for; `over` "sse" or "ws"."""
    address = urlsplit(url)
    opened = socket.socket()
    if buffer_bytes is not None:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    opened.settimeout(30)
    opened.connect((address.hostname, address.port))
    opened.sendall((HANDSHAKE if over == "ws" else REQUEST).format(path=path).encode())
    return opened


def await_snapshot(opened: Any) -> bytes:
    """What has come until the snapshot has begun to come."""
    received = b""
    while b"snapshot" not in received:
        piece = opened.recv(65_536)
        assert piece, received
        received += piece
    return received


def reset(opened: Any) -> None:
    """Close with a reset."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_TIME_TO_LINGER)
    opened.close()


def vanish(opened: Any) -> None:
    """Be gone without a word, as a machine that was switched off; or, if that is not allowed, with
    a reset."""
    try:
        opened.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        reset(opened)
        return
    opened.close()


def masked(payload: bytes) -> bytes:
    """A text frame of a client, masked with zeros; up to 65,535 bytes."""
    length = len(payload)
    head = bytes([0x81, 0x80 | length]) if length < 126 else struct.pack("!BBH", 0x81, 0xFE, length)
    return head + bytes(4) + payload

"""A TCP proxy that can be told to misbehave as networks do.

    with TcpProxy(server_port) as proxy:
        proxy.stall()         # bytes wait, in both directions, and arrive after resume()
        proxy.swallow()       # half-open: bytes vanish, nobody is told; the connection is lost
        proxy.mute()          # what the client says arrives, the server's replies vanish
        proxy.stop_at(b"x")   # what the client says waits, from the first such bytes on
        proxy.cut()           # connections are reset
        proxy.resume()        # new connections, and those that were stalled, work again

Each but resume() takes `only`, a part of the application_name that a Postgres client gives when
it connects, and concerns all connections without it. All but cut() hold for new connections as
well, until resume().
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65_536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() send a reset


class TcpProxy:
    """Listens on `port` and passes everything on to 127.0.0.1:`target_port`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._state = threading.Condition()
        self._mode = "pass"
        self._only = ""
        self._mark = b""
        self._connections: set[_Connection] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        self._spawn(self._accept)

    def stall(self, only: str = "") -> None:
        self._set("stall", only)

    def swallow(self, only: str = "") -> None:
        self._set("swallow", only)

    def mute(self, only: str = "") -> None:
        self._set("mute", only)

    def stop_at(self, mark: bytes, only: str = "") -> None:
        self._mark = mark
        self._set("stop", only)

    def stopped(self) -> int:
        """How many connections wait at the mark."""
        with self._state:
            return sum(one.is_stopped for one in self._connections)

    def cut(self, only: str = "") -> int:
        """Reset the connections of now; how many they were."""
        with self._state:
            chosen = [one for one in self._connections if only in one.application]
        for connection in chosen:
            connection.close()
        return len(chosen)

    def resume(self) -> None:
        self._set("pass", "")

    def open_connections(self, only: str = "") -> int:
        with self._state:
            return sum(only in one.application for one in self._connections)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.resume()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _set(self, mode: str, only: str) -> None:
        with self._state:
            self._mode, self._only = mode, only
            self._state.notify_all()

    def _spawn(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port), 5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            connection = _Connection(client, server)
            with self._state:
                self._connections.add(connection)
            self._spawn(self._pump, connection, client, server)
            self._spawn(self._pump, connection, server, client)

    def _pump(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(CHUNK_BYTES):
                if source is connection.client and not connection.application:
                    connection.application = _application_name(data)
                is_reply = source is connection.server
                for part in [data] if is_reply else self._parts(data):
                    if self._may_pass(connection, is_reply, part):
                        sink.sendall(part)
        except OSError:
            pass
        if not connection.is_lost:
            connection.close()
            with self._state:
                self._connections.discard(connection)

    def _parts(self, data: bytes) -> list[bytes]:
        """What comes before the mark, and the rest."""
        with self._state:
            at = data.find(self._mark) if self._mode == "stop" else -1
        return [data[:at], data[at:]] if at > 0 else [data]

    def _may_pass(self, connection: _Connection, is_reply: bool, data: bytes) -> bool:
        """True when the bytes may go on, as soon as they may; False when they are to vanish."""

        def concerned() -> bool:
            return self._only in connection.application

        def stops() -> bool:
            at_mark = not is_reply and data.startswith(self._mark)
            return self._mode == "stop" and at_mark and concerned()

        with self._state:
            if concerned() and (self._mode == "swallow" or (self._mode == "mute" and is_reply)):
                connection.is_lost = True
            if self._mode == "mute" and not is_reply:
                return True
            connection.is_stopped = stops()
            self._state.wait_for(
                lambda: (
                    connection.is_lost or not concerned() or not (self._mode == "stall" or stops())
                )
            )
            connection.is_stopped = False
            return not connection.is_lost


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.application = ""
        self.is_stopped = False  # at the mark
        self.is_lost = False  # bytes of it have vanished: it will never make sense again

    def close(self) -> None:
        _reset(self.client)
        _reset(self.server)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
    connection.close()


def _application_name(data: bytes) -> str:
    """What a Postgres client calls itself in its first packet ("" for one that asks for TLS)."""
    found = re.search(rb"\0application_name\0([^\0]*)\0", data)
    return found[1].decode(errors="replace") if found else ""

"""A receiver of callbacks, and how it checks them by the rules of Standard Webhooks.

Nothing of the product is used here: https://github.com/standard-webhooks/standard-webhooks
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.processes import eventually

TOLERANCE_SECONDS = 300


@dataclass(frozen=True)
class Received:
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def json(self) -> Any:
        return json.loads(self.body)


def is_signed(received: Received, secret: str) -> bool:
    """Whether it was sent by who knows the secret, and not long ago."""
    if abs(time.time() - int(received.headers["webhook-timestamp"])) > TOLERANCE_SECONDS:
        return False
    prefix, _, encoded = secret.partition("_")
    assert prefix == "whsec"
    to_sign = b".".join(
        (received.id.encode(), received.headers["webhook-timestamp"].encode(), received.body)
    )
    wanted = hmac.new(base64.b64decode(encoded, validate=True), to_sign, hashlib.sha256).digest()
    given = [part.split(",", 1) for part in received.headers["webhook-signature"].split(" ")]
    return any(
        version == "v1" and hmac.compare_digest(base64.b64decode(signature), wanted)
        for version, signature in given
    )


@dataclass(frozen=True)
class Answer:
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | Callable[[], Iterable[bytes]] = b""


class Receiver(ThreadingHTTPServer):
    """Listens on loopback; answers by path as it is told to, the last answer for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = int(self.server_address[1])
        self.received: list[Received] = []
        self.hung_up = threading.Event()
        self._answers: dict[str, list[Answer]] = {}
        self._lock = threading.Lock()

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def answers(self, *answers: Answer | int, path: str = "/hook") -> None:
        self._answers[path] = [Answer(one) if isinstance(one, int) else one for one in answers]

    def take(self, received: Received) -> Answer:
        with self._lock:
            self.received.append(received)
            answers = self._answers.get(received.path.partition("?")[0], [Answer()])
            return answers.pop(0) if len(answers) > 1 else answers[0]

    def of_task(self, task_id: int) -> list[Received]:
        """What has come about one task, in order."""
        return [one for one in self.received if one.body and one.json()["id"] == task_id]

    def await_received(self, task_id: int, count: int = 1) -> list[Received]:
        def look() -> list[Received]:
            found = self.of_task(task_id)
            assert len(found) >= count, found
            return found

        return eventually(look, what=f"{count} callbacks about task {task_id}")


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(length)
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.take(Received(self.command, self.path, headers, body))
        try:
            self.send_response(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            self.end_headers()
            for piece in [answer.body] if isinstance(answer.body, bytes) else answer.body():
                self.wfile.write(piece)
        except OSError:  # the sender has had enough
            self.server.hung_up.set()

    do_GET = do_POST = do_HEAD = do_PUT = _answer


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield receiver
        receiver.shutdown()

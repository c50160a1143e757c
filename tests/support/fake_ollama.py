"""A scripted Ollama: the server a test tells how to answer, and how to fail.

    with FakeOllama() as fake:
        fake.on("flaky", [status(500), answer("ok")])   # in order, then the last one for ever
        ...                                             # a worker uses fake.url
        assert [call.outcome for call in fake.calls_for("flaky")] == ["finished", "finished"]

A behaviour is a function of one `Reply`; a call that no rule matches is echoed. Below /v1/ it
speaks OpenAI's API, in the words of fake_openai.py; the behaviours are the same. The server
asserts nothing, prints nothing, and leaves no thread and no socket behind. As a program,
`python -m tests.support.fake_ollama --port N`, it echoes every prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, cast

from tests.support import fake_openai
from tests.support.ports import free_port

MODELS = ("llama3.2:latest", "qwen3:14b")
POLL_SECONDS = 0.02  # how often a call that waits looks whether its client is still there


class HungUp(Exception):
    """The client went away, or the fake went down, before the answer was complete."""


@dataclass(eq=False)
class Call:
    """One request as it was seen; `outcome` changes once, from "open", when it has ended."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: Any  # the parsed JSON, or the bytes when they are none
    started: float = field(default_factory=time.monotonic)
    number: int = 1  # 1 for the first call with this very text
    outcome: str = "open"  # then "finished" or "hung up"
    ended: float | None = None

    @property
    def prompt(self) -> str:
        """The prompt of /api/generate, the last user message of the other calls."""
        if not isinstance(self.body, dict):
            return ""
        users = [m for m in self.body.get("messages", []) if m.get("role") == "user"]
        return str(users[-1]["content"] if users else self.body.get("prompt", ""))

    @property
    def is_openai(self) -> bool:
        return self.path.startswith("/v1/")

    @property
    def text(self) -> str:
        """Everything a rule can match: system and all messages, or the path of a GET."""
        if not isinstance(self.body, dict):
            return self.path
        contents = [m.get("content") for m in self.body.get("messages", [])]
        return "\n".join(
            filter(None, [self.body.get("system"), *contents, self.body.get("prompt")])
        )


class Reply:
    """What a behaviour answers with; every method raises HungUp once the client is gone."""

    def __init__(self, fake: FakeOllama, call: Call, handler: _Handler) -> None:
        self.fake, self.call = fake, call
        self._handler, self._begun = handler, False
        self._said, self._thought = "", ""  # of an answer that is not streamed
        self.streams = isinstance(call.body, dict) and call.body.get("stream", True) is not False

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Answer with one body; `headers` may claim another Content-Length than is true."""
        self._handler.send_response(status)
        defaults = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in (defaults | (headers or {})).items():
            self._handler.send_header(name, value)
        self._handler.end_headers()
        self._write(body)

    def raw(self, data: bytes) -> None:
        """Send bytes as one chunk of a 200 stream."""
        if not self._begun:
            self._begun = True
            self._handler.send_response(200)
            kind = "text/event-stream" if self.call.is_openai else "application/x-ndjson"
            self._handler.send_header("Content-Type", kind)
            self._handler.send_header("Transfer-Encoding", "chunked")
            self._handler.end_headers()
        self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def close(self) -> None:
        """End the stream, as HTTP says it is complete."""
        self._write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def line(self, content: str, thinking: str = "", **fields: Any) -> bytes:
        """One line of Ollama's, with the text where the called path has it, or OpenAI's events."""
        if self.call.is_openai:
            return fake_openai.line(self.call.body, content, thinking, **fields)
        thought = {"thinking": thinking} if thinking else {}
        text: dict[str, Any] = {"response": content, **thought}
        if self.call.path == "/api/chat":
            text = {"message": {"role": "assistant", "content": content, **thought}}
        head = {"model": self.call.body.get("model"), "created_at": datetime.now(UTC).isoformat()}
        return json.dumps(head | text | {"done": False} | fields).encode() + b"\n"

    def error(self, message: str, code: int = 500) -> bytes:
        """An error as the called path has it."""
        if self.call.is_openai:
            return json.dumps(fake_openai.error(code, message)).encode()
        return json.dumps({"error": message}).encode()

    def piece(self, content: str, thinking: str = "") -> None:
        """Send a piece of the answer, or keep it for `done` when the client does not stream."""
        if self.streams:
            self.raw(self.line(content, thinking))
        else:
            self._said, self._thought = self._said + content, self._thought + thinking

    def done(self, **fields: Any) -> None:
        """Send the last line (or, not streaming, the only one)."""
        if self.streams:
            self.raw(self.line("", **fields))
            self.close()
        else:
            self.send(200, self.line(self._said, self._thought, **fields))

    def cut(self) -> None:
        """Drop the connection as a process does that dies."""
        _shut(self._handler.connection)

    def wait(self, seconds: float | None) -> None:
        """Wait so long, or (None) until fake.release()."""
        end = float("inf") if seconds is None else time.monotonic() + seconds
        while not (seconds is None and self.fake.released.is_set()):
            left = end - time.monotonic()
            if _is_gone(self._handler.connection, max(0.0, min(POLL_SECONDS, left))):
                raise HungUp
            if left <= 0:
                break


Behaviour = Callable[[Reply], None]


def answer(
    text: str,
    *,
    tokens: int | None = None,
    prompt_tokens: int | None = None,
    chunks: int = 3,
    delay: float = 0.0,
    done_reason: str = "stop",
    thinking: str = "",
) -> Behaviour:
    """A good answer in so many chunks, `delay` seconds before each; counts default to words."""

    def play(reply: Reply) -> None:
        if thinking:
            reply.piece("", thinking)
        size = max(1, -(-len(text) // chunks))
        for start in range(0, len(text), size):
            reply.wait(delay)
            reply.piece(text[start : start + size])
        said = len(text.split()) if tokens is None else tokens
        read = len(reply.call.text.split()) if prompt_tokens is None else prompt_tokens
        counts = {"prompt_eval_count": read, "eval_count": said}
        durations = dict.fromkeys(
            ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"], 1_000_000
        )
        # Ollama leaves a count of zero out.
        told = {name: count for name, count in counts.items() if count}
        reply.done(done=True, done_reason=done_reason, **durations, **told)

    return play


def echo(reply: Reply) -> None:
    """Answer "echo: <prompt>"."""
    answer(f"echo: {reply.call.prompt}")(reply)


def empty() -> Behaviour:
    """An answer without a word."""
    return answer("", tokens=0)


def truncated(text: str, read: int = 5) -> Behaviour:
    """A good answer to a prompt of which only the last `read` tokens were read."""
    return answer(text, prompt_tokens=read)


def thinking(text: str, thought: str = "Let me think.") -> Behaviour:
    """An answer whose first piece is a thought, in the field beside the response."""
    return answer(text, thinking=thought)


def slow(
    seconds: float | None = None, then: Behaviour = echo, *, first: str | None = None
) -> Behaviour:
    """Silence for so long, or (None) until fake.release(); before it `first`, if given."""

    def play(reply: Reply) -> None:
        if first is not None:
            reply.piece(first)
        reply.wait(seconds)
        then(reply)

    return play


def status(code: int, error: str = "scripted", headers: dict[str, str] | None = None) -> Behaviour:
    """An error as Ollama gives it, with headers such as Retry-After."""
    return lambda reply: reply.send(code, reply.error(error, code), headers)


def loading() -> Behaviour:
    """A server that is up while its model is not."""
    return status(503, "llm server loading model")


def cut(text: str = "This was going to be") -> Behaviour:
    """A piece of an answer, then a dropped connection; not streaming, half a body."""

    def play(reply: Reply) -> None:
        if reply.streams:
            reply.piece(text)
        else:
            line = reply.line(text)
            reply.send(200, line[:-9], {"Content-Length": str(len(line))})
        reply.cut()

    return play


def no_done(text: str = "This was going to be") -> Behaviour:
    """A stream that ends properly, without a last line that is done."""

    def play(reply: Reply) -> None:
        reply.piece(text)
        if reply.streams:
            reply.close()
        else:
            reply.done(done=False)

    return play


def garbage(data: bytes = b"<html>Bad gateway</html>\n\xff\xfe\n") -> Behaviour:
    """Status 200 and lines that are not JSON."""
    return lambda reply: reply.send(200, data, {"Content-Type": "application/x-ndjson"})


def mid_stream_error(error: str = "the runner has died", text: str = "This was") -> Behaviour:
    """A piece of an answer, then a line with an error; not streaming, a 500."""

    def play(reply: Reply) -> None:
        if not reply.streams:
            return status(500, error)(reply)
        reply.piece(text)
        reply.raw((b"data: " if reply.call.is_openai else b"") + reply.error(error) + b"\n")
        reply.close()

    return play


def huge(size: int, *, piece: int = 65_536) -> Behaviour:
    """A good answer of `size` characters."""
    return lambda reply: answer("x" * size, chunks=-(-size // piece))(reply)


class FakeOllama:
    """The server, listening from `with` on; `url` stays the same through down() and up().

    What a call gets: the first rule of `on` whose text it contains, else `script(call)` (when it
    gives a behaviour), else `default`.
    """

    def __init__(self, port: int | None = None, models: Sequence[str] = MODELS) -> None:
        self.port, self.models = port or free_port(), models
        self.default: Behaviour = echo
        self.script: Callable[[Call], Behaviour | None] | None = None
        self.released = threading.Event()
        self.calls: list[Call] = []  # the POSTs, in the order in which they came
        self.probes: list[Call] = []  # the GETs
        self._rules: dict[str, _Rule] = {}
        self._seen: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(
        self,
        substring: str,
        behaviours: Behaviour | Sequence[Behaviour],
        *,
        per_prompt: bool = False,
    ) -> None:
        """Calls that contain the text (or GETs of that path) get these in order, then the last.

        With `per_prompt` every different text begins the list anew. A rule given again for the
        same substring starts afresh.
        """
        played = [behaviours] if callable(behaviours) else behaviours
        with self._changed:
            self._rules[substring] = _Rule(played, per_prompt)

    def release(self) -> None:
        """Let everything go on that is slow without a number of seconds, now and later."""
        self.released.set()

    def calls_for(self, substring: str) -> list[Call]:
        """The POSTs whose text contains this."""
        with self._changed:
            return [call for call in self.calls if substring in call.text]

    def wait_for(
        self, substring: str = "", count: int = 1, outcome: str | None = None, timeout: float = 30
    ) -> list[Call]:
        """The calls with that text, as soon as `count` of them have (that outcome) come."""

        def found() -> list[Call]:
            calls = [call for call in self.calls if substring in call.text]
            return [call for call in calls if outcome in (None, call.outcome)]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= count, timeout):
                raise TimeoutError(f"{len(found())} of {count} calls with {substring!r} came")
            return found()

    def up(self) -> None:
        """Listen, on the same port as before."""
        if self._server is None:
            self._server = _Server(self, self.port)

    def down(self) -> None:
        """Refuse connections, as a process does that died: open calls are cut off."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.down()

    def begin(self, call: Call) -> Behaviour:
        """Record a call and choose its behaviour."""
        with self._changed:
            self._seen[call.text] += 1
            call.number = self._seen[call.text]
            (self.calls if call.method == "POST" else self.probes).append(call)
            self._changed.notify_all()
            for substring, rule in self._rules.items():
                if substring in call.text:
                    return rule.next_for(call.text)
        if call.method == "GET":
            return self._answer_get
        scripted = self.script(call) if self.script else None
        return scripted or self.default

    def end(self, call: Call, outcome: str) -> None:
        """Record how a call ended."""
        with self._changed:
            call.outcome, call.ended = outcome, time.monotonic()
            self._changed.notify_all()

    def _answer_get(self, reply: Reply) -> None:
        names = [{"name": name, "model": name, "details": {}} for name in self.models]
        known = {"/api/version": {"version": "0.0.0-fake"}, "/api/tags": {"models": names}}
        known["/v1/models"] = fake_openai.models(self.models)
        if reply.call.path == "/":
            reply.send(200, b"Ollama is running", {"Content-Type": "text/plain"})
        elif reply.call.path in known:
            reply.send(200, json.dumps(known[reply.call.path]).encode())
        else:
            reply.send(404, b"404 page not found", {"Content-Type": "text/plain"})


class _Rule:
    """Behaviours played in order, and how far they have been played."""

    def __init__(self, behaviours: Sequence[Behaviour], per_prompt: bool) -> None:
        self._behaviours, self._per_prompt = behaviours, per_prompt
        self._played: Counter[str] = Counter()

    def next_for(self, text: str) -> Behaviour:
        key = text if self._per_prompt else ""
        self._played[key] += 1
        return self._behaviours[min(self._played[key], len(self._behaviours)) - 1]


class _Server(ThreadingHTTPServer):
    """One time of being up; `stop` ends its threads and connections, whatever they do."""

    request_queue_size = 1024
    daemon_threads = False  # so that server_close() waits for them

    def __init__(self, fake: FakeOllama, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fake = fake
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a broken connection; show a behaviour that raises, it is a mistake."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def stop(self) -> None:
        self.shutdown()
        with self._lock:
            for connection in self._open:
                _shut(connection)
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Reads requests off one connection and lets the fake choose what each of them gets."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and first chunk in one packet; Reply flushes

    def do_GET(self) -> None:
        self._play(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._play(json.loads(data))
        except ValueError:
            self._play(data)

    def _play(self, body: Any) -> None:
        fake = cast(_Server, self.server).fake
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = Call(self.command, self.path, headers, body)
        behaviour = fake.begin(call)
        outcome = "hung up"
        try:
            behaviour(Reply(fake, call, self))
            outcome = "finished"
        except (HungUp, OSError):
            self.close_connection = True
        finally:
            fake.end(call, outcome)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)


def _is_gone(connection: socket.socket, seconds: float) -> bool:
    """True as soon as the other side has closed the connection, False after so long."""
    poll = select.poll()  # select() refuses file descriptors above 1,023
    poll.register(connection, select.POLLIN)
    if not poll.poll(seconds * 1000):
        return False
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def main() -> None:
    """Echo every prompt on a port until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_ollama")
    parser.add_argument("--port", type=int, default=11434)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    with FakeOllama(port=parser.parse_args().port):
        over.wait()


if __name__ == "__main__":
    main()

"""A model server over HTTP: how it is asked and read, and what each way to fail means.

Both APIs answer with lines, and both report errors in the same few ways; so verdicts, limits of
size and time, and words are here, once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from config import Settings
from execution.backends.interface import Completion, OnPiece
from execution.certificates import trusted_by
from execution.errors import EmptyAnswer, Failure, Outage, Permanent

# English has about four and a half bytes a token, code and other scripts three or four.
MOST_BYTES_PER_TOKEN_OF_MOST_TEXT = 7
MOST_BYTES_PER_TOKEN = 12
CONTEXT_SLACK_TOKENS = 64
SHORTEST_PROMPT_JUDGED_BYTES = 400
LONGEST_ERROR_READ_BYTES = 4096
LONGEST_RETRY_AFTER_SECONDS = 86_400.0  # a mistaken header parks no task for a century

Read = Callable[[AsyncIterator[bytes]], Awaitable[Completion]]


class ModelServer:
    """One server, called with streaming requests.

    `key` is sent as Bearer token; `about_key` is what to say when the server wants another.
    """

    def __init__(self, url: str, settings: Settings, key: str | None, about_key: str) -> None:
        self.url = url
        self.max_result_bytes = settings.limits.max_result_bytes
        self._about_key = about_key
        self._timeout_seconds = settings.ollama.timeout_seconds
        self._http = httpx.AsyncClient(
            base_url=url,
            verify=trusted_by(url),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(
                self._timeout_seconds, connect=settings.ollama.connect_timeout_seconds
            ),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def probe(self, path: str) -> None:
        """Return if GET `path` is answered with 200, whatever it says; raises Outage if not."""
        try:
            async with self._http.stream("GET", path) as response:
                status = response.status_code
        except httpx.HTTPError as failed:
            raise Outage(self._unreachable(failed)) from failed
        if status in (401, 403):
            raise self._key_refused(f"the model server answered {status}")
        if status != 200:
            raise Outage(
                f"the model server at {self.url} answered {status} to GET {path}",
                retry_after_seconds=_retry_after_seconds(response),
            )

    async def ask(self, path: str, body: dict[str, Any], read: Read, if_missing: str) -> Completion:
        """POST the body and let `read` make an answer of the reply's lines.

        Raises Outage, Failure or Permanent; `if_missing` is what to do about a 404.
        """
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise await self._refusal(response, if_missing)
                try:
                    async with aclosing(_lines(response, self.max_result_bytes)) as lines:
                        return await read(lines)
                except httpx.HTTPError as failed:
                    raise self._broken_off(failed) from failed
        except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
            raise Outage(self._unreachable(failed)) from failed
        except httpx.TimeoutException as failed:
            raise self._broken_off(failed) from failed
        except httpx.HTTPError as failed:
            raise Outage(
                f"the model server hung up before it answered: {failed or type(failed).__name__}",
                hung_up=True,
            ) from failed

    def _unreachable(self, failed: httpx.HTTPError) -> str:
        words = str(failed) or type(failed).__name__
        return f"cannot reach the model server at {self.url}: {words}"

    def _broken_off(self, failed: httpx.HTTPError) -> Failure:
        if isinstance(failed, httpx.TimeoutException):
            return Failure(f"the model server sent nothing for {self._timeout_seconds:g} s")
        return Failure(f"the model server's answer broke off: {failed or type(failed).__name__}")

    async def _refusal(
        self, response: httpx.Response, if_missing: str
    ) -> Outage | Failure | Permanent:
        """What an answer other than 200 means."""
        status = response.status_code
        said = f"the model server answered {status}: {await _error_of(response)}"
        if status in (401, 403):
            return self._key_refused(said)
        if status == 402:
            return Outage(f"{said}: it wants to be paid", alarm=True, refused=True)
        if status in (429, 502, 503):
            wait_seconds = _retry_after_seconds(response)
            return Outage(said, retry_after_seconds=wait_seconds, refused=True)
        if status == 404:
            return Permanent(f"{said}; {if_missing}", refused=True)
        if status in (400, 422):
            said = f"{said}; change the prompt or the model's settings"
            return Permanent(said, refused=True)
        return Failure(said)

    def _key_refused(self, said: str) -> Outage:
        return Outage(f"{said}: {self._about_key}", alarm=True, refused=True)


class Answer:
    """An answer that comes in pieces; `on_piece` is told each of them."""

    def __init__(self, on_piece: OnPiece, max_bytes: int) -> None:
        self._on_piece, self._max_bytes = on_piece, max_bytes
        self._pieces: list[str] = []
        self._size = 0

    def add(self, piece: object) -> None:
        """Take one piece; raises Failure if it is no text, Permanent if all are too long."""
        text = _text_of(piece)
        self._pieces.append(text)
        self._on_piece(text)
        self._size += len(text.encode(errors="surrogatepass"))
        if self._size > self._max_bytes:
            raise Permanent(
                f"the answer is longer than limits.max_result_bytes "
                f"({self._max_bytes} bytes); raise it or ask for less"
            )

    def completion(
        self, prompt_tokens: int, completion_tokens: int, truncated: bool, if_empty: str = ""
    ) -> Completion:
        """The whole answer; raises EmptyAnswer if there is nothing in it."""
        text = "".join(self._pieces)
        if not text.strip():
            raise EmptyAnswer(
                f"the model's answer is empty{if_empty}", prompt_tokens, completion_tokens
            )
        return Completion(text, prompt_tokens, completion_tokens, truncated)


def _text_of(piece: object) -> str:
    """A piece as text. Some servers send a list of blocks, of which those of text are the answer;
    raises Failure if it is something else."""
    if isinstance(piece, str):
        return piece
    if isinstance(piece, list):
        return "".join(_text_of_block(block) for block in piece)
    raise Failure("the model server sent an answer that is no text")


def _text_of_block(block: object) -> str:
    if isinstance(block, dict):
        block = block.get("text") if block.get("type", "text") == "text" else ""
    if not isinstance(block, str):
        raise Failure("the model server sent an answer that is no text")
    return block


async def _lines(response: httpx.Response, longest: int) -> AsyncGenerator[bytes, None]:
    """The lines of a streamed body, none of which may be much longer than an answer may."""
    rest = bytearray()
    async for piece in response.aiter_bytes():
        rest += piece
        if b"\n" in piece:  # a line of many pieces is looked through once, not once a piece
            *lines, unfinished = bytes(rest).split(b"\n")
            rest = bytearray(unfinished)
            for line in lines:
                if line.strip():
                    yield line
        if len(rest) > 8 * longest:
            raise Failure("the model server sent a line without an end")
    if rest.strip():
        yield bytes(rest)


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object of a line; raises Failure if it is none."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as failed:
        raise Failure("the model server sent something that is not JSON") from failed
    if not isinstance(message, dict):
        raise Failure("the model server sent JSON that is no object")
    return message


def count_in(message: dict[str, Any], name: str) -> int:
    """A count of tokens, 0 if it is left out; raises Failure if it is no count."""
    count = message.get(name, 0)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
        raise Failure(f"the model server sent {name} = {str(count)[:40]!r}, which is no count")
    return count


def was_cut(prompt: str, prompt_tokens: int, num_ctx: int | None) -> bool:
    """Whether the server read far less than was sent; a count of 0 tells nothing (cached).

    An estimate: too few tokens for any text, or few for most text while the context is about full
    (a server that cuts keeps at least half of it). `num_ctx` is None when nobody knows it.
    """
    sent_bytes = len(prompt.encode())
    if sent_bytes < SHORTEST_PROMPT_JUDGED_BYTES or prompt_tokens == 0:
        return False
    fills_context = num_ctx is not None and prompt_tokens >= num_ctx // 2 - CONTEXT_SLACK_TOKENS
    most_bytes = MOST_BYTES_PER_TOKEN_OF_MOST_TEXT if fills_context else MOST_BYTES_PER_TOKEN
    return sent_bytes > prompt_tokens * most_bytes


def words_of(error: object) -> str:
    """An error as the APIs have it: a text, or an object whose `message` is one."""
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return str(error)


async def _error_of(response: httpx.Response) -> str:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > LONGEST_ERROR_READ_BYTES:
            break
    text = body[:LONGEST_ERROR_READ_BYTES].decode(errors="replace")
    try:
        return words_of(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.strip() or "no reason given"


def _retry_after_seconds(response: httpx.Response) -> float | None:
    """What Retry-After asks for: seconds, or an instant by the server's own clock."""
    value = response.headers.get("Retry-After", "")
    if value.isascii() and value.isdigit():
        return min(float(value), LONGEST_RETRY_AFTER_SECONDS)
    try:
        wait = _instant(value) - _instant(response.headers.get("Date", ""))
    except (ValueError, OverflowError):
        return None
    return min(max(wait.total_seconds(), 0.0), LONGEST_RETRY_AFTER_SECONDS)


def _instant(value: str) -> datetime:
    instant = parsedate_to_datetime(value)
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)

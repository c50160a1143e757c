"""One completion from a server that speaks Ollama's API, streamed.

https://github.com/ollama/ollama/blob/main/docs/api.md: POST /api/generate answers with one JSON
object per line; the last has `done: true` and the counts, which are left out when they are zero.
Hanging up stops the generation, so cancelling the coroutine cancels the call.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from config import Settings
from execution.errors import Failure, Outage, Permanent

# English has about four and a half bytes a token, code and other scripts three or four.
MOST_BYTES_PER_TOKEN_OF_MOST_TEXT = 7
MOST_BYTES_PER_TOKEN = 12
CONTEXT_SLACK_TOKENS = 64
SHORTEST_PROMPT_JUDGED_BYTES = 400
LONGEST_ERROR_READ_BYTES = 4096
LONGEST_RETRY_AFTER_SECONDS = 86_400.0  # a mistaken header parks no task for a century


@dataclass(frozen=True)
class Completion:
    """An answer, whole. Counts are the server's own."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    truncated: bool


class OllamaClient:
    """Calls the server behind one route; may be used by many coroutines of one event loop."""

    def __init__(self, settings: Settings, route: str) -> None:
        self._settings = settings.ollama
        self._max_result_bytes = settings.limits.max_result_bytes
        self._url = settings.ollama.url_of_route(route)
        has_own_server = route == "cloud" and bool(settings.ollama.cloud_url)
        key = settings.ollama_api_key if has_own_server else None
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
            timeout=httpx.Timeout(
                self._settings.timeout_seconds, connect=self._settings.connect_timeout_seconds
            ),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def probe(self) -> None:
        """Return if the server answers GET /api/version; raises Outage if it does not."""
        try:
            response = await self._http.get("/api/version")
        except httpx.HTTPError as failed:
            raise Outage(self._unreachable(failed)) from failed
        if response.status_code in (401, 403):
            raise _key_refused(f"the model server answered {response.status_code}")
        if response.status_code != 200:
            raise Outage(
                f"the model server at {self._url} answered {response.status_code}",
                retry_after_seconds=_retry_after_seconds(response),
            )

    async def complete(
        self,
        model: str,
        prompt: str,
        on_piece: Callable[[str], None],
        schema: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Return the model's answer to `prompt`; raises Outage, Failure or Permanent.

        `on_piece` is told each piece as it comes. The server is asked to keep to the JSON schema,
        if there is one; not every server and model does.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "stream": True,
            "options": {
                "num_ctx": self._settings.num_ctx,
                "num_predict": self._settings.num_predict,
            },
        }
        if schema is not None:
            body["format"] = schema
        try:
            async with self._http.stream("POST", "/api/generate", json=body) as response:
                if response.status_code != 200:
                    raise await _refusal(response, model)
                try:
                    return await self._read(response, prompt, on_piece)
                except httpx.HTTPError as failed:
                    raise _broken_off(failed, self._settings.timeout_seconds) from failed
        except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
            raise Outage(self._unreachable(failed)) from failed
        except httpx.TimeoutException as failed:
            raise _broken_off(failed, self._settings.timeout_seconds) from failed
        except httpx.HTTPError as failed:
            raise Outage(
                f"the model server hung up before it answered: {failed or type(failed).__name__}",
                hung_up=True,
            ) from failed

    def _unreachable(self, failed: httpx.HTTPError) -> str:
        words = str(failed) or type(failed).__name__
        return f"cannot reach the model server at {self._url}: {words}"

    async def _read(
        self, response: httpx.Response, prompt: str, on_piece: Callable[[str], None]
    ) -> Completion:
        pieces: list[str] = []
        size = 0
        async for line in _lines(response, self._max_result_bytes):
            message = _message(line)
            if error := message.get("error"):
                raise Failure(f"the model server stopped in the middle: {error}")
            piece = message.get("response", "")
            if not isinstance(piece, str):
                raise Failure("the model server sent an answer that is no text")
            pieces.append(piece)
            on_piece(piece)
            size += len(piece.encode(errors="surrogatepass"))
            if size > self._max_result_bytes:
                raise Permanent(
                    f"the answer is longer than limits.max_result_bytes "
                    f"({self._max_result_bytes} bytes); raise it or ask for less"
                )
            if message.get("done") is True:
                return _completion("".join(pieces), message, prompt, self._settings.num_ctx)
        raise Failure("the model server's answer broke off: it ended without `done`")


def _broken_off(failed: httpx.HTTPError, timeout_seconds: float) -> Failure:
    if isinstance(failed, httpx.TimeoutException):
        return Failure(f"the model server sent nothing for {timeout_seconds:g} s")
    return Failure(f"the model server's answer broke off: {failed or type(failed).__name__}")


async def _lines(response: httpx.Response, longest: int) -> AsyncIterator[bytes]:
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


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as failed:
        raise Failure("the model server sent something that is not JSON") from failed
    if not isinstance(message, dict):
        raise Failure("the model server sent JSON that is no object")
    return message


def _completion(text: str, last: dict[str, Any], prompt: str, num_ctx: int) -> Completion:
    prompt_tokens = _count(last, "prompt_eval_count")
    completion_tokens = _count(last, "eval_count")
    if not text.strip():
        raise Failure("the model's answer is empty", prompt_tokens, completion_tokens)
    was_cut = _was_cut(len(prompt.encode()), prompt_tokens, num_ctx)
    return Completion(text, prompt_tokens, completion_tokens, was_cut)


def _count(message: dict[str, Any], name: str) -> int:
    count = message.get(name, 0)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
        raise Failure(f"the model server sent {name} = {str(count)[:40]!r}, which is no count")
    return count


def _was_cut(sent_bytes: int, prompt_tokens: int, num_ctx: int) -> bool:
    """Whether the server read far less than was sent; a count of 0 tells nothing (cached).

    An estimate: too few tokens for any text, or few for most text while the context is about full
    (a server that cuts keeps at least half of it).
    """
    if sent_bytes < SHORTEST_PROMPT_JUDGED_BYTES or prompt_tokens == 0:
        return False
    fills_context = prompt_tokens >= num_ctx // 2 - CONTEXT_SLACK_TOKENS
    most_bytes = MOST_BYTES_PER_TOKEN_OF_MOST_TEXT if fills_context else MOST_BYTES_PER_TOKEN
    return sent_bytes > prompt_tokens * most_bytes


async def _refusal(response: httpx.Response, model: str) -> Outage | Failure | Permanent:
    """What an answer other than 200 means."""
    status = response.status_code
    said = f"the model server answered {status}: {await _error_of(response)}"
    if status in (401, 403):
        return _key_refused(said)
    if status in (429, 502, 503):
        return Outage(said, retry_after_seconds=_retry_after_seconds(response))
    if status == 404:
        return Permanent(f"{said}; if the model is missing, run: ollama pull {model}")
    if status == 400:
        return Permanent(f"{said}; change the prompt or the model's settings")
    return Failure(said)


def _key_refused(said: str) -> Outage:
    return Outage(f"{said}: it refuses the key; check OLLAMA_API_KEY", alarm=True)


async def _error_of(response: httpx.Response) -> str:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > LONGEST_ERROR_READ_BYTES:
            break
    text = body[:LONGEST_ERROR_READ_BYTES].decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "no reason given"


def _retry_after_seconds(response: httpx.Response) -> float | None:
    value = response.headers.get("Retry-After", "")
    if not (value.isascii() and value.isdigit()):
        return None
    return min(float(value), LONGEST_RETRY_AFTER_SECONDS)

"""One completion from a server that speaks OpenAI's API, streamed.

https://platform.openai.com/docs/api-reference/chat-streaming: POST /v1/chat/completions answers
with server-sent events. Each is a line `data: {…}` with a piece of the answer; a late one has the
`finish_reason`, the last but one (asked for by `include_usage`) the counts and no piece, and the
last is `data: [DONE]`. What a model thinks comes in fields of its own and is no part of the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from config import ConfigError, Settings
from execution.backends.interface import Completion, OnPiece
from execution.backends.server import Answer, ModelServer, count_in, parsed, was_cut, words_of
from execution.errors import Failure

# How an answer ends: by itself (which some servers call eos), or at the limit that was asked for,
# as with Ollama. With another reason it is none: withheld by a filter, a call of a tool that
# nobody offered, aborted.
ANSWERED = ("stop", "eos", "length")
# Of event streams; "" is that of a comment, and "error" one of llama.cpp's own.
FIELDS = (b"data", b"event", b"id", b"retry", b"error", b"")


class OpenAIBackend:
    """A Backend; see interface.py."""

    def __init__(self, settings: Settings, route: str) -> None:
        """Raises ConfigError if the key's variable is not set."""
        self._backend = settings.backends.of_route(route)
        self._num_predict = settings.ollama.num_predict
        variable = self._backend.key_env
        key = settings.api_keys.get(route)
        if variable and key is None:
            raise ConfigError(
                f"backends.{route}.key_env: {variable} is set neither in the environment nor "
                "in .env; a worker needs it"
            )
        about_key = f"it refuses the key; check {variable}"
        if not variable:
            about_key = f"it wants a key; name its variable in backends.{route}.key_env"
        # Both are usual, an address with /v1 and one without.
        url = self._backend.url.rstrip("/").removesuffix("/v1")
        secret = key.get_secret_value() if key else None
        self._server = ModelServer(url, settings, secret, about_key)
        self._route = route

    async def close(self) -> None:
        await self._server.close()

    async def probe(self) -> None:
        await self._server.probe("/v1/models")

    async def complete(
        self,
        model: str,
        prompt: str,
        on_piece: OnPiece,
        schema: Mapping[str, Any] | None = None,
    ) -> Completion:
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            self._backend.limit_as: self._num_predict,
        }
        if schema is not None:
            # Without `strict`, under which OpenAI refuses most schemas: the answer is checked here.
            wanted = {"name": "answer", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}

        async def read(lines: AsyncIterator[bytes]) -> Completion:
            return await self._read(lines, prompt, on_piece)

        if_missing = (
            f"if the model {model} is missing, name one of GET {self._server.url}/v1/models "
            f"in models.{self._route}"
        )
        return await self._server.ask("/v1/chat/completions", body, read, if_missing)

    async def _read(
        self, lines: AsyncIterator[bytes], prompt: str, on_piece: OnPiece
    ) -> Completion:
        answer = Answer(on_piece, self._server.max_result_bytes)
        usage: dict[str, Any] = {}
        finish_reason: object = None
        async with aclosing(_events(lines)) as events:
            async for message in events:
                if message is None:
                    return _completion(answer, finish_reason, usage, prompt)
                if told := message.get("usage"):
                    usage = _object(told)
                for choice in _choices(message):
                    delta = _object(choice.get("delta") or {})
                    if (piece := delta.get("content")) is not None:
                        answer.add(piece)
                    finish_reason = choice.get("finish_reason") or finish_reason
        raise Failure("the model server's answer broke off: it ended without [DONE]")


async def _events(lines: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any] | None, None]:
    """The objects behind `data:`, one a line in every such API; None for [DONE]."""
    is_error = False
    async for line in lines:
        field, _, data = (part.strip() for part in line.partition(b":"))
        if field not in FIELDS:
            raise Failure("the model server sent something that is no stream of events")
        is_error = is_error or (field, data) == (b"event", b"error")
        if field == b"data" and data == b"[DONE]":
            yield None
        elif field == b"error" or field == b"data":
            message = parsed(data)
            if is_error or field == b"error" or message.get("object") == "error":
                message = {"error": message, **message}
            if error := message.get("error"):
                raise Failure(f"the model server stopped in the middle: {words_of(error)}")
            yield message


def _choices(message: dict[str, Any]) -> list[dict[str, Any]]:
    choices = message.get("choices") or []
    if not isinstance(choices, list):
        raise Failure("the model server sent choices that are no list")
    return [_object(choice) for choice in choices]


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Failure("the model server sent JSON that is no object")
    return value


def _completion(
    answer: Answer, finish_reason: object, usage: dict[str, Any], prompt: str
) -> Completion:
    prompt_tokens = count_in(usage, "prompt_tokens")
    completion_tokens = count_in(usage, "completion_tokens")
    if finish_reason not in ANSWERED:
        said = "without a finish_reason"
        if finish_reason is not None:
            said = f"with finish_reason {str(finish_reason)[:40]!r}, which is no answer"
        raise Failure(f"the model server's answer ended {said}", prompt_tokens, completion_tokens)
    # A model that thinks may come to no answer within the limit.
    if_empty = "; it ended at ollama.num_predict tokens" if finish_reason == "length" else ""
    is_cut = was_cut(prompt, prompt_tokens, None)
    return answer.completion(prompt_tokens, completion_tokens, is_cut, if_empty)

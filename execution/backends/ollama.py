"""One completion from a server that speaks Ollama's API, streamed.

https://github.com/ollama/ollama/blob/main/docs/api.md: POST /api/generate answers with one JSON
object per line; the last has `done: true` and the counts, which are left out when they are zero.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from config import Settings
from execution.backends.interface import Completion, OnPiece
from execution.backends.server import Answer, ModelServer, count_in, parsed, was_cut, words_of
from execution.errors import Failure


class OllamaBackend:
    """A Backend; see interface.py."""

    def __init__(self, settings: Settings, route: str) -> None:
        self._settings = settings.ollama
        has_own_server = route == "cloud" and bool(settings.ollama.cloud_url)
        key = settings.ollama_api_key if has_own_server else None
        self._server = ModelServer(
            settings.ollama.url_of_route(route),
            settings,
            key.get_secret_value() if key else None,
            "it refuses the key; check OLLAMA_API_KEY",
        )

    async def close(self) -> None:
        await self._server.close()

    async def probe(self) -> None:
        await self._server.probe("/api/version")

    async def complete(
        self,
        model: str,
        prompt: str,
        on_piece: OnPiece,
        schema: Mapping[str, Any] | None = None,
    ) -> Completion:
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

        async def read(lines: AsyncIterator[bytes]) -> Completion:
            return await self._read(lines, prompt, on_piece)

        if_missing = f"if the model is missing, run: ollama pull {model}"
        return await self._server.ask("/api/generate", body, read, if_missing)

    async def _read(
        self, lines: AsyncIterator[bytes], prompt: str, on_piece: OnPiece
    ) -> Completion:
        answer = Answer(on_piece, self._server.max_result_bytes)
        async for line in lines:
            message = parsed(line)
            if error := message.get("error"):
                raise Failure(f"the model server stopped in the middle: {words_of(error)}")
            answer.add(message.get("response", ""))
            if message.get("done") is True:
                prompt_tokens = count_in(message, "prompt_eval_count")
                is_cut = was_cut(prompt, prompt_tokens, self._settings.num_ctx)
                return answer.completion(prompt_tokens, count_in(message, "eval_count"), is_cut)
        raise Failure("the model server's answer broke off: it ended without `done`")

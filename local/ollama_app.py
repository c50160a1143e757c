"""Ollama's HTTP API in front of the engine: paths, bodies, errors, and the hang-up."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan, Receive, Scope, Send

from local.ollama_engine import CONTEXT_TOKENS, Engine, EngineError, Usage
from local.ollama_requests import Ask, BadRequest, ChatAsk, GenerateAsk, Options, parse

log = logging.getLogger("local.model")

VERSION = "0.12.0"  # the version of Ollama whose API this follows
STAND_IN = "SmolLM2-135M-Instruct, a small stand-in, answers for this name"
DETAILS = {
    "parent_model": "SmolLM2-135M-Instruct",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "134.52M",
    "quantization_level": "Q4_1",
}


def create_app(
    engine: Engine, names: Sequence[str], lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """The API, answering for the models of these names."""
    routes = [
        Route("/", _running),
        Route("/api/version", _version),
        Route("/api/tags", _tags),
        Route("/api/show", _show, methods=["POST"]),
        Route("/api/generate", _answering(GenerateAsk, _generated), methods=["POST"]),
        Route("/api/chat", _answering(ChatAsk, _chatted), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={404: _no_such_page, BadRequest: _bad_request},
        lifespan=lifespan,
    )
    app.state.engine, app.state.names = engine, list(names)
    return app


async def _running(_: Request) -> Response:
    return PlainTextResponse("Ollama is running")


async def _version(_: Request) -> Response:
    return JSONResponse({"version": VERSION})


async def _tags(request: Request) -> Response:
    models = [
        {"name": name, "model": name, "details": DETAILS, "stand_in": STAND_IN}
        for name in request.app.state.names
    ]
    return JSONResponse({"models": models})


async def _show(request: Request) -> Response:
    ask = parse(Ask, await request.body())
    if not _is_known(request, ask.model):
        return _not_found(ask.model)
    info = {"general.architecture": "llama", "llama.context_length": CONTEXT_TOKENS}
    about = {"details": DETAILS, "model_info": info, "capabilities": ["completion"]}
    return JSONResponse(about | {"stand_in": STAND_IN})


async def _no_such_page(_: Request, __: Exception) -> Response:
    return PlainTextResponse("404 page not found", 404)


async def _bad_request(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


def _not_found(model: str) -> Response:
    return JSONResponse({"error": f"model '{model}' not found"}, 404)


def _is_known(request: Request, model: str) -> bool:
    tagged = model if ":" in model else f"{model}:latest"
    return tagged in request.app.state.names or model in request.app.state.names


def _generated(text: str) -> dict[str, Any]:
    return {"response": text}


def _chatted(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


Wording = Callable[[str], dict[str, Any]]


def _answering(kind: type[Ask], wording: Wording) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint for one of the two calls, which differ in where the text stands."""

    async def endpoint(request: Request) -> Response:
        ask = parse(kind, await request.body())
        engine: Engine = request.app.state.engine
        if not _is_known(request, ask.model):
            return _not_found(ask.model)
        if not engine.ready:
            return JSONResponse({"error": "the model is still loading"}, 503)
        if not ask.turns:
            loaded = _head(ask) | wording("") | {"done": True, "done_reason": "load"}
            return JSONResponse(loaded)
        return Answer(engine, ask, wording)

    return endpoint


class Answer(Response):
    """One generation as NDJSON or one object; it ends at once when the client hangs up."""

    def __init__(self, engine: Engine, ask: Ask, wording: Wording) -> None:
        super().__init__()
        self._engine, self._ask, self._wording = engine, ask, wording

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_hang_up, tasks.cancel_scope, receive)
                if self._ask.streams:
                    await self._stream(scope, receive, send)
                else:
                    await (await self._collected())(scope, receive, send)
                tasks.cancel_scope.cancel()
        except asyncio.CancelledError:
            # Only uvicorn cancels us, when the server ends; it would log this as an error of ours.
            log.warning("an answer was broken off because the server ends")

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send line by line; an error before the first is a status, a later one a line."""
        async with aclosing(self._lines()) as lines:
            try:
                line = await anext(lines)
            except EngineError as error:
                return await _refused(error)(scope, receive, send)
            headers = [(b"content-type", b"application/x-ndjson")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                while True:
                    await send(_chunk(line))
                    line = await anext(lines)
            except StopAsyncIteration:
                pass
            except EngineError as error:
                await send(_chunk({"error": str(error)}))
            await send({"type": "http.response.body", "body": b""})

    async def _collected(self) -> Response:
        """The whole answer as one object."""
        said, last = "", {}
        try:
            async with aclosing(self._lines()) as lines:
                async for line in lines:
                    message = line.get("message", {})
                    said += line.get("response", message.get("content", ""))
                    last = line
        except EngineError as error:
            return _refused(error)
        return JSONResponse(last | self._wording(said))

    async def _lines(self) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of the answer; the last one is done and has the counts."""
        started = time.monotonic_ns()
        ask = self._ask
        schema = {"type": "object"} if ask.format == "json" else ask.format or None
        pieces = self._engine.generate(ask.turns, ask.options or Options(), schema)
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Usage):
                    taken = time.monotonic_ns() - started
                    yield _head(ask) | self._wording("") | _counts(piece, taken)
                else:
                    yield _head(ask) | self._wording(piece) | {"done": False}


async def _cancel_on_hang_up(scope: anyio.CancelScope, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _head(ask: Ask) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": ask.model, "created_at": now}


def _counts(usage: Usage, total_ns: int) -> dict[str, Any]:
    # Ollama leaves a count of zero out.
    told = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.tokens}
    return {
        "done": True,
        "done_reason": usage.reason,
        "total_duration": total_ns,
        "load_duration": usage.waited_ns,
        "prompt_eval_duration": usage.prompt_ns,
        "eval_duration": usage.ns,
        **{name: count for name, count in told.items() if count},
    }


def _refused(error: EngineError) -> Response:
    return JSONResponse({"error": str(error)}, error.status)


def _chunk(line: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    return {"type": "http.response.body", "body": body, "more_body": True}

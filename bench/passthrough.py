"""Tokens per second of the local model at concurrency 4: asked directly, and through the queue.

    python -m bench.passthrough

The model is the small one that run.sh starts. Directly means four coroutines with a plain client
that reads the stream of Ollama's API; through the queue means POST /tasks for every prompt at once,
one worker with --concurrency 4, and GET /tasks/{id}?wait= for each answer. Both ask for the same
prompts with the same options, and take turns. The seconds are from the first request to the last
answer; the tokens are those that the model counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import httpx

from bench.common import MeasureFailed, Process, Stage, await_quiet, eventually
from bench.report import Record, run
from local.ports import free_port
from local.probes import answers_like_ollama

CONCURRENCY = 4
PROMPTS, TOKENS = 16, 96
QUICK_PROMPTS, QUICK_TOKENS = 12, 48
REPETITIONS = 4
QUICK_REPETITIONS = 2
LONGEST_SECONDS = 120.0
MODEL_READY_SECONDS = 180.0
MODEL = "llama3.2:latest"
CONTEXT_TOKENS = 4096
PROMPT = "Tell a long story about {} old machines that wait in a queue."


def measure(stage: Stage, record: Record, quick: bool) -> None:
    count, tokens = (QUICK_PROMPTS, QUICK_TOKENS) if quick else (PROMPTS, TOKENS)
    record.note(f"{count} prompts, at most {tokens} tokens for each answer")
    prompts = [PROMPT.format(number + 2) for number in range(count)]
    env = stage.environment(
        stage.database(),
        {
            "models": {"local": MODEL},
            "ollama": {"num_ctx": CONTEXT_TOKENS, "num_predict": tokens},
        },
    )
    model = model_server(stage, env)
    worker = stage.process(
        [sys.executable, "scheduler.py", "--concurrency", str(CONCURRENCY)],
        {**env, "OLLAMA_URL": model.url},
    )
    eventually(lambda: "action=started" in worker.log, what="a worker")
    api = stage.api(env["DATABASE_URL"])
    ways = {
        "directly": lambda: ask_directly(model.url, prompts, tokens),
        "through API and worker": lambda: ask_through_queue(api.url, prompts),
    }
    for ask in ways.values():
        per_second(ask)  # from here on everything is in memory
    for repetition in range(QUICK_REPETITIONS if quick else REPETITIONS):
        found = {}
        for way in list(ways) if repetition % 2 else list(reversed(ways)):
            await_quiet()
            found[way] = record.add(way, per_second(ways[way]), "tokens/s")
        record.ratio("tokens/s / directly", found["through API and worker"] / found["directly"])


def model_server(stage: Stage, env: Mapping[str, str]) -> Process:
    port = free_port()
    model = stage.process([sys.executable, "-m", "local.model", "--port", str(port)], env)
    model.url = f"http://127.0.0.1:{port}"
    eventually(lambda: answers_like_ollama(model.url), MODEL_READY_SECONDS, "the model's server")
    eventually(lambda: has_loaded(model.url), MODEL_READY_SECONDS, "the model")
    return model


def has_loaded(model_url: str) -> bool:
    """Whether it answers prompts: until it can, its server says 503."""
    body = {"model": MODEL, "prompt": "Hello", "stream": False, "options": {"num_predict": 1}}
    answer = httpx.post(f"{model_url}/api/generate", json=body, timeout=LONGEST_SECONDS)
    return answer.status_code == httpx.codes.OK


def per_second(ask: Callable[[], Coroutine[Any, Any, int]]) -> float:
    began = time.monotonic()
    tokens = asyncio.run(ask())
    return tokens / (time.monotonic() - began)


async def ask_directly(model_url: str, prompts: Sequence[str], tokens: int) -> int:
    """The tokens of all answers; so many are asked for at a time."""
    left = list(prompts)

    async def ask_for_what_is_left(client: httpx.AsyncClient) -> int:
        found = 0
        while left:
            found += await answer_of(client, left.pop(), tokens)
        return found

    async with httpx.AsyncClient(base_url=model_url, timeout=LONGEST_SECONDS) as client:
        return sum(
            await asyncio.gather(*(ask_for_what_is_left(client) for _ in range(CONCURRENCY)))
        )


async def answer_of(client: httpx.AsyncClient, prompt: str, tokens: int) -> int:
    options = {"num_ctx": CONTEXT_TOKENS, "num_predict": tokens}
    body = {"model": MODEL, "prompt": prompt, "options": options}
    async with client.stream("POST", "/api/generate", json=body) as answer:
        async for line in answer.aiter_lines():
            piece = json.loads(line)
            if piece.get("done"):
                return int(piece["eval_count"])
    raise MeasureFailed("the model's answer broke off")


async def ask_through_queue(api_url: str, prompts: Sequence[str]) -> int:
    """The tokens of all answers; all are submitted at once."""
    async with httpx.AsyncClient(base_url=api_url, timeout=LONGEST_SECONDS) as client:
        return sum(await asyncio.gather(*(submitted(client, prompt) for prompt in prompts)))


async def submitted(client: httpx.AsyncClient, prompt: str) -> int:
    stored = await client.post("/tasks", json={"prompt": prompt, "route": "local"})
    address = f"/tasks/{stored.raise_for_status().json()['task_id']}"
    for _ in range(3):
        task = (await client.get(address, params={"wait": 60})).raise_for_status().json()
        if task["status"] == "SUCCEEDED":
            return int(task["completion_tokens"])
    raise MeasureFailed(f"not answered: {task}")


if __name__ == "__main__":
    run("passthrough", "Pass-through of a model's tokens", measure, "--quick" in sys.argv)

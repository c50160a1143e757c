"""Routes behind OpenAI's API: what is asked, what is kept, and what each way to fail means."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from tests.conftest import fresh_database
from tests.support.bench import Bench
from tests.support.fake_ollama import (
    Behaviour,
    FakeOllama,
    Reply,
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
from tests.support.fake_openai import DONE, chunk, event, usage
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue

MAX_RESULT_BYTES = 200_000
KEY = "sk-123"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def backends(url: str, **cloud: Any) -> dict[str, dict[str, Any]]:
    """Both routes at this server; the cloud wants a key, and its address is written in full."""
    openai = {"api": "openai", "url": url}
    keyed = {"url": f"{url}/v1/", "key_env": "CLOUD_KEY", "limit_as": "max_completion_tokens"}
    return {"backends.local": openai, "backends.cloud": {**openai, **keyed, **cloud}}


@pytest.fixture(scope="module")
def shared_bench(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with fresh_database(server_url) as url, FakeOllama() as fake, Queue(url) as queue:
        folder = tmp_path_factory.mktemp("openai")
        (folder / ".env").write_text(f"CLOUD_KEY={KEY}\n")
        bench = Bench(queue, fake, folder)
        with bench.processes:
            bench.start(
                worker={"lease_seconds": 60, "heartbeat_seconds": 1},
                retry={"max_delay_seconds": 0.05},
                limits={"max_result_bytes": MAX_RESULT_BYTES},
                ollama={"url": "http://127.0.0.1:9", "num_predict": 77},
                models={"local": "small:1b", "cloud": "gpt-large"},
                cost={"cloud_prompt_per_token": "0.0000007"},
                **backends(fake.url),
            )
            yield bench


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    yield shared_bench
    shared_bench.check_worker()


def events(*sent: bytes) -> Behaviour:
    """A stream of just these."""

    def play(reply: Reply) -> None:
        for one in sent:
            reply.raw(one)
        reply.close()

    return play


# --- the question ----------------------------------------------------------------------------


def test_a_prompt_is_one_message_with_a_bounded_answer_and_the_counts_asked_for(
    bench: Bench,
) -> None:
    row = bench.play("by way of local", requested_route="local")
    (call,) = bench.fake.calls_for("by way of local")
    assert call.path == "/v1/chat/completions"
    assert call.body == {
        "model": "small:1b",
        "messages": [{"role": "user", "content": "by way of local"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 77,
    }
    assert "authorization" not in call.headers
    assert (row["route"], row["model"]) == ("local", "small:1b")
    assert row["result"] == {"text": "echo: by way of local"}


def test_a_route_has_its_own_model_key_and_word_for_the_limit(bench: Bench) -> None:
    row = bench.play("by way of cloud", requested_route="cloud")
    (call,) = bench.fake.calls_for("by way of cloud")
    assert (call.path, call.body["model"]) == ("/v1/chat/completions", "gpt-large")
    assert call.body["max_completion_tokens"] == 77
    assert "max_tokens" not in call.body
    assert call.headers["authorization"] == f"Bearer {KEY}"
    assert (row["route"], row["model"]) == ("cloud", "gpt-large")


def test_a_format_is_asked_for_and_the_answer_is_checked(bench: Bench) -> None:
    payload = {"prompt": "a number, please", "format": SCHEMA}
    row = bench.play("a number, please", answer("no"), answer('{"n": 7}'), payload=payload)
    assert row["result"]["json"] == {"n": 7}
    first, second = bench.fake.calls_for("a number, please")
    wanted = {"name": "answer", "schema": SCHEMA}
    assert first.body["response_format"] == {"type": "json_schema", "json_schema": wanted}
    assert second.body["response_format"] == first.body["response_format"]


def test_the_probe_asks_for_the_models_and_sends_the_key(bench: Bench) -> None:
    eventually(  # the worker claims without waiting for its first probe
        lambda: (
            f"Bearer {KEY}" in {probe.headers.get("authorization") for probe in bench.fake.probes}
        )
    )
    assert {probe.path for probe in bench.fake.probes} == {"/v1/models"}


# --- the answer ------------------------------------------------------------------------------


def test_counts_and_the_exact_cost_are_kept(bench: Bench) -> None:
    said = answer("seven tokens", tokens=7, prompt_tokens=13)
    row = bench.play("priced", said, requested_route="cloud")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (13, 7)
    assert row["cost"] == 7 * Decimal("0.0001") + 13 * Decimal("0.0000007")


def test_what_a_failed_attempt_used_is_paid_as_well(bench: Bench) -> None:
    withheld = events(chunk("It", "content_filter"), usage(10, 5), DONE)
    row = bench.play("pays twice", withheld, answer("ok", tokens=7, prompt_tokens=10))
    assert (row["status"], row["prompt_tokens"], row["completion_tokens"]) == ("SUCCEEDED", 20, 12)


GOOD = {
    "thoughts": (thinking("forty-two", "hm"), "forty-two"),
    "an answer cut at the limit": (answer("as far as", done_reason="length"), "as far as"),
    "no counts": (events(chunk("forty"), chunk("-two", "stop"), DONE), "forty-two"),
    "comments, other fields and no space": (
        events(
            b": still there\n\n", b"event: message\nid: 7\nretry: 5\n", chunk("forty-two"),
            chunk(None, "stop").replace(b"data: ", b"data:").replace(b"\n", b"\r\n"), DONE,
        ), "forty-two",
    ),
    "an event of no choice and an empty piece": (
        events(event({"choices": []}), chunk("", role="assistant"), chunk("ok"),
               chunk(None, "stop"), DONE), "ok",
    ),
    "an event in two packets": (
        events(chunk("forty-two")[:30], chunk("forty-two")[30:], chunk(None, "eos"), DONE),
        "forty-two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_good_answer_is_kept_in_whatever_way_it_is_told(bench: Bench, name: str) -> None:
    behaviour, text = GOOD[name]
    row = bench.play(f"good: {name}", behaviour)
    assert (row["status"], row["result"]) == ("SUCCEEDED", {"text": text}), row["last_error"]
    assert row["attempt"] == 1


def test_a_prompt_of_which_the_server_read_next_to_nothing_is_marked_truncated(
    bench: Bench,
) -> None:
    row = bench.play("long prompt, few tokens: " + "word " * 300, truncated("ok", read=5))
    assert row["truncated"]
    # Nothing is known of the server's context, so what would fill num_ctx tells nothing.
    row = bench.play("dense prompt: " + "word " * 4000, answer("ok", prompt_tokens=2500))
    assert not row["truncated"]


def test_an_answer_as_long_as_the_limit_is_kept_and_a_longer_one_is_not_read_to_its_end(
    bench: Bench,
) -> None:
    row = bench.play("as long as can be", huge(MAX_RESULT_BYTES))
    assert (row["status"], len(row["result"]["text"])) == ("SUCCEEDED", MAX_RESULT_BYTES)
    row = bench.play("fifty megabytes", huge(50_000_000))
    assert (row["status"], row["reason"], row["result"]) == ("FAILED", "permanent", None)
    assert "limits.max_result_bytes" in row["last_error"]
    assert bench.fake.wait_for("fifty megabytes", outcome="hung up")


# --- failures --------------------------------------------------------------------------------

WHOLE = b'{"object": "chat.completion", "choices": [{"message": {"content": "hi"}}]}\n'
FAILURES: dict[str, tuple[Behaviour, str]] = {
    "status 500": (status(500, "the runner has died"), "500: the runner has died"),
    "status 418": (status(418, "a teapot"), "418: a teapot"),
    "a cut stream": (cut(), "broke off"),
    "an end without anything": (no_done(), "without [DONE]"),
    "an end without [DONE]": (events(chunk("It was", "stop"), usage(3, 2)), "without [DONE]"),
    "an end without a reason": (events(chunk("It was"), DONE), "without a finish_reason"),
    "an answer withheld": (events(chunk("It", "content_filter"), DONE), "'content_filter'"),
    "a call of a tool": (events(chunk(None, "tool_calls"), DONE), "'tool_calls'"),
    "a reason that is no text": (events(chunk("It", {"a": 1}), DONE), "is no answer"),  # type: ignore[arg-type]
    "garbage": (garbage(), "no stream of events"),
    "an answer in one piece": (garbage(WHOLE), "no stream of events"),
    "an event that is not JSON": (events(b"data: {]\n"), "not JSON"),
    "JSON too deep to read": (garbage(b"data: " + b"[" * 200_000 + b"\n"), "not JSON"),
    "an event that is a list": (events(event([1])), "no object"),
    "choices that are none": (events(event({"choices": {"a": 1}})), "no list"),
    "a choice that is none": (events(event({"choices": [1]})), "no object"),
    "a piece that is no text": (events(chunk(5)), "no text"),  # type: ignore[arg-type]
    "a count that is none": (events(chunk("x", "stop"), usage(-1, 2), DONE), "prompt_tokens"),
    "an error in mid stream": (mid_stream_error("out of memory"), "out of memory"),
    "an error that is a text": (events(chunk("It"), event({"error": "gone"})), "middle: gone"),
    "an event of type error": (
        events(chunk("It"), b"event: error\n", event({"message": "out of luck"})), "out of luck"),
    "an object of type error": (
        events(event({"object": "error", "message": "no slot"}), DONE), "no slot"),
    "llama.cpp's error": (events(b'error: {"message": "no cache left"}\n'), "no cache left"),
    "an empty answer": (empty(), "empty"),
    "an answer of white space": (answer(" \n\t ", tokens=3), "empty"),
    "only thoughts, up to the limit": (
        answer("", thinking="hm", done_reason="length"), "ended at ollama.num_predict"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_tried_again_and_is_then_a_dead_letter(bench: Bench, name: str) -> None:
    behaviour, words = FAILURES[name]
    row = bench.play(f"fails by {name}", behaviour, max_retry=2)
    assert (row["status"], row["reason"]) == ("FAILED", "max_retry")
    assert (row["retry_count"], row["delivery_count"], row["attempt"]) == (2, 2, 2)
    assert words in row["last_error"]
    assert (row["result"], bench.calls(f"fails by {name}")) == (None, 2)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (400, "change the prompt"),
        (422, "change the prompt"),
        (404, "name one of GET http://127.0.0.1:"),
    ],
)
def test_what_can_never_succeed_is_a_dead_letter_at_once_with_what_to_do(
    bench: Bench, code: int, advice: str
) -> None:
    row = bench.play(f"refused with {code}", status(code, "scripted"), requested_route="cloud")
    assert (row["status"], row["reason"], row["attempt"]) == ("FAILED", "permanent", 1)
    assert f"{code}: scripted" in row["last_error"]
    assert advice in row["last_error"]
    assert ("in models.cloud" in row["last_error"]) == (code == 404)


@pytest.mark.parametrize("begins_to_answer", [True, False])
def test_silence_longer_than_the_timeout_is_a_failure_and_drops_the_call(
    processes: Processes, fake: FakeOllama, queue: Queue, begins_to_answer: bool
) -> None:
    processes.configure(ollama={"timeout_seconds": 0.5}, **backends(fake.url))
    fake.on("silence", slow(first="a piece" if begins_to_answer else None))
    (task_id,) = queue.submit("silence", max_retry=1)
    processes.worker(env={"CLOUD_KEY": KEY})
    row = queue.await_final(task_id)
    assert (row["reason"], "nothing for 0.5 s" in row["last_error"]) == ("max_retry", True)
    assert fake.wait_for("silence", outcome="hung up")


def test_a_cancelled_task_drops_its_call(bench: Bench) -> None:
    bench.fake.on("endless", slow(first="a piece"))
    (task_id,) = bench.queue.submit("endless")
    bench.fake.wait_for("endless")
    bench.queue.ask("UPDATE tasks SET cancel_requested = true WHERE task_id = %s", task_id)
    assert bench.queue.await_final(task_id)["status"] == "CANCELLED"
    assert bench.fake.wait_for("endless", outcome="hung up")


# --- outages ---------------------------------------------------------------------------------


def hung_up(reply: Reply) -> None:
    reply.cut()


OUTAGES: dict[str, tuple[Behaviour, str, str]] = {
    "status 502": (status(502, "bad gateway"), "502: bad gateway", "WARNING"),
    "status 503": (loading(), "503: llm server loading model", "WARNING"),
    "status 429": (status(429, "slow down"), "429: slow down", "WARNING"),
    "no byte": (hung_up, "hung up before it answered", "WARNING"),
    "status 401": (status(401, "who?"), "it refuses the key; check CLOUD_KEY", "ERROR"),
    "status 403": (status(403, "not you"), "it refuses the key; check CLOUD_KEY", "ERROR"),
    "status 402": (status(402, "no credit"), "402: no credit: it wants to be paid", "ERROR"),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_before_the_first_byte_burns_nothing_and_is_an_alarm_where_somebody_has_to_act(
    bench: Bench, name: str
) -> None:
    behaviour, words, level = OUTAGES[name]
    row = bench.play(f"away: {name}", behaviour, answer("ok"), requested_route="cloud")
    assert (row["status"], row["retry_count"], row["delivery_count"]) == ("SUCCEEDED", 0, 1)
    assert bench.queue.story(row["task_id"]) == [
        "created", "claimed", "outage", "claimed", "succeeded",
    ]  # fmt: skip
    assert bench.worker is not None
    lines = [line for line in bench.worker.log.splitlines() if "route_paused" in line]
    assert f" {level} " in lines[-1]
    assert words in lines[-1]
    assert KEY not in bench.worker.log


def test_a_server_that_is_away_is_probed_until_it_is_back(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(**backends(fake.url))
    fake.down()
    worker = processes.worker(env={"CLOUD_KEY": KEY})
    (task_id,) = queue.submit("patience", requested_route="local")
    eventually(lambda: "action=route_paused route=local" in worker.log)
    assert queue.row(task_id)["attempt"] == 0
    fake.up()
    row = queue.await_final(task_id)
    assert (row["status"], row["attempt"]) == ("SUCCEEDED", 1)


PROBES: dict[str, tuple[Behaviour, str]] = {
    "a refused key": (status(401), "it wants a key; name its variable in backends.cloud.key_env"),
    "another server": (status(404), "answered 404 to GET /v1/models"),
    "a pause asked for": (
        status(503, "later", {"Retry-After": "77"}), "probe_in_seconds=77"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBES)
def test_a_route_whose_probe_is_refused_stays_closed_and_says_why(
    processes: Processes, fake: FakeOllama, name: str
) -> None:
    behaviour, words = PROBES[name]
    processes.configure(**backends(fake.url, key_env=""))
    fake.on("/v1/models", behaviour)
    worker = processes.worker()
    eventually(lambda: "action=route_paused route=cloud" in worker.log)
    assert words in worker.log


# --- settings --------------------------------------------------------------------------------


def test_a_worker_whose_key_is_missing_does_not_start_and_names_its_variable(
    processes: Processes, fake: FakeOllama
) -> None:
    processes.configure(**backends(fake.url))
    worker = processes.worker_starting()
    assert worker.wait() == 1
    assert "backends.cloud.key_env: CLOUD_KEY is set neither in" in worker.log
    assert processes.api().http.get("/readyz").status_code == 200  # it calls no model


def test_one_route_may_speak_ollama_s_api_and_the_other_openai_s(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(**{"backends.cloud": {"api": "openai", "url": fake.url}})
    tasks = queue.submit("to one", requested_route="local")
    tasks += queue.submit("to the other", requested_route="cloud")
    processes.worker()
    assert [queue.await_final(task_id)["status"] for task_id in tasks] == ["SUCCEEDED"] * 2
    assert {call.prompt: call.path for call in fake.calls} == {
        "to one": "/api/generate",
        "to the other": "/v1/chat/completions",
    }

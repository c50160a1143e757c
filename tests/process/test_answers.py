"""What is asked of the model, and what becomes of its words, its counts and its last cries."""

from __future__ import annotations

import json
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
    huge,
    mid_stream_error,
    slow,
    status,
    thinking,
    truncated,
)
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue

MAX_RESULT_BYTES = 200_000
MAX_ERROR_BYTES = 8192
COST = {
    "local_per_token": "0.00001",
    "cloud_per_token": "0.0001",
    "local_prompt_per_token": "0.000000003",
    "cloud_prompt_per_token": "0.0000007",
}


@pytest.fixture(scope="module")
def shared_bench(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with fresh_database(server_url) as url, FakeOllama() as fake, Queue(url) as queue:
        bench = Bench(queue, fake, tmp_path_factory.mktemp("answers"))
        with bench.processes:
            bench.start(
                worker={"lease_seconds": 60, "heartbeat_seconds": 1},
                retry={"max_delay_seconds": 0.05},
                limits={"max_result_bytes": MAX_RESULT_BYTES},
                ollama={"num_ctx": 3210, "num_predict": 77},
                models={"local": "small:1b", "cloud": "large:70b"},
                cost=COST,
            )
            yield bench


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    yield shared_bench
    shared_bench.check_worker()


# --- the question ---


@pytest.mark.parametrize(("route", "model"), [("local", "small:1b"), ("cloud", "large:70b")])
def test_each_route_asks_its_model_with_a_bounded_context_and_answer(
    bench: Bench, route: str, model: str
) -> None:
    row = bench.play(f"by way of {route}", requested_route=route)
    (call,) = bench.fake.calls_for(f"by way of {route}")
    assert (call.path, call.body["model"], call.body["stream"]) == ("/api/generate", model, True)
    assert call.body["options"] == {"num_ctx": 3210, "num_predict": 77}
    assert (row["route"], row["model"]) == (route, model)


@pytest.mark.parametrize(("length", "route"), [(100, "local"), (101, "cloud")])
@pytest.mark.parametrize("letter", ["x", "é", "🙂"])
def test_a_prompt_longer_than_the_threshold_goes_to_the_cloud(
    bench: Bench, length: int, route: str, letter: str
) -> None:
    assert bench.play(letter * length)["route"] == route


def test_what_the_submitter_asks_for_goes_before_length_and_depth(bench: Bench) -> None:
    assert bench.play("y" * 200, requested_route="local")["route"] == "local"
    assert bench.play("short and dear", requested_route="cloud")["route"] == "cloud"


@pytest.mark.parametrize(("waiting", "route"), [(5, "local"), (6, "cloud")])
def test_more_due_tasks_than_the_threshold_send_a_claim_to_the_cloud_itself_not_counted(
    processes: Processes, fake: FakeOllama, queue: Queue, waiting: int, route: str
) -> None:
    fake.default = slow()
    queue.submit("not due", delay_seconds=3600)
    batch = queue.submit("first", "second", priority=9)
    queue.submit(*(f"waits {number}" for number in range(waiting)))
    processes.worker("--concurrency", "2")
    calls = fake.wait_for(count=2)
    assert {call.prompt for call in calls} == {"first", "second"}
    fake.release()
    assert [queue.await_final(task_id)["route"] for task_id in batch] == [route, route]


# --- the answer ---


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("a NUL\0here", "a NUL\ufffdhere"),
        ("\0", "\ufffd"),
        ("a lone \ud800 surrogate", "a lone \ufffd surrogate"),
        ("another \udfff", "another \ufffd"),
        ("a pair \ud83d\ude42", "a pair 🙂"),
        ("two the wrong way round \ude42\ud83d", "two the wrong way round \ufffd\ufffd"),
        ("🙂 \u202e \u0000 \ufeff \U0010ffff", "🙂 \u202e \ufffd \ufeff \U0010ffff"),
        (' \\u0000 "quoted" \\ %s %(x)s {} \n', ' \\u0000 "quoted" \\ %s %(x)s {} \n'),
    ],
)
def test_an_answer_of_any_text_is_kept_as_far_as_the_database_can_hold_it(
    bench: Bench, said: str, kept: str
) -> None:
    prompt = f"say {said.encode('ascii', 'backslashreplace')!r}"
    row = bench.play(prompt, answer(said, tokens=1, chunks=1))
    assert (row["status"], row["result"]) == ("SUCCEEDED", {"text": kept}), row["last_error"]


def test_a_pair_of_surrogates_that_comes_in_two_pieces_is_one_character(bench: Bench) -> None:
    row = bench.play("two halves", answer("\ud83d\ude42", tokens=1, chunks=2))
    assert row["result"] == {"text": "🙂"}


def test_thoughts_are_not_the_answer(bench: Bench) -> None:
    row = bench.play("think aloud", thinking("forty-two", "hm, let me see"))
    assert row["result"] == {"text": "forty-two"}


def test_a_model_that_only_thinks_has_not_answered(bench: Bench) -> None:
    row = bench.play("think only", thinking("", "hm"), max_retry=1)
    assert (row["reason"], "empty" in row["last_error"]) == ("max_retry", True)


@pytest.mark.parametrize(
    ("behaviour", "cut"),
    [
        pytest.param(truncated("ok", read=5), True, id="far fewer tokens"),
        pytest.param(answer("ok", prompt_tokens=300), False, id="enough tokens"),
        pytest.param(answer("ok", prompt_tokens=0), False, id="no count"),
    ],
)
def test_a_prompt_of_which_the_model_saw_too_little_is_marked_truncated(
    bench: Bench, behaviour: Behaviour, cut: bool, request: pytest.FixtureRequest
) -> None:
    row = bench.play(f"long prompt, {request.node.callspec.id}: " + "word " * 300, behaviour)
    assert (row["status"], row["truncated"]) == ("SUCCEEDED", cut)
    task_id = row["task_id"]

    def log_line() -> list[str]:
        assert bench.worker is not None
        lines = bench.worker.log.splitlines()
        return [line for line in lines if f"action=succeeded task_id={task_id} " in line]

    (line,) = eventually(log_line)
    assert ("truncated=True" in line) == cut


def test_an_answer_as_long_as_the_limit_is_kept_and_one_byte_more_is_a_dead_letter(
    bench: Bench,
) -> None:
    row = bench.play("as long as can be", huge(MAX_RESULT_BYTES))
    assert (row["status"], len(row["result"]["text"])) == ("SUCCEEDED", MAX_RESULT_BYTES)
    row = bench.play("a byte too long", huge(MAX_RESULT_BYTES + 1))
    assert (row["status"], row["reason"], row["result"]) == ("FAILED", "permanent", None)
    assert "limits.max_result_bytes" in row["last_error"]


def test_an_answer_of_fifty_megabytes_is_not_read_to_its_end(bench: Bench) -> None:
    row = bench.play("an answer of fifty megabytes", huge(50_000_000))
    assert row["reason"] == "permanent"
    assert bench.fake.wait_for("an answer of fifty megabytes", outcome="hung up")


# --- the error ---


def error_line(error: Any) -> Behaviour:
    """A piece, then a line with this error, whatever its type."""

    def play(reply: Reply) -> None:
        reply.piece("It was")
        reply.raw(json.dumps({"error": error}).encode() + b"\n")
        reply.close()

    return play


def body(code: int, data: bytes) -> Behaviour:
    return lambda reply: reply.send(code, data)


ERRORS = {
    "a NUL in mid stream": mid_stream_error("gone\0gone"),
    "a lone surrogate in mid stream": mid_stream_error("gone \ud800 gone"),
    "only NULs in mid stream": mid_stream_error("\0\0"),
    "a megabyte in mid stream": mid_stream_error("long " * 200_000),
    "an object in mid stream": error_line({"code": 7, "why": ["\0", "\udcff"]}),
    "a number in mid stream": error_line(7),
    "nothing in mid stream": error_line(""),
    "an empty body": body(500, b""),
    "invalid UTF-8": body(500, b"\xff\xfe\xc3\x28 gone"),
    "a NUL in the body": body(500, b'{"error": "gone\\u0000gone"}'),
    "a lone surrogate in the body": body(500, b'{"error": "gone \\ud800 gone"}'),
    "raw NULs": body(500, b"\0" * 1000),
    "no object": body(500, b"[1]"),
    "an error that is null": body(500, b'{"error": null}'),
    "fifty megabytes": body(500, b"x" * 50_000_000),
    "a status that does not exist": body(599, b"?"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_any_text_is_recorded_in_words(bench: Bench, name: str) -> None:
    row = bench.play(f"error: {name}", ERRORS[name])
    assert (row["status"], row["reason"], row["retry_count"]) == ("FAILED", "max_retry", 3)
    assert "could not be stored" not in row["last_error"]
    assert "the model server" in row["last_error"]
    assert len(row["last_error"].encode()) <= MAX_ERROR_BYTES
    assert all(len(json.dumps(entry["detail"])) < 6 * MAX_ERROR_BYTES
               for entry in bench.queue.audit(row["task_id"]))  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [b'{"error": "a NUL\\u0000"}', b'{"error": "\\ud800"}', b"\xff" * 100_000, b""],
    ids=["NUL", "surrogate", "not UTF-8", "empty"],
)
@pytest.mark.parametrize("code", [400, 404])
def test_a_permanent_error_of_any_text_is_recorded_in_words(
    bench: Bench, code: int, data: bytes, request: pytest.FixtureRequest
) -> None:
    row = bench.play(f"permanent: {request.node.callspec.id}", body(code, data))
    assert (row["status"], row["reason"]) == ("FAILED", "permanent")
    assert str(code) in row["last_error"]
    assert len(row["last_error"].encode()) <= MAX_ERROR_BYTES


def test_an_error_line_of_fifty_megabytes_does_not_hold_up_the_other_tasks(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """With the limits as they are by default, and leases that would notice a long silence."""
    processes.configure(retry={"max_retry": 1})
    fake.on("fifty megabytes", mid_stream_error("x" * 50_000_000))
    (task_id,) = queue.submit("fifty megabytes")
    others = queue.submit(*(f"task {number}" for number in range(20)))
    processes.worker()
    row = queue.await_final(task_id)
    assert (row["status"], row["attempt"]) == ("FAILED", 1), row["last_error"]
    assert len(row["last_error"].encode()) <= MAX_ERROR_BYTES
    assert [queue.await_final(other)["attempt"] for other in others] == [1] * 20


# --- the price and the time ---


@pytest.mark.parametrize(
    ("route", "cost"),
    [
        ("local", 7 * Decimal("0.00001") + 13 * Decimal("0.000000003")),
        ("cloud", 7 * Decimal("0.0001") + 13 * Decimal("0.0000007")),
    ],
)
def test_the_cost_is_exact_for_prompt_and_completion_tokens(
    bench: Bench, route: str, cost: Decimal
) -> None:
    said = answer("seven tokens", tokens=7, prompt_tokens=13)
    row = bench.play(f"priced on {route}", said, requested_route=route)
    assert row["cost"] == cost
    assert (row["prompt_tokens"], row["completion_tokens"]) == (13, 7)


def test_without_prompt_rates_a_token_costs_what_000_says(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.default = answer("ok", tokens=12345, prompt_tokens=999)
    (local,) = queue.submit("local", requested_route="local")
    (cloud,) = queue.submit("cloud", requested_route="cloud")
    processes.worker()
    assert queue.await_final(local)["cost"] == Decimal("0.12345")
    assert queue.await_final(cloud)["cost"] == Decimal("1.2345")


def test_what_a_failed_attempt_used_is_paid_and_counted_as_well(bench: Bench) -> None:
    nothing = answer("", tokens=5, prompt_tokens=10)
    good = answer("something", tokens=7, prompt_tokens=10)
    row = bench.play("pays twice", nothing, good, requested_route="local")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (20, 12)
    assert row["cost"] == 12 * Decimal("0.00001") + 20 * Decimal("0.000000003")


def test_a_task_whose_calls_told_no_usage_has_no_cost(bench: Bench) -> None:
    assert bench.play("never paid", status(500), max_retry=1)["cost"] is None


def test_the_duration_is_that_of_the_last_attempt(bench: Bench) -> None:
    row = bench.play("slow, then quick", slow(1, then=status(500)), answer("quick"))
    audit = bench.queue.audit(row["task_id"])
    claims = [entry for entry in audit if entry["reason"] == "claimed"]
    (failed,) = [entry for entry in audit if entry["reason"] == "retry"]
    assert failed["at"] < row["started_at"] <= claims[-1]["at"]
    last_attempt = (row["finished_at"] - row["started_at"]).total_seconds()
    assert row["duration_seconds"] == pytest.approx(last_attempt, abs=1e-5)
    assert row["finished_at"] - claims[0]["at"] > row["finished_at"] - row["started_at"]

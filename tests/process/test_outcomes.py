"""What each way to fail means for the task: design.md's table of outcomes, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.conftest import fresh_database
from tests.support.bench import Bench
from tests.support.fake_ollama import (
    FakeOllama,
    answer,
    cut,
    empty,
    garbage,
    mid_stream_error,
    no_done,
    slow,
    status,
)
from tests.support.processes import Processes
from tests.support.queue import Queue


@pytest.fixture(scope="module")
def shared_bench(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with fresh_database(server_url) as url, FakeOllama() as fake, Queue(url) as queue:
        bench = Bench(queue, fake, tmp_path_factory.mktemp("outcomes"))
        with bench.processes:
            # Leases that no pause of the machine ends, and retries that follow at once.
            bench.start(
                worker={"lease_seconds": 60, "heartbeat_seconds": 1},
                retry={"max_delay_seconds": 0.05},
            )
            yield bench


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    yield shared_bench
    shared_bench.check_worker()


FAILURES = {
    "status 500": (status(500, "the runner has died"), "500: the runner has died"),
    "status 418": (status(418, "a teapot"), "418: a teapot"),
    "a cut stream": (cut(), "broke off"),
    "an end without done": (no_done(), "without `done`"),
    "garbage": (garbage(), "not JSON"),
    "an error in mid stream": (mid_stream_error("out of memory"), "out of memory"),
    "an empty answer": (empty(), "empty"),
    "an answer of white space": (answer(" \n\t ", tokens=3), "empty"),
    "a list instead of an object": (garbage(b"[1, 2]\n"), "no object"),
    "a number instead of a text": (garbage(b'{"response": 5, "done": true}\n'), "no text"),
    "a count that is none": (
        garbage(b'{"response": "x", "done": true, "eval_count": -1}\n'),
        "eval_count",
    ),
    "JSON too deep to read": (garbage(b"[" * 200_000 + b"\n"), "not JSON"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_tried_three_times_and_is_then_a_dead_letter(bench: Bench, name: str) -> None:
    behaviour, words = FAILURES[name]
    row = bench.play(f"fails by {name}", behaviour)
    assert (row["status"], row["reason"]) == ("FAILED", "max_retry")
    assert (row["retry_count"], row["delivery_count"], row["attempt"]) == (3, 3, 3)
    assert words in row["last_error"]
    assert row["result"] is None
    assert bench.calls(f"fails by {name}") == 3
    assert bench.queue.story(row["task_id"]) == [
        "created", "claimed", "retry", "claimed", "retry", "claimed", "max_retry",
    ]  # fmt: skip
    details = [entry["detail"] for entry in bench.queue.audit(row["task_id"])]
    assert [words in detail["error"] for detail in details if detail] == [True, True, True]


def test_a_task_that_succeeds_at_its_last_try_keeps_no_error(bench: Bench) -> None:
    row = bench.play("third time lucky", status(500), cut(), answer("at last", tokens=2))
    assert (row["status"], row["retry_count"], row["delivery_count"]) == ("SUCCEEDED", 2, 3)
    assert (row["result"], row["last_error"]) == ({"text": "at last"}, None)


def test_a_task_has_as_many_tries_as_it_asked_for(bench: Bench) -> None:
    row = bench.play("only one try", status(500), max_retry=1)
    assert (row["reason"], row["retry_count"]) == ("max_retry", 1)
    row = bench.play("five tries", *[status(500)] * 4, answer("ok"), max_retry=5)
    assert (row["status"], row["retry_count"]) == ("SUCCEEDED", 4)


def test_the_delays_before_the_second_and_third_try_are_two_and_four_seconds(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("fails", status(500))
    (task_id,) = queue.submit("fails")
    processes.worker()
    queue.await_status(task_id, "FAILED")
    audit = queue.audit(task_id)
    waits = [entry for entry in audit if entry["reason"] == "retry"]
    assert [entry["detail"]["delay_seconds"] for entry in waits] == [2, 4]
    # The audit is written a moment after the instant from which the delay counts.
    starts = [call.started for call in fake.calls_for("fails")]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert all(gap >= delay for gap, delay in zip(gaps, (2, 4), strict=True)), gaps


@pytest.mark.parametrize("begins_to_answer", [True, False])
def test_silence_longer_than_the_timeout_is_a_failure_and_drops_the_call(
    processes: Processes, fake: FakeOllama, queue: Queue, begins_to_answer: bool
) -> None:
    processes.configure(ollama={"timeout_seconds": 0.5}, retry={"max_delay_seconds": 0.05})
    fake.on("silence", slow(first="a piece" if begins_to_answer else None))
    (task_id,) = queue.submit("silence")
    processes.worker()
    row = queue.await_final(task_id)
    assert (row["reason"], row["retry_count"]) == ("max_retry", 3)
    assert "nothing for 0.5 s" in row["last_error"]
    assert len(fake.wait_for("silence", 3, outcome="hung up")) == 3


def test_an_answer_may_take_longer_than_the_timeout_as_long_as_pieces_come(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(ollama={"timeout_seconds": 3})
    fake.on("steady", answer("piece by piece by piece by piece", chunks=32, delay=0.1))
    (task_id,) = queue.submit("steady")
    processes.worker()
    row = queue.await_final(task_id)
    assert (row["status"], row["attempt"]) == ("SUCCEEDED", 1)
    assert row["duration_seconds"] > 3


@pytest.mark.parametrize("code", [400, 404])
def test_a_request_that_can_never_succeed_is_a_dead_letter_at_once(bench: Bench, code: int) -> None:
    row = bench.play(f"refused with {code}", status(code, "scripted"))
    assert (row["status"], row["reason"]) == ("FAILED", "permanent")
    assert f"{code}: scripted" in row["last_error"]
    assert bench.calls(f"refused with {code}") == 1
    assert bench.queue.story(row["task_id"]) == ["created", "claimed", "permanent"]


@pytest.mark.parametrize(("route", "model"), [("local", "llama3.2:latest"), ("cloud", "qwen3:14b")])
def test_a_model_that_is_missing_is_named_with_the_command_that_pulls_it(
    bench: Bench, route: str, model: str
) -> None:
    row = bench.play(f"missing on {route}", status(404, "not found"), requested_route=route)
    assert f"ollama pull {model}" in row["last_error"]


def test_a_task_that_runs_longer_than_its_timeout_is_a_dead_letter(bench: Bench) -> None:
    row = bench.play("runs for ever", slow(first="a piece"), timeout_seconds=0.5)
    assert (row["status"], row["reason"]) == ("FAILED", "deadline")
    assert "longer than 0.5 s" in row["last_error"]
    assert row["duration_seconds"] >= 0.5
    assert len(bench.fake.wait_for("runs for ever", outcome="hung up")) == 1
    assert bench.queue.story(row["task_id"]) == ["created", "claimed", "deadline"]


def test_a_task_meets_its_deadline_even_when_pieces_keep_coming(bench: Bench) -> None:
    babble = answer("x" * 1000, chunks=1000, delay=0.05)
    row = bench.play("babbles for ever", babble, timeout_seconds=0.5)
    assert row["reason"] == "deadline"


def test_a_kind_of_task_that_the_worker_does_not_know_is_a_dead_letter(bench: Bench) -> None:
    row = bench.play("hello", kind="dance")
    assert (row["status"], row["reason"]) == ("FAILED", "permanent")
    assert "'dance'" in row["last_error"]
    assert bench.play("who is still there")["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    "payload", [{}, {"prompt": None}, {"prompt": 5}, {"prompt": ["a", "b"]}, {"prompt": {}}]
)
def test_a_task_whose_prompt_is_no_text_is_a_dead_letter_and_harms_nobody(
    bench: Bench, payload: dict[str, object]
) -> None:
    (task_id,) = bench.queue.submit("", payload=payload)
    row = bench.queue.await_final(task_id)
    assert (row["status"], row["reason"]) == ("FAILED", "permanent"), row["last_error"]
    assert "prompt" in row["last_error"]


@pytest.mark.parametrize("payload", ["[1, 2]", '"text"', "5", "null"])
def test_a_task_whose_payload_is_no_object_is_refused_or_a_dead_letter(
    bench: Bench, payload: str
) -> None:
    insert = "INSERT INTO tasks (kind, payload) VALUES ('prompt', %s::jsonb) RETURNING task_id"
    try:
        (created,) = bench.queue.ask(insert, payload)
    except Exception as refused:
        assert "check constraint" in str(refused)  # noqa: PT017
    else:
        assert bench.queue.await_final(created["task_id"])["reason"] == "permanent"

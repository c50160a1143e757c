"""The model server is away, overloaded or locked: tasks go back, and nothing is burned."""

from __future__ import annotations

import threading

import pytest

from tests.support.fake_ollama import Behaviour, FakeOllama, Reply, answer, echo, loading, status
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue, Row

QUICK = {"lease_seconds": 60, "heartbeat_seconds": 1, "reap_seconds": 0.3}


@pytest.fixture(autouse=True)
def quick_looks(processes: Processes) -> None:
    processes.configure(worker=QUICK)


def hang_up(reply: Reply) -> None:
    """Close the connection before the first byte of an answer."""
    reply.cut()


def await_back(queue: Queue, task_id: int) -> Row:
    """The entry of the audit that says that an outage sent the task back."""

    def look() -> Row:
        backs = [entry for entry in queue.audit(task_id) if entry["reason"] == "outage"]
        assert backs
        return backs[0]

    return eventually(look, what="the task goes back")


def check_finished_unburned(queue: Queue, task_id: int) -> None:
    row = queue.await_final(task_id)
    assert (row["status"], row["last_error"]) == ("SUCCEEDED", None), row
    assert (row["retry_count"], row["delivery_count"]) == (0, 1)
    story = queue.story(task_id)
    assert story[:3] == ["created", "claimed", "outage"]
    assert story[-2:] == ["claimed", "succeeded"]
    assert set(story) == {"created", "claimed", "outage", "succeeded"}
    queue.check()


OUTAGES: dict[str, tuple[Behaviour, str]] = {
    "502": (status(502), "502: scripted"),
    "503": (status(503), "503: scripted"),
    "503 while loading": (loading(), "loading model"),
    "429": (status(429, "slow down", {"Retry-After": "1"}), "429: slow down"),
    "401": (status(401, "unauthorized"), "key"),
    "403": (status(403, "forbidden"), "key"),
    "hang-up before the first byte": (hang_up, "hung up before it answered"),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_sends_the_task_back_unburned_and_it_succeeds_later(
    processes: Processes, fake: FakeOllama, queue: Queue, name: str
) -> None:
    behaviour, words = OUTAGES[name]
    fake.on("patient", [behaviour, echo])
    (task_id,) = queue.submit("patient")
    worker = processes.worker()
    back = await_back(queue, task_id)
    assert words in back["detail"]["error"]
    assert words in worker.log
    check_finished_unburned(queue, task_id)


def test_a_task_that_an_outage_sent_back_is_as_good_as_new(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("patient", status(503, "away", {"Retry-After": "3600"}))
    (task_id,) = queue.submit("patient")
    processes.worker()
    await_back(queue, task_id)
    row = queue.row(task_id)
    assert (row["status"], row["reason"]) == ("PENDING", "outage")
    assert (row["retry_count"], row["delivery_count"], row["attempt"]) == (0, 0, 1)


@pytest.mark.parametrize("code", [429, 503])
def test_a_server_that_says_when_to_come_back_is_obeyed(
    processes: Processes, fake: FakeOllama, queue: Queue, code: int
) -> None:
    fake.on("patient", [status(code, "slow down", {"Retry-After": "2"}), echo])
    (task_id,) = queue.submit("patient")
    processes.worker()
    check_finished_unburned(queue, task_id)
    first, second = fake.calls_for("patient")
    assert second.started - first.started >= 2


@pytest.mark.parametrize(
    "asked", ["0", "soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "9" * 30, "9" * 400, "1e400"]
)
def test_a_senseless_retry_after_is_no_failure(
    processes: Processes, fake: FakeOllama, queue: Queue, asked: str
) -> None:
    fake.on("patient", [status(429, "slow down", {"Retry-After": asked}), echo])
    (task_id,) = queue.submit("patient")
    processes.worker()
    await_back(queue, task_id)
    assert queue.row(task_id)["retry_count"] == 0


def test_a_server_that_dies_in_the_middle_of_an_answer_is_a_failure_and_then_an_outage(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker=QUICK, retry={"max_delay_seconds": 0.1})
    has_begun = threading.Event()

    def begin(reply: Reply) -> None:
        reply.piece("It was going to be")
        has_begun.set()
        reply.wait(None)

    fake.on("piecemeal", [begin, answer("again")])
    (task_id,) = queue.submit("piecemeal")
    processes.worker()
    assert has_begun.wait(60)
    fake.down()
    eventually(lambda: "retry" in queue.story(task_id), what="the broken answer is a failure")
    fake.up()
    row = queue.await_final(task_id)
    assert (row["status"], row["retry_count"]) == ("SUCCEEDED", 1)
    queue.check()


def test_a_prompt_that_alone_is_refused_becomes_a_dead_letter_and_the_others_are_served(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker=QUICK, retry={"max_retry": 1})
    fake.on("flagged", status(429, "not this one"))
    (flagged,) = queue.submit("flagged")
    worker = processes.worker()
    others = []

    def is_over() -> bool:
        others.extend(queue.submit("fine"))
        queue.await_final(others[-1])
        return bool(queue.row(flagged)["status"] == "FAILED")

    eventually(is_over, 90, what="the flagged prompt is a dead letter")
    row = queue.row(flagged)
    assert (row["reason"], row["retry_count"]) == ("max_retry", 1)
    assert "not this one: refused more than 5 times" in row["last_error"]
    assert 5 <= queue.story(flagged).count("outage") <= 10  # as others happen to be served between
    assert {queue.row(task_id)["status"] for task_id in others} == {"SUCCEEDED"}
    assert worker.is_running()
    queue.check()


def test_prompts_that_a_server_refuses_like_all_others_wait_and_nothing_is_burned(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """Probes are answered; every call is refused until the server has had its rest."""
    tasks = queue.submit("one", "two", "three")
    for name in ("one", "two", "three"):
        fake.on(name, [status(503, "overloaded")] * 3 + [echo])
    processes.worker()
    for task_id in tasks:
        check_finished_unburned(queue, task_id)

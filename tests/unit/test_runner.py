"""execution/runner.py: how a call ends, and the verdict that follows. No database."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg2.errors
import pytest

from execution import runner as runner_module
from execution.routes import Routes
from execution.runner import Finished, Runner
from queries.leases import ClaimedTask, Lease, Outcome
from scheduler import decide_route
from tests.conftest import settings_for
from tests.support import fake_ollama
from tests.support.fake_ollama import Behaviour, FakeOllama
from tests.support.ports import free_port
from tests.support.processes import eventually

SETTINGS = settings_for("postgresql://nobody@nowhere/none", ollama={"timeout_seconds": 0.5})
TOKEN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def fake() -> Iterator[FakeOllama]:
    with FakeOllama() as server:
        yield server


def run(url: str, route: str = "local", timeout_seconds: float | None = None) -> Outcome:
    """What comes of one prompt."""
    ollama = {**SETTINGS.ollama.model_dump(), "url": url}
    settings = SETTINGS.model_copy(update={"ollama": type(SETTINGS.ollama)(**ollama)})
    routes = Routes(settings.routing, decide_route)
    runner = Runner(settings, routes, lambda: None, lambda *_: None)
    lease = Lease(1, TOKEN)
    task = ClaimedTask(lease, 1, "prompt", {"prompt": "Hello"}, "auto", timeout_seconds, 1, 1, 0)
    runner.open()
    try:
        runner.start(task, route)
        finished: list[Finished] = eventually(runner.take_finished)
    finally:
        runner.close()
    ((of_lease, outcome),) = finished
    assert of_lease == lease
    return outcome


ENDINGS: dict[str, tuple[Behaviour, str, str]] = {
    "502": (fake_ollama.status(502), "outage", "502"),
    "503": (fake_ollama.status(503), "outage", "503"),
    "429": (fake_ollama.status(429), "outage", "429"),
    "still loading": (fake_ollama.loading(), "outage", "loading"),
    "401": (fake_ollama.status(401), "outage", "key"),
    "403": (fake_ollama.status(403), "outage", "key"),
    "500": (fake_ollama.status(500, "it broke"), "failure", "it broke"),
    "a broken stream": (fake_ollama.cut(), "failure", "broke off"),
    "no done": (fake_ollama.no_done(), "failure", "done"),
    "garbage": (fake_ollama.garbage(), "failure", "not JSON"),
    "an error in the middle": (fake_ollama.mid_stream_error(), "failure", "the runner has died"),
    "an empty answer": (fake_ollama.empty(), "failure", "empty"),
    "400": (fake_ollama.status(400, "bad options"), "permanent", "bad options"),
    "404": (fake_ollama.status(404, "model not found"), "permanent", "ollama pull"),
    "an answer": (fake_ollama.answer("Hi."), "succeeded", ""),
}


@pytest.mark.parametrize(("behaviour", "verdict", "says"), ENDINGS.values(), ids=ENDINGS.keys())
def test_how_a_call_ends_decides_what_becomes_of_its_task(
    fake: FakeOllama, behaviour: Behaviour, verdict: str, says: str
) -> None:
    fake.on("Hello", behaviour)
    outcome = run(fake.url)
    assert outcome.verdict == verdict
    assert outcome.route == "local"  # GET shows it: waiting_for "backend local"
    assert says in (outcome.error or "")
    assert (outcome.error is None) == (verdict == "succeeded")


def test_a_server_that_cannot_be_reached_is_an_outage_of_its_route() -> None:
    outcome = run(f"http://127.0.0.1:{free_port()}", "cloud")
    assert (outcome.verdict, outcome.route) == ("outage", "cloud")
    assert "cannot reach" in (outcome.error or "")


def test_a_task_that_runs_longer_than_it_may_ends_of_its_deadline(fake: FakeOllama) -> None:
    fake.on("Hello", fake_ollama.slow(20))
    outcome = run(fake.url, timeout_seconds=0.2)
    assert (outcome.verdict, outcome.route) == ("deadline", "local")
    assert "0.2 s" in (outcome.error or "")


def test_what_postgres_says_to_a_handler_is_told_without_the_row_that_it_quotes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: Any) -> Outcome:
        raise psycopg2.errors.CheckViolation("refused\nDETAIL:  Failing row contains (a prompt).")

    monkeypatch.setattr(Runner, "_handler", fail)
    assert run("http://127.0.0.1:1").error == "CheckViolation: refused"


# --- the loop --------------------------------------------------------------------------------


@pytest.fixture
def runner() -> Iterator[Runner]:
    settings = SETTINGS
    runner = Runner(settings, Routes(settings.routing, decide_route), lambda: None, lambda *_: None)
    runner.open()
    yield runner
    eventually(lambda: runner._loop.is_closed())


def test_a_probe_that_fails_as_no_probe_should_is_told_and_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library's own error, say: a route that nobody probes any more would never open."""
    routes = Routes(SETTINGS.routing, decide_route)
    pause, told, errors = routes.pause, list[str](), [OverflowError("port must be 0-65535")] * 2

    def pause_shortly(route: str, reason: str, *others: Any) -> float:
        told.append(reason)
        pause(route, reason, *others)
        return 0.01

    async def probe() -> None:
        if errors:
            raise errors.pop()

    runner = Runner(SETTINGS, routes, lambda: None, lambda *_: None)
    monkeypatch.setattr(routes, "pause", pause_shortly)
    for backend in runner._backends.values():
        monkeypatch.setattr(backend, "probe", probe)
    runner.open()
    try:
        eventually(lambda: len(told) == 2 and not routes.paused())
    finally:
        runner.close()
    assert told == ["OverflowError: port must be 0-65535"] * 2


def test_a_loop_that_does_not_answer_is_left_behind_and_ends_when_it_does(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "LONGEST_CLOSE_SECONDS", 0.1)
    blocked, released = threading.Event(), threading.Event()

    def block() -> Any:
        blocked.set()
        released.wait(600)

    runner._loop.call_soon_threadsafe(block)
    assert blocked.wait(60)
    runner.close()
    assert "cannot be closed in order: TimeoutError" in caplog.text
    released.set()


def test_no_outcome_is_lost_or_taken_twice_while_others_are_added(runner: Runner) -> None:
    each, outcome = 5000, Outcome("succeeded")

    def add(first: int) -> None:
        for number in range(first, first + each):
            runner.end(Lease(number, "t"), outcome)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding = [threading.Thread(target=add, args=[n * each]) for n in range(4)]
        for one in adding:
            one.start()
        taken: list[Finished] = []
        while any(one.is_alive() for one in adding):
            taken += runner.take_finished()
        taken += runner.take_finished()
    finally:
        sys.setswitchinterval(before)
        runner.close()
    assert sorted(lease.task_id for lease, _ in taken) == list(range(4 * each))


def test_what_tries_to_end_the_loop_s_thread_does_not(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner._loop.call_soon_threadsafe(sys.exit, 3)
    eventually(lambda: "tried to end the runner" in caplog.text)
    runner.close()
    assert not runner._thread.is_alive()


def test_what_has_ended_already_may_be_stopped(runner: Runner) -> None:
    """By a heartbeat, say, which outlives the work."""
    runner.close()
    runner.stop([Lease(1, TOKEN)])
    runner.drain()


def test_many_that_are_stopped_together_wake_the_loop_once(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: Any) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(runner, "_carry_out", endless)
    leases = [Lease(number, "t") for number in range(500)]
    for one in leases:
        runner.start(ClaimedTask(one, 1, "prompt", {}, "auto", None, 1, 1, 0), "local")
    eventually(lambda: len(runner._running) == len(leases))
    woken: list[Any] = []
    wake = runner._loop.call_soon_threadsafe
    monkeypatch.setattr(
        runner._loop, "call_soon_threadsafe", lambda *what: woken.append(what) or wake(*what)
    )
    runner.stop(leases[:-1])
    runner.stop([])
    taken: list[Finished] = []
    eventually(lambda: taken.extend(runner.take_finished()) or len(taken) == len(leases) - 1)
    # The probes of its routes wake it as well.
    assert len([what for what, *_ in woken if what == runner._cancel]) == 1
    assert {lease for lease, _ in taken} == set(leases[:-1])
    assert {outcome.verdict for _, outcome in taken} == {"released"}
    monkeypatch.undo()
    runner.close()

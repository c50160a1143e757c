"""scheduler.py: how long a worker sleeps, and what its settler keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from errors import DatabaseUnavailable
from queries.leases import ClaimedTask, Lease, Outcome, Settled
from scheduler import Worker
from tests.conftest import settings_for
from tests.support.processes import eventually
from worker.settling import Written


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """One without a database."""
    made = Worker(settings_for("postgresql://nobody@127.0.0.1:1/none"), "w", 4)
    yield made
    made.runner._loop.close()
    for end in (made._doorbell._in, made._doorbell._out):
        end.close()


def test_what_cannot_be_written_keeps_its_slot_and_is_tried_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settler = worker._settler
    task = ClaimedTask(Lease(7, "t"), 7, "tool", {}, "none", None, 1, 1, 0)
    worker.held.add([task])
    worker.runner.end(task.lease, Outcome("succeeded", result=1))

    def away() -> None:
        raise DatabaseUnavailable("it is away")

    monkeypatch.setattr(settler, "_open", away)
    for _ in range(2):
        assert settler._settle_safely()
        assert worker.held.leases() == [task.lease]
        assert len(settler._unsettled) == 1


def test_of_a_batch_what_was_written_is_forgotten_what_is_held_up_stays_and_what_is_gone_is_told(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settler, done = worker._settler, Outcome("succeeded")
    leases = [Lease(number, f"token {number}") for number in range(4)]
    written, held_up, gone, lost_before = leases
    worker.held.add(ClaimedTask(one, 7, "tool", {}, "none", None, 1, 1, 0) for one in leases)
    for lease in leases:
        worker.runner.end(lease, done)
    worker.held.drop_lost([lost_before])  # of which the heartbeat has told already
    settled = Settled(0, None, written.token, "SUCCEEDED", "succeeded", 1, 0, 1, 0, None, False)
    answers = [[Written(settled=[settled]), Written(held=[(held_up, done)])]]
    monkeypatch.setattr(settler, "_open", lambda: None)
    monkeypatch.setattr(settler, "_settle_and_claim", lambda *_: None)
    monkeypatch.setattr("worker.settler.settle_batch", lambda *_: answers.pop())
    told: list[Lease] = []
    monkeypatch.setattr("worker.settler.log_lost", lambda lost, name: told.extend(lost))
    settler._settle()
    assert told == [gone]
    assert worker.held.leases() == [held_up]
    assert settler._unsettled == [(held_up, done)]
    assert not worker.held.drop_lost([held_up])  # it is still being settled


def test_what_tries_to_end_the_settler_s_thread_does_not(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts tasks as well, and so calls tools that return at once, and decide_route."""

    def leave() -> None:
        raise SystemExit(3)

    monkeypatch.setattr(worker._settler, "_settle", leave)
    assert worker._settler._settle_safely() == 1.0
    assert "This settle failed" in caplog.text


def test_what_ends_while_the_settler_writes_is_written_next(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settler, rounds = worker._settler, list[int]()

    def settle() -> None:
        rounds.append(len(rounds))
        if len(rounds) < 3:
            settler.ring()
            settler.ring()  # of many only one is needed

    monkeypatch.setattr(settler, "_settle", settle)
    settler.start()
    settler.ring()
    try:
        eventually(lambda: rounds == [0, 1, 2])
    finally:
        settler.end()


class Sleeper:
    """Wakes a worker as often as it is told to, and then at the end of its sleep."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.wakes: list[tuple[float, bool, set[int]]] = []  # after seconds, by a ring, by senders
        self._heard: set[int] = set()
        monkeypatch.setattr("scheduler.time.monotonic", lambda: self.now)
        monkeypatch.setattr(worker._doorbell, "wait", self._wait)
        monkeypatch.setattr(worker._link, "hear", lambda: (self._heard, []))

    def _wait(self, seconds: float, _: int | None) -> bool:
        after, is_rung, self._heard = self.wakes.pop(0) if self.wakes else (seconds, False, set())
        self.slept.append(seconds)
        self.now += after
        return is_rung


@pytest.fixture
def sleeper(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    worker._sleep_seconds = 7.0
    return Sleeper(worker, monkeypatch)


def test_it_does_not_sleep_on_a_notification_that_came_with_an_answer(
    worker: Worker, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_heard in (True, False):
        monkeypatch.setattr(worker._link, "has_heard", lambda has_heard=has_heard: has_heard)
        sleeper.wakes = [(0.0, False, {1})]
        worker._sleep()
    assert sleeper.slept == [0.0, 7.0]


@pytest.mark.parametrize(("is_rung", "senders"), [(True, set()), (False, {1}), (False, {1, 77})])
def test_a_ring_and_a_notification_of_others_end_its_sleep(
    worker: Worker, sleeper: Sleeper, is_rung: bool, senders: set[int]
) -> None:
    worker.claimer._all_taken_by = 77
    sleeper.wakes = [(1.0, is_rung, senders)]
    worker._sleep()
    assert sleeper.slept == [7.0]


@pytest.mark.parametrize("senders", [{77}, set()], ids=["its own settler's", "of watchers only"])
def test_what_the_settler_has_claimed_itself_and_a_watcher_do_not_end_its_sleep(
    worker: Worker, sleeper: Sleeper, senders: set[int]
) -> None:
    worker.claimer._all_taken_by = 77
    sleeper.wakes = [(1.0, False, senders), (2.0, False, senders)]
    worker._sleep()
    assert sleeper.slept == [7.0, 6.0, 4.0]


def test_a_listener_that_fails_ends_its_sleep(
    worker: Worker, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise DatabaseUnavailable("it is away")

    monkeypatch.setattr(worker._link, "hear", fail)
    sleeper.wakes = [(1.0, False, set())]
    worker._sleep()
    assert sleeper.slept == [7.0]

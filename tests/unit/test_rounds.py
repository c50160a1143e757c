"""scheduler.py: when a worker looks for work, and when it lets other duties have their turn."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from errors import DatabaseUnavailable
from queries.claims import Claim
from queries.leases import ClaimedTask, Lease, Outcome, Settled
from scheduler import FULL_ROUTE_POLL_SECONDS, Worker
from tests.conftest import settings_for
from tests.support.processes import eventually
from worker.settling import Written

MOST_CLAIMS = 100


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """One without a database; whatever it claims ends at once."""
    made = Worker(settings_for("postgresql://nobody@127.0.0.1:1/none"), "w", 4)
    monkeypatch.setattr(made, "_start", lambda *_: None)
    made._next_reap = math.inf
    yield made
    made.runner._loop.close()
    for end in (made._doorbell._in, made._doorbell._out):
        end.close()


def claims_of(worker: Worker, monkeypatch: pytest.MonkeyPatch, depth: int) -> list[int]:
    """Let each claim bring one of so many due tasks; the depth that each has seen."""
    seen: list[int] = []

    def claim(conn: Any, free: int) -> Claim:
        assert len(seen) < MOST_CLAIMS
        left = depth - len(seen)
        seen.append(left)
        task = ClaimedTask(Lease(left, "t"), left, "tool", {}, "none", None, 1, 1, 0)
        return Claim([(task, None)] if left else [], is_any_left=left > 1)

    monkeypatch.setattr(worker, "_claim", claim)
    worker.claim_and_start(None)  # type: ignore[arg-type]
    return seen


def test_it_claims_until_it_has_all_that_was_due_and_looks_no_more(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claims_of(worker, monkeypatch, depth=3) == [3, 2, 1]


def test_a_worker_whose_slots_are_free_again_at_once_still_comes_to_its_other_duties(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._next_reap = time.monotonic()
    assert claims_of(worker, monkeypatch, depth=50) == [50]
    assert worker._sleep_seconds == 0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_settle_wakes_a_worker_that_left_nothing_only_for_what_comes_back(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    rings: list[None] = []
    claims_of(worker, monkeypatch, depth)
    monkeypatch.setattr(worker._doorbell, "ring", lambda: rings.append(None))
    worker._note_free_slots(False)
    assert not rings
    worker._note_free_slots(True)
    assert rings


@pytest.mark.parametrize("is_any_left", [False, True])
def test_a_settle_while_a_claim_is_under_way_leads_to_another_only_if_something_is_left(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, is_any_left: bool
) -> None:
    """In a chain that look would stand in the way of the next step."""
    rings: list[None] = []
    monkeypatch.setattr(worker._doorbell, "ring", lambda: rings.append(None))
    tasks = [ClaimedTask(Lease(n, "t"), n, "tool", {}, "none", None, 1, 1, 0) for n in range(4)]
    claims: list[int] = []

    def claim(conn: Any, free: int) -> Claim:
        claims.append(free)
        if len(claims) > 1:
            return Claim([])
        worker.held.add(tasks)  # all slots are taken
        worker.held.begin_settling([tasks[0].lease])
        worker.held.drop_settled([tasks[0].lease])
        worker._note_free_slots(False)
        return Claim([(task, None) for task in tasks], is_any_left=is_any_left)

    monkeypatch.setattr(worker, "_claim", claim)
    worker.claim_and_start(None)  # type: ignore[arg-type]
    assert claims == ([4, 1] if is_any_left else [4])
    assert not rings


def test_a_settle_wakes_a_worker_that_has_no_slot_free(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[None] = []
    monkeypatch.setattr(worker._doorbell, "ring", lambda: rings.append(None))
    tasks = [ClaimedTask(Lease(n, "t"), n, "tool", {}, "none", None, 1, 1, 0) for n in range(4)]
    worker.held.add(tasks)
    worker.claim_and_start(None)  # type: ignore[arg-type]
    worker._note_free_slots(False)
    assert rings


def test_a_slot_that_comes_free_in_the_last_moment_is_seen_or_told_of(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the slots and the worker's wish to be told of the next."""

    class Counted:
        def __init__(self) -> None:
            self.looks = 0

        def __len__(self) -> int:
            self.looks += 1
            if self.looks == 1:
                worker._note_free_slots(False)  # behind this look
                return 4
            return 3

    seen: list[int] = []

    def claim(conn: Any, free: int) -> Claim:
        seen.append(free)
        return Claim([])

    monkeypatch.setattr(worker, "held", Counted())
    monkeypatch.setattr(worker, "_claim", claim)
    worker.claim_and_start(None)  # type: ignore[arg-type]
    assert seen == [1]


@pytest.mark.parametrize("claimed", [0, 1])
def test_the_end_of_a_call_wakes_a_worker_that_left_something_to_a_full_route(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, claimed: int
) -> None:
    """What waits for a place is in no claim, whatever else that brings."""
    task = ClaimedTask(Lease(7, "t"), 7, "tool", {}, "none", None, 1, 1, 0)
    brings = [Claim([(task, None)] * claimed, depth=2), Claim([], depth=2)]
    monkeypatch.setattr(worker, "_claim", lambda conn, free: brings.pop(0))
    worker.routes.has_limits = True
    worker._sleep_seconds = 60.0
    worker.claim_and_start(None)  # type: ignore[arg-type]
    assert worker._sleep_seconds <= FULL_ROUTE_POLL_SECONDS
    rings: list[None] = []
    monkeypatch.setattr(worker._doorbell, "ring", lambda: rings.append(None))
    worker._note_free_slots(False)
    assert rings


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
    monkeypatch.setattr("worker.settler.settle_batch", lambda *_: answers.pop())
    told: list[Lease] = []
    monkeypatch.setattr("worker.settler.log_lost", lambda lost, name: told.extend(lost))
    settler._settle()
    assert told == [gone]
    assert worker.held.leases() == [held_up]
    assert settler._unsettled == [(held_up, done)]
    assert not worker.held.drop_lost([held_up])  # it is still being settled


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


def test_it_does_not_sleep_on_a_notification_that_came_with_an_answer(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(worker._doorbell, "wait", lambda seconds, _: slept.append(seconds))
    worker._sleep_seconds = 7.0
    for has_heard in (True, False):
        monkeypatch.setattr(worker._link, "has_heard", lambda has_heard=has_heard: has_heard)
        worker._sleep()
    assert slept == [0.0, 7.0]


def test_a_claim_is_logged_before_its_work_begins(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that the log names a task that takes its process down at once."""
    caplog.set_level(logging.INFO)
    logged: list[int] = []
    monkeypatch.setattr(worker, "_start", lambda *_: logged.append(caplog.text.count("Claimed")))
    claims_of(worker, monkeypatch, depth=2)
    assert logged == [1, 2]

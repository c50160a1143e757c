"""worker/claiming.py: when a worker claims, and what it leaves to others of its threads."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg2.errors
import pytest

from errors import DatabaseUnavailable
from queries.claims import Claim
from queries.leases import ClaimedTask, Lease, Outcome, Settled
from scheduler import Worker
from tests.conftest import settings_for
from worker.claiming import FULL_ROUTE_POLL_SECONDS, Claimer
from worker.settling import Finished

MOST_CLAIMS = 100
SLOTS = 4


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One without a database."""
    made = Worker(settings_for("postgresql://nobody@127.0.0.1:1/none"), "w", SLOTS)
    yield made
    made.runner._loop.close()
    for end in (made._doorbell._in, made._doorbell._out):
        end.close()


@pytest.fixture
def rings() -> list[None]:
    """One for each time that the main thread is told to claim."""
    return []


@pytest.fixture
def claimer(worker: Worker, monkeypatch: pytest.MonkeyPatch, rings: list[None]) -> Claimer:
    """Whatever it starts ends at once."""
    claimer = worker.claimer

    def end(conn: Any, task: ClaimedTask, route: str | None) -> None:
        claimer._held.drop_settled([task.lease])

    monkeypatch.setattr(claimer, "_start", end)
    monkeypatch.setattr(claimer, "_on_left", lambda: rings.append(None))
    return claimer


def task_of(number: int, run_id: int | None = None) -> ClaimedTask:
    lease = Lease(number, f"token {number}", run_id)
    return ClaimedTask(lease, run_id or number, "tool", {}, "none", None, 1, 1, 0)


def brought(*numbers: int, **others: Any) -> Claim:
    return Claim([(task_of(number), None) for number in numbers], **others)


def claim_and_start(claimer: Claimer, until: float = math.inf) -> float:
    return claimer.claim_and_start(None, until)  # type: ignore[arg-type]


def one_by_one(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, depth: int, until: float = math.inf
) -> tuple[list[int], float]:
    """Let each claim bring one of so many due tasks; the depth that each has seen, the pause."""
    seen: list[int] = []

    def claim(conn: Any, slots: int) -> Claim:
        assert len(seen) < MOST_CLAIMS
        left = depth - len(seen)
        seen.append(left)
        return brought(*[left] if left else [], is_any_left=left > 1)

    monkeypatch.setattr(claimer, "_claim", claim)
    pause_seconds = claim_and_start(claimer, until)
    return seen, pause_seconds


# --- the main thread -------------------------------------------------------------------------


def test_it_claims_until_it_has_all_that_was_due_and_looks_no_more(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one_by_one(claimer, monkeypatch, depth=3) == ([3, 2, 1], math.inf)


def test_a_worker_whose_slots_are_free_again_at_once_still_comes_to_its_other_duties(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one_by_one(claimer, monkeypatch, depth=50, until=time.monotonic()) == ([50], 0.0)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_settle_wakes_a_worker_that_left_nothing_only_for_what_comes_back(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, rings: list[None], depth: int
) -> None:
    one_by_one(claimer, monkeypatch, depth)
    claimer.note_free_slots(False)
    assert not rings
    claimer.note_free_slots(True)
    assert rings


@pytest.mark.parametrize("is_any_left", [False, True])
def test_a_settle_while_a_claim_is_under_way_leads_to_another_only_if_something_is_left(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, rings: list[None], is_any_left: bool
) -> None:
    """In a chain that look would stand in the way of the next step."""
    claims: list[int] = []

    def claim(conn: Any, slots: int) -> Claim:
        claims.append(slots)
        return brought() if len(claims) > 1 else brought(1, 2, 3, 4, is_any_left=is_any_left)

    def start(conn: Any, task: ClaimedTask, route: str | None) -> None:
        if task.task_id == 1:  # all slots were taken
            claimer._held.begin_settling([task.lease])
            claimer._held.drop_settled([task.lease])
            claimer.note_free_slots(False)

    monkeypatch.setattr(claimer, "_claim", claim)
    monkeypatch.setattr(claimer, "_start", start)
    claim_and_start(claimer)
    assert claims == ([4, 1] if is_any_left else [4])
    assert not rings


def test_a_settle_wakes_a_worker_that_had_no_slot_free(claimer: Claimer, rings: list[None]) -> None:
    tasks = [task_of(number) for number in range(SLOTS)]
    claimer._held.add(tasks)
    claim_and_start(claimer)
    claimer.note_free_slots(False)
    assert not rings  # of the slot that was free somebody has made use
    claimer._held.drop_settled([tasks[0].lease])
    claimer.note_free_slots(False)
    assert rings


def test_a_slot_that_comes_free_in_the_last_moment_is_seen_or_told_of(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the slots and the worker's wish to be told of the next."""

    class Counted:
        def __init__(self) -> None:
            self.looks = 0

        def __len__(self) -> int:
            self.looks += 1
            if self.looks == 1:
                claimer.note_free_slots(False)  # behind this look
                return 4
            return 3

        def leases(self) -> list[Lease]:
            return []

        drop_lost = add = lambda self, _: []

    seen: list[int] = []
    monkeypatch.setattr(claimer, "_held", Counted())
    monkeypatch.setattr(claimer, "_claim", lambda conn, slots: seen.append(slots) or brought())
    claim_and_start(claimer)
    assert seen == [1]


@pytest.mark.parametrize("claimed", [0, 1])
def test_the_end_of_a_call_wakes_a_worker_that_left_something_to_a_full_route(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, rings: list[None], claimed: int
) -> None:
    """What waits for a place is in no claim, whatever else that brings."""
    brings = [brought(*[7] * claimed, depth=2), brought(depth=2)]
    monkeypatch.setattr(claimer, "_claim", lambda conn, slots: brings.pop(0))
    claimer._policy.has_limits = True
    assert claim_and_start(claimer) <= FULL_ROUTE_POLL_SECONDS
    claimer.note_free_slots(False)
    assert rings


def test_a_claim_is_logged_before_its_work_begins(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that the log names a task that takes its process down at once."""
    caplog.set_level(logging.INFO)
    logged: list[int] = []
    monkeypatch.setattr(claimer, "_start", lambda *_: logged.append(caplog.text.count("Claimed")))
    one_by_one(claimer, monkeypatch, depth=2)
    assert logged == [1, 2]


# --- the settler -----------------------------------------------------------------------------

CONN: Any = SimpleNamespace(
    closed=False, lock_timeout_seconds=1.0, info=SimpleNamespace(backend_pid=77)
)


def ended(*tasks: ClaimedTask) -> list[Finished]:
    return [(task.lease, Outcome("succeeded")) for task in tasks]


def settled(task: ClaimedTask) -> Settled:
    token = task.lease.token
    return Settled(task.task_id, None, token, "SUCCEEDED", "succeeded", 1, 0, 1, None, None, False)


@pytest.fixture
def step(claimer: Claimer) -> ClaimedTask:
    """A step that runs, and has ended now."""
    task = task_of(7, run_id=6)
    claimer._held.add([task])
    claimer._held.begin_settling([task.lease])
    return task


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Postgres answers to settles that claim: outcomes and a claim, or an error."""
    prepared: list[Any] = []

    def answer(*_: Any) -> Any:
        answer = prepared.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    monkeypatch.setattr("worker.claiming.claims.settle_and_claim", answer)
    return prepared


def started(claimer: Claimer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    numbers: list[int] = []
    monkeypatch.setattr(claimer, "_start", lambda conn, task, route: numbers.append(task.task_id))
    return numbers


def test_the_settle_of_a_step_starts_what_it_has_claimed_and_says_what_it_has_settled(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, answers: list[Any], step: ClaimedTask
) -> None:
    numbers = started(claimer, monkeypatch)
    answers.append(([settled(step)], brought(8)))
    assert claimer.settle_and_claim(CONN, ended(step)) == [settled(step)]
    assert numbers == [8]
    assert claimer._held.leases() == [step.lease, task_of(8).lease]


def test_a_notification_of_what_the_settler_has_claimed_is_no_news_and_any_other_is(
    claimer: Claimer, answers: list[Any], step: ClaimedTask
) -> None:
    assert not claimer.is_left(set())
    assert claimer.is_left({77})
    answers.append(([], brought(8)))
    claimer.settle_and_claim(CONN, ended(step))
    assert not claimer.is_left({77})
    assert claimer.is_left({77, 78})
    assert claimer.is_left({78})
    claimer._held.add([task_of(number) for number in range(20, 20 + SLOTS)])
    claim_and_start(claimer)  # by which time another backend can have that number
    assert claimer.is_left({77})


def test_while_the_settler_claims_nobody_says_whether_something_is_left(
    claimer: Claimer, answers: list[Any], step: ClaimedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notification can be heard before its answer."""
    monkeypatch.setattr("worker.claiming.TURN_SECONDS", 20.0)
    told: list[bool] = []
    asks = threading.Thread(target=lambda: told.append(claimer.is_left({77})))

    def answer() -> Any:
        asks.start()
        asks.join(0.2)
        assert asks.is_alive()
        return [], brought(8)

    answers.append(answer)
    claimer.settle_and_claim(CONN, ended(step))
    asks.join(20)
    assert told == [False]


def test_a_notification_that_is_heard_while_the_next_step_ends_is_no_news_either(
    claimer: Claimer, answers: list[Any], step: ClaimedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short steps end sooner than the main thread hears of them: it would claim at every hop."""
    told: list[bool] = []

    def is_worth_a_claim(_: Any) -> bool:
        told.append(claimer.is_left({77}))
        return True

    answers += [([], brought(8)), ([], brought(9))]
    claimer.settle_and_claim(CONN, ended(step))
    monkeypatch.setattr(claimer, "_is_worth_a_claim", is_worth_a_claim)
    claimer.settle_and_claim(CONN, ended(step))
    assert told == [False]
    assert not claimer.is_left({77})


def unfit(claimer: Claimer, step: ClaimedTask) -> dict[str, Callable[[], list[Finished]]]:
    def stopped() -> list[Finished]:
        claimer.stop()
        return ended(step)

    def alone() -> list[Finished]:
        claimer._alone = True
        return ended(step)

    lone, other = task_of(7), task_of(9, run_id=6)
    claimer._held.add([lone, other])

    return {
        "of two": lambda: ended(step, other),
        "stopped": stopped,
        "of a lone task": lambda: ended(lone),
        "a suspect's process": alone,
    }


@pytest.mark.parametrize("case", ["of two", "stopped", "of a lone task", "a suspect's process"])
def test_some_settles_claim_nothing(
    claimer: Claimer, answers: list[Any], step: ClaimedTask, case: str
) -> None:
    claimer._all_taken_by = 77
    answers.append(([], brought(8)))
    assert claimer.settle_and_claim(CONN, unfit(claimer, step)[case]()) is None
    assert answers  # nobody was asked
    assert claimer.is_left({77})  # of what such a settle makes due, too


def test_while_the_main_thread_claims_a_settle_claims_nothing_and_does_not_wait(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, answers: list[Any], step: ClaimedTask
) -> None:
    answers.append(AssertionError("two claims at a time"))
    found: list[Any] = []

    def claim(conn: Any, slots: int) -> Claim:
        settler = threading.Thread(
            target=lambda: found.append(claimer.settle_and_claim(CONN, ended(step)))
        )
        settler.start()
        settler.join(20)
        return brought()

    monkeypatch.setattr(claimer, "_claim", claim)
    claim_and_start(claimer)
    assert found == [None]


@pytest.mark.parametrize("failed", [DatabaseUnavailable("a lock"), ValueError("a result")])
def test_what_cannot_be_done_together_is_left_to_be_done_apart(
    claimer: Claimer, answers: list[Any], rings: list[None], step: ClaimedTask, failed: Exception
) -> None:
    answers.append(failed)
    assert claimer.settle_and_claim(CONN, ended(step)) is None
    assert rings  # the main thread is to claim
    assert claimer.is_left({77})
    assert not claimer._turn.locked()


def test_a_connection_that_breaks_in_the_middle_is_no_reason_to_use_it_again(
    claimer: Claimer, answers: list[Any], rings: list[None], step: ClaimedTask
) -> None:
    answers.append(DatabaseUnavailable("it is away"))
    broken: Any = SimpleNamespace(**{**vars(CONN), "closed": True})
    with pytest.raises(DatabaseUnavailable):
        claimer.settle_and_claim(broken, ended(step))
    assert rings
    assert not claimer._turn.locked()


def test_what_such_a_claim_leaves_is_the_main_thread_s(
    claimer: Claimer, answers: list[Any], rings: list[None], step: ClaimedTask
) -> None:
    answers.append(([], brought(8, is_any_left=True)))
    claimer.settle_and_claim(CONN, ended(step))
    assert claimer.is_left({77})
    claimer.note_free_slots(False)
    assert rings


def test_what_the_settler_s_claim_did_not_find_the_main_thread_may_have_left_before(
    claimer: Claimer, answers: list[Any], rings: list[None], step: ClaimedTask
) -> None:
    """The settler asks, the main thread fills its slots and leaves some, then comes the answer."""

    def answer() -> Any:
        claimer._wants_slots = True
        return [], brought()

    answers.append(answer)
    claimer._wants_slots = False
    claimer.settle_and_claim(CONN, ended(step))
    claimer._held.drop_settled([step.lease])
    claimer.note_free_slots(False)
    assert rings


def test_a_lease_that_was_found_lost_has_no_slot_to_fill(
    claimer: Claimer, answers: list[Any], step: ClaimedTask
) -> None:
    """Its slot is free already, or another's: its late outcome must not claim for it once more."""
    claimer._held.drop_settled([step.lease])
    answers.append(([], brought(8)))
    assert claimer.settle_and_claim(CONN, ended(step)) is None
    assert answers  # nobody was asked


def test_a_worker_that_holds_more_than_it_has_slots_for_fills_none(
    claimer: Claimer, answers: list[Any], step: ClaimedTask
) -> None:
    claimer._held.add(task_of(number) for number in range(20, 20 + SLOTS))
    answers.append(([], brought(8)))
    assert claimer.settle_and_claim(CONN, ended(step)) is None
    assert answers  # nobody was asked


def test_a_suspect_that_the_settler_sees_gets_its_process_though_no_slot_is_free(
    claimer: Claimer, answers: list[Any], rings: list[None], step: ClaimedTask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    begun: list[None] = []
    monkeypatch.setattr(claimer, "_on_suspect", lambda: begun.append(None))
    answers.append(([settled(step)], brought(8, has_suspect=True)))
    claimer._held.add(task_of(number) for number in range(20, 20 + SLOTS - 1))
    claimer.settle_and_claim(CONN, ended(step))
    assert rings
    assert not begun  # by the settler, who may not
    claim_and_start(claimer)
    assert begun == [None]
    claim_and_start(claimer)
    assert begun == [None]


def test_the_main_thread_is_told_of_what_is_due_sooner_than_it_knows(
    claimer: Claimer, answers: list[Any], rings: list[None], step: ClaimedTask
) -> None:
    """A retry of a full worker, which has to be claimed though nobody notifies of it."""
    claimer._held.add(task_of(number) for number in range(20, 20 + SLOTS - 1))
    assert claim_and_start(claimer) == math.inf
    answers.append(([], brought(next_due_seconds=2.0)))
    claimer.settle_and_claim(CONN, ended(step))
    assert rings.pop() is None
    assert 1.5 < claim_and_start(claimer) <= 2.0
    answers.append(([], brought(next_due_seconds=2.0)))
    claimer.settle_and_claim(CONN, ended(step))
    assert not rings  # it knows


def test_what_has_become_due_meanwhile_is_awaited_no_longer(
    claimer: Claimer, answers: list[Any], step: ClaimedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.append(([], brought(next_due_seconds=2.0)))
    claimer.settle_and_claim(CONN, ended(step))
    claimer._held.add(task_of(number) for number in range(20, 20 + SLOTS))
    later = time.monotonic() + 3
    monkeypatch.setattr("worker.claiming.time.monotonic", lambda: later)
    assert claim_and_start(claimer) == math.inf
    assert claimer._wants_slots  # the next slot's claim sees it


def test_the_main_thread_waits_no_longer_than_a_moment_for_a_settler_without_an_answer(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, answers: list[Any], step: ClaimedTask
) -> None:
    """Its connection is silent. What is due is claimed all the same, and every ring is news."""
    may_answer, is_asked = threading.Event(), threading.Event()

    def answer() -> Any:
        is_asked.set()
        may_answer.wait(20)
        return [settled(step)], brought(8)

    answers.append(answer)
    numbers = started(claimer, monkeypatch)
    settler = threading.Thread(target=claimer.settle_and_claim, args=[CONN, ended(step)])
    settler.start()
    assert is_asked.wait(20)
    assert claimer.is_left({77})
    assert one_by_one(claimer, monkeypatch, depth=2)[0] == [2, 1]
    may_answer.set()
    settler.join(20)
    assert numbers == [2, 1, 8]
    assert not claimer._turn.locked()


def test_what_was_claimed_while_a_stop_came_is_handed_back_at_once(
    worker: Worker, answers: list[Any], step: ClaimedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.claimer, "_start", partial(Claimer._start, worker.claimer))

    def answer() -> Any:
        worker.claimer.stop()
        return [settled(step)], brought(8)

    answers.append(answer)
    worker.claimer.settle_and_claim(CONN, ended(step))
    ((lease, outcome),) = worker.runner.take_finished()
    assert (lease, outcome.verdict) == (task_of(8).lease, "released")


AWAY = DatabaseUnavailable("it is away")
REFUSED = psycopg2.errors.CheckViolation("it is refused\nDETAIL:  Failing row contains (a prompt).")


def routes_meet(failed: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever notes the routes of a claim meets this."""

    def fail(*_: Any) -> None:
        raise failed

    monkeypatch.setattr("worker.claiming.claims.note_routes", fail)


@pytest.mark.parametrize("failed", [AWAY, REFUSED])
def test_a_route_that_cannot_be_noted_takes_nothing_back(
    claimer: Claimer,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[Any],
    step: ClaimedTask,
    failed: Exception,
) -> None:
    numbers = started(claimer, monkeypatch)
    routes_meet(failed, monkeypatch)
    claimer._wants_slots = True
    answers.append(([settled(step)], brought(8)))
    assert claimer.settle_and_claim(CONN, ended(step)) == [settled(step)]
    assert numbers == [8]
    assert not claimer.is_left({77})  # it has gone on behind that


def test_a_row_that_refuses_its_route_ends_no_round_and_is_said_in_one_line(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    routes_meet(REFUSED, monkeypatch)
    coming = [
        Claim([(task_of(1), "local"), (task_of(2), None), (task_of(3), "cloud")], is_any_left=True),
        brought(4, next_due_seconds=7.0),
    ]
    numbers = started(claimer, monkeypatch)
    monkeypatch.setattr(claimer, "_claim", lambda conn, slots: coming.pop(0))
    monkeypatch.setattr(claimer, "_concurrency", 10)
    assert claim_and_start(claimer) == pytest.approx(7.0, abs=0.5)
    assert numbers == [1, 2, 3, 4]
    first, _ = [record.getMessage() for record in caplog.records if record.name == "scheduler"]
    assert first == "The routes of 2 tasks are not noted: it is refused"


def test_a_database_that_is_away_behind_a_claim_ends_the_round(
    claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection may be gone."""
    routes_meet(AWAY, monkeypatch)
    numbers, coming = started(claimer, monkeypatch), [brought(1, is_any_left=True)]
    monkeypatch.setattr(claimer, "_claim", lambda conn, slots: coming.pop())
    with pytest.raises(DatabaseUnavailable):
        claim_and_start(claimer)
    assert numbers == [1]
    assert not claimer._turn.locked()

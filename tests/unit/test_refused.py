"""worker/refused.py: whose fault it is that an outcome is refused, its own or the database's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from queries.leases import Lease, Outcome, Settled
from worker.refused import TRY_AGAIN_SECONDS, Refused
from worker.settling import Finished, Written

FINISHED: list[Finished] = [
    (Lease(number, f"token {number}"), Outcome("succeeded")) for number in range(4)
]
BAD, *GOOD = FINISHED
A_MINUTE_OF_SECONDS = 60


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test turns."""
    now = [0.0]
    monkeypatch.setattr("worker.refused.time.monotonic", lambda: now[0])
    return now


def stored(pair: Finished) -> Written:
    lease, _ = pair
    return Written([Settled(lease.task_id, None, lease.token, "", "", 1, 0, 1, 0, None, False)])


def refused(pair: Finished) -> Written:
    return Written(refused=[(pair, "it cannot be")])


def given_up(
    now: list[float], batch_size: int, is_refused: Callable[[int, Finished], bool]
) -> list[Finished]:
    """Write all in batches for a minute, each write with its number; what is given up of them."""
    keeper, tries, given_up = Refused(), 0, list[Finished]()
    unsettled = list(FINISHED)
    for _ in range(A_MINUTE_OF_SECONDS):
        while unsettled:
            batch, unsettled = unsettled[:batch_size], unsettled[batch_size:]
            parts = []
            for pair in batch:
                parts.append(refused(pair) if is_refused(tries, pair) else stored(pair))
                tries += 1
            kept = keeper.note(parts)
            ended = [pair for pair in batch if pair not in kept]
            given_up += [pair for pair in ended if stored(pair) not in parts]
            keeper.forget(lease for lease, _ in ended)
        now[0] += TRY_AGAIN_SECONDS
        unsettled = keeper.take_due()
    return given_up


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_while_nothing_can_be_stored_for_a_time_nothing_is_given_up_wherever_that_begins_and_ends(
    now: list[float], batch_size: int
) -> None:
    for begins in range(5):
        for ends in range(begins, 20):
            outage = range(begins, ends)
            assert given_up(now, batch_size, lambda tries, _: tries in outage) == []  # noqa: B023


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("place", range(3))
def test_what_is_always_refused_is_given_up_once_another_is_stored_behind_it(
    now: list[float], batch_size: int, place: int
) -> None:
    bad = FINISHED[place]
    assert given_up(now, batch_size, lambda _, pair: pair == bad) == [bad]


def test_what_is_always_refused_and_alone_or_last_is_kept(now: list[float]) -> None:
    assert given_up(now, 4, lambda *_: True) == []
    assert given_up(now, 4, lambda _, pair: pair == FINISHED[-1]) == []


def test_all_that_was_refused_in_a_second_is_tried_again_a_second_after_the_first(
    now: list[float],
) -> None:
    keeper = Refused()
    assert keeper.pause_seconds() is None
    keeper.note([refused(BAD)])
    now[0] = TRY_AGAIN_SECONDS / 2
    keeper.note([refused(GOOD[0])])
    assert keeper.take_due() == []
    assert keeper.pause_seconds() == TRY_AGAIN_SECONDS / 2
    now[0] = TRY_AGAIN_SECONDS
    assert keeper.take_due() == [BAD, GOOD[0]]
    assert keeper.take_due() == []
    assert keeper.pause_seconds() is None


def test_what_has_ended_is_remembered_no_longer() -> None:
    keeper = Refused()
    keeper.note([refused(pair) for pair in FINISHED])
    keeper.forget(lease for lease, _ in FINISHED)
    assert not keeper._stored_before

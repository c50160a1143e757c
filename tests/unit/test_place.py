"""worker/place.py: where the next claim begins, and how soon one looks at everything again."""

from __future__ import annotations

import pytest

from queries.claims import Claim
from worker import place
from worker.place import LONGEST_SECONDS, SHORTEST_SECONDS, Place

FULL = Claim([], last_tenant="t1", next_from=700)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(place.time, "monotonic", lambda: now[0])
    return now


def test_the_first_claim_looks_at_everything(clock: list[float]) -> None:
    assert Place().begins()[1] == 0


def test_a_claim_begins_where_the_one_before_said_that_it_may(clock: list[float]) -> None:
    here = Place()
    here.note(FULL, seconds=0.001)
    assert here.begins() == ("t1", 700)
    here.note(Claim([]), seconds=0.001)
    assert here.begins() == ("", 0)


@pytest.mark.parametrize(
    ("took", "pause"),
    [(0.001, SHORTEST_SECONDS), (0.05, 1.0), (10.0, LONGEST_SECONDS)],
    ids=["at least so long", "twenty times as long as it took", "at most so long"],
)
def test_now_and_then_a_claim_looks_at_everything(
    clock: list[float], took: float, pause: float
) -> None:
    here = Place()
    here.begins()
    here.note(FULL, took)
    for instant in (1000 + pause / 2, 1000 + pause - 0.01):
        clock[0] = instant
        assert here.begins()[1] == 700
        here.note(FULL, seconds=0.001)  # which puts nothing off
    clock[0] = 1000 + pause
    assert here.begins()[1] == 0

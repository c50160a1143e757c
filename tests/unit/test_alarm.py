"""An alarm rings when nothing has put it off for long enough."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from api import alarm
from api.alarm import Alarm

SECONDS = 10.0


class Clock:
    """Stands for the event loop: its time goes on only when it is told so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: dict[float, Callable[[], None]] = {}

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> SimpleNamespace:
        self.calls[when] = call
        return SimpleNamespace(cancel=lambda: self.calls.pop(when, None))

    def call_later(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        return self.call_at(self.now + seconds, call)

    def pass_by(self, seconds: float) -> None:
        until = self.now + seconds
        while self.calls and min(self.calls) <= until:
            self.now = min(self.calls)
            self.calls.pop(self.now)()
        self.now = until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(alarm, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    return clock


@pytest.fixture
def rung(clock: Clock) -> list[float]:
    """The instants at which it has rung."""
    return []


@pytest.fixture
def one(clock: Clock, rung: list[float]) -> Alarm:
    return Alarm(SECONDS, lambda: rung.append(clock.now))


def test_an_alarm_that_was_set_rings_in_time_and_then_again(
    one: Alarm, clock: Clock, rung: list[float]
) -> None:
    one.set()
    clock.pass_by(25)
    assert rung == [10, 20]


def test_an_alarm_that_was_not_set_never_rings(one: Alarm, clock: Clock, rung: list[float]) -> None:
    clock.pass_by(100)
    assert rung == []


def test_an_alarm_set_between_two_looks_rings_a_full_time_later(
    one: Alarm, clock: Clock, rung: list[float]
) -> None:
    clock.pass_by(15)
    one.set()
    clock.pass_by(20)
    assert rung == [25, 35]


def test_an_alarm_that_is_set_again_and_again_never_rings_and_hardly_looks(
    one: Alarm, clock: Clock, rung: list[float]
) -> None:
    for _ in range(1000):
        one.set()
        clock.pass_by(0.5)
        assert len(clock.calls) == 1
    assert rung == []


def test_an_alarm_that_was_cleared_in_time_does_not_ring(
    one: Alarm, clock: Clock, rung: list[float]
) -> None:
    for _ in range(10):
        with one:
            clock.pass_by(9)
    clock.pass_by(100)
    assert rung == []


def test_an_alarm_that_has_ended_never_rings(one: Alarm, clock: Clock, rung: list[float]) -> None:
    one.set()
    one.end()
    clock.pass_by(100)
    assert rung == []
    assert clock.calls == {}

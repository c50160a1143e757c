"""worker/heartbeat.py: what a beat does with what it hears, and what it says of what went wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import psycopg2.errors
import pytest

import db
from errors import DatabaseUnavailable
from queries import leases
from queries.leases import Beat, ClaimedTask, Lease
from tests.conftest import settings_for
from tests.support.processes import eventually
from worker.heartbeat import Heartbeat, RenewalRefused, renew
from worker.held import Held

SETTINGS = settings_for(
    "postgresql://nobody@nowhere/none",
    worker={"lease_seconds": 0.3, "heartbeat_seconds": 0.01, "reap_seconds": 0.1},
)


class Connection:
    """Stands for one to Postgres."""

    closed = 0

    def close(self) -> None:
        self.closed = 1


CONNECTION = cast("db.Connection", Connection())


class Work:
    """What a heartbeat stops and reports."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.stopped: list[list[Lease]] = []
        self.reports = 0

    def stop(self, leases: Sequence[Lease]) -> None:
        self.stopped.append(list(leases))

    def report(self, conn: Any) -> None:
        self.reports += 1
        if self.fault is not None:
            raise self.fault


def heartbeat_of(work: Work, held: Held, monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    made = Heartbeat(SETTINGS, "w", held, work.stop, work.report)
    monkeypatch.setattr(made, "_connect", Connection)
    return made


@pytest.mark.parametrize(
    ("fault", "level", "says"),
    [
        (DatabaseUnavailable("it is away"), logging.WARNING, "it is away. action=database_away"),
        (RuntimeError("a fault of ours"), logging.ERROR, "This beat failed"),
    ],
)
def test_after_a_beat_that_failed_it_goes_on_and_calls_only_an_outage_an_outage(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    level: int,
    says: str,
) -> None:
    work = Work(fault)
    heartbeat = heartbeat_of(work, Held(), monkeypatch)
    heartbeat.begin()
    try:
        eventually(lambda: work.reports > 2, what="it beats again")
    finally:
        heartbeat.end()
    first = caplog.records[0]
    assert first.levelno == level
    assert says in first.getMessage()
    assert ("database_away" in caplog.text) == isinstance(fault, DatabaseUnavailable)


def test_many_leases_that_are_lost_together_are_stopped_at_once_and_told_in_one_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call of the work's loop and each line alone would hold up the next beat."""
    held, work = Held(), Work()
    lost, *others = [[Lease(10 * n + k, "t") for n in range(300)] for k in range(4)]
    settling, cancelled, fine = others
    held.add(
        ClaimedTask(one, 1, "tool", {}, "none", None, 1, 1, 0)
        for one in (*lost, *settling, *cancelled, *fine)
    )
    held.begin_settling(settling)
    beat = Beat(lost={*lost, *settling}, cancelled=set(cancelled))
    monkeypatch.setattr(leases, "renew_leases", lambda *_: beat)
    heartbeat_of(work, held, monkeypatch).beat_once()
    assert work.reports == 1
    (stopped,) = work.stopped
    assert len(stopped) == len(lost) + len(cancelled)
    assert set(stopped) == {*lost, *cancelled}
    assert held.leases() == [*settling, *cancelled, *fine]
    (record,) = caplog.records
    told = record.getMessage().splitlines()
    assert len(told) == len(lost)
    assert all(
        f"task_id={one.task_id} worker=w" in line for one, line in zip(lost, told, strict=True)
    )


def refused_unless(part_is_good: Callable[[Sequence[Lease]], bool]) -> Callable[..., Beat]:
    def renew_leases(conn: Any, part: Sequence[Lease], lease_seconds: float) -> Beat:
        if not part_is_good(part):
            raise psycopg2.errors.CheckViolation("it is refused\nDETAIL: what nobody is to read")
        return Beat()

    return renew_leases


def test_a_database_that_is_away_is_not_asked_for_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def away(conn: Any, part: Sequence[Lease], lease_seconds: float) -> Beat:
        asked.append(len(part))
        raise DatabaseUnavailable("it is away")

    monkeypatch.setattr(leases, "renew_leases", away)
    with pytest.raises(DatabaseUnavailable):
        renew(CONNECTION, [Lease(n, "t") for n in range(9)], 30)
    assert asked == [9]


def test_where_each_statement_takes_long_a_beat_ends_in_time_and_the_next_ones_renew_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = [Lease(n, "t") for n in range(64)]
    bad, renewed, clock = set(held[:4]), set[Lease](), [0.0]

    def good(part: Sequence[Lease]) -> bool:
        clock[0] += 1
        if bad.isdisjoint(part):
            renewed.update(part)
            return True
        return False

    monkeypatch.setattr(leases, "renew_leases", refused_unless(good))
    monkeypatch.setattr("worker.heartbeat.time.monotonic", lambda: clock[0])
    for _ in range(200):
        began = clock[0]
        with contextlib.suppress(RenewalRefused):  # it came to no good part until then
            renew(CONNECTION, held, 40)
        assert clock[0] - began <= 10
        if renewed == set(held) - bad:
            break
    assert renewed == set(held) - bad
    assert "nobody is to read" not in caplog.text

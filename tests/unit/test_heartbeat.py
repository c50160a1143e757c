"""worker/heartbeat.py: what a beat does with what it hears, and what it says of what went wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from errors import DatabaseUnavailable
from queries.leases import Lease
from tests.conftest import settings_for
from tests.support.processes import eventually
from worker.heartbeat import Heartbeat
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


class Work:
    """What a heartbeat stops and reports."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.stopped: list[Lease] = []
        self.reports = 0

    def stop(self, lease: Lease) -> None:
        self.stopped.append(lease)

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

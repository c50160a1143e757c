"""worker/heartbeat.py: a lease that Postgres refuses to renew keeps no other from being renewed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from config import Settings
from db import Connection
from queries import leases
from queries.leases import Beat, ClaimedTask, Lease
from tests.support import rows
from worker.heartbeat import ENOUGH_REFUSED, MOST_NAMED, Heartbeat, RenewalRefused, renew
from worker.held import Held

LEASE_SECONDS = rows.LEASE_SECONDS
SECRET = "a prompt that no log is to have"


@contextmanager
def refusing(conn: Connection, *refused: Lease) -> Iterator[None]:
    """Let Postgres refuse every change of these rows; without any, of all."""
    numbers = ", ".join(str(lease.task_id) for lease in refused)
    check = f"task_id NOT IN ({numbers})" if refused else "false"
    rows.sql(conn, f"ALTER TABLE tasks ADD CONSTRAINT broken CHECK ({check}) NOT VALID")
    try:
        yield
    finally:
        rows.sql(conn, "ALTER TABLE tasks DROP CONSTRAINT broken")


def claimed(conn: Connection, count: int) -> list[ClaimedTask]:
    """RUNNING, with a lease that has run out already; in the order of their numbers."""
    rows.sql(
        conn,
        "INSERT INTO tasks (kind, payload) SELECT 'prompt', jsonb_build_object("
        "'prompt', %(secret)s || n) FROM generate_series(1, %(count)s) AS n",
        secret=SECRET,
        count=count,
    )
    tasks = rows.claim(conn, count, lease_seconds=-1).tasks
    assert len(tasks) == count
    return sorted(tasks, key=lambda task: task.task_id)


def leases_of(tasks: Sequence[ClaimedTask]) -> list[Lease]:
    return [task.lease for task in tasks]


def run_out(conn: Connection) -> list[int]:
    return leases.expired_tasks(conn, 0)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many leases each statement was to renew."""
    seen: list[int] = []
    renew_leases = leases.renew_leases

    def counted(conn: Connection, part: Sequence[Lease], lease_seconds: float) -> Beat:
        seen.append(len(part))
        return renew_leases(conn, part, lease_seconds)

    monkeypatch.setattr(leases, "renew_leases", counted)
    return seen


class Beating:
    """A heartbeat, not started, with what it holds, stops and reports."""

    def __init__(self, settings: Settings, tasks: Sequence[ClaimedTask]) -> None:
        self.held = Held()
        self.held.add(tasks)
        self.stopped: list[Lease] = []
        self.reports = 0
        self.heartbeat = Heartbeat(settings, "w", self.held, self.stopped.extend, self._report)

    def _report(self, conn: Any) -> None:
        self.reports += 1

    def beat(self) -> bool:
        """Whether it went well."""
        try:
            return self.heartbeat._beat_safely()
        finally:
            self.heartbeat._disconnect()


def test_leases_that_postgres_renews_are_renewed_in_one_statement(
    conn: Connection, statements: list[int]
) -> None:
    held = leases_of(claimed(conn, 20))
    assert renew(conn, held, LEASE_SECONDS) == Beat()
    assert statements == [20]


@pytest.mark.parametrize("place", [0, 500, 999])
def test_of_a_thousand_leases_one_is_refused_and_all_others_are_renewed_in_time(
    conn: Connection, statements: list[int], place: int
) -> None:
    held = leases_of(claimed(conn, 1000))
    bad = held[place]
    began = time.monotonic()
    with refusing(conn, bad):
        assert renew(conn, held, LEASE_SECONDS) == Beat()
    assert run_out(conn) == [bad.task_id]
    assert len(statements) <= 21
    assert time.monotonic() - began < LEASE_SECONDS / 4


def test_a_refused_lease_is_kept_with_its_work_and_said_in_one_line_that_quotes_no_row(
    conn: Connection, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = claimed(conn, 8)
    bad, gone, cancelled, *good = leases_of(tasks)
    rows.ask_to_cancel(conn, cancelled.task_id)
    rows.settle(conn, gone, "succeeded")
    beating = Beating(settings, tasks)
    with refusing(conn, bad):
        assert beating.beat()
    assert beating.held.leases() == [bad, cancelled, *good]
    assert sorted(beating.stopped, key=lambda lease: lease.task_id) == [gone, cancelled]
    assert beating.reports == 1
    assert run_out(conn) == [bad.task_id]
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.startswith("Leases that are not renewed: 1 of 8; ")
    assert f"(tasks {bad.task_id}: " in told
    assert 'violates check constraint "broken"' in told
    assert "\n" not in told
    assert SECRET not in caplog.text
    settled = rows.settle(conn, bad, "succeeded")  # whoever mended the row
    assert settled is not None
    assert settled.reason == "succeeded"


def test_a_lease_that_was_refused_and_is_mended_is_renewed_by_the_next_beat(
    conn: Connection, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = claimed(conn, 3)
    beating = Beating(settings, tasks)
    with refusing(conn, tasks[1].lease):
        assert beating.beat()
        assert beating.beat()
        assert run_out(conn) == [tasks[1].task_id]
    assert len(caplog.records) == 2  # one in each beat
    assert beating.beat()
    assert run_out(conn) == []
    assert len(caplog.records) == 2


@pytest.mark.parametrize("place", [slice(0, 30), slice(70, 100), slice(0, 100, 2)])
def test_many_refused_leases_are_told_from_a_database_that_refuses_all(
    conn: Connection, caplog: pytest.LogCaptureFixture, place: slice
) -> None:
    """What a tenant has is claimed together: it may be the first or the last half of all."""
    held = leases_of(claimed(conn, 100))
    bad = held[place]
    with refusing(conn, *bad):
        for _ in range(3):  # by chance it finds only refused ones at first, one time in 250
            try:
                renew(conn, held, LEASE_SECONDS)
                break
            except RenewalRefused:
                continue
    assert run_out(conn) == [lease.task_id for lease in bad]
    told = caplog.records[-1].getMessage()
    assert told.startswith(f"Leases that are not renewed: {len(bad)} of 100; ")
    named = [int(one) for one in told.split("tasks ")[1].split(": ")[0].split(", ")]
    assert len(named) == MOST_NAMED
    assert {lease.task_id for lease in bad} > set(named)


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_a_database_that_refuses_every_renewal_is_no_fault_of_the_rows_and_soon_asked_again(
    conn: Connection,
    settings: Settings,
    statements: list[int],
    caplog: pytest.LogCaptureFixture,
    count: int,
) -> None:
    tasks = claimed(conn, count)
    beating = Beating(settings, tasks)
    with refusing(conn):
        assert not beating.beat()
    assert len(statements) <= 3 * ENOUGH_REFUSED
    assert beating.held.leases() == leases_of(tasks)
    assert beating.stopped == []
    (record,) = caplog.records
    assert record.getMessage() == "This beat failed"
    assert 'violates check constraint "broken"' in caplog.text
    assert SECRET not in caplog.text
    assert beating.beat()
    assert run_out(conn) == []


def test_a_lease_that_is_gone_does_not_make_a_database_that_refuses_all_look_well(
    conn: Connection,
) -> None:
    gone, *held = leases_of(claimed(conn, 3))
    rows.settle(conn, gone, "succeeded")
    with refusing(conn):
        assert renew(conn, [gone, *held], LEASE_SECONDS).lost == {gone}
        with pytest.raises(RenewalRefused, match="broken"):
            renew(conn, held, LEASE_SECONDS)

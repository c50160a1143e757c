"""The thread that keeps the leases of a process alive while its main thread does other things."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

import psycopg2

import db
from config import Settings
from errors import DatabaseUnavailable, words_of
from logs import say
from queries import leases
from queries.leases import Beat, Lease
from worker.held import Held
from worker.sentences import log_lost

logger = logging.getLogger(__name__)

ENOUGH_REFUSED = 8  # leases, and none renewed: it is the database then, and not the rows
MOST_NAMED = 20  # tasks in one line of the log


class RenewalRefused(Exception):
    """Postgres refuses to renew any lease."""


def renew(conn: db.Connection, held: Sequence[Lease], lease_seconds: float) -> Beat:
    """Renew all leases in one statement; where that is refused, in halves, down to the bad one.

    That one is not lost: its token is ours until another takes it, its work goes on, and what
    comes of that is for the settle to decide. It stops where a beat would come too late for the
    others: what was not tried until then is so in the next beat, which takes other halves.
    """
    until = time.monotonic() + lease_seconds / 4
    beat, parts = Beat(), [held]
    refused: list[Lease] = []
    renewed, why = 0, ""
    while parts and time.monotonic() < until and (renewed or len(refused) < ENOUGH_REFUSED):
        part = parts.pop()
        try:
            told = leases.renew_leases(conn, part, lease_seconds)
        except psycopg2.Error as failed:
            why = words_of(failed)
            if len(part) == 1:
                refused += part
            else:
                parts += _halves(part)
        else:
            renewed += len(part) - len(told.lost)
            beat.lost.update(told.lost)
            beat.cancelled.update(told.cancelled)
    left = [*refused, *(lease for part in parts for lease in part)]
    if left and not renewed and not beat.lost:  # what is lost is to be known first
        raise RenewalRefused(f"no lease can be renewed: {why}")
    if left:
        named = ", ".join(str(lease.task_id) for lease in left[:MOST_NAMED])
        logger.error(
            "Leases that are not renewed: %s of %s; they may run out, their work goes on "
            "(tasks %s: %s)",
            *(len(left), len(held), named, why),
        )
    return beat


def _halves(part: Sequence[Lease]) -> list[Sequence[Lease]]:
    """At random, so that what is refused does not come first because it was claimed together."""
    mixed, middle = random.sample(part, len(part)), len(part) // 2
    return [mixed[:middle], mixed[middle:]]


class Heartbeat(threading.Thread):
    """Renews all leases of the process, every `heartbeat_seconds`, on its own connection.

    1. renews the leases held now, in one statement if Postgres takes it,
    2. stops the work of those that are lost or asked to be cancelled,
    3. reports that this worker lives.

    When Postgres is away it tries again each second: a lease may still be ours.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        held: Held,
        stop: Callable[[Sequence[Lease]], None],
        report: Callable[[db.Connection], None],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._settings = settings
        self._worker_name = name
        self._held = held
        self._stop_work = stop
        self._report = report
        self._ended = threading.Event()
        self._nudged = threading.Event()
        self._conn: db.Connection | None = None

    def run(self) -> None:
        pause_seconds = 0.0
        while not self._ended.is_set():
            self._nudged.wait(pause_seconds)
            self._nudged.clear()
            if self._ended.is_set():
                break
            pause_seconds = self._settings.worker.heartbeat_seconds
            if not self._beat_safely():
                self._disconnect()
                pause_seconds = min(1.0, pause_seconds)
        self._disconnect()

    def _beat_safely(self) -> bool:
        """Whether a beat went well. It raises nothing: a heartbeat that dies costs every lease."""
        try:
            self.beat_once()
            return True
        except DatabaseUnavailable as away:
            say(logger, logging.WARNING, f"The heartbeat failed: {away}.", "database_away")
        except Exception:
            logger.exception("This beat failed")
        return False

    def beat_once(self) -> None:
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
        held = self._held.leases()
        if held:
            beat = renew(self._conn, held, self._settings.worker.lease_seconds)
            lost = self._held.drop_lost(one for one in held if one in beat.lost)
            self._stop_work([*lost, *beat.cancelled])
            log_lost(lost, self._worker_name)
        self._report(self._conn)

    def begin(self) -> None:
        """Start beating; a second call does nothing."""
        if self.ident is None:
            self.start()

    def nudge(self) -> None:
        """Beat now: there is something to report."""
        self._nudged.set()

    def end(self) -> None:
        """Stop after the beat that is under way."""
        self._ended.set()
        self._nudged.set()
        if self.is_alive():
            self.join()

    def _connect(self) -> db.Connection:
        settings = self._settings
        # A beat that waits longer than this would come too late for the lease.
        limit = settings.worker.lease_seconds / 4
        conn = db.connect(settings.database_url, settings.database, f"{self._worker_name} beat")
        conn.reply_timeout_seconds = min(limit, settings.database.reply_timeout_seconds)
        conn.lock_timeout_seconds = min(limit, settings.database.lock_timeout_seconds)
        return conn

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

"""The thread that keeps the leases of a process alive while its main thread does other things."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import db
from config import Settings
from errors import DatabaseUnavailable
from logs import say
from queries import leases
from queries.leases import Lease
from worker.held import Held
from worker.sentences import log_lost

logger = logging.getLogger(__name__)


class Heartbeat(threading.Thread):
    """Renews all leases of the process, every `heartbeat_seconds`, on its own connection.

    1. renews the leases held now in one statement,
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
            beat = leases.renew_leases(self._conn, held, self._settings.worker.lease_seconds)
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

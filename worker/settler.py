"""The thread that writes what came of tasks, while the main thread claims the next ones.

Where it ends a step of a run it claims as well: see claiming.py.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

import db
from config import Settings
from errors import DatabaseUnavailable
from logs import say
from queries.leases import Settled
from worker.held import Held
from worker.link import SHORT_REPLY_SECONDS
from worker.refused import Refused
from worker.sentences import log_lost, log_settled
from worker.settling import Finished, Written, batch_to_settle, settle_batch

logger = logging.getLogger("scheduler")

HELD_UP_SECONDS = 0.05  # before it tries again what somebody holds


class Settler(threading.Thread):
    """Takes outcomes from any thread and writes them, on its own connection.

    What cannot be written now is kept, with its place among the worker's slots, and tried again.
    What `Refused` keeps no longer is given up: its task is tried anew when the lease ends.
    `before` is called before what has just ended is written. `settle_and_claim` may write a batch
    and say what became of it, or leave it to be written here. `on_settled` is called when slots are
    free, with whether some of these tasks are to be claimed again, now or later.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        held: Held,
        take_finished: Callable[[], list[Finished]],
        before: Callable[[], None],
        settle_and_claim: Callable[[db.Connection, Sequence[Finished]], list[Settled] | None],
        on_settled: Callable[[bool], None],
    ) -> None:
        super().__init__(name="settler", daemon=True)
        self._settings = settings
        self._worker_name = name
        self._held = held
        self._take_finished = take_finished
        self._before = before
        self._settle_and_claim = settle_and_claim
        self._on_settled = on_settled
        self._rung = threading.Event()
        self._is_ended = False
        self._is_hurried = False
        self._unsettled: list[Finished] = []
        self._refused = Refused()
        self._conn: db.Connection | None = None

    def begin(self) -> None:
        """Connect and start; raises DatabaseUnavailable. A second call does nothing."""
        if self.ident is None:
            self._open()
            self.start()

    def ring(self) -> None:
        """There is something to take."""
        if not self._rung.is_set():
            self._rung.set()

    def hurry(self) -> None:
        """From now on wait for no reply for long; may be called from a signal handler."""
        self._is_hurried = True
        if (conn := self._conn) is not None:
            conn.reply_timeout_seconds = min(conn.reply_timeout_seconds, SHORT_REPLY_SECONDS)

    def end(self) -> None:
        """Stop after what is being written."""
        self._is_ended = True
        self._rung.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        pause_seconds = None
        while not self._is_ended:
            self._rung.wait(pause_seconds)
            self._rung.clear()
            pause_seconds = self._settle_safely()
        self._disconnect()

    def _settle_safely(self) -> float | None:
        """Settle; the seconds after which there is more to do, or None."""
        try:
            return self._settle()
        except DatabaseUnavailable as away:
            say(logger, logging.WARNING, f"Cannot settle now: {away}.", "database_away")
            self._disconnect()
            return random.uniform(0.2, 1.0)
        except BaseException:  # a fault of ours, or a tool's, must not end this thread in silence
            logger.exception("This settle failed")
            self._disconnect()
            return 1.0

    def _settle(self) -> float | None:
        """Write every outcome there is, and last those that were refused before."""
        if finished := self._take_finished():
            self._unsettled += finished
            self._before()
        held_up = self._settle_behind(0)
        self._unsettled += self._refused.take_due()
        held_up = self._settle_behind(held_up)
        return HELD_UP_SECONDS if held_up else self._refused.pause_seconds()

    def _settle_behind(self, held_up: int) -> int:
        """Write, in batches, what is behind the first outcomes: somebody holds the rows of those.

        How many are held up so by now.
        """
        while batch := batch_to_settle(self._unsettled[held_up:]):
            self._held.begin_settling(lease for lease, _ in batch)
            parts = self._write(batch)
            settled = [one for part in parts for one in part.settled]
            again = [pair for part in parts for pair in part.held]
            self._unsettled[held_up : held_up + len(batch)] = again
            held_up += len(again)
            waiting = {lease for lease, _ in [*again, *self._refused.note(parts)]}
            ended = [lease for lease, _ in batch if lease not in waiting]
            self._refused.forget(ended)
            written = {one.token for one in settled}
            lost = [one for one in self._held.drop_settled(ended) if one.token not in written]
            self._on_settled(any(one.status == "PENDING" for one in settled))
            log_settled(settled, self._worker_name)
            log_lost(lost, self._worker_name)
        return held_up

    def _write(self, batch: Sequence[Finished]) -> list[Written]:
        conn = self._open()
        if (settled := self._settle_and_claim(conn, batch)) is not None:
            return [Written(settled)]
        return settle_batch(conn, batch, self._settings.retry)

    def _open(self) -> db.Connection:
        if self._conn is None or self._conn.closed:
            settings = self._settings
            self._conn = db.connect(
                settings.database_url, settings.database, f"{self._worker_name} settle"
            )
            if self._is_hurried:
                self.hurry()
        return self._conn

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

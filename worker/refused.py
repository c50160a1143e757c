"""The outcomes that Postgres refuses, each kept until it is clear that the fault is its own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence

from queries.leases import Lease
from worker.settling import Finished, Written

logger = logging.getLogger(__name__)

TRY_AGAIN_SECONDS = 1.0


class Refused:
    """Keeps what was refused, tries it again each second, and gives up what cannot be stored.

    That is an outcome which was refused both before and after another was stored. If Postgres
    stores nothing for a while (somebody renames a table, say), no outcome looks like that, wherever
    among its writes that while begins and ends.
    """

    def __init__(self) -> None:
        self._stored = 0  # outcomes, so far
        self._stored_before: dict[Lease, int] = {}  # it was refused for the first time
        self._waiting: list[Finished] = []
        self._due = math.inf

    def note(self, parts: Iterable[Written]) -> list[Finished]:
        """Learn what came of outcomes, in the order of writing; those that are refused and kept."""
        kept: list[Finished] = []
        why = ""
        for part in parts:
            for (lease, outcome), reason in part.refused:
                if self._stored > self._stored_before.setdefault(lease, self._stored):
                    logger.error(
                        "Neither the outcome of task %s can be stored nor that it failed, while "
                        "others can be; its lease is left to run out: %s",
                        lease.task_id,
                        reason,
                    )
                else:
                    kept.append((lease, outcome))
                    why = f"task {lease.task_id}: {reason}"
            self._stored += len(part.settled)
        if kept:
            self._wait_for(kept)
            logger.error(
                "Outcomes that cannot be stored, nor that they failed: %s; "
                "they are kept and tried again (%s)",
                len(kept),
                why,
            )
        return kept

    def _wait_for(self, kept: Sequence[Finished]) -> None:
        if not self._waiting:
            self._due = time.monotonic() + TRY_AGAIN_SECONDS
        self._waiting += kept

    def forget(self, ended: Iterable[Lease]) -> None:
        """These are stored, lost or given up."""
        if self._stored_before:
            for lease in ended:
                self._stored_before.pop(lease, None)

    def take_due(self) -> list[Finished]:
        """All that are kept, if it is time to try them again."""
        if time.monotonic() < self._due:
            return []
        due, self._waiting, self._due = self._waiting, [], math.inf
        return due

    def pause_seconds(self) -> float | None:
        """Until it is time for that."""
        return max(self._due - time.monotonic(), 0) if self._waiting else None

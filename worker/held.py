"""The leases a process holds, shared by its main thread, its settler and its heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from queries.leases import ClaimedTask, Lease


class Held:
    """Thread-safe. Leases are added by the claim and dropped once, by who knows its end first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[Lease, ClaimedTask] = {}
        self._being_settled: set[Lease] = set()

    def add(self, tasks: Iterable[ClaimedTask]) -> None:
        with self._lock:
            self._tasks.update((task.lease, task) for task in tasks)

    def begin_settling(self, held: Iterable[Lease]) -> None:
        """From here on the settle statement tells whether a lease is ours, not the heartbeat."""
        with self._lock:
            self._being_settled.update(held)

    def drop_settled(self, settled: Sequence[Lease]) -> list[Lease]:
        """Forget leases whose outcome was written or refused; those that were not lost before."""
        with self._lock:
            self._being_settled.difference_update(settled)
            return [one for one in settled if self._tasks.pop(one, None) is not None]

    def drop_lost(self, lost: Iterable[Lease]) -> list[Lease]:
        """Forget leases that were found gone; those that were held, and are not being settled."""
        with self._lock:
            own = [one for one in lost if one in self._tasks and one not in self._being_settled]
            for one in own:
                del self._tasks[one]
            return own

    def leases(self) -> list[Lease]:
        with self._lock:
            return list(self._tasks)

    def __contains__(self, lease: Lease) -> bool:
        return lease in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

"""Tells a prompt that its server refuses for its own sake from a server that is away.

Both look alike: 429, 403, 503. But a server that is away serves nobody, and one that is overloaded
refuses others too. So a refusal counts against its task only if a call of another task was answered
that began after the task was first refused, each such call once; and, where overload could be the
reason, only if nobody else was refused meanwhile. What this worker has not seen itself counts for
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# So often in a row: then it is the prompt.
MOST_REFUSALS = 5
MOST_REMEMBERED = 1000  # tasks; those that were cancelled meanwhile never come back


@dataclass(frozen=True)
class _Refused:
    times: int
    answered: int  # when the last call that counts against it had begun
    overloads: int  # of its route, its own included


class Refusals:
    """What one worker has seen of its routes; to be used from one thread."""

    def __init__(self) -> None:
        self._now = 0  # counts what happens
        self._served: dict[str, int] = {}  # by route: when the latest answered call had begun
        self._overloads: dict[str, int] = {}
        self._refused: OrderedDict[tuple[str, int], _Refused] = OrderedDict()

    def begin(self) -> int:
        """A call begins; what `answered` is to be told."""
        self._now += 1
        return self._now

    def answered(self, route: str, task_id: int, began: int) -> None:
        """A call was answered, well or badly."""
        self._served[route] = max(began, self._served.get(route, 0))
        self._refused.pop((route, task_id), None)

    def away(self, route: str) -> None:
        """A probe failed: whatever was refused there was refused by an outage."""
        for known in [known for known in self._refused if known[0] == route]:
            del self._refused[known]

    def is_to_blame(self, route: str, task_id: int, by_overload: bool) -> bool:
        """A call was refused: whether the task's own prompt is the reason."""
        before = self._refused.pop((route, task_id), None)
        overloads = self._overloads.get(route, 0)
        if before is None or (by_overload and overloads > before.overloads):
            before = _Refused(0, self.begin(), 0)
        answered = max(self._served.get(route, 0), before.answered)
        counts = before.times == 0 or answered > before.answered
        times = before.times + counts
        self._overloads[route] = overloads + by_overload
        self._refused[route, task_id] = _Refused(times, answered, self._overloads[route])
        if len(self._refused) > MOST_REMEMBERED:
            self._refused.popitem(last=False)
        return counts and times > MOST_REFUSALS

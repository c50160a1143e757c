"""In which order steps can run, and which of them wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

Needs = Mapping[str, Sequence[str]]


class CycleFound(ValueError):
    """Steps wait for each other; `cycle` names each and ends with the one it began with."""

    def __init__(self, cycle: Sequence[str]) -> None:
        super().__init__(" -> ".join(cycle))
        self.cycle = list(cycle)


def topological_order(needs: Needs) -> list[str]:
    """All names, each behind those it needs, else in the order in which they were given.

    `needs` holds, for each name, the names it needs, all of them keys too. Raises CycleFound.
    """
    place = {name: number for number, name in enumerate(needs)}
    names = list(needs)
    unmet = {name: len(set(needed)) for name, needed in needs.items()}
    needed_by: dict[str, list[str]] = {name: [] for name in needs}
    for name, needed in needs.items():
        for one in set(needed):
            needed_by[one].append(name)
    ready = [place[name] for name, count in unmet.items() if count == 0]
    heapify(ready)
    order: list[str] = []
    while ready:
        name = names[heappop(ready)]
        order.append(name)
        for waiting in needed_by[name]:
            unmet[waiting] -= 1
            if unmet[waiting] == 0:
                heappush(ready, place[waiting])
    if len(order) < len(names):
        raise CycleFound(_a_cycle(needs, [name for name in names if unmet[name]]))
    return order


def _a_cycle(needs: Needs, stuck: Sequence[str]) -> list[str]:
    """A cycle among `stuck`, in the order given: each needs at least one of them."""
    place = {name: number for number, name in enumerate(stuck)}
    walked: dict[str, None] = {}
    name = stuck[0]
    while name not in walked:
        walked[name] = None
        name = next(one for one in needs[name] if one in place)
    cycle = list(walked)[list(walked).index(name) :]
    first = cycle.index(min(cycle, key=place.__getitem__))
    return [*cycle[first:], *cycle[:first], cycle[first]]

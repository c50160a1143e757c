"""Which routes take calls now, and which of them a claimed task goes to.

A route is open or paused. It pauses when its server is away, for a delay that grows with each
call that finds it so, and opens again when GET /api/version answers: a task is never the probe.
A worker begins with all routes paused and probed at once, so that nothing is claimed for a
server that is not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config import Routing
from queries.claims import Look, Wanted
from queries.leases import ClaimedTask

ROUTES = ("local", "cloud")
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

DecideRoute = Callable[[Mapping[str, Any], Mapping[str, Any], Routing], str]


@dataclass
class _Route:
    paused_because: str | None = "not probed yet"
    pause_seconds: float = 0.0  # the next pause, once there was one


class Routes:
    """The claim policy of one worker. May be used from any thread."""

    def __init__(self, routing: Routing, decide: DecideRoute) -> None:
        self._routing = routing
        self._decide = decide
        self._lock = threading.Lock()
        self._routes = {name: _Route() for name in ROUTES}
        self._left: dict[str, int | None] = {}
        self.has_limits = any(routing.max_in_flight(name) for name in ROUTES)
        self.depth_that_matters = routing.pending_threshold

    # --- open and paused ---------------------------------------------------------------------

    def pause(self, name: str, because: str, retry_after_seconds: float | None = None) -> float:
        """Close a route; returns the seconds until its first probe."""
        with self._lock:
            route = self._routes[name]
            route.paused_because = because
            route.pause_seconds = max(route.pause_seconds, FIRST_PAUSE_SECONDS)
            wait_seconds = max(route.pause_seconds, retry_after_seconds or 0)
            route.pause_seconds = min(2 * route.pause_seconds, LONGEST_PAUSE_SECONDS)
            return wait_seconds

    def open(self, name: str) -> None:
        """Let calls through again. The next pause stays long until a call has worked."""
        with self._lock:
            self._routes[name].paused_because = None

    def worked(self, name: str) -> None:
        """A call was answered, well or badly: the server is there."""
        with self._lock:
            self._routes[name].pause_seconds = 0.0

    def paused(self) -> dict[str, str]:
        """The routes that are closed now, and why."""
        with self._lock:
            return {
                name: route.paused_because
                for name, route in self._routes.items()
                if route.paused_because is not None
            }

    # --- claiming ----------------------------------------------------------------------------

    def wanted(self, look: Look) -> tuple[list[Wanted], dict[str, int | None]]:
        """What a claim may take now, with a budget for each route (None: no limit)."""
        paused = self.paused()
        budgets = {
            name: 0 if name in paused else self._places_left(name, look.in_flight)
            for name in ROUTES
        }
        self._left = dict(budgets)
        wanted = [Wanted("none", "none")]
        for name in ROUTES:
            if target := self._open_target(name, budgets):
                wanted.append(Wanted(name, target))
        if auto := self._wanted_of_auto(look.depth, budgets):
            wanted.append(auto)
            budgets.setdefault("rest", max(0, look.depth - self._routing.pending_threshold - 1))
        return wanted, budgets

    def choose(self, tasks: Sequence[ClaimedTask], depth: int) -> list[str | None]:
        """The route of each task, within the budgets of `wanted`; None: none, or none now."""
        return [self._choose(task, depth) for task in tasks]

    def _places_left(self, name: str, in_flight: Mapping[str, int]) -> int | None:
        limit = self._routing.max_in_flight(name)
        return max(0, limit - in_flight.get(name, 0)) if limit else None

    def _open_target(self, name: str, budgets: Mapping[str, int | None]) -> str | None:
        """`name` if it takes calls, else the other route if that is allowed and takes some."""
        if budgets[name] != 0:
            return name
        if self._routing.fallback and budgets[_other(name)] != 0:
            return _other(name)
        return None

    def _wanted_of_auto(self, depth: int, budgets: Mapping[str, int | None]) -> Wanted | None:
        """Of the tasks without a route of their own, those that would go where calls pass."""
        likely = "cloud" if depth > self._routing.pending_threshold else "local"
        if budgets[likely] != 0 and budgets[_other(likely)] != 0:
            return Wanted("auto", likely)
        if self._routing.fallback and (target := self._open_target(likely, budgets)):
            return Wanted("auto", target)
        longest_local = self._routing.prompt_threshold
        if budgets["cloud"] != 0:
            if likely == "cloud":  # down to the depth at which they would go to local
                return Wanted("auto", "rest")
            return Wanted("auto", "cloud", min_chars=longest_local + 1)
        if budgets["local"] != 0 and likely == "local":
            return Wanted("auto", "local", max_chars=longest_local)
        return None

    def _choose(self, task: ClaimedTask, depth: int) -> str | None:
        if task.requested_route == "none":
            return None
        route = task.requested_route
        if route == "auto":
            metrics = {"by_status": {"PENDING": depth}}
            route = self._decide(task.payload, metrics, self._routing)
        target = self._open_target(route, self._left)
        if target is not None and (left := self._left[target]) is not None:
            self._left[target] = left - 1
        return target


def _other(name: str) -> str:
    return "local" if name == "cloud" else "cloud"

"""Which routes take calls now, and which of them a claimed task goes to.

A route is open or paused. It pauses when its server is away, for a delay that grows with each
call that finds it so, and opens again when its server answers a probe: a task is never the probe.
A worker begins with all routes paused and probed at once, so that nothing is claimed for a
server that is not there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config import Routing
from queries.claims import Look, Wanted
from queries.leases import ClaimedTask

logger = logging.getLogger(__name__)

ROUTES = ("local", "cloud")
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

DecideRoute = Callable[[Mapping[str, Any], Mapping[str, Any], Routing], str]


@dataclass
class _Route:
    is_open: bool = False  # before its first probe, too
    paused_because: str | None = None  # what was found
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
            route.is_open, route.paused_because = False, because
            route.pause_seconds = max(route.pause_seconds, FIRST_PAUSE_SECONDS)
            wait_seconds = max(route.pause_seconds, retry_after_seconds or 0)
            route.pause_seconds = min(2 * route.pause_seconds, LONGEST_PAUSE_SECONDS)
            return wait_seconds

    def open(self, name: str) -> None:
        """Let calls through again. The next pause stays long until a call has worked."""
        with self._lock:
            self._routes[name].is_open = True
            self._routes[name].paused_because = None

    def worked(self, name: str) -> None:
        """A call was answered, well or badly: the server is there."""
        with self._lock:
            self._routes[name].pause_seconds = 0.0

    def paused(self) -> dict[str, str]:
        """The routes whose server was found away, and why."""
        with self._lock:
            return {
                name: route.paused_because
                for name, route in self._routes.items()
                if route.paused_because is not None
            }

    # --- claiming ----------------------------------------------------------------------------

    def wanted(self, look: Look) -> tuple[list[Wanted], dict[str, int | None]]:
        """What a claim may take now, with a budget for each route (None: no limit)."""
        budgets = {
            name: self._places_left(name, look.in_flight) if self._is_open(name) else 0
            for name in ROUTES
        }
        self._left = dict(budgets)
        wanted = [Wanted("none", "none")]
        for name in ROUTES:
            if target := self._open_target(name, budgets):
                wanted.append(Wanted(name, target))
        wanted += self._wanted_of_auto(look, budgets)
        budgets["rest"] = max(0, self._rest(look))
        return wanted, budgets

    def routes_at_any_depth(self) -> list[str] | None:
        """What the tasks that are `wanted` ask for, where neither calls in flight nor how many are
        due make a difference."""
        with self._lock:
            open_routes = [name for name, route in self._routes.items() if route.is_open]
        if self.has_limits or (len(open_routes) == 1 and not self._routing.fallback):
            return None
        self._left = {name: None if name in open_routes else 0 for name in ROUTES}
        # Both, or one that takes what the other would.
        return ["none", *ROUTES, "auto"] if open_routes else ["none"]

    def choose(self, tasks: Sequence[ClaimedTask], depth: int) -> list[str | None]:
        """The route of each task, within the budgets of `wanted`; None: none, or none now."""
        return [self._choose(task, depth) for task in tasks]

    def _is_open(self, name: str) -> bool:
        with self._lock:
            return self._routes[name].is_open

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

    def _rest(self, look: Look) -> int:
        """How many can be claimed before the queue is no longer deep enough for the cloud."""
        return look.depth - self._routing.pending_threshold - 1

    def _wanted_of_auto(self, look: Look, budgets: Mapping[str, int | None]) -> list[Wanted]:
        """Of the tasks without a route of their own, those that would go where calls pass."""
        rest = self._rest(look)
        likely = "cloud" if rest >= 0 else "local"
        if self._routing.fallback:
            target = self._open_target(likely, budgets)
            return [Wanted("auto", target)] if target else []
        if budgets["local"] is None and budgets["cloud"] is None:
            return [Wanted("auto", likely)]
        if rest >= look.slots:  # whatever the batch holds, it goes to the cloud
            return [Wanted("auto", "cloud")] if budgets["cloud"] != 0 else []
        # A few are due. The long ones go to the cloud; the short ones to local, or to the cloud
        # until they are few enough for local.
        longest_local = self._routing.prompt_threshold
        wanted = []
        if budgets["cloud"] != 0:
            wanted.append(Wanted("auto", "cloud", min_chars=longest_local + 1))
        if budgets["local"] != 0:
            wanted.append(Wanted("auto", "local", max_chars=longest_local))
        elif rest > 0 and budgets["cloud"] != 0:
            wanted.append(Wanted("auto", "rest", max_chars=longest_local))
        return wanted

    def _choose(self, task: ClaimedTask, depth: int) -> str | None:
        if task.requested_route == "none":
            return None
        try:
            target = self._open_target(self._route_of(task, depth), self._left)
        except Exception:  # decide_route may be a user's: this task is handed back, and no other
            logger.exception("No route can be decided for task %s", task.task_id)
            return None
        if target is not None and (left := self._left[target]) is not None:
            self._left[target] = left - 1
        return target

    def _route_of(self, task: ClaimedTask, depth: int) -> str:
        if task.requested_route != "auto":
            return task.requested_route
        metrics = {"by_status": {"PENDING": depth}}
        text = task.payload.get("prompt") or task.payload.get("task")
        return self._decide({"prompt": text}, metrics, self._routing)


def _other(name: str) -> str:
    return "local" if name == "cloud" else "cloud"

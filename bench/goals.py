"""What the measures are to reach, all in one place: ratios of figures taken in one run.

    python -m bench.goals          # judge the files in bench/results

`--check` of bench/run.sh ends with this: it names each goal that is missed, and exits 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import RESULTS, SUMMARY, short
from local.output import say


@dataclass(frozen=True)
class Goal:
    """`ratio` is a name that the measure has given to Record.ratio; its median is judged."""

    area: str
    measure: str
    ratio: str
    at_least: float | None = None
    at_most: float | None = None

    def is_reached(self, found: float) -> bool:
        enough = self.at_least is None or found >= self.at_least
        return enough and (self.at_most is None or found <= self.at_most)

    @property
    def limit(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:,g}"
        return f"at most {self.at_most:,g}"


GOALS = (
    Goal("Drain", "drain", "1 worker / graphile-worker", at_least=1.0),
    Goal("Drain", "drain", "1 worker / PgQueuer", at_least=2.5),
    Goal("Drain", "drain", "2 workers / graphile-worker", at_least=1.0),
    Goal("Submit", "submit", "POST /tasks / empty endpoint", at_least=0.85),
    Goal("Submit", "submit", "p99 of POST /tasks / of empty endpoint", at_most=2.0),
    Goal("Submit", "submit", "batch tasks/s", at_least=30_000),
    Goal("Submit", "submit", "lone POST / endpoint with a plain INSERT", at_most=1.2),
    Goal("Pickup", "pickup", "p50 / bare LISTEN and claim", at_most=1.2),
    Goal("Pickup", "pickup", "p50 / best peer", at_most=1.0),
    Goal("Pickup", "pickup", "p99 / best peer", at_most=1.0),
    Goal("Idle", "idle", "transactions/s", at_most=1.0),
    Goal("Idle", "idle", "CPU percent", at_most=0.5),
    Goal("Growth", "growth", "drain of the full table / of the empty", at_least=0.9),
    Goal("Growth", "growth", "submit to the full table / to the empty", at_least=0.9),
    Goal("Growth", "growth", "batches to the full table / to the empty", at_least=0.9),
    Goal("Growth", "growth", "pickup p99 of the full table / of the empty", at_most=1.5),
    Goal("Growth", "growth", "ms GET /metrics", at_most=20),
    Goal("Growth", "growth", "ms GET /stats", at_most=20),
    Goal("Growth", "growth", "ms GET /dead-letters", at_most=20),
    Goal("Growth", "growth", "ms GET /tasks", at_most=20),
    Goal("Growth", "growth", "ms of a reaper with nothing to do", at_most=5),
    Goal("Growth", "growth", "claims before a newcomer's", at_most=1),
    Goal("Churn", "churn", "drain after churn / before", at_least=0.8),
    Goal("Churn", "churn", "drain beside an open transaction / before", at_least=0.8),
    Goal("Runs", "runs", "chain per hop / pickup p50", at_most=1.5),
    Goal("Runs", "runs", "star / plain drain", at_least=0.7),
    Goal("Runs", "runs", "ms to create 1,000 steps", at_most=50),
    Goal("Agents", "agents", "node / plain LangGraph", at_most=1.3),
    Goal("Agents", "agents", "32 whole jobs / 32 savers on one pool", at_least=0.8),
    Goal("Pass-through", "passthrough", "tokens/s / directly", at_least=0.97),
    Goal("Footprint", "idle", "worker MB", at_most=60),
    Goal("Footprint", "idle", "worker ready after s", at_most=0.7),
    Goal("Footprint", "idle", "API MB", at_most=90),
    Goal("Watchers", "watchers", "ms at p99, busy run", at_most=250),
)

Ratios = Mapping[str, float]  # by name; of one measure


@dataclass(frozen=True)
class Verdict:
    goal: Goal
    found: float | None  # None: not measured

    @property
    def is_missed(self) -> bool:
        return self.found is not None and not self.goal.is_reached(self.found)

    def __str__(self) -> str:
        name = f"{self.goal.area}: {self.goal.ratio}"
        if self.found is None:
            return f"not measured  {name}, {self.goal.limit}"
        word = "missed      " if self.is_missed else "reached     "
        return f"{word}  {name} is {short(self.found)}, {self.goal.limit}"


def judge(found: Mapping[str, Ratios], goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    """One verdict for each goal, by the ratios of each measure."""
    return [Verdict(goal, found.get(goal.measure, {}).get(goal.ratio)) for goal in goals]


def read_results(folder: Path = RESULTS) -> dict[str, Ratios]:
    """The medians of all ratios, by measure."""
    files = [path for path in sorted(folder.glob("*.json")) if path.name != SUMMARY]
    results = [json.loads(path.read_text()) for path in files]
    return {
        one["measure"]: {name: ratio["median"] for name, ratio in one["ratios"].items()}
        for one in results
    }


def show(verdicts: Sequence[Verdict]) -> None:
    """A line for each goal; the last line lists the ratios."""
    for verdict in verdicts:
        say(str(verdict))
    seen = [f"{v.goal.ratio} {short(v.found)}" for v in verdicts if v.found is not None]
    say("; ".join(seen) or "nothing was measured")


def main() -> None:
    verdicts = judge(read_results())
    show(verdicts)
    sys.exit(any(verdict.is_missed for verdict in verdicts))


if __name__ == "__main__":
    main()

"""What chaos.sh does, thrown with dice from one seed: runs of random shapes, and blows at workers.

Each step knows its fate beforehand, so that the end can be compared with what had to come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Shape = list[list[int]]  # for each step, the places of those it depends on
Fate = Literal["succeeds", "max_retry", "permanent", "approved", "rejected"]


@dataclass(frozen=True)
class PlannedStep:
    """A step as POST /runs takes it, and what is to come of it if it gets its turn."""

    name: str
    body: Mapping[str, Any]
    needs: tuple[str, ...]
    fate: Fate


@dataclass(frozen=True)
class PlannedRun:
    """A run, when it is submitted, and how long after that it is cancelled, if it is."""

    goal: str
    steps: tuple[PlannedStep, ...]
    at_seconds: float
    cancel_after_seconds: float | None

    def body(self) -> dict[str, Any]:
        return {"goal": self.goal, "steps": [dict(step.body) for step in self.steps]}


@dataclass(frozen=True)
class Blow:
    """A worker dies at this moment or, if there is `frozen_seconds`, stands still for so long."""

    at_seconds: float
    place: int  # which of the workers
    frozen_seconds: float | None


@dataclass(frozen=True)
class Plan:
    """All of it."""

    runs: tuple[PlannedRun, ...]
    blows: tuple[Blow, ...]


def make_plan(seed: int, seconds: float, runs: int, workers: int, lease_seconds: float) -> Plan:
    """The same for the same arguments."""
    dice = random.Random(seed)  # noqa: S311 - chance is wanted that can be had again
    planned = sorted((_run(dice, seconds) for _ in range(runs)), key=lambda run: run.at_seconds)
    return Plan(tuple(planned), tuple(_blows(dice, seconds, workers, lease_seconds)))


# --- shapes ----------------------------------------------------------------------------------


def _chain(dice: random.Random) -> Shape:
    return [[n - 1] if n else [] for n in range(dice.randint(2, 7))]


def _fan_out(dice: random.Random) -> Shape:
    return [[], *([0] for _ in range(dice.randint(2, 8)))]


def _fan_in(dice: random.Random) -> Shape:
    width = dice.randint(2, 8)
    return [*([] for _ in range(width)), list(range(width))]


def _diamond(dice: random.Random) -> Shape:
    width = dice.randint(2, 5)
    return [[], *([0] for _ in range(width)), list(range(1, width + 1))]


def _tangle(dice: random.Random) -> Shape:
    return [
        sorted(dice.sample(range(n), min(n, dice.choice([0, 1, 1, 2, 3]))))
        for n in range(dice.randint(4, 14))
    ]


SHAPES: Mapping[str, Callable[[random.Random], Shape]] = {
    "a chain": _chain,
    "a fan-out": _fan_out,
    "a fan-in": _fan_in,
    "a diamond": _diamond,
    "a tangle": _tangle,
}


def _run(dice: random.Random, seconds: float) -> PlannedRun:
    words = dice.choice(list(SHAPES))
    # Many steps of a run take equally long, so that some of them end at one instant.
    beat_seconds = round(dice.uniform(0.05, 1.2), 2)
    steps: list[PlannedStep] = []
    for needs in SHAPES[words](dice):
        names = [steps[place].name for place in needs]
        steps.append(_step(dice, len(steps), names, beat_seconds))
    return PlannedRun(
        goal=f"{words} of {len(steps)} steps",
        steps=tuple(steps),
        at_seconds=dice.uniform(0, 0.95 * seconds),
        cancel_after_seconds=dice.uniform(0, 4) if dice.random() < 0.06 else None,
    )


def _step(dice: random.Random, number: int, needs: list[str], beat_seconds: float) -> PlannedStep:
    fate, given, more = _task(dice, needs, beat_seconds)
    name = f"{'tool_call' if 'tool' in given else 'approval'}.s{number}"
    body = {"name": name, "input": given, "dependsOn": needs, **more}
    return PlannedStep(name, body, tuple(needs), fate)


def _task(
    dice: random.Random, needs: list[str], beat_seconds: float
) -> tuple[Fate, dict[str, Any], dict[str, Any]]:
    """Fate and input of a step, and its max_retry where that is not the usual."""

    def call(tool: str, **args: Any) -> dict[str, Any]:
        return {"tool": tool, "args": args}

    seconds = beat_seconds if dice.random() < 0.7 else round(dice.uniform(0.05, 1.2), 2)
    chance = dice.random()
    if chance < 0.02:
        return "max_retry", call("flaky", failures=1_000_000, seconds=seconds), {"max_retry": 2}
    if chance < 0.03:
        return "permanent", call("fetch_data", name="none such"), {}
    if chance < 0.08:
        return "approved" if dice.random() < 0.8 else "rejected", {"why": "chaos"}, {}
    if chance < 0.40:
        return "succeeds", call("flaky", failures=dice.choice([1, 2]), seconds=seconds), {}
    if chance < 0.50:
        return "succeeds", call("fetch_data"), {}
    if chance < 0.70 and needs:
        return "succeeds", call("echo", before=f"{{{{ {dice.choice(needs)}.output }}}}"), {}
    return "succeeds", call("sleep", seconds=seconds), {}


# --- blows -----------------------------------------------------------------------------------


def _blows(dice: random.Random, seconds: float, workers: int, lease_seconds: float) -> list[Blow]:
    """One every two seconds or so; every third only freezes, for longer than a lease."""
    blows: list[Blow] = []
    at_seconds = dice.uniform(1, 3)
    while at_seconds < seconds:
        frozen = dice.uniform(1.1, 2) * lease_seconds if dice.random() < 0.35 else None
        blows.append(Blow(at_seconds, dice.randrange(workers), frozen))
        at_seconds += dice.uniform(0.8, 3)
    return blows

"""What a run is to look like, said without SQL and without steps in time.

A step has a fate of its own: it still waits for its turn, it runs, or it has come to an end by
itself. How it shows follows from its fate and from how those show that it depends on; so nothing
here promotes, cancels descendants or revives: it is simply true again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from config import Retry
from tests.support.runs import Edges

WAITS, RUNS = "waits", "runs"
DEAD = ("FAILED", "CANCELLED")
FINAL = ("SUCCEEDED", *DEAD)


@dataclass
class Step:
    """One step, by itself."""

    is_approval: bool
    needs: list[str]
    fate: str = WAITS  # or RUNS, or how it has ended
    is_asked_to_stop: bool = False
    failures: int = 0
    lost: int = 0  # hand-outs without a verdict, the present one included

    def begin(self) -> None:
        """It is claimed."""
        self.fate, self.lost = RUNS, self.lost + 1

    def end(self, verdict: str, retry: Retry) -> None:
        """Its worker settles it; "reaped": nobody does."""
        if verdict in ("failure", "permanent", "deadline"):
            self.failures, self.lost = self.failures + 1, self.lost - 1
        if self.is_asked_to_stop:
            self.fate = "CANCELLED"
        elif verdict == "succeeded":
            self.fate = "SUCCEEDED"
        elif verdict == "failure":
            self.fate = "FAILED" if self.failures >= retry.max_retry else WAITS
        elif verdict == "reaped":
            self.fate = "FAILED" if self.lost >= retry.max_delivery else WAITS
        else:
            self.fate = "FAILED" if verdict in ("permanent", "deadline") else WAITS
        if verdict in ("released", "outage") and self.fate == WAITS:
            self.lost -= 1

    def start_anew(self) -> None:
        """It is requeued."""
        self.fate, self.failures, self.lost = WAITS, 0, 0


@dataclass
class Run:
    """A run: its steps, and whether somebody has cancelled it."""

    steps: Mapping[str, Step]
    is_cancelled: bool = False

    @classmethod
    def of(cls, edges: Edges) -> Run:
        return cls(
            {name: Step(name.startswith("approval."), list(needs)) for name, needs in edges.items()}
        )

    def look(self) -> dict[str, str]:
        """How each step shows, and under "" the run."""
        shown: dict[str, str] = {}
        for name, step in self.steps.items():  # each comes after those it needs
            before = [shown[need] for need in step.needs]
            if step.fate != WAITS:
                shown[name] = "RUNNING" if step.fate == RUNS else step.fate
            elif set(before) & set(DEAD):
                shown[name] = "CANCELLED"
            elif set(before) <= {"SUCCEEDED"}:
                shown[name] = "AWAITING_APPROVAL" if step.is_approval else "PENDING"
            else:
                shown[name] = "BLOCKED"
        shown[""] = self._look_at_all(list(shown.values()))
        return shown

    def _look_at_all(self, shown: list[str]) -> str:
        if set(shown) - set(FINAL):
            return "BLOCKED"
        if self.is_cancelled:
            return "CANCELLED"
        return next((dead for dead in DEAD if dead in shown), "SUCCEEDED")

    def unmet(self) -> dict[str, int]:
        shown = self.look()
        return {
            name: sum(shown[need] != "SUCCEEDED" for need in step.needs)
            for name, step in self.steps.items()
        }

    def reasons_of_death(self) -> dict[str, str]:
        """Why what is CANCELLED is so."""
        shown = self.look()
        return {
            name: "cancelled" if step.fate == "CANCELLED" else "dependency_failed"
            for name, step in self.steps.items()
            if shown[name] == "CANCELLED"
        }

    # --- what people do; each says whether it is allowed ---

    def cancel_step(self, name: str) -> bool:
        if self.look()[name] in FINAL:
            return False
        self._stop(self.steps[name])
        return True

    def cancel(self) -> bool:
        if self.look()[""] in FINAL:
            return False
        self.is_cancelled = True
        for name, shown in self.look().items():
            if name and shown not in FINAL:
                self._stop(self.steps[name])
        return True

    def _stop(self, step: Step) -> None:
        if step.fate == RUNS:
            step.is_asked_to_stop = True
        else:
            step.fate = "CANCELLED"

    def decide(self, name: str, approved: bool) -> bool:
        if self.look()[name] != "AWAITING_APPROVAL":
            return False
        self.steps[name].fate = "SUCCEEDED" if approved else "FAILED"
        return True

    def requeue(self, name: str) -> bool:
        if self.look()[name] != "FAILED" or self.is_cancelled:
            return False
        self.steps[name].start_anew()
        return True

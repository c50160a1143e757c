"""All measures, one after the other: python -m bench [--quick] [--check] [MEASURE ...]"""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench import goals
from bench.common import ROOT
from bench.report import RESULTS
from local.output import say

MEASURES = (
    "drain",
    "submit",
    "pickup",
    "idle",
    "growth",
    "churn",
    "runs",
    "agents",
    "passthrough",
    "watchers",
)
# What has nothing to do with the peers, and takes long.
NOT_WHEN_QUICK = ("runs", "agents", "passthrough")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast this is.")
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=", ".join(MEASURES))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")
    given = parser.parse_args()
    if unknown := set(given.measures) - set(MEASURES):
        parser.error(f"there is no measure {', '.join(sorted(unknown))}")
    left_out = NOT_WHEN_QUICK if given.quick and not given.measures else ()
    wanted = [name for name in given.measures or MEASURES if name not in left_out]
    failed = [name for name in wanted if not take(name, given.quick)]
    found = goals.read_results()
    verdicts = goals.judge({name: found[name] for name in wanted if name in found})
    if left_out:
        say(f"left out because it is to be quick; name them to take them: {', '.join(left_out)}")
    if failed:
        say(f"not taken: {', '.join(failed)}")
    goals.show(verdicts)
    sys.exit(bool(failed) or (given.check and any(one.is_missed for one in verdicts)))


def take(measure: str, quick: bool) -> bool:
    """Take a measure in a process of its own; what it found before is forgotten."""
    (RESULTS / f"{measure}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", f"bench.{measure}", *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=ROOT).returncode == 0


if __name__ == "__main__":
    main()

"""Sum up bench/results for the documents: python -m bench.summary

Writes bench/results/summary.json, which is kept with the code, and from that docs/measurements.md,
the plots, and the table of goals in docs/performance.md. A measure that has no file here now keeps
what the summary said of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.common import ROOT
from bench.goals import GOALS, Goal
from bench.plots import draw
from bench.report import RESULTS, SUMMARY, Spread

DOCS = ROOT / "docs"
MEASUREMENTS = DOCS / "measurements.md"
PERFORMANCE = DOCS / "performance.md"
ABOVE_GOALS = "<!-- The table is written by: python -m bench.summary -->"
BELOW_GOALS = "<!-- The end of that table. -->"
INTRODUCTION = """\
# What was measured

All figures of the measures in `bench/`, as they were last taken; what each means, and what to make
of it, is in [performance.md](performance.md). The middle of n repetitions, with the smallest and
the largest; a ratio is of figures of one repetition. `python -m bench.summary` writes this page.
"""


def without_values(found: dict[str, Any]) -> dict[str, Any]:
    """A result without the single repetitions, but with their number."""
    kept = dict(found)
    for kind in ("figures", "ratios"):
        kept[kind] = {
            label: {
                **{key: _rounded(value) for key, value in one.items() if key != "values"},
                "n": len(one["values"]),
            }
            for label, one in found[kind].items()
        }
    return kept


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def table(found: dict[str, Any]) -> list[str]:
    """A measure's lines of Markdown."""
    lines = [f"## {found['title']}", "", "| | median (min-max) | n |", "| --- | --- | --- |"]
    for kind, prefix in (("figures", ""), ("ratios", "ratio ")):
        for label, one in found[kind].items():
            unit = one.get("unit", "")
            lines.append(f"| {prefix}{label} | {_spread(one)} {unit} | {one['n']} |")
    notes = "; ".join(found["notes"])
    lines += ["", f"Taken {found['when']} of commit {found['commit']}; {notes}.", ""]
    return [line.replace("  ", " ") for line in lines]


def table_of_goals(summary: dict[str, Any]) -> list[str]:
    """What was found of each goal, in lines of Markdown."""
    return [
        "| | ratio, or figure | goal | found: median (min-max) of n | |",
        "| --- | --- | --- | --- | --- |",
        *(_row(goal, summary.get(goal.measure, {}).get("ratios", {})) for goal in GOALS),
    ]


def _row(goal: Goal, ratios: dict[str, Any]) -> str:
    begin = f"| {goal.area} | {goal.ratio} | {goal.limit}"
    if (one := ratios.get(goal.ratio)) is None:
        return f"{begin} | | not measured |"
    verdict = "reached" if goal.is_reached(one["median"]) else "**missed**"
    return f"{begin} | {_spread(one)} of {one['n']} | {verdict} |"


def _spread(one: dict[str, Any]) -> Spread:
    return Spread(one["median"], one["low"], one["high"])


def with_goals(page: str, lines: list[str]) -> str:
    """The page with these lines where its table of goals was; ValueError: it has no such place."""
    above, mark, rest = page.partition(ABOVE_GOALS)
    _, end, below = rest.partition(BELOW_GOALS)
    if not mark or not end:
        raise ValueError(f"nothing stands between {ABOVE_GOALS!r} and {BELOW_GOALS!r}")
    return "\n".join([above + mark, "", *lines, "", end + below])


def pages(summary: dict[str, Any]) -> dict[Path, str]:
    """What is to stand in each document."""
    tables = [line for found in summary.values() for line in table(found)]
    return {
        MEASUREMENTS: "\n".join([INTRODUCTION, *tables]),
        PERFORMANCE: with_goals(PERFORMANCE.read_text(), table_of_goals(summary)),
    }


def summarise(folder: Path = RESULTS) -> dict[str, Any]:
    """Each measure's result, by its name."""
    path = folder / SUMMARY
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for file in sorted(folder.glob("*.json")):
        if file.name != SUMMARY:
            found = json.loads(file.read_text())
            summary[found["measure"]] = without_values(found)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    return summary


if __name__ == "__main__":
    summary = summarise()
    draw(summary)
    for page, text in pages(summary).items():
        page.write_text(text)

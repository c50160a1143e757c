"""Sum up bench/results for docs/performance.md and for the next reader: python -m bench.summary

Writes bench/results/summary.json, which is kept with the code, draws it into docs/plots, and prints
the tables. A measure that has no file here now keeps what the summary said of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.plots import draw
from bench.report import RESULTS, SUMMARY, Spread
from local.output import say


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
    lines = [f"### {found['title']}", "", "| | median (min-max) | n |", "| --- | --- | --- |"]
    for kind, prefix in (("figures", ""), ("ratios", "ratio ")):
        for label, one in found[kind].items():
            shown = Spread(one["median"], one["low"], one["high"])
            unit = one.get("unit", "")
            lines.append(f"| {prefix}{label} | {shown} {unit} | {one['n']} |".replace("  ", " "))
    lines += [
        "",
        f"Taken {found['when']} of commit {found['commit']}; {'; '.join(found['notes'])}.",
    ]
    return [*lines, ""]


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
    for result in summary.values():
        say("\n".join(table(result)))

"""Draws what bench/results/summary.json says as bars, into docs/plots: python -m bench.summary

A bar is a median, the line across its end goes from the smallest to the largest. The text has the
fonts of the reader's system and the colours of his light or dark page; nothing else is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench.common import ROOT
from bench.goals import GOALS
from bench.report import Spread

FOLDER = ROOT / "docs" / "plots"

WIDTH, LABELS, BARS = 860, 290, 380  # the rest is for the figures
ROW, BAR, HEAD, FOOT = 30, 16, 58, 34
STYLE = """
    text { font: 14px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2937; }
    .title { font-size: 17px; font-weight: 600; }
    .quiet { font-size: 12px; fill: #6b7280; }
    .ours { font-weight: 600; }
    rect { fill: #9ca3af; } rect.ours { fill: #2563eb; }
    path { fill: none; stroke: #1f2937; stroke-width: 1.5; }
    .limit { stroke-dasharray: 4 3; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb; } .quiet { fill: #9ca3af; }
      rect { fill: #6b7280; } rect.ours { fill: #60a5fa; }
      path { stroke: #e5e7eb; }
    }
"""
# How labels of what is not ours begin.
OTHERS = re.compile(
    r"bare loop|PgQueuer|graphile-worker|Procrastinate|Chancy|empty|endpoint|lone INSERT"
)


@dataclass(frozen=True)
class Bar:
    label: str
    spread: Spread
    is_ours: bool


@dataclass(frozen=True)
class Chart:
    """Figures of one measure and unit whose labels match."""

    measure: str
    title: str
    unit: str
    labels: str = ""
    better: str = "more is better"

    def bars(self, found: Mapping[str, Any]) -> list[Bar]:
        return [
            Bar(label, _spread(one), not OTHERS.match(label))
            for label, one in found["figures"].items()
            if one["unit"] == self.unit and re.search(self.labels, label)
        ]


CHARTS = (
    Chart("drain", "Drain of no-op tasks, tasks/s", "tasks/s", r", \d workers?$"),
    Chart("submit", "Submit over HTTP, 64 connections, requests/s", "requests/s"),
    Chart("pickup", "Pickup: commit to start of the work, ms", "ms", better="less is better"),
)


def draw(summary: Mapping[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Write a file for each chart whose measure was taken."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in CHARTS:
        if chart.measure in summary:
            bars = chart.bars(summary[chart.measure])
            text = picture(chart.title, bars, chart.better)
            written.append(_write(folder / f"{chart.measure}.svg", text))
    if "idle" in summary:
        title = "Idling and footprint, percent of what the goal allows"
        text = picture(title, shares_of_goals(summary["idle"]), "less is better", limit=100)
        written.append(_write(folder / "idle.svg", text))
    return written


def shares_of_goals(found: Mapping[str, Any]) -> list[Bar]:
    """Figures of different units on one scale: each as a part of its goal's limit."""
    bars = []
    for goal in GOALS:
        one = found["ratios"].get(goal.ratio) if goal.measure == found["measure"] else None
        if one and goal.at_most:
            parts = (100 * one[key] / goal.at_most for key in ("median", "low", "high"))
            label = f"{goal.ratio}, at most {goal.at_most:g}"
            bars.append(Bar(label, Spread(*parts), is_ours=True))
    return bars


def picture(title: str, bars: list[Bar], better: str, limit: float | None = None) -> str:
    """An SVG of horizontal bars on one scale that begins at 0."""
    largest = max([bar.spread.high for bar in bars] + [limit or 0]) or 1
    height = HEAD + ROW * len(bars) + FOOT
    middle = HEAD + ROW * len(bars) / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"  <style>{STYLE}  </style>",
        f'  <text class="title" x="8" y="26">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        lines += _row(bar, HEAD + ROW * number, BARS / largest)
    if limit is not None:
        x = LABELS + BARS * limit / largest
        lines.append(f'  <path class="limit" d="M{x:.1f} {HEAD - 8}V{2 * middle - HEAD:.1f}"/>')
    note = f"{better}; median, and the line from the smallest to the largest"
    lines.append(f'  <text class="quiet" x="8" y="{height - 12}">{note}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _row(bar: Bar, top: float, scale: float) -> Iterator[str]:
    kind = ' class="ours"' if bar.is_ours else ""
    middle = top + BAR / 2
    low, median, high = (
        scale * value for value in (bar.spread.low, bar.spread.median, bar.spread.high)
    )
    x = LABELS
    yield f'  <text{kind} x="8" y="{middle + 5:.1f}">{escape(bar.label)}</text>'
    yield f'  <rect{kind} x="{x}" y="{top:.1f}" width="{median:.1f}" height="{BAR}" rx="2"/>'
    yield (
        f'  <path d="M{x + low:.1f} {middle - 4:.1f}v8M{x + low:.1f} {middle:.1f}H{x + high:.1f}'
        f'M{x + high:.1f} {middle - 4:.1f}v8"/>'
    )
    after = x + max(median, high) + 8
    yield f'  <text{kind} x="{after:.1f}" y="{middle + 5:.1f}">{escape(str(bar.spread))}</text>'


def _spread(one: Mapping[str, float]) -> Spread:
    return Spread(one["median"], one["low"], one["high"])


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path

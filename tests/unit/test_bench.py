"""How measures of speed are summed up and judged."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import goals
from bench.goals import GOALS, Goal, judge, read_results
from bench.plots import draw
from bench.report import RESULTS, SUMMARY, Record, percentile, short, spread
from bench.summary import pages, table, table_of_goals, with_goals, without_values

FASTER = Goal("Drain", "drain", "ours / theirs", at_least=1.0)
SMALLER = Goal("Idle", "idle", "transactions/s", at_most=1.0)


def test_a_spread_is_the_middle_and_the_two_ends() -> None:
    found = spread([3.0, 1.0, 10.0])
    assert (found.median, found.low, found.high) == (3.0, 1.0, 10.0)
    assert spread([1.0, 2.0]).median == 1.5


@pytest.mark.parametrize(("share", "found"), [(50, 50), (99, 99), (100, 100), (0, 1), (99.5, 100)])
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(share: float, found: int) -> None:
    assert percentile(range(100, 0, -1), share) == found


def test_the_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(
    ("number", "text"),
    [(12345.6, "12,346"), (56.78, "56.8"), (3.456, "3.46"), (0.01234, "0.0123"), (0, "0")],
)
def test_a_number_is_shown_with_the_digits_that_mean_something(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("ratios", "is_missed"),
    [
        ({"drain": {"ours / theirs": 1.0}, "idle": {"transactions/s": 1.0}}, [False, False]),
        ({"drain": {"ours / theirs": 0.99}, "idle": {"transactions/s": 1.01}}, [True, True]),
        ({"drain": {"ours / others": 0.1}}, [False, False]),
    ],
    ids=["the limits reach the goal", "beyond them it is missed", "what was not measured is not"],
)
def test_a_goal_is_missed_beyond_its_limit(
    ratios: dict[str, dict[str, float]], is_missed: list[bool]
) -> None:
    assert [one.is_missed for one in judge(ratios, [FASTER, SMALLER])] == is_missed


def test_what_was_not_measured_is_said_to_be_so() -> None:
    assert str(judge({}, [FASTER])[0]).startswith("not measured")


def test_every_goal_has_one_limit() -> None:
    assert all((goal.at_least is None) != (goal.at_most is None) for goal in GOALS)


def test_the_medians_of_what_was_written_are_judged(tmp_path: Path) -> None:
    record = Record("drain", "a drain")
    for value in (0.5, 2.0, 1.5):
        record.ratio("ours / theirs", value)
    record.add("ours", 5.0, "tasks/s")
    written = json.loads(record.save(tmp_path).read_text())
    assert written["figures"]["ours"]["values"] == [5.0]
    assert {"commit", "machine", "versions", "when"} <= set(written)
    assert read_results(tmp_path) == {"drain": {"ours / theirs": 1.5}}


@pytest.mark.parametrize(
    ("arguments", "code", "is_told"),
    [
        (["drain"], False, "reached       Drain: 2 workers / graphile-worker"),
        (["idle", "--check"], True, "missed        Idle: transactions/s is 2.00"),
        (["idle"], False, "missed        Idle: transactions/s is 2.00"),
        (["drain", "--check"], False, "not measured  Idle: transactions/s"),
        (["--quick"], False, "left out because it is to be quick"),
        (["submit"], True, "not taken: submit"),
    ],
)
def test_a_bench_judges_what_it_took_and_names_what_it_did_not(
    arguments: list[str],
    code: bool,
    is_told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = {"drain": {"2 workers / graphile-worker": 1.0}, "idle": {"transactions/s": 2.0}}
    monkeypatch.setattr(goals, "read_results", lambda: results)
    all_of_them = not set(bench.MEASURES) & set(arguments)
    monkeypatch.setattr(bench, "take", lambda name, quick: all_of_them or name in results)
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert bool(ended.value.code) == code
    assert is_told in capsys.readouterr().out


# --- plots -----------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def found(measure: str, figures: dict[str, float], unit: str = "tasks/s") -> dict[str, Any]:
    """What the summary says of a measure with two repetitions, the second twice as much."""
    record = Record(measure, f"<{measure}> & more")
    for label, value in figures.items():
        record.add(label, value, unit)
        record.add(label, 2 * value, unit)
        record.ratio(label, value)
    return without_values(record.as_json())


def drawn(tmp_path: Path, summary: dict[str, Any]) -> dict[str, ET.Element]:
    return {path.stem: ET.parse(path).getroot() for path in draw(summary, tmp_path)}  # noqa: S314


def test_a_plot_has_a_bar_for_each_figure_with_its_words_and_a_line_between_its_ends(
    tmp_path: Path,
) -> None:
    figures = {"ours, 1 worker": 100.0, "PgQueuer, 1 worker": 300.0, "a trial": 5.0}
    drain = drawn(tmp_path, {"drain": found("drain", figures)})["drain"]
    bars = drain.findall(f"{SVG}rect")
    assert [bar.get("class") for bar in bars] == ["ours", None]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    words = [text.text for text in drain.findall(f"{SVG}text")]
    assert {"ours, 1 worker", "150 (100-200)", "450 (300-600)"} <= set(words)
    assert "a trial" not in words
    ends = [
        [float(x) for x in re.findall(r"[MH]([\d.]+)", line.get("d", ""))]
        for line in drain.findall(f"{SVG}path")
    ]
    assert (ends[1][0] - 290) / (ends[1][2] - 290) == pytest.approx(0.5, rel=0.01)


def test_a_plot_needs_nothing_from_elsewhere_and_suits_a_dark_page(tmp_path: Path) -> None:
    for path in draw({"pickup": found("pickup", {"pickup p50": 1.0}, "ms")}, tmp_path):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "prefers-color-scheme: dark" in text
        assert not re.search(r"https?:|url\(|@import|href", text)


def test_figures_of_different_units_are_drawn_as_parts_of_their_goals(tmp_path: Path) -> None:
    idle = drawn(tmp_path, {"idle": found("idle", {"worker MB": 30.0, "unheard of": 1.0})})["idle"]
    words = [text.text for text in idle.findall(f"{SVG}text")]
    assert {"worker MB, at most 60", "50.0 (50.0-50.0)"} <= set(words)
    assert len(idle.findall(f"{SVG}rect")) == 1


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert drawn(tmp_path, {}) == {}


# --- documents -------------------------------------------------------------------------------


def test_a_table_shows_the_middle_and_both_ends() -> None:
    lines = table(found("drain", {"ours, 1 worker": 100.0}))
    assert "| ours, 1 worker | 150 (100-200) tasks/s | 2 |" in lines


def test_the_table_of_goals_says_of_each_what_was_found_and_whether_it_is_reached() -> None:
    summary = {"idle": found("idle", {"worker MB": 50.0, "API MB": 100.0})}
    lines = table_of_goals(summary)
    assert "| Footprint | worker MB | at most 60 | 50.0 (50.0-50.0) of 1 | reached |" in lines
    assert "| Footprint | API MB | at most 90 | 100 (100-100) of 1 | **missed** |" in lines
    assert "| Pass-through | tokens/s / directly | at least 0.97 | | not measured |" in lines
    assert len(lines) == 2 + len(GOALS)


def test_a_page_without_a_place_for_the_table_of_goals_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing stands between"):
        with_goals("# How fast it is", ["a line"])


def test_the_documents_show_what_the_summary_says() -> None:
    summary = json.loads((RESULTS / SUMMARY).read_text())
    assert [page.name for page, text in pages(summary).items() if page.read_text() != text] == []

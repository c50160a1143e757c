"""How measures of speed are summed up and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.goals import GOALS, Goal, judge, read_results
from bench.report import Record, percentile, short, spread

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

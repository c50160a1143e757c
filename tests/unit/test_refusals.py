"""execution/refusals.py: when a refusal is the prompt's own fault, and when it is not."""

from __future__ import annotations

import pytest

from execution.refusals import MOST_REFUSALS, MOST_REMEMBERED, Refusals

ODD, OTHER = 1, 2
BOTH_REASONS = pytest.mark.parametrize("by_overload", [True, False])


@pytest.fixture
def seen() -> Refusals:
    return Refusals()


def serve(seen: Refusals, task_id: int = OTHER, route: str = "local") -> None:
    seen.answered(route, task_id, seen.begin())


def refuse(seen: Refusals, task_id: int = ODD, by_overload: bool = True) -> bool:
    seen.begin()
    return seen.is_to_blame("local", task_id, by_overload)


@BOTH_REASONS
def test_a_prompt_that_is_refused_while_others_are_served_is_to_blame_from_then_on(
    seen: Refusals, by_overload: bool
) -> None:
    verdicts = []
    for _ in range(MOST_REFUSALS + 3):
        verdicts.append(refuse(seen, by_overload=by_overload))
        serve(seen)
    assert verdicts == [False] * MOST_REFUSALS + [True] * 3


@BOTH_REASONS
def test_while_nobody_is_served_nobody_is_to_blame(seen: Refusals, by_overload: bool) -> None:
    serve(seen)
    assert not any(refuse(seen, by_overload=by_overload) for _ in range(100))


def test_even_one_who_was_to_blame_is_not_once_nobody_is_served(seen: Refusals) -> None:
    for _ in range(MOST_REFUSALS):
        refuse(seen)
        serve(seen)
    assert refuse(seen)
    assert not refuse(seen)


def test_while_others_are_refused_too_the_server_is_overloaded_and_nobody_is_to_blame(
    seen: Refusals,
) -> None:
    for _ in range(100):
        assert not refuse(seen, ODD)
        serve(seen, 3)
        assert not refuse(seen, OTHER)
        serve(seen, 4)


def test_a_key_that_serves_others_is_not_refused_so_each_refused_prompt_is_to_blame(
    seen: Refusals,
) -> None:
    verdicts = []
    for _ in range(MOST_REFUSALS + 1):
        verdicts.append([refuse(seen, task_id, by_overload=False) for task_id in (ODD, OTHER)])
        refuse(seen, 5, by_overload=True)
        serve(seen, 3)
    assert verdicts == [[False] * 2] * MOST_REFUSALS + [[True] * 2]


def test_a_call_that_had_begun_before_an_outage_and_ends_well_in_it_says_nothing(
    seen: Refusals,
) -> None:
    under_way = [seen.begin() for _ in range(100)]
    for number, began in enumerate(under_way):
        assert not refuse(seen)
        seen.answered("local", 1000 + number, began)


def test_what_another_route_serves_says_nothing(seen: Refusals) -> None:
    for _ in range(100):
        assert not refuse(seen)
        serve(seen, route="cloud")


def test_a_failed_probe_and_an_answer_of_its_own_let_a_task_begin_anew(seen: Refusals) -> None:
    for begin_anew in (lambda: seen.away("local"), lambda: serve(seen, ODD)):
        for _ in range(MOST_REFUSALS):
            assert not refuse(seen)
            serve(seen)
        begin_anew()
        serve(seen)
        assert not refuse(seen)
        serve(seen, ODD)


def test_what_it_remembers_is_bounded(seen: Refusals) -> None:
    for task_id in range(3 * MOST_REMEMBERED):
        refuse(seen, task_id)
    assert len(seen._refused) == MOST_REMEMBERED

"""execution/routes.py: what a worker asks for while routes are paused, limited or open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from config import Routing
from execution.routes import Routes
from queries.claims import Look, Wanted
from queries.leases import ClaimedTask, Lease
from scheduler import decide_route

ALL_FIXED = {Wanted("none", "none"), Wanted("local", "local"), Wanted("cloud", "cloud")}
SHORT, LONG = 100, 101


def routes(*open_routes: str, **routing: object) -> Routes:
    made = Routes(Routing(**routing), decide_route)  # type: ignore[arg-type]
    for name in open_routes:
        made.open(name)
    return made


def look(depth: int, slots: int = 4, **in_flight: int) -> Look:
    return Look(depth, slots, in_flight)


def task(number: int, length: int, requested: str = "auto") -> ClaimedTask:
    payload = {"prompt": "x" * length}
    return ClaimedTask(Lease(number, "t"), number, "prompt", payload, requested, None, 1, 1, 0)


def autos(found: list[Wanted]) -> set[Wanted]:
    return {one for one in found if one.requested_route == "auto"}


def test_with_both_routes_open_everything_is_wanted() -> None:
    wanted, budgets = routes("local", "cloud").wanted(look(3))
    assert set(wanted) == {*ALL_FIXED, Wanted("auto", "local")}
    assert (budgets["local"], budgets["cloud"]) == (None, None)


def test_before_the_first_probe_only_what_calls_no_model_is_wanted() -> None:
    wanted, _ = routes().wanted(look(3))
    assert wanted == [Wanted("none", "none")]


@pytest.mark.parametrize("depth", [1, 5, 6, 9])
def test_long_prompts_go_to_the_cloud_at_every_depth_while_local_is_away(depth: int) -> None:
    wanted, _ = routes("cloud").wanted(look(depth))
    assert Wanted("auto", "cloud", min_chars=LONG) in wanted


@pytest.mark.parametrize(("depth", "rest"), [(5, None), (6, None), (7, 1), (9, 3)])
def test_short_prompts_go_to_the_cloud_only_while_the_queue_is_deep(
    depth: int, rest: int | None
) -> None:
    wanted, budgets = routes("cloud").wanted(look(depth))
    assert (Wanted("auto", "rest", max_chars=SHORT) in wanted) == (rest is not None)
    assert budgets["rest"] == (rest or 0)


def test_with_a_very_deep_queue_no_prompt_is_measured() -> None:
    wanted, _ = routes("cloud").wanted(look(10, slots=4))
    assert autos(wanted) == {Wanted("auto", "cloud")}


def test_while_the_cloud_is_away_long_prompts_wait() -> None:
    wanted, _ = routes("local").wanted(look(3))
    assert autos(wanted) == {Wanted("auto", "local", max_chars=SHORT)}
    assert Wanted("cloud", "cloud") not in wanted


def test_what_is_wanted_is_known_without_a_look_unless_depth_or_calls_in_flight_matter() -> None:
    everything = {"none", "local", "cloud", "auto"}
    for made, requested in (
        (routes(), {"none"}),
        (routes("local", "cloud"), everything),
        (routes("local", "cloud", fallback=True), everything),
        (routes("cloud", fallback=True), everything),
        (routes("cloud"), None),  # deep or not: that decides what becomes of short prompts
        (routes("local"), None),
        (routes("local", "cloud", local_max_in_flight=2), None),
    ):
        asked = made.routes_at_any_depth()
        assert (asked and set(asked)) == requested
        if asked is not None:
            for depth in (1, 100):
                others, _ = made.wanted(look(depth))
                assert {one.requested_route for one in others} == requested


def test_without_a_look_too_tasks_go_only_where_a_route_is_open() -> None:
    made = routes("cloud", fallback=True)
    made.routes_at_any_depth()
    tasks = [task(1, SHORT), task(2, LONG), task(3, SHORT, "local"), task(4, SHORT, "none")]
    assert made.choose(tasks, 0) == ["cloud", "cloud", "cloud", None]
    made = routes("local", "cloud")
    made.routes_at_any_depth()
    assert made.choose(tasks, 0) == ["local", "cloud", "local", None]


def test_with_fallback_whatever_is_open_takes_all() -> None:
    wanted, _ = routes("cloud", fallback=True).wanted(look(3))
    assert {one.budget for one in wanted} == {"none", "cloud"}
    assert {one.requested_route for one in wanted} == {"none", "local", "cloud", "auto"}


def test_a_limit_leaves_so_many_places_as_are_free() -> None:
    made = routes("local", "cloud", cloud_max_in_flight=3)
    wanted, budgets = made.wanted(look(3, cloud=2))
    assert budgets["cloud"] == 1
    assert Wanted("auto", "cloud", min_chars=LONG) in wanted
    assert made.choose([task(1, LONG), task(2, LONG)], 0) == ["cloud", None]


def test_a_full_route_wants_nothing_more() -> None:
    wanted, _ = routes("local", "cloud", local_max_in_flight=2).wanted(look(3, local=2))
    assert Wanted("local", "local") not in wanted
    assert autos(wanted) == {Wanted("auto", "cloud", min_chars=LONG)}


def test_tasks_without_a_route_are_looked_for_while_any_route_is_open() -> None:
    everything = {"none", "local", "cloud", "auto"}
    for made, requested in (
        (routes(), {"none"}),
        (routes("cloud"), {"none", "cloud", "auto"}),
        (routes("local", "cloud"), everything),
        (routes("cloud", fallback=True), everything),
    ):
        wanted, _ = made.wanted(look(3))
        assert {one.requested_route for one in wanted} == requested


def test_the_pauses_of_a_route_grow_until_a_call_has_worked() -> None:
    made = routes("local")
    assert [made.pause("local", "away") for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    made.open("local")
    assert made.pause("local", "away again") == 30
    made.worked("local")
    assert made.pause("local", "away") == 1


def test_retry_after_is_obeyed_where_it_is_longer() -> None:
    assert routes("local").pause("local", "busy", 17) == 17
    assert routes("local").pause("local", "busy", 0.1) == 1


def test_a_task_whose_route_cannot_be_decided_is_left_without_one_and_the_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decide(payload: Mapping[str, Any], metrics: Mapping[str, Any], routing: Routing) -> str:
        return {"x": "local", "xx": "nowhere"}[payload["prompt"]]

    made = Routes(Routing(), decide)
    made.open("local")
    made.open("cloud")
    made.routes_at_any_depth()
    tasks = [task(1, 1), task(2, 2), task(3, 3), task(4, 1)]
    assert made.choose(tasks, 0) == ["local", None, None, "local"]
    for number in (2, 3):
        assert f"No route can be decided for task {number}" in caplog.text

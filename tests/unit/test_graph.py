"""Names of steps, the order in which they can run, and circles among them."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from runs.graph import CycleFound, topological_order
from runs.names import StepRefused, kind_of

hypothesis = pytest.importorskip(
    "hypothesis", reason="needs hypothesis: pip install -r requirements-dev.txt"
)
st = hypothesis.strategies

# --- order -----------------------------------------------------------------------------------


def test_an_order_that_is_right_already_stays_as_it_was_given() -> None:
    needs = {"z": [], "b": ["z"], "y": [], "a": ["b", "y"], "x": []}
    assert topological_order(needs) == ["z", "b", "y", "a", "x"]


def test_a_name_moves_behind_what_it_needs_and_no_further() -> None:
    needs = {"last": ["first", "second"], "first": [], "free": [], "second": ["first"]}
    assert topological_order(needs) == ["first", "free", "second", "last"]


def test_a_name_that_is_needed_twice_over_stands_there_once() -> None:
    diamond = {"d": ["b", "c"], "c": ["a"], "b": ["a"], "a": []}
    assert topological_order(diamond) == ["a", "c", "b", "d"]


def test_nothing_has_an_order() -> None:
    assert topological_order({}) == []


def chain(length: int) -> dict[str, list[str]]:
    """Each needs the one before."""
    return {f"s{n}": [f"s{n - 1}"] if n else [] for n in range(length)}


def test_long_chains_and_wide_stars_are_ordered_forwards_and_backwards() -> None:
    names = [f"s{n}" for n in range(10_000)]
    assert topological_order(chain(10_000)) == names
    backwards = dict(reversed(chain(10_000).items()))
    assert topological_order(backwards) == names
    star = {"end": names} | {name: [] for name in names}
    assert topological_order(star) == [*names, "end"]


@st.composite
def graphs(draw: Any) -> dict[str, list[str]]:
    """Without a circle, in any order."""
    size = draw(st.integers(0, 12))
    needs = {
        f"s{n}": draw(st.lists(st.sampled_from([f"s{m}" for m in range(n)]), unique=True))
        if n
        else []
        for n in range(size)
    }
    return {name: needs[name] for name in draw(st.permutations(list(needs)))}


@hypothesis.settings(deadline=None, database=None, derandomize=True)
@hypothesis.given(graphs())
def test_every_name_stands_once_and_behind_what_it_needs(needs: dict[str, list[str]]) -> None:
    order = topological_order(needs)
    assert sorted(order) == sorted(needs)
    for name, needed in needs.items():
        assert all(order.index(one) < order.index(name) for one in needed)
    assert topological_order({name: needs[name] for name in order}) == order


# --- circles ---------------------------------------------------------------------------------


def cycle_of(needs: dict[str, list[str]]) -> list[str]:
    with pytest.raises(CycleFound) as found:
        topological_order(needs)
    assert str(found.value) == " -> ".join(found.value.cycle)
    return found.value.cycle


def test_a_circle_is_told_from_the_name_given_first_each_before_the_one_it_needs() -> None:
    assert cycle_of({"a": ["c"], "b": ["a"], "c": ["b"]}) == ["a", "c", "b", "a"]


def test_a_name_that_needs_itself_is_a_circle() -> None:
    assert cycle_of({"ok": [], "a": ["ok", "a"]}) == ["a", "a"]


def test_what_only_waits_for_a_circle_is_not_told_as_part_of_it() -> None:
    needs = {"tail": ["mid"], "mid": ["b"], "a": ["b", "fine"], "b": ["a"], "fine": []}
    assert cycle_of(needs) == ["a", "b", "a"]


def test_a_circle_of_many_is_found_whole() -> None:
    needs = chain(10_000) | {"s0": ["s9999"]}
    cycle = cycle_of(needs)
    assert len(cycle) == 10_001
    assert cycle[:3] == ["s0", "s9999", "s9998"]


@hypothesis.settings(deadline=None, database=None, derandomize=True)
@hypothesis.given(graphs(), st.randoms(use_true_random=False))
def test_whatever_circle_there_is_one_is_found_that_is_there(
    needs: dict[str, list[str]], chance: random.Random
) -> None:
    order = topological_order(needs)
    hypothesis.assume(order)
    last, first = sorted(chance.choices(range(len(order)), k=2))
    if order[last] not in needs[order[first]] and last != first:
        needs[order[first]].append(order[last])
    needs[order[last]].append(order[first])  # back: so there is a circle now
    cycle = cycle_of(needs)
    assert cycle[0] == cycle[-1]
    assert len(set(cycle)) == len(cycle) - 1
    assert all(after in needs[name] for name, after in pairwise(cycle))


# --- names -----------------------------------------------------------------------------------

KINDS = [
    ("llm_call.summarize", {"prompt": "p"}, "prompt"),
    ("llm_call.no_prompt_yet", {}, "prompt"),
    ("tool_call.fetch_data", {"tool": "fetch_data"}, "tool"),
    ("approval.by_legal", {}, "approval"),
    ("agent_call.team", {"task": "t"}, "agent"),
    ("agent_call.no_task_yet", {}, "agent"),
    ("approval.of_a_task", {"task": "t"}, "approval"),
    ("approval.of_a_tool", {"tool": "x", "prompt": "y"}, "approval"),
    ("fetch", {"tool": "fetch_data"}, "tool"),
    ("write", {"prompt": "p"}, "prompt"),
    ("output", {"prompt": "p"}, "prompt"),
    ("llm_call.output", {"prompt": "p"}, "prompt"),
    ("llm_call.llm_call", {"prompt": "p"}, "prompt"),
    ("0", {"tool": "x"}, "tool"),
    ("-_-", {"tool": None}, "tool"),
    ("x" * 64, {"prompt": ""}, "prompt"),
    ("tool_call." + "x" * 64, {"tool": "x"}, "tool"),
]


@pytest.mark.parametrize(("name", "given", "kind"), KINDS)
def test_the_prefix_tells_the_kind_else_the_input_does(
    name: str, given: dict[str, Any], kind: str
) -> None:
    assert kind_of(name, given) == kind


ILL_FORMED = [
    "", " ", ".", "..", "a.", ".a", "a.b", "llm_call.", ".llm_call", "llm_call..a", "llm_call.a.b",
    "llm_call.a ", " llm_call.a", "LLM_CALL.a", "Tool_call.a", "llm-call.a", "run.a", "approval.ü",
    "llm_call.a\n", "a\n", "a b", "é", "٣", "a/b", "a:b", "{{a}}", "x" * 65, "llm_call." + "x" * 65,
    "llm_call.tool_call.a", "agent_call.", "agent_call.a.b",
]  # fmt: skip


@pytest.mark.parametrize("name", ILL_FORMED)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(StepRefused, match="1 to 64 of A-Z") as refused:
        kind_of(name, {"prompt": "p"})
    assert refused.value.field == "name"


@pytest.mark.parametrize("name", ["llm_call", "tool_call", "agent_call", "approval"])
def test_a_prefix_alone_is_no_name(name: str) -> None:
    with pytest.raises(StepRefused, match="it is a prefix") as refused:
        kind_of(name, {"prompt": "p"})
    assert refused.value.field == "name"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "neither"),
        ({"args": {}}, "neither"),
        ({"prompt": "p", "tool": "t"}, "both"),
        ({"task": "t"}, "neither"),
    ],
)
def test_a_plain_name_whose_input_does_not_tell_the_kind_is_refused(
    given: dict[str, Any], found: str
) -> None:
    with pytest.raises(StepRefused, match=f"no telling what kind it is: .* {found}") as refused:
        kind_of("step", given)
    assert refused.value.field == "name"


@pytest.mark.parametrize(
    ("name", "field"),
    [("llm_call.x", "tool"), ("tool_call.x", "prompt"), ("llm_call.x", "task"),
     ("agent_call.x", "prompt"), ("agent_call.x", "tool")],
)  # fmt: skip
def test_a_prefix_that_the_input_contradicts_is_refused(name: str, field: str) -> None:
    with pytest.raises(StepRefused, match=f"takes no {field}") as refused:
        kind_of(name, {field: "x"})
    assert refused.value.field == f"input.{field}"

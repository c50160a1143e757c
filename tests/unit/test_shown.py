"""execution/agent/shown.py: what people are shown of a graph's state, whatever is in it."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from langchain_core.messages import HumanMessage
from pydantic import BaseModel

from execution.agent.shown import shown


class Colour(StrEnum):
    RED = "red"


class Model(BaseModel):
    text: str = "t"
    inner: list[int] = [1]


@dataclass(slots=True)
class Record:
    number: int
    unset: Any


class Pair(NamedTuple):
    left: int
    right: str


class Hostile(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("not now")


def channel(value: Any) -> Any:
    return shown({"x": value})["x"]


def test_public_channels_are_shown_but_for_the_task() -> None:
    values = {"plan": "p", "task": "t", "_own": 1, "__start__": 2, "branch:to:coder": None}
    assert shown(values) == {"plan": "p"}


@pytest.mark.parametrize("value", [None, True, 0, -7, 1.5, "é 🙂", [], {}, [1, {"a": [None]}]])
def test_json_is_shown_as_it_is(value: Any) -> None:
    assert channel(value) == value
    assert type(channel(value)) is type(value)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("a\0b", "a\ufffdb"),
        ("a\ud800b", "a\ufffdb"),
        ({"k\0": "\udfff"}, {"k\ufffd": "\ufffd"}),
        (math.nan, None),
        ([math.inf, -math.inf], [None, None]),
        ((1, 2), [1, 2]),
        ({3}, [3]),
        (deque([1]), [1]),
        (Pair(1, "r"), [1, "r"]),
        (Colour.RED, "red"),
        (Model(), {"text": "t", "inner": [1]}),
        (Record(1, {2}), {"number": 1, "unset": [2]}),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02 03:00:00+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (Decimal("0.10"), "0.10"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (PurePosixPath("/a"), "/a"),
        ({1: "a", None: "b", (1,): "c"}, {"1": "a", "NoneType": "b", "tuple": "c"}),
        (b"bytes", "bytes"),
        (object(), "object"),
        (print, "builtin_function_or_method"),
        (10**5000, "int"),
        (Hostile(a=1), "Hostile"),
        (Record, "type"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_does_not_have_is_shown_as_what_comes_next_to_it(value: Any, seen: Any) -> None:
    assert channel(value) == seen


def test_messages_are_shown_with_what_they_say() -> None:
    (message,) = channel([HumanMessage("hello")])
    assert (message["type"], message["content"]) == ("human", "hello")


def test_what_holds_itself_ends_somewhere() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert json.dumps(channel(endless)).endswith('"list"' + "]" * 50)
    for _ in range(60):
        endless = [endless, endless]
    assert size(shown({"x": endless, "y": "short"}, 10_000)) < 20_000


def size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


LARGE = {
    "a long text": "x" * 100_000,
    "a long text of large characters": "🙂" * 100_000,
    "a text that JSON makes longer": "\x01" * 100_000,
    "many texts": ["text"] * 100_000,
    "many numbers": list(range(100_000)),
    "many floats": [n / 7 for n in range(100_000)],
    "long keys": {f"{'k' * 1000}{n}": n for n in range(1000)},
    "a large model": Model(text="x" * 100_000),
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_a_state_that_is_too_large_has_its_large_channel_cut_and_the_others_whole(
    value: Any,
) -> None:
    state = shown({"large": value, "plan": "the plan", "done": False}, 9000)
    assert (state["plan"], state["done"]) == ("the plan", False)
    assert 1000 < size(state["large"]) <= 3100


def test_a_cut_text_is_seen_to_be_cut() -> None:
    cut = shown({"x": "word " * 1000}, 1000)["x"]
    assert cut.endswith("…")
    assert cut.startswith("word word")
    assert 800 < len(cut) < 1000


def test_a_state_that_fits_is_not_cut_however_it_is_shared_out() -> None:
    state = {"code": "x" * 9_000, **{f"small_{n}": "" for n in range(20)}}
    assert shown(state, 10_000) == state


def test_a_text_that_is_exactly_as_long_as_it_may_be_is_whole() -> None:
    assert channel("x" * 100) == "x" * 100
    assert shown({"x": "y" * 186}, 200) == {"x": "y" * 186}
    assert shown({"x": "y" * 187}, 200) != {"x": "y" * 187}


SMALL = {
    "texts": "word " * 1000,
    "marks": "\x01🙂" * 1000,
    "noes": [False] * 1000,
    "named noes": {str(n): False for n in range(1000)},
    "numbers": list(range(-1000, 1000)),
    "floats": [-(n + 0.1) / 7e200 for n in range(1000)],
    "a number": 10**3000,
    "deep": json.loads('[{"k":' * 24 + "[false,false]" + "}]" * 24),
    "hostile": Hostile(a=1),
    "k" * 100: None,
}


@pytest.mark.parametrize("name", [*SMALL, None])
def test_a_state_is_never_larger_than_it_may_be(name: str | None) -> None:
    """Whatever is in it, and however little that is."""
    state = SMALL if name is None else {name: SMALL[name]}
    for max_bytes in [*range(2, 400, 3), *range(400, 20_000, 397)]:
        assert size(shown(state, max_bytes)) <= max_bytes


def test_of_a_state_with_many_channels_those_are_shown_that_fit() -> None:
    state = shown({f"channel_{n}": "x" * n for n in range(1000)}, 5000)
    assert 3000 < size(state) <= 5000
    assert state["channel_0"] == ""

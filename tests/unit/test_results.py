"""execution/tools/results.py: what is stored of a result, and what needs no change for that."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from execution.tools.results import DEEPEST, NotStorable, is_plain, storable_result

PLENTY = 12_000


class Text(str):
    """Is no plain text: what it says of itself need not be what JSON takes of it."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def nested(depth: int, inside: Any, make: Any = lambda inner: [inner]) -> Any:
    for _ in range(depth):
        inside = make(inside)
    return inside


PARTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63), 2**63 - 1, 10**4000, math.inf, math.nan, -0.0, 1e308]),
    st.floats(),
    st.text(st.characters(codec=None), max_size=40),
    st.text(st.sampled_from('\0\x01"\\ax\n\x7f'), max_size=40),
    st.sampled_from([Text("a"), b"a", (1, 2), {1: 2}, {Text("a"): 1}, {None: 1}, {1}]),
)
VALUES = st.recursive(
    PARTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@given(VALUES, st.integers(0, 400) | st.just(PLENTY))
def test_what_is_plain_is_stored_as_it_is_and_within_the_bytes_that_were_said(
    value: Any, most_bytes: int
) -> None:
    if is_plain(value, most_bytes):
        stored = storable_result(value, most_bytes)  # which refuses what is longer
        assert as_json(stored) == as_json(value)
        assert type(stored) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -5,
        1.5,
        "",
        'a "text" of\nlines',
        {"Grüße": "你好 🙂"},
        [],
        {},
        {"seq": 12345, "pad": "x" * 176},
        {"rows": [{"a": 1, "b": [None, False]}] * 30},
        nested(DEEPEST, 1),
        nested(DEEPEST, 1, lambda inner: {"a": inner}),
    ],
)
def test_ordinary_json_is_plain(value: Any) -> None:
    assert is_plain(value, PLENTY)


LONGEST = [-sys.float_info.max, 1 - 2**63, "\x01" * 50, "🙂" * 50, "", "x", False, [], {}, {"": {}}]


@pytest.mark.parametrize("value", [[one] * 40 for one in LONGEST] + [{"": one} for one in LONGEST])
def test_what_takes_most_bytes_takes_no_more_than_is_counted(value: Any) -> None:
    said = next(most_bytes for most_bytes in range(10**6) if is_plain(value, most_bytes))
    assert len(as_json(value).encode()) <= said


NOT_PLAIN = {
    "NUL": "a\0b",
    "a NUL in a key": {"a\0": 1},
    "half a character": ["\ud83d"],
    "a text of a kind of its own": Text("a"),
    "a key that is no text": {1: 2},
    "a key of a kind of its own": {Text("a"): 1},
    "no number": math.nan,
    "endless": [-math.inf],
    "thousands of digits": 10**4000,
    "a tuple": (1, 2),
    "bytes": b"a",
    "nested too deeply": nested(DEEPEST + 1, 1),
    "nested very deeply": nested(2000, 1),
    "objects nested too deeply": nested(DEEPEST + 1, 1, lambda inner: {"a": inner}),
    "a long text": "x" * PLENTY,
    "a long key": {"x" * PLENTY: 1},
    "many values": [0] * PLENTY,
    "many members": {str(n): n for n in range(PLENTY)},
}


@pytest.mark.parametrize("value", NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_what_may_have_to_be_changed_or_refused_or_be_long_is_not_plain(value: Any) -> None:
    assert not is_plain(value, PLENTY)
    assert not is_plain([1, value, 1], PLENTY)
    assert not is_plain({"a": value, "b": 1}, PLENTY)


@pytest.mark.parametrize("value", ["x" * 98, "\u20ac" * 32 + "xx", "\n" * 49, [10] * 33])
def test_the_limit_is_exact(value: Any) -> None:
    assert len(as_json(value).encode()) == 100
    assert storable_result(value, 100) == value
    with pytest.raises(NotStorable, match="larger"):
        storable_result(value, 99)

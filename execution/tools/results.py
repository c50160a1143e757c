"""What a tool returned or a model wrote as JSON, made fit for the database, or refused for good."""

from __future__ import annotations

import json
import math
from typing import Any

from execution.errors import Permanent
from execution.text import storable

DEEPEST = 100
LONGEST_NUMBER_BITS = 10_000  # some 3,000 digits; Python reads back no more than 4,300

# As JSON: the longest character, and the longest of a plain value's other bytes, with its commas.
MOST_BYTES_OF_A_CHARACTER = 6
MOST_BYTES_OF_A_VALUE = 32

_shortest_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class NotStorable(Permanent):
    """This is no JSON value, or none that Postgres holds and Python reads back."""


def storable_result(value: Any, max_bytes: int) -> Any:
    """A copy of a JSON value, fit for Postgres; raises NotStorable."""
    copy = _Copy(max_bytes).of(value, 0)
    if len(_shortest_json(copy).encode()) > max_bytes:
        raise _too_large(max_bytes)
    return copy


def is_plain(value: Any, most_bytes: int) -> bool:
    """Whether a value is JSON that Postgres can hold as it stands, at most so many bytes in Python.

    A glance, which ends when the bytes are used up: of what it refuses, `storable_result` may make
    something, or may find it shorter.
    """
    return _left_of(most_bytes, value, DEEPEST) >= 0


def _left_of(left: int, value: Any, levels: int) -> int:
    """What is left of so many bytes after a value, at worst; below 0 also if it is not plain."""
    kind = type(value)
    left -= MOST_BYTES_OF_A_VALUE
    if kind is str:
        left -= MOST_BYTES_OF_A_CHARACTER * len(value)
        return left if left >= 0 and storable(value) == value else -1
    if kind is int:
        return left if -(2**63) < value < 2**63 else -1
    if kind is dict and levels:
        for key, member in value.items():
            left = _left_of(left, key, 0) if type(key) is str else -1
            left = _left_of(left, member, levels - 1)
            if left < 0:
                break
        return left
    if kind is list and levels:
        for member in value:
            left = _left_of(left, member, levels - 1)
            if left < 0:
                break
        return left
    if kind is float:
        return left if math.isfinite(value) else -1
    return left if value is None or kind is bool else -1


class _Copy:
    """Counts while it copies, so that a value that holds itself often is given up in time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._least_bytes = 0

    def of(self, value: Any, depth: int) -> Any:
        self._count(1)
        if depth > DEEPEST:
            raise NotStorable(f"the result is nested deeper than {DEEPEST}")
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._key(key): self.of(member, depth + 1) for key, member in value.items()}
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return _whole_number(int(value))
        if isinstance(value, float):
            return _number(float(value))
        if isinstance(value, list | tuple):
            return [self.of(member, depth + 1) for member in value]
        raise NotStorable(f"the result is no JSON: it holds a {_kind(value)}")

    def _key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise NotStorable(f"the result is no JSON: a key is a {_kind(key)}")
        return self._text(key)

    def _text(self, text: str) -> str:
        self._count(len(text))
        return storable(text)

    def _count(self, least_bytes: int) -> None:
        self._least_bytes += least_bytes
        if self._least_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)


def _whole_number(number: int) -> int:
    if number.bit_length() > LONGEST_NUMBER_BITS:
        raise NotStorable("the result holds a number of thousands of digits")
    return number


def _number(number: float) -> float:
    if not math.isfinite(number):
        raise NotStorable(f"the result holds {number}, which JSON does not have")
    return number


def _kind(value: Any) -> str:
    return storable(type(value).__qualname__)[:100]


def _too_large(max_bytes: int) -> NotStorable:
    return NotStorable(f"the result is larger than limits.max_result_bytes ({max_bytes} bytes)")

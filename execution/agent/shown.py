"""What people are shown of a graph's state: its public channels, as JSON that Postgres holds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import BaseModel

from config import Limits
from execution.text import storable

MOST_BYTES = Limits().max_result_bytes
DEEPEST = 50
LONGEST_NUMBER_BITS = 10_000  # some 3,000 digits; Python reads back no more than 4,300
LONGEST_FLOAT = 24  # characters
CUT = "…"
BRACES = 2
PLAIN = 7  # `false` or shorter, or what opens and closes a list, with a colon and a comma
SLACK = 64  # what a cut value may have beyond its bytes: the last number or key, and marks of cuts

# json.dumps would make another for each call.
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

AS_TEXT = (date, time, timedelta, Decimal, UUID, PurePath)  # a datetime is a date


def shown(values: Mapping[str, Any], max_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The channels of a state that are the graph's own, but for `task`; at most `max_bytes` of
    JSON without spaces.

    What JSON does not have is shown as what comes next to it, or as the name of its type. A state
    that is too large has each channel cut to its share, and lacks those of which nothing fits.
    """
    own = {
        storable(name): value
        for name, value in values.items()
        if _is_public(name) and name != "task"
    }
    try:
        return _whole(own, max_bytes)
    except _TooLarge:
        return _cut(own, max_bytes)


def _is_public(channel: str) -> bool:
    """Other names are LangGraph's own: `__start__`, `branch:to:coder`."""
    return not channel.startswith("_") and ":" not in channel


class _TooLarge(Exception):
    """The state has more than it may have."""


def _whole(own: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    told = {}
    copy = _Copy(max_bytes - BRACES)
    for name, value in own.items():
        told[name] = copy.channel(name, value)
        if copy.was_cut or copy.bytes_left < 0:
            raise _TooLarge
    return told


def _cut(own: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    told = {}
    bytes_left = max_bytes - BRACES
    share = bytes_left // len(own)
    for name, value in own.items():
        member = _Copy(share - SLACK).channel(name, value)
        size = _size({name: member}) - BRACES + len(",")
        if size <= bytes_left:
            told[name] = member
            bytes_left -= size
    return told


class _Copy:
    """Copies a value until it has used its bytes; the rest it leaves out or cuts."""

    def __init__(self, bytes_left: int) -> None:
        self.bytes_left = bytes_left
        self.was_cut = False

    def channel(self, name: str, value: Any) -> Any:
        self.bytes_left -= _size(name)
        try:
            return self.of(value, 0)
        except Exception:  # of the user's own class: a state that cannot be shown is still kept
            return self._text(_type_name(value))

    def of(self, value: Any, depth: int) -> Any:
        self.bytes_left -= PLAIN
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):
            return self.of(value.value, depth)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int):
            return self._whole_number(value)
        if isinstance(value, float):
            self.bytes_left -= LONGEST_FLOAT
            return float(value) if math.isfinite(value) else None
        if isinstance(value, AS_TEXT):
            return self._text(str(value))
        return self._members(value, depth)

    def _members(self, value: Any, depth: int) -> Any:
        if depth == DEEPEST:
            return self._text(_type_name(value))
        if isinstance(value, Mapping):
            return self._object(value.items(), depth)
        if isinstance(value, BaseModel):
            return self._object(vars(value).items(), depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return self._object([(name, getattr(value, name, None)) for name in names], depth)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._list(value, depth)
        return self._text(_type_name(value))

    def _object(self, members: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Any]:
        copy = {}
        for key, member in members:
            if self._is_used_up():
                break
            name = str(key) if isinstance(key, (str, int, float, *AS_TEXT)) else _type_name(key)
            copy[self._text(name)] = self.of(member, depth + 1)
        return copy

    def _list(self, members: Iterable[Any], depth: int) -> list[Any]:
        copy = []
        for member in members:
            if self._is_used_up():
                break
            copy.append(self.of(member, depth + 1))
        return copy

    def _is_used_up(self) -> bool:
        self.was_cut = self.was_cut or self.bytes_left <= 0
        return self.was_cut

    def _text(self, text: str) -> str:
        kept = storable(text[: max(0, self.bytes_left)])
        is_whole = len(text) <= max(0, self.bytes_left)
        while (size := _size(kept)) > self.bytes_left and kept:
            # In proportion, and some more, so that few steps are enough whatever is in it.
            share = len(kept) * max(0, self.bytes_left) // size
            kept, is_whole = kept[: share * 9 // 10], False
        self.bytes_left -= size
        self.was_cut = self.was_cut or not is_whole
        return kept if is_whole else kept + CUT

    def _whole_number(self, number: int) -> Any:
        if number.bit_length() > LONGEST_NUMBER_BITS:
            return self._text(_type_name(number))
        self.bytes_left -= number.bit_length() // 3
        return int(number)


def _size(value: Any) -> int:
    return len(_compact.encode(value).encode())


def _type_name(value: Any) -> str:
    return storable(type(value).__qualname__)[:100]

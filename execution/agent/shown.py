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

AS_TEXT = (date, time, timedelta, Decimal, UUID, PurePath)  # a datetime is a date
KEYS = (str, int, float, *AS_TEXT)


def shown(values: Mapping[str, Any], max_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The channels of a state that are the graph's own, but for `task`; at most about `max_bytes`.

    What JSON does not have is shown as what comes next to it, or as the name of its type. A state
    that is too large has each channel cut to its share.
    """
    own = {name: value for name, value in values.items() if _is_public(name) and name != "task"}
    try:
        return _channels(own, max_bytes, max_bytes)
    except _TooLarge:
        return _channels(own, max_bytes // max(1, len(own)), None)


def _is_public(channel: str) -> bool:
    """Other names are LangGraph's own: `__start__`, `branch:to:coder`."""
    return not channel.startswith("_") and ":" not in channel


class _TooLarge(Exception):
    """The state has more than it may have."""


def _channels(own: Mapping[str, Any], share: int, most: int | None) -> dict[str, Any]:
    """Each channel with its share of bytes; _TooLarge if it has more than `most` in all."""
    told = {}
    used = 0
    for name, value in own.items():
        copy = _Copy(share)
        try:
            told[storable(name)] = copy.of(value, 0)
        except Exception:  # of the user's own class: a state that cannot be shown is still kept
            told[storable(name)] = _type_name(value)
        used += share - copy.bytes_left
        if most is not None and (copy.was_cut or used > most):
            raise _TooLarge
    return told


class _Copy:
    """Copies a value until it has used its bytes; the rest it leaves out or cuts."""

    def __init__(self, bytes_left: int) -> None:
        self.bytes_left = bytes_left
        self.was_cut = False

    def of(self, value: Any, depth: int) -> Any:
        self.bytes_left -= 5
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
            return _type_name(value)
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
            name = str(key) if isinstance(key, KEYS) else _type_name(key)
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
        is_whole = len(text) <= self.bytes_left
        while (size := _size(kept)) > self.bytes_left and kept:
            kept, is_whole = kept[: len(kept) // 2], False
        self.bytes_left -= size
        self.was_cut = self.was_cut or not is_whole
        return kept if is_whole else kept + CUT

    def _whole_number(self, number: int) -> Any:
        if number.bit_length() > LONGEST_NUMBER_BITS:
            return _type_name(number)
        self.bytes_left -= number.bit_length() // 3
        return int(number)


def _size(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode())


def _type_name(value: Any) -> str:
    return storable(type(value).__qualname__)[:100]

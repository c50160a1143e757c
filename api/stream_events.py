"""What a stream consists of, each event written out once for however many watch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import db
from api.models import transition_view
from queries import events
from queries.events import Batch, Position
from states import Status


@dataclass(frozen=True)
class StreamEvent:
    """A snapshot, transition, node, token or end; only transitions carry a cursor."""

    name: str
    data: dict[str, Any]
    cursor: str | None = None

    @cached_property
    def json(self) -> str:
        return json.dumps(self.data, ensure_ascii=False)

    @cached_property
    def text(self) -> bytes:
        """As a server-sent event."""
        place = "" if self.cursor is None else f"id: {self.cursor}\n"
        return f"event: {self.name}\n{place}data: {self.json}\n\n".encode()

    @cached_property
    def frame(self) -> str:
        """As the text of a WebSocket's frame."""
        return f'{{"event": "{self.name}", "data": {self.json}}}'


class Bundle(tuple[StreamEvent, ...]):
    """Events that go out together, their text joined once for however many watch."""

    @cached_property
    def text(self) -> bytes:
        return b"".join(event.text for event in self)

    @cached_property
    def statuses(self) -> dict[int, Status]:
        """Where each task stands after them, of those that have changed."""
        return {
            event.data["task_id"]: Status(event.data["to"])
            for event in self
            if event.name == "transition"
        }


class Told:
    """A batch of transitions on its way to watchers who stood at `start`, or elsewhere."""

    def __init__(self, start: Position, batch: Batch) -> None:
        self.start = start
        self.end = batch.end
        self.is_full = batch.is_full
        self._rows = batch.events
        self._events = transitions(batch)

    def after(self, position: Position) -> tuple[Bundle, Position]:
        """What is new to a reader at `position`, and where he stands then."""
        if position == self.start:  # he has read all that the feed has read, and nothing else
            return self._events, self.end
        unseen = [
            (row, place)
            for row, place in self._rows
            if not events.sees(position.now, int(row["transaction"]))
        ]
        is_later = events.age(self.end.now) > events.age(position.now)
        behind = self.end if is_later and not self.is_full else position
        if len(unseen) == len(self._rows) and not self.is_full:
            return self._events, behind
        own = Bundle(_transition(row, _own(place, position)) for row, place in unseen)
        return own, behind


def transitions(batch: Batch) -> Bundle:
    return Bundle(_transition(row, place) for row, place in batch.events)


def _own(place: Position, position: Position) -> Position:
    """The place behind an event for a reader who had read more than the feed before it."""
    before = max(place.before, position.now, key=events.age)
    return Position(place.cluster, before, place.now, place.last_id)


def _transition(row: db.Row, place: Position) -> StreamEvent:
    cursor = place.as_cursor()
    shown = transition_view({**row, "from_status": row["from"], "to_status": row["to"]}, cursor)
    return StreamEvent("transition", shown.model_dump(mode="json", by_alias=True), cursor)

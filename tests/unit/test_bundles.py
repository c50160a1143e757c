"""What goes out to watchers together, made once for all of them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from api import feeds
from api.feeds import NOTHING, Subject, Watcher
from api.stream_events import Bundle, StreamEvent, Told
from queries.events import Batch, Position
from states import Status

RUN, OURS, OTHER = 1, 2, 3


def position(number: int) -> Position:
    return Position("1", f"{number}:{number}:", f"{number}:{number}:")


def told(number: int, task_id: int = OURS, to: str = "RUNNING") -> Told:
    """One transition, made by a transaction of that number."""
    row: dict[str, Any] = {
        "id": number,
        "task_id": task_id,
        "run_id": RUN,
        "step": "tool_call.a",
        "from": "PENDING",
        "to": to,
        "reason": "claimed",
        "at": datetime.now(UTC),
        "worker": "w",
        "attempt": 1,
        "detail": {},
        "transaction": str(number),
    }
    end = position(number + 1)
    return Told(position(number), Batch([(row, end)], end, is_full=False))


def subject(task_id: int) -> Subject:
    return Subject(RUN, task_id, lambda conn: {}, lambda conn: "RUNNING")


def test_all_who_read_on_with_their_feed_get_one_bundle() -> None:
    batch = told(5)
    first, _ = batch.after(position(5))
    second, stands = batch.after(position(5))
    assert first is second
    assert first.text is second.text
    assert stands == position(6)


def test_who_watches_the_run_gets_the_bundle_as_it_is() -> None:
    bundle, _ = told(5).after(position(5))
    assert subject(RUN).part_of(bundle) is bundle
    assert subject(OURS).part_of(bundle) == bundle
    assert subject(OTHER).part_of(bundle) == NOTHING


def test_the_text_of_a_bundle_is_that_of_its_events() -> None:
    events = [StreamEvent("token", {"text": word}) for word in ("one", "two")]
    assert Bundle(events).text == events[0].text + events[1].text


def test_a_bundle_knows_where_it_leaves_each_task() -> None:
    steps = [(OURS, "RUNNING"), (OTHER, "RUNNING"), (OURS, "SUCCEEDED")]
    transitions = [StreamEvent("transition", {"task_id": task, "to": to}) for task, to in steps]
    bundle = Bundle([*transitions, StreamEvent("token", {"task_id": OTHER})])
    assert bundle.statuses == {OURS: Status.SUCCEEDED, OTHER: Status.RUNNING}


def test_a_stream_of_a_step_shows_a_sign_of_life_while_only_other_steps_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "KEEP_ALIVE_SECONDS", 0.05)

    async def first_bundle() -> Bundle:
        watcher = Watcher(position(1))

        async def tell_of_others() -> None:
            for number in range(1, 10_000):
                watcher.put(told(number, OTHER))
                await asyncio.sleep(0.01)

        telling = asyncio.create_task(tell_of_others())
        live = feeds._live(subject(OURS), watcher, position(1))
        try:
            async with asyncio.timeout(30):
                return await anext(live)
        finally:
            telling.cancel()
            await live.aclose()

    assert asyncio.run(first_bundle()) == NOTHING

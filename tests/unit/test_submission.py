"""The writer of submissions gathers what comes together, and is not taken back by who hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import pytest

import api.submission
from api.database import Database
from api.submission import ENDING, LARGEST_BATCH, SubmitWriter
from db import Answer, NewTask, Submitted
from errors import DatabaseUnavailable, KeyReused


class Connection:
    lock_timeout_seconds = 5.0


class NoDatabase:
    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        yield Connection()


class Store:
    """Stands for db.submit_tasks: notes each batch; holds up what comes while it is `held`."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()

    def __call__(self, conn: Any, tasks: Sequence[NewTask]) -> list[Answer]:
        self.entered.set()
        assert self.free.wait(10)
        prompts = [task.payload["prompt"] for task in tasks]
        self.batches.append(prompts)
        if "away" in prompts:
            raise DatabaseUnavailable()
        return [
            KeyReused() if prompt == "reused" else Submitted(number, "PENDING", False)
            for number, prompt in enumerate(prompts)
        ]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(api.submission.db, "submit_tasks", store)
    return store


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[SubmitWriter]:
    writer = SubmitWriter(cast(Database, NoDatabase()))
    writer.open()
    try:
        yield writer
    finally:
        await asyncio.to_thread(writer.close)


def task(prompt: str, name: str | None = None) -> NewTask:
    return NewTask("t", "prompt", {"prompt": prompt}, name=name)


def test_what_comes_in_one_turn_of_the_loop_is_one_batch(store: Store) -> None:
    async def submit() -> list[Submitted]:
        async with opened() as writer:
            return await asyncio.gather(*(writer.submit(task(f"{n}")) for n in range(50)))

    stored = asyncio.run(submit())
    assert store.batches == [[f"{n}" for n in range(50)]]
    assert [one.task_id for one in stored] == list(range(50))


def test_a_batch_never_holds_more_than_the_largest(store: Store) -> None:
    async def submit() -> None:
        async with opened() as writer:
            await asyncio.gather(
                *(writer.submit(task(f"{n}")) for n in range(2 * LARGEST_BATCH + 1))
            )

    asyncio.run(submit())
    assert [len(batch) for batch in store.batches] == [LARGEST_BATCH, LARGEST_BATCH, 1]


def test_what_comes_while_one_is_written_goes_together(store: Store) -> None:
    async def submit() -> None:
        async with opened() as writer:
            store.free.clear()
            first = asyncio.create_task(writer.submit(task("first")))
            await asyncio.to_thread(store.entered.wait, 10)
            others = []
            for n in range(5):
                others.append(asyncio.create_task(writer.submit(task(f"{n}"))))
                await asyncio.sleep(0.01)
            store.free.set()
            await asyncio.gather(first, *others)

    asyncio.run(submit())
    assert store.batches == [["first"], [f"{n}" for n in range(5)]]


def test_each_is_told_what_became_of_its_own(store: Store) -> None:
    async def submit() -> list[Any]:
        async with opened() as writer:
            prompts = [task("a"), task("reused"), task("b")]
            return await asyncio.gather(*map(writer.submit, prompts), return_exceptions=True)

    first, refused, last = asyncio.run(submit())
    assert (first.task_id, last.task_id) == (0, 2)
    assert isinstance(refused, KeyReused)


def test_a_request_that_is_given_up_is_stored_all_the_same(store: Store) -> None:
    async def submit() -> Submitted:
        async with opened() as writer:
            store.free.clear()
            given_up = asyncio.create_task(writer.submit(task("given up")))
            other = asyncio.create_task(writer.submit(task("other")))
            await asyncio.to_thread(store.entered.wait, 10)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            store.free.set()
            return await asyncio.wait_for(other, 10)

    assert asyncio.run(submit()).status == "PENDING"
    assert store.batches == [["given up", "other"]]


@pytest.mark.parametrize("name", [None, "a-name"])
def test_too_many_that_wait_are_refused_and_room_is_made_by_every_end(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    monkeypatch.setattr(api.submission, "MOST_WAITING", 3)

    async def submit() -> list[Any]:
        async with opened() as writer:
            seen = []
            for prompt in ("a", "away", "reused"):
                tasks = [task(prompt, name) for _ in range(4)]
                seen += await asyncio.gather(*map(writer.submit, tasks), return_exceptions=True)
            return seen

    seen = [type(one) for one in asyncio.run(submit())]
    assert seen == [
        *[Submitted] * 3, DatabaseUnavailable,
        *[DatabaseUnavailable] * 4,
        *[KeyReused] * 3, DatabaseUnavailable,
    ]  # fmt: skip


def test_what_was_handed_over_is_stored_before_the_writer_ends(store: Store) -> None:
    async def submit() -> list[Submitted]:
        async with opened() as writer:
            store.free.clear()
            waiting = [asyncio.create_task(writer.submit(task(f"{n}"))) for n in range(3)]
            await asyncio.to_thread(store.entered.wait, 10)
            closing = asyncio.create_task(asyncio.to_thread(writer.close))
            store.free.set()
            await closing
            return await asyncio.gather(*waiting)

    assert len(asyncio.run(submit())) == 3


@pytest.mark.parametrize("name", [None, "a-name"])
def test_what_comes_after_the_end_is_refused_and_nothing_of_it_stored(
    store: Store, name: str | None
) -> None:
    async def submit() -> Any:
        async with opened() as writer:
            await asyncio.to_thread(writer.close)
            (refused,) = await asyncio.gather(
                asyncio.wait_for(writer.submit(task("late", name)), 10), return_exceptions=True
            )
            return refused

    refused = asyncio.run(submit())
    assert isinstance(refused, DatabaseUnavailable)
    assert str(refused) == ENDING
    assert store.batches == []


def test_what_came_in_the_turn_of_the_loop_in_which_the_end_begins_is_stored(store: Store) -> None:
    async def submit() -> Submitted:
        async with opened() as writer:
            first = asyncio.create_task(writer.submit(task("just in time")))
            await asyncio.sleep(0)  # it has come, but was not handed over yet
            closing = threading.Thread(target=writer.close)
            closing.start()
            writer._thread.join(0.2)  # in this turn the end goes as far as it can
            await asyncio.to_thread(closing.join)
            return await asyncio.wait_for(first, 10)

    assert asyncio.run(submit()).status == "PENDING"
    assert store.batches == [["just in time"]]


def test_what_comes_just_before_the_end_begins_is_stored(store: Store) -> None:
    """The loop was to begin both already; what hands the task over stands behind the end."""

    async def submit() -> Submitted:
        async with opened() as writer:
            first = asyncio.create_task(writer.submit(task("just in time")))
            closing = threading.Thread(target=writer.close)
            closing.start()
            writer._thread.join(0.2)
            await asyncio.to_thread(closing.join)
            return await asyncio.wait_for(first, 10)

    assert asyncio.run(submit()).status == "PENDING"
    assert store.batches == [["just in time"]]


@pytest.mark.parametrize("name", [None, "a-name"])
def test_what_comes_while_the_last_is_written_is_refused(store: Store, name: str | None) -> None:
    async def submit() -> list[Any]:
        async with opened() as writer:
            store.free.clear()
            last = asyncio.create_task(writer.submit(task("last", name)))
            await asyncio.to_thread(store.entered.wait, 10)
            closing = asyncio.create_task(asyncio.to_thread(writer.close))
            late = []
            while not late or not isinstance(late[-1], DatabaseUnavailable):
                late += await asyncio.gather(
                    asyncio.wait_for(writer.submit(task("late", name)), 0.2), return_exceptions=True
                )
                assert len(late) < 50
            store.free.set()
            await closing
            return [await last, *late]

    last, *_ = asyncio.run(submit())
    assert last.status == "PENDING"
    assert ["last"] in store.batches

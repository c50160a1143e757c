"""api/keys.py: a stream whose reader may have lost his key, while nobody can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from api.keys import Keys
from errors import DatabaseUnavailable, Unauthorized
from queries.keys import ApiKey, find_key


class Away:
    """A database that cannot be asked."""

    def run(self, *args: Any) -> Any:
        raise DatabaseUnavailable


KEY = ApiKey("0" * 12, b"", "acme", is_revoked=False)


class Asked:
    """A database in which a key was created; it counts how often it is asked for a ticket."""

    def __init__(self) -> None:
        self.tickets = 0

    def run(self, function: Any, *args: Any) -> Any:
        if function is find_key:
            return True, None
        self.tickets += 1
        return None


@pytest.mark.parametrize(("ticket", "asked"), [("0" * 64, 1), ("junk", 0), ("", 0), ("Z" * 64, 0)])
def test_what_can_be_no_ticket_is_not_looked_up(ticket: str, asked: int) -> None:
    database = Asked()

    async def admit() -> None:
        keys = Keys(database, cache_seconds=5)  # type: ignore[arg-type]
        with pytest.raises(Unauthorized):
            await keys.admit_ticket(ticket, "/tasks/1/events")

    asyncio.run(admit())
    assert database.tickets == asked


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "of an open API"])
def test_while_the_database_is_away_a_stream_says_that_it_is_there_and_tells_nothing(
    key: ApiKey | None,
) -> None:
    passed, closed = [], []

    async def bundles() -> AsyncGenerator[list[str], None]:
        try:
            for bundle in ([], [], ["news"], ["more"]):
                yield bundle
        finally:
            closed.append(True)

    async def read() -> None:
        keys = Keys(Away(), cache_seconds=5)  # type: ignore[arg-type]
        async for bundle in keys.while_admitted(bundles(), key):
            passed.append(bundle)

    async def follow() -> None:
        with pytest.raises(DatabaseUnavailable):
            await read()
        assert closed == [True]  # by now, and not when the loop ends

    asyncio.run(follow())
    assert passed == [[], []]

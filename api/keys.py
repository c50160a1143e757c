"""Whose key a request brings: looked up once every few seconds and process, and compared each time.

Nothing is let through on a guess: while the database cannot be asked, what is not known is refused
with 503. A key that was revoked, and the first one that closes an open API, are noticed within
limits.key_cache_seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from api.database import Database
from errors import DatabaseUnavailable, Unauthorized
from queries.keys import KEY, TICKET, ApiKey, find_key, key_of_ticket

T = TypeVar("T")

MOST_KNOWN = 10_000  # keys that are remembered; ids that nobody ever gave out count as well
NO_KEY = ""

MISSING = "this API needs a key: send it as the header X-API-Key"
WRONG = "this key is wrong"
REVOKED = "this key was revoked"
BAD_TICKET = "this ticket is for another address, has expired, or its key was revoked"


@dataclass(frozen=True)
class Known:
    """What the database said about a key id."""

    read_at: float
    key: ApiKey | None


class Keys:
    """Lets requests in by their key, or all of them while no key was ever created."""

    def __init__(self, database: Database, cache_seconds: float) -> None:
        self._database = database
        self._cache_seconds = cache_seconds
        self._keys_exist = False  # once they do, they always will
        self._known: dict[str, Known] = {}
        self._reading: dict[str, asyncio.Task[Known]] = {}

    async def admit(self, presented: str | None) -> ApiKey | None:
        """The key that was presented; None while none is needed. Unauthorized otherwise."""
        found = KEY.fullmatch(presented or "")
        key = await self._look_up(found["id"]) if found else None
        if not await self.are_needed():
            return None
        if presented is None:
            raise Unauthorized(MISSING)
        if found is None or key is None or not key.has_secret(found["secret"]):
            raise Unauthorized(WRONG)
        if key.is_revoked:
            raise Unauthorized(REVOKED)
        return key

    async def admit_ticket(self, ticket: str, path: str) -> ApiKey | None:
        """The key that a ticket for this path stands for; None while no key is needed."""
        if not await self.are_needed():
            return None
        if not TICKET.fullmatch(ticket):
            raise Unauthorized(BAD_TICKET)
        key = await run_in_threadpool(self._database.run, key_of_ticket, ticket, path)
        if key is None:
            raise Unauthorized(BAD_TICKET)
        return key

    async def while_admitted(
        self, bundles: AsyncGenerator[T, None], key: ApiKey | None
    ) -> AsyncGenerator[T, None]:
        """The same bundles, until their reader would not be let in any more; then Unauthorized."""
        async with contextlib.aclosing(bundles):
            async for bundle in bundles:
                try:
                    await self.admit_again(key)
                except DatabaseUnavailable:
                    if bundle:  # one that is empty tells nothing but that we are still here
                        raise
                yield bundle

    async def admit_again(self, key: ApiKey | None) -> None:
        """Unauthorized if whoever came with this key would not be let in now."""
        if key is None and await self.are_needed():
            raise Unauthorized(MISSING)
        if key is not None:
            known = await self._look_up(key.key_id)
            if known is None or known.is_revoked:
                raise Unauthorized(REVOKED)

    async def are_needed(self) -> bool:
        """Whether any key was ever created."""
        if not self._keys_exist:
            await self._look_up(NO_KEY)
        return self._keys_exist

    async def _look_up(self, key_id: str) -> ApiKey | None:
        known = self._known.get(key_id)
        if known is None or time.monotonic() >= known.read_at + self._cache_seconds:
            known = await asyncio.shield(self._reading_of(key_id))
        return known.key

    def _reading_of(self, key_id: str) -> asyncio.Task[Known]:
        """The reading that is under way, or a new one: requests that come together share it."""
        reading = self._reading.get(key_id)
        if reading is None:
            reading = self._reading[key_id] = asyncio.create_task(self._read(key_id))
            reading.add_done_callback(lambda done: self._end_reading(key_id, done))
        return reading

    async def _read(self, key_id: str) -> Known:
        read_at = time.monotonic()  # before: what is revoked meanwhile is not remembered for longer
        keys_exist, key = await run_in_threadpool(self._database.run, find_key, key_id)
        self._keys_exist = self._keys_exist or keys_exist
        known = Known(read_at, key)
        self._known.pop(key_id, None)
        self._known[key_id] = known
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return known

    def _end_reading(self, key_id: str, reading: asyncio.Task[Known]) -> None:
        del self._reading[key_id]
        if not reading.cancelled():
            reading.exception()  # whoever waited for it was told, if anybody still did

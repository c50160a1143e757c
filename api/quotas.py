"""What one tenant may ask for, over all API processes: requests in a minute, and tasks that wait.

Requests are taken from the database in blocks, so that most cost no look into it and their sum is
never above the limit; what other processes hold in their blocks is refused a little early. How many
tasks wait is looked up once a second: what comes to other processes meanwhile may go beyond.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from api.database import Database
from config import Limits
from errors import DatabaseUnavailable, TooMany
from queries.quotas import Block, count_queued, take_requests

T = TypeVar("T")

BLOCKS_PER_MINUTE = 20
LOOK_AGAIN_SECONDS = 1.0
QUEUE_RETRY_SECONDS = 5
LONGEST_LOOK_SECONDS = 1.0
MOST_TENANTS = 10_000  # that are remembered


class Share:
    """What this process holds of a tenant's requests of this minute."""

    def __init__(self) -> None:
        self.filling: asyncio.Task[None] | None = None
        self._left = 0
        self._until = 0.0
        self._is_spent = False

    def take(self) -> bool:
        """One of them, if there is one."""
        if self._left < 1 or time.monotonic() >= self._until:
            return False
        self._left -= 1
        return True

    def may_ask(self) -> bool:
        return not self._is_spent or time.monotonic() >= self._until

    def fill(self, block: Block, asked_at: float) -> None:
        self._left, self._until = block.requests, asked_at + block.seconds_left
        self._is_spent = block.requests == 0

    def seconds_left(self) -> int:
        return max(1, math.ceil(self._until - time.monotonic()))


class Waiting:
    """How many tasks of a tenant wait, as far as this process knows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.tasks = 0
        self.read_at = -math.inf

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For one at a time; DatabaseUnavailable for who would have to wait for long."""
        if not self._lock.acquire(timeout=LONGEST_LOOK_SECONDS):
            raise DatabaseUnavailable("the tenant's queue cannot be counted now; try again shortly")
        try:
            yield
        finally:
            self._lock.release()


class Quotas:
    """Refuses with TooMany what is beyond a tenant's share."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self._database = database
        self._requests_per_minute = limits.tenant_requests_per_minute
        self._queued_tasks = limits.tenant_queued_tasks
        self._shares: defaultdict[str, Share] = defaultdict(Share)
        self._waiting: defaultdict[str, Waiting] = defaultdict(Waiting)

    async def take_request(self, tenant: str) -> None:
        """Count one request of the tenant."""
        if not self._requests_per_minute:
            return
        share = self._shares[tenant]
        while not share.take():
            if not share.may_ask():
                raise TooMany(
                    f"tenant {tenant} may send {self._requests_per_minute} requests in a minute "
                    "(limits.tenant_requests_per_minute)",
                    share.seconds_left(),
                )
            # Those that come together share a block, or the error, and no thread waits for it.
            if share.filling is None or share.filling.done():
                share.filling = asyncio.create_task(self._fill(tenant, share))
            await asyncio.shield(share.filling)
        _bound(self._shares)

    async def _fill(self, tenant: str, share: Share) -> None:
        limit = self._requests_per_minute
        asked_at = time.monotonic()
        most = math.ceil(limit / BLOCKS_PER_MINUTE)
        block = await run_in_threadpool(self._database.run, take_requests, tenant, most, limit)
        share.fill(block, asked_at)

    async def add_task(self, tenant: str) -> None:
        """Count one task that is about to be submitted."""
        if self._queued_tasks:
            await run_in_threadpool(self.add_tasks, tenant, 1)

    def add_tasks(self, tenant: str, tasks: int) -> None:
        """The same for several, on a thread."""
        most = self._queued_tasks
        if not most:
            return
        waiting = self._waiting[tenant]
        with waiting.held():
            now = time.monotonic()
            if now >= waiting.read_at + LOOK_AGAIN_SECONDS:
                waiting.tasks = self._database.run(count_queued, tenant, most)
                waiting.read_at = now
            if waiting.tasks + tasks > most:
                raise TooMany(
                    f"tenant {tenant} may have {most} tasks that wait, and has "
                    f"{min(waiting.tasks, most)} (limits.tenant_queued_tasks)",
                    QUEUE_RETRY_SECONDS,
                )
            waiting.tasks += tasks
        _bound(self._waiting)


def _bound(remembered: dict[str, T]) -> None:
    while len(remembered) > MOST_TENANTS:
        remembered.pop(next(iter(remembered)), None)

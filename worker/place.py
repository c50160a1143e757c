"""Where a worker's next claim begins to look.

What was claimed leaves dead entries at the front of the claim's index, until a vacuum comes and no
older snapshot is left. A claim that follows another at once need not pass them again: it begins at
the lowest number that the one before took. But an older task that was not due then can have become
due since: so now and then a claim looks at everything, and so does every claim that would not be
full otherwise. Such a task stands behind younger ones until the first claim after LONGEST_SECONDS.
"""

from __future__ import annotations

import random
import string
import time

from queries.claims import Claim

SHORTEST_SECONDS = 0.2
LONGEST_SECONDS = 2.0
# To look at everything takes no more than this share of the time, unless that is longer.
SHARE = 0.05


class Place:
    """After which tenant, and from which task, the next claim begins."""

    def __init__(self) -> None:
        # Workers that are woken together begin at different tenants.
        self._after_tenant = random.choice(string.ascii_lowercase)
        self._from_task = 0
        self._look_at_all = 0.0

    def begins(self) -> tuple[str, int]:
        """The tenant, and the lowest number of the next claim; 0: it looks at everything."""
        if time.monotonic() >= self._look_at_all:
            self._from_task = 0
        return self._after_tenant, self._from_task

    def note(self, claim: Claim, seconds: float) -> None:
        """That claim has begun here, and has taken so long, with the settle before it if any."""
        if not self._from_task:
            pause = min(max(SHORTEST_SECONDS, seconds / SHARE), LONGEST_SECONDS)
            self._look_at_all = time.monotonic() + pause
        self._after_tenant = claim.last_tenant or ""
        self._from_task = claim.next_from or 0

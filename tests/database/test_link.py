"""worker/link.py: what a worker hears."""

from __future__ import annotations

import db
from config import Settings
from queries.tokens import WATCHED_CHANNEL
from tests.support.processes import eventually
from worker.link import CLAIMABLE_CHANNEL, Link


def test_a_notification_that_comes_with_the_answer_to_a_ping_is_heard(settings: Settings) -> None:
    link = Link(settings, "w1", on_first_open=lambda: None)
    try:
        conn = link.open()
        assert not link.has_heard()
        db.fetch(conn, f"SELECT pg_notify('{CLAIMABLE_CHANNEL}', '')")
        db.fetch(conn, f"SELECT pg_notify('{WATCHED_CHANNEL}', '7,8,no number')")

        def is_heard_by_a_ping() -> bool:
            link._next_ping = 0.0
            link.ping_listener()
            return link.has_heard()

        eventually(is_heard_by_a_ping)
        assert link.hear() == ({conn.info.backend_pid}, [7, 8])
        assert not link.has_heard()
    finally:
        link.close()

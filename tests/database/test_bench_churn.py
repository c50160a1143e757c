"""What bench.churn knows of the queue without counting it, and how it holds dead rows back."""

from __future__ import annotations

from bench.churn import open_transaction, queued
from bench.common import administrator, ask
from bench.laden import AUDIT_ROWS
from db import Connection
from tests.support import rows

HELD_BACK = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND state = 'idle in transaction' AND backend_xmin IS NOT NULL
"""


def test_the_queue_is_known_by_the_audit_log(own_conn: Connection, own_database: str) -> None:
    rows.finish(own_conn, rows.submit(own_conn))  # before
    with administrator(own_database) as watcher:
        before = ask(watcher, AUDIT_ROWS)
        for _ in range(4):
            rows.submit(own_conn)
        assert queued(watcher, before, 4) == 4
        for _ in range(2):
            (ended,) = rows.claim(own_conn, 1).tasks
            rows.settle(own_conn, ended.lease, "succeeded")
        assert queued(watcher, before, 4) == 2
        rows.claim(own_conn, 1)
        assert queued(watcher, before, 4) == 1.5  # the one that runs is half done


def test_an_open_transaction_holds_a_snapshot_until_it_ends(
    own_conn: Connection, own_database: str
) -> None:
    with administrator(own_database) as watcher:
        assert ask(watcher, HELD_BACK) == 0
        with open_transaction(own_database):
            assert ask(watcher, HELD_BACK) == 1
        assert ask(watcher, HELD_BACK) == 0

"""execution/agent/saver.py: while Postgres is away, frozen workers, and LangGraph's tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from langgraph.checkpoint.postgres import PostgresSaver
from psycopg.rows import dict_row

from config import Settings
from db import Connection, Row
from errors import DatabaseUnavailable, LeaseLost, SchemaOutdated
from execution.agent.saver import CheckpointPool, FencedSaver, open_pool
from queries.leases import ClaimedTask
from tests.conftest import settings_for
from tests.support import rows
from tests.support.processes import eventually
from tests.support.rows import sql
from tests.support.small_graphs import (
    chain,
    checkpoint_being_written,
    job,
    of_job,
    put,
    run,
    says,
    stored,
)
from tests.support.tcp_proxy import TcpProxy

# --- a database that is away -----------------------------------------------------------------


def end_sessions(conn: Connection) -> int:
    statement = """
        SELECT count(pg_terminate_backend(pid, 5000)) AS n FROM pg_stat_activity
        WHERE application_name = 'orchestrator checkpoints' AND datname = current_database()
    """
    return int(sql(conn, statement)[0]["n"])


def test_connections_that_break_between_two_nodes_do_not_stop_a_job(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    ended: list[int] = []

    def breaks(state: Any) -> Any:
        ended.append(end_sessions(conn))
        return {"notes": ["x"]}

    graph = chain(("a", breaks), ("b", breaks))
    assert run(graph, FencedSaver(pool, task, "v1"), task)["notes"] == ["x", "x"]
    assert min(ended) >= 1


def test_all_connections_of_a_pool_that_break_are_replaced_at_once(
    conn: Connection, pool: CheckpointPool
) -> None:
    """Where each of them was waited for before the next is tried, the last comes too late."""
    task = job(conn)
    lent = [pool.getconn() for _ in range(pool.max_size)]
    for one in lent:
        pool.putconn(one)
    assert end_sessions(conn) == pool.max_size
    began = time.monotonic()
    put(FencedSaver(pool, task, "v1"), task)
    assert time.monotonic() - began < pool.timeout / 2


def test_a_connection_that_breaks_in_a_checkpoint_is_said_in_plain_words(
    conn: Connection,
    connect: Callable[[], Connection],
    pool: CheckpointPool,
    threads: ThreadPoolExecutor,
) -> None:
    task = job(conn)
    with checkpoint_being_written(FencedSaver(pool, task, "v1"), task, connect, threads) as broken:
        end_sessions(conn)
        with pytest.raises(DatabaseUnavailable, match="the database cannot be used now"):
            broken.result(20)
    assert run(chain(("a", says("a"))), FencedSaver(pool, task, "v1"), task)["notes"] == ["a"]


def test_a_row_that_another_holds_too_long_is_said_in_plain_words(
    conn: Connection, connect: Callable[[], Connection], database_url: str
) -> None:
    task = job(conn)
    settings = settings_for(database_url, database={"lock_timeout_seconds": 0.1})
    with open_pool(settings) as pool, connect().cursor() as holder:
        holder.execute("BEGIN")
        holder.execute("SELECT FROM tasks WHERE task_id = %s FOR UPDATE", (task.task_id,))
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            put(FencedSaver(pool, task, "v1"), task)
        holder.execute("ROLLBACK")
        put(FencedSaver(pool, task, "v1"), task)


# --- a frozen worker -------------------------------------------------------------------------


@pytest.mark.parametrize("part", [b"hold_lease", b"INTO checkpoint", b"show_state"])
def test_a_worker_that_is_frozen_while_it_sends_a_checkpoint_holds_nothing(
    conn: Connection, settings: Settings, threads: ThreadPoolExecutor, part: bytes
) -> None:
    """Not for a moment: the row is free, and what was sent of the checkpoint is not written."""
    task = job(conn)
    rows.expire(conn, task.task_id)
    with TcpProxy(port_of(settings)) as proxy, open_pool(proxied(settings, proxy, 20)) as pool:
        saver = FencedSaver(pool, task, "v1")
        saver.get_tuple(of_job(task))  # type: ignore[arg-type]
        before = stored(conn)
        proxy.stop_at(part)
        late = threads.submit(put, saver, task)
        eventually(lambda: proxy.stopped() == 1)
        assert [one.reason for one in rows.reap(conn)] == ["reaped"]
        proxy.resume()
        with pytest.raises(LeaseLost):
            late.result(20)
    assert stored(conn) == before


def test_nor_does_one_that_is_frozen_once_it_has_sent_it(
    conn: Connection, settings: Settings, threads: ThreadPoolExecutor
) -> None:
    task = job(conn)
    rows.expire(conn, task.task_id)
    with TcpProxy(port_of(settings)) as proxy, open_pool(proxied(settings, proxy, 20)) as pool:
        saver = FencedSaver(pool, task, "v1")
        saver.get_tuple(of_job(task))  # type: ignore[arg-type]
        before = stored(conn)
        proxy.mute()
        late = threads.submit(put, saver, task)
        eventually(lambda: stored(conn) != before)
        assert [one.reason for one in rows.reap(conn)] == ["reaped"]
        assert not late.done()
        proxy.cut()
        with pytest.raises(DatabaseUnavailable):
            late.result(20)


def port_of(settings: Settings) -> int:
    port = urlsplit(settings.database_url).port
    assert port is not None
    return port


def proxied(settings: Settings, proxy: TcpProxy, reply_timeout_seconds: float = 1) -> Settings:
    url = settings.database_url.replace(str(port_of(settings)), str(proxy.port))
    limits = {
        "reply_timeout_seconds": reply_timeout_seconds,
        "pool_wait_seconds": 1,
        "connect_timeout_seconds": 2,
    }
    return settings_for(url, database=limits)


def test_a_server_that_says_nothing_is_given_up_and_asked_again_once_it_answers(
    conn: Connection, settings: Settings
) -> None:
    task = job(conn)
    with TcpProxy(port_of(settings)) as proxy, open_pool(proxied(settings, proxy)) as pool:
        saver = FencedSaver(pool, task, "v1")
        put(saver, task)
        proxy.swallow()
        with pytest.raises(DatabaseUnavailable, match="no reply from Postgres in 1 s"):
            put(saver, task)
        with pytest.raises(DatabaseUnavailable):
            put(saver, task)
        proxy.resume()
        eventually(lambda: can_put(saver, task))


def can_put(saver: FencedSaver, task: ClaimedTask) -> bool:
    try:
        put(saver, task)
    except DatabaseUnavailable:
        return False
    return True


def test_a_pool_opens_while_the_database_is_away_and_says_so_when_it_is_asked(
    conn: Connection, settings: Settings
) -> None:
    task = job(conn)
    with TcpProxy(1) as nowhere, open_pool(proxied(settings, nowhere)) as pool:
        with pytest.raises(DatabaseUnavailable):
            FencedSaver(pool, task, "v1").get_tuple(of_job(task))  # type: ignore[arg-type]
        assert pool.get_stats()["pool_size"] <= 1


# --- LangGraph's tables ----------------------------------------------------------------------

SHAPE = """
SELECT c.relname AS table, a.attname AS column, format_type(a.atttypid, a.atttypmod) AS type,
       a.attnotnull AS never_null, pg_get_expr(d.adbin, d.adrelid) AS default
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relname IN (
    'checkpoints', 'checkpoint_blobs', 'checkpoint_writes', 'checkpoint_migrations')
ORDER BY c.relname, a.attname
"""
INDEXES = """
SELECT indexname, indexdef FROM pg_indexes
WHERE tablename IN (
    'checkpoints', 'checkpoint_blobs', 'checkpoint_writes', 'checkpoint_migrations')
ORDER BY indexname
"""
VERSIONS = "SELECT v FROM checkpoint_migrations ORDER BY v"


def shape_of(url: str) -> list[list[Row]]:
    with psycopg.connect(url, row_factory=dict_row) as conn:
        return [conn.execute(one).fetchall() for one in (SHAPE, INDEXES, VERSIONS)]  # type: ignore


def test_our_schema_makes_the_tables_that_langgraph_makes_and_its_setup_finds_nothing_to_do(
    own_database: str, server_url: str
) -> None:
    before = shape_of(own_database)
    with PostgresSaver.from_conn_string(own_database) as saver:
        saver.setup()
    assert shape_of(own_database) == before
    with psycopg.connect(own_database, autocommit=True) as conn:
        for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            conn.execute(f"DROP TABLE {table}")
        conn.execute("DROP TABLE checkpoint_migrations")
    with PostgresSaver.from_conn_string(own_database) as saver:
        saver.setup()
    assert shape_of(own_database) == before


def test_tables_of_another_version_are_refused_in_plain_words_and_looked_at_once(
    own_conn: Connection, own_database: str
) -> None:
    task = job(own_conn)
    sql(own_conn, "INSERT INTO checkpoint_migrations (v) VALUES (99)")
    with open_pool(settings_for(own_database)) as pool:
        saver = FencedSaver(pool, task, "v1")
        with pytest.raises(SchemaOutdated, match="are of version 99, the installed"):
            put(saver, task)
        sql(own_conn, "DELETE FROM checkpoint_migrations WHERE v = 99")
        put(saver, task)
        sql(own_conn, "DELETE FROM checkpoint_migrations")
        put(saver, task)


def test_the_requirements_pin_the_saver_whose_private_method_is_overridden() -> None:
    wanted = "langgraph-checkpoint-postgres>=3.2,<3.3"
    root = Path(__file__).parents[2]
    assert wanted in (root / "requirements-agents.txt").read_text(encoding="utf-8").split()
    assert wanted in (root / "pyproject.toml").read_text(encoding="utf-8")

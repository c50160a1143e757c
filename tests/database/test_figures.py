"""The figures of /metrics and /stats: what counting the rows gives, at every moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

import db
from config import Retry
from db import Connection
from queries import operations, runs, schema
from queries.figures import fold_figures
from queries.leases import Outcome, renew_leases, settle_tasks
from queries.listings import list_dead_letters, list_tasks, read_queue
from queries.retention import purge_finished
from states import Status
from tests.conftest import administrator, at_database, settings_for
from tests.support import counted, rows
from tests.support import runs as graphs
from tests.support.functions import borrowed
from tests.support.rows import BRING_TO, sql

Connect = Callable[[], Connection]
BASE = datetime(2026, 1, 1, tzinfo=UTC)
PAGE = {"limit": 50, "before": None, "present_seconds": 30.0}


def changes(conn: Connection) -> int:
    """How many are not folded."""
    return int(sql(conn, "SELECT count(*) AS n FROM figure_changes")[0]["n"])


def folded(conn: Connection) -> None:
    """Fold all there is: the figures are as exact as before, and kept in one row per group."""
    counted.check(conn)
    while fold_figures(conn, 3):
        counted.check(conn)
    counted.check(conn)
    assert changes(conn) == 0


# --- what changes them -----------------------------------------------------------------------


@pytest.mark.parametrize("status", BRING_TO)
def test_every_status_is_counted_from_its_first_moment(conn: Connection, status: str) -> None:
    rows.bring_to(conn, status)
    assert db.metrics(conn)["by_status"] == {status: 1}
    folded(conn)


def test_each_tenant_has_its_own(conn: Connection) -> None:
    rows.finish(conn, rows.submit(conn, tenant="b"), "permanent", route="cloud", cost=Decimal(2))
    for tenant in ("a", "b", "b"):
        rows.submit(conn, tenant=tenant)
    folded(conn)
    assert read_queue(conn, "a") == {"depth": 1, "delayed": 0, "running": 0, "dead_letters": 0}
    assert db.metrics(conn, "a")["cost_by_route"] == {}
    assert db.metrics(conn, "b")["cost_by_route"] == {"cloud": "2.00000000"}
    assert db.metrics(conn, "nobody")["by_status"] == {}


def test_a_task_is_followed_through_retry_loss_and_requeue(conn: Connection) -> None:
    task_id = rows.submit(conn)
    retry = Retry(max_delay_seconds=0.000001)
    for verdict in ("failure", "outage", "released", "lost", "permanent"):
        task = rows.claim_this(conn, task_id)
        counted.check(conn)
        if verdict == "lost":
            rows.expire(conn, task_id)
            rows.reap(conn)
        else:
            rows.settle(conn, task.lease, verdict, retry, route="local", cost=Decimal("0.1"))
        rows.make_due(conn, task_id)
        folded(conn)
    assert read_queue(conn)["dead_letters"] == 1
    operations.requeue_task(conn, "default", str(task_id))
    folded(conn)
    assert (db.metrics(conn)["retries"], db.metrics(conn)["reclaimed_count"]) == (0, 1)


def test_what_becomes_due_is_counted_before_and_after_a_worker_has_marked_it(
    conn: Connection,
) -> None:
    rows.set_clock(conn, BASE.isoformat())
    rows.submit(conn, delay_seconds=60)
    assert (read_queue(conn)["depth"], read_queue(conn)["delayed"]) == (0, 1)
    rows.set_clock(conn, (BASE + timedelta(seconds=60)).isoformat())
    assert (read_queue(conn)["depth"], read_queue(conn)["delayed"]) == (1, 0)
    task = rows.claim(conn).tasks[0]
    rows.settle(conn, task.lease, "released")
    assert (read_queue(conn)["depth"], read_queue(conn)["delayed"]) == (1, 0)
    folded(conn)


def test_runs_are_no_work_but_their_steps_are(conn: Connection) -> None:
    run_id = graphs.submit(conn, {"a": [], "approval.b": ["a"], "c": ["approval.b"]})
    folded(conn)
    assert db.metrics(conn)["by_status"] == {"PENDING": 1, "BLOCKED": 2}
    graphs.finish(conn, run_id, "a")
    folded(conn)
    assert db.metrics(conn)["by_status"] == {
        "SUCCEEDED": 1, "AWAITING_APPROVAL": 1, "BLOCKED": 1,
    }  # fmt: skip
    gate = str(graphs.number(conn, run_id, "approval.b"))
    operations.approve_task(conn, "default", gate, False, None)
    folded(conn)
    assert read_queue(conn)["dead_letters"] == 0  # a rejection is none
    other = graphs.submit(conn, {"a": [], "b": ["a"]})
    runs.cancel_run(conn, "default", str(other))
    folded(conn)


def test_a_callback_is_counted_with_the_end_that_it_tells_of(conn: Connection) -> None:
    task_id = rows.submit(conn, callback_url="http://127.0.0.1:9/")
    rows.finish(conn, task_id)
    assert db.metrics(conn)["by_status"] == {"SUCCEEDED": 1, "PENDING": 1}
    folded(conn)


def test_what_a_purge_deletes_leaves_the_figures(conn: Connection) -> None:
    rows.set_clock(conn, "2020-01-01T00:00:00Z")
    for cost in ("0.1", "0.2"):
        rows.finish(conn, rows.submit(conn), route="local", cost=Decimal(cost))
    graphs.finish(conn, graphs.submit(conn, {"a": []}), "a")
    rows.set_clock(conn, None)
    kept = rows.submit(conn)
    fold_figures(conn)
    assert purge_finished(conn, 30).tasks == 2
    assert db.metrics(conn)["by_status"] == {"PENDING": 1}
    assert db.metrics(conn)["avg_duration_seconds"] is None
    assert db.metrics(conn)["cost_by_route"] == {}
    folded(conn)
    operations.cancel_task(conn, "default", str(kept))
    folded(conn)


def test_a_heartbeat_leaves_no_change(conn: Connection) -> None:
    lease = rows.claimed(conn).lease
    before = changes(conn)
    assert renew_leases(conn, [lease], 60).lost == set()
    assert changes(conn) == before


def test_a_statement_leaves_one_change_per_tenant_and_kind(conn: Connection) -> None:
    operations.submit_batch(conn, [rows.new_task() for _ in range(20)])
    assert changes(conn) == 1
    tasks = rows.claim(conn, 20).tasks
    before = changes(conn)
    done = [(task.lease, Outcome("succeeded", result={})) for task in tasks]
    assert len(settle_tasks(conn, done, Retry())) == 20
    assert changes(conn) == before + 1


CLAIM = """
    UPDATE tasks
    SET status = 'RUNNING', reason = 'claimed', due = false, started_at = current_instant(),
        lease_token = coalesce(lease_token, gen_random_uuid()),
        lease_expires_at = current_instant(), {also}
    WHERE status IN ('PENDING', 'RUNNING')
"""
END = """
    UPDATE tasks
    SET status = 'SUCCEEDED', reason = 'succeeded', result = '{{}}', lease_token = NULL,
        lease_expires_at = NULL, finished_at = current_instant(), {also}
    WHERE status IN ('RUNNING', 'SUCCEEDED')
"""
# What neither a claim nor an end changes that is a success; but one statement may do both.
ALSO = (
    *("worker = 'w2'", "tenant = 'b'", "kind = 'agent'", "retry_count = 2", "reclaim_count = 1"),
    *("route = 'cloud'", "cost = 2", "duration_seconds = 2", "duration_seconds = NULL"),
    "tenant = tenant || mod(task_id, 2)",
)


@pytest.mark.parametrize("also", ALSO)
@pytest.mark.parametrize("beside", [None, "RUNNING", "SUCCEEDED"])
@pytest.mark.parametrize("change", ["claim", "early claim", "end"])
def test_whatever_the_statement_of_a_claim_or_an_end_changes_besides_is_counted(
    conn: Connection, change: str, beside: str | None, also: str
) -> None:
    """If it does nothing else, only the figures are asked for that it changes."""
    if beside is not None:
        rows.bring_to(conn, beside)
    paid = {"route": "local", "cost": Decimal(1)}
    rows.settle(conn, rows.claimed(conn).lease, "failure", **paid)
    if change != "early claim":
        sql(conn, "UPDATE tasks SET due = true WHERE status = 'PENDING'")
    if change == "end":
        sql(conn, CLAIM.format(also="priority = 1"))
    counted.check(conn)
    sql(conn, (END if change == "end" else CLAIM).format(also=also))
    counted.check(conn)


def test_an_emptied_table_has_no_figures(conn: Connection) -> None:
    rows.submit(conn)
    fold_figures(conn)
    rows.submit(conn)
    sql(conn, "TRUNCATE tasks")
    counted.check(conn)
    assert db.metrics(conn)["by_status"] == {}


def test_sums_of_many_durations_do_not_drift(conn: Connection) -> None:
    """0.1 s is no sum of powers of two: added and taken away as such it would leave something."""
    statement = """
        INSERT INTO tasks (kind, payload, duration_seconds)
        SELECT 'prompt', '{}', 0.1 FROM generate_series(1, 30)
    """
    sql(conn, statement)
    for task in rows.claim(conn, 30).tasks:
        rows.settle(conn, task.lease, "succeeded")
    sql(conn, "UPDATE tasks SET duration_seconds = 0.1 WHERE task_id % 3 = 0".replace("%", "%%"))
    folded(conn)
    sql(conn, "UPDATE tasks SET duration_seconds = 0.1")
    assert db.metrics(conn)["avg_duration_seconds"] == 0.1


# --- at the same time ------------------------------------------------------------------------


def test_what_is_not_committed_is_not_counted_and_nobody_waits_for_it(
    conn: Connection, connect: Connect
) -> None:
    """Two settle tasks of one tenant, the second while the first has not committed; both fold."""
    first, second = rows.submit(conn), rows.submit(conn)
    leases = {task.task_id: task.lease for task in rows.claim(conn, 2).tasks}
    slow, other = connect(), connect()
    other.lock_timeout_seconds = 0.5
    with db.transaction(slow) as cursor:
        finished = """
            UPDATE tasks SET status = 'SUCCEEDED', reason = 'succeeded', result = '{}',
                lease_token = NULL, lease_expires_at = NULL, finished_at = current_instant()
            WHERE task_id = %(first)s
        """
        cursor.execute(finished, {"first": first})
        rows.settle(other, leases[second], "permanent")
        assert not fold_figures(other)
        counted.check(conn)
        assert db.metrics(conn)["by_status"] == {"RUNNING": 1, "FAILED": 1}
        cursor.execute("SELECT count(*) AS n FROM figure_changes")
        assert cursor.fetchall()[0]["n"] == 1  # its own is the one that was not folded
    counted.check(conn)
    assert db.metrics(conn)["by_status"] == {"SUCCEEDED": 1, "FAILED": 1}


def test_what_is_rolled_back_was_never_counted(conn: Connection) -> None:
    with db.transaction(conn) as cursor:
        cursor.execute("SELECT submit_task('p')")
        cursor.execute("ROLLBACK AND CHAIN")
    counted.check(conn)
    assert changes(conn) == 0


def test_of_two_that_fold_at_once_the_second_leaves_it_to_the_first(
    conn: Connection, connect: Connect
) -> None:
    rows.submit(conn)
    other = connect()
    other.lock_timeout_seconds = 0.5
    with db.transaction(conn) as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('fold_figures'))")
        assert not fold_figures(other)
        assert changes(other) == 1
    fold_figures(other)
    assert changes(other) == 0
    counted.check(conn)


def test_many_settle_while_others_fold_and_everybody_looks(
    conn: Connection, connect: Connect, threads: ThreadPoolExecutor
) -> None:
    """Workers on the tasks of three tenants, and two who fold a few rows at a time."""
    everybody = [connect() for _ in range(4)]
    folders = [connect() for _ in range(2)]
    for n in range(240):
        rows.submit(conn, tenant=f"tenant-{n % 3}")

    def work(mine: Connection) -> None:
        while tasks := rows.claim(mine, 7).tasks:
            for task in tasks:
                rows.settle(mine, task.lease, "succeeded", route="local", cost=Decimal("0.1"))

    working = [threads.submit(work, one) for one in everybody]

    def fold(mine: Connection) -> None:
        while not all(one.done() for one in working):
            fold_figures(mine, 5)

    folding = [threads.submit(fold, one) for one in folders]
    while not all(one.done() for one in working):
        with db.transaction(conn, "ISOLATION LEVEL REPEATABLE READ") as cursor:
            cursor.execute(counted.KEPT)
            kept = counted.by_group(cursor.fetchall())
            cursor.execute(counted.COUNTED)
            assert kept == counted.by_group(cursor.fetchall())
    for one in (*working, *folding):
        one.result()
    folded(conn)
    assert db.metrics(conn)["by_status"] == {"SUCCEEDED": 240}
    assert db.metrics(conn)["cost_by_route"] == {"local": "24.00000000"}


# --- lists that go by them -------------------------------------------------------------------


def test_a_list_of_all_tenants_finds_what_is_not_folded_yet_and_what_was_before(
    conn: Connection,
) -> None:
    old = rows.submit(conn, tenant="old")
    rows.finish(conn, old, "permanent")
    fold_figures(conn)
    new = rows.submit(conn, tenant="new")
    rows.finish(conn, new, "permanent")
    failed = list_tasks(conn, None, status=Status.FAILED, kind=None, **PAGE).rows  # type: ignore[arg-type]
    assert [row["task_id"] for row in failed] == [new, old]
    dead = list_dead_letters(conn, None, **PAGE).rows  # type: ignore[arg-type]
    assert [row["task_id"] for row in dead] == [new, old]


# --- older databases -------------------------------------------------------------------------


@pytest.fixture
def version_4(server_url: str) -> Iterator[Connection]:
    """A database of version 4, with no task in it."""
    name = "test_figures_version_4"
    with administrator(server_url) as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        cursor.execute(f"CREATE DATABASE {name}")
    url = at_database(server_url, name)
    with contextlib.closing(db.connect(url, settings_for(url).database, "test")) as conn:
        for version in range(1, 5):
            (file,) = schema.MIGRATIONS.glob(f"000{version}_*.sql")
            sql(conn, file.read_text().replace("%", "%%"))
            if version > 1:
                sql(conn, "INSERT INTO schema_version (version) VALUES (%(v)s)", v=version)
        yield conn
    with administrator(server_url) as cursor:
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


OF_CLAIMS = (
    *("claim_tasks", "claim_suspect", "look_at_queue", "due_tenants"),
    *("choose_by_shares", "lease_tasks", "mark_due", "count_due", "is_wanted"),
)


def test_what_an_older_version_stored_is_counted_by_the_migration(version_4: Connection) -> None:
    with borrowed(version_4, *OF_CLAIMS, "create_task", "settle_tasks", "end_steps", "end_runs"):
        for status in BRING_TO:
            rows.bring_to(version_4, status)
            if status == "PENDING":
                rows.claim(version_4)
        paid = {"route": "cloud", "cost": Decimal("0.3")}
        rows.finish(version_4, rows.submit(version_4, tenant="b"), **paid)
    graphs.submit(version_4, {"a": [], "b": ["a"]})
    schema.migrate(version_4)
    counted.check(version_4)
    assert db.metrics(version_4)["by_status"]["SUCCEEDED"] == 2
    rows.submit(version_4)
    folded(version_4)


def test_a_role_that_could_submit_can_still_submit_after_the_migration(
    version_4: Connection,
) -> None:
    role = "test_figures_submitter"
    sql(version_4, f"DROP ROLE IF EXISTS {role}")
    sql(version_4, f"CREATE ROLE {role}")
    try:
        sql(version_4, f"GRANT SELECT, INSERT ON tasks TO {role}")
        sql(version_4, f"GRANT SELECT ON transitions TO {role}")
        sql(version_4, f"GRANT INSERT ON audit_log TO {role}")
        schema.migrate(version_4)
        with db.transaction(version_4) as cursor:
            cursor.execute(f"SET LOCAL ROLE {role}")
            cursor.execute("SELECT submit_task('p')")
        counted.check(version_4)
    finally:
        sql(version_4, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_figures_can_be_counted_anew(own_conn: Connection) -> None:
    rows.finish(own_conn, rows.submit(own_conn))
    sql(own_conn, "ALTER TABLE tasks DISABLE TRIGGER USER")
    sql(own_conn, "INSERT INTO tasks (kind, payload) VALUES ('prompt', '{}')")
    sql(own_conn, "ALTER TABLE tasks ENABLE TRIGGER USER")
    with pytest.raises(AssertionError):
        counted.check(own_conn)
    sql(own_conn, "SELECT recount_figures()")
    folded(own_conn)

"""queries/schema.py: the schema comes into an empty database once, and never over anything else."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg2
import pytest

from db import Connection, connect
from errors import SchemaOutdated, StateConflict
from queries import schema
from queries.schema import ensure_schema, migrate, wanted_version
from tests.conftest import administrator, settings_for
from tests.support import rows, runs
from tests.support.processes import eventually
from tests.support.rows import sql
from tests.support.stage import PATIENCE

Connect = Callable[[], Connection]


@pytest.fixture
def empty(module_database: str) -> Iterator[Connect]:
    """Opens connections to a database that holds nothing; they are closed after the test."""
    with administrator(module_database) as cursor:
        cursor.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    opened: list[Connection] = []

    def open_one() -> Connection:
        database = settings_for(module_database).database
        opened.append(connect(module_database, database, "test"))
        return opened[-1]

    yield open_one
    for conn in opened:
        conn.close()


@pytest.fixture
def blank(empty: Connect) -> Connection:
    """A connection to a database that holds nothing."""
    return empty()


def versions(conn: Connection) -> list[int]:
    found = sql(conn, "SELECT version FROM schema_version ORDER BY version")
    return [entry["version"] for entry in found]


def tables(conn: Connection) -> set[str]:
    found = sql(conn, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return {entry["tablename"] for entry in found}


def pretend(conn: Connection, version: int) -> None:
    sql(conn, "UPDATE schema_version SET version = %(version)s", version=version)


# --- install ---------------------------------------------------------------------------------


def test_an_empty_database_gets_the_schema_and_its_version(blank: Connection) -> None:
    ensure_schema(blank)
    assert {"tasks", "audit_log", "transitions", "schema_version"} <= tables(blank)
    assert versions(blank) == [wanted_version()]


def test_installing_again_changes_nothing(blank: Connection) -> None:
    ensure_schema(blank)
    before = tables(blank)
    ensure_schema(blank)
    assert (tables(blank), versions(blank)) == (before, [wanted_version()])


def test_eight_processes_that_find_an_empty_database_at_once_install_it_once(
    empty: Connect,
) -> None:
    referee, conns = empty(), [empty() for _ in range(8)]
    for conn in conns:
        conn.lock_timeout_seconds = PATIENCE
    waiting = """
        SELECT count(*) AS n FROM pg_locks JOIN pg_database d ON d.oid = database
        WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()
    """
    key = "hashtext('orchestrator schema')"
    with ThreadPoolExecutor(8) as pool:
        # All of them have seen that it is empty before the first may install it.
        sql(referee, f"SELECT pg_advisory_lock({key})")
        started = [pool.submit(ensure_schema, conn) for conn in conns]
        try:
            eventually(lambda: sql(referee, waiting)[0]["n"] == 8, PATIENCE, "all eight wait")
        finally:
            sql(referee, f"SELECT pg_advisory_unlock({key})")
        for one in started:
            one.result()
    assert versions(referee) == [wanted_version()]
    assert "tasks" in tables(referee)


def test_an_installation_that_fails_leaves_the_database_empty(
    blank: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "schema.sql"
    broken.write_text(schema.SCHEMA.read_text() + "\nSELECT 1 / 0;\n")
    monkeypatch.setattr(schema, "SCHEMA", broken)
    with pytest.raises(psycopg2.errors.DivisionByZero):
        ensure_schema(blank)
    assert tables(blank) == set()
    monkeypatch.undo()
    ensure_schema(blank)
    assert "tasks" in tables(blank)


THINGS = ["TABLE x (a int)", "VIEW x AS SELECT 1", "MATERIALIZED VIEW x AS SELECT 1"]


@pytest.mark.parametrize("thing", THINGS)
def test_a_database_with_anything_else_in_it_is_refused_with_the_command_to_run(
    blank: Connection, thing: str
) -> None:
    sql(blank, f"CREATE {thing}")
    with pytest.raises(SchemaOutdated, match=r"holds other tables.*python admin\.py migrate"):
        ensure_schema(blank)
    assert "tasks" not in tables(blank)


def test_migrate_installs_beside_the_tables_of_others(blank: Connection) -> None:
    sql(blank, "CREATE TABLE somebodys (a int)")
    assert migrate(blank) == [wanted_version()]
    assert {"tasks", "somebodys"} <= tables(blank)
    ensure_schema(blank)


# --- versions --------------------------------------------------------------------------------


def test_an_older_version_is_refused_with_both_numbers_and_the_command_to_run(
    blank: Connection,
) -> None:
    ensure_schema(blank)
    pretend(blank, wanted_version() - 1)
    said = f"is version {wanted_version() - 1}, this program needs {wanted_version()}; run: python"
    with pytest.raises(SchemaOutdated, match=rf"{said} admin\.py migrate$"):
        ensure_schema(blank)


def test_a_newer_version_is_refused_and_the_program_is_to_blame(blank: Connection) -> None:
    ensure_schema(blank)
    pretend(blank, wanted_version() + 1)
    said = (
        f"is version {wanted_version() + 1}, newer than this program's {wanted_version()}; update"
    )
    with pytest.raises(SchemaOutdated, match=said):
        ensure_schema(blank)


def test_the_version_that_schema_sql_installs_is_that_of_the_last_migration() -> None:
    numbers = [int(file.name[:4]) for file in schema.MIGRATIONS.glob("*.sql")]
    assert sorted(numbers) == list(range(1, wanted_version() + 1))  # 1: where they start from


# --- migrate ---------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path: Path) -> Callable[..., Path]:
    """steps("SQL of version 2", "SQL of version 3"): a folder of migrations."""

    def write(*statements: str) -> Path:
        for version, statement in enumerate(statements, start=2):
            (tmp_path / f"{version}_step.sql").write_text(statement)
        return tmp_path

    return write


@pytest.fixture
def version_1(blank: Connection) -> Connection:
    """A database whose schema says version 1."""
    ensure_schema(blank)
    pretend(blank, 1)
    return blank


def test_migrations_are_applied_in_the_order_of_their_numbers(
    version_1: Connection, steps: Callable[..., Path]
) -> None:
    statements = ["CREATE TABLE told (step int)"]
    statements += [f"INSERT INTO told SELECT {version}" for version in range(3, 12)]
    assert migrate(version_1, steps(*statements)) == list(range(2, 12))
    told = [entry["step"] for entry in sql(version_1, "SELECT step FROM told ORDER BY ctid")]
    assert told == list(range(3, 12))  # 10 after 9, not after 1
    assert versions(version_1) == list(range(1, 12))


def test_migrations_that_were_applied_are_not_applied_again(
    version_1: Connection, steps: Callable[..., Path]
) -> None:
    folder = steps("CREATE TABLE a ()", "CREATE TABLE b ()")
    assert migrate(version_1, folder) == [2, 3]
    assert migrate(version_1, folder) == []
    (folder / "4_more.sql").write_text("CREATE TABLE c ()")
    assert migrate(version_1, folder) == [4]
    assert {"a", "b", "c"} <= tables(version_1)


def test_a_step_that_fails_leaves_the_version_before_it_and_nothing_of_its_own(
    version_1: Connection, steps: Callable[..., Path]
) -> None:
    folder = steps("CREATE TABLE a ()", "CREATE TABLE b (); SELECT 1 / 0", "CREATE TABLE c ()")
    with pytest.raises(psycopg2.errors.DivisionByZero):
        migrate(version_1, folder)
    assert versions(version_1) == [1, 2]
    assert tables(version_1) & {"a", "b", "c"} == {"a"}
    (folder / "3_step.sql").write_text("CREATE TABLE b ()")
    assert migrate(version_1, folder) == [3, 4]


def test_a_missing_number_is_not_stepped_over(
    version_1: Connection, steps: Callable[..., Path]
) -> None:
    folder = steps("CREATE TABLE a ()", "CREATE TABLE b ()", "CREATE TABLE c ()")
    (folder / "3_step.sql").unlink()
    assert migrate(version_1, folder) == [2]
    assert versions(version_1) == [1, 2]


def test_files_that_are_no_numbered_steps_are_left_alone(
    version_1: Connection, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("no SQL")
    (tmp_path / "helper.sql").write_text("no SQL")
    assert migrate(version_1, tmp_path) == []


def test_two_operators_that_migrate_at_once_apply_each_step_once(
    version_1: Connection, empty: Connect, steps: Callable[..., Path]
) -> None:
    folder = steps("CREATE TABLE a ()", "CREATE TABLE b ()", "CREATE TABLE c ()")
    conns = [version_1, empty(), empty(), empty()]
    together = threading.Barrier(len(conns))

    def run(conn: Connection) -> list[int]:
        together.wait()
        return migrate(conn, folder)

    with ThreadPoolExecutor(len(conns)) as pool:
        applied = [version for done in pool.map(run, conns) for version in done]
    assert sorted(applied) == [2, 3, 4]
    assert versions(version_1) == [1, 2, 3, 4]


# Every object there is, as Postgres describes it; columns by name, since a migration appends them.
CATALOGUE = """
SELECT 'column ' || attrelid::regclass || '.' || attname AS name,
       concat_ws(' ', format_type(atttypid, atttypmod), attnotnull, attidentity,
                 pg_get_expr(adbin, adrelid)) AS definition
FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
JOIN pg_class c ON c.oid = attrelid
WHERE relnamespace = 'public'::regnamespace AND attnum > 0 AND NOT attisdropped
  AND relkind IN ('r', 'p')
UNION ALL
SELECT 'index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL
SELECT concat('constraint ', nullif(conrelid, 0)::regclass, nullif(contypid, 0)::regtype,
              '.', conname), pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = 'public'::regnamespace
UNION ALL
SELECT 'domain ' || oid::regtype, format_type(typbasetype, typtypmod) FROM pg_type
WHERE typnamespace = 'public'::regnamespace AND typtype = 'd'
UNION ALL
SELECT 'function ' || oid::regprocedure, pg_get_functiondef(oid)
FROM pg_proc WHERE pronamespace = 'public'::regnamespace
UNION ALL
SELECT 'trigger ' || tgrelid::regclass || '.' || tgname, pg_get_triggerdef(oid) FROM pg_trigger
WHERE NOT tgisinternal
UNION ALL
SELECT 'comment ' || objoid::regclass, description FROM pg_description
WHERE classoid = 'pg_class'::regclass AND objoid::regclass::text !~ '^pg_|information_schema'
UNION ALL
SELECT 'option ' || oid::regclass, reloptions::text FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND reloptions IS NOT NULL
UNION ALL
SELECT 'transition ' || t::text, '' FROM transitions t
"""


def catalogue(conn: Connection) -> dict[str, str]:
    return {entry["name"]: entry["definition"] for entry in sql(conn, CATALOGUE)}


def install_version_1(conn: Connection) -> None:
    sql(conn, (schema.MIGRATIONS / "0001_initial.sql").read_text().replace("%", "%%"))
    assert versions(conn) == [1]


def test_a_database_that_went_through_all_migrations_equals_a_fresh_one(
    blank: Connection, own_conn: Connection
) -> None:
    install_version_1(blank)
    assert migrate(blank) == list(range(2, wanted_version() + 1))
    migrated, fresh = catalogue(blank), catalogue(own_conn)
    assert len(fresh) > 100
    assert set(migrated) == set(fresh)
    assert {name for name in fresh if migrated[name] != fresh[name]} == set()


def test_what_an_older_version_stored_is_carried_out_after_the_migration(
    blank: Connection,
) -> None:
    install_version_1(blank)
    statement = "SELECT submit_task('from version 1') AS task_id"
    task_id = sql(blank, statement)[0]["task_id"]
    migrate(blank)
    rows.finish(blank, task_id)
    assert rows.reasons(blank, task_id) == ["created", "claimed", "succeeded"]
    run_id = runs.submit(blank, {"a": []})
    runs.finish(blank, run_id, "a")
    assert runs.statuses(blank, run_id) == {"": "SUCCEEDED", "a": "SUCCEEDED"}


def test_a_migration_waits_until_the_workers_of_the_older_version_are_gone(
    blank: Connection,
) -> None:
    install_version_1(blank)
    statement = """
        INSERT INTO workers (worker_id, name, concurrency, running)
        VALUES (gen_random_uuid(), 'old-one', 1, 0)
    """
    sql(blank, statement)
    with pytest.raises(StateConflict, match=r"still run \(worker old-one\); stop all workers"):
        migrate(blank)
    assert versions(blank) == [1]
    sql(blank, "UPDATE workers SET seen_at = seen_at - interval '31 seconds'")
    assert migrate(blank) == list(range(2, wanted_version() + 1))


def test_a_migration_waits_until_no_api_of_ours_is_connected(
    blank: Connection, module_database: str
) -> None:
    install_version_1(blank)
    settings = settings_for(module_database).database
    with (
        contextlib.closing(connect(module_database, settings, "orchestrator api")),
        pytest.raises(StateConflict, match="orchestrator api"),
    ):
        migrate(blank)

    def gone() -> list[int]:
        try:
            return migrate(blank)
        except StateConflict as still_there:
            raise AssertionError(still_there) from still_there

    assert eventually(gone) == list(range(2, wanted_version() + 1))


def test_schema_sql_says_its_version_once_for_each_it_includes() -> None:
    said = re.findall(r"VALUES \((\d+)\);", schema.SCHEMA.read_text())
    assert said == [str(wanted_version())]

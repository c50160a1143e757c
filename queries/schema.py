"""The database's schema: install it into an empty database, compare it, migrate an older one."""

from __future__ import annotations

import re
from pathlib import Path

from config import ROOT
from connection import Connection, Cursor, fetch, impatient, transaction
from errors import SchemaOutdated, StateConflict

SCHEMA = ROOT / "schema.sql"
MIGRATIONS = ROOT / "migrations"

# One process at a time installs or migrates; the others wait here and then find it done.
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtext('orchestrator schema'))"

READ_STATE = """
SELECT
    to_regclass('schema_version') IS NOT NULL AS is_installed,
    NOT EXISTS (
        SELECT FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v', 'm')
    ) AS is_empty
"""

READ_VERSION = "SELECT max(version) AS version FROM schema_version"

# Workers that were seen lately, and other processes of ours that are connected.
READ_OTHERS = """
SELECT 'worker ' || name AS name FROM workers
WHERE seen_at > current_instant() - make_interval(secs => %(present_seconds)s)
UNION
SELECT application_name FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'orchestrator %%'
  AND application_name <> 'orchestrator admin'
ORDER BY name
"""
PRESENT_SECONDS = 30


def wanted_version() -> int:
    """The version that schema.sql installs, as its last INSERT INTO schema_version says."""
    found = re.findall(r"INSERT INTO schema_version \(version\) VALUES \((\d+)\)", _text(SCHEMA))
    return int(found[-1])


def ensure_schema(conn: Connection) -> None:
    """Install the schema if the database is empty; SchemaOutdated if it is not the wanted one."""
    version = _install_if_allowed(conn, only_when_empty=True)
    wanted = wanted_version()
    if version is None:
        raise SchemaOutdated(
            "this database holds other tables but none of the orchestrator's; "
            "to install it beside them run: python admin.py migrate"
        )
    if version < wanted:
        raise SchemaOutdated(
            f"the database's schema is version {version}, this program needs {wanted}; "
            "run: python admin.py migrate"
        )
    if version > wanted:
        raise SchemaOutdated(_too_new(version))


def migrate(conn: Connection, migrations: Path = MIGRATIONS) -> list[int]:
    """Bring the database to the wanted version and return the versions it went through.

    Each step is one transaction: a step that fails leaves the version before it. StateConflict
    while processes of the older version still run: they know nothing of what the step brings.
    """
    before = _read_version(conn)
    if before is None:
        _install_if_allowed(conn, only_when_empty=False)
        return [wanted_version()]
    steps = _numbered(migrations)
    if before > max([wanted_version(), *(version for version, _ in steps)]):
        raise SchemaOutdated(_too_new(before))
    if any(version > before for version, _ in steps):
        _refuse_while_others_run(conn)
    done = []
    for version, file in steps:
        with transaction(conn) as cursor:
            cursor.execute(TAKE_TURN)
            if _version(cursor) == version - 1:
                cursor.execute(_text(file))
                cursor.execute("INSERT INTO schema_version (version) VALUES (%s)", (version,))
                done.append(version)
    return done


# Whoever writes to the audit log waits behind the one who attaches a partition to it.
PARTITION_LOCK_SECONDS = 0.2


def ensure_audit_partitions(conn: Connection) -> int:
    """Make the audit log's partitions of this month and the next two; how many were missing."""
    with impatient(conn, PARTITION_LOCK_SECONDS):
        return int(fetch(conn, "SELECT ensure_audit_partitions() AS made")[0]["made"])


def _install_if_allowed(conn: Connection, only_when_empty: bool) -> int | None:
    """The version of the installed schema, after installing it where that is allowed."""
    if (version := _read_version(conn)) is not None:
        return version
    with transaction(conn) as cursor:
        cursor.execute(TAKE_TURN)
        cursor.execute(READ_STATE)
        (state,) = cursor.fetchall()
        if not state["is_installed"]:
            if only_when_empty and not state["is_empty"]:
                return None
            cursor.execute(_text(SCHEMA))
        return _version(cursor)


def _read_version(conn: Connection) -> int | None:
    if not fetch(conn, READ_STATE)[0]["is_installed"]:
        return None
    return int(fetch(conn, READ_VERSION)[0]["version"])


def _version(cursor: Cursor) -> int:
    cursor.execute(READ_VERSION)
    (row,) = cursor.fetchall()
    return int(row["version"])


def _refuse_while_others_run(conn: Connection) -> None:
    others = fetch(conn, READ_OTHERS, {"present_seconds": PRESENT_SECONDS})
    if others:
        names = ", ".join(row["name"] for row in others[:5])
        raise StateConflict(
            f"processes of the older version still run ({names}); stop all workers and the API, "
            f"wait {PRESENT_SECONDS} s if one was killed, and migrate then"
        )


def _too_new(version: int) -> str:
    return (
        f"the database's schema is version {version}, newer than this program's "
        f"{wanted_version()}; update this program"
    )


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The steps in order: 0002_add_x.sql leads from version 1 to version 2."""
    return sorted((int(file.name.split("_")[0]), file) for file in folder.glob("[0-9]*_*.sql"))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")

"""The operator's commands: python admin.py migrate | maintain

migrate     bring the database's schema to the version this program needs
maintain    make the audit log's partitions of the coming months
"""

from __future__ import annotations

import argparse
import contextlib
import sys

import db
from config import ConfigError, Settings, load_config
from errors import OrchestratorError
from queries.schema import ensure_audit_partitions, migrate, wanted_version


def main() -> int:
    """Run one command; 0 if it did its work, 1 with the reason on standard error if not."""
    parser = argparse.ArgumentParser(description="The operator's commands of Agent Orchestrator.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("migrate", help="bring the database's schema to this program's version")
    commands.add_parser("maintain", help="make the audit log's partitions of the coming months")
    command = {"migrate": run_migrate, "maintain": run_maintain}[parser.parse_args().command]
    try:
        settings = load_config()
        with contextlib.closing(connect(settings)) as conn:
            sys.stdout.write(command(conn) + "\n")
    except (ConfigError, OrchestratorError) as failed:
        sys.stderr.write(f"{failed}\n")
        return 1
    return 0


def connect(settings: Settings) -> db.Connection:
    conn = db.connect(settings.database_url, settings.database, "orchestrator admin")
    conn.reply_timeout_seconds = 3600  # a migration may take its time
    return conn


def run_migrate(conn: db.Connection) -> str:
    done = migrate(conn)
    if not done:
        return f"The schema is at version {wanted_version()}; nothing to do."
    return f"The schema went to version {', then '.join(map(str, done))}."


def run_maintain(conn: db.Connection) -> str:
    made = ensure_audit_partitions(conn)
    return f"Partitions of the audit log made: {made}."


if __name__ == "__main__":
    sys.exit(main())

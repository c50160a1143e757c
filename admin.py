"""The operator's commands: python admin.py migrate | maintain | keys

migrate     bring the database's schema to the version this program needs
maintain    make the audit log's partitions of the coming months
keys        create, list and revoke API keys
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import db
from config import ConfigError, Settings, load_config
from errors import OrchestratorError
from queries.keys import create_key, list_keys, revoke_key
from queries.schema import ensure_audit_partitions, ensure_schema, migrate, wanted_version

Command = Callable[[db.Connection, argparse.Namespace], str]


def main() -> int:
    """Run one command; 0 if it did its work, 1 with the reason on standard error if not."""
    arguments = parser().parse_args()
    command: Command = arguments.run
    try:
        settings = load_config()
        with contextlib.closing(connect(settings)) as conn:
            sys.stdout.write(command(conn, arguments) + "\n")
    except (ConfigError, OrchestratorError) as failed:
        sys.stderr.write(f"{failed}\n")
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    told = argparse.ArgumentParser(description="The operator's commands of Agent Orchestrator.")
    commands = told.add_subparsers(dest="command", required=True)
    about = "bring the database's schema to this program's version"
    commands.add_parser("migrate", help=about).set_defaults(run=run_migrate)
    about = "make the audit log's partitions of the coming months"
    commands.add_parser("maintain", help=about).set_defaults(run=run_maintain)
    about = "who may use the API; the first key closes it to everybody without one"
    keys = commands.add_parser("keys", help=about, description=about)
    of_keys = keys.add_subparsers(dest="keys", required=True)
    create = of_keys.add_parser("create", help="make a key and print it, once")
    create.set_defaults(run=run_create_key)
    whose = create.add_mutually_exclusive_group(required=True)
    whose.add_argument("--tenant", metavar="NAME", help="the tenant whose requests it opens")
    whose.add_argument("--operator", action="store_true", help="a key that sees all tenants")
    about = "show every key there ever was, without its secret"
    of_keys.add_parser("list", help=about).set_defaults(run=run_list_keys)
    revoke = of_keys.add_parser("revoke", help="let a key open nothing any more")
    revoke.set_defaults(run=run_revoke_key)
    revoke.add_argument("key", metavar="ID", help="as `keys list` shows it, or the whole key")
    return told


def connect(settings: Settings) -> db.Connection:
    conn = db.connect(settings.database_url, settings.database, "orchestrator admin")
    conn.reply_timeout_seconds = 3600  # a migration may take its time
    return conn


def run_migrate(conn: db.Connection, arguments: argparse.Namespace) -> str:
    done = migrate(conn)
    if not done:
        return f"The schema is at version {wanted_version()}; nothing to do."
    return f"The schema went to version {', then '.join(map(str, done))}."


def run_maintain(conn: db.Connection, arguments: argparse.Namespace) -> str:
    made = ensure_audit_partitions(conn)
    return f"Partitions of the audit log made: {made}."


def run_create_key(conn: db.Connection, arguments: argparse.Namespace) -> str:
    ensure_schema(conn)
    return (
        f"{create_key(conn, arguments.tenant)}\n"
        "Keep it now, it is not shown again; send it with each request as the header X-API-Key."
    )


def run_list_keys(conn: db.Connection, arguments: argparse.Namespace) -> str:
    ensure_schema(conn)
    keys = list_keys(conn)
    if not keys:
        return "No key was ever created: the API is open to everybody who reaches it."
    lines = [f"{'id':12}  {'created':20}  {'revoked':20}  whose"]
    for key in keys:
        whose = "an operator's" if key["tenant"] is None else f"tenant {key['tenant']}"
        created, revoked = as_utc(key["created_at"]), as_utc(key["revoked_at"])
        lines.append(f"{key['key_id']}  {created:20}  {revoked:20}  {whose}")
    return "\n".join(lines)


def run_revoke_key(conn: db.Connection, arguments: argparse.Namespace) -> str:
    ensure_schema(conn)
    key_id = arguments.key.removeprefix("ak_").split("_")[0]
    revoke_key(conn, key_id)
    return (
        f"Key {key_id} is revoked. Each API process notices within limits.key_cache_seconds "
        "of config.toml."
    )


def as_utc(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


if __name__ == "__main__":
    sys.exit(main())

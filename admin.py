"""The operator's commands: python admin.py migrate | maintain | purge | keys | webhooks

migrate     bring the database's schema to the version this program needs
maintain    make the audit log's partitions of the coming months
purge       delete what [retention] of config.toml no longer keeps
keys        create, list and revoke API keys
webhooks    make the secrets with which callbacks are signed
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

import db
from config import ConfigError, Settings, load_config
from errors import OrchestratorError
from queries.checkpoints import purge_checkpoints, purge_counters, purge_lost_jobs
from queries.keys import create_key, list_keys, revoke_key
from queries.retention import drop_old_audit_partitions, purge_finished
from queries.schema import ensure_audit_partitions, ensure_schema, migrate, wanted_version
from queries.webhooks import make_secret

# Tells what was done, as it is done.
Command = Callable[[db.Connection, argparse.Namespace, Settings], Iterator[str]]


def main() -> int:
    """Run one command; 0 if it did its work, 1 with the reason on standard error if not."""
    arguments = parser().parse_args()
    command: Command = arguments.run
    try:
        settings = load_config()
        with contextlib.closing(connect(settings)) as conn:
            for done in command(conn, arguments, settings):
                sys.stdout.write(done + "\n")
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
    about = "delete what [retention] of config.toml no longer keeps"
    commands.add_parser("purge", help=about).set_defaults(run=run_purge)
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
    about = "with what callbacks are signed"
    webhooks = commands.add_parser("webhooks", help=about, description=about)
    of_webhooks = webhooks.add_subparsers(dest="webhooks", required=True)
    about = "make a tenant's secret, in the place of an earlier one, and print it, once"
    secret = of_webhooks.add_parser("secret", help=about, description=about)
    secret.set_defaults(run=run_make_secret)
    secret.add_argument("--tenant", metavar="NAME", required=True)
    return told


def connect(settings: Settings) -> db.Connection:
    conn = db.connect(settings.database_url, settings.database, "orchestrator admin")
    conn.reply_timeout_seconds = 3600  # a migration may take its time
    return conn


def run_migrate(conn: db.Connection, _: argparse.Namespace, __: Settings) -> Iterator[str]:
    if done := migrate(conn):
        yield f"The schema went to version {', then '.join(map(str, done))}."
    else:
        yield f"The schema is at version {wanted_version()}; nothing to do."


def run_maintain(conn: db.Connection, _: argparse.Namespace, __: Settings) -> Iterator[str]:
    ensure_schema(conn)
    yield f"Partitions of the audit log made: {ensure_audit_partitions(conn)}."


def run_purge(conn: db.Connection, _: argparse.Namespace, settings: Settings) -> Iterator[str]:
    """Whatever is in use now, the next purge takes."""
    ensure_schema(conn)  # an older program knows nothing of newer tables
    keep = settings.retention
    if keep.finished_days:
        done = purge_finished(conn, keep.finished_days)
        yield (
            f"Finished more than {keep.finished_days} days ago, and deleted: "
            f"tasks {done.tasks}, runs {done.runs} with steps {done.steps} and edges {done.edges}."
        )
    else:
        yield "Finished tasks are kept for ever: retention.finished_days is 0."
    if keep.checkpoints_days:
        gone = purge_checkpoints(conn, keep.checkpoints_days)
        yield (
            f"Older checkpoints of jobs that finished more than {keep.checkpoints_days} days ago, "
            f"and deleted: {counted(gone)}."
        )
    else:
        yield "Checkpoints are kept as long as their tasks: retention.checkpoints_days is 0."
    yield f"Left of jobs whose tasks are gone, and deleted: jobs {purge_lost_jobs(conn)}."
    counters = counted(purge_counters(conn))
    yield f"Counted for tenants more than two days ago, and deleted: {counters}."
    if keep.audit_days:
        dropped = drop_old_audit_partitions(conn, keep.audit_days)
        yield f"Months of the audit log dropped: {', '.join(dropped) or 'none'}."
    else:
        yield "The audit log is kept for ever: retention.audit_days is 0."


def run_create_key(
    conn: db.Connection, arguments: argparse.Namespace, _: Settings
) -> Iterator[str]:
    ensure_schema(conn)
    yield create_key(conn, arguments.tenant)
    yield "Keep it now, it is not shown again; send it with each request as the header X-API-Key."


def run_list_keys(conn: db.Connection, _: argparse.Namespace, __: Settings) -> Iterator[str]:
    ensure_schema(conn)
    keys = list_keys(conn)
    if not keys:
        yield "No key was ever created: the API is open to everybody who reaches it."
        return
    yield f"{'id':12}  {'created':20}  {'revoked':20}  whose"
    for key in keys:
        whose = "an operator's" if key["tenant"] is None else f"tenant {key['tenant']}"
        created, revoked = as_utc(key["created_at"]), as_utc(key["revoked_at"])
        yield f"{key['key_id']}  {created:20}  {revoked:20}  {whose}"


def run_revoke_key(
    conn: db.Connection, arguments: argparse.Namespace, _: Settings
) -> Iterator[str]:
    ensure_schema(conn)
    key_id = arguments.key.removeprefix("ak_").split("_")[0]
    revoke_key(conn, key_id)
    yield (
        f"Key {key_id} is revoked. Each API process notices within limits.key_cache_seconds "
        "of config.toml."
    )


def run_make_secret(
    conn: db.Connection, arguments: argparse.Namespace, _: Settings
) -> Iterator[str]:
    ensure_schema(conn)
    secret, replaced = make_secret(conn, arguments.tenant)
    yield secret
    yield "Keep it now, it is not shown again; whoever receives callbacks checks them with it."
    if replaced:
        yield "It takes the place of an earlier one, with which nothing is signed any more."


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def as_utc(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


if __name__ == "__main__":
    sys.exit(main())

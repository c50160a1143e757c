"""queries/keys.py and admin.py keys: who may use the API, and tickets for streams."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psycopg2
import psycopg2.errors
import pytest

from config import ROOT
from db import Connection
from errors import NotFound, RequestRefused, StateConflict
from queries import keys
from tests.conftest import administrator
from tests.support import rows
from tests.support.rows import sql

FUTURE, PAST = "2100-01-01T00:00:00+00:00", "2020-01-01T00:00:00+00:00"


@pytest.fixture
def database_url(module_database: str) -> str:
    """No key in it."""
    with administrator(module_database) as cursor:
        cursor.execute("TRUNCATE api_keys, tickets")
    return module_database


def parts(key: str) -> tuple[str, str]:
    """Id and secret."""
    found = keys.KEY.fullmatch(key)
    assert found
    return found["id"], found["secret"]


def stored(conn: Connection, key: str) -> keys.ApiKey:
    _, found = keys.find_key(conn, parts(key)[0])
    assert found
    return found


# --- keys ------------------------------------------------------------------------------------


def test_a_key_opens_with_its_own_secret_and_with_no_other(conn: Connection) -> None:
    mine, other = keys.create_key(conn, "acme"), keys.create_key(conn, "acme")
    assert stored(conn, mine).has_secret(parts(mine)[1])
    assert not stored(conn, mine).has_secret(parts(other)[1])
    assert not stored(conn, mine).has_secret("")
    assert stored(conn, mine).tenant == "acme"


def test_no_secret_can_be_found_in_the_database(conn: Connection) -> None:
    key = keys.create_key(conn, "acme")
    ticket = keys.create_ticket(conn, parts(key)[0], "/runs/1/events", 60)
    kept = [
        sql(conn, f"SELECT row::text FROM {table} AS row")  # noqa: S608
        for table in ("api_keys", "tickets")
    ]
    assert "/runs/1/events" in str(kept)
    for secret in (parts(key)[1], ticket):
        for piece in (secret[:16], secret[-16:]):
            assert piece not in str(kept)
            assert piece.encode().hex() not in str(kept)


def test_a_key_without_a_tenant_is_an_operators(conn: Connection) -> None:
    assert stored(conn, keys.create_key(conn, None)).tenant is None
    assert sql(conn, "SELECT is_operator FROM api_keys") == [{"is_operator": True}]


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, "ü"])
def test_a_key_for_what_no_tenant_can_be_called_is_refused(conn: Connection, tenant: str) -> None:
    with pytest.raises(RequestRefused, match="1 to 64"):
        keys.create_key(conn, tenant)
    assert keys.list_keys(conn) == []


def test_a_revoked_key_opens_nothing_and_still_counts_as_one_that_was_created(
    conn: Connection,
) -> None:
    assert keys.find_key(conn, "") == (False, None)
    key = keys.create_key(conn, "acme")
    keys.revoke_key(conn, parts(key)[0])
    assert stored(conn, key).is_revoked
    assert keys.find_key(conn, "") == (True, None)


def test_a_key_is_revoked_once_and_only_if_it_is_there(conn: Connection) -> None:
    key_id, _ = parts(keys.create_key(conn, "acme"))
    with pytest.raises(NotFound, match="keys list"):
        keys.revoke_key(conn, "0" * 12)
    keys.revoke_key(conn, key_id)
    with pytest.raises(StateConflict, match="already"):
        keys.revoke_key(conn, key_id)


IMPOSSIBLE = [
    ("key_tenant_is_a_name", "tenant = 'a b'"),
    ("key_is_a_tenants_or_an_operators", "tenant = NULL"),
    ("key_is_a_tenants_or_an_operators", "is_operator = true"),
    ("key_is_stored_as_its_hash", "secret_hash = 'the secret itself'"),
]


@pytest.mark.parametrize(("constraint", "change"), IMPOSSIBLE, ids=lambda case: case)
def test_a_key_that_cannot_be_is_refused(conn: Connection, constraint: str, change: str) -> None:
    keys.create_key(conn, "acme")
    with pytest.raises(psycopg2.errors.CheckViolation) as refused:
        sql(conn, f"UPDATE api_keys SET {change}")  # noqa: S608
    assert refused.value.diag.constraint_name == constraint


# --- tickets ---------------------------------------------------------------------------------

PATH = "/runs/1/events"


@pytest.fixture
def key_id(conn: Connection) -> str:
    return parts(keys.create_key(conn, "acme"))[0]


def test_a_ticket_stands_for_its_key_on_its_path_and_may_be_used_again(
    conn: Connection, key_id: str
) -> None:
    ticket = keys.create_ticket(conn, key_id, PATH, 60)
    for _ in range(2):
        found = keys.key_of_ticket(conn, ticket, PATH)
        assert found
        assert (found.key_id, found.tenant) == (key_id, "acme")
    assert keys.key_of_ticket(conn, ticket, "/runs/2/events") is None
    assert keys.key_of_ticket(conn, "0" * 64, PATH) is None


def test_a_ticket_ends_by_the_clock_of_the_database(conn: Connection, key_id: str) -> None:
    rows.set_clock(conn, "2026-01-01T00:00:00+00:00")
    ticket = keys.create_ticket(conn, key_id, PATH, 60)
    rows.set_clock(conn, "2026-01-01T00:00:59.999+00:00")
    assert keys.key_of_ticket(conn, ticket, PATH) is not None
    rows.set_clock(conn, "2026-01-01T00:01:00+00:00")
    assert keys.key_of_ticket(conn, ticket, PATH) is None


def test_a_ticket_of_a_revoked_key_is_worth_nothing(conn: Connection, key_id: str) -> None:
    ticket = keys.create_ticket(conn, key_id, PATH, 60)
    keys.revoke_key(conn, key_id)
    assert keys.key_of_ticket(conn, ticket, PATH) is None


def test_tickets_that_have_expired_go_with_those_that_follow(conn: Connection, key_id: str) -> None:
    for clock in (PAST, FUTURE):
        rows.set_clock(conn, clock)
        for _ in range(12):
            keys.create_ticket(conn, key_id, PATH, 60)
    (left,) = sql(conn, "SELECT count(*) AS n FROM tickets")
    assert left["n"] == 12


# --- the commands ----------------------------------------------------------------------------


def admin(url: str, *arguments: str) -> Any:
    return subprocess.run(
        [sys.executable, "admin.py", *arguments],
        cwd=ROOT, env={"PATH": os.environ["PATH"], "DATABASE_URL": url},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_commands_create_list_and_revoke(database_url: str, conn: Connection) -> None:
    assert "open to everybody" in admin(database_url, "keys", "list").stdout
    made = admin(database_url, "keys", "create", "--tenant", "acme")
    key, advice = made.stdout.splitlines()
    key_id, secret = parts(key)
    assert stored(conn, key).has_secret(secret)
    assert "X-API-Key" in advice
    admin(database_url, "keys", "create", "--operator")
    listed = admin(database_url, "keys", "list").stdout
    assert [line.split("  ")[-1].strip() for line in listed.splitlines()] == [
        "whose", "tenant acme", "an operator's"
    ]  # fmt: skip
    assert secret not in listed
    assert "limits.key_cache_seconds" in admin(database_url, "keys", "revoke", key_id).stdout
    assert stored(conn, key).is_revoked
    again = admin(database_url, "keys", "revoke", key)  # the whole key names it as well
    assert (again.returncode, again.stderr) == (1, f"key {key_id} is revoked already\n")


@pytest.mark.parametrize(
    "whose", [[], ["--tenant", "a", "--operator"], ["--tenant", "a b"], ["--tenant", ""]]
)
def test_a_key_is_made_for_one_tenant_or_for_an_operator(
    database_url: str, conn: Connection, whose: list[str]
) -> None:
    refused = admin(database_url, "keys", "create", *whose)
    assert refused.returncode != 0
    assert "Traceback" not in refused.stderr
    assert keys.list_keys(conn) == []

"""API keys and tickets: who may use the API, and for whom.

A key is `ak_<id>_<secret>`. The id is looked up, the secret is compared with what its hash should
be; neither secrets nor tickets are stored. The database's clock decides when a ticket has expired.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

import psycopg2.errors

from connection import Connection, Row, fetch
from errors import NotFound, RequestRefused, StateConflict

KEY = re.compile(r"ak_(?P<id>[0-9a-f]{12})_(?P<secret>[0-9a-f]{64})")
TICKET = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ApiKey:
    """A key as it is stored. An operator's has no tenant."""

    key_id: str
    secret_hash: bytes
    tenant: str | None
    is_revoked: bool

    def has_secret(self, secret: str) -> bool:
        """Whether that is its secret; how long that takes tells nothing about it."""
        return hmac.compare_digest(digest_of(secret), self.secret_hash)


def digest_of(secret: str) -> bytes:
    """What is stored of a secret. It has 256 random bits, so that nobody can try them all."""
    return hashlib.sha256(secret.encode()).digest()


# --- keys ------------------------------------------------------------------------------------

CREATE_KEY = """
INSERT INTO api_keys (key_id, secret_hash, tenant, is_operator)
VALUES (%(key_id)s, %(secret_hash)s, %(tenant)s, %(tenant)s::text IS NULL)
"""


def create_key(conn: Connection, tenant: str | None) -> str:
    """A new key of the tenant, or (None) of an operator; it cannot be shown a second time.

    RequestRefused if no tenant can be called so.
    """
    key_id, secret = secrets.token_hex(6), secrets.token_hex(32)
    values = {"key_id": key_id, "secret_hash": digest_of(secret), "tenant": tenant}
    try:
        fetch(conn, CREATE_KEY, values)
    except psycopg2.errors.CheckViolation as refused:
        raise RequestRefused("a tenant's name is 1 to 64 of A-Z a-z 0-9 _ -") from refused
    return f"ak_{key_id}_{secret}"


# One row: whether there is any key at all, and the one asked for, or NULLs.
FIND_KEY = """
SELECT EXISTS (SELECT FROM api_keys) AS keys_exist,
       k.key_id, k.secret_hash, k.tenant, k.revoked_at IS NOT NULL AS is_revoked
FROM (VALUES (%(key_id)s::text)) AS asked(key_id) LEFT JOIN api_keys k USING (key_id)
"""


def find_key(conn: Connection, key_id: str) -> tuple[bool, ApiKey | None]:
    """Whether any key was ever created, and the one of that id."""
    (row,) = fetch(conn, FIND_KEY, {"key_id": key_id})
    return row.pop("keys_exist"), _key(row) if row["key_id"] else None


LIST_KEYS = """
SELECT key_id, tenant, created_at, revoked_at FROM api_keys ORDER BY created_at, key_id
"""


def list_keys(conn: Connection) -> list[Row]:
    """Every key that was ever created, the oldest first."""
    return fetch(conn, LIST_KEYS)


REVOKE_KEY = """
UPDATE api_keys SET revoked_at = current_instant()
WHERE key_id = %(key_id)s AND revoked_at IS NULL
RETURNING key_id
"""


def revoke_key(conn: Connection, key_id: str) -> None:
    """Let the key open nothing any more; NotFound, or StateConflict when it is revoked already."""
    if not fetch(conn, REVOKE_KEY, {"key_id": key_id}):
        _, key = find_key(conn, key_id)
        if key is None:
            raise NotFound(f"there is no key {key_id}; see: python admin.py keys list")
        raise StateConflict(f"key {key_id} is revoked already")


def _key(row: Row) -> ApiKey:
    return ApiKey(row["key_id"], bytes(row["secret_hash"]), row["tenant"], row["is_revoked"])


# --- tickets ---------------------------------------------------------------------------------

CREATE_TICKET = """
INSERT INTO tickets (ticket_hash, key_id, path, expires_at)
VALUES (%(ticket_hash)s, %(key_id)s, %(path)s,
        current_instant() + make_interval(secs => %(seconds)s))
"""

# Some, so that no request does much of it; more than one for each that is made.
FORGET_TICKETS = """
DELETE FROM tickets WHERE ticket_hash IN (
    SELECT ticket_hash FROM tickets
    WHERE expires_at <= (SELECT current_instant())
    ORDER BY expires_at
    LIMIT 10
    FOR UPDATE SKIP LOCKED)
"""


def create_ticket(conn: Connection, key_id: str, path: str, seconds: float) -> str:
    """A ticket with the rights of that key, for one path and so many seconds."""
    ticket = secrets.token_hex(32)
    values = {"key_id": key_id, "path": path, "seconds": seconds}
    values["ticket_hash"] = digest_of(ticket)
    fetch(conn, CREATE_TICKET + ";" + FORGET_TICKETS, values)
    return ticket


# The hash is what is looked up: how long that takes tells nothing about a ticket.
FIND_TICKET = """
SELECT k.key_id, k.secret_hash, k.tenant, k.revoked_at IS NOT NULL AS is_revoked
FROM tickets t JOIN api_keys k USING (key_id)
WHERE t.ticket_hash = %(ticket_hash)s AND t.path = %(path)s
  AND t.expires_at > current_instant() AND k.revoked_at IS NULL
"""


def key_of_ticket(conn: Connection, ticket: str, path: str) -> ApiKey | None:
    """The key that a ticket for that path stands for, while it is valid."""
    values = {"ticket_hash": digest_of(ticket), "path": path}
    rows = fetch(conn, FIND_TICKET, values)
    return _key(rows[0]) if rows else None

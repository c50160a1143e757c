"""Callbacks: what one of them brings, and the secrets with which a tenant's are signed."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass, field

import psycopg2.errors

from connection import Connection, fetch
from errors import RequestRefused

SECRET_BYTES = 32
SECRET_PREFIX = "whsec_"  # noqa: S105 - what every secret begins with


@dataclass(frozen=True)
class Sender:
    """As whom a tenant's callbacks are sent, and when that was read."""

    secret: bytes | None = field(repr=False)  # None: unsigned
    keys_exist: bool  # whether any API key was ever created
    at_seconds: int  # by the database's clock, since 1970


@dataclass(frozen=True)
class Message:
    """What a callback brings, read by the holder of its lease."""

    body: bytes = field(repr=False)
    sender: Sender


# One row, of any tenant.
READ_SENDER = """
SELECT (SELECT secret FROM webhook_secrets WHERE tenant = %(tenant)s) AS secret,
       EXISTS (SELECT FROM api_keys) AS keys_exist,
       floor(extract(epoch FROM current_instant()))::bigint AS at_seconds
"""


def read_sender(conn: Connection, tenant: str) -> Sender:
    """As whom this tenant's callbacks are sent now."""
    (row,) = fetch(conn, READ_SENDER, {"tenant": tenant})
    secret = None if row["secret"] is None else bytes(row["secret"])
    return Sender(secret, row["keys_exist"], row["at_seconds"])


STORE_SENDER = """
INSERT INTO webhook_secrets (tenant, secret)
VALUES (%(tenant)s, %(secret)s)
ON CONFLICT (tenant) DO UPDATE SET secret = excluded.secret, created_at = current_instant()
RETURNING xmax <> 0 AS replaced
"""


def make_secret(conn: Connection, tenant: str) -> tuple[str, bool]:
    """A new secret for the tenant, as a receiver wants it, and whether it takes an earlier one's
    place. RequestRefused if no tenant can be called so."""
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        (row,) = fetch(conn, STORE_SENDER, {"tenant": tenant, "secret": secret})
    except psycopg2.errors.CheckViolation as refused:
        raise RequestRefused("a tenant's name is 1 to 64 of A-Z a-z 0-9 _ -") from refused
    return SECRET_PREFIX + base64.b64encode(secret).decode(), row["replaced"]

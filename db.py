"""Postgres: connections, transactions, LISTEN, and the statements behind the HTTP API.

A connection is in autocommit mode and has no session state, so that DATABASE_URL may point at
a transaction pooler. `fetch` runs one statement as one transaction in one round trip;
`transaction` spans several. No wait is endless: every wait for the server has a limit, and the
connection that exceeded it is given up.

The statements that change who owns a task are in queries/leases.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import psycopg2.extras

from config import DatabaseSettings
from errors import DatabaseUnavailable, KeyReused, NotFound, OrchestratorError

Row = dict[str, Any]


class Connection(psycopg2.extensions.connection):
    """A connection that knows how long its owner waits for the server."""

    reply_timeout_seconds: float = 30.0
    lock_timeout_seconds: float = 5.0


def _wait_with_a_limit(conn: psycopg2.extensions.connection) -> None:
    """psycopg2's wait callback: poll the socket instead of sitting in libpq.

    So Python's signal handlers run at once, and a server that stalls, or a half-open socket,
    costs `reply_timeout_seconds` and not for ever. Raising here closes the connection.
    """
    limit = conn.reply_timeout_seconds if isinstance(conn, Connection) else math.inf
    deadline = time.monotonic() + limit
    while (state := conn.poll()) != psycopg2.extensions.POLL_OK:
        events = select.POLLIN if state == psycopg2.extensions.POLL_READ else select.POLLOUT
        poller = select.poll()
        poller.register(conn.fileno(), events)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poller.poll(min(remaining, 3600) * 1000):
            raise psycopg2.OperationalError(f"no reply from Postgres in {limit:g} s")


# Answers of Postgres that say nothing about the statement: the server is stopping, full, a
# standby, or somebody holds the row. Everything else psycopg2 raises is a fault of ours.
UNAVAILABLE = (
    psycopg2.OperationalError,
    psycopg2.InterfaceError,
    psycopg2.errors.ReadOnlySqlTransaction,
)


@contextmanager
def unavailable_in_plain_words() -> Iterator[None]:
    """Turn the driver's ways to say "not now" into DatabaseUnavailable."""
    try:
        yield
    except UNAVAILABLE as failed:
        reason = str(failed).strip().split("\n")[0] or type(failed).__name__
        raise DatabaseUnavailable(f"the database cannot be used now: {reason}") from failed


def connect(url: str, settings: DatabaseSettings, application: str) -> Connection:
    """Open a connection in autocommit mode; DatabaseUnavailable if that is not possible."""

    # The callback is the whole process's: a program that only imports this module to submit
    # over a connection of its own keeps its own way of waiting.
    psycopg2.extensions.set_wait_callback(_wait_with_a_limit)

    class Configured(Connection):
        # While it connects, the wait callback sees the class; afterwards the instance.
        reply_timeout_seconds = settings.connect_timeout_seconds
        lock_timeout_seconds = settings.lock_timeout_seconds

    with unavailable_in_plain_words():
        conn: Connection = psycopg2.connect(
            url,
            connection_factory=Configured,
            application_name=application,
            client_encoding="utf8",
            keepalives_idle=10,
            keepalives_interval=3,
            keepalives_count=3,
            tcp_user_timeout=15_000,
        )
        conn.autocommit = True
    conn.reply_timeout_seconds = settings.reply_timeout_seconds
    return conn


def _local_timeouts(conn: Connection) -> str:
    """Limits of one transaction; the server's own end just before ours."""
    return (
        f"SET LOCAL lock_timeout = {int(conn.lock_timeout_seconds * 1000)};"
        f"SET LOCAL statement_timeout = {int(conn.reply_timeout_seconds * 900)};"
    )


def fetch(conn: Connection, statement: str, values: Mapping[str, Any] | None = None) -> list[Row]:
    """Run `statement` as one transaction, in one round trip, and return its rows."""
    with unavailable_in_plain_words(), _cursor(conn) as cursor:
        # Several statements in one message are one implicit transaction.
        cursor.execute(_local_timeouts(conn) + statement, values or {})
        return [dict(row) for row in cursor] if cursor.description else []


@contextmanager
def transaction(conn: Connection) -> Iterator[psycopg2.extras.RealDictCursor]:
    """BEGIN; the block; COMMIT, or ROLLBACK if the block raises."""
    with unavailable_in_plain_words(), _cursor(conn) as cursor:
        cursor.execute("BEGIN;" + _local_timeouts(conn))
        try:
            yield cursor
        except BaseException:
            if not conn.closed:
                cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")


def _cursor(conn: Connection) -> psycopg2.extras.RealDictCursor:
    return conn.cursor(cursor_factory=psycopg2.extras.RealDictCursor)


def listen(url: str, settings: DatabaseSettings, application: str, channel: str) -> Connection:
    """A direct connection that hears `channel`; what was said before must be read by the caller."""
    conn = connect(url, settings, application)
    with unavailable_in_plain_words(), _cursor(conn) as cursor:
        cursor.execute(f"LISTEN {channel}")
    return conn


def heard(conn: Connection) -> list[str]:
    """The payloads that have arrived on a listening connection, without waiting."""
    with unavailable_in_plain_words():
        conn.poll()
    payloads = [notification.payload for notification in conn.notifies]
    conn.notifies.clear()
    return payloads


class Pool:
    """At most `pool_size` connections, lent to threads; a lender waits, then hears 503's reason.

    Nothing is opened before it is needed, so a process may start while Postgres is away.
    """

    def __init__(self, url: str, settings: DatabaseSettings, application: str) -> None:
        self._url = url
        self._settings = settings
        self._application = application
        self._places = threading.BoundedSemaphore(settings.pool_size)
        self._idle: list[Connection] = []
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a live connection; DatabaseUnavailable when none is to be had in time."""
        if not self._places.acquire(timeout=self._settings.pool_wait_seconds):
            raise DatabaseUnavailable(
                f"all {self._settings.pool_size} database connections are busy; try again shortly"
            )
        try:
            conn = self._take()
            try:
                yield conn
            finally:
                self._give_back(conn)
        finally:
            self._places.release()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection:
        while self._idle:
            conn = self._idle.pop()
            if _looks_alive(conn):
                return conn
            conn.close()
        return connect(self._url, self._settings, self._application)

    def _give_back(self, conn: Connection) -> None:
        in_use = conn.info.transaction_status != psycopg2.extensions.TRANSACTION_STATUS_IDLE
        if self._closed or conn.closed or in_use:
            conn.close()
        else:
            self._idle.append(conn)


def _looks_alive(conn: Connection) -> bool:
    """An idle connection with something to read was told goodbye by the server."""
    if conn.closed:
        return False
    poller = select.poll()
    poller.register(conn.fileno(), select.POLLIN)
    return not poller.poll(0)


def canonical_hash(body: Mapping[str, Any]) -> bytes:
    """A digest of a validated request body in which the order of keys does not matter."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class NewTask:
    """A task as it is submitted. `request_hash` belongs to `idempotency_key`."""

    tenant: str
    kind: str
    payload: Mapping[str, Any]
    metadata: Mapping[str, Any] | None = None
    priority: int = 0
    delay_seconds: float = 0
    max_retry: int | None = None
    timeout_seconds: float | None = None
    requested_route: str = "auto"
    idempotency_scope: str | None = None
    idempotency_key: str | None = None
    request_hash: bytes | None = None


@dataclass(frozen=True)
class Submitted:
    """What became of a NewTask: its number, its status, and whether the key knew it already."""

    task_id: int
    status: str
    replayed: bool


# Creates the tasks that are new, each PENDING; a row whose Idempotency-Key is taken is left out
# of the answer. Ids are drawn first, so that an answer can be told to belong to its `ordinal`.
SUBMIT_TASKS = """
WITH submitted AS (
    SELECT nextval(pg_get_serial_sequence('tasks', 'task_id')) AS task_id, s.*
    FROM jsonb_to_recordset(%(tasks)s::jsonb) AS s(
        ordinal bigint, tenant text, kind text, payload jsonb, metadata jsonb,
        priority smallint, delay_seconds double precision, max_retry integer,
        timeout_seconds double precision, requested_route text,
        idempotency_scope text, idempotency_key text, request_hash text)
),
created AS (
    INSERT INTO tasks (
        task_id, tenant, kind, payload, metadata, priority, available_at, due, max_retry,
        timeout_seconds, requested_route, idempotency_scope, idempotency_key, request_hash)
    SELECT task_id, tenant, kind, payload, nullif(metadata, 'null'), priority,
           current_instant() + make_interval(secs => delay_seconds), delay_seconds = 0, max_retry,
           timeout_seconds, requested_route, idempotency_scope, idempotency_key,
           decode(request_hash, 'hex')
    FROM submitted
    ON CONFLICT (tenant, idempotency_scope, idempotency_key) WHERE idempotency_key IS NOT NULL
        DO NOTHING
    RETURNING task_id, status::text
)
SELECT submitted.ordinal, created.task_id, created.status
FROM created JOIN submitted USING (task_id)
"""


# The tasks that Idempotency-Keys have made, seen with a fresh snapshot.
FIRST_OF_KEYS = """
SELECT asked.ordinal, t.task_id, t.status::text, encode(t.request_hash, 'hex') AS request_hash
FROM jsonb_to_recordset(%(tasks)s::jsonb) AS asked(
    ordinal bigint, tenant text, idempotency_scope text, idempotency_key text)
JOIN tasks t USING (tenant, idempotency_scope, idempotency_key)
"""

Answer = Submitted | OrchestratorError


def submit_tasks(conn: Connection, tasks: Sequence[NewTask]) -> list[Answer]:
    """Create each task unless its Idempotency-Key made one before; one answer per task, in order.

    A Submitted is committed. An error concerns its task alone: KeyReused when the key came with
    another body, DatabaseUnavailable when Postgres went away before it was known. Raises what
    keeps all of them from being stored.
    """
    answers: dict[int, Answer] = {}
    unknown = list(range(len(tasks)))
    while unknown:
        for row in fetch(conn, SUBMIT_TASKS, {"tasks": _as_json(tasks, unknown)}):
            answers[row["ordinal"]] = Submitted(row["task_id"], row["status"], replayed=False)
        unknown = [ordinal for ordinal in unknown if ordinal not in answers]
        if unknown:
            # Their keys are taken. The holder may have rolled back meanwhile: then insert again.
            try:
                answers.update(_first_of_keys(conn, tasks, unknown))
            except DatabaseUnavailable as away:
                answers.update(dict.fromkeys(unknown, away))
            unknown = [ordinal for ordinal in unknown if ordinal not in answers]
    return [answers[ordinal] for ordinal in range(len(tasks))]


def submit_task(conn: Connection, task: NewTask) -> Submitted:
    """Create one task; KeyReused if its Idempotency-Key came with another body before."""
    answer = submit_tasks(conn, [task])[0]
    if isinstance(answer, OrchestratorError):
        raise answer
    return answer


def _first_of_keys(
    conn: Connection, tasks: Sequence[NewTask], ordinals: Sequence[int]
) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for row in fetch(conn, FIRST_OF_KEYS, {"tasks": _as_json(tasks, ordinals)}):
        digest = tasks[row["ordinal"]].request_hash
        same_body = digest is not None and row["request_hash"] == digest.hex()
        found[row["ordinal"]] = (
            Submitted(row["task_id"], row["status"], replayed=True) if same_body else KeyReused()
        )
    return found


def _as_json(tasks: Sequence[NewTask], ordinals: Sequence[int]) -> str:
    # Two writers that insert the same keys in different orders would deadlock: sort by key.
    ordered = sorted(ordinals, key=lambda ordinal: tasks[ordinal].idempotency_key or "")
    rows = []
    for ordinal in ordered:
        digest = tasks[ordinal].request_hash
        fields = dict(vars(tasks[ordinal]), ordinal=ordinal, request_hash=digest and digest.hex())
        rows.append(fields)
    return json.dumps(rows, ensure_ascii=False)


# A task by number, or by name: then the newest that bears it.
GET_TASK = """
SELECT task_id, name, kind, status::text, reason, payload, metadata, result, last_error,
       requested_route, route, model, cost, prompt_tokens, completion_tokens, truncated,
       duration_seconds, retry_count, delivery_count, attempt, priority, parent_id, step,
       worker, lease_expires_at, cancel_requested, created_at, available_at, started_at,
       finished_at, available_at > current_instant() AS is_delayed
FROM tasks
WHERE tenant = %(tenant)s
  AND (task_id = %(number)s::bigint OR name = %(name)s::text)
  AND kind <> 'run'
ORDER BY task_id DESC
LIMIT 1
"""

LARGEST_ID = 2**63 - 1
LONGEST_REFERENCE = 64  # a name has no more characters; int() refuses thousands of digits


def get_task(conn: Connection, tenant: str, reference: str) -> Row:
    """The tenant's task of that number or name; NotFound otherwise."""
    if len(reference) > LONGEST_REFERENCE or "\0" in reference:
        raise NotFound()
    number = int(reference) if reference.isascii() and reference.isdigit() else None
    name = reference if number is None else None
    if number is not None and number > LARGEST_ID:
        raise NotFound()
    rows = fetch(conn, GET_TASK, {"tenant": tenant, "number": number, "name": name})
    if not rows:
        raise NotFound()
    return rows[0]


# One row: the figures of /metrics over the tenant's tasks (all tenants: NULL). Runs are no work.
METRICS = """
WITH counted AS (
    SELECT status, route, cost, retry_count, reclaim_count, duration_seconds
    FROM tasks
    WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND kind <> 'run'
)
SELECT
    (SELECT coalesce(jsonb_object_agg(status, n), '{}')
     FROM (SELECT status, count(*) AS n FROM counted GROUP BY status) AS statuses
    ) AS by_status,
    (SELECT coalesce(avg(retry_count), 0)::double precision FROM counted) AS avg_retry,
    (SELECT count(*) FROM counted WHERE reclaim_count > 0) AS reclaimed_count,
    (SELECT avg(duration_seconds) FROM counted WHERE status = 'SUCCEEDED') AS avg_duration_seconds,
    (SELECT coalesce(jsonb_object_agg(route, spent), '{}')
     FROM (SELECT route, round(sum(cost), 8)::text AS spent
           FROM counted WHERE cost IS NOT NULL GROUP BY route) AS routes
    ) AS cost_by_route
"""


def metrics(conn: Connection, tenant: str | None = None) -> Row:
    """by_status, avg_retry, reclaimed_count, avg_duration_seconds (None: nothing finished yet),
    cost_by_route (money as decimal strings with 8 places)."""
    return fetch(conn, METRICS, {"tenant": tenant})[0]


def ping(conn: Connection) -> None:
    """Ask the server for nothing; DatabaseUnavailable if it does not answer."""
    fetch(conn, "SELECT 1")

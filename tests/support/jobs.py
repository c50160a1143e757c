"""Agent jobs in tests, brought to where they stand without a worker: parked, and with states."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

from config import Retry
from db import Connection
from queries import leases
from queries.leases import Lease, Outcome
from tests.support import lives
from tests.support.rows import sql

_numbers = itertools.count(1)


def artefact_of(asks: Any) -> str:
    text = json.dumps(asks, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def park(conn: Connection, task_id: int, asks: Any, run_id: int | None = None) -> str:
    """RUNNING, then AWAITING_APPROVAL, as a worker does it; the hash of what the job asks."""
    gate = {"interrupt": f"i{next(_numbers)}", "asks": asks, "artefact": artefact_of(asks)}
    taken = lives.take(conn, task_id)
    lease = Lease(taken.task_id, taken.token, run_id)
    (settled,) = leases.settle_tasks(conn, [(lease, Outcome("parked", gate=gate))], Retry())
    assert settled.status == "AWAITING_APPROVAL"
    return str(gate["artefact"])


def parked(conn: Connection, tenant: str, asks: Any, **payload: Any) -> tuple[int, str]:
    """A new job of the tenant that waits for a person, and the hash of what it asks."""
    statement = """
        INSERT INTO tasks (tenant, kind, payload) VALUES (%(tenant)s, 'agent', %(payload)s)
        RETURNING task_id
    """
    given = json.dumps({"task": "Write something.", "graph": "team", **payload})
    (row,) = sql(conn, statement, tenant=tenant, payload=given)
    return row["task_id"], park(conn, row["task_id"], asks)


INSERT_STATE = """
INSERT INTO job_states (
    task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version, state, prompt_tokens,
    completion_tokens)
VALUES (%(task_id)s, %(checkpoint_id)s, 1, %(nodes)s::text[], %(next_nodes)s::text[], 'v1',
        %(state)s, %(prompt_tokens)s, 7)
"""


def reach(
    conn: Connection, task_id: int, nodes: list[str], next_nodes: list[str], **state: Any
) -> str:
    """A checkpoint of the job behind these nodes; its id."""
    number = next(_numbers)
    checkpoint_id = f"1f0{number:05x}-0000-6000-8000-000000000000"
    sql(
        conn, INSERT_STATE, task_id=task_id, checkpoint_id=checkpoint_id, nodes=nodes,
        next_nodes=next_nodes, state=json.dumps(state), prompt_tokens=number,
    )  # fmt: skip
    return checkpoint_id

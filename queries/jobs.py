"""What people are shown of an agent job: its state at each checkpoint, newest first.

The statements at the end are those of execution/agent/saver.py, which runs them over psycopg 3 in
the transactions of LangGraph's saver.
"""

from __future__ import annotations

from connection import Connection, Row, fetch

NEWEST_STATE = """
SELECT task_id, checkpoint_id, at, attempt, nodes, next_nodes, graph_version, state,
       prompt_tokens, completion_tokens
FROM job_states
WHERE task_id = %(task_id)s
ORDER BY checkpoint_id DESC
LIMIT 1
"""


def newest_state(conn: Connection, task_id: int) -> Row | None:
    """The job's state at its newest checkpoint; None before the first."""
    rows = fetch(conn, NEWEST_STATE, {"task_id": task_id})
    return rows[0] if rows else None


MOST_COMPARED_BYTES = 256 * 1024  # of a state, as it is stored

# A long value is told by its size: states are large, and a page has many. `digest` tells whether
# another value is the same; of a state that is very large nothing is told. LangGraph's own first
# checkpoint, before the graph begins, is left out.
LIST_STATES = """
SELECT checkpoint_id, at, attempt, nodes, next_nodes, prompt_tokens, completion_tokens,
       CASE WHEN pg_column_size(state) <= %(most_bytes)s THEN (
        SELECT coalesce(jsonb_object_agg(channel, jsonb_build_object(
            'type', jsonb_typeof(value),
            'digest', hashtextextended(value::text, 0),
            'text', CASE
                WHEN jsonb_typeof(value) IN ('array', 'object') THEN NULL
                WHEN char_length(value #>> '{}') <= 40 THEN value #>> '{}' END,
            'size', CASE jsonb_typeof(value)
                WHEN 'array' THEN jsonb_array_length(value)
                WHEN 'object' THEN (SELECT count(*) FROM jsonb_object_keys(value))
                ELSE char_length(value #>> '{}') END)), '{}')
        FROM jsonb_each(state) AS channels(channel, value)) END AS channels
FROM job_states
WHERE task_id = %(task_id)s AND next_nodes <> '{__start__}'
  AND (%(before)s::text IS NULL OR checkpoint_id < %(before)s)
ORDER BY checkpoint_id DESC
LIMIT %(limit)s + 1
"""


def list_states(conn: Connection, task_id: int, *, limit: int, before: str | None) -> list[Row]:
    """The job's states, newest first, older than checkpoint `before`; one more than `limit` rows
    tell that there are more.

    Of each of its channels there is the type, a digest, the text if that is short, and the size:
    in characters, items or members. `channels` is None where the state is too large for that.
    """
    values = {"task_id": task_id, "limit": limit, "before": before}
    return fetch(conn, LIST_STATES, {**values, "most_bytes": MOST_COMPARED_BYTES})


# The transaction holds the task's row from here on, or fails with LEASE_IS_GONE.
HOLD_LEASE = "SELECT hold_lease(%(task_id)s, %(token)s::uuid)"
LEASE_IS_GONE = "LL001"

# Written in the transaction of the checkpoint, by the one who holds the task's row.
SHOW_STATE = """
SELECT show_state(
    %(task_id)s, %(checkpoint_id)s, %(parent_id)s, %(next_nodes)s, %(graph_version)s,
    %(state)s::jsonb)
"""

# Which of the steps that LangGraph's saver makes its tables by were made.
READ_TABLES_VERSION = "SELECT max(v) AS version FROM checkpoint_migrations"

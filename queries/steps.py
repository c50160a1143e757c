"""What the end of a step does to the rest of its run: promote, cancel, end, revive.

A step counts in its own row what it waits for (`unmet`: dependencies that have not SUCCEEDED) and
is promoted by the transaction that counts it down to 0: so exactly one does. A step that FAILED
or was CANCELLED takes its descendants with it; the run ends with its last unended step.

Lock order: whoever may change a second row of a run locks the run's row first (several in
ascending order), then rows in ascending order; a run has a lower number than its steps, and a step
a lower one than those that depend on it. Each effect is a statement of its own, so that the audit
log has causes before effects, and a row is changed once per statement.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from connection import Connection, Cursor, Row, fetch
from errors import TooLarge
from runs.templates import Reference
from states import Status

# Once held, nobody else settles, cancels, approves, reaps or requeues a step of these runs.
LOCK_RUNS = """
SELECT task_id, status::text, cancel_requested FROM tasks
WHERE task_id = ANY(%(run_ids)s)
ORDER BY task_id
FOR NO KEY UPDATE
"""


def lock_runs(cursor: Cursor, run_ids: Collection[int]) -> list[Row]:
    """Lock the rows of these runs, before any row of a step: status and cancel_requested."""
    cursor.execute(LOCK_RUNS, {"run_ids": list(run_ids)})
    return list(cursor.fetchall())


# Functions of schema.sql: what follows from the end of a step, and, of that, the end of its run.
END_STEPS = """
SELECT end_steps(%(succeeded)s::bigint[], %(dead)s::bigint[], %(run_ids)s::bigint[])
"""
END_RUNS = "SELECT end_runs(%(run_ids)s::bigint[])"


def end_steps(cursor: Cursor, changed: Iterable[Row]) -> None:
    """Carry the ends among these changed tasks (task_id, run_id, status) on to their runs.

    In the transaction that changed them, which has locked their runs before.
    """
    ended = [row for row in changed if row["run_id"] and Status(row["status"]).is_final]
    if not ended:
        return
    succeeded = [row["task_id"] for row in ended if row["status"] == Status.SUCCEEDED]
    dead = [row["task_id"] for row in ended if row["status"] != Status.SUCCEEDED]
    run_ids = sorted({row["run_id"] for row in ended})
    cursor.execute(END_STEPS, {"succeeded": succeeded, "dead": dead, "run_ids": run_ids})


# CANCELLED -> BLOCKED (requeued): of those that the death of this step had cancelled, all that no
# other dead step stands before.
REVIVE_DESCENDANTS = """
WITH RECURSIVE descendants AS (
    SELECT task_id FROM step_edges WHERE needs = %(task_id)s
    UNION
    SELECT e.task_id FROM descendants d JOIN step_edges e ON e.needs = d.task_id
),
doomed AS (
    SELECT task_id FROM tasks
    WHERE parent_id = %(run_id)s
      AND (status = 'FAILED' OR status = 'CANCELLED' AND reason = 'cancelled')
    UNION
    SELECT e.task_id FROM doomed JOIN step_edges e ON e.needs = doomed.task_id
)
UPDATE tasks
SET status = 'BLOCKED', reason = 'requeued', finished_at = NULL, updated_at = current_instant()
WHERE task_id IN (SELECT task_id FROM descendants EXCEPT SELECT task_id FROM doomed)
  AND status = 'CANCELLED'
"""

# A run: FAILED -> BLOCKED (requeued).
REOPEN_RUN = """
UPDATE tasks
SET status = 'BLOCKED', reason = 'requeued', finished_at = NULL, updated_at = current_instant()
WHERE task_id = %(run_id)s AND status = 'FAILED'
"""


def revive_run(cursor: Cursor, run_id: int, task_id: int) -> None:
    """After the requeue of a step: its descendants wait again, and the run goes on."""
    values = {"run_id": run_id, "task_id": task_id}
    cursor.execute(REVIVE_DESCENDANTS + ";" + REOPEN_RUN, values)


# A step's output is what templates call so: a tool's result, a model's text (or its JSON, if a
# format was asked for), an approval's decision. `found` tells a JSON null from nothing at all.
READ_OUTPUTS = """
WITH asked AS (
    SELECT a.ordinal, a.step, ARRAY(SELECT jsonb_array_elements_text(a.path)) AS path
    FROM jsonb_to_recordset(%(references)s::jsonb) AS a(ordinal integer, step text, path jsonb)
),
found AS (
    SELECT part.ordinal, part.output
    FROM (
        -- Unpacked once for each step, however many references lead into it: #> makes a copy in
        -- memory, and OFFSET 0 keeps the planner from moving it, or from hashing more copies.
        SELECT t.step,
               CASE
                   WHEN t.kind <> 'prompt' THEN t.result
                   WHEN t.payload ? 'format' THEN t.result -> 'json'
                   ELSE t.result -> 'text'
               END #> '{}' AS output
        FROM tasks t
        WHERE t.parent_id = %(run_id)s AND t.step IN (SELECT step FROM asked)
          AND t.status = 'SUCCEEDED'
        OFFSET 0) AS unpacked
    CROSS JOIN LATERAL (
        SELECT asked.ordinal, unpacked.output #> asked.path AS output
        FROM asked WHERE asked.step = unpacked.step
        OFFSET 0) AS part
),
measured AS (
    SELECT *, sum(octet_length(output::text)) OVER () > %(most_bytes)s AS is_too_much FROM found
)
SELECT ordinal, is_too_much, CASE WHEN NOT is_too_much THEN output END AS output
FROM measured
WHERE output IS NOT NULL
"""

# One result may be as large as limits.max_result_bytes; all that one step refers to, this.
MOST_OUTPUT_BYTES = 32 * 1024 * 1024


def read_outputs(
    conn: Connection, run_id: int, references: Sequence[Reference]
) -> dict[Reference, Any]:
    """What these references to steps of a run stand for; one that leads nowhere is left out.

    TooLarge when all together are more than a step can take.
    """
    asked = [
        {"ordinal": ordinal, "step": one.step, "path": list(one.path)}
        for ordinal, one in enumerate(references)
    ]
    values = {
        "run_id": run_id,
        "references": json.dumps(asked),
        "most_bytes": MOST_OUTPUT_BYTES,
    }
    rows = fetch(conn, READ_OUTPUTS, values)
    if any(row["is_too_much"] for row in rows):
        raise TooLarge(
            f"the results it refers to are larger than {MOST_OUTPUT_BYTES} bytes together; "
            "refer to a part of them"
        )
    return {references[row["ordinal"]]: row["output"] for row in rows}

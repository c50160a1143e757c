"""The proof behind chaos.sh: questions to the database whose answers are the rows at fault.

Each question is one statement, about the rows of tasks as they are and about their audit log, told
from the beginning. No row is at fault at any moment, whoever works at it; the questions AT_THE_END
are for when all is said to be done. What was planned in chaos_plan.py is compared by `compare`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg2.extensions
import psycopg2.extras

from local.chaos_plan import PlannedRun, PlannedStep

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """What is to hold, in plain words, and the statement that finds what breaks it."""

    holds: str
    statement: str


@dataclass(frozen=True)
class Answer:
    """The rows at fault; none: it holds."""

    holds: str
    at_fault: list[Row]


@dataclass(frozen=True)
class Caps:
    """From [retry]: how many failures and lost hand-outs make a dead letter."""

    max_retry: int
    max_delivery: int


# --- one row and its audit -------------------------------------------------------------------

CHAIN = """
WITH log AS (
    SELECT a.*, lag(a.to_status) OVER told AS before, lead(a.id) OVER told AS next
    FROM audit_log a
    WINDOW told AS (PARTITION BY a.task_id ORDER BY a.id)
)
SELECT t.task_id, t.step, t.status::text, 'its audit is empty' AS fault
FROM tasks t WHERE NOT EXISTS (SELECT FROM audit_log a WHERE a.task_id = t.task_id)
UNION ALL
SELECT t.task_id, t.step, t.status::text, format(
    'entry %%s leaves %%s, and it stood at %%s',
    log.id, coalesce(log.from_status::text, 'nothing'), coalesce(log.before::text, 'nothing'))
FROM log JOIN tasks t USING (task_id)
WHERE log.from_status IS DISTINCT FROM log.before
UNION ALL
SELECT t.task_id, t.step, t.status::text, format(
    'its audit ends with %%s (%%s), the row says %%s (%%s)',
    log.to_status, log.reason, t.status, t.reason)
FROM log JOIN tasks t USING (task_id)
WHERE log.next IS NULL AND (log.to_status <> t.status OR log.reason <> t.reason)
"""

LEGAL = """
SELECT a.task_id, a.step, format(
    'from %%s to %%s (%%s)', coalesce(a.from_status::text, 'nothing'), a.to_status, a.reason
) AS fault
FROM audit_log a JOIN tasks t USING (task_id)
WHERE NOT EXISTS (
    SELECT FROM transitions legal
    WHERE legal.from_status IS NOT DISTINCT FROM a.from_status
      AND legal.to_status = a.to_status AND legal.reason = a.reason)
"""

FORWARD = """
WITH log AS (
    SELECT a.*, lag(a.at) OVER (PARTITION BY a.task_id ORDER BY a.id) AS at_before FROM audit_log a
)
SELECT t.task_id, t.step, format('entry %%s is older than the one before it', log.id) AS fault
FROM log JOIN tasks t USING (task_id)
WHERE log.at < log.at_before
"""

# A life ends with a requeue.
ONE_SUCCESS = """
WITH log AS (
    SELECT a.task_id, a.to_status,
           count(*) FILTER (WHERE a.reason = 'requeued')
               OVER (PARTITION BY a.task_id ORDER BY a.id) AS life
    FROM audit_log a
),
lives AS (
    SELECT task_id, count(*) FILTER (WHERE to_status = 'SUCCEEDED') AS successes,
           count(*) FILTER (WHERE to_status IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) AS ends
    FROM log GROUP BY task_id, life
),
told AS (
    SELECT task_id, sum(successes) AS successes, max(ends) AS most_ends FROM lives GROUP BY task_id
)
SELECT t.task_id, t.step, t.status::text, format(
    '%%s successes; ended %%s times in one life', told.successes, told.most_ends) AS fault
FROM tasks t JOIN told USING (task_id)
WHERE told.successes <> (t.status = 'SUCCEEDED')::int OR told.most_ends > 1
"""

# A cancel that ends a running attempt does not say in the log what came of that: it may have
# counted as a failure, or the reaper may have taken it.
COUNTERS = """
WITH log AS (
    SELECT a.task_id, a.from_status, a.to_status, a.reason, a.attempt,
           count(*) FILTER (WHERE a.reason = 'requeued')
               OVER (PARTITION BY a.task_id ORDER BY a.id) AS life,
           count(*) FILTER (WHERE a.reason = 'claimed')
               OVER (PARTITION BY a.task_id ORDER BY a.id) AS claims
    FROM audit_log a
),
last_life AS (SELECT task_id, max(life) AS life FROM log GROUP BY task_id),
told AS (
    SELECT log.task_id,
           count(*) FILTER (WHERE log.reason = 'claimed') AS claims,
           bool_and(log.attempt = log.claims) AS numbered,
           count(*) FILTER (WHERE log.life = last_life.life AND log.reason = 'claimed')
               - count(*) FILTER (
                   WHERE log.life = last_life.life
                     AND log.reason IN ('released', 'outage', 'parked'))
               AS deliveries,
           count(*) FILTER (
               WHERE log.life = last_life.life
                 AND log.reason IN (
                     'retry', 'max_retry', 'permanent', 'deadline', 'recursion_limit')
           ) AS failures,
           count(*) FILTER (WHERE log.reason IN ('reaped', 'max_delivery')) AS reclaims,
           count(*) FILTER (
               WHERE log.from_status = 'RUNNING' AND log.to_status = 'CANCELLED') AS stopped
    FROM log JOIN last_life USING (task_id)
    GROUP BY log.task_id
)
SELECT t.task_id, t.step, format(
    'attempt %%s, delivery_count %%s, retry_count %%s, reclaim_count %%s; the audit says '
    '%%s, %%s, %%s, %%s', t.attempt, t.delivery_count, t.retry_count, t.reclaim_count,
    told.claims, told.deliveries, told.failures, told.reclaims) AS fault
FROM tasks t JOIN told USING (task_id)
WHERE t.attempt <> told.claims OR NOT told.numbered OR t.delivery_count <> told.deliveries
   OR t.retry_count NOT BETWEEN told.failures AND told.failures + told.stopped
   OR t.reclaim_count NOT BETWEEN told.reclaims AND told.reclaims + told.stopped
"""

DEAD_BY_THE_RULES = """
SELECT t.task_id, t.step, t.status::text, t.reason, format(
    '%%s failures of %%s, %%s lost hand-outs of %%s', t.retry_count, has.max_retry,
    t.delivery_count - t.retry_count, %(max_delivery)s) AS fault
FROM tasks t
CROSS JOIN LATERAL (SELECT coalesce(t.max_retry, %(max_retry)s) AS max_retry) AS has
WHERE CASE t.reason
    WHEN 'max_retry' THEN t.retry_count <> has.max_retry
    WHEN 'max_delivery' THEN t.delivery_count - t.retry_count <> %(max_delivery)s
    ELSE t.status IN ('PENDING', 'RUNNING') AND (
        t.retry_count >= has.max_retry
        OR t.delivery_count - t.retry_count > %(max_delivery)s)
    END
"""

# --- steps and their dependencies ------------------------------------------------------------

NOT_BEFORE = """
WITH successes AS (
    SELECT task_id, min(id) AS id FROM audit_log WHERE to_status = 'SUCCEEDED' GROUP BY task_id
)
SELECT t.task_id, t.step, needed.step AS before, format(
    'entry %%s makes it %%s', a.id, a.to_status) AS fault
FROM tasks t
JOIN step_edges e USING (task_id)
JOIN tasks needed ON needed.task_id = e.needs
JOIN audit_log a ON a.task_id = t.task_id AND a.to_status NOT IN ('BLOCKED', 'CANCELLED')
LEFT JOIN successes s ON s.task_id = e.needs
WHERE s.id IS NULL OR a.id < s.id
UNION ALL
SELECT t.task_id, t.step, needed.step, 'by the times in the rows'
FROM tasks t
JOIN step_edges e USING (task_id)
JOIN tasks needed ON needed.task_id = e.needs
WHERE t.started_at < needed.finished_at OR t.started_at IS NOT NULL AND needed.finished_at IS NULL
"""

UNMET = """
SELECT t.task_id, t.step, format('it counts %%s, there are %%s', t.unmet, found.unmet) AS fault
FROM tasks t
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE needed.status <> 'SUCCEEDED') AS unmet
    FROM step_edges e JOIN tasks needed ON needed.task_id = e.needs
    WHERE e.task_id = t.task_id) AS found
WHERE t.unmet <> found.unmet
"""

# What is BLOCKED has not been promoted; what is CANCELLED may have been; all else has been, if
# there is something it depends on.
PROMOTED_ONCE = """
WITH told AS (
    SELECT t.task_id, t.step, t.status, t.reason,
           (SELECT count(*) FROM step_edges e WHERE e.task_id = t.task_id) AS needs,
           (SELECT count(*) FROM audit_log a
            WHERE a.task_id = t.task_id AND a.reason = 'promoted') AS times,
           (SELECT a.transaction::text FROM audit_log a
            WHERE a.task_id = t.task_id AND a.reason = 'promoted' LIMIT 1) AS its_transaction,
           (SELECT a.transaction::text FROM audit_log a JOIN step_edges e ON e.needs = a.task_id
            WHERE e.task_id = t.task_id AND a.to_status = 'SUCCEEDED'
            ORDER BY a.id DESC LIMIT 1) AS transaction_of_last
    FROM tasks t WHERE t.parent_id IS NOT NULL
)
SELECT task_id, step, status::text, format('promoted %%s times', times) AS fault
FROM told
WHERE CASE
    WHEN needs = 0 OR status = 'BLOCKED' OR reason = 'dependency_failed' THEN times <> 0
    WHEN status = 'CANCELLED' THEN times > 1
    ELSE times <> 1 END
UNION ALL
SELECT task_id, step, status::text, 'promoted by another transaction than the last success'
FROM told
WHERE its_transaction IS DISTINCT FROM transaction_of_last AND times > 0
"""

DEATH_SPREADS = """
SELECT t.task_id, t.step, t.status::text, t.reason, format(
    'it depends on %%s, which is %%s', needed.step, needed.status) AS fault
FROM tasks t JOIN step_edges e USING (task_id) JOIN tasks needed ON needed.task_id = e.needs
WHERE needed.status IN ('FAILED', 'CANCELLED') AND t.status <> 'CANCELLED'
UNION ALL
SELECT t.task_id, t.step, t.status::text, t.reason, 'nothing that it depends on is dead'
FROM tasks t
WHERE t.parent_id IS NOT NULL AND t.status = 'CANCELLED' AND t.reason = 'dependency_failed'
  AND NOT EXISTS (
      SELECT FROM step_edges e JOIN tasks needed ON needed.task_id = e.needs
      WHERE e.task_id = t.task_id AND needed.status IN ('FAILED', 'CANCELLED'))
"""

# --- runs ------------------------------------------------------------------------------------

RUN_STATUS = """
WITH told AS (
    SELECT run.task_id, run.status,
           CASE
               WHEN count(*) FILTER (WHERE s.finished_at IS NULL) > 0 THEN 'BLOCKED'
               WHEN run.cancel_requested THEN 'CANCELLED'
               WHEN bool_or(s.status = 'FAILED') THEN 'FAILED'
               WHEN bool_or(s.status = 'CANCELLED') THEN 'CANCELLED'
               ELSE 'SUCCEEDED'
           END AS demanded,
           count(*) FILTER (WHERE s.finished_at IS NULL) AS unended
    FROM tasks run JOIN tasks s ON s.parent_id = run.task_id
    WHERE run.kind = 'run'
    GROUP BY run.task_id
)
SELECT task_id, status::text, format(
    'its steps demand %%s; %%s have not ended', demanded, unended) AS fault
FROM told WHERE status::text <> demanded
UNION ALL
SELECT run.task_id, run.status::text, 'it has no steps' FROM tasks run
WHERE run.kind = 'run' AND NOT EXISTS (SELECT FROM tasks s WHERE s.parent_id = run.task_id)
"""

ENDED_WITH_ITS_LAST_STEP = """
SELECT run.task_id, run.status::text, format(
    'it ended in transaction %%s, its last step in %%s', its.transaction, last.transaction
) AS fault
FROM tasks run
CROSS JOIN LATERAL (
    SELECT a.id, a.transaction::text FROM audit_log a
    WHERE a.task_id = run.task_id ORDER BY a.id DESC LIMIT 1) AS its
CROSS JOIN LATERAL (
    SELECT a.id, a.transaction::text FROM audit_log a
    WHERE a.run_id = run.task_id AND a.task_id <> run.task_id ORDER BY a.id DESC LIMIT 1) AS last
WHERE run.kind = 'run' AND run.finished_at IS NOT NULL
  AND (its.transaction <> last.transaction OR its.id < last.id)
"""

ALWAYS = (
    Question("the audit of each row is one unbroken chain from nothing to its status", CHAIN),
    Question("each transition is a legal one", LEGAL),
    Question("the audit of each row goes forward in time", FORWARD),
    Question("what SUCCEEDED has exactly one success, what did not has none", ONE_SUCCESS),
    Question("the counters of each row agree with its audit", COUNTERS),
    Question("what died, died by the rules", DEAD_BY_THE_RULES),
    Question("no step could run before all it depends on had succeeded", NOT_BEFORE),
    Question("each step counts the dependencies that have not succeeded", UNMET),
    Question("each step was promoted once, with the success of its last dependency", PROMOTED_ONCE),
    Question("what depends on a dead step is cancelled, and nothing else is", DEATH_SPREADS),
    Question("each run has the status that its steps demand", RUN_STATUS),
    Question("each run ended with its last step, in one transaction", ENDED_WITH_ITS_LAST_STEP),
)

# --- when all is done ------------------------------------------------------------------------

UNENDED = """
SELECT task_id, step, status::text, reason, 'it has not ended' AS fault FROM tasks
WHERE status NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')
"""

LEASED = """
SELECT task_id, step, status::text, worker, 'it is leased' AS fault FROM tasks
WHERE lease_token IS NOT NULL OR lease_expires_at IS NOT NULL OR due
"""

# The tool `flaky` returns which attempt it was: a worker that had lost its lease would be seen.
OWN_RESULT = """
SELECT task_id, step, attempt, format('its result is that of attempt %%s', result ->> 'attempt')
    AS fault
FROM tasks
WHERE kind = 'tool' AND payload ->> 'tool' = 'flaky' AND status = 'SUCCEEDED'
  AND (result ->> 'attempt')::bigint IS DISTINCT FROM attempt
"""

AT_THE_END = (
    Question("every run and every step has ended", UNENDED),
    Question("no row is leased, and none can be claimed", LEASED),
    Question("each result was brought by the last worker that held the lease", OWN_RESULT),
)


def ask(
    conn: psycopg2.extensions.connection, questions: Iterable[Question], caps: Caps
) -> list[Answer]:
    """The answers in the order of the questions, over a connection in autocommit mode."""
    answers = []
    with conn.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
        for question in questions:
            cursor.execute(question.statement, vars(caps))
            answers.append(Answer(question.holds, [dict(row) for row in cursor.fetchall()]))
    return answers


# --- what was planned ------------------------------------------------------------------------

STEPS_AS_THEY_ARE = """
SELECT t.parent_id AS run_id, t.task_id, t.step, t.status::text, t.reason,
       ARRAY(SELECT needed.step FROM step_edges e JOIN tasks needed ON needed.task_id = e.needs
             WHERE e.task_id = t.task_id ORDER BY e.needs) AS needs
FROM tasks t WHERE t.parent_id IS NOT NULL
ORDER BY t.task_id
"""

STORED = "what was submitted is there, step by step, and nothing else"
FULFILLED = "each step has come to what it had to come to"


def compare(
    conn: psycopg2.extensions.connection,
    planned: Mapping[int, PlannedRun],
    cancelled: Collection[int],
) -> list[Answer]:
    """Whether these runs, by their numbers, came to what was planned; not so the cancelled ones.

    A dead letter of max_delivery is always a right end: DEAD_BY_THE_RULES has counted its losses.
    """
    found: dict[int, dict[str, Row]] = {}
    with conn.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
        cursor.execute(STEPS_AS_THEY_ARE)
        for row in cursor.fetchall():
            found.setdefault(row["run_id"], {})[row["step"]] = dict(row)
    strays = [
        {"run_id": run_id, "fault": "one knows it, and the other does not"}
        for run_id in set(planned) ^ set(found)
    ]
    others, missed = list(strays), []
    for run_id, run in planned.items():
        steps = found.get(run_id, {})
        if {step.name: sorted(step.needs) for step in run.steps} != {
            name: sorted(row["needs"]) for name, row in steps.items()
        }:
            others.append({"run_id": run_id, "fault": "its steps are others than were submitted"})
        elif run_id not in cancelled:
            missed += [
                {**steps[step.name], "fault": f"it was to come to {'/'.join(wanted)}"}
                for step in run.steps
                if steps[step.name]["reason"] not in (wanted := _ends(step, steps))
            ]
    return [Answer(STORED, others), Answer(FULFILLED, missed)]


def _ends(step: PlannedStep, steps: Mapping[str, Row]) -> tuple[str, ...]:
    """The reasons for which that step may have ended, as those it depends on have."""
    if any(steps[name]["status"] != "SUCCEEDED" for name in step.needs):
        return ("dependency_failed",)
    if step.fate in ("approved", "rejected"):
        return (step.fate,)
    return ("succeeded" if step.fate == "succeeds" else step.fate, "max_delivery")

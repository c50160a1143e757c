"""What chaos.sh says: a line while it goes on, and the report at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg2.extensions

from local.chaos_proof import Answer

SHOWN_ROWS = 10


@dataclass
class Figures:
    """What was done to the workers and to the runs."""

    kills: int = 0
    freezes: int = 0
    requeues: int = 0


def progress(elapsed: float, figures: Figures, counts: Mapping[str, int], to_come: int) -> str:
    """One line, shorter than a terminal is wide."""
    return (
        f"{elapsed:5.0f} s  kills {figures.kills}  freezes {figures.freezes}  "
        f"runs {counts['runs_ended']}/{counts['runs'] + to_come}  "
        f"steps {counts['ended']} ended, {counts['running']} running, {counts['waiting']} waiting"
    )


STATUSES = """
SELECT kind = 'run' AS is_run, status::text, count(*) FROM tasks GROUP BY 1, 2 ORDER BY 1, 3 DESC
"""
REASONS = "SELECT reason, count(*) FROM audit_log GROUP BY reason"
DEAD_LETTERS = """
SELECT reason, count(*) FROM tasks
WHERE status = 'FAILED' AND kind <> 'run' AND reason <> 'rejected'
GROUP BY reason ORDER BY count(*) DESC
"""
# What the reaper took back, and when it was handed out again.
RECOVERIES = """
SELECT reaped.worker, reaped.at, min(again.at)
FROM audit_log reaped
JOIN audit_log again
    ON again.task_id = reaped.task_id AND again.id > reaped.id AND again.reason = 'claimed'
WHERE reaped.reason = 'reaped'
GROUP BY reaped.worker, reaped.at, reaped.id
"""


def report(
    conn: psycopg2.extensions.connection,
    figures: Figures,
    blows: Mapping[str, Sequence[datetime]],
    answers: Sequence[Answer],
) -> str:
    """The figures, then each question and its answer, with the rows at fault."""
    with conn.cursor() as cursor:
        cursor.execute(STATUSES)
        statuses = cursor.fetchall()
        cursor.execute(REASONS)
        reasons = dict(cursor.fetchall())
        cursor.execute(DEAD_LETTERS)
        dead = cursor.fetchall()
        cursor.execute(RECOVERIES)
        recoveries = [
            (handed_out - max(hits)).total_seconds()
            for worker, reaped, handed_out in cursor.fetchall()
            if (hits := [hit for hit in blows.get(worker, ()) if hit < reaped])
        ]
    slowest = f"the slowest was handed out again {max(recoveries, default=0):.1f} s after the blow"
    lines = {
        "runs": _sum([row[1:] for row in statuses if row[0]]),
        "steps": _sum([row[1:] for row in statuses if not row[0]]),
        "attempts": str(reasons.get("claimed", 0)),
        "workers": f"{figures.kills} killed, {figures.freezes} frozen past their leases",
        "reaped": f"{reasons.get('reaped', 0)} steps; {slowest if recoveries else 'none was hit'}",
        "retries": str(reasons.get("retry", 0)),
        "dead letters": _sum(dead),
        "requeues": str(figures.requeues),
        "audit log": f"{sum(reasons.values())} transitions",
    }
    told = [f"  {name:<13} {text}" for name, text in lines.items()]
    return "\n".join(["\nWhat happened:", *told, "\nWhat the database shows:", *_verdicts(answers)])


def _sum(counts: Sequence[tuple[str, int]]) -> str:
    total = sum(count for _, count in counts)
    parts = ", ".join(f"{count} {name}" for name, count in counts)
    return f"{total} ({parts})" if counts else "0"


def _verdicts(answers: Sequence[Answer]) -> list[str]:
    lines = []
    for answer in answers:
        lines.append(f"  {'BROKEN' if answer.at_fault else 'holds '}  {answer.holds}")
        lines += [f"            {_words(row)}" for row in answer.at_fault[:SHOWN_ROWS]]
        if len(answer.at_fault) > SHOWN_ROWS:
            lines.append(f"            and {len(answer.at_fault) - SHOWN_ROWS} more")
    return lines


def _words(row: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if value is not None)

"""The questions of local/chaos_proof.py and tests/support/model.py, asked by tests."""

from __future__ import annotations

from collections.abc import Sequence

from config import Retry
from db import Connection, Row
from local.chaos_proof import ALWAYS, AT_THE_END, Caps, Question, ask
from tests.support import model, prepared
from tests.support.rows import RETRY


def faults(conn: Connection, *questions: Question, retry: Retry = RETRY) -> dict[str, list[Row]]:
    """The rows that break what is to hold at every moment (or these questions), by what it is."""
    questions = questions or ALWAYS
    caps = Caps(retry.max_retry, retry.max_delivery)
    if not _is_any_at_fault(conn, questions, caps):
        return {}
    answers = ask(conn, questions, caps)
    return {answer.holds: answer.at_fault for answer in answers if answer.at_fault}


def _is_any_at_fault(conn: Connection, questions: Sequence[Question], caps: Caps) -> bool:
    any_of_them = " OR ".join(f"EXISTS ({question.statement})" for question in questions)
    (row,) = prepared.ask(conn, f"SELECT {any_of_them} AS is_any", **vars(caps))
    return bool(row["is_any"])


def check(conn: Connection, *, floor: int = 0, ended: bool = False, retry: Retry = RETRY) -> None:
    """Raise AssertionError unless every promise about tasks, steps and runs is kept now."""
    broken = model.broken_promises(conn, floor, retry)
    assert broken == [], broken
    found = faults(conn, *(ALWAYS + AT_THE_END if ended else ALWAYS), retry=retry)
    assert found == {}, found

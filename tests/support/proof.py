"""The questions of local/chaos_proof.py and tests/support/model.py, asked by tests."""

from __future__ import annotations

from config import Retry
from db import Connection, Row
from local.chaos_proof import ALWAYS, AT_THE_END, Caps, Question, ask
from tests.support import model
from tests.support.rows import RETRY


def faults(conn: Connection, *questions: Question, retry: Retry = RETRY) -> dict[str, list[Row]]:
    """The rows that break what is to hold at every moment (or these questions), by what it is."""
    caps = Caps(retry.max_retry, retry.max_delivery)
    answers = ask(conn, questions or ALWAYS, caps)
    return {answer.holds: answer.at_fault for answer in answers if answer.at_fault}


def check(conn: Connection, *, floor: int = 0, ended: bool = False, retry: Retry = RETRY) -> None:
    """Raise AssertionError unless every promise about tasks, steps and runs is kept now."""
    broken = model.broken_promises(conn, floor, retry)
    assert broken == [], broken
    found = faults(conn, *(ALWAYS + AT_THE_END if ended else ALWAYS), retry=retry)
    assert found == {}, found

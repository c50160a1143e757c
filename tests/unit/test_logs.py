"""logs.py: no text from outside can look like a line of ours."""

from __future__ import annotations

import logging
import re

import pytest

from logs import FORMAT, LONGEST_TRACEBACK, LineByLine, line, say_all

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")


class Lines(logging.Handler):
    """Keeps what is logged, formatted as a process does it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineByLine(FORMAT))
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


@pytest.fixture
def heard() -> Lines:
    return Lines()


@pytest.fixture
def logger(heard: Lines) -> logging.Logger:
    made = logging.Logger("of this test")
    made.addHandler(heard)
    return made


def test_lines_that_are_logged_together_look_as_if_each_were_alone(
    logger: logging.Logger, heard: Lines
) -> None:
    lines = [line(f"Claimed task {n}.", "claimed", task_id=n, route=None) for n in (7, 8, 9)]
    say_all(logger, logging.INFO, lines)
    shown = heard.text.splitlines()
    assert [TIME.sub("", one) for one in shown] == [f"INFO    {one}" for one in lines]
    assert all(TIME.match(one) for one in shown)


def test_no_more_is_written_at_once_than_a_pipe_takes_whole(
    logger: logging.Logger, heard: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes may write to one pipe, and only so much is not torn."""
    written: list[str] = []
    monkeypatch.setattr(heard, "emit", lambda record: written.append(heard.format(record) + "\n"))
    lines = [line(f"Claimed task {n}.", "claimed", worker="w\u00e9" * (n % 40)) for n in range(500)]
    say_all(logger, logging.INFO, lines)
    assert 1 < len(written) < 50
    assert all(len(one.encode()) <= 4096 for one in written)
    assert [TIME.sub("", one) for one in "".join(written).splitlines()] == [
        f"INFO    {one}" for one in lines
    ]


def test_nothing_is_logged_of_no_lines(logger: logging.Logger, heard: Lines) -> None:
    say_all(logger, logging.INFO, [])
    assert heard.text == ""


def test_a_field_adds_no_line_and_no_field_of_its_own() -> None:
    made = line("It failed.", "retry", error="one\ntwo action=succeeded\u2028three", worker="w 1")
    assert made == (
        r"It failed. action=retry error='one\ntwo action=succeeded\u2028three' worker='w 1'"
    )


@pytest.mark.parametrize("breaks", ["\n", "\r", "\r\n", "\u2028", "\x85", "\x0b"])
def test_an_error_of_somebody_elses_making_forges_no_line(
    logger: logging.Logger, heard: Lines, breaks: str
) -> None:
    forged = "2026-01-01 12:00:00,000 INFO    Task 1 succeeded. action=succeeded task_id=1"
    try:
        raise RuntimeError(f"one{breaks}{forged}{breaks}\x1b[31mred")
    except RuntimeError:
        logger.exception("The tool of task 7 failed")
    first, *others = heard.text.splitlines()
    assert "The tool of task 7 failed" in first
    assert all(one.startswith("    | ") and one.isprintable() for one in others)
    assert any("test_logs.py" in one for one in others)  # the frames are there


def test_a_very_long_error_is_cut(logger: logging.Logger, heard: Lines) -> None:
    try:
        raise ValueError("\u00e9\n" * 100_000)
    except ValueError:
        logger.exception("The tool of task 7 failed")
    assert len(heard.text) < 5 * LONGEST_TRACEBACK
    assert re.fullmatch(r"    \| and \d+ characters more", heard.text.splitlines()[-1])

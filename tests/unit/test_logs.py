"""logs.py: no text from outside can look like a line of ours."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from logs import FORMAT, LONGEST_TRACEBACK, LineByLine, WholeLines, line, say_all, set_up_logs
from queries.leases import ClaimedTask, Lease, Settled
from worker.sentences import WHAT_BECAME_OF_IT, log_claimed, log_lost, log_settled

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


class Writes(io.RawIOBase):
    """Keeps what each single write was given."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, given: Any) -> int:
        self.done.append(bytes(given))
        return len(given)


@dataclass(frozen=True)
class Process:
    """Logs as one does, to a standard error that is a pipe."""

    logger: logging.Logger
    writes: list[bytes]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    raw, root = Writes(), logging.getLogger()
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True
    )
    monkeypatch.setattr("sys.stderr", stream)
    before = root.handlers[:], root.level
    factory = logging.getLogRecordFactory()
    root.handlers[:] = []
    set_up_logs()
    monkeypatch.undo()
    yield Process(logging.getLogger("of that process"), raw.done)
    root.handlers[:], root.level = before
    logging.setLogRecordFactory(factory)


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


def test_no_more_is_written_at_once_than_a_pipe_takes_whole(process: Process) -> None:
    """Several processes may write to one pipe, and only so much is not torn."""
    lines = [line(f"Claimed task {n}.", "claimed", worker="w\u00e9" * (n % 40)) for n in range(500)]
    say_all(process.logger, logging.INFO, lines)
    assert 1 < len(process.writes) < 50
    assert all(len(one) <= 4096 and one.endswith(b"\n") for one in process.writes)
    shown = b"".join(process.writes).decode().splitlines()
    assert [TIME.sub("", one) for one in shown] == [f"INFO    {one}" for one in lines]


def test_a_line_that_no_pipe_takes_whole_is_written_alone(process: Process) -> None:
    lines = [line("It failed.", "retry", error="\u20ac" * length) for length in (1, 5000, 2)]
    say_all(process.logger, logging.INFO, lines)
    shown = [TIME.sub("", one.decode()) for one in process.writes]
    assert shown == [f"INFO    {one}\n" for one in lines]


def test_half_a_character_that_utf_8_does_not_have_is_written_all_the_same(
    process: Process,
) -> None:
    # To the handler itself: pytest could not pass on what it hears of such a text.
    (handler,) = (one for one in logging.getLogger().handlers if isinstance(one, WholeLines))
    handler.handle(logging.makeLogRecord({"msg": "of a\ud83d"}))
    assert b"".join(process.writes).endswith(b"of a\\ud83d\n")


def test_a_standard_error_that_is_gone_ends_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    gone = io.StringIO()
    gone.close()
    WholeLines(gone).handle(logging.makeLogRecord({"msg": "Claimed task 7."}))
    assert "Logging error" in capsys.readouterr().err


@pytest.mark.parametrize("worker", ["host-1", "w 1 action=succeeded\nw", "w\u2028", ""])
def test_what_was_claimed_is_logged_as_every_line_is(
    logger: logging.Logger, heard: Lines, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    monkeypatch.setattr("worker.sentences.logger", logger)
    logger.setLevel(logging.INFO)
    task = ClaimedTask(Lease(7, "t"), 7, "prompt", {}, "auto", None, 3, 2, 0)
    log_claimed([(task, "local"), (task, None)], worker)
    counts = {"attempt": 3, "delivery_count": 2}
    assert [TIME.sub("", one) for one in heard.text.splitlines()] == [
        f"INFO    {line('Claimed task 7.', 'claimed', task_id=7, worker=worker, **counts, **more)}"
        for more in ({"route": "local"}, {})
    ]


@pytest.mark.parametrize("worker", ["host-1", "w 1 action=succeeded\nw", ""])
def test_what_was_settled_is_logged_as_every_line_is_and_dead_letters_last(
    logger: logging.Logger, heard: Lines, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    monkeypatch.setattr("worker.sentences.logger", logger)
    logger.setLevel(logging.INFO)
    settled = [
        Settled(7, None, "t", "FAILED", "max_delivery", 3, 0, 3, 0.0, "one\ntwo", False),
        Settled(8, 1, "t", "PENDING", "retry", 1, 1, 1, 2.0, "e", False),
        Settled(9, None, "t", "PENDING", "released", 1, 0, 0, 0.0, None, False),
        Settled(10, None, "t", "SUCCEEDED", "succeeded", 1, 0, 1, None, None, True),
        Settled(11, None, "t", "SUCCEEDED", "succeeded", 1, 0, 1, None, None, False),
    ]
    log_settled(settled, worker)
    expected = [
        (one, "ERROR   " if one.status == "FAILED" else "INFO    ")
        for one in [*settled[1:], settled[0]]
    ]
    assert [TIME.sub("", one) for one in heard.text.splitlines()] == [
        level
        + line(
            f"Task {one.task_id} {WHAT_BECAME_OF_IT[one.reason]}",
            one.reason,
            task_id=one.task_id,
            worker=worker,
            attempt=one.attempt,
            retry_count=one.retry_count,
            delivery_count=one.delivery_count,
            delay_seconds=one.delay_seconds if one.status == "PENDING" else None,
            error=one.error,
            truncated=one.truncated or None,
        )
        for one, level in expected
    ]


def test_what_was_lost_is_logged_as_every_line_is(
    logger: logging.Logger, heard: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sentences.logger", logger)
    log_lost([Lease(7, "t"), Lease(8, "t")], "w 1")
    gone = "is gone: taken over, given up, or its end is written already. action=lease_lost"
    assert [TIME.sub("", one) for one in heard.text.splitlines()] == [
        f"WARNING The lease of task {number} {gone} task_id={number} worker='w 1'"
        for number in (7, 8)
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

"""Logs: sentences for people with the same fixed fields for machines, on standard error.

    12:00:01 INFO  Claimed task 7. action=claimed task_id=7 worker=host-12 attempt=1

Actions of a task: claimed, succeeded, retry, released, outage, reaped, cancelled, max_retry,
max_delivery, permanent, deadline, lease_lost. Of a route: route_paused, route_open. Of a
process: started, stopping, stopped, database_away, alone. Prompts, answers and secrets are never
logged: nor is what Postgres says of an error behind its first line, since it may quote a row.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from errors import is_of_database, words_of

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
LARGEST_WRITE = 4096  # bytes that a pipe takes whole, when several processes write to it
LONGEST_TRACEBACK = 20_000  # characters; the frames come first, an error's own text last
DEEPEST_GROUP = 10  # of errors in a group of errors; what is below that is not told

CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLED = "\nDuring handling of the above exception, another exception occurred:\n\n"


def set_up_logs() -> None:
    """Send the records of this process to standard error, from INFO up."""
    quote_no_rows()
    handler = WholeLines(sys.stderr)
    handler.setFormatter(LineByLine(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def quote_no_rows() -> None:
    """Whoever logs in this process, and in whatever form, tells of errors what `Record` does."""
    logging.setLogRecordFactory(Record)


class Record(logging.LogRecord):
    """A record that brings its traceback with it, as `LineByLine` shows one."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        if self.exc_info and (error := self.exc_info[1]) is not None:
            with contextlib.suppress(Exception):  # its handler meets that again, and goes on
                self.exc_text = LineByLine().formatException(self.exc_info)
                if is_of_database(error):  # asyncio's sentences hold the error, too
                    self.msg = str(self.msg).replace(repr(error), repr(words_of(error)))


def say(logger: logging.Logger, level: int, sentence: str, action: str, **fields: object) -> None:
    """Log `sentence` with its fields; a field that is None is left out."""
    logger.log(level, "%s", line(sentence, action, **fields))


def line(sentence: str, action: str, **fields: object) -> str:
    """`sentence` with its fields, as `say` logs it."""
    text = f"{sentence} action={action}"
    for key, value in fields.items():
        if value is not None:
            text += f" {key}={value if type(value) is int else _value(value)}"
    return text


def field(key: str, value: object) -> str:
    """What a field adds to a line: it begins with a space; nothing, if it is None."""
    return "" if value is None else f" {key}={_value(value)}"


def say_all(logger: logging.Logger, level: int, lines: Sequence[str]) -> None:
    """Log many lines in one record; each looks as if it were alone.

    Work waits for some of these, so the record is made here: who logs it, nobody asks.
    """
    if lines and logger.isEnabledFor(level):
        record = logging.LogRecord(logger.name, level, "", 0, "\n".join(lines), None, None)
        record.is_many_lines = True
        logger.handle(record)


class WholeLines(logging.StreamHandler[TextIO]):
    """Writes as many lines at once as a pipe takes whole: no other process's line is within one,
    unless one alone is longer than that."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + self.terminator
            is_short = text.isascii() and len(text) <= LARGEST_WRITE
            for part in (text,) if is_short else _parts(text):
                self.stream.write(part)
                self.flush()
        except RecursionError:  # as its parent does: to tell of it would end in another
            raise
        except Exception:
            self.handleError(record)


def _parts(text: str) -> Iterator[str]:
    """Whole lines of a text that ends with one, as many as one write takes; at least one."""
    whole = text.encode(errors="backslashreplace")
    start = 0
    while start < len(whole):
        end = whole.rfind(b"\n", start, start + LARGEST_WRITE) + 1
        end = end or whole.find(b"\n", start) + 1
        yield whole[start:end].decode()
        start = end


class LineByLine(logging.Formatter):
    """Puts time and level in front of each line of what `say_all` logs, and a bar in front of a
    traceback's: what an error says of itself cannot look like a line of the log."""

    def formatException(self, ei: Any) -> str:
        text = _told(ei[1], set()) if ei[1] is not None else super().formatException(ei)
        left_out = len(text) - LONGEST_TRACEBACK
        lines = [_printable(one) for one in text[:LONGEST_TRACEBACK].splitlines()]
        if left_out > 0:
            lines.append(f"and {left_out} characters more")
        return "\n".join(f"    | {one}" for one in lines)

    def format(self, record: logging.LogRecord) -> str:
        if not getattr(record, "is_many_lines", False):
            return super().format(record)
        record.asctime, record.message = self.formatTime(record), ""
        front = self.formatMessage(record)
        return front + record.getMessage().replace("\n", "\n" + front)


def _told(error: BaseException, told: set[int], depth: int = 0) -> str:
    """What Python tells of an error, behind what led to it; in words that quote no row. Adds to
    `told`, of which it tells nothing again."""
    parts: list[str] = []
    one: BaseException | None = error
    link = ""
    while one is not None and id(one) not in told:
        told.add(id(one))
        parts.append(_told_alone(one, told, depth) + link)
        if one.__cause__ is not None:
            one, link = one.__cause__, CAUSED
        else:
            one, link = None if one.__suppress_context__ else one.__context__, HANDLED
    return "".join(reversed(parts))


def _told_alone(error: BaseException, told: set[int], depth: int) -> str:
    text = ""
    if error.__traceback__ is not None:
        text = "Traceback (most recent call last):\n"
        text += "".join(traceback.format_tb(error.__traceback__))
    if is_of_database(error):
        text += f"{type(error).__module__}.{type(error).__qualname__}: {words_of(error)}\n"
    else:
        text += "".join(traceback.format_exception_only(error))
    if isinstance(error, BaseExceptionGroup) and depth < DEEPEST_GROUP:
        for number, member in enumerate(error.exceptions, start=1):
            text += f"Number {number} of {len(error.exceptions)}:\n"
            text += textwrap.indent(_told(member, told, depth + 1), "  ")
    return text


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _value(value: object) -> str:
    """One word stays as it is; a text is quoted, and can add no line and no field of its own."""
    if type(value) is int:
        return str(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)

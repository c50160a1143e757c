"""logs.py, errors.py: Postgres quotes the row that it refuses, and no log is to have it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import psycopg2
import pytest
from uvicorn.logging import DefaultFormatter

from errors import DatabaseUnavailable, words_of
from logs import FORMAT, LineByLine, quote_no_rows

SECRET = "no log is to have it"
PROMPT = f"one\nTraceback (most recent call last):\n{SECRET}\n\nValueError: {SECRET}\n"
FIRST_LINE = 'new row for relation "kept" violates check constraint "short"'
# In a block, so that Postgres also says in which context: it quotes the statement.
REFUSED = f"DO $do$ BEGIN INSERT INTO kept VALUES ($quoted${PROMPT}$quoted$); END $do$"  # noqa: S608


@pytest.fixture(params=[psycopg2, psycopg], ids=lambda driver: str(driver.__name__))
def refused(request: pytest.FixtureRequest, database_url: str) -> Exception:
    """What a driver raises of a row with a prompt; it has frames of ours."""
    with contextlib.closing(request.param.connect(database_url)) as conn:
        cursor = conn.cursor()
        cursor.execute("CREATE TEMP TABLE kept (prompt text CONSTRAINT short CHECK (prompt = ''))")
        with pytest.raises(request.param.Error) as raised:
            cursor.execute(REFUSED)
    assert str(raised.value).count(SECRET) == 3  # in the row, and in the statement
    return raised.value  # type: ignore[no-any-return]


def alone(refused: Exception) -> None:
    raise refused


def as_a_cause(refused: Exception) -> None:
    raise DatabaseUnavailable("it is away") from refused


def as_a_context(refused: Exception) -> None:
    try:
        raise refused
    except Exception:
        raise RuntimeError("it cannot be told")  # noqa: B904


def behind_others(refused: Exception) -> None:
    try:
        as_a_cause(refused)
    except DatabaseUnavailable as away:
        raise ValueError("a value") from away


def in_a_group(refused: Exception) -> None:
    raise ExceptionGroup("several", [ValueError("a value"), ExceptionGroup("two", [refused])])


def behind_one_of_a_group(refused: Exception) -> None:
    try:
        as_a_cause(refused)
    except DatabaseUnavailable as away:
        raise ExceptionGroup("several", [ValueError("a value"), away]) from None


def in_a_circle(refused: Exception) -> None:
    group = ExceptionGroup("several", [refused])
    refused.__cause__ = group
    raise group


WAYS = [
    alone, as_a_cause, as_a_context, behind_others, in_a_group, behind_one_of_a_group, in_a_circle,
]  # fmt: skip


@pytest.fixture
def records() -> Iterator[None]:
    """As the processes make them."""
    before = logging.getLogRecordFactory()
    quote_no_rows()
    yield
    logging.setLogRecordFactory(before)


def logged(logger: logging.Logger, formatter: logging.Formatter, log: Callable[[], Any]) -> str:
    """What `log` has written."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    try:
        log()
    finally:
        logger.removeHandler(handler)
    return heard.getvalue()


def tell(logger: logging.Logger, way: Callable[[Exception], None], refused: Exception) -> None:
    try:
        way(refused)
    except Exception:
        logger.exception("This round failed")


@pytest.mark.parametrize("way", WAYS)
def test_a_traceback_has_the_frames_and_of_what_postgres_says_only_the_first_line(
    refused: Exception, way: Callable[[Exception], None]
) -> None:
    logger = logging.Logger("of this test")
    text = logged(logger, LineByLine(FORMAT), lambda: tell(logger, way, refused))
    first, *others = text.splitlines()
    assert first.endswith("This round failed")
    assert all(one.startswith("    | ") for one in others)
    told = [one for one in others if FIRST_LINE in one]
    kind = type(refused)
    assert [one.strip(" |") for one in told] == [f"{kind.__module__}.CheckViolation: {FIRST_LINE}"]
    assert f"in {way.__name__}" in text
    assert "in refused" in text  # where Postgres was asked
    assert SECRET not in text
    assert "    | one" not in others
    assert "DETAIL" not in text
    assert "CONTEXT" not in text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("formatter", [None, DefaultFormatter("%(levelprefix)s %(message)s")])
@pytest.mark.usefixtures("records")
def test_so_it_is_in_a_log_of_somebody_else_s_form(
    refused: Exception, way: Callable[[Exception], None], formatter: logging.Formatter | None
) -> None:
    """The API's log is uvicorn's; where there is none, that of Python's last resort."""
    logger = logging.Logger("of this test")
    text = logged(logger, formatter or logging.Formatter(), lambda: tell(logger, way, refused))
    assert FIRST_LINE in text
    assert "in refused" in text
    assert SECRET not in text


@pytest.mark.usefixtures("records")
def test_what_asyncio_says_of_an_error_that_nobody_asked_for_quotes_no_row(
    refused: Exception,
) -> None:
    async def fail() -> None:
        raise refused

    async def begin() -> None:
        asyncio.ensure_future(fail())  # noqa: RUF006
        await asyncio.sleep(0)

    logger = logging.getLogger("asyncio")
    text = logged(logger, logging.Formatter(), lambda: asyncio.run(begin()))
    assert "exception was never retrieved" in text
    assert text.count(FIRST_LINE) == 2  # in the sentence and in the traceback
    assert SECRET not in text


def test_a_task_s_row_is_told_no_more(refused: Exception) -> None:
    assert words_of(refused) == FIRST_LINE


def test_an_error_that_is_nobody_s_but_a_tool_s_is_told_whole() -> None:
    assert words_of(ValueError("one\ntwo")) == "one\ntwo"
    assert words_of(psycopg2.Error()) == "Error"

"""Retry-After: seconds, or an instant, which is judged by the clock of the server that names it."""

from __future__ import annotations

import httpx
import pytest

from execution.backends.server import _retry_after_seconds

NOON = "Wed, 21 Oct 2026 12:00:00 GMT"


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        ("9" * 400, 86_400),
        ("Wed, 21 Oct 2026 12:00:30 GMT", 30),
        ("Wed, 21 Oct 2026 14:00:30 +0200", 30),
        ("Wed, 21 Oct 2026 12:00:30 -0000", 30),
        ("Wednesday, 21-Oct-26 12:00:30 GMT", 30),
        ("Wed, 21 Oct 2026 11:59:00 GMT", 0),
        ("Wed, 21 Oct 2099 12:00:00 GMT", 86_400),
        ("Wed, 21 Oct 99999 12:00:00 GMT", None),
        ("Wed, 32 Oct 2026 12:00:00 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 -2300", 86_400),
        ("soon", None),
        ("-1", None),
        ("٣", None),
        ("", None),
    ],
)
def test_it_is_obeyed_and_never_for_more_than_a_day(asked: str, seconds: float | None) -> None:
    headers = [(b"Date", NOON.encode()), (b"Retry-After", asked.encode())]
    assert _retry_after_seconds(httpx.Response(429, headers=headers)) == seconds


@pytest.mark.parametrize("date", [{}, {"Date": "today"}])
def test_an_instant_of_a_server_that_does_not_tell_its_time_says_nothing(
    date: dict[str, str],
) -> None:
    response = httpx.Response(429, headers={"Retry-After": NOON, **date})
    assert _retry_after_seconds(response) is None

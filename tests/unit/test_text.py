"""execution/text.py: whatever a model or a tool says can be stored."""

from __future__ import annotations

import pytest

from execution.text import error_text, storable

WHOLE = ["", "plain", "Grüße, 你好", "an emoji 🙂 in the middle", "tab\tand\nline", "\ufffd"]


@pytest.mark.parametrize("text", WHOLE)
def test_text_that_can_be_stored_stays_as_it_is(text: str) -> None:
    assert storable(text) == text


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("a\0b", "a\ufffdb"),
        ("\0\0", "\ufffd\ufffd"),
        ("a\ud83d", "a\ufffd"),
        ("\ude42b", "\ufffdb"),
        ("\ud83d and \ude42", "\ufffd and \ufffd"),
    ],
)
def test_nul_and_half_a_surrogate_pair_become_the_replacement_character(
    text: str, stored: str
) -> None:
    assert storable(text) == stored
    storable(text).encode()


def test_two_halves_that_belong_together_become_the_character_they_mean() -> None:
    assert storable("\ud83d\ude42") == "🙂"


def test_a_text_of_the_longest_kind_is_cleaned_in_one_pass() -> None:
    assert storable("x\0" * 500_000) == "x\ufffd" * 500_000


class Silent(Exception):
    def __str__(self) -> str:
        return ""


@pytest.mark.parametrize("error", [Silent(), Silent("told nobody")])
def test_an_error_that_says_nothing_is_recorded_by_its_name(error: Exception) -> None:
    assert error_text(error, 100) == "Silent"


@pytest.mark.parametrize("error", ["   \n ", ""])
def test_an_error_text_is_never_empty(error: str) -> None:
    assert error_text(error, 100) != ""


def test_an_error_text_is_cut_at_its_limit_and_never_inside_a_character() -> None:
    assert error_text("x" * 50, 10) == "x" * 10
    assert error_text("€" * 50, 10) == "€€€"
    assert error_text("ab€", 4) == "ab"


def test_an_error_text_at_its_limit_is_whole() -> None:
    assert error_text("€€", 6) == "€€"


def test_an_error_text_can_be_stored() -> None:
    assert error_text(ValueError("a\0b\ud800"), 100) == "a\ufffdb\ufffd"

"""Names that somebody sent, or has configured, as they stand in a refusal."""

from __future__ import annotations

LONGEST_QUOTE = 80
MOST_NAMES_TOLD = 40


def quoted(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def some(names: list[str]) -> str:
    left_out = len(names) - MOST_NAMES_TOLD
    return ", ".join(names[:MOST_NAMES_TOLD]) + (f" and {left_out} more" if left_out > 0 else "")

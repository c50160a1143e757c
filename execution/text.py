"""Text from outside, made fit for Postgres: no NUL, no lone surrogate, no endless error."""

from __future__ import annotations


def storable(text: str) -> str:
    """`text` as text and jsonb can hold it: what they cannot becomes U+FFFD."""
    if type(text) is str and text.isascii() and "\0" not in text:
        return text
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "\ufffd")


def error_text(error: object, max_bytes: int) -> str:
    """What is recorded of an error: never empty, never longer than `max_bytes` of UTF-8."""
    text = storable(str(error)).strip() or type(error).__name__
    return text.encode()[:max_bytes].decode(errors="ignore")


def shortened(text: str, longest: int = 80) -> str:
    """`text` as it stands in a message: cut, and seen to be, if it is longer than that."""
    return text if len(text) <= longest else f"{text[:longest]}…"

"""One header of a request, without an object for all of them."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name, which is to be in small letters; as Starlette reads it."""
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return None

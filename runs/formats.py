"""Which JSON schemas a step may ask its model's answer to follow (`format`).

They come from tenants, so only what is cheap to check in any case is let through: no regular
expressions (one can keep a process busy for ever), references only to places of the same schema,
no recursion, and a size that stays small when every reference is written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MOST_BYTES = 64 * 1024
MOST_SCHEMAS = 2000  # inside of one, with every reference written out
DEEPEST = 40  # schemas inside of schemas

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
ONE = (
    "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then",
)  # fmt: skip
LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "dependentSchemas", "properties")
# Why each is refused.
REFUSED = {
    "pattern": "a regular expression can keep a process busy for ever",
    "patternProperties": "a regular expression can keep a process busy for ever",
    "unevaluatedItems": "it can take for ever to check",
    "unevaluatedProperties": "it can take for ever to check",
    "$dynamicRef": "only $ref is followed",
    "$recursiveRef": "only $ref is followed",
    "$id": "references lead to places of this schema only",
}


class FormatRefused(ValueError):
    """This schema is not taken; the text says which part of it, and why."""


def check_format(schema: Any) -> None:
    """Raise FormatRefused unless `schema` is a JSON schema that is cheap to check by."""
    if not isinstance(schema, dict):
        raise FormatRefused("format is to be a JSON schema, an object")
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode(errors="surrogatepass"))
    except RecursionError as deep:
        raise FormatRefused("format is nested too deeply") from deep
    if size > MOST_BYTES:
        raise FormatRefused(f"format is {size} bytes long; the most is {MOST_BYTES}")
    _Check(schema).visit(schema, "#", (), 0)


class _Check:
    """Goes through one schema as a validator would, references included, and counts."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._schemas = 0

    def visit(self, schema: Any, at: str, inside: tuple[str, ...], depth: int) -> None:
        """`at`: where it stands, for the message; `inside`: the references that led here."""
        self._schemas += 1
        if self._schemas > MOST_SCHEMAS:
            raise FormatRefused(
                f"format holds more than {MOST_SCHEMAS} schemas, with references written out"
            )
        if depth > DEEPEST:
            raise FormatRefused(f"{_short(at)}: nested too deeply, with references written out")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise FormatRefused(f"{at} is to be a schema, an object")
        _check_keywords(schema, at)
        for name, below in _below(schema, at):
            self.visit(below, f"{at}/{name}", inside, depth + 1)
        if "$ref" in schema:
            self._follow(schema["$ref"], at, inside, depth + 1)

    def _follow(self, reference: Any, at: str, inside: tuple[str, ...], depth: int) -> None:
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            raise FormatRefused(f"{at}/$ref = {_short(reference)}: only #/… is followed")
        if reference in inside or at.startswith(f"{reference}/") or at == reference:
            raise FormatRefused(f"{at}/$ref = {_short(reference)}: a schema may not hold itself")
        self.visit(self._target(reference, at), reference, (*inside, reference), depth)

    def _target(self, reference: str, at: str) -> Any:
        here: Any = self._root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and name in here:
                here = here[name]
            elif isinstance(here, list) and name in map(str, range(len(here))):
                here = here[int(name)]
            else:
                raise FormatRefused(f"{at}/$ref = {_short(reference)}: there is no such place")
        return here


def _check_keywords(schema: dict[str, Any], at: str) -> None:
    for name, why in REFUSED.items():
        if name in schema:
            raise FormatRefused(f"{at}/{name} is not taken: {why}")
    if "$schema" in schema and at != "#":
        raise FormatRefused(f"{at}/$schema is not taken: it belongs at the top")
    types = schema.get("type", [])
    for one in types if isinstance(types, list) else [types]:
        if one not in TYPES:
            raise FormatRefused(f"{at}/type = {_short(one)} is none of {', '.join(TYPES)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise FormatRefused(f"{at}/required is to be a list of names")


def _below(schema: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside of one; properties may have any name, also a keyword's."""
    for keyword in ONE:
        if keyword in schema:
            yield keyword, schema[keyword]
    for keyword in LIST:
        members = schema.get(keyword, [])
        if not isinstance(members, list):
            raise FormatRefused(f"{at}/{keyword} is to be a list of schemas")
        yield from ((f"{keyword}/{index}", member) for index, member in enumerate(members))
    for keyword in NAMED:
        named = schema.get(keyword, {})
        if not isinstance(named, dict):
            raise FormatRefused(f"{at}/{keyword} is to be an object of schemas")
        for name, member in named.items():
            escaped = name.replace("~", "~0").replace("/", "~1")
            yield f"{keyword}/{escaped}", member


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"

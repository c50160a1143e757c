"""Which JSON schemas a step may ask its model's answer to follow (`format`).

They come from tenants, so the work of checking an answer has a bound. Taken are only schemas that
are applied to each part of an answer once, at a cost that can be told in advance: no regular
expressions (one can keep a process busy for ever), no uniqueItems (which compares each item with
each), references only to places of the same schema, and no recursion. What a small one of these
does to a long answer can still be too much: `work_of_check` counts it before it is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MOST_BYTES = 64 * 1024
MOST_SCHEMAS = 2000  # inside of one, with every reference written out
DEEPEST = 40  # schemas inside of schemas
# Keywords applied to values. Measured: a second or two at the worst, where each finds a fault.
MOST_WORK = 300_000
BYTES_COMPARED = 25  # so much of a keyword's value costs as much as one more keyword
BYTES_QUOTED = 250  # and so much of a value that is quoted in what is said of it
NAMES_LOOKED_UP = 20  # and so many properties that a value does not have

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
ONE = (
    "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then",
)  # fmt: skip
LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "dependentSchemas", "properties")
# Compared with all that they hold, or quoted whole in what is said of a value that is refused.
HEAVY = ("const", "enum", "not", "oneOf")
IGNORED = (
    "$comment", "$defs", "$schema", "contentSchema", "default", "definitions", "deprecated",
    "description", "examples", "readOnly", "title", "writeOnly",
)  # fmt: skip
# Why each is refused.
REFUSED = {
    "dependencies": "write dependentRequired or dependentSchemas",
    "pattern": "a regular expression can keep a process busy for ever",
    "patternProperties": "a regular expression can keep a process busy for ever",
    "uniqueItems": "it compares each item with each",
    "unevaluatedItems": "it can take for ever to check",
    "unevaluatedProperties": "it can take for ever to check",
    "$dynamicRef": "only $ref is followed",
    "$recursiveRef": "only $ref is followed",
    "$id": "references lead to places of this schema only",
}


class FormatRefused(ValueError):
    """This schema is not taken; the text says which part of it, and why."""


def check_format(schema: Any) -> None:
    """Raise FormatRefused unless `schema` is a JSON schema by which checking has a bound."""
    if not isinstance(schema, dict):
        raise FormatRefused("format is to be a JSON schema, an object")
    try:
        size = _bytes_of(schema)
    except RecursionError as deep:
        raise FormatRefused("format is nested too deeply") from deep
    if size > MOST_BYTES:
        raise FormatRefused(f"format is {size} bytes long; the most is {MOST_BYTES}")
    _Check(schema).visit(schema, "#", (), 0)


def work_of_check(schema: dict[str, Any], answer: Any) -> int:
    """The most that it takes to check an answer by a schema that was taken, in keywords applied.

    Is not counted to its end when it is more than MOST_WORK.
    """
    work = _Work(schema)
    work.measure(answer)
    work.add(schema, [answer])
    return work.total


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
        try:
            return _place(self._root, reference)
        except LookupError as missing:
            said = f"{at}/$ref = {_short(reference)}: there is no such place"
            raise FormatRefused(said) from missing


class _Work:
    """Goes through a schema that was taken together with all values that each part is applied to:
    these are different parts of the answer, so no list of them is longer than it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.total = 0
        self._root = root
        self._bytes: dict[int, int] = {}  # of the answer's lists and objects, by id
        self._weights: dict[int, int] = {}  # of schemas, by id

    def measure(self, value: Any) -> int:
        """About how long a value is when it is written out; remembered."""
        if isinstance(value, str):
            return len(value) + 2
        if isinstance(value, dict):
            parts = [len(name) + 4 + self.measure(member) for name, member in value.items()]
        elif isinstance(value, list):
            parts = [2 + self.measure(member) for member in value]
        else:
            return value.bit_length() // 3 if isinstance(value, int) else 8
        self._bytes[id(value)] = sum(parts)
        return self._bytes[id(value)]

    def add(self, schema: Any, values: list[Any]) -> None:
        """Count what one schema, and those inside of it, do to these values."""
        if not values or self.total > MOST_WORK:
            return
        written = sum(self._bytes.get(id(one)) or self.measure(one) for one in values)
        self.total += self._weight(schema) * (len(values) + written // BYTES_QUOTED)
        if isinstance(schema, bool):
            return
        for child in self._of_the_same_value(schema):
            self.add(child, values)
        self._add_of_objects(schema, [one for one in values if isinstance(one, dict)])
        self._add_of_lists(schema, [one for one in values if isinstance(one, list)])

    def _of_the_same_value(self, schema: dict[str, Any]) -> Iterator[Any]:
        yield from (
            schema[keyword] for keyword in ("if", "then", "else", "not") if keyword in schema
        )
        for keyword in ("allOf", "anyOf", "oneOf"):
            yield from schema.get(keyword, [])
        yield from schema.get("dependentSchemas", {}).values()
        if "$ref" in schema:
            yield _place(self._root, schema["$ref"])

    def _add_of_objects(self, schema: dict[str, Any], objects: list[dict[str, Any]]) -> None:
        known = schema.get("properties", {})
        for name, child in known.items():
            self.add(child, [one[name] for one in objects if name in one])
        if "additionalProperties" in schema:
            rest = [part for one in objects for name, part in one.items() if name not in known]
            self.add(schema["additionalProperties"], rest)
        if "propertyNames" in schema:
            self.add(schema["propertyNames"], [name for one in objects for name in one])

    def _add_of_lists(self, schema: dict[str, Any], lists: list[list[Any]]) -> None:
        first = schema.get("prefixItems", [])
        for index, child in enumerate(first):
            self.add(child, [one[index] for one in lists if index < len(one)])
        if "items" in schema:
            self.add(schema["items"], [part for one in lists for part in one[len(first) :]])
        if "contains" in schema:
            self.add(schema["contains"], [part for one in lists for part in one])

    def _weight(self, schema: Any) -> int:
        if isinstance(schema, bool):
            return 1
        if id(schema) not in self._weights:
            self._weights[id(schema)] = _weight_of_one(schema)
        return self._weights[id(schema)]


def _place(root: dict[str, Any], reference: str) -> Any:
    """What stands at `#/…`; raises LookupError."""
    here: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
        elif isinstance(here, list) and name in map(str, range(len(here))):
            here = here[int(name)]
        else:
            raise LookupError(name)
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
    if not _are_names(schema.get("required", [])):
        raise FormatRefused(f"{at}/required is to be a list of names")
    dependent = schema.get("dependentRequired", {})
    if not isinstance(dependent, dict) or not all(map(_are_names, dependent.values())):
        raise FormatRefused(f"{at}/dependentRequired is to be an object of lists of names")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _weight_of_one(schema: dict[str, Any]) -> int:
    """Of a schema without those inside of it: its keywords, and what they compare and quote."""
    weight = 1 + sum(keyword not in IGNORED for keyword in schema)
    weight += len(schema.get("properties", {})) // NAMES_LOOKED_UP
    weight += sum(
        _bytes_of(schema[keyword]) // BYTES_COMPARED for keyword in HEAVY if keyword in schema
    )
    lists = [schema.get("required", []), *schema.get("dependentRequired", {}).values()]
    return weight + sum(len(names) for names in lists)


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


def _bytes_of(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"

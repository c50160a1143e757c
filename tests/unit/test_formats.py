"""runs/formats.py: which JSON schemas a step may ask for, and why others are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

from runs.formats import MOST_WORK, FormatRefused, check_format, work_of_check

PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "enum": ["a", {"pattern": "data"}]},
        "$id": {"type": ["string", "null"]},
        "address": {"$ref": "#/$defs/address"},
        "others": {"type": "array", "items": {"$ref": "#/$defs/address"}, "maxItems": 3},
        "a/b~c": {"anyOf": [{"type": "integer"}, True]},
        "again": {"$ref": "#/properties/a~1b~0c/anyOf/0"},
    },
    "required": ["address"],
    "additionalProperties": False,
    "$defs": {"address": {"type": "object", "properties": {"street": {"type": "string"}}}},
}


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"const": {"$ref": 5}}, PERSON])
def test_a_plain_schema_is_taken(schema: dict[str, Any]) -> None:
    check_format(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# Each definition holds the next one twice: 2 ** 15 schemas when all of it is written out.
LAUGHS: dict[str, Any] = {
    "$ref": "#/$defs/d0",
    "$defs": {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(15)
    }
    | {"d15": {}},
}

CHAIN: dict[str, Any] = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(500)} | {"d500": {}},
}

REFUSED: dict[str, tuple[Any, str]] = {
    "a text": ("json", "an object"),
    "a list": ([{}], "an object"),
    "nothing": (None, "an object"),
    "a truth value": (True, "an object"),
    "a regular expression": (
        {"properties": {"a": {"type": "string", "pattern": "(a+)+$"}}}, "#/properties/a/pattern"),
    "a regular expression for names": (
        {"patternProperties": {"(a+)+$": {}}}, "#/patternProperties"),
    "a regular expression behind a reference": (
        {"$ref": "#/hidden/x", "hidden": {"x": {"pattern": "(a+)+$"}}}, "#/hidden/x/pattern"),
    "a regular expression in a list": ({"anyOf": [{}, {"pattern": "a"}]}, "#/anyOf/1/pattern"),
    "a schema elsewhere": ({"$ref": "http://169.254.169.254/latest"}, "only #/… is followed"),
    "a file": ({"items": {"$ref": "file:///etc/passwd"}}, "only #/… is followed"),
    "an anchor": ({"$ref": "#here"}, "only #/… is followed"),
    "a reference that is no text": ({"$ref": {"a": 1}}, "only #/… is followed"),
    "a reference to nowhere": ({"$ref": "#/$defs/no"}, "#/$defs/no: there is no such place"),
    "a schema that holds itself": ({"items": {"$ref": "#"}}, "may not hold itself"),
    "a definition that holds itself": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
        "may not hold itself"),
    "definitions that hold each other": (
        {"$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"not": {"$ref": "#/$defs/a"}}}},
        "may not hold itself"),
    "a definition that holds itself by another spelling": (
        {"$defs": {"a": {"items": {"$ref": "#/%24defs/a"}}}}, "hold"),
    "a place of its own": ({"properties": {"a": {"$id": "http://x/"}}}, "#/properties/a/$id"),
    "another dialect inside": ({"items": {"$schema": "x"}}, "#/items/$schema"),
    "a dynamic reference": ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
    "items that are all different": (
        {"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems is not taken: "),
    "names that are none": ({"dependentRequired": {"a": [1, "b"]}}, "#/dependentRequired is to be"),
    "names that are no object": ({"dependentRequired": ["a"]}, "#/dependentRequired is to be"),
    "dependencies of two kinds": ({"dependencies": {"a": [1]}}, "write dependentRequired"),
    "what can take for ever": ({"unevaluatedProperties": False}, "#/unevaluatedProperties"),
    "definitions that double each time": (LAUGHS, "more than 2000 schemas"),
    "a long chain": (CHAIN, "too deeply"),
    "a deep schema": (nested(41), "too deeply"),
    "a schema too deep for JSON": (nested(3000), "too deeply"),
    "a long schema": ({"description": "é" * 40_000}, "bytes long"),
    "a wide schema": ({"anyOf": [True] * 2000}, "more than 2000"),
    "a type that does not exist": ({"items": {"type": "strin"}}, "#/items/type = strin"),
    "a type that is a number": ({"type": 5}, "#/type = 5"),
    "properties that are a list": ({"properties": ["a"]}, "#/properties is to be an object"),
    "alternatives that are an object": ({"anyOf": {}}, "#/anyOf is to be a list"),
    "a schema that is a number": ({"items": 5}, "#/items is to be a schema"),
    "required as a truth value": ({"required": True}, "#/required is to be a list"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_a_schema_that_could_do_harm_is_refused_and_the_part_named(schema: Any, says: str) -> None:
    begun = time.process_time()
    with pytest.raises(FormatRefused) as refused:
        check_format(schema)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 500
    assert time.process_time() - begun < 10


# --- how much work an answer is --------------------------------------------------------------

ONE = {"type": "integer"}
LONG = {"a": [1] * 500, "b": ["x" * 100] * 500, "c": {f"k{n}": n for n in range(500)}}
MUCH = {
    "many schemas for each item": ({"items": {"allOf": [{}] * 1900}}, [1] * 500),
    "many alternatives": ({"items": {"anyOf": [{"type": "string"}] * 900}}, [1] * 500),
    "many references": (
        {"items": {"oneOf": [{"$ref": "#/$defs/a"}] * 900}, "$defs": {"a": ONE}}, [1] * 500),
    "a long enum": ({"items": {"enum": list(range(10_000))}}, [-1] * 500),
    "a long constant": ({"items": {"const": "x" * 50_000}}, [-1] * 500),
    "many names": ({"items": {"required": [f"n{n}" for n in range(5000)]}}, [{}] * 500),
    "many names that others need": (
        {"items": {"dependentRequired": {"a": [f"n{n}" for n in range(5000)]}}}, [{"a": 1}] * 500),
    "a long schema that is quoted": ({"items": {"not": {"title": "x" * 60_000}}}, [1] * 500),
    "a long value that is quoted": ({"anyOf": [False] * 1900}, "x" * 1_000_000),
    "many properties that are not there": (
        {"items": {"properties": {f"n{n}": True for n in range(1900)}}}, [{}] * 50_000),
    "all of it at any depth": (
        {"additionalProperties": {"items": {"prefixItems": [{}, {"not": {"if": {"contains": {
            "dependentSchemas": {"a": {"then": {"propertyNames": {"allOf": [{}] * 1500}}}}}}}}]}}},
        {"a": [[1, [{"a": {}, "b": 1}] * 500]]}),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "answer"), MUCH.values(), ids=MUCH.keys())
def test_an_answer_that_is_too_much_work_by_its_schema_is_known_before_it_is_done(
    schema: dict[str, Any], answer: Any
) -> None:
    check_format(schema)
    begun = time.process_time()
    assert work_of_check(schema, answer) > MOST_WORK
    assert time.process_time() - begun < 5


def test_only_what_is_applied_to_a_value_counts() -> None:
    part = {"type": "object", "properties": {f"p{n}": ONE for n in range(10)}, "required": ["p1"]}
    schema = {"type": "array", "items": {"$ref": "#/$defs/part"}, "$defs": {"part": part}}
    check_format(schema)
    assert work_of_check(schema, "a text") == 3
    assert work_of_check(schema, [{"p1": 5}]) == 3 + 2 + 5 + 2
    assert work_of_check(schema, [{f"p{n}": 5 for n in range(10)}] * 4000) < MOST_WORK
    assert work_of_check({"additionalProperties": ONE, "properties": {"a": {}}}, LONG) < 1500

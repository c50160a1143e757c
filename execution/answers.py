"""An answer that is to follow a JSON schema: read and checked, and what to say if it does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from execution.errors import Permanent
from execution.tools.results import NotStorable, storable_result
from runs.formats import FormatRefused, check_format

INSTALL = "pip install -r requirements-agents.txt"
LONGEST_COMPLAINT = 500
LONGEST_QUOTE = 4000
FENCED = re.compile(r"\A```\w*\n(.*)\n```\Z", re.DOTALL)

REPAIR = """{prompt}

Your answer to this was:
{answer}

It cannot be used: {complaint}
Answer again: only JSON, and JSON that follows the schema."""


class InvalidAnswer(Exception):
    """The answer is not what was asked for; the text says why."""


Read = Callable[[str], Any]


def reader(schema: Any, max_bytes: int) -> Read:
    """What reads an answer by the schema, or raises InvalidAnswer; raises Permanent itself."""
    try:
        check_format(schema)
    except FormatRefused as refused:
        raise Permanent(str(refused)) from refused
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.exceptions import best_match
        from referencing import Registry
    except ImportError as missing:
        raise Permanent(
            f"format needs the package jsonschema ({missing}); run: {INSTALL}"
        ) from missing
    # One dialect for all. An empty registry fetches nothing from anywhere.
    plain: Mapping[str, Any] = {key: part for key, part in schema.items() if key != "$schema"}
    try:
        Draft202012Validator.check_schema(plain)
    except SchemaError as wrong:
        raise Permanent(f"format is no JSON schema: {_cut(wrong.message)}") from wrong
    validator = Draft202012Validator(plain, registry=Registry())

    def read(text: str) -> Any:
        value = _parsed(text, max_bytes)
        if (problem := best_match(validator.iter_errors(value))) is not None:
            raise InvalidAnswer(_cut(f"{problem.json_path}: {problem.message}"))
        return value

    return read


def repair_prompt(prompt: str, answer: str, complaint: object) -> str:
    """What to ask the model when its answer could not be read."""
    quoted = answer if len(answer) <= LONGEST_QUOTE else f"{answer[:LONGEST_QUOTE]}…"
    return REPAIR.format(prompt=prompt, answer=quoted, complaint=complaint)


def _parsed(text: str, max_bytes: int) -> Any:
    """The JSON value; models that are only asked to may put it between fences."""
    plain = text.strip()
    if fenced := FENCED.match(plain):
        plain = fenced[1]
    try:
        return storable_result(json.loads(plain, parse_constant=_no_constant), max_bytes)
    except NotStorable as refused:
        raise InvalidAnswer(str(refused)) from refused
    except (ValueError, RecursionError) as failed:
        raise InvalidAnswer(_cut(f"it is no JSON: {failed}")) from failed


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_COMPLAINT else f"{text[:LONGEST_COMPLAINT]}…"

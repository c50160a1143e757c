"""An answer that is to follow a JSON schema: read and checked, and what to say if it does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from execution.errors import Permanent, not_installed
from execution.text import shortened
from execution.tools.results import NotStorable, storable_result
from runs.formats import MOST_WORK, FormatRefused, check_format, work_of_check

MOST_SCHEMAS_KEPT = 32
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
    """What reads an answer by the schema, or raises InvalidAnswer; raises Permanent itself.

    Both may take a second: neither belongs on the thread of an event loop.
    """
    try:
        from jsonschema.exceptions import best_match
    except ImportError as missing:
        raise not_installed("format", "jsonschema", missing) from missing
    try:
        validator = _validator(json.dumps(schema))
    except (FormatRefused, RecursionError) as refused:
        raise Permanent(str(refused)) from refused

    def read(text: str) -> Any:
        value = _parsed(text, max_bytes)
        if work_of_check(validator.schema, value) > MOST_WORK:
            raise InvalidAnswer(
                "it is too long: to check it by this schema would take too much work"
            )
        if (problem := best_match(validator.iter_errors(value))) is not None:
            complaint = f"{problem.json_path}: {problem.message}"
            raise InvalidAnswer(shortened(complaint, LONGEST_COMPLAINT))
        return value

    return read


@lru_cache(maxsize=MOST_SCHEMAS_KEPT)
def _validator(schema_text: str) -> Any:
    """What checks by a schema; raises FormatRefused or Permanent."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry

    schema = json.loads(schema_text)
    check_format(schema)
    # One dialect for all. An empty registry fetches nothing from anywhere.
    plain = {key: part for key, part in schema.items() if key != "$schema"}
    try:
        Draft202012Validator.check_schema(plain)
    except SchemaError as wrong:
        raise Permanent(
            f"format is no JSON schema: {shortened(wrong.message, LONGEST_COMPLAINT)}"
        ) from wrong
    return Draft202012Validator(plain, registry=Registry())


def repair_prompt(prompt: str, answer: str, complaint: object) -> str:
    """What to ask the model when its answer could not be read."""
    quoted = quote(answer)
    return REPAIR.format(prompt=prompt, answer=quoted, complaint=complaint)


def quote(answer: str) -> str:
    """As much of an answer as its model needs to see again."""
    return shortened(answer, LONGEST_QUOTE)


def _parsed(text: str, max_bytes: int) -> Any:
    """The JSON value; models that are only asked to may put it between fences."""
    plain = text.strip()
    if fenced := FENCED.match(plain):
        plain = fenced[1]
    try:
        value = json.loads(plain, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
        return storable_result(value, max_bytes)
    except NotStorable as refused:
        raise InvalidAnswer(str(refused)) from refused
    except (ValueError, RecursionError) as failed:
        raise InvalidAnswer(shortened(f"it is no JSON: {failed}", LONGEST_COMPLAINT)) from failed


def _no_doubles(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object that says two things under one name says nothing."""
    if len(found := dict(members)) < len(members):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")

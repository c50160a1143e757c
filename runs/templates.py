"""Templates: how the results of steps flow into the inputs of the steps that wait for them.

`{{ tool_call.fetch_data.output.rows.0 }}` stands for a result, or for a part of one. A string that
is one template and nothing else becomes the value, with its JSON type; elsewhere strings go in
as they are, and all else as compact JSON. Keys are not templates. What went in is data: it is never
read again, whatever it contains. `{{ "{{" }}` is a literal `{{`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OPENING = "{{"
CLOSING = "}}"
LONGEST_QUOTE = 80  # of a template that makes no sense, in the message

# Tried at each opening only, and without two ways to read the same text: linear in its length.
TEMPLATE = re.compile(
    r"""
    \{\{ [ \t\r\n]*+
    (?:
        (?P<literal> "\{\{" )
      |
        (?P<step> (?: (?:llm_call|tool_call|agent_call|approval)\. )? [A-Za-z0-9_-]{1,64} )
        \.output
        (?P<path> (?: \.[A-Za-z0-9_-]++ )* )
    )
    [ \t\r\n]*+ \}\}
    """,
    re.VERBOSE,
)


class TemplateError(ValueError):
    """A template cannot be read, or not be filled in; the text quotes it."""


class MissingOutput(TemplateError):
    """The result of a step does not have what a template refers to."""


@dataclass(frozen=True)
class Reference:
    """A step by its name as given, and the way into its output."""

    step: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.step, "output", *self.path))


def references(value: Any) -> list[Reference]:
    """Every reference in any string of a JSON value, in order, none twice; or TemplateError."""
    found: dict[Reference, None] = {}
    todo = [value]
    while todo:
        here = todo.pop()
        if isinstance(here, str):
            found.update((part, None) for part in _parts(here) if isinstance(part, Reference))
        elif isinstance(here, Mapping):
            todo += reversed(list(here.values()))
        elif isinstance(here, list | tuple):
            todo += reversed(here)
    return list(found)


def fill(value: Any, outputs: Mapping[Reference, Any], max_bytes: int | None = None) -> Any:
    """A copy of a JSON value with its templates filled in; raises TemplateError.

    `max_bytes` bounds what is put in, all in all: a page of templates can ask for a large result
    very often.
    """
    filling = _Filling(outputs, max_bytes)
    filled = [value]
    todo: list[tuple[Any, Any]] = [(filled, 0)]
    while todo:  # places in our own copies; what was put in is not among them
        place, key = todo.pop()
        here = place[key]
        if isinstance(here, str):
            place[key] = filling.of_text(here)
        elif isinstance(here, Mapping):
            copy = place[key] = dict(here)
            todo += [(copy, name) for name in reversed(copy)]
        elif isinstance(here, list | tuple):
            row = place[key] = list(here)
            todo += [(row, index) for index in reversed(range(len(row)))]
    return filled[0]


# The part of a step's payload in which templates are filled in; of an approval, all of it.
TEMPLATED_PART = {"prompt": "prompt", "tool": "args", "agent": "task"}


def templated(kind: str, payload: Any) -> Any:
    """What of a step's payload may hold templates."""
    if kind == "approval":
        return payload
    part = TEMPLATED_PART.get(kind)
    return payload.get(part) if part and isinstance(payload, Mapping) else None


def filled_text(
    kind: str, payload: Mapping[str, Any], outputs: Mapping[Reference, Any], max_bytes: int
) -> str:
    """The text that a model is asked, in a step of a run: its prompt, or an agent job's task.

    TemplateError if it cannot be filled in, or has more than `max_bytes` then.
    """
    filled = as_text(fill(templated(kind, payload), outputs, max_bytes))
    if (size := len(filled.encode(errors="surrogatepass"))) > max_bytes:
        raise TemplateError(
            f"the {TEMPLATED_PART[kind]}, filled in, is {size} bytes long; "
            f"limits.max_prompt_bytes is {max_bytes}"
        )
    return filled


def as_text(value: Any) -> str:
    """A value as it stands in the middle of a text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as deep:
        raise TemplateError("a value is nested too deeply to be put into a text") from deep


class _Filling:
    """One call of `fill`: looks each reference up once, and counts what it puts in."""

    def __init__(self, outputs: Mapping[Reference, Any], max_bytes: int | None) -> None:
        self._outputs = outputs
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._texts: dict[Reference, tuple[str, int]] = {}

    def of_text(self, text: str) -> Any:
        if OPENING not in text:
            return text
        parts = list(_parts(text))
        if len(parts) == 1 and isinstance(parts[0], Reference):
            self._text(parts[0])  # for its size
            return self._outputs[parts[0]]
        return "".join(part if isinstance(part, str) else self._text(part) for part in parts)

    def _text(self, reference: Reference) -> str:
        if reference not in self._texts:
            if reference not in self._outputs:
                raise MissingOutput(
                    f"{{{{ {reference} }}}}: there is no such thing in that step's output"
                )
            text = as_text(self._outputs[reference])
            self._texts[reference] = text, len(text.encode(errors="surrogatepass"))
        text, size = self._texts[reference]
        self._used_bytes += size
        if self._max_bytes is not None and self._used_bytes > self._max_bytes:
            raise TemplateError(
                f"{{{{ {reference} }}}}: with this, more than {self._max_bytes} bytes are filled in"
            )
        return text


def _parts(text: str) -> Iterator[str | Reference]:
    """The pieces of a text: what stands there literally, and references."""
    start = 0
    while (opening := text.find(OPENING, start)) >= 0:
        if opening > start:
            yield text[start:opening]
        found = TEMPLATE.match(text, opening)
        if found is None:
            raise TemplateError(_complaint(text, opening))
        if found["literal"]:
            yield OPENING
        else:
            yield Reference(found["step"], tuple(found["path"].split(".")[1:]))
        start = found.end()
    if start < len(text):
        yield text[start:]


def _complaint(text: str, opening: int) -> str:
    closing = text.find(CLOSING, opening)
    whole = text[opening:] if closing < 0 else text[opening : closing + len(CLOSING)]
    quoted = whole if len(whole) <= LONGEST_QUOTE else f"{whole[:LONGEST_QUOTE]}…"
    if closing < 0:
        return f'{quoted} has no end; a literal {{{{ is written {{{{ "{{{{" }}}}'
    return (
        f"{quoted} refers to nothing; write {{{{ step.output }}}} or "
        f'{{{{ step.output.part }}}}, and a literal {{{{ as {{{{ "{{{{" }}}}'
    )

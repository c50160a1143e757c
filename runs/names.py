"""What a step's name may be, and what kind of task its name and its input make it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LLM, TOOL, AGENT, APPROVAL = "llm_call", "tool_call", "agent_call", "approval"
PREFIXES = (LLM, TOOL, AGENT, APPROVAL)
KIND_OF_PREFIX = {LLM: "prompt", TOOL: "tool", AGENT: "agent", APPROVAL: "approval"}
# The field of the input that makes a step of that kind what it is.
ESSENCE = {"prompt": "prompt", "tool": "tool", "agent": "task"}
# Of these kinds is a step without a prefix, by that field.
KINDS_WITHOUT_PREFIX = ("prompt", "tool")

PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StepRefused(ValueError):
    """A step cannot be what it says; `field` of the step is to blame."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def kind_of(name: str, given: Mapping[str, Any]) -> str:
    """The kind (prompt, tool, agent, approval) of the step `name` whose input is `given`.

    The prefix says it, else the input does. Raises StepRefused.
    """
    prefix, dot, plain = name.rpartition(".")
    if not PLAIN_NAME.fullmatch(plain) or (dot and prefix not in PREFIXES):
        raise StepRefused(
            "name",
            "it is to be 1 to 64 of A-Z a-z 0-9 _ -, with llm_call. tool_call. agent_call. or "
            "approval. before it, or nothing",
        )
    if not dot:
        return _kind_of_plain(plain, given)
    kind = KIND_OF_PREFIX[prefix]
    _check_agreement(prefix, kind, given)
    return kind


def _kind_of_plain(name: str, given: Mapping[str, Any]) -> str:
    if name in PREFIXES:
        # {{ llm_call.output }} could mean this one, or a step llm_call.output
        raise StepRefused("name", "it is a prefix, and no name by itself; use another one")
    kinds = [kind for kind in KINDS_WITHOUT_PREFIX if ESSENCE[kind] in given]
    if len(kinds) != 1:
        found = (
            "both input.prompt and input.tool" if kinds else "neither input.prompt nor input.tool"
        )
        raise StepRefused(
            "name",
            f"no telling what kind it is: there is {found}; begin the name with llm_call. "
            "tool_call. agent_call. or approval.",
        )
    return kinds[0]


def _check_agreement(prefix: str, kind: str, given: Mapping[str, Any]) -> None:
    for other, field in ESSENCE.items():
        if kind in ESSENCE and other != kind and field in given:
            raise StepRefused(
                f"input.{field}", f"the name says {prefix}, and that takes no {field}"
            )

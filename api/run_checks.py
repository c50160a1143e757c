"""From the body of POST /runs to steps that can be stored, or to all that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from api.models import json_bytes
from api.requests import agent_payload, wrong_with_graph
from api.run_models import AgentInput, PromptInput, RunBody, StepBody, ToolInput
from api.words import MOST_NAMES_TOLD, quoted, some
from config import Limits, Settings
from errors import TooLarge
from queries.runs import NewStep
from runs.formats import FormatRefused, check_format
from runs.graph import CycleFound, topological_order
from runs.names import StepRefused, kind_of
from runs.templates import TEMPLATED_PART, Reference, TemplateError, references, templated

OUTPUTS_OF_APPROVAL = ("approved", "feedback")

Place = tuple[int | str, ...]
Blame = dict[str, Any]  # as pydantic tells of an error, so that all are answered in one shape


def planned_steps(body: RunBody, settings: Settings) -> list[NewStep]:
    """The steps of a run, each behind those it depends on, else in the order of the body.

    RequestValidationError names each field that is to blame; TooLarge the first with too many
    bytes.
    """
    _stop_at(_of_counts(body, settings.limits))
    _check_bytes(body, settings.limits)
    _stop_at(_of_names(body.steps))
    _stop_at([*_of_needs(body.steps), *StepChecks(body.steps, settings).blames()])
    steps = {step.name: step for step in body.steps}
    try:
        order = topological_order({step.name: step.needs for step in body.steps})
    except CycleFound as found:
        _stop_at([_of_cycle(body.steps, found.cycle)])
        raise
    return [_new_step(steps[name], settings) for name in order]


def _new_step(step: StepBody, settings: Settings) -> NewStep:
    kind, route = kind_of(step.name, step.input), "none"
    payload = step.input
    if kind == "prompt":
        payload = {key: value for key, value in payload.items() if value is not None}
        route = payload.pop("route", "auto")
    elif kind == "tool":
        payload = {"args": {}, **payload}
    elif kind == "agent":
        job = AgentInput.model_validate(payload)
        payload, route = agent_payload(job, settings), job.route
    return NewStep(
        name=step.name,
        kind=kind,
        payload=payload,
        needs=step.needs,
        requested_route=route,
        max_retry=step.max_retry,
    )


def _stop_at(blames: Iterable[Blame]) -> None:
    if found := list(blames):
        raise RequestValidationError(found)


def _blame(place: Place, message: str) -> Blame:
    return {
        "type": "value_error",
        "loc": ("body", *place),
        "msg": message,
        "ctx": {"error": message},
    }


# --- the run as a whole ----------------------------------------------------------------------


def _check_bytes(body: RunBody, limits: Limits) -> None:
    if len(body.goal.encode()) > limits.max_goal_bytes:
        most = f"limits.max_goal_bytes ({limits.max_goal_bytes} bytes)"
        raise TooLarge(f"it is longer than {most}", "goal")
    for number, step in enumerate(body.steps):
        if json_bytes(step.input) > limits.max_prompt_bytes:
            most = f"limits.max_prompt_bytes ({limits.max_prompt_bytes} bytes)"
            raise TooLarge(f"it is larger than {most}", f"steps.{number}.input")


def _of_counts(body: RunBody, limits: Limits) -> Iterator[Blame]:
    if len(body.steps) > limits.max_run_steps:
        most = f"at most {limits.max_run_steps} (limits.max_run_steps)"
        yield _blame(("steps",), f"{most}, and these are {len(body.steps)}")
    if (edges := sum(len(step.needs) for step in body.steps)) > limits.max_run_edges:
        most = f"at most {limits.max_run_edges} entries in all dependsOn (limits.max_run_edges)"
        yield _blame(("steps",), f"{most}, and these are {edges}")


def _of_names(steps: list[StepBody]) -> Iterator[Blame]:
    seen: dict[str, int] = {}
    for number, step in enumerate(steps):
        try:
            kind_of(step.name, step.input)
        except StepRefused as refused:
            yield _blame(("steps", number, *refused.field.split(".")), str(refused))
            continue
        first = seen.setdefault(step.name, number)
        if first != number:
            message = f"{step.name} is the name of steps.{first} already"
            yield _blame(("steps", number, "name"), message)


def _of_needs(steps: list[StepBody]) -> Iterator[Blame]:
    names = {step.name for step in steps}
    for number, step in enumerate(steps):
        seen: set[str] = set()
        for entry, name in enumerate(step.needs):
            place = ("steps", number, "dependsOn", entry)
            if name not in names:
                yield _blame(place, f"there is no step {quoted(name)}")
            elif name in seen:
                yield _blame(place, f"{name} stands here twice")
            seen.add(name)


def _of_cycle(steps: list[StepBody], cycle: list[str]) -> Blame:
    number = next(number for number, step in enumerate(steps) if step.name == cycle[0])
    left_out = len(cycle) - MOST_NAMES_TOLD
    if left_out > 0:
        cycle = [*cycle[: MOST_NAMES_TOLD - 1], f"({left_out} more)", cycle[-1]]
    message = f"steps depend on each other in a circle: {' -> '.join(cycle)}"
    return _blame(("steps", number, "dependsOn"), message)


# --- each step -------------------------------------------------------------------------------


class StepChecks:
    """Looks into inputs and their templates; names and kinds are known to be right."""

    def __init__(self, steps: list[StepBody], settings: Settings) -> None:
        self._steps = {step.name: step for step in steps}
        self._settings = settings
        self._kinds = {step.name: kind_of(step.name, step.input) for step in steps}

    def blames(self) -> Iterator[Blame]:
        for number, step in enumerate(self._steps.values()):
            place = ("steps", number, "input")
            kind = self._kinds[step.name]
            of_input = list(self._of_input(place, kind, step.input))
            yield from of_input or self._of_templates(place, kind, step)

    def _of_input(self, place: Place, kind: str, given: dict[str, Any]) -> Iterator[Blame]:
        try:
            if kind == "prompt":
                yield from self._of_prompt(place, PromptInput.model_validate(given))
            elif kind == "tool":
                yield from self._of_tool(place, ToolInput.model_validate(given))
            elif kind == "agent":
                yield from self._of_agent(place, AgentInput.model_validate(given))
        except ValidationError as refused:
            for error in refused.errors(include_url=False):
                yield {**error, "loc": ("body", *place, *error["loc"])}

    def _of_prompt(self, place: Place, given: PromptInput) -> Iterator[Blame]:
        if given.format is not None:
            try:
                check_format(given.format)
            except FormatRefused as refused:
                yield _blame((*place, "format"), str(refused))

    def _of_tool(self, place: Place, given: ToolInput) -> Iterator[Blame]:
        tools = sorted(self._settings.tools)
        if given.tool not in tools:
            message = f"there is no tool {quoted(given.tool)}; there are: {some(tools)}"
            yield _blame((*place, "tool"), message)

    def _of_agent(self, place: Place, given: AgentInput) -> Iterator[Blame]:
        if wrong := wrong_with_graph(given.graph, self._settings):
            yield _blame((*place, "graph"), wrong)

    def _of_templates(self, place: Place, kind: str, step: StepBody) -> Iterator[Blame]:
        place = (*place, *filter(None, [TEMPLATED_PART.get(kind)]))
        try:
            found = references(templated(kind, step.input))
        except TemplateError as refused:
            yield _blame(place, str(refused))
            return
        if len(found) > (most := self._settings.limits.max_step_references):
            limit = f"at most {most} different references (limits.max_step_references)"
            yield _blame(place, f"{limit}, and these are {len(found)}")
            return
        needs = frozenset(step.needs)
        for reference in found:
            if wrong := self._wrong_with(reference, step, needs):
                yield _blame(place, f"{{{{ {quoted(str(reference))} }}}}: {wrong}")

    def _wrong_with(
        self, reference: Reference, step: StepBody, needs: frozenset[str]
    ) -> str | None:
        name = reference.step
        if name not in self._steps:
            return f"there is no step {name}"
        if name not in needs:
            return f"{step.name} does not depend on {name}; put it into dependsOn"
        kind = self._kinds[name]
        if not reference.path:
            return None
        if kind == "prompt" and self._steps[name].input.get("format") is None:
            return f"the output of {name} is a text without parts, unless it is given a format"
        if kind == "approval" and (
            len(reference.path) > 1 or reference.path[0] not in OUTPUTS_OF_APPROVAL
        ):
            return f"the output of {name} has approved and feedback, and no other parts"
        return None

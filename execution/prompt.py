"""A prompt task: a completion from the model behind its route, in the form that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from config import Settings
from execution.answers import InvalidAnswer, Read, reader, repair_prompt
from execution.backends.interface import Backend, Completion
from execution.errors import CallEnded, Failure, Permanent
from execution.text import storable
from execution.tools.threads import in_thread
from queries.leases import ClaimedTask, Outcome
from runs.templates import TemplateError, filled_text


async def run_prompt(
    task: ClaimedTask,
    route: str,
    backend: Backend,
    settings: Settings,
    on_piece: Callable[[str], None],
) -> Outcome:
    """Ask the model behind `route`; raises the errors of execution/errors.py.

    `on_piece` is told each piece of the answer as it comes.
    """
    model = task.payload.get("model") or settings.models.of_route(route)
    if not isinstance(model, str):
        raise Permanent("the model's name is to be a text")
    # Prompts, schemas and answers may be long: what is done with them is not done on the loop's
    # thread.
    prompt, read = await in_thread(
        f"preparation of task {task.task_id}", partial(_prepared, task, settings)
    )
    calls = _Calls(backend, model, on_piece, task.payload.get("format"))
    try:
        result = await _result(calls, prompt, read)
    except CallEnded as ended:
        ended.model = model
        ended.prompt_tokens += calls.prompt_tokens
        ended.completion_tokens += calls.completion_tokens
        raise
    return Outcome(
        "succeeded",
        result=result,
        route=route,
        model=model,
        prompt_tokens=calls.prompt_tokens,
        completion_tokens=calls.completion_tokens,
        cost=settings.cost.of_call(route, calls.prompt_tokens, calls.completion_tokens),
        truncated=calls.truncated,
    )


@dataclass
class _Calls:
    """The calls of one attempt, added up."""

    backend: Backend
    model: str
    on_piece: Callable[[str], None] = field(repr=False)
    schema: Mapping[str, Any] | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated: bool = False

    async def ask(self, prompt: str) -> str:
        answer: Completion = await self.backend.complete(
            self.model, prompt, self.on_piece, self.schema
        )
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.truncated = self.truncated or answer.truncated
        return answer.text


async def _result(calls: _Calls, prompt: str, read: Read | None) -> dict[str, Any]:
    """The answer; one that does not follow its schema is sent back, once."""
    text = await calls.ask(prompt)
    try:
        return await in_thread("check of an answer", partial(_checked, text, read))
    except InvalidAnswer as complaint:
        text = await calls.ask(repair_prompt(prompt, text, complaint))
    try:
        return await in_thread("check of an answer", partial(_checked, text, read))
    except InvalidAnswer as again:
        raise Failure(f"the model's answer does not follow the format: {again}") from again


def _checked(text: str, read: Read | None) -> dict[str, Any]:
    """What is kept of an answer; raises InvalidAnswer."""
    if read is None:
        return {"text": storable(text)}
    return {"text": storable(text), "json": read(text)}


def _prepared(task: ClaimedTask, settings: Settings) -> tuple[str, Read | None]:
    """The prompt, and what reads the answer if it is to follow a schema; raises Permanent."""
    prompt = _prompt_of(task, settings.limits.max_prompt_bytes)
    schema = task.payload.get("format")
    return prompt, None if schema is None else reader(schema, settings.limits.max_result_bytes)


def _prompt_of(task: ClaimedTask, max_bytes: int) -> str:
    """The prompt, in a step with the outputs of others filled in."""
    prompt = task.payload.get("prompt")
    if not isinstance(prompt, str):
        raise Permanent("the task's payload has no prompt; submit it again with one")
    if task.run_id is None:
        return prompt
    try:
        return filled_text(task.kind, task.payload, task.outputs, max_bytes)
    except TemplateError as refused:
        raise Permanent(str(refused)) from refused

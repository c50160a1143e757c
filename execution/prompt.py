"""A prompt task: one completion from the model behind its route."""

from __future__ import annotations

from collections.abc import Callable

from config import Settings
from execution.errors import Failure, Permanent
from execution.ollama import OllamaClient
from execution.text import error_text, storable
from queries.leases import ClaimedTask, Outcome


async def run_prompt(
    task: ClaimedTask,
    route: str,
    client: OllamaClient,
    settings: Settings,
    on_piece: Callable[[str], None],
) -> Outcome:
    """Ask the model behind `route`; raises the errors of execution/errors.py.

    `on_piece` is told each piece of the answer as it comes.
    """
    model = settings.models.of_route(route)
    prompt = task.payload.get("prompt")
    if not isinstance(prompt, str):
        raise Permanent("the task's payload has no prompt; submit it again with one")
    try:
        answer = await client.complete(model, prompt, on_piece)
    except Failure as failed:
        return _failed(failed, route, model, settings)
    return Outcome(
        "succeeded",
        result={"text": storable(answer.text)},
        route=route,
        model=model,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cost=settings.cost.of_call(route, answer.prompt_tokens, answer.completion_tokens),
        truncated=answer.truncated,
    )


def _failed(failed: Failure, route: str, model: str, settings: Settings) -> Outcome:
    """A failure that may have used tokens: those were paid."""
    used = failed.prompt_tokens + failed.completion_tokens
    cost = settings.cost.of_call(route, failed.prompt_tokens, failed.completion_tokens)
    return Outcome(
        "failure",
        error=error_text(failed, settings.limits.max_error_bytes),
        route=route,
        model=model,
        prompt_tokens=failed.prompt_tokens,
        completion_tokens=failed.completion_tokens,
        cost=cost if used else None,
    )

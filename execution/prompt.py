"""A prompt task: one completion from the model behind its route."""

from __future__ import annotations

from config import Settings
from execution.errors import Failure, Permanent
from execution.ollama import OllamaClient
from execution.text import error_text, storable
from queries.leases import ClaimedTask, Outcome


async def run_prompt(
    task: ClaimedTask, route: str, client: OllamaClient, settings: Settings
) -> Outcome:
    """Ask the model; raises the errors of execution/errors.py, Failure without usage excepted."""
    model = settings.models.of_route(route)
    prompt = task.payload.get("prompt")
    if not isinstance(prompt, str):
        raise Permanent("its payload has no text under `prompt`; submit it anew with one")
    try:
        answer = await client.complete(model, prompt)
    except Failure as failed:
        cost = settings.cost.of_call(route, failed.prompt_tokens, failed.completion_tokens)
        return Outcome(
            "failure",
            error=error_text(failed, settings.limits.max_error_bytes),
            route=route,
            model=model,
            prompt_tokens=failed.prompt_tokens,
            completion_tokens=failed.completion_tokens,
            cost=cost if failed.prompt_tokens or failed.completion_tokens else None,
        )
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

"""A prompt task: one completion from the model behind its route."""

from __future__ import annotations

from config import Settings
from execution.errors import Failure
from execution.ollama import OllamaClient
from execution.text import storable
from queries.leases import ClaimedTask, Outcome


async def run_prompt(
    task: ClaimedTask, route: str, client: OllamaClient, settings: Settings
) -> Outcome:
    """Ask the model; raises the errors of execution/errors.py, Failure without usage excepted."""
    model = settings.models.of_route(route)
    try:
        answer = await client.complete(model, task.payload["prompt"])
    except Failure as failed:
        cost = settings.cost.of_call(route, failed.prompt_tokens, failed.completion_tokens)
        return Outcome(
            "failure",
            error=str(failed),
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

"""The hash of a request body is made of what pydantic would write of it, and found without that."""

from __future__ import annotations

from typing import Any

import pytest

from api.models import AgentTask, Batch, PromptTask

COMMON: list[dict[str, Any]] = [
    {},
    {"priority": 9, "delay_seconds": 3, "max_retry": 1, "timeout_seconds": 7, "route": "local"},
    {"delay_seconds": 0.5, "timeout_seconds": 1e-3, "metadata": {}},
    {"metadata": {"a": [1, 2.0, None, True, {"b": "\u20ac"}], "c": 10**30, "d": 4e16}},
]


@pytest.mark.parametrize("fields", COMMON)
@pytest.mark.parametrize("url", [None, "https://example.com/"])
def test_what_is_hashed_is_what_pydantic_writes_but_for_a_callback_that_is_none(
    fields: dict[str, Any], url: str | None
) -> None:
    job = {"require_approval": True, "token_budget": 5, "max_revisions": 0, "graph": "g"}
    bodies = [
        PromptTask(prompt="p", callback_url=url, **fields),
        AgentTask(task="t", callback_url=url, **fields),
        AgentTask(task="t", task_id="name", callback_url=url, **{**fields, **job}),
    ]
    for body in [*bodies, Batch(tasks=bodies)]:
        written = body.model_dump(mode="json")
        for task in written.get("tasks", [written]):
            if url is None:
                del task["callback_url"]
        assert repr(sorted_keys(body.as_hashed())) == repr(sorted_keys(written))


def sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(item) for item in value] if isinstance(value, list) else value

"""From a request that came in to tasks that can be stored, or to a refusal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import Body, Header, Response

from api.models import AgentJob, AgentTask, AnyTask, PromptTask, json_bytes
from api.models import Body as RequestBody
from api.words import quoted, some
from config import Limits, Settings
from db import NewTask, Submitted
from errors import FieldRefused, RequestRefused, TooLarge
from states import Kind

IdempotencyKey = Annotated[
    str | None,
    Header(description="1-255 printable ASCII; the same key and body are carried out once only"),
]


EXAMPLES = {
    "prompt": {
        "summary": "One answer of a model",
        "value": {"prompt": "Write one sentence about durable queues."},
    },
    "agent job": {
        "summary": "A task for the agent team",
        "value": {
            "task": "Write a function that reverses a linked list.",
            "task_id": "report-7",
            "require_approval": True,
            "token_budget": 50_000,
        },
    },
}
TaskOfRequest = Annotated[AnyTask, Body(openapi_examples=EXAMPLES)]


def new_task(body: AnyTask, tenant: str, settings: Settings, **fields: Any) -> NewTask:
    """The task that `body` asks for; `fields` are those of a NewTask that no body has."""
    if isinstance(body, AgentTask):
        fields |= {"payload": agent_payload(body, settings), "name": body.task_id}
    else:
        fields["payload"] = {"prompt": body.prompt}
    return NewTask(
        tenant=tenant,
        kind=Kind.AGENT if isinstance(body, AgentTask) else Kind.PROMPT,
        callback_url=body.callback_url,
        metadata=body.metadata,
        priority=body.priority,
        delay_seconds=body.delay_seconds,
        max_retry=body.max_retry,
        timeout_seconds=body.timeout_seconds,
        requested_route=body.route,
        **fields,
    )


def agent_payload(job: AgentJob, settings: Settings) -> dict[str, Any]:
    """What is stored of an agent job: what settings may change later is decided now."""
    revisions = job.max_revisions
    payload = {
        "task": job.task,
        "graph": job.graph,
        "require_approval": job.require_approval,
        "max_revisions": settings.agents.max_revisions if revisions is None else revisions,
    }
    return payload if job.token_budget is None else {**payload, "token_budget": job.token_budget}


def wrong_with_graph(graph: str, settings: Settings) -> str | None:
    """Why no job can run on that graph; None: it can."""
    graphs = sorted(settings.graphs)
    return (
        None if graph in graphs else f"there is no graph {quoted(graph)}; there are: {some(graphs)}"
    )


def refused_fields(body: AnyTask, settings: Settings) -> Iterator[RequestRefused]:
    """An error for each field that config.toml does not allow."""
    limits = settings.limits
    if isinstance(body, PromptTask):
        yield from _too_long("prompt", body.prompt, limits)
    else:
        yield from _too_long("task", body.task, limits)
        if wrong := wrong_with_graph(body.graph, settings):
            yield FieldRefused("graph", wrong)
    if body.metadata is not None and json_bytes(body.metadata) > limits.max_metadata_bytes:
        most = f"limits.max_metadata_bytes ({limits.max_metadata_bytes} bytes)"
        yield TooLarge(f"it is larger than {most}", "metadata")
    if body.delay_seconds > limits.max_delay_seconds:
        most = f"{limits.max_delay_seconds:.15g} (limits.max_delay_seconds)"
        yield FieldRefused("delay_seconds", f"at most {most}")


def _too_long(field: str, text: str, limits: Limits) -> Iterator[RequestRefused]:
    if len(text.encode()) > limits.max_prompt_bytes:
        most = f"limits.max_prompt_bytes ({limits.max_prompt_bytes} bytes)"
        yield TooLarge(f"it is longer than {most}", field)


def idempotency(scope: str, key: str | None, body: RequestBody) -> dict[str, Any]:
    """The three fields of a NewTask that make a repeated request find what the first has made."""
    if key is None:
        return {}
    if not (1 <= len(key) <= 255 and key.isascii() and key.isprintable()):
        raise RequestRefused("Idempotency-Key is to be 1 to 255 printable ASCII characters")
    digest = canonical_hash(body.as_hashed())
    return {"idempotency_scope": scope, "idempotency_key": key, "request_hash": digest}


# json.dumps would make another for each call.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def canonical_hash(body: Mapping[str, Any]) -> bytes:
    """A digest of a validated request body in which the order of keys does not matter."""
    return hashlib.sha256(_canonical.encode(body).encode()).digest()


def mark_replay(response: Response, submitted: Submitted) -> None:
    """200 and a header instead of 201, when an earlier request had stored it."""
    if submitted.replayed:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"

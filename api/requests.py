"""From a request that came in to tasks that can be stored, or to a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Header, Response
from pydantic import BaseModel

from api.models import PromptTask, json_bytes
from config import Limits
from db import NewTask, Submitted, canonical_hash
from errors import FieldRefused, RequestRefused, TooLarge

IdempotencyKey = Annotated[
    str | None,
    Header(description="1-255 printable ASCII; the same key and body are carried out once only"),
]


def new_task(body: PromptTask, tenant: str, **fields: Any) -> NewTask:
    """The task that `body` asks for; `fields` are those of a NewTask that no body has."""
    return NewTask(
        tenant=tenant,
        kind="prompt",
        payload={"prompt": body.prompt},
        metadata=body.metadata,
        priority=body.priority,
        delay_seconds=body.delay_seconds,
        max_retry=body.max_retry,
        timeout_seconds=body.timeout_seconds,
        requested_route=body.route,
        **fields,
    )


def refused_fields(body: PromptTask, limits: Limits) -> Iterator[RequestRefused]:
    """An error for each of config.toml's limits that is exceeded."""
    if len(body.prompt.encode()) > limits.max_prompt_bytes:
        most = f"limits.max_prompt_bytes ({limits.max_prompt_bytes} bytes)"
        yield TooLarge(f"it is longer than {most}", "prompt")
    if body.metadata is not None and json_bytes(body.metadata) > limits.max_metadata_bytes:
        most = f"limits.max_metadata_bytes ({limits.max_metadata_bytes} bytes)"
        yield TooLarge(f"it is larger than {most}", "metadata")
    if body.delay_seconds > limits.max_delay_seconds:
        most = f"{limits.max_delay_seconds:.15g} (limits.max_delay_seconds)"
        yield FieldRefused("delay_seconds", f"at most {most}")


def idempotency(scope: str, key: str | None, body: BaseModel) -> dict[str, Any]:
    """The three fields of a NewTask that make a repeated request find what the first has made."""
    if key is None:
        return {}
    if not (1 <= len(key) <= 255 and key.isascii() and key.isprintable()):
        raise RequestRefused("Idempotency-Key is to be 1 to 255 printable ASCII characters")
    digest = canonical_hash(body.model_dump(mode="json"))
    return {"idempotency_scope": scope, "idempotency_key": key, "request_hash": digest}


def mark_replay(response: Response, submitted: Submitted) -> None:
    """200 and a header instead of 201, when an earlier request had stored it."""
    if submitted.replayed:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"

"""How a task is shown to whoever asks for it, and to whoever is told of its end: the same JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

from pydantic import BaseModel, Field

from states import Status

Route = Literal["local", "cloud"]


class TaskError(BaseModel):
    """Why the task stands where it stands: the reason of its last transition, and what was said."""

    type: str
    message: str


class Task(BaseModel):
    """The answer to GET /tasks/{id}."""

    task_id: int | str = Field(description="its name if it was given one, else its number")
    status: Status
    result: Any = Field(description='null until final; {"text"} for a prompt')
    id: int
    tenant: str
    kind: str
    error: TaskError | None
    route: Route | None
    model: str | None
    cost: str | None = Field(description="a decimal with 8 places")
    prompt_tokens: int
    completion_tokens: int
    truncated: bool = Field(description="the model server cut the prompt without saying so")
    duration_seconds: float | None = Field(description="of the last attempt")
    retry_count: int
    delivery_count: int
    attempt: int
    priority: int
    run_id: int | None
    step: str | None
    state: Any = Field(None, description="of an agent job, at its newest checkpoint; not in lists")
    waiting_for: str | None
    worker: str | None
    lease_expires_at: str | None
    cancel_requested: bool
    callback_url: str | None = Field(description="who is told of its end")
    metadata: dict[str, Any] | None
    created_at: str
    available_at: str
    started_at: str | None
    finished_at: str | None


SHOWN_AS_STORED = (
    "tenant", "status", "result", "kind", "route", "model", "prompt_tokens", "completion_tokens",
    "truncated", "duration_seconds", "retry_count", "delivery_count", "attempt", "priority",
    "step", "worker", "cancel_requested", "callback_url", "metadata", "waiting_for",
)  # fmt: skip
SHOWN_AS_TIMES = ("lease_expires_at", "created_at", "available_at", "started_at", "finished_at")


def task_view(row: dict[str, Any]) -> Task:
    """A row of tasks as the API shows it."""
    shown = {column: row[column] for column in SHOWN_AS_STORED}
    shown |= {column: iso_utc(row[column]) for column in SHOWN_AS_TIMES}
    shown |= {
        "id": row["task_id"],
        "task_id": row["name"] or row["task_id"],
        "run_id": row["parent_id"],
        "cost": money(row["cost"]),
        "error": task_error(row),
        "state": job_state(row),
    }
    return Task(**shown)


def job_state(row: dict[str, Any]) -> dict[str, Any] | None:
    """Where an agent job stands; None: before its first checkpoint, and in lists."""
    asks = approval(row)
    if row.get("job_state") is None and asks is None:
        return None
    return {
        **(row["job_state"] or {}),
        "next": [] if Status(row["status"]).is_final else row["next_nodes"] or [],
        "prompt_tokens": row["prompt_tokens"],
        "completion_tokens": row["completion_tokens"],
        "cost": money(row["cost"]),
        "approval": asks,
    }


def approval(row: dict[str, Any]) -> dict[str, Any] | None:
    """What an agent job asks a person; None: nothing now."""
    gate = row.get("gate")
    if gate is None or row["status"] != Status.AWAITING_APPROVAL:
        return None
    return {"artefact": gate["artefact"], "asks": gate.get("asks")}


def task_json(row: dict[str, Any]) -> bytes:
    """The body of GET /tasks/{id}, byte for byte, for a row of tasks."""
    return task_view(row).model_dump_json().encode()


def task_error(row: dict[str, Any]) -> TaskError | None:
    """Why the task failed, or why it is to be tried again."""
    tells_of_it = row["status"] == Status.FAILED or row["reason"] in ("retry", "outage")
    if row["last_error"] is None or not tells_of_it:
        return None
    return TaskError(type=row["reason"], message=row["last_error"])


def iso_utc(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def money(amount: Decimal | None) -> str | None:
    return None if amount is None else f"{amount:.8f}"

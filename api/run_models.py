"""What requests and answers about runs look like."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from api.models import (
    AgentJob,
    Body,
    Json,
    Prompt,
    TaskError,
    Text,
    few_items,
    iso_utc,
    not_blank,
    task_error,
)
from states import Status
from views import approval

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")

LONGEST_NAME = 100  # far beyond any that a step may have

RunStatus = Literal["RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]


def model_name(text: str) -> str:
    if not MODEL_NAME.fullmatch(text):
        raise ValueError("it is no name of a model, such as llama3.2:latest")
    return text


NameOfStep = Annotated[Text, Field(max_length=LONGEST_NAME)]


class StepBody(Body):
    """A step of the body of POST /runs."""

    name: Text = Field(examples=["tool_call.fetch_data"])
    input: Json = Field({}, examples=[{"tool": "fetch_data"}])
    needs: Annotated[list[NameOfStep], BeforeValidator(few_items)] = Field(
        [], alias="dependsOn", description="names of the steps that are to succeed before"
    )
    max_retry: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None


class RunBody(Body):
    """The body of POST /runs."""

    goal: Annotated[Text, AfterValidator(not_blank)] = Field(
        examples=["Research and summarize a topic"]
    )
    steps: Annotated[list[StepBody], BeforeValidator(few_items), Field(min_length=1)]


class PromptInput(Body):
    """The input of a step llm_call."""

    prompt: Prompt
    model: Annotated[str, Field(strict=True), AfterValidator(model_name)] | None = None
    route: Literal["auto", "local", "cloud"] = "auto"
    format: dict[str, Any] | None = None


class AgentInput(AgentJob):
    """The input of a step agent_call."""

    route: Literal["auto", "local", "cloud"] = "auto"


class ToolInput(Body):
    """The input of a step tool_call."""

    tool: Annotated[str, Field(strict=True, min_length=1)]
    args: dict[str, Any] = Field({})


# --- answers ---------------------------------------------------------------------------------


class RunStep(BaseModel):
    """A step as GET /runs/{id} shows it."""

    name: str
    task_id: int
    kind: str
    status: Status
    needs: list[str] = Field(serialization_alias="dependsOn")
    input: Any
    result: Any
    result_left_out: bool = Field(description="too much for this answer: see GET /tasks/{id}")
    approval: Any = Field(description='{"artefact", "asks"} while an agent job waits for a person')
    error: TaskError | None
    retry_count: int
    delivery_count: int
    attempt: int
    worker: str | None
    duration_seconds: float | None = Field(description="of the last attempt")
    waiting_for: str | None
    started_at: str | None
    finished_at: str | None


class RunHead(BaseModel):
    """A run without its steps."""

    run_id: int
    goal: str
    status: RunStatus
    created_at: str
    finished_at: str | None


class Run(RunHead):
    """The answer to GET /runs/{id}: a run and its steps, each behind those it depends on."""

    tenant: str
    cancel_requested: bool
    steps: list[RunStep]


class SubmittedRun(RunHead):
    """The answer to POST /runs."""

    watch: str = Field(description="WebSocket: a snapshot, then every transition")
    tenant: str
    cancel_requested: bool
    steps: list[RunStep]


class RunSummary(RunHead):
    """A run in a list."""

    tenant: str
    steps_by_status: dict[Status, int]


class RunList(BaseModel):
    """A page of runs, newest first."""

    runs: list[RunSummary]
    next_cursor: str | None = Field(description="the next page's ?cursor=; null: this is the last")


class RunChanged(BaseModel):
    """Which run, and where it stands."""

    run_id: int
    status: RunStatus


STEP_AS_STORED = (
    "task_id", "kind", "status", "needs", "result", "result_left_out", "retry_count",
    "delivery_count", "attempt", "worker", "duration_seconds", "waiting_for",
)  # fmt: skip


def run_view(row: dict[str, Any]) -> Run:
    """A row of queries.runs.get_run as the API shows it."""
    columns = ("tenant", "goal", "status", "cancel_requested")
    return Run(
        run_id=row["task_id"],
        steps=[step_view(step) for step in row["steps"]],
        **{column: row[column] for column in columns},
        **_times(row, "created_at", "finished_at"),
    )


def step_view(row: dict[str, Any]) -> RunStep:
    return RunStep(
        name=row["step"],
        input=row["payload"],
        error=task_error(row),
        approval=approval(row),
        **{column: row[column] for column in STEP_AS_STORED},
        **_times(row, "started_at", "finished_at"),
    )


def summary_view(row: dict[str, Any]) -> RunSummary:
    """A row of queries.runs.list_runs as the API shows it."""
    columns = ("tenant", "goal", "status", "steps_by_status")
    return RunSummary(
        run_id=row["task_id"],
        **{column: row[column] for column in columns},
        **_times(row, "created_at", "finished_at"),
    )


def _times(row: dict[str, Any], *columns: str) -> dict[str, Any]:
    return {column: iso_utc(row[column]) for column in columns}

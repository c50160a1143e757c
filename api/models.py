"""What requests and answers look like."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    model_validator,
)

from config import LONGEST_LIST, MOST_REVISIONS, TEAM
from states import Status
from views import Task as Task
from views import TaskError as TaskError
from views import iso_utc as iso_utc
from views import money as money
from views import task_error as task_error
from views import task_view as task_view

# pydantic can write no more than about 250 levels into an answer.
DEEPEST_JSON = 100

MOST_FIELDS = 50
MOST_TOKENS = 10**12
NAME_OF_TASK = re.compile(r"[A-Za-z0-9_-]{1,64}")


def storable_text(text: str) -> str:
    """Refuse what a text column cannot hold."""
    if "\0" in text:
        raise ValueError("the character NUL (\\u0000) cannot be stored; leave it out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair cannot be stored; leave it out") from None
    return text


def storable_json(value: Any) -> Any:
    """Refuse what a jsonb column cannot hold, or an answer cannot show, at any depth."""
    _look_into(value, depth=0)
    return value


def _look_into(value: Any, depth: int) -> None:
    if depth > DEEPEST_JSON:
        raise ValueError(f"it is nested deeper than {DEEPEST_JSON} levels")
    if isinstance(value, str):
        storable_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("NaN and Infinity are no JSON; use null")
    elif isinstance(value, dict):
        for key, item in value.items():
            storable_text(key)
            _look_into(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _look_into(item, depth + 1)


def not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty; say what is to be done")
    return text


def name_of_task(text: str) -> str:
    if not NAME_OF_TASK.fullmatch(text) or text.isdigit():
        raise ValueError("it is to be 1 to 64 of A-Z a-z 0-9 _ -, and not only digits")
    return text


def few_items(value: Any) -> Any:
    """Refuse a list far beyond any limit by its length, before its items are looked at."""
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        raise ValueError(f"it has {len(value)} items; no list here has more than {LONGEST_LIST}")
    return value


Text = Annotated[str, Field(strict=True), AfterValidator(storable_text)]
Prompt = Annotated[Text, AfterValidator(not_blank)]
NameOfTask = Annotated[str, Field(strict=True), AfterValidator(name_of_task)]
Json = Annotated[dict[str, Any], AfterValidator(storable_json)]


class Body(BaseModel):
    """What all request bodies share: an unknown field is refused, and so is an army of them."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"it has {len(value)} fields; none has more than {MOST_FIELDS}")
        return value

    def as_hashed(self) -> dict[str, Any]:
        """What the hash beside an Idempotency-Key is made of."""
        return self.model_dump(mode="json")


class TaskBody(Body):
    """What a prompt and an agent job have in common."""

    priority: Annotated[int, Field(strict=True, ge=0, le=9)] = 0
    delay_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0
    max_retry: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    timeout_seconds: (
        Annotated[float, Field(strict=True, gt=0, le=604_800, allow_inf_nan=False)] | None
    ) = None
    route: Literal["auto", "local", "cloud"] = "auto"
    metadata: Json | None = None
    callback_url: Text | None = Field(None, description="who is told of its end")

    def as_hashed(self) -> dict[str, Any]:
        """Its fields, which are JSON already. Without a callback_url, a body has the hash that it
        had before there were any."""
        fields = dict(vars(self), delay_seconds=float(self.delay_seconds))
        if self.callback_url is None:
            del fields["callback_url"]
        return fields


class PromptTask(TaskBody):
    """The body of POST /tasks for one answer of a model."""

    prompt: Prompt = Field(examples=["Write one sentence about durable queues."])


class AgentJob(Body):
    """What makes an agent job, as a task of its own or as a step of a run."""

    task: Prompt = Field(examples=["Write a function that reverses a linked list."])
    require_approval: StrictBool = Field(
        False, description="a person approves what the coder wrote, before the review"
    )
    token_budget: Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)] | None = None
    max_revisions: Annotated[int, Field(strict=True, ge=0, le=MOST_REVISIONS)] | None = Field(
        None, description="null: agents.max_revisions of config.toml"
    )
    graph: Text = Field(TEAM, description="one of [graphs] of config.toml")


class AgentTask(AgentJob, TaskBody):
    """The body of POST /tasks for an agent job."""

    task_id: NameOfTask | None = Field(
        None, description="your own id for it: one task at a time bears it", examples=["report-7"]
    )


# Where pydantic tells of an error it names which of the two bodies it took it for.
PROMPT_TASK, AGENT_TASK = "prompt task", "agent job"


def which_body(given: Any) -> str:
    is_job = isinstance(given, AgentTask) or (isinstance(given, dict) and "task" in given)
    return AGENT_TASK if is_job else PROMPT_TASK


AnyTask = Annotated[
    Annotated[PromptTask, Tag(PROMPT_TASK)] | Annotated[AgentTask, Tag(AGENT_TASK)],
    Discriminator(which_body),
]


class Batch(Body):
    """The body of POST /tasks/batch."""

    tasks: Annotated[list[AnyTask], BeforeValidator(few_items), Field(min_length=1)]

    def as_hashed(self) -> dict[str, Any]:
        return {"tasks": [task.as_hashed() for task in self.tasks]}


class Approval(Body):
    """The body of POST /tasks/{id}/approve; without one the answer is yes."""

    approved: StrictBool = True
    feedback: Text | None = None
    artefact: Text | None = Field(
        None, description="of an agent job, state.approval.artefact: what the decision is about"
    )


# --- answers ---------------------------------------------------------------------------------


class TaskStatus(BaseModel):
    """Which task, and where it stands."""

    task_id: int | str
    status: Status


class BatchStatus(BaseModel):
    """The answer to POST /tasks/batch, in the order of the request."""

    tasks: list[TaskStatus]


class Problem(BaseModel):
    """Every answer that is no success."""

    error: str
    detail: Any = None


class TaskList(BaseModel):
    """A page of tasks, newest first."""

    tasks: list[Task]
    next_cursor: str | None = Field(description="the next page's ?cursor=; null: this is the last")


class Transition(BaseModel):
    """One entry of the audit log."""

    id: int
    task_id: int
    run_id: int | None
    step: str | None
    from_status: Status | None = Field(serialization_alias="from", description="null at creation")
    to_status: Status = Field(serialization_alias="to")
    reason: str
    at: str
    worker: str | None
    attempt: int
    detail: dict[str, Any]
    cursor: str


class Checkpoint(BaseModel):
    """Where an agent job stood at a moment."""

    id: str
    at: str
    attempt: int
    nodes: list[str] = Field(description="that ran before it")
    next: list[str] = Field(description="that run behind it; none: the job has ended")
    summary: str
    prompt_tokens: int = Field(description="of the job, up to here")
    completion_tokens: int


class CheckpointList(BaseModel):
    """A page of an agent job's checkpoints, newest first."""

    checkpoints: list[Checkpoint]
    next_cursor: str | None = Field(description="the next page's ?cursor=; null: this is the last")


class TransitionList(BaseModel):
    """A page of a task's audit log, oldest first."""

    audit: list[Transition]
    next_cursor: str | None


class WorkerSeen(BaseModel):
    """A worker, as it reported itself with its last heartbeat."""

    name: str
    concurrency: int
    running: int
    paused_routes: dict[str, str]
    started_at: str
    seen_at: str


class Stats(BaseModel):
    """The answer to GET /stats."""

    depth: int = Field(description="tasks that are due and wait for a worker")
    delayed: int
    running: int
    dead_letters: int
    paused_routes: dict[str, str] = Field(description='{"local": "why"}')
    workers: list[WorkerSeen] | None = Field(description="null: a tenant is told of none")


class Metrics(BaseModel):
    """The answer to GET /metrics."""

    by_status: dict[str, int]
    avg_retry: float
    reclaimed_count: int
    avg_duration_seconds: float | None
    cost_by_route: dict[str, str]


def transition_view(row: dict[str, Any], cursor: str) -> Transition:
    """A row of audit_log as the API shows it: while its steps are under way, a run is RUNNING."""
    shown = {**row, "at": iso_utc(row["at"]), "cursor": cursor}
    if row["task_id"] == row["run_id"]:
        for column in ("from_status", "to_status"):
            shown[column] = Status.RUNNING if row[column] == Status.BLOCKED else row[column]
    return Transition(**shown)


def worker_view(row: dict[str, Any]) -> WorkerSeen:
    """A row of workers as the API shows it."""
    times = {column: iso_utc(row[column]) for column in ("started_at", "seen_at")}
    return WorkerSeen(**{**row, **times})


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_bytes(value: Any) -> int:
    """The size of a JSON value as it would be sent."""
    return len(_compact.encode(value).encode())

"""What a user does to tasks: submit many at once, cancel, approve, requeue."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool

from api.callbacks import check_callback_urls
from api.models import AgentTask, Approval, Batch, BatchStatus, Problem, TaskStatus
from api.requests import IdempotencyKey, idempotency, mark_replay, new_task, refused_fields
from api.services import ApiServices, Services
from api.tenants import Tenant
from config import Limits, Settings
from db import NewTask, Submitted
from errors import FieldRefused, NameInUse, TooLarge
from queries.operations import (
    approve_task,
    cancel_task,
    requeue_task,
    submit_batch,
)
from states import Status

router = APIRouter(
    tags=["tasks"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 409, 422, 429, 503)},
)


@router.post("/tasks/batch", status_code=201, responses={413: {"model": Problem}})
async def post_batch(
    body: Batch,
    response: Response,
    services: Services,
    tenant: Tenant,
    idempotency_key: IdempotencyKey = None,
) -> BatchStatus:
    """Submit up to limits.max_batch_tasks tasks: all of them are stored, or none is."""
    stored = await run_in_threadpool(store_batch, body, tenant, idempotency_key, services)
    mark_replay(response, stored[0])
    shown = [{"task_id": one.shown_as, "status": one.status} for one in stored]
    return BatchStatus.model_validate({"tasks": shown})


@router.delete("/tasks/{task_id}", responses={202: {"model": TaskStatus}})
def delete_task(task_id: str, response: Response, services: Services, tenant: Tenant) -> TaskStatus:
    """Cancel a task: 200 if it is CANCELLED now, 202 while its worker still has to stop it."""
    cancelled = services.database.run(cancel_task, tenant, task_id)
    if cancelled.status is Status.RUNNING:
        response.status_code = 202
    return TaskStatus(task_id=cancelled.task_id, status=cancelled.status)


@router.post("/tasks/{task_id}/approve", responses={413: {"model": Problem}})
def post_approval(
    task_id: str, services: Services, tenant: Tenant, body: Approval | None = None
) -> TaskStatus:
    """Decide what waits for a person: yes, unless the body says no.

    With the `artefact` that GET has shown, the decision holds for that one only, or is a 409.
    """
    decision = body or Approval()
    check_approval(decision, services.settings.limits)
    decided = services.database.run(
        approve_task, tenant, task_id, decision.approved, decision.feedback, decision.artefact
    )
    return TaskStatus(task_id=decided.task_id, status=decided.status)


@router.post("/tasks/{task_id}/requeue")
def post_requeue(task_id: str, services: Services, tenant: Tenant) -> TaskStatus:
    """Run a FAILED task again, now and with fresh counters; ask again where the answer was no."""
    requeued = services.database.run(requeue_task, tenant, task_id)
    return TaskStatus(task_id=requeued.task_id, status=requeued.status)


# --- helpers of the routes above -------------------------------------------------------------


def store_batch(
    body: Batch, tenant: str, key: str | None, services: ApiServices
) -> list[Submitted]:
    tasks = batch_tasks(body, tenant, key, services.settings)
    urls = {f"tasks.{index}.callback_url": task.callback_url for index, task in enumerate(tasks)}
    check_callback_urls(urls, tenant, services)
    services.quotas.add_tasks(tenant, len(tasks))
    try:
        return services.database.run(submit_batch, tasks)
    except NameInUse as taken:
        index = next(index for index, task in enumerate(tasks) if task.name == taken.name)
        taken.field = f"tasks.{index}.task_id"
        raise


def batch_tasks(body: Batch, tenant: str, key: str | None, settings: Settings) -> list[NewTask]:
    """The tasks of a batch, the first with the key of all; a refusal names item and field."""
    limits = settings.limits
    if len(body.tasks) > limits.max_batch_tasks:
        most = f"at most {limits.max_batch_tasks} (limits.max_batch_tasks)"
        raise FieldRefused("tasks", f"{most}, and these are {len(body.tasks)}")
    named: dict[str, int] = {}
    for index, item in enumerate(body.tasks):
        for refused in refused_fields(item, settings):
            refused.field = f"tasks.{index}.{refused.field}"
            raise refused
        if isinstance(item, AgentTask) and item.task_id is not None:
            before = named.setdefault(item.task_id, index)
            if before != index:
                message = f"{item.task_id} is the name of tasks.{before} already"
                raise FieldRefused(f"tasks.{index}.task_id", message)
    first, *rest = body.tasks
    return [
        new_task(first, tenant, settings, **idempotency("batch", key, body)),
        *(new_task(item, tenant, settings) for item in rest),
    ]


def check_approval(decision: Approval, limits: Limits) -> None:
    """Refuse what no task that waits can take."""
    if len((decision.feedback or "").encode()) > limits.max_metadata_bytes:
        most = f"limits.max_metadata_bytes ({limits.max_metadata_bytes} bytes)"
        raise TooLarge(f"it is longer than {most}", "feedback")

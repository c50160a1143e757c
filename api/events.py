"""Live events of a task: of a lone one, or of one step of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool

import db
from api.event_stream import After, LastEventId, events_of
from api.feeds import Subject
from api.models import Problem, task_view
from api.services import ApiServices, Services
from api.tenants import Key, WatchingTenant
from queries.operations import find_task

router = APIRouter(
    tags=["tasks"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 422, 429, 503)},
)


@router.get("/tasks/{task_id}/events", response_class=Response, responses={204: {}})
async def get_task_events(
    task_id: str,
    services: Services,
    key: Key,
    tenant: WatchingTenant,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Server-sent events: a snapshot, then each transition once, then `end`.

    204 when the task is over and nothing newer than the cursor is to be told.
    """
    subject = await find_subject(services, tenant, task_id)
    return await events_of(services, subject, last_event_id or after, key)


# --- helpers of the route above --------------------------------------------------------------


async def find_subject(services: ApiServices, tenant: str | None, task_id: str) -> Subject:
    """The tenant's task of that number or name; NotFound otherwise."""
    row = await run_in_threadpool(services.database.run, db.get_task, tenant, task_id)
    number = row["task_id"]
    present_seconds = services.settings.worker.lease_seconds
    return Subject(
        root_id=row["parent_id"] or number,
        task_id=number,
        read_state=partial(read_task, tenant, number, present_seconds),
        read_status=partial(read_status, tenant, number),
    )


def read_task(tenant: str | None, number: int, present_seconds: float, conn: db.Connection) -> Any:
    task = task_view(db.get_task(conn, tenant, str(number), present_seconds))
    return task.model_dump(mode="json")


def read_status(tenant: str | None, number: int, conn: db.Connection) -> str:
    return str(find_task(conn, tenant, str(number))["status"])

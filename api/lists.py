"""Lists of tasks, dead letters and transitions, page by page."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from api.models import Problem, TaskList, TransitionList, task_view, transition_view
from api.services import Services
from api.tenants import AnyTenant
from db import LARGEST_ID
from errors import FieldRefused
from queries.listings import Page, list_dead_letters, list_tasks, list_transitions
from queries.operations import find_task
from states import Kind, Status

router = APIRouter(
    tags=["tasks"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 422, 429, 503)},
)

WRONG_CURSOR = "no page gave this one out; take next_cursor as it is, or leave it out"

Limit = Annotated[int, Query(ge=1, le=200, description="the most entries of one page")]


def number_in_cursor(
    cursor: Annotated[str | None, Query(description="next_cursor of the page before")] = None,
) -> int | None:
    """The number on which the page before ended; FieldRefused if no page has given this out."""
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    if not (text.isdigit() and len(text) < 20 and 0 < int(text) <= LARGEST_ID):
        raise FieldRefused("cursor", WRONG_CURSOR)
    return int(text)


Cursor = Annotated[int | None, Depends(number_in_cursor)]


@router.get("/tasks")
def get_tasks(
    services: Services,
    tenant: AnyTenant,
    cursor: Cursor,
    status: Status | None = None,
    kind: Kind | None = None,
    limit: Limit = 50,
) -> TaskList:
    """The tenant's tasks, newest first."""
    page = services.database.run(
        list_tasks,
        tenant,
        status=status,
        kind=kind,
        limit=limit,
        before=cursor,
        present_seconds=services.settings.worker.lease_seconds,
    )
    return page_of_tasks(page)


@router.get("/dead-letters")
def get_dead_letters(
    services: Services, tenant: AnyTenant, cursor: Cursor, limit: Limit = 50
) -> TaskList:
    """The tasks that FAILED, newest first, each with its error."""
    page = services.database.run(
        list_dead_letters,
        tenant,
        limit=limit,
        before=cursor,
        present_seconds=services.settings.worker.lease_seconds,
    )
    return page_of_tasks(page)


@router.get("/tasks/{task_id}/audit")
def get_task_audit(
    task_id: str, services: Services, tenant: AnyTenant, cursor: Cursor, limit: Limit = 50
) -> TransitionList:
    """Every transition of a task, oldest first."""
    task = services.database.run(find_task, tenant, task_id)
    page = services.database.run(list_transitions, task["task_id"], limit=limit, after=cursor)
    return TransitionList(
        audit=[transition_view(row, cursor_of(row["id"])) for row in page.rows],
        next_cursor=next_cursor(page),
    )


# --- helpers of the routes above -------------------------------------------------------------


def page_of_tasks(page: Page) -> TaskList:
    return TaskList(tasks=[task_view(row) for row in page.rows], next_cursor=next_cursor(page))


def next_cursor(page: Page) -> str | None:
    return None if page.next_after is None else cursor_of(page.next_after)


def cursor_of(number: int) -> str:
    """Opaque to clients, so that a later version may put more into it."""
    return base64.urlsafe_b64encode(str(number).encode()).decode()

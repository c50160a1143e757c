"""Live events of a task."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.concurrency import run_in_threadpool

import db
from api.event_stream import EventStreamResponse
from api.feeds import StreamEvent
from api.models import Problem, task_view
from api.services import ApiServices, Services
from api.tenants import Tenant
from queries import events
from queries.events import Position
from states import Status

router = APIRouter(
    tags=["tasks"], responses={status: {"model": Problem} for status in (404, 422, 503)}
)


@router.get("/tasks/{task_id}/events", response_class=Response, responses={204: {}})
async def get_task_events(
    task_id: str,
    services: Services,
    tenant: Tenant,
    after: Annotated[str | None, Query(description="resume behind this cursor")] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Server-sent events: a snapshot, then each transition once, then `end`.

    204 when the task is over and nothing newer than the cursor is to be told.
    """
    cursor = last_event_id or after
    position = events.position_of(cursor) if cursor else None
    row, _ = await run_in_threadpool(services.database.run, read_task, tenant, task_id)
    if position and Status(row["status"]).is_final and await _is_all_told(services, row, position):
        return Response(status_code=204)
    return EventStreamResponse(follow_task(services, tenant, row, position))


def follow_task(
    services: ApiServices, tenant: str, row: db.Row, position: Position | None
) -> AsyncGenerator[StreamEvent, None]:
    number = row["task_id"]

    def read_state(conn: db.Connection) -> tuple[dict[str, Any], Position]:
        fresh, present = read_task(conn, tenant, str(number))
        return task_view(fresh).model_dump(mode="json"), present

    only_task = number if row["parent_id"] else None
    return services.feeds.follow(row["parent_id"] or number, position, read_state, only_task)


def read_task(conn: db.Connection, tenant: str, reference: str) -> tuple[db.Row, Position]:
    """A task and the place in the stream of events at which it stands so, from one snapshot."""
    with db.transaction(conn, "ISOLATION LEVEL REPEATABLE READ"):
        return db.get_task(conn, tenant, reference), events.here(conn)


async def _is_all_told(services: ApiServices, row: db.Row, position: Position) -> bool:
    root_id = row["parent_id"] or row["task_id"]
    batch = await run_in_threadpool(services.database.run, events.read_events, root_id, position)
    return batch is not None and not any(
        event["task_id"] == row["task_id"] for event, _ in batch.events
    )

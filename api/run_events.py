"""Live events of a run and all its steps, as server-sent events and over a WebSocket."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Response, WebSocket
from fastapi.concurrency import run_in_threadpool

import db
from api.event_stream import After, LastEventId, events_of
from api.feeds import Subject
from api.models import Problem
from api.origins import OTHER_PAGE, is_of_our_page
from api.problems import problem
from api.run_models import run_view
from api.services import ApiServices, Services
from api.tenants import Key, SocketTenant, WatchingTenant
from api.web_socket import EventSocket
from queries import events, runs

router = APIRouter(
    tags=["runs"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 422, 429, 503)},
)


@router.get("/runs/{run_id}/events", response_class=Response, responses={204: {}})
async def get_run_events(
    run_id: str,
    services: Services,
    key: Key,
    tenant: WatchingTenant,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Server-sent events: a snapshot, each transition of the run and its steps once, then `end`.

    204 when the run is over and nothing newer than the cursor is to be told. A WebSocket at the
    same address brings the same, as frames `{"event": "snapshot", "data": {}}`; it resumes by
    `after`.
    """
    subject = await find_subject(services, tenant, run_id)
    return await events_of(services, subject, last_event_id or after, key)


@router.websocket("/runs/{run_id}/events")
async def watch_run(
    websocket: WebSocket, run_id: str, key: Key, tenant: SocketTenant, after: After = None
) -> None:
    """The same over a WebSocket; what keeps it from opening is an HTTP answer."""
    if not is_of_our_page(websocket.headers):
        await websocket.send_denial_response(problem(403, OTHER_PAGE))
        return
    services: ApiServices = websocket.state.services
    subject = await find_subject(services, tenant, run_id)
    position = events.position_of(after) if after else None
    feeds = services.feeds
    told = services.keys.while_admitted(feeds.follow(subject, position), key)
    await EventSocket(websocket, told, feeds.stopping).serve()


# --- helpers of the routes above -------------------------------------------------------------


async def find_subject(services: ApiServices, tenant: str | None, run_id: str) -> Subject:
    """The tenant's run; NotFound otherwise."""
    run = await run_in_threadpool(services.database.run, runs.find_run, tenant, run_id)
    number = run["task_id"]
    present_seconds = services.settings.worker.lease_seconds
    return Subject(
        root_id=number,
        task_id=number,
        read_state=partial(read_run, tenant, number, present_seconds),
        read_status=partial(read_status, tenant, number),
    )


def read_run(tenant: str | None, number: int, present_seconds: float, conn: db.Connection) -> Any:
    run = run_view(runs.get_run(conn, tenant, str(number), present_seconds))
    return run.model_dump(mode="json", by_alias=True)


def read_status(tenant: str | None, number: int, conn: db.Connection) -> str:
    return str(runs.find_run(conn, tenant, str(number))["status"])

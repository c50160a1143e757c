"""The HTTP API: uvicorn main:app

POST /tasks, GET /tasks/{id} and GET /metrics are here; further routes and everything they share
are in api/. A route checks and answers; what is stored and found is decided in db.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import TypeAdapter

import db
from api import (
    checkpoints,
    events,
    figures,
    health,
    lists,
    operations,
    page,
    run_events,
    runs,
    tickets,
)
from api.bodies import BodyLimit
from api.callbacks import check_callback_url
from api.changes import Changes
from api.connections import TransportInScope, cared_for
from api.database import Database
from api.direct import Direct, DirectRoute
from api.feeds import Feeds
from api.gate import Gate
from api.keys import Keys
from api.models import AnyTask, Batch, Metrics, Problem, Task, TaskStatus, task_view
from api.origins import OwnPagesOnly
from api.problems import handle_problems
from api.quotas import Quotas
from api.requests import (
    IdempotencyKey,
    TaskOfRequest,
    idempotency,
    mark_replay,
    new_task,
    refused_fields,
)
from api.services import ApiServices, Services
from api.submission import SubmitWriter
from api.tenants import AnyTenant, CountedTenant, Key, Tenant
from config import ConfigError, Settings, load_config
from errors import FieldRefused, NameInUse
from logs import quote_no_rows
from states import Status

# A waiting GET reads its task again after so long, whether or not it was told of a change.
LONGEST_BLIND_WAIT_SECONDS = 2.0

Accept = Annotated[str | None, Header()]

router = APIRouter(
    tags=["tasks"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 413, 422, 429, 503)},
)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; raises ConfigError when the settings cannot be used."""
    settings = settings or load_config()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, ApiServices]]:
        quote_no_rows()
        services = open_services(settings)
        try:
            with cared_for(services.feeds.stop):
                yield {"services": services}
        finally:
            await run_in_threadpool(close_services, services)

    app = FastAPI(title="Agent Orchestrator", lifespan=lifespan)
    limits = settings.limits
    app.add_middleware(
        Direct,
        routes={
            "/tasks": DirectRoute(submit_task, TypeAdapter(AnyTask)),
            "/tasks/batch": DirectRoute(operations.post_batch, TypeAdapter(Batch)),
        },
    )
    app.add_middleware(
        BodyLimit, max_bytes=limits.max_body_bytes, max_values=limits.max_body_values
    )
    app.add_middleware(Gate)
    app.add_middleware(OwnPagesOnly)
    app.add_middleware(TransportInScope)
    handle_problems(app)
    app.include_router(page.router)
    app.include_router(health.router)
    app.include_router(figures.router)
    app.include_router(operations.router)
    app.include_router(lists.router)
    app.include_router(checkpoints.router)
    app.include_router(runs.router)
    app.include_router(events.router)
    app.include_router(run_events.router)
    app.include_router(tickets.router)
    app.include_router(router)
    return app


@router.post("/tasks", status_code=201, responses={409: {"model": Problem}})
async def submit_task(
    body: TaskOfRequest,
    response: Response,
    services: Services,
    tenant: Tenant,
    idempotency_key: IdempotencyKey = None,
) -> TaskStatus:
    """Submit a prompt or an agent job. 201 once it is stored; 200 when its Idempotency-Key had
    stored it before; 409 while another task of its name has not ended."""
    settings = services.settings
    for refused in refused_fields(body, settings):
        raise refused
    task = new_task(body, tenant, settings, **idempotency("tasks", idempotency_key, body))
    await check_callback_url(body.callback_url, tenant, services)
    await services.quotas.add_task(tenant)
    try:
        submitted = await services.writer.submit(task)
    except NameInUse as taken:
        taken.field = "task_id"
        raise
    mark_replay(response, submitted)
    return TaskStatus(task_id=submitted.shown_as, status=Status(submitted.status))


@router.get("/tasks/{task_id}")
async def get_task(
    task_id: str,
    services: Services,
    tenant: AnyTenant,
    key: Key,
    wait: Annotated[
        float, Query(ge=0, allow_inf_nan=False, description="seconds to wait for the end")
    ] = 0,
) -> Task:
    """A task by number or name. With `wait`, answers when it is final or the time is over."""
    longest = services.settings.limits.max_wait_seconds
    if wait > longest:
        raise FieldRefused("wait", f"at most {longest:.15g} seconds (limits.max_wait_seconds)")
    deadline = time.monotonic() + wait
    row = await read_task(services, tenant, task_id)
    with services.changes.of_task(row["task_id"]) as changed:
        while not Status(row["status"]).is_final and (left := deadline - time.monotonic()) > 0:
            changed.clear()
            await services.keys.admit_again(key)  # it may have been revoked meanwhile
            # Read after the event is armed: a change in between is seen here or wakes us.
            row = await read_task(services, tenant, task_id)
            if not Status(row["status"]).is_final:
                await wait_for(changed, min(left, LONGEST_BLIND_WAIT_SECONDS))
    return task_view(row)


@router.get("/metrics", response_model=Metrics, responses=figures.AS_TEXT)
def get_metrics(services: Services, tenant: CountedTenant, accept: Accept = None) -> Any:
    """Aggregate figures over the tasks of the key's tenant; of all tenants for an operator, and
    while no key was ever created. In Prometheus' format when `Accept` prefers plain text."""
    if figures.prefers_text(accept):
        return figures.metrics_as_text(services, tenant)
    return Metrics(**services.database.run(db.metrics, tenant))


# --- helpers of the routes above -------------------------------------------------------------


async def read_task(services: ApiServices, tenant: str | None, task_id: str) -> db.Row:
    present_seconds = services.settings.worker.lease_seconds
    return await run_in_threadpool(
        services.database.run, db.get_task, tenant, task_id, present_seconds
    )


async def wait_for(changed: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait()


def open_services(settings: Settings) -> ApiServices:
    database = Database(settings)
    changes = Changes(settings)
    services = ApiServices(
        settings,
        database,
        SubmitWriter(database),
        changes,
        Feeds(database, changes),
        Keys(database, settings.limits.key_cache_seconds),
        Quotas(database, settings.limits),
    )
    services.writer.open()
    services.changes.open()
    return services


def close_services(services: ApiServices) -> None:
    """Answer what waits, then let go of Postgres."""
    services.writer.close()
    services.changes.close()
    services.database.close()


try:
    app = create_app()
except ConfigError as refused:
    raise SystemExit(f"The API does not start. {refused}") from None

# What was made until here stays, and the garbage collector need not look through it again and again
# while a large body is being read.
gc.collect()
gc.freeze()

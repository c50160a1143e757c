"""The HTTP API: uvicorn main:app

POST /tasks, GET /tasks/{id} and GET /metrics are here; further routes and everything they share
are in api/. A route checks and answers; what is stored and found is decided in db.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Response
from fastapi.concurrency import run_in_threadpool

import db
from api import health
from api.bodies import BodyLimit
from api.changes import Changes
from api.database import Database
from api.models import (
    Metrics,
    Problem,
    PromptTask,
    Task,
    TaskCreated,
    json_bytes,
    task_view,
)
from api.problems import handle_problems
from api.services import ApiServices, Services
from api.submission import SubmitWriter
from api.tenants import Tenant
from config import ConfigError, Limits, Settings, load_config
from errors import RequestRefused, TooLarge
from states import Status

# A waiting GET reads its task again after so long, whether or not it was told of a change.
LONGEST_BLIND_WAIT_SECONDS = 2.0

router = APIRouter(
    tags=["tasks"],
    responses={status: {"model": Problem} for status in (400, 404, 413, 422, 503)},
)

IdempotencyKey = Annotated[
    str | None,
    Header(description="1-255 printable ASCII; the same key and body make one task only"),
]


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; raises ConfigError when the settings cannot be used."""
    settings = settings or load_config()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, ApiServices]]:
        services = open_services(settings)
        try:
            yield {"services": services}
        finally:
            await run_in_threadpool(close_services, services)

    app = FastAPI(title="Agent Orchestrator", lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=settings.limits.max_body_bytes)
    handle_problems(app)
    app.include_router(health.router)
    app.include_router(router)
    return app


@router.post("/tasks", status_code=201)
async def submit_task(
    body: PromptTask,
    response: Response,
    services: Services,
    tenant: Tenant,
    idempotency_key: IdempotencyKey = None,
) -> TaskCreated:
    """Submit a prompt. 201 once it is stored; 200 when its Idempotency-Key had stored it before."""
    check_sizes(body, services.settings.limits)
    task = db.NewTask(
        tenant=tenant,
        kind="prompt",
        payload={"prompt": body.prompt},
        metadata=body.metadata,
        priority=body.priority,
        delay_seconds=body.delay_seconds,
        max_retry=body.max_retry,
        timeout_seconds=body.timeout_seconds,
        requested_route=body.route,
        **idempotency("tasks", idempotency_key, body),
    )
    submitted = await services.writer.submit(task)
    if submitted.replayed:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    return TaskCreated(task_id=submitted.task_id, status=Status(submitted.status))


@router.get("/tasks/{task_id}")
async def get_task(
    task_id: str,
    services: Services,
    tenant: Tenant,
    wait: Annotated[
        float, Query(ge=0, allow_inf_nan=False, description="seconds to wait for the end")
    ] = 0,
) -> Task:
    """A task by number or name. With `wait`, answers when it is final or the time is over."""
    longest = services.settings.limits.max_wait_seconds
    if wait > longest:
        raise RequestRefused(f"at most {longest:.15g} seconds (limits.max_wait_seconds)", "wait")
    deadline = time.monotonic() + wait
    row = await read_task(services, tenant, task_id)
    with services.changes.of_task(row["task_id"]) as changed:
        while not Status(row["status"]).is_final and (left := deadline - time.monotonic()) > 0:
            changed.clear()
            # Read after the event is armed: a change in between is seen here or wakes us.
            row = await read_task(services, tenant, task_id)
            if not Status(row["status"]).is_final:
                await wait_for(changed, min(left, LONGEST_BLIND_WAIT_SECONDS))
    return task_view(row)


@router.get("/metrics")
def get_metrics(services: Services, tenant: Tenant) -> Metrics:
    """Aggregate figures over all tasks."""
    return Metrics(**services.database.run(db.metrics))


# --- helpers of the routes above -------------------------------------------------------------


def check_sizes(body: PromptTask, limits: Limits) -> None:
    """Raise TooLarge or RequestRefused where config.toml's limits are exceeded."""
    if len(body.prompt.encode()) > limits.max_prompt_bytes:
        raise TooLarge(
            f"it is longer than limits.max_prompt_bytes ({limits.max_prompt_bytes} bytes)", "prompt"
        )
    if body.metadata is not None and json_bytes(body.metadata) > limits.max_metadata_bytes:
        raise TooLarge(
            f"it is larger than limits.max_metadata_bytes ({limits.max_metadata_bytes} bytes)",
            "metadata",
        )
    if body.delay_seconds > limits.max_delay_seconds:
        raise RequestRefused(
            f"at most {limits.max_delay_seconds:.15g} (limits.max_delay_seconds)", "delay_seconds"
        )


def idempotency(scope: str, key: str | None, body: PromptTask) -> dict[str, Any]:
    """The three fields of a NewTask that make a repeated request find the first one's task."""
    if key is None:
        return {}
    if not (1 <= len(key) <= 255 and key.isascii() and key.isprintable()):
        raise RequestRefused("Idempotency-Key is to be 1 to 255 printable ASCII characters")
    digest = db.canonical_hash(body.model_dump(mode="json"))
    return {"idempotency_scope": scope, "idempotency_key": key, "request_hash": digest}


async def read_task(services: ApiServices, tenant: str, task_id: str) -> db.Row:
    return await run_in_threadpool(services.database.run, db.get_task, tenant, task_id)


async def wait_for(changed: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait()


def open_services(settings: Settings) -> ApiServices:
    database = Database(settings)
    services = ApiServices(settings, database, SubmitWriter(database), Changes(settings))
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

"""Runs: submit a DAG of steps, look at it, list them, cancel one."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.lists import Cursor, Limit, cursor_of, next_cursor
from api.models import Problem, TransitionList, transition_view
from api.requests import IdempotencyKey, idempotency, mark_replay
from api.run_checks import planned_steps
from api.run_models import (
    Run,
    RunBody,
    RunChanged,
    RunList,
    RunStatus,
    SubmittedRun,
    run_view,
    summary_view,
)
from api.services import ApiServices, Services
from api.tenants import Tenant
from queries import runs
from queries.runs import NewRun
from states import Status

router = APIRouter(
    tags=["runs"],
    responses={status: {"model": Problem} for status in (400, 404, 422, 503)},
)


@router.post(
    "/runs",
    status_code=201,
    responses={200: {"model": SubmittedRun}, 413: {"model": Problem}},
)
def post_run(
    body: RunBody,
    request: Request,
    response: Response,
    services: Services,
    tenant: Tenant,
    idempotency_key: IdempotencyKey = None,
) -> SubmittedRun:
    """Submit a DAG of steps: all are stored, or none is.

    200 when its Idempotency-Key had stored the run before.
    """
    steps = planned_steps(body, services.settings)
    run = NewRun(tenant, body.goal, steps, **idempotency("runs", idempotency_key, body))
    submitted = services.database.run(runs.submit_run, run)
    mark_replay(response, submitted)
    stored = read_run(services, tenant, str(submitted.task_id))
    return SubmittedRun(**dict(stored), watch=watch_address(request, stored.run_id))


@router.get("/runs")
def get_runs(
    services: Services,
    tenant: Tenant,
    cursor: Cursor,
    status: RunStatus | None = None,
    limit: Limit = 50,
) -> RunList:
    """The tenant's runs, newest first."""
    wanted = None if status is None else Status(status)
    page = services.database.run(runs.list_runs, tenant, status=wanted, limit=limit, before=cursor)
    return RunList(runs=[summary_view(row) for row in page.rows], next_cursor=next_cursor(page))


@router.get("/runs/{run_id}")
def get_run(run_id: str, services: Services, tenant: Tenant) -> Run:
    """A run with all of its steps."""
    return read_run(services, tenant, run_id)


@router.get("/runs/{run_id}/audit")
def get_run_audit(
    run_id: str, services: Services, tenant: Tenant, cursor: Cursor, limit: Limit = 50
) -> TransitionList:
    """Every transition of a run and of its steps, oldest first."""
    number = services.database.run(runs.find_run, tenant, run_id)["task_id"]
    page = services.database.run(runs.list_run_transitions, number, limit=limit, after=cursor)
    return TransitionList(
        audit=[transition_view(row, cursor_of(row["id"])) for row in page.rows],
        next_cursor=next_cursor(page),
    )


@router.delete("/runs/{run_id}", responses={202: {"model": RunChanged}, 409: {"model": Problem}})
def delete_run(run_id: str, response: Response, services: Services, tenant: Tenant) -> RunChanged:
    """Cancel a run with all that has not ended: 200 if that is done, 202 while steps still stop."""
    cancelled = services.database.run(runs.cancel_run, tenant, run_id)
    if cancelled.status is Status.RUNNING:
        response.status_code = 202
    return RunChanged(run_id=cancelled.task_id, status=cancelled.status)


# --- helpers of the routes above -------------------------------------------------------------


def read_run(services: ApiServices, tenant: str, run_id: str) -> Run:
    present_seconds = services.settings.worker.lease_seconds
    return run_view(services.database.run(runs.get_run, tenant, run_id, present_seconds))


def watch_address(request: Request, run_id: int) -> str:
    """Where the run can be watched, as the client has called us."""
    scheme = {"http": "ws", "https": "wss"}[request.url.scheme]
    return f"{str(request.base_url.replace(scheme=scheme)).rstrip('/')}/runs/{run_id}/events"

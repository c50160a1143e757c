"""Runs: submit a DAG of steps, look at it, list them, cancel one."""

from __future__ import annotations

from typing import Any

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
from api.tenants import AnyTenant, Tenant
from db import Connection, Submitted
from queries import runs
from queries.runs import NewRun
from states import Status

router = APIRouter(
    tags=["runs"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 422, 429, 503)},
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
    watched_at = address_of_watchers(request)  # before it is stored: afterwards nothing may fail
    present_seconds = services.settings.worker.lease_seconds
    services.quotas.add_tasks(tenant, len(steps))
    submitted, row = services.database.run(submit_and_read, run, present_seconds)
    mark_replay(response, submitted)
    stored = run_view(row)
    return SubmittedRun(**dict(stored), watch=f"{watched_at}/runs/{stored.run_id}/events")


@router.get("/runs")
def get_runs(
    services: Services,
    tenant: AnyTenant,
    cursor: Cursor,
    status: RunStatus | None = None,
    limit: Limit = 50,
) -> RunList:
    """The tenant's runs, newest first."""
    wanted = None if status is None else Status(status)
    page = services.database.run(runs.list_runs, tenant, status=wanted, limit=limit, before=cursor)
    return RunList(runs=[summary_view(row) for row in page.rows], next_cursor=next_cursor(page))


@router.get("/runs/{run_id}")
def get_run(run_id: str, services: Services, tenant: AnyTenant) -> Run:
    """A run with all of its steps."""
    return read_run(services, tenant, run_id)


@router.get("/runs/{run_id}/audit")
def get_run_audit(
    run_id: str, services: Services, tenant: AnyTenant, cursor: Cursor, limit: Limit = 50
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


def read_run(services: ApiServices, tenant: str | None, run_id: str) -> Run:
    present_seconds = services.settings.worker.lease_seconds
    return run_view(services.database.run(runs.get_run, tenant, run_id, present_seconds))


def submit_and_read(
    conn: Connection, run: NewRun, present_seconds: float
) -> tuple[Submitted, dict[str, Any]]:
    """Store a run and read it back on the same connection.

    That this one breaks after the commit is as unlikely as that the commit's own answer is lost,
    and comes to the same for the client: 503, and a repetition with the same Idempotency-Key finds
    the run.
    """
    submitted = runs.submit_run(conn, run)
    return submitted, runs.get_run(conn, run.tenant, str(submitted.task_id), present_seconds)


def address_of_watchers(request: Request) -> str:
    """Where runs can be watched, as the client has called us; a proxy may have named its scheme."""
    scheme = "wss" if request.url.scheme in ("https", "wss") else "ws"
    return str(request.base_url.replace(scheme=scheme)).rstrip("/")

"""Figures for people (/stats), and those of /metrics in Prometheus' text format."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

import db
from api.models import Problem, Stats, worker_view
from api.services import ApiServices, Services
from api.tenants import CountedTenant
from queries.listings import list_workers, paused_routes, read_queue
from states import Status

router = APIRouter(
    tags=["health"], responses={status: {"model": Problem} for status in (400, 401, 403, 429, 503)}
)

PAUSED = "its model server cannot be used now"
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
TEXT_TYPES = ("text/plain", "application/openmetrics-text")
AS_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


@router.get("/stats")
def get_stats(services: Services, tenant: CountedTenant) -> Stats:
    """What waits, what runs, what died, which routes are paused, and the workers seen lately.

    A tenant's key is told of its own tasks, and of paused routes without the reason; of no worker.
    """
    queue = services.database.run(read_queue, tenant)
    workers = services.database.run(list_workers, services.settings.worker.lease_seconds)
    paused = paused_routes(workers)
    if tenant is not None:  # names of machines and addresses of servers are not its business
        return Stats(**queue, paused_routes=dict.fromkeys(paused, PAUSED), workers=None)
    return Stats(**queue, paused_routes=paused, workers=[worker_view(worker) for worker in workers])


def prefers_text(accept: str | None) -> bool:
    """Whether an Accept header would rather have plain text than JSON."""
    wanted = {}
    for choice in (accept or "").lower().split(","):
        media, *parameters = (part.strip() for part in choice.split(";"))
        wanted[media] = _quality(parameters)
    text = max(wanted.get(media, 0.0) for media in TEXT_TYPES)
    return text > wanted.get("application/json", 0.0)


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def metrics_as_text(services: ApiServices, tenant: str | None) -> Response:
    """The figures of /metrics in Prometheus' text format.

    All are gauges: they are read from the tasks that are stored, and fall when some are purged.
    """
    metrics = services.database.run(db.metrics, tenant)
    queue = services.database.run(read_queue, tenant)
    tasks = {status: metrics["by_status"].get(status, 0) for status in Status}
    duration = metrics["avg_duration_seconds"]
    lines = [
        *_by_label("tasks", "Tasks that are stored.", "status", tasks),
        *_single("depth", "Tasks that are due and wait for a worker.", queue["depth"]),
        *_single("delayed", "Tasks that wait for their time.", queue["delayed"]),
        *_single("dead_letters", "Tasks that failed for good.", queue["dead_letters"]),
        *_single("retries", "Failures of the tasks that are stored.", metrics["retries"]),
        *_single("reclaimed", "Tasks that lost a worker.", metrics["reclaimed_count"]),
        *_single(
            "duration_seconds", "Mean time of a success.", "NaN" if duration is None else duration
        ),
        *_by_label("cost", "Money spent.", "route", metrics["cost_by_route"]),
    ]
    return Response("".join(f"{line}\n" for line in lines), media_type=TEXT_FORMAT)


def _single(name: str, meaning: str, value: Any) -> list[str]:
    return [*_head(name, meaning), f"orchestrator_{name} {value}"]


def _by_label(name: str, meaning: str, label: str, values: dict[Any, Any]) -> list[str]:
    return [
        *_head(name, meaning),
        *(f'orchestrator_{name}{{{label}="{_escaped(of)}"}} {n}' for of, n in values.items()),
    ]


def _head(name: str, meaning: str) -> list[str]:
    return [f"# HELP orchestrator_{name} {meaning}", f"# TYPE orchestrator_{name} gauge"]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

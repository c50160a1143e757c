"""Probes: is the process alive, can it do its work."""

from __future__ import annotations

from fastapi import APIRouter, Request

import db
from api.models import Problem

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"model": Problem}})
def readyz(request: Request) -> dict[str, str]:
    """Postgres answers, and its schema is ours; else 503 with the reason."""
    request.state.services.database.run(db.ping)
    return {"status": "ready"}

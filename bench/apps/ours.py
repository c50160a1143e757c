"""Our application with POST /nothing, which does nothing: uvicorn bench.apps.ours:app

What lies between it and the same endpoint of bench.apps.plain is the cost of our middlewares.
"""

from __future__ import annotations

from api.models import TaskStatus
from api.requests import TaskOfRequest
from main import app
from states import Status

__all__ = ["app"]


@app.post("/nothing", status_code=201)
async def nothing(body: TaskOfRequest) -> TaskStatus:
    return TaskStatus(task_id=1, status=Status.PENDING)

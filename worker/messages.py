"""Before a callback is sent: what it brings, read by the holder of its lease."""

from __future__ import annotations

import logging
from dataclasses import replace

import db
from config import Settings
from errors import DatabaseUnavailable, NotFound
from queries.leases import ClaimedTask, Outcome
from queries.webhooks import Message, read_sender
from views import task_json
from worker.outputs import GIVEN_BACK_SECONDS

logger = logging.getLogger(__name__)


def with_message(
    conn: db.Connection, task: ClaimedTask, settings: Settings
) -> ClaimedTask | Outcome:
    """The callback with its message; or, if it cannot have one, what comes of it."""
    told = task.payload.get("task_id")
    try:
        row = db.get_task(conn, task.tenant, str(told), settings.worker.lease_seconds)
        message = Message(task_json(row), read_sender(conn, task.tenant))
        return replace(task, message=message)
    except NotFound:
        return Outcome("permanent", error=f"task {told} is gone, so there is nothing to tell of it")
    except DatabaseUnavailable:
        return Outcome("released", delay_seconds=GIVEN_BACK_SECONDS)
    except Exception as failed:  # the callback is ours: something has to come of it
        logger.exception("Task %s cannot be shown to whom callback %s tells", told, task.task_id)
        return Outcome(
            "failure",
            error=f"task {told} cannot be shown: {type(failed).__name__}",
            max_retry=settings.callbacks.max_retry,
            max_delay_seconds=settings.callbacks.max_delay_seconds,
        )

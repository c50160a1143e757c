"""Before a step runs: what its templates refer to, read once, by the holder of its lease."""

from __future__ import annotations

import logging
from dataclasses import replace

import psycopg2.errors

import db
from errors import DatabaseUnavailable, TooLarge, words_of
from queries.leases import ClaimedTask, Outcome
from queries.steps import read_outputs
from runs.templates import TemplateError, references, templated

logger = logging.getLogger(__name__)

GIVEN_BACK_SECONDS = 1.0  # of a task that cannot begin now through no fault of its own


def with_outputs(conn: db.Connection, task: ClaimedTask) -> ClaimedTask | Outcome:
    """The task with the outputs it refers to; or, if it cannot have them, what comes of it."""
    if task.run_id is None:
        return task
    try:
        if not (asked := references(templated(task.kind, task.payload))):
            return task
        return replace(task, outputs=read_outputs(conn, task.run_id, asked))
    except (TemplateError, TooLarge) as refused:
        return Outcome("permanent", error=str(refused))
    except DatabaseUnavailable as away:
        if isinstance(away.__cause__, psycopg2.errors.QueryCanceled):
            return Outcome("failure", error=f"what it refers to cannot be read in time: {away}")
        return Outcome("released", delay_seconds=GIVEN_BACK_SECONDS)
    except Exception as failed:  # the task is ours: something has to come of it
        logger.exception("What task %s refers to cannot be read", task.task_id)
        return Outcome("failure", error=f"what it refers to cannot be read: {words_of(failed)}")

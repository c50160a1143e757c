"""Nothing but FastAPI: uvicorn bench.apps.plain:app

POST /nothing checks the body of POST /tasks and answers. POST /insert stores it, too: one row in a
narrow table without triggers, one commit, on a connection that is kept.
"""

from __future__ import annotations

import json
import os
import threading

import psycopg2
from fastapi import FastAPI

from api.models import TaskStatus
from api.requests import TaskOfRequest
from states import Status

INSTALL = """
CREATE TABLE plain_tasks (
    task_id bigserial PRIMARY KEY,
    status text NOT NULL DEFAULT 'pending',
    payload jsonb NOT NULL,
    available_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX plain_tasks_pending ON plain_tasks (available_at, task_id) WHERE status = 'pending'
"""
INSERT = "INSERT INTO plain_tasks (payload) VALUES (%s) RETURNING task_id"

app = FastAPI()
of_thread = threading.local()


@app.post("/nothing", status_code=201)
async def nothing(body: TaskOfRequest) -> TaskStatus:
    return TaskStatus(task_id=1, status=Status.PENDING)


@app.post("/insert", status_code=201)
def insert(body: TaskOfRequest) -> TaskStatus:
    if not hasattr(of_thread, "connection"):
        of_thread.connection = psycopg2.connect(os.environ["DATABASE_URL"])
        of_thread.connection.autocommit = True
    with of_thread.connection.cursor() as cursor:
        cursor.execute(INSERT, (json.dumps(body.model_dump(mode="json")),))
        return TaskStatus(task_id=cursor.fetchone()[0], status=Status.PENDING)

"""Every statement is one that Postgres accepts, and no hot one reads more than it has to.

The table holds a backlog of every sort at once, and the planner knows all of it or, with
statistics from when the table was empty, none. What a statement costs is counted in pages.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg2.errors
import pytest

import db
from config import ROOT
from db import Connection, Row
from queries import (
    checkpoints,
    claims,
    events,
    figures,
    jobs,
    leases,
    listings,
    model_calls,
    operations,
    quotas,
    retention,
    runs,
    steps,
)
from queries.leases import Outcome
from states import Kind, Status
from tests.conftest import administrator, fresh_database, settings_for
from tests.support import rows
from tests.support.plans import OF_JOBS, plan_of, plans_inside_functions
from tests.support.rows import sql

# --- every statement -------------------------------------------------------------------------

MODULES = ["db", *(f"queries.{file.stem}" for file in sorted((ROOT / "queries").glob("[a-z]*.py")))]


def statements() -> dict[str, str]:
    """The UPPER_CASE constants that are SQL, without the pieces of which others are made."""
    texts = {
        f"{module}.{name}": value
        for module in MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if name.isupper() and isinstance(value, str) and re.search(r"\s", value.strip())
    }
    return {
        name: text
        for name, text in texts.items()
        if not any(text in other and text != other for other in texts.values())
    }


NO_ROWS = json.dumps([])
A_SNAPSHOT = "1:1:"
# By the name of the parameter: any statement that takes it can be asked for its plan with this.
SAMPLES: dict[str, Any] = {
    **dict.fromkeys(("tasks", "leases", "outcomes", "routes", "wanted", "references"), NO_ROWS),
    **dict.fromkeys(("steps", "edges"), NO_ROWS),
    **dict.fromkeys(("task_id", "number", "root_id", "after", "last_id", "before", "only"), 7),
    **dict.fromkeys(("run_id", "count", "from_task"), 7),
    **{name: [7] for name in ("run_ids", "task_ids", "succeeded", "dead", "locked_runs")},
    "approved": True,
    "payload": "{}",
    **dict.fromkeys(("limit", "most", "slots", "sweep_limit", "depth_limit", "most_bytes"), 4),
    **dict.fromkeys(("max_retry", "max_delivery", "max_delay_seconds"), 3),
    **dict.fromkeys(("lease_seconds", "spread_seconds", "present_seconds", "delay_seconds"), 1.0),
    **dict.fromkeys(("tenant", "name", "worker", "after_tenant", "scope", "key", "prompt"), "x"),
    **dict.fromkeys(("days", "page_rows", "batch_rows"), 30),
    "budgets": "{}",
    "kinds": ["x"],
    "block": 1,
    **dict.fromkeys(("key_id", "path"), "x"),
    **dict.fromkeys(("secret_hash", "ticket_hash"), b"x"),
    "secret": b"x",
    "seconds": 1.0,
    **dict.fromkeys(("tokens", "token_budget", "tokens_per_day", "call_id", "ordinal"), 7),
    **dict.fromkeys(("prompt_tokens", "completion_tokens"), 7),
    **dict.fromkeys(("node", "node_run", "checkpoint_id", "parent_id", "graph_version"), "x"),
    "next_nodes": ["x"],
    "state": "{}",
    "cost": None,
    **dict.fromkeys(("route", "model", "reply"), "x"),
    **dict.fromkeys(("lock_ms", "statement_ms", "frozen_ms", "transaction_ms"), "1"),
}


def sample(statement: str) -> dict[str, Any]:
    """A value for each parameter; NULL where no sample is needed for Postgres to know its type."""
    return {name: SAMPLES.get(name) for name in re.findall(r"%\((\w+)\)s", statement)}


def explain(conn: Connection, text: str, values: dict[str, Any]) -> None:
    """Let Postgres plan each of the statements in a text, without running it."""
    for one in filter(str.strip, re.split(r";\s*(?:\n|$)", text)):
        is_setting = one.split()[0] == "SET"
        sql(conn, one if is_setting else "EXPLAIN " + one, **values)


OWN_SAMPLES = {
    "READ_EVENTS": {"before": A_SNAPSHOT, "now": A_SNAPSHOT},
    "LIST_STATES": {"before": "c"},
    "CLAIM_TASKS": {"routes": "{none}"},
}


@pytest.mark.parametrize("name", statements())
def test_every_statement_is_one_that_postgres_accepts(conn: Connection, name: str) -> None:
    text = statements()[name]
    explain(conn, text, {**sample(text), **OWN_SAMPLES.get(name.split(".")[-1], {})})


def test_a_statement_with_a_fault_would_be_seen(conn: Connection) -> None:
    with pytest.raises(psycopg2.errors.UndefinedColumn):
        explain(conn, "SELECT a_column FROM tasks", {})


# --- a full table ----------------------------------------------------------------------------

# Task numbers tell what a row is. In front of what can be claimed: delayed tasks of the highest
# priority, and due ones of a route that takes no calls and of one tenant who sent very many.
FILL = """
ALTER TABLE tasks DISABLE TRIGGER USER;
INSERT INTO tasks (
    tenant, kind, payload, status, reason, due, result, last_error, finished_at, name,
    idempotency_scope, idempotency_key, request_hash)
SELECT 'tenant-' || n % 200, 'prompt', '{"prompt": "p"}', s.status::task_status, s.reason, false,
       CASE s.status WHEN 'SUCCEEDED' THEN '{"text": "done"}'::jsonb END,
       CASE s.status WHEN 'FAILED' THEN 'it went wrong' END, current_instant(),
       CASE WHEN n % 10 = 0 THEN 'name-' || n END,
       CASE WHEN n % 10 = 1 THEN 'tasks' END, CASE WHEN n % 10 = 1 THEN n::text END,
       CASE WHEN n % 10 = 1 THEN 'x'::bytea END
FROM generate_series(1, 50000) AS n CROSS JOIN LATERAL (VALUES
    (CASE WHEN n % 100 = 0 THEN 'FAILED' ELSE 'SUCCEEDED' END,
     CASE WHEN n % 100 = 0 THEN 'permanent' ELSE 'succeeded' END)) AS s(status, reason);
INSERT INTO tasks (tenant, kind, payload, priority, due, available_at)
SELECT 'tenant-' || n % 200, 'prompt', '{"prompt": "p"}', 9, false,
       current_instant() + make_interval(mins => n - 500)
FROM generate_series(1, 20000) AS n;
INSERT INTO tasks (tenant, kind, payload, requested_route)
SELECT 'a-tenant-of-a-paused-route', 'prompt', '{"prompt": "p"}', 'cloud'
FROM generate_series(1, 60000);
INSERT INTO tasks (tenant, kind, payload, priority)
SELECT 'bulk', 'prompt', '{"prompt": "p"}', 9 FROM generate_series(1, 60000);
INSERT INTO tasks (tenant, kind, payload, priority)
SELECT 'tenant-' || n % 200, 'prompt', '{"prompt": "p"}', n % 10
FROM generate_series(1, 10000) AS n;
INSERT INTO tasks (kind, payload, alone) SELECT 'prompt', '{}', true FROM generate_series(1, 5);
INSERT INTO tasks (
    kind, payload, status, reason, due, worker, started_at, lease_token, lease_expires_at,
    attempt, delivery_count, route)
SELECT 'prompt', '{}', 'RUNNING', 'claimed', false, 'w1', current_instant(), gen_random_uuid(),
       current_instant() + make_interval(mins => n - 50), 1, 1, 'local'
FROM generate_series(1, 100) AS n;
INSERT INTO tasks (task_id, kind, tenant, payload, status, due)
SELECT 1000000 + 1000 * run, 'run', 'tenant-7', '{"goal": "g"}', 'BLOCKED', false
FROM generate_series(1, 40) AS run;
INSERT INTO tasks (
    task_id, kind, tenant, payload, parent_id, step, unmet, status, reason, due, result,
    finished_at)
SELECT 1000000 + 1000 * run + n, 'tool', 'tenant-7', '{}', 1000000 + 1000 * run, 'step-' || n,
       CASE WHEN n <= 400 THEN 0 ELSE 2 END, s.status::task_status, s.reason, false,
       CASE WHEN n <= 400 THEN '{}'::jsonb END, CASE WHEN n <= 400 THEN current_instant() END
FROM generate_series(1, 40) AS run CROSS JOIN generate_series(1, 900) AS n
CROSS JOIN LATERAL (VALUES (
    CASE WHEN n <= 400 THEN 'SUCCEEDED' ELSE 'BLOCKED' END,
    CASE WHEN n <= 400 THEN 'succeeded' ELSE 'created' END)) AS s(status, reason);
INSERT INTO step_edges (task_id, needs)
SELECT task_id, needed
FROM tasks CROSS JOIN LATERAL (VALUES (task_id - 200), (task_id - 201)) AS e(needed)
WHERE kind = 'tool' AND unmet = 2;
INSERT INTO tasks (task_id, kind, tenant, payload, status, reason, due, finished_at)
SELECT 2000000 + 1000 * run, 'run', 'tenant-8', '{"goal": "g"}', 'SUCCEEDED', 'succeeded', false,
       current_instant()
FROM generate_series(1, 40) AS run;
INSERT INTO tasks (
    task_id, kind, tenant, payload, parent_id, step, status, reason, due, result, finished_at)
SELECT 2000000 + 1000 * run + n, 'tool', 'tenant-8', '{}', 2000000 + 1000 * run, 'step-' || n,
       'SUCCEEDED', 'succeeded', false, '{}', current_instant()
FROM generate_series(1, 40) AS run CROSS JOIN generate_series(1, 100) AS n;
INSERT INTO step_edges (task_id, needs)
SELECT task_id, task_id - 1 FROM tasks WHERE tenant = 'tenant-8' AND step <> 'step-1';
INSERT INTO tasks (task_id, kind, payload, status, reason, due, result, finished_at)
SELECT 4000000 + n, 'agent', '{"task": "t"}', 'SUCCEEDED', 'succeeded', false, '{}',
       current_instant() - interval '40 days'
FROM generate_series(1, 10000) AS n;
INSERT INTO checkpoints (thread_id, checkpoint_id, checkpoint)
SELECT 4000000 + n, c, jsonb_build_object('channel_versions', jsonb_build_object('notes', c::text))
FROM generate_series(1, 10000) AS n CROSS JOIN generate_series(1, 6) AS c;
INSERT INTO checkpoint_blobs (thread_id, channel, version, type)
SELECT 4000000 + n, 'notes', c, 'null'
FROM generate_series(1, 10000) AS n CROSS JOIN generate_series(1, 6) AS c;
INSERT INTO checkpoint_writes (thread_id, checkpoint_id, task_id, idx, channel, blob)
SELECT 4000000 + n, c, 'x', 0, 'notes', ''
FROM generate_series(1, 10000) AS n CROSS JOIN generate_series(1, 6) AS c;
INSERT INTO job_states (
    task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version, state, prompt_tokens,
    completion_tokens)
SELECT 4000000 + n, c, 1, '{}', '{}', 'v', '{}', 0, 0
FROM generate_series(1, 10000) AS n CROSS JOIN generate_series(1, 6) AS c;
INSERT INTO model_calls (task_id, node, node_run, ordinal, reserved_tokens)
SELECT 4000000 + n, 'note', c, 0, 1
FROM generate_series(1, 10000) AS n CROSS JOIN generate_series(1, 6) AS c;
INSERT INTO tasks (task_id, kind, tenant, payload, status, reason, due, gate, name)
SELECT 3000000 + n, 'agent', 'tenant-9', '{"task": "t"}', 'AWAITING_APPROVAL', 'parked', false,
       '{"artefact": "x", "asks": 1}', 'job-' || n
FROM generate_series(1, 1000) AS n;
INSERT INTO job_states (
    task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version, state, prompt_tokens,
    completion_tokens)
SELECT 3000000 + n, 'c-' || 1000 + step, 1, '{coder}', '{reviewer}', 'v1',
       jsonb_build_object('revisions', step, 'code', repeat('x', 200)), step, step
FROM generate_series(1, 1000) AS n CROSS JOIN generate_series(1, 50) AS step;
ALTER TABLE tasks ENABLE TRIGGER USER;
SELECT recount_figures();
INSERT INTO figure_changes (tenant, kind, due)
SELECT 'tenant-' || n % 200, 'prompt', sign FROM generate_series(1, 500) AS n
CROSS JOIN (VALUES (-1), (1)) AS change(sign);
INSERT INTO audit_log (root_id, task_id, tenant, to_status, reason, attempt)
SELECT task_id, task_id, tenant, status, reason, 1 FROM tasks CROSS JOIN generate_series(1, 2)
WHERE task_id <= 50000;
INSERT INTO audit_log (root_id, run_id, task_id, step, tenant, to_status, reason, attempt)
SELECT parent_id, parent_id, task_id, step, tenant, status, reason, 1 FROM tasks
WHERE parent_id IS NOT NULL;
INSERT INTO model_calls (
    task_id, node, node_run, ordinal, reserved_tokens, ended_at, prompt_tokens, completion_tokens,
    reply)
SELECT job.task_id, 'coder', 'run-' || n / 10, n % 10, 100, current_instant(), 40, 2,
       repeat('x', 500)
FROM (SELECT max(task_id) AS task_id FROM tasks WHERE status = 'RUNNING'
      UNION ALL SELECT generate_series(1, 40)) AS job
CROSS JOIN generate_series(1, CASE WHEN job.task_id > 40 THEN 10000 ELSE 1000 END) AS n;
INSERT INTO tenant_tokens (tenant, day, taken)
SELECT 'tenant-' || n, date '2020-01-01' + day, 1
FROM generate_series(1, 200) AS n CROSS JOIN generate_series(1, 100) AS day;
INSERT INTO job_states (
    task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version, state, prompt_tokens,
    completion_tokens)
SELECT task_id, to_char(n, '0000'), 1, '{a}', '{b}', 'v1', '{"code": "x"}', 1, 1
FROM (SELECT max(task_id) AS task_id FROM tasks WHERE status = 'RUNNING'
      UNION ALL SELECT generate_series(1, 1000)) AS job CROSS JOIN generate_series(1, 30) AS n;
"""

A_JOB = 3_000_500  # of a thousand alike: with 50 checkpoints, and it waits for a person
FILLED = "tasks", "step_edges", "model_calls", "tenant_tokens", "job_states"
A_RUN = 1_020_000  # of forty alike: 400 steps have succeeded, each of 500 needs two others
ENDED_RUNS = [2_001_000, 2_002_000]  # of forty alike, with 100 steps each


@pytest.fixture(scope="module")
def filled(server_url: str) -> Iterator[str]:
    """The name of a database with a full table, of which the planner knows nothing."""
    with fresh_database(server_url) as url:
        with administrator(url) as cursor:
            for table in FILLED:
                cursor.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
            cursor.execute(f"ANALYZE {', '.join(FILLED)}, audit_log")
            cursor.execute(FILL)
            # Only a purge reads what jobs leave behind, once a day: long after autovacuum did.
            cursor.execute(f"ANALYZE {', '.join(OF_JOBS)}")
        yield urlsplit(url).path.removeprefix("/")


@pytest.fixture(scope="module", params=["fresh", "stale"])
def full(request: pytest.FixtureRequest, server_url: str, filled: str) -> Iterator[Connection]:
    """A full table, of which the planner knows all or nothing."""
    with fresh_database(server_url, filled) as url:
        if request.param == "fresh":
            with administrator(url) as cursor:
                cursor.execute(f"ANALYZE {', '.join(FILLED)}, audit_log")
        with contextlib.closing(db.connect(url, settings_for(url).database, "test")) as conn:
            yield conn


SETTLED = vars(Outcome("succeeded", result={}))
CAPS = {"max_retry": 3, "max_delay_seconds": 60}
REAP = {
    "max_delivery": 3,
    "spread_seconds": 5,
    "sweep_limit": 10,
    "after": 0,
}
CLAIM = {
    "worker": "w1",
    "slots": 4,
    "lease_seconds": 30,
    "routes": "{none,local,auto}",
    "wanted": None,
    "budgets": None,
    "depth_limit": 10,
    "from_task": 0,
}
WANTED = json.dumps([vars(claims.Wanted(route, "all")) for route in ("none", "local", "auto")])
RUNNING = 100
SUBMIT = [
    {
        **vars(rows.new_task(tenant="tenant-7", idempotency_scope="tasks")),
        "ordinal": n,
        "idempotency_key": str(n),
        "request_hash": "00",
    }
    for n in range(50_001, 50_021)
]

# By name: the statement, its values, the most pages it may touch, and the most rows it may sort.
# Each changed row has an entry in several indexes: some twenty pages for a row that is claimed.
Ask = tuple[str, dict[str, Any], int, int]


def of_workers(leased: list[Row]) -> dict[str, Ask]:
    first_tenant, late_tenant = {"after_tenant": ""}, {"after_tenant": "tenant-98"}
    behind = {**CLAIM, "from_task": A_RUN}
    limited = {**CLAIM, "wanted": WANTED, "budgets": '{"all": 9}'}
    renew = {"leases": json.dumps(leased), "lease_seconds": 30}
    settle = {
        "outcomes": json.dumps([{**SETTLED, **lease} for lease in leased]),
        "run_ids": [A_RUN],
        **CAPS,
    }
    routes = {"routes": json.dumps([{**lease, "route": "local"} for lease in leased])}
    return {
        "look": (claims.LOOK, {**CLAIM, "count_in_flight": False}, 40, 0),
        "look, with limits": (claims.LOOK, {**CLAIM, "count_in_flight": True}, 60, RUNNING),
        "claim 4, first tenant": (claims.CLAIM_TASKS, {**CLAIM, **first_tenant}, 500, 4),
        "claim 4, late tenant": (claims.CLAIM_TASKS, {**CLAIM, **late_tenant}, 500, 4),
        "claim 4 within limits": (claims.CLAIM_TASKS, {**limited, **late_tenant}, 500, 4),
        "claim 4, nothing behind": (claims.CLAIM_TASKS, {**behind, **first_tenant}, 20_000, 4),
        "claim a suspect": (claims.CLAIM_SUSPECT, limited, 100, 5),
        "note 8 routes": (claims.SET_ROUTES, routes, 120, 8),
        "renew 8 leases": (leases.RENEW_LEASES, renew, 120, 8),
        "settle 8": (leases.SETTLE_TASKS, settle, 400, 8),
        "reap 10": (leases.REAP_TASKS, {**REAP, "only": None}, 400, 10),
        "reap one": (leases.REAP_TASKS, {**REAP, "only": leased[0]["task_id"] - 90}, 100, 1),
        "see 10 expired": (leases.EXPIRED_TASKS, {"sweep_limit": 10, "after": 0}, 30, 10),
        "is there work": (leases.HAS_WORK, {}, 40, 0),
    }


def of_the_api(here: events.Position) -> dict[str, Ask]:
    queued = {"tenant": "tenant-7", "kinds": list(Kind), "most": 20}
    shown = {"limit": 20, "present_seconds": 30, "most_bytes": 2**20}
    listed = {**shown, "tenant": "tenant-7"}
    everything = {"statuses": list(Status), "kinds": list(Kind), "before": db.LARGEST_ID}
    failed = {**everything, "statuses": ["FAILED"]}
    dead = {**shown, "tenant": "tenant-0", "before": db.LARGEST_ID}
    by_number = {**listed, "number": 4707, "name": None}
    by_name = {**listed, "number": None, "name": "name-4710", "tenant": "tenant-110"}
    batch = {"tenant": "tenant-1", "scope": "tasks", "key": "1"}
    now = {"root_id": 4711, "before": here.now, "now": here.now, "last_id": 0, "most": 500}
    old = {**now, "before": A_SNAPSHOT, "now": A_SNAPSHOT}
    submit = {"tasks": json.dumps(SUBMIT)}
    submit_one = db._as_values(rows.new_task(tenant="tenant-7"))
    decide = {"task_id": 60_000, "approved": True, "feedback": None, "artefact": "x"}
    job = {"number": A_JOB, "name": None, "task_id": A_JOB, "limit": 20, "most_bytes": 2**20}
    return {
        "submit 20": (db.SUBMIT_TASKS, submit, 1000, 20),
        "submit 1": (db.SUBMIT_TASK, submit_one, 50, 0),
        "the tasks of 20 keys": (db.FIRST_OF_KEYS, submit, 160, 20),
        "get by number": (db.GET_TASK, by_number, 120, 1),
        "get by name": (db.GET_TASK, by_name, 120, 1),
        "find by number": (operations.FIND_TASK, by_number, 20, 1),
        "find by name": (operations.FIND_TASK, by_name, 20, 1),
        "get a job": (db.GET_TASK, {**job, **listed, "tenant": "tenant-9"}, 120, 1),
        "the checkpoints of a job": (jobs.LIST_STATES, {**job, "before": "c-1040"}, 60, 0),
        "decide a job": (operations.DECIDE_JOB, {**job, **decide, "task_id": A_JOB}, 60, 0),
        "the batch of a key": (operations.BATCH_OF_KEY, batch, 20, 1),
        "cancel": (operations.CANCEL_UNLESS_FINAL, {"task_id": 60_000}, 60, 0),
        "requeue": (operations.REQUEUE_IF_DEAD, {"task_id": 100}, 60, 0),
        "decide": (operations.DECIDE_APPROVAL, decide, 60, 0),
        "the newest of all": (listings.LIST_TASKS, {**listed, **everything}, 800, 84),
        "older ones": (listings.LIST_TASKS, {**listed, **everything, "before": 30_000}, 800, 84),
        "dead letters": (listings.LIST_DEAD_LETTERS, dead, 400, 21),
        "what waits": (quotas.COUNT_QUEUED, queued, 120, 0),
        "the newest of all tenants": (listings.LIST_ALL_TASKS, {**listed, **everything}, 400, 84),
        "of all tenants, by status": (listings.LIST_TASKS_OF_ALL, {**listed, **failed}, 500, 84),
        "dead letters of all": (listings.LIST_DEAD_LETTERS_OF_ALL, dead, 500, 84),
        "metrics": (db.METRICS, {"tenant": None}, 60, 0),
        "the queue": (listings.READ_QUEUE, {"tenant": "tenant-7"}, 100, 0),
        "fold": (figures.FOLD_FIGURES, {"page_rows": 1000}, 4000, 0),
        "audit": (listings.LIST_TRANSITIONS, {"task_id": 4711, "after": 0, "limit": 20}, 30, 2),
        "where the events are": (events.HERE, now, 30, 0),
        "where a run's events are": (events.HERE, {"root_id": A_RUN}, 30, 0),
        "no events": (events.READ_EVENTS, now, 30, 2),
        "events from the beginning": (events.READ_EVENTS, old, 30, 2),
        "no events of a run": (events.READ_EVENTS, {**now, "root_id": A_RUN}, 30, 2),
    }


def of_runs() -> dict[str, Ask]:
    one = {"run_id": A_RUN, "run_ids": [A_RUN], "task_id": A_RUN + 250}
    ended = {**one, "succeeded": [A_RUN + 250, A_RUN + 251], "dead": [A_RUN + 650]}
    references = [{"ordinal": n, "step": f"step-{n}", "path": []} for n in range(1, 5)]
    asked = {**one, "references": json.dumps(references), "most_bytes": 2**20}
    shown = {"number": A_RUN, "tenant": "tenant-7", "present_seconds": 30, "most_bytes": 2**20}
    listed = {"kinds": ["run"], "statuses": ["BLOCKED"], "tenant": "tenant-7", "limit": 5}
    of_all = {**listed, "before": db.LARGEST_ID}
    audit = {"run_id": A_RUN, "after": 0, "limit": 20}
    return {
        "lock a run": (steps.LOCK_RUNS, one, 20, 1),
        "promote": (steps.END_STEPS, {**ended, "dead": []}, 200, 4),
        "cancel descendants": (steps.END_STEPS, {**ended, "succeeded": []}, 400, 8),
        "end a run": (steps.END_RUNS, ended, 40, 0),
        "revive descendants": (steps.REVIVE_DESCENDANTS, ended, 3000, 1000),
        "reopen a run": (steps.REOPEN_RUN, one, 40, 0),
        "read four outputs": (steps.READ_OUTPUTS, asked, 80, 4),
        "find a run": (runs.FIND_RUN, shown, 20, 1),
        "a run of 900 steps": (runs.GET_RUN, shown, 20_000, 2000),
        "the newest runs": (runs.LIST_RUNS, of_all, 8000, 5600),
        "the newest runs of all": (runs.LIST_RUNS_OF_ALL, of_all, 8000, 5600),
        "the audit of a run": (runs.LIST_RUN_TRANSITIONS, audit, 60, 21),
        "ask a run to stop": (runs.CANCEL_RUN, one, 40, 0),
        "cancel 500 steps": (runs.CANCEL_STEPS, one, 20_000, 900),
    }


def of_jobs(leased: Row) -> dict[str, Ask]:
    shown = {"task_id": 500, "limit": 20, "before": None, "most_bytes": 2**20}
    return {
        **{
            name: (statement, values, pages + FIRST_CALL, 0)
            for name, (statement, values, pages) in job_functions(leased).items()
        },
        "the newest state": (jobs.NEWEST_STATE, shown, 20, 0),
        # A job has few states: Postgres may read them all and sort them.
        "the states": (jobs.LIST_STATES, shown, 40, 30),
        "older states": (jobs.LIST_STATES, {**shown, "before": " 0015"}, 40, 30),
    }


FIRST_CALL = 120  # pages of the catalogue, which a function's first call in a session reads


def job_functions(leased: Row) -> dict[str, tuple[str, dict[str, Any], int]]:
    """What calls functions, and the most pages that may touch: for a job with 10,000 model calls.
    What it has spent is read from each of them."""
    fence = {"task_id": leased["task_id"], "token": leased["token"]}
    key = {"node": "coder", "node_run": "run-7", "ordinal": 3}
    limits = {"tokens": 100, "token_budget": 10**9, "tokens_per_day": 10**9}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cost": None, "route": None, "model": None}
    end = {**fence, **usage, "call_id": 77, "reply": "text"}
    state = {
        **fence,
        "checkpoint_id": "9999",
        "parent_id": " 0030",
        "next_nodes": ["a"],
        "graph_version": "v1",
        "state": "{}",
    }
    new = {**fence, **limits, **key, "node_run": "another"}
    unlimited = {**new, "token_budget": None, "tokens_per_day": 0}
    return {
        "hold a lease": (jobs.HOLD_LEASE, fence, 20),
        "a reply that is there": (model_calls.RESERVE_CALL, {**fence, **limits, **key}, 40),
        "reserve a call": (model_calls.RESERVE_CALL, new, 1200),
        "reserve without limits": (model_calls.RESERVE_CALL, unlimited, 60),
        "end a call": (model_calls.END_CALL, end, 100),
        "show a state": (jobs.SHOW_STATE, state, 60),
    }


def of_retention() -> dict[str, Ask]:
    """Such a statement may read a page and, with stale statistics, sort it: here 1,000 rows."""
    tasks = {"after": 20_000, "last_id": 21_000, "cutoff": "2100-01-01", "batch_rows": 200}
    ended = {**tasks, "after": 2_000_000, "last_id": 2_010_000}
    look = {"after": 20_000, "cutoff": "2100-01-01", "page_rows": 1000}
    jobs = {"days": 30, "after_thread": "4004", "batch_rows": 20}
    job_ids = {"task_ids": list(range(4_002_000, 4_002_020))}
    return {
        "the next page": (retention.NEXT_PAGE, look, 60, 0),
        "delete 200 tasks": (retention.DELETE_LONE_TASKS, tasks, 2500, 1000),
        "lock 2 runs of 10": (retention.LOCK_OLD_RUNS, ended, 400, 1000),
        "purge 20 jobs": (checkpoints.PURGE_CHECKPOINTS, jobs, 4000, 200),
        "forget 20 jobs": (checkpoints.FORGET_JOBS, job_ids, 2000, 0),
        "delete 2 runs": (retention.DELETE_RUNS, {"run_ids": ENDED_RUNS}, 2000, 0),
    }


def hot(conn: Connection) -> dict[str, Ask]:
    leased = """
        SELECT task_id, lease_token AS token FROM tasks
        WHERE status = 'RUNNING' ORDER BY task_id DESC LIMIT 8
    """
    running = sql(conn, leased)
    return {
        **of_workers(running),
        **of_jobs(running[0]),
        **of_the_api(events.here(conn, 4711)),
        **of_runs(),
        **of_retention(),
    }


def test_no_hot_statement_reads_a_table_sorts_a_backlog_or_touches_many_pages(
    full: Connection,
) -> None:
    # With stale statistics, what became due is read whole and sorted: here 500 tasks, once.
    marks = too_much(full, "SELECT mark_due()", {}, most_pages=15_000, most_sorted=500)
    for _ in range(2):  # the second passes what the first has left behind
        sql(full, "SELECT mark_due()")
    wrong = {name: too_much(full, *asked) for name, asked in hot(full).items()}
    assert {name: seen for name, seen in {**wrong, "mark": marks}.items() if seen} == {}


def too_much(
    conn: Connection, statement: str, values: dict[str, Any], most_pages: int, most_sorted: int
) -> tuple[list[str], int, int] | None:
    """The tables that it reads whole, its pages and the rows it sorts, if that is too much."""
    plan_of(conn, statement, values)  # what is inside functions is planned here, and kept
    plan = plan_of(conn, statement, values)
    seen = plan.scans_of_whole_tables(), plan.pages, plan.most_rows_sorted()
    is_fine = not seen[0] and plan.pages <= most_pages and plan.most_rows_sorted() <= most_sorted
    return None if is_fine else seen


@pytest.mark.parametrize(
    ("after_tenant", "at_most"),
    [("tenant-50", 20), ("a", 500)],
    ids=["the next few", "all of them"],
)
def test_a_step_of_the_claim_from_tenant_to_tenant_reads_one_row_of_each_route(
    full: Connection, after_tenant: str, at_most: int
) -> None:
    """The statement inside due_tenants, by the plan that Postgres may keep after a few calls."""
    sql(full, "SET plan_cache_mode = force_generic_plan")
    with plans_inside_functions(full) as plans:
        found = sql(
            full,
            "SELECT * FROM due_tenants('{none,local,auto}', %(after_tenant)s, %(at_most)s)",
            after_tenant=after_tenant,
            at_most=at_most,
        )
    sql(full, "RESET plan_cache_mode")
    steps = [plan for plan in plans if len(plan.nodes) > 1]
    assert len(found) >= 20
    assert len(steps) >= 20  # of many, psycopg2 keeps the last 50
    assert [plan.scans_of_whole_tables() for plan in steps if plan.scans_of_whole_tables()] == []
    assert max(plan.pages for plan in steps) <= 40
    assert max(plan.most_rows_read() for plan in steps) <= 3


def test_what_a_worker_writes_of_a_job_reads_no_table_whole_by_the_plans_that_are_kept(
    full: Connection,
) -> None:
    (leased,) = sql(
        full,
        "SELECT task_id, lease_token AS token FROM tasks "
        "WHERE status = 'RUNNING' ORDER BY task_id DESC LIMIT 1",
    )
    wrong = {}
    sql(full, "SET plan_cache_mode = force_generic_plan")
    for name, (statement, values, most_pages) in job_functions(leased).items():
        wrong[name] = too_much(full, statement, values, most_pages, most_sorted=0)
    sql(full, "RESET plan_cache_mode")
    assert {name: seen for name, seen in wrong.items() if seen} == {}


# What need not be fast, and why.
NOT_HOT = {
    "SUBMIT_OWN_TASK": "one INSERT and one look by a unique key",
    "TAKE_TURN": "touches no table",
    "ACT_FOR": "touches no table",
    "DRAW_NUMBERS": "touches no table",
    "CREATE_RUN": "inserts one row",
    "CREATE_STEPS": "inserts what it is given",
    "CREATE_EDGES": "inserts what it is given",
    "CUTOFF": "touches no table",
    "OLDEST_PARTITION": "reads the catalogue: there are as many rows as months",
    "TAKE_PARTITION_TURN": "touches no table",
    "TAKE_LOST_JOBS_TURN": "touches no table",
    "FIND_LOST_JOBS": "once a day it reads the keys of all jobs",
    "DELETE_OLD_COUNTERS": "there are as many rows as tenants",
    "LIST_WORKERS": "there are as many rows as workers",
    "READ_STATE": "once per process",
    "READ_VERSION": "once per process",
    "READ_OTHERS": "once per migration",
    "SAY_WATCHED": "touches no table",
    "SEND_TOKENS": "touches no table",
    "TAKE_REQUESTS": "one row by its key",
    "CREATE_KEY": "inserts one row",
    "FIND_KEY": "one row by its key, and whether there is any",
    "LIST_KEYS": "there are as many rows as keys, and a person reads them",
    "REVOKE_KEY": "one row by its key",
    "CREATE_TICKET": "inserts one row",
    "FORGET_TICKETS": "ten rows; there are as many as streams were opened within a minute",
    "FIND_TICKET": "two rows by their keys",
    "READ_SENDER": "one row by its key, and whether there is any",
    "STORE_SENDER": "one row by its key",
    "FORGET_WORKERS": "there are as many rows as workers",
    "READ_TABLES_VERSION": "ten rows, once per process",
    "REPORT_WORKER": "there are as many rows as workers",
}


def test_every_statement_has_its_plan_looked_at_or_a_reason_why_not(full: Connection) -> None:
    looked_at = {statement for statement, *_ in hot(full).values()}
    names = {name for name, text in statements().items() if text not in looked_at}
    others = {name.split(".")[-1] for name in names}
    assert others == set(NOT_HOT)


def test_the_checks_see_what_they_look_for(full: Connection) -> None:
    oldest = "SELECT task_id FROM tasks ORDER BY created_at LIMIT 1"
    plan = plan_of(full, oldest, {})
    assert plan.scans_of_whole_tables() != []
    assert plan.most_rows_sorted() > 100_000
    assert plan.pages > 1000

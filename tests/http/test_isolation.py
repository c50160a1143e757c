"""One tenant's key opens nothing of another's, on any route that there is or will be.

The routes come from the OpenAPI document and the WebSockets of the application. A route that is not
in CALLS fails the test until somebody says how it is called, with a foreign id in each place where
an id can stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.routing import WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from api.gate import PUBLIC, PUBLIC_FOLDER
from db import Connection
from main import create_app
from tests.conftest import settings_for
from tests.http.conftest import NO_MODEL
from tests.support import jobs, rows
from tests.support.client import refused
from tests.support.keys import KeyHolder, holder, revoke
from tests.support.processes import Api, Processes, eventually
from tests.support.run_client import agent, approval, tool


@pytest.fixture(scope="module")
def module_processes(
    module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    with Processes(module_database, NO_MODEL, tmp_path_factory.mktemp("api")) as started:
        started.configure(limits={"key_cache_seconds": 0.05})
        yield started


@dataclass(frozen=True)
class Call:
    """How a route is called. Where it takes ids, `{…}` stands in its path or in its body."""

    body: Any = None
    foreign: tuple[str, ...] = ()  # what {…} may stand for; nothing: it takes no id
    lists: str | None = None  # it takes no id, and shows those of the tenant under this name
    shows: tuple[str, ...] = ()  # or in these figures, which are empty for a tenant without tasks


APP = create_app(settings_for("postgresql://nobody@127.0.0.1:9/nothing"))
TASKS = ("task", "step", "approval", "dead", "name", "job", "parked step")
CALLS: dict[str, Call] = {
    "GET /": Call(),
    "GET /healthz": Call(),
    "GET /readyz": Call(),
    "GET /metrics": Call(shows=("by_status", "cost_by_route", "avg_retry", "reclaimed_count")),
    "GET /stats": Call(shows=("depth", "delayed", "running", "dead_letters")),
    "POST /tasks": Call({"prompt": "x"}),
    "POST /tasks (agent job)": Call({"task": "x"}),
    "GET /tasks": Call(lists="tasks"),
    "POST /tasks/batch": Call({"tasks": [{"prompt": "x"}]}),
    "GET /tasks/{task_id}": Call(foreign=TASKS),
    "DELETE /tasks/{task_id}": Call(foreign=TASKS),
    "GET /tasks/{task_id}/audit": Call(foreign=TASKS),
    "GET /tasks/{task_id}/checkpoints": Call(foreign=TASKS),
    "GET /tasks/{task_id}/events": Call(foreign=TASKS),
    "POST /tasks/{task_id}/approve": Call(foreign=TASKS),
    "POST /tasks/{task_id}/requeue": Call(foreign=TASKS),
    "GET /dead-letters": Call(lists="tasks"),
    "POST /runs": Call({"goal": "g", "steps": [approval("approval.a")]}),
    "GET /runs": Call(lists="runs"),
    "GET /runs/{run_id}": Call(foreign=("run",)),
    "DELETE /runs/{run_id}": Call(foreign=("run",)),
    "GET /runs/{run_id}/audit": Call(foreign=("run",)),
    "GET /runs/{run_id}/events": Call(foreign=("run",)),
    "WEBSOCKET /runs/{run_id}/events": Call(foreign=("run",)),
    "POST /tickets (runs)": Call({"path": "/runs/{…}/events"}, ("run",)),
    "POST /tickets (tasks)": Call({"path": "/tasks/{…}/events"}, TASKS),
}
OPEN = ("GET /healthz", "GET /readyz", "GET /")  # to everybody


def every_route(routes: Any) -> Iterator[Any]:
    """Those of included routers as well."""
    for route in routes:
        if router := getattr(route, "original_router", None):
            yield from every_route(router.routes)
        else:
            yield route


def routes() -> set[str]:
    """Method and path of every route, as the OpenAPI document tells them; and WebSockets."""
    described = APP.openapi()["paths"]
    found = {f"{method.upper()} {path}" for path in described for method in described[path]}
    every = every_route(APP.routes)
    return found | {f"WEBSOCKET {one.path}" for one in every if isinstance(one, WebSocketRoute)}


def route_of(name: str) -> tuple[str, str]:
    method, path, *_ = name.split(" ")
    return method, path


@dataclass
class Belongings:
    """What the other tenant has, by the words of CALLS."""

    of: dict[str, Any] = field(default_factory=dict)

    @property
    def tasks(self) -> list[int]:
        return [number for name, number in self.of.items() if name not in ("run", "name")]


@pytest.fixture
def theirs(conn: Connection, module_api: Api, tenant: str) -> Belongings:
    """A run that waits for its approval and for that of a job, a task, a dead letter, a task with
    a name, and a job that waits for a person."""
    they = holder(conn, module_api, f"{tenant}-theirs")
    task, dead, named = (they.submit() for _ in range(3))
    rows.settle(conn, rows.claim_this(conn, dead).lease, "permanent")
    name = f"name-of-{tenant}"
    rows.sql(conn, "UPDATE tasks SET name = %(name)s WHERE task_id = %(id)s", name=name, id=named)
    run = they.submit_run(approval("approval.a"), tool("tool_call.b"), agent("agent_call.c"))
    waits, step, parked = (one["task_id"] for one in run["steps"])
    jobs.park(conn, parked, {"code": "x"}, run["run_id"])
    job, _ = jobs.parked(conn, f"{tenant}-theirs", {"code": "x"})
    jobs.reach(conn, job, ["coder"], ["approval"], code="x")
    return Belongings(
        {"task": task, "dead": dead, "name": name, "run": run["run_id"], "approval": waits,
         "step": step, "job": job, "parked step": parked}
    )  # fmt: skip


@pytest.fixture
def mine(conn: Connection, module_api: Api, tenant: str) -> KeyHolder:
    return holder(conn, module_api, tenant)


def send(
    api: Api, name: str, identity: Any = "1", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of the route, called with that id; a stream is left as soon as it is open."""
    method, path = route_of(name)
    path = re.sub(r"\{\w+\}", str(identity), path)
    headers = headers or {}
    if method == "WEBSOCKET":
        return open_socket(api, path, headers)
    body = CALLS[name].body
    if CALLS[name].foreign and body is not None:
        body = {key: value.replace("{…}", str(identity)) for key, value in body.items()}
    with api.http.stream(method, path, json=body, headers=headers) as answer:
        is_json = answer.headers.get("content-type") == "application/json"
        return answer.status_code, json.loads(answer.read()) if is_json else None


def open_socket(api: Api, path: str, headers: dict[str, str]) -> tuple[int, Any]:
    url = f"ws{api.url.removeprefix('http')}{path}"
    try:
        with connect(url, additional_headers=headers, proxy=None, close_timeout=0.1):
            return 101, None
    except InvalidStatus as refusal:
        return refusal.response.status_code, json.loads(refusal.response.body)


def test_every_route_is_called_below() -> None:
    called = {" ".join(route_of(name)) for name in CALLS}
    assert called - {"GET /"} == routes()


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name].foreign])
def test_what_another_tenant_has_is_not_found(
    mine: KeyHolder, theirs: Belongings, conn: Connection, name: str
) -> None:
    before = [rows.row(conn, number) for number in theirs.tasks]
    for word in CALLS[name].foreign:
        status, said = send(mine.api, name, theirs.of[word], {"X-API-Key": mine.key})
        assert (status, said) == (404, {"error": "not found"}), word
    assert [rows.row(conn, number) for number in theirs.tasks] == before
    assert rows.sql(conn, "SELECT * FROM tickets") == []


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name].foreign])
def test_what_is_there_is_found_by_whose_it_is(
    conn: Connection, module_api: Api, theirs: Belongings, tenant: str, name: str
) -> None:
    # The control of the test above: 404 came of the tenant, and not of how the route was called.
    key = {"X-API-Key": holder(conn, module_api, f"{tenant}-theirs").key}
    for word in CALLS[name].foreign:
        status, _ = send(module_api, name, theirs.of[word], key)
        assert status in (101, 200, 201, 202, 204, 409), word
    rows.sql(conn, "TRUNCATE tickets")


def test_a_name_that_another_tenant_uses_is_free(
    mine: KeyHolder, theirs: Belongings, conn: Connection
) -> None:
    body = {"task": "x", "task_id": theirs.of["name"]}
    answer = mine.call("POST", "/tasks", json=body)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name].lists])
def test_a_list_shows_nothing_of_another_tenant(
    mine: KeyHolder, theirs: Belongings, name: str
) -> None:
    status, said = send(mine.api, name, headers={"X-API-Key": mine.key})
    assert (status, said[str(CALLS[name].lists)]) == (200, [])


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name].shows])
def test_a_figure_counts_nothing_of_another_tenant(
    mine: KeyHolder, theirs: Belongings, name: str
) -> None:
    status, said = send(mine.api, name, headers={"X-API-Key": mine.key})
    assert status == 200
    assert [said[figure] for figure in CALLS[name].shows if said[figure]] == []


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OPEN])
def test_without_a_key_or_with_a_revoked_one_no_route_is_open(
    mine: KeyHolder, theirs: Belongings, conn: Connection, name: str
) -> None:
    identity = theirs.of[(CALLS[name].foreign or ("task",))[0]]
    revoke(conn, mine.key)
    eventually(lambda: mine.get("/nothing").status_code == 401)
    for headers in ({}, {"X-API-Key": mine.key}, {"X-Tenant-Id": "default"}):
        assert send(mine.api, name, identity, headers)[0] == 401
    assert rows.sql(conn, "SELECT * FROM tasks WHERE tenant = 'default'") == []


@pytest.mark.parametrize("path", ["/nothing", "/tasks/", "/redoc", "/web", "/webs/main.js", "//"])
def test_what_is_no_route_at_all_needs_a_key_as_well(mine: KeyHolder, path: str) -> None:
    refused(httpx.get(f"{mine.api.url}{path}"), 401)


def test_what_shows_nobodys_data_needs_no_key(mine: KeyHolder) -> None:
    for path in ["/", "/healthz", "/readyz", "/docs", "/openapi.json", "/web/main.js"]:
        assert mine.api.http.get(path).status_code == 200, path
    hidden = {one.path for one in every_route(APP.routes)} - set(APP.openapi()["paths"])
    assert hidden - PUBLIC == {f"{PUBLIC_FOLDER}{{name}}", "/redoc"}  # the last one needs a key

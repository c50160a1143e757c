"""Tickets: live events for who cannot send a header, and no other way in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import db
from api.keys import BAD_TICKET, MISSING, REVOKED
from db import Connection
from queries.operations import cancel_task
from queries.runs import cancel_run
from tests.conftest import settings_for
from tests.http.conftest import NO_MODEL
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.keys import KeyHolder, holder, revoke
from tests.support.processes import Api, Processes, eventually
from tests.support.run_client import RunClient, approval
from tests.support.streams import EventSource, Socket, Watcher


@pytest.fixture(scope="module")
def module_processes(
    module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    with Processes(module_database, NO_MODEL, tmp_path_factory.mktemp("api")) as started:
        started.configure(limits={"key_cache_seconds": 0.05})
        yield started


@pytest.fixture
def mine(conn: Connection, module_api: Api, tenant: str) -> KeyHolder:
    return holder(conn, module_api, tenant)


@pytest.fixture
def run(mine: KeyHolder) -> str:
    """The path of a run that waits."""
    return f"/runs/{mine.submit_run(approval('approval.a'))['run_id']}"


KINDS = [EventSource, Socket]


def expire(conn: Connection) -> None:
    rows.sql(conn, "UPDATE tickets SET expires_at = current_instant()")


def refusal(api: Api, kind: type[Watcher], path: str) -> tuple[int, str]:
    watcher = kind(api, path)
    watcher.until_end()
    return watcher.status_code, watcher.refusal["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_ticket_opens_its_stream_in_every_process_and_may_be_used_again(
    mine: KeyHolder, second_api: Api, conn: Connection, tenant: str, run: str, kind: type[Watcher]
) -> None:
    path = f"{run}/events?ticket={mine.ticket(f'{run}/events')}"
    watchers = [kind(api, path) for api in (mine.api, second_api, mine.api)]
    for watcher in watchers:
        eventually(lambda watcher=watcher: watcher.names() == ["snapshot"])  # type: ignore[misc]
    cancel_run(conn, tenant, run.split("/")[-1])
    for watcher in watchers:
        watcher.until_end()
        assert watcher.names()[-1] == "end"


def test_a_ticket_opens_the_events_of_a_task(
    mine: KeyHolder, conn: Connection, tenant: str
) -> None:
    task_id = mine.submit()
    cancel_task(conn, tenant, str(task_id))
    path = f"/tasks/{task_id}/events"
    watcher = EventSource(mine.api, f"{path}?ticket={mine.ticket(path)}")
    assert [event.name for event in watcher.until_end()] == ["snapshot", "end"]


def test_the_answer_says_how_long_it_is_good_for(mine: KeyHolder, run: str) -> None:
    answer = mine.call("POST", "/tickets", json={"path": f"{run}/events"})
    assert answer.json()["expires_in"] == 60
    assert set(answer.json()) == {"ticket", "expires_in"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_ticket_that_is_not_for_this_stream_opens_nothing(
    mine: KeyHolder, conn: Connection, run: str, kind: type[Watcher]
) -> None:
    other = f"/runs/{mine.submit_run(approval('approval.b'))['run_id']}"
    ticket = mine.ticket(f"{run}/events")
    for path in (f"{other}/events?ticket={ticket}", f"{run}/events?ticket=x{ticket}"):
        assert refusal(mine.api, kind, path) == (401, BAD_TICKET)
    assert refusal(mine.api, kind, f"{run}/events?ticket=") == (401, MISSING)
    expire(conn)
    assert refusal(mine.api, kind, f"{run}/events?ticket={ticket}") == (401, BAD_TICKET)


def test_a_ticket_opens_nothing_but_streams(mine: KeyHolder, run: str) -> None:
    ticket = mine.ticket(f"{run}/events")
    for path in (run, f"{run}/audit", "/runs", "/metrics"):
        answer = mine.api.http.get(f"{path}?ticket={ticket}")
        assert refused(answer, 401) == MISSING


@pytest.mark.parametrize(
    "path",
    ["/runs/1", "/runs/1/audit", "/tasks/1/approve", "/metrics", "", "//x/runs/1/events",
     "/runs/1/events/", "/runs/1/events?ticket=x", "http://x/runs/1/events", "/runs/a%2fb/events"],
)  # fmt: skip
def test_a_ticket_for_anything_but_live_events_is_refused(mine: KeyHolder, path: str) -> None:
    refused(mine.call("POST", "/tickets", json={"path": path}), 422, field="path")


def test_a_ticket_is_not_made_by_a_ticket(mine: KeyHolder, run: str) -> None:
    path = f"{run}/events"
    answer = mine.api.http.post(f"/tickets?ticket={mine.ticket(path)}", json={"path": path})
    assert refused(answer, 401) == MISSING


def test_an_operator_gets_a_ticket_for_any_tenants_events(
    conn: Connection, module_api: Api, run: str
) -> None:
    operator = holder(conn, module_api, None)
    path = f"{run}/events"
    watcher = EventSource(module_api, f"{path}?ticket={operator.ticket(path)}")
    eventually(lambda: watcher.names() == ["snapshot"])


def test_with_a_key_in_the_header_a_stream_needs_no_ticket(mine: KeyHolder, run: str) -> None:
    for kind in KINDS:
        watcher = kind(mine.api, f"{run}/events", **{"X-API-Key": mine.key})
        eventually(lambda watcher=watcher: watcher.names() == ["snapshot"])  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_open_outlives_its_ticket_but_not_its_key(
    mine: KeyHolder, conn: Connection, tenant: str, kind: type[Watcher]
) -> None:
    """Each transition is told only to who would still be let in."""
    run = mine.submit_run(approval("approval.a"))
    path = f"/runs/{run['run_id']}/events"
    watcher = kind(mine.api, f"{path}?ticket={mine.ticket(path)}")
    eventually(lambda: watcher.names() == ["snapshot"])
    expire(conn)
    step = run["steps"][0]["task_id"]
    decided = mine.call("POST", f"/tasks/{step}/approve", json={"approved": False})
    assert decided.status_code == 200
    eventually(lambda: watcher.names()[-1] == "end")

    mine.call("POST", f"/tasks/{step}/requeue")
    watcher = kind(mine.api, path, **{"X-API-Key": mine.key})
    eventually(lambda: watcher.names() == ["snapshot"])
    revoke(conn, mine.key)
    eventually(lambda: mine.get(path.removesuffix("/events")).status_code == 401)
    cancel_run(conn, tenant, str(run["run_id"]))
    watcher.until_end()
    assert watcher.names() == ["snapshot"]
    said = kind(mine.api, path, **{"X-API-Key": mine.key})
    said.until_end()
    assert (said.status_code, said.refusal) == (401, {"error": REVOKED})


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_an_open_api_tells_nothing_more_once_there_is_a_key(
    processes: Processes, database_url: str, kind: type[Watcher]
) -> None:
    processes.configure(limits={"key_cache_seconds": 0.05})
    api = processes.api()
    runs = RunClient(api.http, "acme")
    run = runs.submit(approval("approval.a"))
    path = f"/runs/{run['run_id']}/events"
    watcher = kind(api, path, **{"X-Tenant-Id": "acme"})
    eventually(lambda: watcher.names() == ["snapshot"])
    with contextlib.closing(
        db.connect(database_url, settings_for(database_url).database, "test")
    ) as conn:
        mine = holder(conn, api, "acme")
        eventually(lambda: api.http.get("/nothing").status_code == 401)
        cancel_run(conn, "acme", str(run["run_id"]))
    watcher.until_end()
    assert watcher.names() == ["snapshot"]
    assert mine.read(path.removesuffix("/events"))["status"] == "CANCELLED"


def test_neither_a_key_nor_its_hash_is_in_the_logs(
    mine: KeyHolder, run: str, module_processes: Processes
) -> None:
    mine.ticket(f"{run}/events")
    refused(mine.api.http.get("/tasks", headers={"X-API-Key": f"{mine.key}0"}), 401)
    assert mine.key[-64:] not in mine.api.log


def test_while_there_is_no_key_there_are_no_tickets_and_none_is_needed(api: Api) -> None:
    client = Client(api.http, "default")
    path = f"/tasks/{client.submit()}/events"
    assert "no ticket" in refused(api.http.post("/tickets", json={"path": path}), 409)
    watcher = EventSource(api, f"{path}?ticket=x")
    eventually(lambda: watcher.names() == ["snapshot"])

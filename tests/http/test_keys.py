"""Key mode over HTTP: who is let in, whose data he sees, and when a change is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import api.keys
import db
from api.keys import MISSING, REVOKED, WRONG
from db import Connection
from queries import keys
from queries.workers import report_worker
from tests.conftest import fresh_database, settings_for
from tests.http.conftest import NO_MODEL
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.keys import KeyHolder, holder, id_of, revoke
from tests.support.processes import Api, Processes, eventually
from tests.support.run_client import approval
from tests.support.served import Served

SOON = {"key_cache_seconds": 0.05}


@pytest.fixture(scope="module")
def module_processes(
    module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    with Processes(module_database, NO_MODEL, tmp_path_factory.mktemp("api")) as started:
        started.configure(limits=SOON)
        yield started


@pytest.fixture
def mine(conn: Connection, module_api: Api, tenant: str) -> KeyHolder:
    return holder(conn, module_api, tenant)


@pytest.fixture
def operator(conn: Connection, module_api: Api) -> KeyHolder:
    return holder(conn, module_api, None)


# --- who is let in ---------------------------------------------------------------------------


def test_a_request_with_a_key_belongs_to_the_tenant_of_the_key(
    mine: KeyHolder, conn: Connection, tenant: str
) -> None:
    task_id = mine.submit()
    assert rows.row(conn, task_id)["tenant"] == tenant
    assert mine.read(f"/tasks/{task_id}")["tenant"] == tenant
    assert [task["id"] for task in mine.read("/tasks")["tasks"]] == [task_id]


def test_a_request_without_a_key_is_told_which_header_it_needs(mine: KeyHolder) -> None:
    answer = mine.api.http.get("/tasks", headers={"X-Tenant-Id": "default"})
    assert refused(answer, 401) == MISSING
    assert answer.headers["www-authenticate"] == "ApiKey"


def test_a_key_that_is_wrong_in_any_way_opens_nothing(
    mine: KeyHolder, conn: Connection, tenant: str
) -> None:
    other = keys.create_key(conn, tenant)
    key_id, secret = id_of(mine.key), mine.key[-64:]
    wrong = {
        "", "x", "ak__", f"ak_{key_id}_", key_id, secret, f"{key_id}_{secret}",
        f"ak_{key_id}_{other[-64:]}", f"ak_{id_of(other)}_{secret}", f"ak_{'0' * 12}_{secret}",
        mine.key[:-1], f"{mine.key}0", f"{mine.key} x", mine.key.upper(),
        f"ak_{key_id}_{keys.digest_of(secret).hex()}",
    }  # fmt: skip
    for one in wrong:
        answer = mine.api.http.get("/tasks", headers={"X-API-Key": one})
        assert refused(answer, 401) == WRONG, one
    assert mine.get("/tasks").status_code == 200


def test_a_revoked_key_opens_nothing_any_more_in_every_process(
    mine: KeyHolder, second_api: Api, conn: Connection
) -> None:
    there = KeyHolder(second_api, mine.key)
    for one in (mine, there):
        assert one.get("/tasks").status_code == 200
    revoke(conn, mine.key)
    for one in (mine, there):
        answer = eventually(lambda one=one: (a := one.get("/tasks")).status_code == 401 and a)  # type: ignore[misc]
        assert refused(answer, 401) == REVOKED
    wrong = KeyHolder(second_api, f"ak_{id_of(mine.key)}_{'0' * 64}")
    assert refused(wrong.get("/tasks"), 401) == WRONG  # only who has the secret learns of it


def test_who_waits_for_a_task_is_told_nothing_once_his_key_is_revoked(
    mine: KeyHolder, conn: Connection
) -> None:
    task_id = mine.submit()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.get, f"/tasks/{task_id}", params={"wait": 60})
        revoke(conn, mine.key)
        assert refused(waiting.result(), 401) == REVOKED


def test_the_first_key_closes_every_process_that_was_open_and_revoking_it_opens_none(
    server_url: str, tmp_path: Path
) -> None:
    with (
        fresh_database(server_url) as url,
        Processes(url, NO_MODEL, tmp_path) as processes,
    ):
        processes.configure(limits=SOON)
        apis = [processes.api(), processes.api()]
        for api in apis:
            Client(api.http, "acme").submit()
        conn = db.connect(url, settings_for(url).database, "test")
        key = keys.create_key(conn, "acme")
        assert KeyHolder(apis[0], key).get("/tasks").status_code == 200  # at once
        for api in apis:  # the second one was told of no key
            eventually(lambda api=api: api.http.get("/tasks").status_code == 401)  # type: ignore[misc]
            assert KeyHolder(api, key).get("/tasks").status_code == 200
        revoke(conn, key)
        for api in apis:
            eventually(lambda api=api: KeyHolder(api, key).get("/tasks").status_code == 401)  # type: ignore[misc]
            assert refused(api.http.get("/tasks"), 401) == MISSING
        assert refused(processes.api().http.get("/tasks"), 401) == MISSING
        conn.close()


def test_while_there_is_no_key_the_header_is_not_looked_at(server_url: str) -> None:
    with fresh_database(server_url) as url, Served(settings_for(url)) as served:
        headers = {"X-API-Key": f"ak_{'0' * 12}_{'0' * 64}", "X-Tenant-Id": "acme"}
        assert httpx.get(f"{served.url}/tasks", headers=headers).json()["tasks"] == []


# --- how often the database is asked ---------------------------------------------------------


def test_a_key_that_is_known_costs_no_look_into_the_database(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find_key(conn: Connection, key_id: str) -> Any:
        asked.append(key_id)
        return keys.find_key(conn, key_id)

    monkeypatch.setattr(api.keys, "find_key", find_key)
    with fresh_database(server_url) as url:
        conn = db.connect(url, settings_for(url).database, "test")
        key = keys.create_key(conn, "acme")
        settings = settings_for(url, limits={"key_cache_seconds": 3600})
        with Served(settings) as served, httpx.Client(base_url=served.url) as http:
            for _ in range(20):
                sent = {"json": {"prompt": "x"}, "headers": {"X-API-Key": key}}
                assert http.post("/tasks", **sent).status_code == 201  # type: ignore[arg-type]
            assert asked == [id_of(key)]
            http.get("/tasks")
            assert asked == [id_of(key)]
            known = served.services.keys._known
            monkeypatch.setattr(api.keys, "MOST_KNOWN", 3)
            for n in range(10):
                stranger = {"X-API-Key": f"ak_{n:012}_{'0' * 64}"}
                assert http.get("/tasks", headers=stranger).status_code == 401
            assert len(known) == 3
        conn.close()


def test_while_the_database_is_away_nobody_is_let_in_whose_key_is_not_known(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh_database(server_url) as url:
        conn = db.connect(url, settings_for(url).database, "test")
        key = keys.create_key(conn, "acme")
        conn.close()
        settings = settings_for(url, limits={"key_cache_seconds": 0.001})
        with Served(settings) as served, httpx.Client(base_url=served.url) as http:
            assert http.get("/nothing", headers={"X-API-Key": key}).status_code == 404

            def away(*args: Any) -> Any:
                raise db.DatabaseUnavailable("away")

            monkeypatch.setattr(served.services.database, "run", away)
            assert refused(http.get("/nothing", headers={"X-API-Key": key}), 503) == "away"
            assert refused(http.get("/nothing"), 401) == MISSING


# --- X-Tenant-Id -----------------------------------------------------------------------------


def test_the_header_may_repeat_the_tenant_of_the_key_and_name_no_other(
    mine: KeyHolder, tenant: str
) -> None:
    assert mine.get("/tasks", headers={"X-Tenant-Id": tenant}).status_code == 200
    said = refused(mine.get("/tasks", headers={"X-Tenant-Id": "other"}), 403)
    assert f"this key is tenant {tenant}'s" in said
    refused(mine.get("/tasks", headers={"X-Tenant-Id": "a b"}), 400)


# --- operators -------------------------------------------------------------------------------


def test_an_operator_reads_what_any_tenant_has_and_is_told_whose_it_is(
    mine: KeyHolder, operator: KeyHolder, tenant: str
) -> None:
    task, run = mine.submit(), mine.submit_run(approval("approval.a"))["run_id"]
    for path in (f"/tasks/{task}", f"/runs/{run}"):
        assert operator.read(path)["tenant"] == tenant
        assert operator.read(f"{path}/audit")["audit"] != []


def test_an_operators_lists_hold_all_tenants_newest_first_and_page_by_page(
    conn: Connection, module_api: Api, operator: KeyHolder
) -> None:
    tenants = [holder(conn, module_api, f"listed-{n}") for n in range(3)]
    tasks, runs = [], []
    for _ in range(3):
        for one in tenants:
            tasks.append(one.submit())
            runs.append(one.submit_run(approval("approval.a"))["run_id"])
            task = rows.claim_this(conn, one.submit())
            rows.settle(conn, task.lease, "permanent")
    dead = [number + 3 for number in tasks]

    def listed(path: str, list_name: str, number: str, **asked: Any) -> list[int]:
        found: list[int] = []
        at: dict[str, str] = {}
        while True:
            page = operator.read(path, params={"limit": 4, **asked, **at})
            found += [int(one[number]) for one in page[list_name]]
            if page["next_cursor"] is None:
                return found
            at = {"cursor": page["next_cursor"]}

    every = listed("/tasks", "tasks", "id")
    assert every == sorted(every, reverse=True)
    assert set(tasks + dead) <= set(every)
    assert listed("/tasks", "tasks", "id", status="FAILED")[:9] == sorted(dead, reverse=True)
    assert listed("/runs", "runs", "run_id")[:9] == sorted(runs, reverse=True)
    assert listed("/dead-letters", "tasks", "id")[:9] == sorted(dead, reverse=True)


def test_an_operators_view_is_narrowed_by_the_header(
    mine: KeyHolder, operator: KeyHolder, conn: Connection, module_api: Api, tenant: str
) -> None:
    task_id, foreign = mine.submit(), holder(conn, module_api, "foreign").submit()
    only = {"X-Tenant-Id": tenant}
    assert [task["id"] for task in operator.read("/tasks", headers=only)["tasks"]] == [task_id]
    refused(operator.get(f"/tasks/{foreign}", headers=only), 404)
    assert operator.read("/metrics", headers=only)["by_status"] == {"PENDING": 1}


def test_an_operator_says_for_whom_he_changes_something(
    mine: KeyHolder, operator: KeyHolder, tenant: str
) -> None:
    task_id = mine.submit()
    said = refused(operator.call("DELETE", f"/tasks/{task_id}"), 400)
    assert "X-Tenant-Id" in said
    refused(operator.call("POST", "/tasks", json={"prompt": "x"}), 400)
    only = {"X-Tenant-Id": tenant}
    assert operator.call("DELETE", f"/tasks/{task_id}", headers=only).status_code == 200
    assert operator.call("POST", "/tasks", json={"prompt": "x"}, headers=only).status_code == 201
    assert len(mine.read("/tasks")["tasks"]) == 2


def test_by_name_an_operator_finds_a_task_only_in_a_tenant(
    mine: KeyHolder, operator: KeyHolder, conn: Connection, tenant: str
) -> None:
    task_id = mine.submit()
    rows.sql(conn, "UPDATE tasks SET name = 'n' WHERE task_id = %(id)s", id=task_id)
    refused(operator.get("/tasks/n"), 404)
    assert operator.read("/tasks/n", headers={"X-Tenant-Id": tenant})["id"] == task_id


# --- figures ---------------------------------------------------------------------------------


def test_a_tenants_figures_are_its_own_and_an_operators_are_those_of_all(
    mine: KeyHolder, operator: KeyHolder, conn: Connection, module_api: Api
) -> None:
    rows.sql(conn, "TRUNCATE tasks")
    other = holder(conn, module_api, "figures")
    mine.submit()
    for _ in range(2):
        other.submit()
    as_text = {"Accept": "text/plain"}
    for one, tasks in ((mine, 1), (other, 2), (operator, 3)):
        assert one.read("/metrics")["by_status"] == {"PENDING": tasks}
        assert one.read("/stats")["depth"] == tasks
        text = one.get("/metrics", headers=as_text).text
        assert f'orchestrator_tasks{{status="PENDING"}} {tasks}\n' in text
        assert f"orchestrator_depth {tasks}\n" in text


def test_a_tenant_is_told_which_routes_are_paused_and_nothing_of_machines(
    mine: KeyHolder, operator: KeyHolder, conn: Connection
) -> None:
    worker_id = "00000000-0000-0000-0000-000000000001"
    report_worker(conn, worker_id, "box-7", 4, 1, {"local": "10.0.0.7 is away"})  # type: ignore[arg-type]
    seen = operator.read("/stats")
    assert seen["workers"][0]["name"] == "box-7"
    assert seen["paused_routes"] == {"local": "10.0.0.7 is away"}
    shown = mine.read("/stats")
    assert shown["workers"] is None
    assert shown["paused_routes"] == {"local": "its model server cannot be used now"}

"""What one tenant may ask for, over all API processes. The database's clock stands still here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import api.quotas
import db
from db import Connection
from errors import DatabaseUnavailable
from queries import quotas
from queries.keys import create_key
from tests.conftest import administrator, fresh_database, settings_for
from tests.http.conftest import NO_MODEL
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.processes import Api, Processes, eventually
from tests.support.run_client import RunClient, approval, tool
from tests.support.served import Served

LIMIT = 40
SOON_OVER = "2026-01-01T00:00:10+00:00"  # fifty seconds before the minute ends


@pytest.fixture
def database_url(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        with administrator(url) as cursor:
            name = url.rsplit("/", 1)[1]
            cursor.execute(f"ALTER DATABASE {name} SET orchestrator.fake_now = '{SOON_OVER}'")
        yield url


@pytest.fixture
def apis(database_url: str, tmp_path: Path) -> Iterator[Callable[..., list[Api]]]:
    """apis(some_limit=1): two API processes with these limits."""
    with Processes(database_url, NO_MODEL, tmp_path) as processes:

        def start(**limits: float) -> list[Api]:
            processes.configure(limits=limits)
            return [processes.api(), processes.api()]

        yield start


@pytest.fixture
def conn(database_url: str) -> Iterator[Connection]:
    with contextlib.closing(
        db.connect(database_url, settings_for(database_url).database, "test")
    ) as conn:
        yield conn


@contextlib.contextmanager
def asking(database_url: str, limit: int) -> Iterator[httpx.Client]:
    """A client of an API in this process, with that many requests in a minute."""
    settings = settings_for(database_url, limits={"tenant_requests_per_minute": limit})
    with Served(settings) as served, httpx.Client(base_url=served.url) as http:
        yield http


def of_tenant(tenant: str) -> dict[str, str]:
    return {"X-Tenant-Id": tenant}


# --- requests --------------------------------------------------------------------------------


def test_the_requests_of_a_minute_are_bounded_over_all_processes(
    apis: Callable[..., list[Api]],
) -> None:
    both = apis(tenant_requests_per_minute=LIMIT)
    answers = [both[n % 2].http.get("/tasks", headers=of_tenant("a")) for n in range(2 * LIMIT)]
    let_in = [answer for answer in answers if answer.status_code == 200]
    block = LIMIT // api.quotas.BLOCKS_PER_MINUTE
    assert LIMIT - block <= len(let_in) <= LIMIT
    said = refused(answers[-1], 429)
    assert f"{LIMIT} requests in a minute (limits.tenant_requests_per_minute)" in said
    assert 40 <= int(answers[-1].headers["Retry-After"]) <= 50
    for one in both:
        assert one.http.get("/tasks", headers=of_tenant("b")).status_code == 200
        assert one.http.get("/healthz").status_code == 200


def test_requests_that_come_together_are_counted_one_by_one(
    apis: Callable[..., list[Api]],
) -> None:
    both = apis(tenant_requests_per_minute=LIMIT)

    def ask(n: int) -> int:
        return both[n % 2].http.get("/nothing", headers=of_tenant("a")).status_code

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(ask, range(3 * LIMIT)))
    assert set(statuses) == {404, 429}
    assert LIMIT - 2 <= statuses.count(404) <= LIMIT


def test_most_requests_cost_no_look_into_the_database(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def take_requests(*args: Any) -> quotas.Block:
        taken.append(args)
        return quotas.take_requests(*args)

    monkeypatch.setattr(api.quotas, "take_requests", take_requests)
    with asking(database_url, 1000) as http:
        for _ in range(50):
            http.get("/nothing")
        assert len(taken) == 1
        http.get("/nothing")
        assert len(taken) == 2


def test_a_tenant_whose_share_is_spent_costs_no_look_into_the_database_either(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asking(database_url, 1) as http:
        statuses = [http.get("/nothing").status_code for _ in range(3)]
        assert statuses == [404, 429, 429]
        monkeypatch.setattr(api.quotas, "take_requests", None)
        assert http.get("/nothing").status_code == 429


def test_requests_that_wait_for_a_look_into_the_database_hold_up_nobody(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, gate = [], threading.Event()

    def take_requests(*args: Any) -> quotas.Block:
        looks.append(args)
        gate.wait(60)
        raise DatabaseUnavailable

    monkeypatch.setattr(api.quotas, "take_requests", take_requests)
    with asking(database_url, 100) as http, ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(http.get, "/nothing", headers=of_tenant("a")) for _ in range(50)]
        eventually(lambda: len(looks) == 1)
        # No thread is held by those who wait: what needs one is answered meanwhile.
        assert http.get("/readyz").status_code == 200
        gate.set()
        assert {one.result().status_code for one in asked} == {503}


def test_with_keys_the_tenant_is_the_keys_and_an_operator_is_not_counted(
    database_url: str, conn: Connection
) -> None:
    mine, operator = create_key(conn, "acme"), create_key(conn, None)
    with asking(database_url, 1) as http:
        asked = [mine, mine, operator, operator]
        answers = [http.get("/tasks", headers={"X-API-Key": key}) for key in asked]
        assert [answer.status_code for answer in answers] == [200, 429, 200, 200]
        assert http.get("/tasks").status_code == 401


def test_a_new_minute_of_the_database_gives_new_requests(conn: Connection) -> None:
    def take(clock: str, most: int = 4) -> tuple[int, float]:
        rows.set_clock(conn, f"2026-01-01T{clock}+00:00")
        block = quotas.take_requests(conn, "a", most, 10)
        return block.requests, block.seconds_left

    assert [take("00:00:01"), take("00:00:30"), take("00:00:59")] == [(4, 59), (4, 30), (2, 1)]
    assert take("00:00:59.5") == (0, 0.5)
    assert take("00:01:00") == (4, 60)
    # One who comes late, with the clock of the minute before, takes of the newer one.
    assert take("00:00:59")[0] == 4
    assert take("00:01:01")[0] == 2


# --- tasks that wait -------------------------------------------------------------------------


def test_a_tenant_may_have_so_many_tasks_that_wait_and_no_more(
    apis: Callable[..., list[Api]], conn: Connection
) -> None:
    first, second = apis(tenant_queued_tasks=5)
    mine, there = Client(first.http, "acme"), Client(second.http, "acme")
    batch = {"tasks": [{"prompt": "x"}] * 6}
    answer = first.http.post("/tasks/batch", json=batch, headers=of_tenant("acme"))
    assert "5 tasks that wait, and has 0" in refused(answer, 429)
    tasks = [mine.submit() for _ in range(5)]
    for client in (mine, there):
        answer = client.post()
        assert "has 5 (limits.tenant_queued_tasks)" in refused(answer, 429)
        assert int(answer.headers["Retry-After"]) >= 1
    run = RunClient(first.http, "acme").post_steps(approval("approval.a"), tool("b", "approval.a"))
    refused(run, 429)
    assert rows.count_tasks(conn) == 5
    Client(first.http, "other").submit()
    rows.claim_this(conn, tasks[0])
    first.http.delete(f"/tasks/{tasks[1]}", headers=of_tenant("acme"))
    eventually(lambda: mine.post().status_code == 201)


def test_what_runs_or_has_ended_does_not_wait_and_what_waits_for_others_does(
    conn: Connection,
) -> None:
    def queued(most: int = 100) -> int:
        return quotas.count_queued(conn, "default", most)

    for status in ("RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"):
        rows.bring_to(conn, status)
    assert queued() == 0
    rows.submit(conn)
    rows.submit(conn, delay_seconds=60)
    rows.bring_to(conn, "BLOCKED")
    rows.bring_to(conn, "AWAITING_APPROVAL")
    assert queued() == 4
    rows.submit(conn, tenant="other")
    rows.submit(
        conn, kind="callback", payload={"task_id": 1, "url": "http://a"}, requested_route="none"
    )
    assert queued() == 4, "a receiver that is away keeps nobody from submitting"
    assert queued(most=1) >= 1

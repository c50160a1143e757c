"""Idempotency-Key of POST /runs: one key makes one run, whoever sends it however often."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from db import Connection
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.processes import Api
from tests.support.run_client import RunClient, llm, tool
from tests.support.runs import finish

BODY: dict[str, Any] = {
    "goal": "once",
    "steps": [{"name": "a", "input": {"tool": "echo", "args": {"x": 1, "y": [2]}}},
              {"name": "b", "input": {"prompt": "p"}, "dependsOn": ["a"], "max_retry": 2}],
}  # fmt: skip


@pytest.fixture
def runs(client: Client) -> RunClient:
    return RunClient(client.http, client.tenant)


def stored_of(conn: Connection, tenant: str) -> tuple[int, int]:
    """How many runs, and how many tasks all in all."""
    statement = """
        SELECT count(*) FILTER (WHERE kind = 'run') AS runs, count(*) AS rows
        FROM tasks WHERE tenant = %(tenant)s
    """
    found = rows.sql(conn, statement, tenant=tenant)[0]
    return found["runs"], found["rows"]


def assert_replay(answer: httpx.Response, run_id: int) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.headers["Idempotency-Replayed"] == "true"
    assert answer.json()["run_id"] == run_id


def test_the_same_key_and_body_get_the_first_run_and_make_no_second(
    runs: RunClient, conn: Connection
) -> None:
    first = runs.post(BODY, key="k")
    assert first.status_code == 201
    assert "Idempotency-Replayed" not in first.headers
    for _ in range(3):
        again = runs.post(BODY, key="k")
        assert_replay(again, first.json()["run_id"])
        assert again.json() == first.json()
    assert stored_of(conn, runs.tenant) == (1, 3)


def test_a_replay_tells_how_the_run_stands_now(runs: RunClient, conn: Connection) -> None:
    first = runs.post(BODY, key="k").json()
    finish(conn, first["run_id"], "a", result={"rows": []})
    again = runs.post(BODY, key="k")
    assert_replay(again, first["run_id"])
    assert [step["status"] for step in again.json()["steps"]] == ["SUCCEEDED", "PENDING"]
    runs.cancel(first["run_id"])
    assert runs.post(BODY, key="k").json()["status"] == "CANCELLED"


SAME: list[bytes] = [
    b'{"steps": [{"input": {"args": {"y": [2], "x": 1}, "tool": "echo"}, "name": "a"},'
    b' {"max_retry": 2, "dependsOn": ["a"], "name": "b", "input": {"prompt": "\\u0070"}}],'
    b' "goal": "once"}',
    b'{"goal":"once","steps":[{"name":"a","input":{"tool":"echo","args":{"x":1,"y":[2]}},'
    b'"dependsOn":[],"max_retry":null},{"name":"b","input":{"prompt":"p"},"dependsOn":["a"],'
    b'"max_retry":2}]}',
]


@pytest.mark.parametrize("body", SAME)
def test_order_space_spelling_and_defaults_do_not_make_it_another_body(
    runs: RunClient, body: bytes
) -> None:
    run_id = runs.post(BODY, key="k").json()["run_id"]
    assert_replay(runs.post(body, key="k"), run_id)


A, B = BODY["steps"]
OTHER: list[dict[str, Any]] = [
    {"goal": "twice"}, {"steps": [A]}, {"steps": [B, A]}, {"steps": [A, {**B, "max_retry": 3}]},
    {"steps": [A, {**B, "dependsOn": []}]}, {"steps": [A, {**B, "name": "c"}]},
    {"steps": [A, llm("b", "a", prompt="q")]}, {"steps": [A, B, tool("c")]},
]  # fmt: skip


@pytest.mark.parametrize("change", OTHER)
def test_another_body_under_the_same_key_is_refused_and_makes_no_run(
    runs: RunClient, conn: Connection, change: dict[str, Any]
) -> None:
    runs.post(BODY, key="k")
    assert "Idempotency-Key" in refused(runs.post(BODY | change, key="k"), 422)
    assert stored_of(conn, runs.tenant) == (1, 3)


def test_a_key_of_a_run_is_none_of_a_task_and_belongs_to_its_tenant(
    runs: RunClient, client: Client, conn: Connection
) -> None:
    assert client.post({"prompt": "once"}, key="k").status_code == 201
    assert runs.post(BODY, key="k").status_code == 201
    assert runs.post(BODY, key="K").status_code == 201
    other = RunClient(client.http, f"{client.tenant}-other")
    assert other.post(BODY, key="k").status_code == 201
    assert stored_of(conn, runs.tenant) == (2, 7)


def test_names_of_steps_are_unique_in_their_run_only(runs: RunClient) -> None:
    assert runs.post(BODY).json()["run_id"] != runs.post(BODY).json()["run_id"]


@pytest.mark.parametrize("key", [b"", b"x" * 256, "ü".encode(), b"\xfc", b"a\tb"])
def test_a_key_that_is_none_is_refused_and_nothing_is_stored(
    runs: RunClient, conn: Connection, key: bytes
) -> None:
    headers = [(b"X-Tenant-Id", runs.tenant.encode()), (b"Idempotency-Key", key)]
    answer = runs.http.post("/runs", json=BODY, headers=headers)
    assert "Idempotency-Key" in refused(answer, 400, 422)
    assert stored_of(conn, runs.tenant) == (0, 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_parallel_posts_with_one_key_make_one_run(
    module_api: Api, second_api: Api, conn: Connection, tenant: str, processes: int
) -> None:
    apis = [module_api, second_api][:processes]
    for round_number in range(5):
        who = f"{tenant}-{round_number}"
        together = threading.Barrier(20)

        def post(number: int, who: str = who, together: threading.Barrier = together) -> Any:
            runs = RunClient(apis[number % len(apis)].http, who)
            together.wait()
            return runs.post(BODY, key="k")

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(post, range(20)))
        assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
        assert len({answer.json()["run_id"] for answer in answers}) == 1
        assert stored_of(conn, who) == (1, 3)

"""Idempotency-Key: one key makes one task, whoever sends it however often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import db
from api.requests import canonical_hash
from config import Settings
from db import Connection
from tests.conftest import settings_for
from tests.support import rows
from tests.support.client import JSON, Client, refused
from tests.support.processes import Api, eventually

BODY: dict[str, Any] = {"prompt": "once", "priority": 3, "metadata": {"b": 1, "a": [2]}}


def count_of(conn: Connection, tenant: str) -> int:
    statement = "SELECT count(*) AS n FROM tasks WHERE tenant = %(tenant)s"
    return int(rows.sql(conn, statement, tenant=tenant)[0]["n"])


def assert_replay(answer: httpx.Response, task_id: int) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.headers["Idempotency-Replayed"] == "true"
    assert answer.json()["task_id"] == task_id


def test_the_same_key_and_body_get_the_first_task_and_make_no_second(
    client: Client, conn: Connection
) -> None:
    first = client.post(BODY, key="k")
    assert first.status_code == 201
    assert "Idempotency-Replayed" not in first.headers
    for _ in range(3):
        assert_replay(client.post(BODY, key="k"), first.json()["task_id"])
    assert count_of(conn, client.tenant) == 1


def test_a_replay_tells_the_tasks_status_of_now(client: Client, conn: Connection) -> None:
    task_id = client.post(BODY, key="k").json()["task_id"]
    rows.finish(conn, task_id)
    again = client.post(BODY, key="k")
    assert_replay(again, task_id)
    assert again.json()["status"] == "SUCCEEDED"


SAME: list[bytes] = [
    b'{"metadata": {"a": [2], "b": 1}, "priority": 3, "prompt": "once"}',
    b'  {"prompt":"once","priority":3,"metadata":{"b":1,"a":[2]}}\n',
    b'{"prompt":"\\u006fnce","priority":3,"metadata":{"b":1,"a":[2]}}',
    b'{"prompt":"once","priority":3,"metadata":{"b":1,"a":[2]},"delay_seconds":0,"max_retry":null,'
    b'"timeout_seconds":null,"route":"auto"}',
    b'{"prompt":"once","priority":3,"metadata":{"b":1,"a":[2]},"delay_seconds":0.0}',
]


@pytest.mark.parametrize("body", SAME)
def test_order_space_spelling_and_defaults_do_not_make_it_another_body(
    client: Client, body: bytes
) -> None:
    task_id = client.post(BODY, key="k").json()["task_id"]
    assert_replay(client.post_raw(body, **JSON, **{"Idempotency-Key": "k"}), task_id)


OLD_BODY = {
    "prompt": "once", "priority": 3, "delay_seconds": 0.0, "max_retry": None,
    "timeout_seconds": None, "route": "auto", "metadata": {"b": 1, "a": [2]},
}  # fmt: skip


def test_a_key_of_before_there_were_callbacks_still_finds_its_task(
    client: Client, conn: Connection
) -> None:
    old = {"idempotency_key": "k", "request_hash": canonical_hash(OLD_BODY)}
    task_id = rows.submit(conn, tenant=client.tenant, idempotency_scope="tasks", **old)
    assert_replay(client.post(BODY, key="k"), task_id)
    old = {"idempotency_key": "k", "request_hash": canonical_hash({"tasks": [OLD_BODY]})}
    task_id = rows.submit(conn, tenant=client.tenant, idempotency_scope="batch", **old)
    headers = {"X-Tenant-Id": client.tenant, "Idempotency-Key": "k"}
    again = client.http.post("/tasks/batch", json={"tasks": [BODY]}, headers=headers)
    assert (again.status_code, again.json()["tasks"][0]["task_id"]) == (200, task_id)


OTHER: list[dict[str, Any]] = [
    {"prompt": "twice"}, {"prompt": "once "}, {"priority": 4}, {"delay_seconds": 1},
    {"max_retry": 3}, {"timeout_seconds": 60}, {"route": "local"}, {"metadata": None},
    {"metadata": {"b": 1, "a": [2], "c": None}},
]  # fmt: skip


@pytest.mark.parametrize("change", OTHER)
def test_another_body_under_the_same_key_is_refused_and_makes_no_task(
    client: Client, conn: Connection, change: dict[str, Any]
) -> None:
    client.post(BODY, key="k")
    said = refused(client.post(BODY | change, key="k"), 422)
    assert "Idempotency-Key" in said
    assert count_of(conn, client.tenant) == 1


def test_another_key_makes_another_task(client: Client) -> None:
    first, second = client.post(BODY, key="k"), client.post(BODY, key="K")
    assert [first.status_code, second.status_code] == [201, 201]
    assert first.json()["task_id"] != second.json()["task_id"]


def test_a_key_belongs_to_its_tenant(client: Client, module_api: Api) -> None:
    other = Client(module_api.http, f"{client.tenant}-other")
    mine, theirs = client.post(BODY, key="k"), other.post({"prompt": "theirs"}, key="k")
    assert [mine.status_code, theirs.status_code] == [201, 201]
    assert mine.json()["task_id"] != theirs.json()["task_id"]


def test_without_a_key_the_same_body_makes_a_task_each_time(client: Client) -> None:
    assert client.submit(**BODY) != client.submit(**BODY)


def test_a_refused_body_does_not_use_up_its_key(client: Client) -> None:
    refused(client.post({"prompt": ""}, key="k"), 422)
    assert client.post(BODY, key="k").status_code == 201


@pytest.mark.parametrize("key", ["x", "x" * 255, "a b", "!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~"])
def test_a_key_of_1_to_255_printable_ascii_characters_is_accepted(client: Client, key: str) -> None:
    task_id = client.post(BODY, key=key).json()["task_id"]
    assert_replay(client.post(BODY, key=key), task_id)


KEYS = {
    "empty": b"", "too long": b"x" * 256, "umlaut": "ü".encode(), "latin-1": b"\xfc",
    "a tab": b"a\tb",
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_any_other_key_is_refused_and_nothing_is_stored(
    client: Client, conn: Connection, key: bytes
) -> None:
    headers = [(b"X-Tenant-Id", client.tenant.encode()), (b"Idempotency-Key", key)]
    said = refused(client.http.post("/tasks", json=BODY, headers=headers), 400, 422)
    assert "Idempotency-Key" in said
    assert count_of(conn, client.tenant) == 0


# --- at once ---------------------------------------------------------------------------------


def post_at_once(apis: list[Api], tenant: str, times: int) -> list[httpx.Response]:
    together = threading.Barrier(times)

    def post(number: int) -> httpx.Response:
        client = Client(apis[number % len(apis)].http, tenant)
        together.wait()
        return client.post(BODY, key="k")

    with ThreadPoolExecutor(times) as pool:
        return list(pool.map(post, range(times)))


@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_parallel_posts_with_one_key_make_one_task(
    module_api: Api, second_api: Api, conn: Connection, tenant: str, processes: int
) -> None:
    apis = [module_api, second_api][:processes]
    for round_number in range(5):
        who = f"{tenant}-{round_number}"
        answers = post_at_once(apis, who, 20)
        assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
        assert len({answer.json()["task_id"] for answer in answers}) == 1
        assert count_of(conn, who) == 1


@pytest.fixture
def holder(module_database: str) -> Iterator[Connection]:
    """A second connection, for a transaction that another process has not ended yet."""
    settings: Settings = settings_for(module_database)
    holder = db.connect(settings.database_url, settings.database, "holder")
    yield holder
    holder.close()


def waits_for_a_lock(conn: Connection) -> Callable[[], bool]:
    statement = """
        SELECT pid FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()
          AND application_name = 'orchestrator api'
    """
    return lambda: bool(rows.sql(conn, statement))


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_a_key_that_another_transaction_holds_holds_up_no_other_task(
    client: Client, module_api: Api, conn: Connection, holder: Connection, ending: str
) -> None:
    task = rows.new_task(
        tenant=client.tenant, payload={"prompt": "held"}, idempotency_scope="tasks",
        idempotency_key="held", request_hash=rows.request_hash(prompt="held"),
    )  # fmt: skip
    free = Client(module_api.http, f"{client.tenant}-free")
    with ThreadPoolExecutor(21) as pool, holder.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(db.SUBMIT_TASKS, {"tasks": db._as_json([task], [0])})
        held_id = cursor.fetchone()[1]
        blocked = pool.submit(client.post, {"prompt": "held"}, "held")
        eventually(waits_for_a_lock(conn), what="the request waits for the holder")
        others = [pool.submit(free.post) for _ in range(20)]
        assert [other.result(timeout=20).status_code for other in others] == [201] * 20
        assert not blocked.done()
        cursor.execute(ending)
        answer = blocked.result(timeout=60)
    if ending == "COMMIT":
        assert_replay(answer, held_id)
    else:
        assert answer.status_code == 201
    assert count_of(conn, client.tenant) == 1

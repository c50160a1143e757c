"""A job's own name: one unfinished task of a tenant bears it, and it leads to the newest."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from db import Connection
from tests.http.test_jobs_submit import JOB, post_batch
from tests.support import jobs, lives, rows
from tests.support.client import Client, refused
from tests.support.processes import Api

NAMED = {**JOB, "task_id": "t1"}


def count_of(conn: Connection, tenant: str) -> int:
    statement = "SELECT count(*) AS n FROM tasks WHERE tenant = %(tenant)s"
    return int(rows.sql(conn, statement, tenant=tenant)[0]["n"])


def call(client: Client, method: str, path: str) -> httpx.Response:
    return client.http.request(method, path, headers={"X-Tenant-Id": client.tenant})


def submit_named(client: Client, name: str = "t1") -> int:
    answer = client.post({**JOB, "task_id": name})
    assert answer.status_code == 201, answer.text
    return int(client.task(name)["id"])


LIVE = ["PENDING", "RUNNING", "AWAITING_APPROVAL"]


def bring_to(conn: Connection, task_id: int, status: str) -> None:
    if status == "RUNNING":
        lives.take(conn, task_id)
    elif status == "AWAITING_APPROVAL":
        jobs.park(conn, task_id, {"code": "x"})


@pytest.mark.parametrize("status", LIVE)
def test_a_name_is_taken_until_its_task_has_ended(
    client: Client, conn: Connection, status: str
) -> None:
    bring_to(conn, submit_named(client), status)
    said = refused(client.post(NAMED), 409, field="task_id")
    assert said == (
        "task_id: another task named t1 has not ended yet; wait for its end, or cancel it"
    )
    assert count_of(conn, client.tenant) == 1


ENDINGS = ["succeeded", "permanent", "recursion_limit", "cancelled"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_once_it_has_ended_the_name_is_free_and_leads_to_the_newest(
    client: Client, conn: Connection, ending: str
) -> None:
    first = submit_named(client)
    if ending == "cancelled":
        assert call(client, "DELETE", "/tasks/t1").json()["task_id"] == "t1"
    else:
        lives.end(conn, first, ending, **({"result": {}} if ending == "succeeded" else {}))
    second = submit_named(client)
    assert second > first
    assert client.task("t1")["status"] == "PENDING"
    earlier = client.task(first)
    assert (earlier["id"], earlier["task_id"]) == (first, "t1")
    assert earlier["status"] not in LIVE
    assert refused(client.post(NAMED), 409)


def test_a_name_belongs_to_its_tenant(client: Client) -> None:
    submit_named(client)
    other = Client(client.http, f"{client.tenant}-other")
    submit_named(other)
    refused(other.post(NAMED), 409)


def test_a_name_that_was_taken_is_told_at_once_and_holds_up_nobody(
    client: Client, conn: Connection
) -> None:
    submit_named(client)
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(client.post, NAMED) for _ in range(20)]
        prompts = [pool.submit(client.post) for _ in range(20)]
        assert {answer.result().status_code for answer in answers} == {409}
        assert {prompt.result().status_code for prompt in prompts} == {201}


# --- Idempotency-Key -------------------------------------------------------------------------


@pytest.mark.parametrize("status", LIVE)
def test_the_key_is_looked_at_before_the_name(
    client: Client, conn: Connection, status: str
) -> None:
    first = client.post(NAMED, key="k")
    assert first.status_code == 201
    bring_to(conn, client.task("t1")["id"], status)
    again = client.post(NAMED, key="k")
    assert (again.status_code, again.json()) == (200, {"task_id": "t1", "status": status})
    assert again.headers["Idempotency-Replayed"] == "true"
    refused(client.post({**NAMED, "priority": 1}, key="k"), 422)
    refused(client.post(NAMED, key="another"), 409)
    refused(client.post(NAMED), 409)
    assert count_of(conn, client.tenant) == 1


def test_a_key_finds_its_own_task_though_another_bears_the_name_by_now(
    client: Client, conn: Connection
) -> None:
    client.post(NAMED, key="k")
    lives.end(conn, client.task("t1")["id"], "succeeded", result={})
    submit_named(client)
    again = client.post(NAMED, key="k")
    assert (again.status_code, again.json()) == (200, {"task_id": "t1", "status": "SUCCEEDED"})


def test_a_refused_name_does_not_use_up_its_key(client: Client) -> None:
    submit_named(client)
    refused(client.post(NAMED, key="k"), 409)
    call(client, "DELETE", "/tasks/t1")
    assert client.post(NAMED, key="k").status_code == 201


# --- requeue ---------------------------------------------------------------------------------


def test_an_old_dead_letter_whose_name_is_taken_stays_dead(
    client: Client, conn: Connection
) -> None:
    old = submit_named(client)
    lives.end(conn, old, "permanent")
    submit_named(client)
    before = rows.row(conn, old)
    said = refused(call(client, "POST", f"/tasks/{old}/requeue"), 409)
    assert "another task named t1 has not ended" in said
    assert rows.row(conn, old) == before
    call(client, "DELETE", "/tasks/t1")
    answer = call(client, "POST", f"/tasks/{old}/requeue")
    assert answer.json() == {"task_id": "t1", "status": "PENDING"}
    refused(client.post(NAMED), 409)


# --- batch -----------------------------------------------------------------------------------


def test_a_taken_name_keeps_the_whole_batch_out(client: Client, conn: Connection) -> None:
    submit_named(client)
    for items in ([{"prompt": "p"}, {**JOB, "task_id": "t2"}, NAMED], [NAMED, {"prompt": "p"}]):
        place = f"tasks.{items.index(NAMED)}.task_id"
        assert "t1 has not ended" in refused(post_batch(client, *items), 409, field=place)
        refused(post_batch(client, *items, key="k"), 409)
    assert count_of(conn, client.tenant) == 1
    call(client, "DELETE", "/tasks/t1")
    assert post_batch(client, NAMED, {"prompt": "p"}, key="k").status_code == 201


def test_a_name_twice_in_a_batch_is_refused_by_its_place(client: Client, conn: Connection) -> None:
    said = refused(post_batch(client, NAMED, {"prompt": "p"}, NAMED), 422, field="tasks.2.task_id")
    assert said == "tasks.2.task_id: t1 is the name of tasks.0 already"
    assert count_of(conn, client.tenant) == 0


# --- at once ---------------------------------------------------------------------------------


def post_at_once(apis: list[Api], tenant: str, body: Any, key: str | None) -> Counter[int]:
    together = threading.Barrier(20)

    def post(number: int) -> int:
        client = Client(apis[number % 2].http, tenant)
        together.wait()
        answer = client.post(body, key=key)
        assert answer.status_code == 409 or answer.json()["task_id"] == "t1"
        return answer.status_code

    with ThreadPoolExecutor(20) as pool:
        return Counter(pool.map(post, range(20)))


def test_of_twenty_that_want_one_name_at_once_one_gets_it(
    module_api: Api, second_api: Api, conn: Connection, tenant: str
) -> None:
    apis, client = [module_api, second_api], Client(module_api.http, tenant)
    for turn in range(1, 6):
        assert post_at_once(apis, tenant, NAMED, None) == {201: 1, 409: 19}
        assert count_of(conn, tenant) == turn
        call(client, "DELETE", "/tasks/t1")


def test_twenty_at_once_with_one_key_and_one_name_are_one_task(
    module_api: Api, second_api: Api, conn: Connection, tenant: str
) -> None:
    apis = [module_api, second_api]
    for turn in range(5):
        who = f"{tenant}-{turn}"
        assert post_at_once(apis, who, NAMED, f"key {turn}") == {201: 1, 200: 19}
        assert count_of(conn, who) == 1


def test_batches_with_the_same_names_in_another_order_do_not_fail_each_other(
    module_api: Api, second_api: Api, conn: Connection, tenant: str
) -> None:
    apis = [module_api, second_api]
    names = [{**JOB, "task_id": f"n{number}"} for number in range(10)]
    for turn in range(3):
        together = threading.Barrier(6)

        def post(
            number: int, who: str = f"{tenant}-{turn}", together: threading.Barrier = together
        ) -> int:
            items = names if number % 2 else names[::-1]
            together.wait()
            return post_batch(Client(apis[number % 2].http, who), *items).status_code

        with ThreadPoolExecutor(6) as pool:
            assert Counter(pool.map(post, range(6))) == {201: 1, 409: 5}
        assert count_of(conn, f"{tenant}-{turn}") == 10

"""POST /tasks/batch: all or nothing, in order, once per Idempotency-Key."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

import db
from db import Connection
from tests.support import lives
from tests.support.client import Client, refused
from tests.support.processes import Api


def post(client: Client, tasks: Any, key: str | None = None, **others: Any) -> httpx.Response:
    headers = {"X-Tenant-Id": client.tenant} | ({} if key is None else {"Idempotency-Key": key})
    return client.http.post("/tasks/batch", json={"tasks": tasks, **others}, headers=headers)


def prompts(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text} for text in texts]


def stored(conn: Connection, client: Client) -> list[str]:
    """The prompts of the tenant's tasks, in the order of their numbers."""
    statement = """
        SELECT payload ->> 'prompt' AS prompt FROM tasks
        WHERE tenant = %(tenant)s ORDER BY task_id
    """
    return [row["prompt"] for row in db.fetch(conn, statement, {"tenant": client.tenant})]


def test_a_batch_is_stored_and_answered_in_its_order(client: Client, conn: Connection) -> None:
    answer = post(client, prompts("a", "b", "c"))
    assert answer.status_code == 201
    tasks = answer.json()["tasks"]
    assert [task["status"] for task in tasks] == ["PENDING"] * 3
    ids = [task["task_id"] for task in tasks]
    assert ids == sorted(ids)
    assert stored(conn, client) == ["a", "b", "c"]
    assert "idempotency-replayed" not in answer.headers


def test_each_item_has_the_fields_that_a_task_has(client: Client) -> None:
    items = [{"prompt": "a", "priority": 9, "metadata": {"n": 1}}, {"prompt": "b"}]
    first, second = (task["task_id"] for task in post(client, items).json()["tasks"])
    assert (client.task(first)["priority"], client.task(first)["metadata"]) == (9, {"n": 1})
    assert (client.task(second)["priority"], client.task(second)["metadata"]) == (0, None)


def test_a_thousand_tasks_go_in_at_once_and_one_more_is_refused(
    client: Client, conn: Connection
) -> None:
    items = prompts(*(str(n) for n in range(1000)))
    assert len(post(client, items).json()["tasks"]) == 1000
    assert stored(conn, client) == [item["prompt"] for item in items]
    said = refused(post(client, [*items, {"prompt": "one more"}]), 422, field="tasks")
    assert "at most 1000 (limits.max_batch_tasks)" in said
    assert len(stored(conn, client)) == 1000


REFUSED_ITEMS = {
    "tasks.1.prompt": {"prompt": " "},
    "tasks.1.priority": {"prompt": "b", "priority": 10},
    "tasks.1.colour": {"prompt": "b", "colour": "red"},
    "tasks.1.metadata": {"prompt": "b", "metadata": {"text": "x" * 20_000}},
    "tasks.1.delay_seconds": {"prompt": "b", "delay_seconds": 1e9},
}


@pytest.mark.parametrize("field", REFUSED_ITEMS)
def test_a_refused_item_is_named_and_nothing_is_stored(
    client: Client, conn: Connection, field: str
) -> None:
    status = 413 if field == "tasks.1.metadata" else 422
    said = refused(post(client, [{"prompt": "a"}, REFUSED_ITEMS[field]]), status, field=field)
    assert field in said
    assert stored(conn, client) == []


def test_an_item_that_is_too_long_is_named_and_nothing_is_stored(
    client: Client, conn: Connection
) -> None:
    answer = post(client, prompts("a", "x" * (1024 * 1024 + 1)))
    assert "limits.max_prompt_bytes" in refused(answer, 413, field="tasks.1.prompt")
    assert stored(conn, client) == []


@pytest.mark.parametrize("tasks", [[], None, {"prompt": "a"}, "a", [1], [[]]])
def test_what_is_no_list_of_tasks_is_refused(client: Client, conn: Connection, tasks: Any) -> None:
    assert "tasks" in refused(post(client, tasks), 422)
    assert stored(conn, client) == []


def test_an_unknown_field_beside_the_tasks_is_refused(client: Client) -> None:
    refused(post(client, prompts("a"), atomic=False), 422, field="atomic")


def test_a_batch_that_comes_again_is_answered_with_its_first_tasks_as_they_are_now(
    client: Client, conn: Connection
) -> None:
    first = post(client, prompts("a", "b", "c"), key="k").json()["tasks"]
    lives.end(conn, first[1]["task_id"], "succeeded")
    again = post(client, prompts("a", "b", "c"), key="k")
    assert again.status_code == 200
    assert again.headers["Idempotency-Replayed"] == "true"
    tasks = again.json()["tasks"]
    assert [task["task_id"] for task in tasks] == [task["task_id"] for task in first]
    assert [task["status"] for task in tasks] == ["PENDING", "SUCCEEDED", "PENDING"]
    assert stored(conn, client) == ["a", "b", "c"]


@pytest.mark.parametrize("other", [["a"], ["b", "a"], ["a", "b", "c"], ["a", "c"]])
def test_the_key_of_a_batch_with_another_body_is_refused(
    client: Client, conn: Connection, other: list[str]
) -> None:
    post(client, prompts("a", "b"), key="k")
    assert "Idempotency-Key" in refused(post(client, prompts(*other), key="k"), 422)
    assert stored(conn, client) == ["a", "b"]


def test_a_key_belongs_to_one_tenant_and_one_endpoint(client: Client, conn: Connection) -> None:
    assert client.post({"prompt": "a"}, key="k").status_code == 201
    assert post(client, prompts("a"), key="k").status_code == 201
    stranger = Client(client.http, f"{client.tenant}-stranger")
    assert post(stranger, prompts("a"), key="k").status_code == 201
    assert stored(conn, client) == ["a", "a"]


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
def test_a_key_that_is_none_is_refused(client: Client, conn: Connection, key: str) -> None:
    assert "Idempotency-Key" in refused(post(client, prompts("a"), key=key), 400)
    assert stored(conn, client) == []


def test_many_doubles_at_once_over_two_processes_make_one_batch(
    client: Client, second_api: Api, conn: Connection
) -> None:
    other = Client(second_api.http, client.tenant)
    items = prompts(*(str(n) for n in range(50)))
    answers: list[httpx.Response] = []
    together = threading.Barrier(12)

    def send(through: Client) -> None:
        together.wait()
        answers.append(post(through, items, key="k"))

    threads = [threading.Thread(target=send, args=(c,)) for c in [client, other] * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len({answer.text for answer in answers}) == 1
    assert stored(conn, client) == [item["prompt"] for item in items]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"tasks": [1] * 400_000}, id="items that are no tasks"),
        pytest.param({"tasks": [{"prompt": "x"}] * 20_000}, id="more tasks than any limit"),
        pytest.param({"tasks": [{"nonsense": 1}] * 5_000}, id="thousands of faults"),
        pytest.param({f"field {number}": 1 for number in range(100_000)}, id="an army of fields"),
    ],
)
def test_a_body_with_very_many_faults_gets_a_short_answer(client: Client, body: Any) -> None:
    for path in ("/tasks/batch", "/tasks"):
        answer = client.http.post(path, json=body)
        assert answer.status_code == 422
        assert len(answer.content) < 10_000

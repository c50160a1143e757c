"""POST /tasks with a task instead of a prompt: an agent job, or a refusal that stores nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from config import MOST_REVISIONS
from db import Connection
from main import create_app
from tests.conftest import settings_for
from tests.support import rows
from tests.support.client import Client, refused

JOB: dict[str, Any] = {"task": "Write a function."}


def post_batch(client: Client, *tasks: Any, key: str | None = None) -> httpx.Response:
    headers = {"X-Tenant-Id": client.tenant} | ({} if key is None else {"Idempotency-Key": key})
    return client.http.post("/tasks/batch", json={"tasks": list(tasks)}, headers=headers)


# --- stored ----------------------------------------------------------------------------------


def test_a_job_is_stored_with_what_settings_may_change_later(
    client: Client, conn: Connection
) -> None:
    answer = client.post(JOB)
    assert answer.status_code == 201
    assert answer.json() == {"task_id": answer.json()["task_id"], "status": "PENDING"}
    row = rows.row(conn, answer.json()["task_id"])
    assert (row["kind"], row["name"], row["requested_route"]) == ("agent", None, "auto")
    assert row["payload"] == {
        "task": "Write a function.", "graph": "team", "require_approval": False,
        "max_revisions": 2,
    }  # fmt: skip


def test_every_field_of_a_job_is_kept(client: Client, conn: Connection) -> None:
    own = {"require_approval": True, "token_budget": 1, "max_revisions": 0, "graph": "team"}
    common = {"priority": 9, "max_retry": 5, "timeout_seconds": 60, "metadata": {"a": 1}}
    url = "https://example.com/done"
    answer = client.post(
        {**JOB, **own, **common, "task_id": "Report_7-b", "route": "cloud", "callback_url": url}
    )
    assert answer.json() == {"task_id": "Report_7-b", "status": "PENDING"}
    task = client.task("Report_7-b")
    assert (task["task_id"], task["kind"], task["callback_url"]) == ("Report_7-b", "agent", url)
    assert (task["priority"], task["metadata"], task["state"]) == (9, {"a": 1}, None)
    row = rows.row(conn, task["id"])
    assert row["payload"] == {**JOB, **own}
    assert {name: row[name] for name in common} == common
    assert (row["requested_route"], row["callback_url"]) == ("cloud", url)


def test_a_prompt_may_have_a_callback_too(client: Client) -> None:
    url = "https://example.com/done?x=1"
    assert client.task(client.submit(callback_url=url))["callback_url"] == url
    assert client.task(client.submit(callback_url=None))["callback_url"] is None


@pytest.mark.parametrize(
    "body",
    [{**JOB, "token_budget": None, "max_revisions": None, "task_id": None, "callback_url": None},
     {**JOB, "max_revisions": MOST_REVISIONS, "token_budget": 10**12},
     {**JOB, "task_id": "x" * 64}, {**JOB, "task_id": "-"}, {**JOB, "task_id": "7a"}],
)  # fmt: skip
def test_what_is_at_its_limit_is_taken(client: Client, body: dict[str, Any]) -> None:
    assert client.post(body).status_code == 201


def test_prompts_and_jobs_may_be_in_one_batch(client: Client, conn: Connection) -> None:
    url = "https://example.com/done"
    items = [{"prompt": "p", "callback_url": url}, JOB, {**JOB, "task_id": "b"}, {"prompt": "q"},
             {**JOB, "task_id": "a"}]  # fmt: skip
    answer = post_batch(client, *items, key="k")
    assert answer.status_code == 201
    stored = rows.sql(
        conn,
        "SELECT * FROM tasks WHERE tenant = %(tenant)s ORDER BY task_id",
        tenant=client.tenant,
    )
    assert [row["kind"] for row in stored] == ["prompt", "agent", "agent", "prompt", "agent"]
    assert [row["callback_url"] for row in stored] == [url, None, None, None, None]
    shown = [row["name"] or row["task_id"] for row in stored]
    assert [task["task_id"] for task in answer.json()["tasks"]] == shown
    again = post_batch(client, *items, key="k")
    assert (again.status_code, again.json()) == (200, answer.json())


# --- refused ---------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_stored(conn: Connection) -> Iterator[None]:
    before = rows.count_tasks(conn)
    yield
    assert rows.count_tasks(conn) == before


FIELDS: list[tuple[str, Any]] = [
    ("task", ""), ("task", " \n"), ("task", None), ("task", 17), ("task", ["x"]), ("task", "a\0b"),
    ("task_id", ""), ("task_id", "7"), ("task_id", "0042"), ("task_id", 7), ("task_id", "a b"),
    ("task_id", "a.b"), ("task_id", "x" * 65), ("task_id", "é"), ("task_id", "a\n"),
    ("task_id", "٣"), ("task_id", "a\0"), ("task_id", True), ("task_id", ["a"]), ("task_id", "a/b"),
    ("require_approval", None), ("require_approval", "true"), ("require_approval", 1),
    ("token_budget", 0), ("token_budget", -1), ("token_budget", 1.5), ("token_budget", "100"),
    ("token_budget", True), ("token_budget", 10**12 + 1), ("token_budget", 10**400),
    ("max_revisions", -1), ("max_revisions", MOST_REVISIONS + 1), ("max_revisions", 1.0),
    ("max_revisions", "2"), ("max_revisions", False),
    ("graph", "Team"), ("graph", ""), ("graph", None), ("graph", 1), ("graph", ["team"]),
    ("graph", "os:system"), ("graph", "team\0"),
    ("priority", 10), ("route", "none"), ("delay_seconds", -1), ("max_retry", 0),
    ("metadata", []), ("callback_url", 1), ("callback_url", ""), ("callback_url", "a\0"),
    ("status", "SUCCEEDED"), ("name", "x"), ("kind", "prompt"), ("tenant", "other"),
]  # fmt: skip


@pytest.mark.usefixtures("nothing_is_stored")
@pytest.mark.parametrize(("field", "value"), FIELDS, ids=[f"{f} {v!r:.20}" for f, v in FIELDS])
def test_a_field_that_cannot_be_meant_is_refused_by_its_name(
    client: Client, field: str, value: Any
) -> None:
    said = refused(client.post({**JOB, field: value}), 400, 422, field=field)
    assert said.startswith(f"{field}: ")
    place = f"tasks.1.{field}"
    assert place in refused(post_batch(client, JOB, {**JOB, field: value}), 422, field=place)


@pytest.mark.usefixtures("nothing_is_stored")
def test_prompt_and_task_together_or_neither_are_refused_in_plain_words(client: Client) -> None:
    both = refused(client.post({"prompt": "p", **JOB}), 422, field="prompt")
    assert both == (
        "prompt: there is a task as well; send prompt, for one answer, or task, for an agent job"
    )
    neither = refused(client.post({}), 422, field="prompt")
    assert "neither prompt, for one answer, nor task" in neither
    assert "neither prompt" in refused(post_batch(client, {}), 422, field="tasks.0.prompt")


@pytest.mark.usefixtures("nothing_is_stored")
@pytest.mark.parametrize(
    ("field", "value"),
    [("task_id", "mine"), ("require_approval", True), ("token_budget", 5), ("max_revisions", 1),
     ("graph", "team")],
)  # fmt: skip
def test_what_only_a_job_takes_is_refused_with_a_prompt(
    client: Client, field: str, value: Any
) -> None:
    said = refused(client.post({"prompt": "p", field: value}), 422, field=field)
    assert said == f"{field}: only an agent job takes it: one with task instead of prompt"


@pytest.mark.usefixtures("nothing_is_stored")
def test_a_graph_that_is_not_there_is_refused_with_those_that_are(client: Client) -> None:
    said = refused(client.post({**JOB, "graph": "x" * 500}), 422, field="graph")
    assert said == f"graph: there is no graph {'x' * 80}…; there are: team"


@pytest.mark.usefixtures("nothing_is_stored")
def test_a_task_above_the_limit_of_prompts_is_refused_with_the_limits_name(client: Client) -> None:
    said = refused(client.post({"task": "€" * 400_000}), 413, field="task")
    assert "limits.max_prompt_bytes" in said


@pytest.mark.usefixtures("nothing_is_stored")
def test_a_callback_that_plainly_leads_inside_is_refused_with_the_setting(client: Client) -> None:
    for body in ({"prompt": "p"}, JOB):
        answer = client.post({**body, "callback_url": "http://10.0.0.1/"})
        assert "callbacks.allow_private_addresses" in refused(answer, 422, field="callback_url")
    place = "tasks.1.callback_url"
    refused(post_batch(client, JOB, {**JOB, "callback_url": "ftp://a.b/"}), 422, field=place)


# --- the documents ---------------------------------------------------------------------------


def test_the_documents_show_both_bodies_with_an_example_of_each() -> None:
    app = create_app(settings_for("postgresql://nobody@127.0.0.1:9/nothing"))
    body = app.openapi()["paths"]["/tasks"]["post"]["requestBody"]["content"]["application/json"]
    names = [one["$ref"].rsplit("/", 1)[-1] for one in body["schema"]["oneOf"]]
    assert names == ["PromptTask", "AgentTask"]
    assert [next(iter(one["value"])) for one in body["examples"].values()] == ["prompt", "task"]

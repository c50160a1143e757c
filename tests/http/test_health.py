"""Probes, documents, and what the API says when Postgres is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from db import Connection
from tests.conftest import administrator, at_database
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.ports import free_port
from tests.support.processes import Api, Processes, eventually


def test_a_process_that_runs_says_so(module_api: Api) -> None:
    answer = module_api.http.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_process_that_can_work_says_so(module_api: Api) -> None:
    answer = module_api.http.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


def test_a_probe_submits_no_task_and_the_first_task_is_number_1(
    module_api: Api, conn: Connection
) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"):
        assert module_api.http.get(path).status_code == 200
    assert rows.count_tasks(conn) == 0
    assert module_api.submit("first") == 1


def test_the_documents_are_a_page_and_a_description_of_every_route(module_api: Api) -> None:
    page = module_api.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text
    described = module_api.http.get("/openapi.json").json()
    assert {"/tasks", "/tasks/{task_id}", "/metrics", "/healthz", "/readyz"} <= set(
        described["paths"]
    )
    submit = described["paths"]["/tasks"]["post"]
    assert {"201", "413", "422", "503"} <= set(submit["responses"])
    assert "prompt" in described["components"]["schemas"]["PromptTask"]["properties"]
    headers = {parameter["name"].lower() for parameter in submit["parameters"]}
    assert headers == {"idempotency-key", "x-tenant-id"}


# --- Postgres is away ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut_off(module_processes: Processes) -> Api:
    """An API process whose database does not answer."""
    nowhere = f"postgresql://postgres:x@127.0.0.1:{free_port()}/nothing"
    return module_processes.api({"DATABASE_URL": nowhere}, ready=False)


def test_without_postgres_the_process_lives_and_is_not_ready(cut_off: Api) -> None:
    assert cut_off.http.get("/healthz").json() == {"status": "ok"}
    assert "database" in refused(cut_off.http.get("/readyz"), 503)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/tasks"), ("GET", "/tasks/1"), ("GET", "/tasks/1?wait=5"), ("GET", "/metrics")],
)
def test_without_postgres_every_request_is_answered_503_and_when_to_come_back(
    cut_off: Api, method: str, path: str
) -> None:
    body = {"prompt": "x"} if method == "POST" else None
    answer = cut_off.http.request(method, path, json=body)
    assert "database" in refused(answer, 503)
    assert int(answer.headers["Retry-After"]) >= 1


def test_without_postgres_nobody_is_let_in_since_it_cannot_be_told_whether_a_key_is_needed(
    cut_off: Api,
) -> None:
    assert "database" in refused(Client(cut_off.http, "t").post({"prompt": ""}), 503)
    assert "database" in refused(cut_off.http.get("/nothing"), 503)


def test_the_password_of_the_database_is_told_to_nobody(cut_off: Api) -> None:
    for path in ("/readyz", "/tasks/1"):
        assert "postgres:x" not in cut_off.http.get(path).text
    assert "postgres:x" not in cut_off.log


@pytest.fixture
def late_database(server_url: str) -> Iterator[str]:
    """The address of a database that does not exist yet."""
    name = "test_late"
    yield at_database(server_url, name)
    with administrator(server_url) as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def test_a_process_that_started_before_postgres_works_once_it_is_there(
    module_processes: Processes, server_url: str, late_database: str
) -> None:
    api = module_processes.api({"DATABASE_URL": late_database}, ready=False)
    refused(api.http.get("/readyz"), 503)
    with administrator(server_url) as cursor:
        cursor.execute(f"CREATE DATABASE {late_database.rsplit('/', 1)[1]}")
    eventually(lambda: api.http.get("/readyz").status_code == 200)
    assert api.submit("first") == 1  # the schema was installed on the way
    api.terminate()

"""Once a run is stored, POST /runs says so: nothing that comes after may fail."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from api.database import Database
from tests.conftest import settings_for
from tests.support.client import Client
from tests.support.processes import Api
from tests.support.run_client import RunClient, tool
from tests.support.served import Served


@pytest.fixture
def runs(client: Client) -> RunClient:
    return RunClient(client.http, client.tenant)


@pytest.mark.parametrize(
    ("named", "scheme"), [("http", "ws"), ("ws", "ws"), ("https", "wss"), ("wss", "wss")]
)
def test_whatever_scheme_a_proxy_names_the_answer_says_where_to_watch(
    runs: RunClient, module_api: Api, named: str, scheme: str
) -> None:
    body = {"goal": "a goal", "steps": [tool("a")]}
    answer = runs.call("POST", "/runs", json=body, headers={"X-Forwarded-Proto": named})
    assert answer.status_code == 201, answer.text
    host = module_api.url.removeprefix("http://")
    assert answer.json()["watch"] == f"{scheme}://{host}/runs/{answer.json()['run_id']}/events"


def test_a_run_is_stored_and_read_back_on_one_connection(
    module_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all connections could be busy when it is stored, and the answer to it would be 503."""
    lent: list[Database] = []
    lend = Database.connection

    def connection(self: Database) -> Any:
        lent.append(self)
        return lend(self)

    settings = settings_for(module_database, limits={"key_cache_seconds": 600})
    with Served(settings) as served:
        httpx.get(f"{served.url}/runs")  # now it knows that no key is needed
        monkeypatch.setattr(Database, "connection", connection)
        body = {"goal": "a goal", "steps": [tool("a")]}
        assert httpx.post(f"{served.url}/runs", json=body).status_code == 201
        assert len(lent) == 1

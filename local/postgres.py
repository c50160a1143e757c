"""A real Postgres 18 for machines that have none: listens on localhost, demands the password.

    server = EmbeddedPostgres(Path(".local/postgres"), port=5432, password="devpass")
    server.start()
    server.create_database("orchestrator")
    psycopg2.connect(server.url("orchestrator"))
    server.stop()

Linux only. Three habits keep it sturdy:

- The server runs with its data directory as working directory and is told that this is
  /proc/self/cwd. So an unprivileged user can serve data below a private directory such as
  /root: root enters it for him, before giving up its rights.
- initdb works in a directory beside the real one, which appears at once when it is complete.
- A process is ours only if its command line carries this data directory's mark. No signal
  goes to a process that was not looked at in this way, whatever postmaster.pid says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import psycopg2
from psycopg2 import sql

from local.binaries import (
    EmbeddedPostgresError,
    Identity,
    Programs,
    find_programs,
    server_identity,
)
from local.output import fresh_log, tail
from local.ports import is_listening

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError", "StopMode", "create_database"]

StopMode = Literal["fast", "immediate"]

STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
START_SECONDS = 120.0  # recovery after a crash reads the log again, which can take a while
STOP_SECONDS = 60.0
FAST_STOP_SECONDS = 20.0  # one that recovers from a crash may not hear of a fast stop
POLL_SECONDS = 0.05
HERE = "/proc/self/cwd"


class EmbeddedPostgres:
    """One Postgres server with its data directory. Not for use by two threads at once."""

    def __init__(
        self,
        data_dir: Path,
        port: int,
        password: str,
        settings: Mapping[str, str] | None = None,
        log_file: Path | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.port = port
        self.password = password
        self.settings = dict(settings or {})
        self.log_file = log_file or self.data_dir.with_name(self.data_dir.name + ".log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the main server process (the postmaster), or None if it does not run."""
        if self._process is not None:
            if self._process.poll() is None:
                return self._process.pid  # its postmaster.pid comes a moment later
            self._process = None
        pid = _first_number(self._pid_file_lines(), line=0)
        return pid if pid is not None and _carries(pid, self._mark()) else None

    def url(self, database: str) -> str:
        """Where clients find that database."""
        password = quote(self.password, safe="")
        return f"postgresql://postgres:{password}@localhost:{self.port}/{database}"

    def start(self) -> None:
        """Return when the server accepts connections; raise EmbeddedPostgresError if it cannot.

        A server that runs in the data directory already is used, on whatever port it has.
        """
        if self.pid is not None and self._adopt():
            return
        identity = server_identity(self.data_dir)
        programs = find_programs(identity)
        if not _is_empty(self.data_dir):
            self._check_version(programs)
        else:
            self._initialise(identity, programs)
        self._await_end_of_orphans()
        self._drop_misleading_pid_file()
        self._launch(identity, programs)
        self._await_connections()

    def stop(self, mode: StopMode = "fast") -> None:
        """End the server: `fast` cleanly, `immediate` as if the power went. No server: fine.

        What a fast stop does not end in time is ended at once: its log has all that was committed.
        """
        pid = self.pid
        if pid is None:
            return
        _signal(pid, STOP_SIGNALS[mode])
        if mode == "fast" and not _await(lambda: self.pid is None, FAST_STOP_SECONDS):
            _signal(pid, STOP_SIGNALS["immediate"])
        if not _await(lambda: self.pid is None, STOP_SECONDS):
            raise EmbeddedPostgresError(
                f"Postgres (process {pid}) did not stop within {STOP_SECONDS:.0f} s."
                f"{self._log_tail()}"
            )

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, on the same port."""
        self.stop(mode)
        self.start()

    def create_database(self, name: str) -> None:
        """Create the database if it is missing."""
        create_database(self.url("postgres"), name)

    # --- the data directory ---

    def _initialise(self, identity: Identity, programs: Programs) -> None:
        parent = self.data_dir.parent
        parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{self.data_dir.name}.initialising-"
        for abandoned in parent.glob(f"{prefix}*"):
            # An initdb was cut short; nobody ever stored anything there. It may still be
            # writing, which is why we do not insist and never use its directory again.
            shutil.rmtree(abandoned, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        if "user" in identity:
            os.chown(unfinished, identity["user"], identity["group"])
        self._run_initdb(unfinished, identity, programs)
        unfinished.rename(self.data_dir)
        _sync_directory(parent)

    def _run_initdb(self, where: Path, identity: Identity, programs: Programs) -> None:
        with tempfile.TemporaryFile() as password_file:  # it never has a name on the disk
            password_file.write(self.password.encode() + b"\n")
            password_file.flush()
            descriptor = password_file.fileno()
            if "user" in identity:
                os.chown(descriptor, identity["user"], identity["group"])
            done = subprocess.run(
                [
                    str(programs.bin_dir / "initdb"),
                    f"--pgdata={HERE}",
                    "--username=postgres",
                    "--auth=scram-sha-256",
                    f"--pwfile=/proc/self/fd/{descriptor}",
                    "--encoding=UTF8",
                    # The builtin provider sorts alike on every machine, whatever it has installed.
                    "--locale=C",
                    "--locale-provider=builtin",
                    "--builtin-locale=C.UTF-8",
                    *(["--no-sync"] if self.settings.get("fsync") == "off" else []),
                ],
                cwd=where,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(descriptor,),
                start_new_session=True,
                **identity,
            )
        if done.returncode != 0:
            raise EmbeddedPostgresError(f"initdb failed:\n{tail(done.stdout)}")

    def _check_version(self, programs: Programs) -> None:
        """Refuse, without touching it, a directory that this Postgres cannot serve."""
        try:
            found = (self.data_dir / "PG_VERSION").read_text().strip()
            (self.data_dir / "global" / "pg_control").stat()
        except FileNotFoundError as exc:
            raise EmbeddedPostgresError(
                f"{self.data_dir} is not empty and is no complete Postgres data directory "
                f"({Path(exc.filename).name} is missing). Nothing in it was changed; move it "
                "away to start with an empty database."
            ) from exc
        except PermissionError as exc:
            raise EmbeddedPostgresError(
                f"{self.data_dir} belongs to uid {self.data_dir.stat().st_uid}; "
                "start as that user or as root."
            ) from exc
        if found != str(programs.major):
            raise EmbeddedPostgresError(
                f"{self.data_dir} was made by Postgres {found}, and this is Postgres "
                f"{programs.major}. Nothing in it was changed; move it away, or dump and restore."
            )

    # --- the process ---

    def _launch(self, identity: Identity, programs: Programs) -> None:
        if is_listening(self.port):
            # With one of its two addresses taken, Postgres would start on the other.
            raise EmbeddedPostgresError(f"Port {self.port} is taken by another program.")
        options = {
            **self.settings,
            "port": str(self.port),
            "listen_addresses": "127.0.0.1,::1",
            "unix_socket_directories": "",
            "cluster_name": self._mark(),
        }
        flags = (word for item in options.items() for word in ("-c", "=".join(item)))
        with fresh_log(self.log_file) as log:
            self._process = subprocess.Popen(
                [str(programs.bin_dir / "postgres"), "-D", HERE, *flags],
                cwd=self.data_dir,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is not for the server
                **identity,
            )

    def _adopt(self) -> bool:
        """Use the server that runs already; False if it was about to end."""
        port = _first_number(self._pid_file_lines(), line=3)
        if port is not None:
            self.port = port
        try:
            self._await_connections()
        except EmbeddedPostgresError:
            if self.pid is None:
                return False
            raise
        return True

    def _await_connections(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg2.connect(self.url("postgres"), connect_timeout=5).close()
            except psycopg2.OperationalError as exc:
                self._give_up_if_hopeless(exc, deadline)
                time.sleep(POLL_SECONDS)
            else:
                return

    def _give_up_if_hopeless(self, answer: psycopg2.OperationalError, deadline: float) -> None:
        if self.pid is None:
            raise EmbeddedPostgresError(f"Postgres did not start.{self._log_tail()}") from answer
        if "password authentication failed" in str(answer):
            self._stop_if_launched()
            raise EmbeddedPostgresError(
                f"The Postgres in {self.data_dir} was made with another password: "
                "set DB_PASSWORD to that one."
            ) from answer
        if time.monotonic() > deadline:
            self._stop_if_launched()
            raise EmbeddedPostgresError(
                f"Postgres accepts no connections after {START_SECONDS:.0f} s: "
                f"{answer}{self._log_tail()}"
            ) from answer

    def _stop_if_launched(self) -> None:
        if self._process is not None:
            self.stop()

    def _await_end_of_orphans(self) -> None:
        """Wait for the children of a killed server: they end by themselves when they notice."""
        mark = self._mark()
        if not _await(lambda: not _processes_with(mark), STOP_SECONDS):
            raise EmbeddedPostgresError(
                f"Processes {_processes_with(mark)} of a Postgres that was killed still use "
                f"{self.data_dir}."
            )

    def _drop_misleading_pid_file(self) -> None:
        """Delete a postmaster.pid whose number meanwhile belongs to another program.

        Postgres deletes a stale one itself, unless some process has that number again, which
        is the rule in restarted containers. Nobody uses the data here: start() made sure.
        """
        pid = _first_number(self._pid_file_lines(), line=0)
        if pid is not None and Path(f"/proc/{pid}").exists():
            self._pid_file().unlink()

    def _pid_file(self) -> Path:
        return self.data_dir / "postmaster.pid"

    def _pid_file_lines(self) -> list[str]:
        try:
            return self._pid_file().read_text().splitlines()
        except (FileNotFoundError, PermissionError):
            return []

    def _mark(self) -> str:
        """What every process of this server shows in its command line.

        Made of the directory's identity and not of its name: moving a checkout changes nothing.
        """
        directory = self.data_dir.stat()
        return f"orchestrator-{directory.st_dev}-{directory.st_ino}"

    def _log_tail(self) -> str:
        try:
            return f"\n{self.log_file} ends with:\n{tail(self.log_file.read_text())}"
        except OSError:
            return ""


def create_database(server_url: str, name: str) -> None:
    """Create the database on that server if it is missing."""
    connection = psycopg2.connect(server_url, connect_timeout=5)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %(name)s", {"name": name})
            if cursor.fetchone() is None:
                cursor.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except (psycopg2.errors.DuplicateDatabase, psycopg2.errors.UniqueViolation):
        pass  # somebody else created it in between
    finally:
        connection.close()


def _carries(pid: int, mark: str) -> bool:
    """That process is a Postgres with this mark (the end of the mark is checked too)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    is_postmaster = f"cluster_name={mark}\0" in words
    return is_postmaster or words.startswith(f"postgres: {mark}: ")


def _processes_with(mark: str) -> list[int]:
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in numbers if _carries(pid, mark)]


def _first_number(lines: list[str], line: int) -> int | None:
    try:
        return int(lines[line])
    except (IndexError, ValueError):
        return None


def _is_empty(directory: Path) -> bool:
    try:
        return not any(directory.iterdir())
    except FileNotFoundError:
        return True
    except PermissionError:
        return False  # somebody else's data; the checks that follow say so


def _environment() -> dict[str, str]:
    """What the programs need of ours: not our secrets, and no PG* that changes how they act."""
    needed = ("PATH", "HOME", "LD_LIBRARY_PATH", "TZ")
    return {"LC_ALL": "C", **{name: os.environ[name] for name in needed if name in os.environ}}


def _sync_directory(directory: Path) -> None:
    """Make a rename in that directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.kill(pid, number)


def _await(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds; False if it did not come in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True

"""Start everything on one machine and end it again: what ./run.sh runs.

    python -m local.start

Postgres, the model, the API, one worker, in this order; what is there already is used. Ctrl-C,
SIGTERM and SIGHUP end what was started, in the opposite order, each process by its own id.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until the handlers are set, Ctrl-C simply ends the process: as a KeyboardInterrupt in the
    # middle of an import it can be swallowed there.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psycopg2

from local.binaries import EmbeddedPostgresError
from local.children import ROOT, Child
from local.env_file import EnvFile
from local.output import say
from local.plans import DATABASE, plan_api, plan_database, plan_model
from local.postgres import EmbeddedPostgres, create_database
from local.probes import answers_like_ollama, is_ready, models_of, why_refused, with_tag

if TYPE_CHECKING:  # at run time it is imported where a wrong setting can be reported
    from config import Settings

DEFAULT_PASSWORD = "devpass"  # noqa: S105 - the documented default of DB_PASSWORD
USUAL_OLLAMA_URL = "http://localhost:11434"
POLL_SECONDS = 0.2
MODEL_READY_SECONDS = 180.0
API_READY_SECONDS = 60.0
CHILD_GRACE_SECONDS = 10.0


class CannotStart(Exception):
    """Something that the rest needs does not start; the message says what and why."""


class StopAsked(Exception):
    """The user wants it all to end."""


class StopSignals:
    """Counts Ctrl-C, SIGTERM and SIGHUP. Handlers only count: the main loop looks."""

    def __init__(self) -> None:
        self.count = 0
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signal.SIGHUP, self._note)

    def check(self) -> None:
        """Raise StopAsked if there was one."""
        if self.count:
            raise StopAsked

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


class Start:
    """The four parts, started in order and ended in the opposite one."""

    def __init__(self, options: argparse.Namespace, signals: StopSignals) -> None:
        self.options = options
        self.signals = signals
        self.env_file = EnvFile(env_path())
        # Run.sh's own lines go out first: whatever is set now, a person has set.
        self.last = {key: self.env_file.take(key) for key in ("DATABASE_URL", "OLLAMA_URL")}
        self.settings = load_settings()
        self.given = {**self.env_file.values(), **os.environ}
        self.logs: Path = options.state_dir / "logs"
        self.postgres = EmbeddedPostgres(
            options.state_dir / "postgres",
            options.postgres_port,
            self.given.get("DB_PASSWORD") or DEFAULT_PASSWORD,
            log_file=self.logs / "postgres.log",
        )
        self.serves_postgres = False
        self.children: list[Child] = []
        self.addresses: dict[str, str] = {}  # what API and worker are told

    def start_all(self) -> str:
        """Return the API's address when it is ready and the worker runs."""
        self._start_database()
        self.signals.check()
        self._start_model()
        self.signals.check()
        api_url = self._start_api()
        self.signals.check()
        self._start_worker()
        return api_url

    def watch(self) -> NoReturn:
        """Keep it all running until StopAsked."""
        while True:
            self.signals.check()
            for child in self.children:
                child.tend()
            if self.serves_postgres and self.postgres.pid is None:
                say("Postgres ended unexpectedly. Starting it again.")
                self.postgres.start()
            time.sleep(POLL_SECONDS)

    def stop_all(self) -> None:
        """End what was started here, the last first; what was there before stays."""
        for child in reversed(self.children):
            say(f"Ending the {child.name}.")
            child.stop(lambda: self.signals.count)
        if self.serves_postgres:
            say("Ending Postgres.")
            self.postgres.stop()

    def _start_database(self) -> None:
        plan = plan_database(
            self.given.get("DATABASE_URL") or None,
            self.last["DATABASE_URL"],
            self.postgres,
            self.options.postgres_port,
        )
        say(f"Postgres: {plan.because}")
        self.addresses["DATABASE_URL"] = plan.url
        if plan.port is None:
            ensure_database(plan.url)
            if self.postgres.data_dir.exists():
                say(f"Postgres: what {shown(self.postgres.data_dir)} holds is not used meanwhile.")
            return
        self.postgres.port = plan.port
        self.serves_postgres = True  # from here on there may be one to end
        with progress(f"Postgres: ready, with its data in {shown(self.postgres.data_dir)}"):
            self.postgres.start()
            self.postgres.create_database(DATABASE)
        self.addresses["DATABASE_URL"] = self.postgres.url(DATABASE)
        if self.postgres.port != self.options.postgres_port:
            self._remember("DATABASE_URL", f"port {self.options.postgres_port} was taken")

    def _start_model(self) -> None:
        if not self._models_of_ollama():
            return say("Model: config.toml names other servers for both routes; none is started.")
        configured = self.settings.ollama.url
        plan = plan_model(
            configured if configured != USUAL_OLLAMA_URL else None,
            self.last["OLLAMA_URL"],
            self.options.model_port,
        )
        say(f"Model: {plan.because}")
        self.addresses["OLLAMA_URL"] = url = plan.url or f"http://localhost:{plan.port}"
        if plan.port is None:
            self._say_which_models_are_missing(url)
            return
        arguments = ["-m", "local.model", "--port", str(plan.port)]
        log = self.logs / "model.log"
        with progress(f"Model: ready, with its log in {shown(log)}"):
            model = self._launch("model", arguments, log_file=log)
            self._await(model, lambda: answers_like_ollama(url), MODEL_READY_SECONDS)
        if plan.port != self.options.model_port:
            self._remember("OLLAMA_URL", f"port {self.options.model_port} was taken")

    def _say_which_models_are_missing(self, url: str) -> None:
        if not answers_like_ollama(url):
            say(f"Model: nothing answers at {url} yet. Tasks wait until it does.")
            return
        present = models_of(url)
        for name in dict.fromkeys(self._models_of_ollama()):
            if with_tag(name) not in present:
                say(f"Model: it does not have {name}. Needed: ollama pull {name}")

    def _models_of_ollama(self) -> list[str]:
        """Of the routes that are not served by something else."""
        backends, models = self.settings.backends, self.settings.models
        routes = [name for name in ("local", "cloud") if backends.of_route(name).api == "ollama"]
        return [models.of_route(name) for name in routes]

    def _start_api(self) -> str:
        plan = plan_api(self.options.api_port)
        say(f"API: {plan.because}")
        url = f"http://localhost:{plan.port}"
        # An event stream that a browser holds open must not hold up the end.
        options = ["--port", str(plan.port), "--timeout-graceful-shutdown", "3"]
        with progress("API: ready"):
            api = self._launch("api", ["-m", "uvicorn", "main:app", *options])
            self._await(api, lambda: is_ready(url), API_READY_SECONDS)
        return url

    def _start_worker(self) -> None:
        say("Worker: starting one. More in other terminals: .venv/bin/python scheduler.py")
        grace_seconds = self.settings.worker.grace_seconds + CHILD_GRACE_SECONDS
        self._launch("worker", ["scheduler.py"], grace_seconds)

    def _launch(
        self,
        name: str,
        arguments: list[str],
        grace_seconds: float = CHILD_GRACE_SECONDS,
        log_file: Path | None = None,
    ) -> Child:
        child = Child(name, arguments, self.addresses, grace_seconds, log_file)
        self.children.append(child)
        child.start()
        return child

    def _await(self, child: Child, is_up: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_up():
            self.signals.check()
            if child.exit_code is not None:
                raise CannotStart(
                    f"The {child.name} does not start ({child.describe_end()}).{child.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise CannotStart(
                    f"The {child.name} is not ready after {seconds:.0f} s.{child.log_tail()}"
                )
            time.sleep(POLL_SECONDS)

    def _remember(self, key: str, why: str) -> None:
        """Write an unusual address where every process of the project reads it."""
        self.env_file.write(key, self.addresses[key], why)
        say(f"Its address is in {shown(self.env_file.path)}, where the other programs read it.")


def ensure_database(url: str) -> None:
    """Create the database that a given address names, if its server lacks it."""
    refused = why_refused(url)
    if refused is None:
        return
    try:
        name = psycopg2.extensions.parse_dsn(url).get("dbname", DATABASE)
        create_database(psycopg2.extensions.make_dsn(url, dbname="postgres"), name)
    except psycopg2.Error as exc:
        raise CannotStart(f"The Postgres of DATABASE_URL does not let us in: {refused}") from exc
    say(f"Postgres: created the database {name} there.")


def load_settings() -> Settings:
    """The project's settings; what is wrong with them is said before anything starts."""
    from config import ConfigError, load_config

    try:
        return load_config()
    except ConfigError as exc:
        raise CannotStart(str(exc)) from exc


def env_path() -> Path:
    """The .env that config.py reads: beside config.toml, wherever that is."""
    config_file = os.environ.get("ORCHESTRATOR_CONFIG") or ROOT / "config.toml"
    return Path(config_file).absolute().parent / ".env"


def shown(path: Path) -> str:
    """A path as a reader in the checkout would write it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


@contextmanager
def progress(done: str) -> Iterator[None]:
    """Say how long something took, once it is done."""
    started_at = time.monotonic()
    yield
    say(f"{done} ({time.monotonic() - started_at:.1f} s).")


@contextmanager
def only_start(state_dir: Path) -> Iterator[None]:
    """Refuse a second start with the same data while the first one lives."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "start.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            lock.seek(0)
            raise CannotStart(f"It runs already (process {lock.read().strip()}).") from exc
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def announce(api_url: str, logs: Path) -> None:
    """Tell a newcomer where to look."""
    say(f"""
Everything runs.

  Watch a run:      {api_url}/
  Every call:       {api_url}/docs
  Submit a prompt:  curl -X POST {api_url}/tasks -H 'Content-Type: application/json' \\
                      -d '{{"prompt": "Write one sentence about durable queues."}}'
  See its answer:   curl '{api_url}/tasks/1?wait=30'
  Numbers:          curl {api_url}/metrics
  Logs:             the API's and the worker's follow here, the others are in {shown(logs)}

Ctrl-C ends everything that was started here. The data stay.
""")


def run(options: argparse.Namespace, signals: StopSignals) -> int:
    """Start, watch, end; return 0 when that was asked for."""
    start = Start(options, signals)
    try:
        announce(start.start_all(), start.logs)
        start.watch()
    except StopAsked:
        say("Ending. (Once more: hand running tasks back at once.)")
        return 0
    finally:
        start.stop_all()


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; the defaults are the documented ports."""
    parser = argparse.ArgumentParser(prog="run.sh", description="Start everything on one machine.")
    parser.add_argument("--postgres-port", type=int, default=5432)
    parser.add_argument("--model-port", type=int, default=11434)
    parser.add_argument("--api-port", type=int, default=8000)
    parser.add_argument(
        "--state-dir", type=Path, default=ROOT / ".local", help="data and logs (default: .local)"
    )
    options = parser.parse_args(arguments)
    options.state_dir = options.state_dir.absolute()
    return options


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    options = read_options(arguments)
    signals = StopSignals()
    try:
        with only_start(options.state_dir):
            return run(options, signals)
    except (CannotStart, EmbeddedPostgresError, PermissionError) as exc:
        say(f"run.sh: {exc}")
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""The stage of chaos.sh: a database and an API of its own, and workers that can be hit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg2
import psycopg2.extensions
from psycopg2 import sql

from local.chaos_plan import PlannedRun
from local.chaos_proof import Caps
from local.children import Child
from local.demo import START_SECONDS, DemoFailed, await_true, is_ok, stop
from local.output import say
from local.ports import free_port
from local.postgres import EmbeddedPostgres, create_database

LEASE_SECONDS = 2.0
CONFIG = """
[retry]
max_retry = {caps.max_retry}
max_delivery = {caps.max_delivery}
max_delay_seconds = 1

[worker]
lease_seconds = {lease_seconds}
heartbeat_seconds = 0.4
reap_seconds = 0.5
poll_seconds = 1
grace_seconds = 5
"""
GRACE_SECONDS = 20.0
DATABASE = "orchestrator_chaos"

COUNTS = """
SELECT count(*) FILTER (WHERE kind = 'run') AS runs,
       count(*) FILTER (WHERE kind = 'run' AND finished_at IS NOT NULL) AS runs_ended,
       count(*) FILTER (WHERE kind <> 'run' AND finished_at IS NOT NULL) AS ended,
       count(*) FILTER (WHERE status = 'RUNNING') AS running,
       count(*) FILTER (WHERE kind <> 'run' AND finished_at IS NULL AND status <> 'RUNNING')
           AS waiting
FROM tasks
"""
AWAITING_APPROVAL = "SELECT task_id FROM tasks WHERE status = 'AWAITING_APPROVAL' ORDER BY task_id"
DEAD_LETTERS = """
SELECT task_id FROM tasks
WHERE status = 'FAILED' AND kind <> 'run' AND reason <> 'rejected' ORDER BY task_id
"""
UNENDED = "SELECT task_id FROM tasks WHERE kind = 'run' AND finished_at IS NULL LIMIT 1"


class HitWorker(Child):
    """A worker process that can be frozen."""

    is_frozen = False

    def freeze(self) -> None:
        self.is_frozen = True
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.is_frozen = False
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class Stage:
    """Everything that chaos.sh starts; it ends with the stack, whatever has happened."""

    def __init__(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        caps: Caps,
        workers: int,
        server_url: str | None,
    ) -> None:
        self._folder = folder
        self._stack = stack
        self._config = folder / "config.toml"
        said = CONFIG.format(caps=caps, lease_seconds=LEASE_SECONDS)
        self._config.write_text(said, encoding="utf-8")
        # When each worker was hit, by the database's clock.
        self.blows: defaultdict[str, list[datetime]] = defaultdict(list)
        self._count = 0
        stack.callback(self._end_orphans)
        say("Starting a Postgres, the API and the workers, all for this alone.")
        url = self._database(server_url)
        api_port = free_port()
        self._environment = {
            "ORCHESTRATOR_CONFIG": str(self._config),
            "DATABASE_URL": url,
            "DATABASE_LISTEN_URL": url,
            "OLLAMA_URL": f"http://localhost:{free_port()}",  # nobody: no step here asks a model
        }
        api = f"http://localhost:{api_port}"
        self.http = stack.enter_context(httpx.Client(base_url=api, timeout=30))
        arguments = ["-m", "uvicorn", "main:app", "--port", str(api_port), "--no-access-log"]
        self._launch(Child("api", arguments, self._environment, GRACE_SECONDS, folder / "api.log"))
        await_true(lambda: is_ok(f"{api}/readyz"), START_SECONDS)
        self.conn = self._connect(url)
        self.workers = [self._new_worker() for _ in range(workers)]

    # --- the database ------------------------------------------------------------------------

    def _database(self, server_url: str | None) -> str:
        """The address of a new database: on that server, or on one that is started for it."""
        if server_url is None:
            postgres = EmbeddedPostgres(self._folder / "postgres", free_port(), "chaos")
            self._stack.callback(postgres.stop)
            postgres.start()
            postgres.create_database(DATABASE)
            return postgres.url(DATABASE)
        name = f"{DATABASE}_{os.getpid()}"
        create_database(server_url, name)
        self._stack.callback(drop_database, server_url, name)
        return urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))

    def _connect(self, url: str) -> psycopg2.extensions.connection:
        conn = psycopg2.connect(url, connect_timeout=5, application_name="chaos")
        self._stack.callback(conn.close)
        conn.autocommit = True
        return conn

    def _ask(self, statement: str) -> list[Any]:
        """The first column of the rows."""
        with self.conn.cursor() as cursor:
            cursor.execute(statement)
            return [row[0] for row in cursor.fetchall()]

    def unended(self) -> bool:
        return bool(self._ask(UNENDED))

    def awaiting_approval(self) -> list[int]:
        return self._ask(AWAITING_APPROVAL)

    def dead_letters(self) -> list[int]:
        return self._ask(DEAD_LETTERS)

    def counts(self) -> dict[str, int]:
        with self.conn.cursor() as cursor:
            cursor.execute(COUNTS)
            names = [str(column.name) for column in cursor.description or []]
            (row,) = cursor.fetchall()
        return dict(zip(names, row, strict=True))

    # --- the API -----------------------------------------------------------------------------

    def submit(self, run: PlannedRun) -> tuple[int, dict[str, int]]:
        """The number of the run, and those of its steps by their names."""
        answer = self.http.post("/runs", json=run.body())
        if answer.status_code != 201:
            raise DemoFailed(f"POST /runs was answered {answer.status_code}: {answer.text}")
        told = answer.json()
        return told["run_id"], {step["name"]: step["task_id"] for step in told["steps"]}

    def decide(self, task_id: int, approved: bool) -> None:
        self._try("POST", f"/tasks/{task_id}/approve", {"approved": approved})

    def cancel(self, run_id: int) -> bool:
        return self._try("DELETE", f"/runs/{run_id}")

    def requeue(self, task_id: int) -> bool:
        return self._try("POST", f"/tasks/{task_id}/requeue")

    def _try(self, method: str, path: str, body: Any = None) -> bool:
        """Whether it was done; if not, something else had happened meanwhile (409)."""
        answer = self.http.request(method, path, json=body)
        if answer.status_code not in (200, 202, 409):
            raise DemoFailed(f"{method} {path} was answered {answer.status_code}: {answer.text}")
        return answer.status_code != 409

    # --- the workers -------------------------------------------------------------------------

    def kill(self, place: int) -> None:
        self._note_blow(place)
        self.workers[place].kill()

    def freeze(self, place: int) -> bool:
        """Whether it was hit: one that stands still already is left alone."""
        worker = self.workers[place]
        if worker.is_frozen or worker.exit_code is not None:
            return False
        self._note_blow(place)
        worker.freeze()
        return True

    def thaw(self, place: int) -> None:
        self.workers[place].thaw()

    def thaw_all(self) -> None:
        for worker in self.workers:
            worker.thaw()

    def replace_the_dead(self) -> None:
        for place, worker in enumerate(self.workers):
            if worker.exit_code is not None:
                if worker.exit_code != -signal.SIGKILL:
                    ended = f"{worker.name} ended by itself ({worker.describe_end()})."
                    raise DemoFailed(ended + worker.log_tail())
                self.workers[place] = self._new_worker()

    def stop_workers(self) -> None:
        for worker in self.workers:
            worker.stop(lambda: 0)

    def _new_worker(self) -> HitWorker:
        self._count += 1
        name = f"worker-{self._count}"
        arguments = ["scheduler.py", "--name", name]
        log = self._folder / f"{name}.log"
        worker = HitWorker(name, arguments, self._environment, GRACE_SECONDS, log)
        self._launch(worker)
        self._stack.callback(worker.thaw)  # before it is stopped: who stands still hears nothing
        return worker

    def _launch(self, child: Child) -> None:
        stop.pause(0)
        self._stack.callback(child.stop, lambda: 0)
        child.start()

    def _note_blow(self, place: int) -> None:
        (now,) = self._ask("SELECT clock_timestamp()")
        self.blows[self.workers[place].name].append(now)

    def _end_orphans(self) -> None:
        """A killed worker may leave the process behind that it had started for a suspect."""
        mark = f"ORCHESTRATOR_CONFIG={self._config}\0".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):  # it is gone, or another user's
                    if mark in (entry / "environ").read_bytes():
                        os.kill(int(entry.name), signal.SIGKILL)


def drop_database(server_url: str, name: str) -> None:
    """Drop it, with whoever is still connected."""
    conn = psycopg2.connect(server_url, connect_timeout=5)
    try:
        conn.autocommit = True
        with conn.cursor() as cursor:
            cursor.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
    finally:
        conn.close()

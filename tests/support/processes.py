"""Real API and worker processes for tests: started with a config of their own, ended for sure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def eventually(look: Callable[[], T], seconds: float = 30, what: str = "") -> T:
    """What `look` returns once that is true; an AssertionError inside counts as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        last: object = None
        try:
            if found := look():
                return found
            last = found
        except (AssertionError, httpx.TransportError) as not_yet:
            last = not_yet
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what or look}; last: {last!r}")
        time.sleep(0.02)


class Process:
    """One child process in a process group of its own, its output in a file."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log_file = log
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
            )
        self.pid = self._child.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def is_running(self) -> bool:
        return self._child.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """The exit code; negative: the signal that ended it."""
        return self._child.wait(seconds)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; a stopped process dies of it, too."""
        if self.is_running():
            self._child.kill()
        self._child.wait()

    def terminate(self, seconds: float = 60) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(seconds)


class Worker(Process):
    name: str


class Api(Process):
    url: str
    http: httpx.Client

    def submit(self, prompt: str, **fields: Any) -> int:
        answer = self.http.post("/tasks", json={"prompt": prompt, **fields})
        assert answer.status_code == 201, answer.text
        return int(answer.json()["task_id"])

    def task(self, task_id: int | str, wait: float = 0) -> dict[str, Any]:
        answer = self.http.get(f"/tasks/{task_id}", params={"wait": wait})
        assert answer.status_code == 200, answer.text
        task: dict[str, Any] = answer.json()
        return task

    def await_status(self, task_id: int | str, status: str, seconds: float = 30) -> dict[str, Any]:
        """The task once it has that status."""

        def look() -> dict[str, Any]:
            task = self.task(task_id)
            assert task["status"] == status, task
            return task

        return eventually(look, seconds, f"task {task_id} is {status}")


class Processes:
    """Starts processes on one database and one model server, with sections of config.toml changed.

    No pause of a busy machine ends a lease: who loses a worker shortens them in `configure`, which
    changes everything else, too, or ends them (Queue.await_loss).
    """

    def __init__(self, database_url: str, ollama_url: str, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []
        self._clients: list[httpx.Client] = []
        self._env = {
            **{key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ},
            "PYTHONUNBUFFERED": "1",
            "DATABASE_URL": database_url,
            "OLLAMA_URL": ollama_url,
            "ORCHESTRATOR_CONFIG": str(folder / "config.toml"),
        }
        self.configure()

    def configure(self, **sections: dict[str, Any]) -> None:
        """Write the config.toml of processes started from now on."""
        worker = {
            "lease_seconds": 60,
            "heartbeat_seconds": 1,
            "reap_seconds": 0.5,
            "poll_seconds": 1,
            **sections.pop("worker", {}),
        }
        lines = []
        for name, values in {"worker": worker, **sections}.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items())]
        (self._folder / "config.toml").write_text("\n".join(lines) + "\n")

    def worker(self, *arguments: str, env: dict[str, str] | None = None) -> Worker:
        """Start `python scheduler.py …` and wait until it says that it has started."""
        worker = self.worker_starting(*arguments, env=env)
        eventually(
            lambda: "action=started" in worker.log or not worker.is_running(),
            what="the worker started",
        )
        assert worker.is_running(), worker.log
        return worker

    def worker_starting(self, *arguments: str, env: dict[str, str] | None = None) -> Worker:
        """Start a worker and do not wait for anything."""
        name = f"worker-{len(self._started)}"
        command = [sys.executable, "scheduler.py", "--name", name, *arguments]
        worker = Worker(command, {**self._env, **(env or {})}, self._folder / f"{name}.log")
        worker.name = name
        self._started.append(worker)
        return worker

    def admin(self, *arguments: str) -> str:
        """Run `python admin.py …` to its good end; what it said."""
        command = [sys.executable, "admin.py", *arguments]
        ended = subprocess.run(command, cwd=ROOT, env=self._env, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def api(
        self, env: dict[str, str] | None = None, ready: bool = True, port: int | None = None
    ) -> Api:
        """Start uvicorn and wait until it is ready (or, with ready=False, until it answers)."""
        port = port or free_port()
        command = [sys.executable, "-m", "uvicorn", "main:app", "--port", str(port)]
        command += ["--no-access-log"]
        log = self._folder / f"api-{len(self._started)}.log"
        api = Api(command, {**self._env, **(env or {})}, log)
        api.url = f"http://127.0.0.1:{port}"
        api.http = httpx.Client(base_url=api.url, timeout=90)
        self._started.append(api)
        self._clients.append(api.http)
        path = "/readyz" if ready else "/healthz"
        eventually(lambda: api.http.get(path).status_code == 200, what=f"{path}: {api.log}")
        return api

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._clients:
            client.close()
        for process in self._started:
            process.kill()

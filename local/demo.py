"""The crash-recovery demonstration behind demo.sh; exits non-zero when it does not come true."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from local.children import Child
from local.output import say
from local.ports import free_port
from local.postgres import EmbeddedPostgres

PROMPT = "Tell the story of a clockmaker and her apprentice, in as many words as you can."
# Long enough to be killed in the middle, short enough to wait for: some seconds of generation.
CONFIG = "[ollama]\nnum_predict = 400\n"
START_SECONDS = 60.0
RECOVERY_SECONDS = 120.0  # the lease is 30 s; reaping, claiming and generating come on top
LOOK_EVERY_SECONDS = 0.05
GRACE_SECONDS = 40.0


class DemoFailed(Exception):
    """What was promised did not happen."""


class DemoStopped(Exception):
    """Somebody pressed Ctrl-C."""


class StopFlag:
    """Ctrl-C and SIGTERM are only noted, and looked at where nothing is half done."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def note(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    def pause(self, seconds: float) -> None:
        """Wait; raise DemoStopped if somebody asked to stop."""
        if self._asked.wait(seconds):
            raise DemoStopped


stop = StopFlag()


class Stage:
    """A Postgres, a model and an API of this demonstration's own, in a folder that goes away."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
        self._postgres = EmbeddedPostgres(folder / "postgres", free_port(), "demo")
        model_port, api_port = free_port(), free_port()
        self._environment = {
            "ORCHESTRATOR_CONFIG": str(folder / "config.toml"),
            "DATABASE_URL": self._postgres.url("orchestrator"),
            "DATABASE_LISTEN_URL": self._postgres.url("orchestrator"),
            "OLLAMA_URL": f"http://localhost:{model_port}",
        }
        self.http = httpx.Client(base_url=f"http://localhost:{api_port}", timeout=10)
        say("Starting a Postgres, a small language model and the API, all for this demo only.")
        stack.callback(self._postgres.stop)
        self._postgres.start()
        self._postgres.create_database("orchestrator")
        self._start("model", "-m", "local.model", "--port", str(model_port))
        self._start("api", "-m", "uvicorn", "main:app", "--port", str(api_port))
        await_true(lambda: is_ok(f"http://localhost:{model_port}/api/version"), START_SECONDS)
        await_true(lambda: is_ok(f"http://localhost:{api_port}/readyz"), START_SECONDS)

    def start_worker(self, name: str) -> Child:
        return self._start(name, "scheduler.py", "--name", name)

    def _start(self, name: str, *arguments: str) -> Child:
        log = self._folder / f"{name}.log"
        stop.pause(0)
        child = Child(name, list(arguments), self._environment, GRACE_SECONDS, log)
        self._stack.callback(child.stop, lambda: 0)
        child.start()
        return child

    def submit(self) -> int:
        answer = self.http.post("/tasks", json={"prompt": PROMPT}).raise_for_status()
        return int(answer.json()["task_id"])

    def task(self, task_id: int) -> dict[str, Any]:
        task: dict[str, Any] = self.http.get(f"/tasks/{task_id}").raise_for_status().json()
        return task


def is_ok(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2).status_code == 200
    return False


def await_true(look: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise DemoFailed(f"it did not happen within {seconds:g} s")
        stop.pause(LOOK_EVERY_SECONDS)


def show_recovery(stage: Stage) -> None:
    """The story: submit, claim, kill, wait, recover."""
    task_id = stage.submit()
    say(f"\n1. Task {task_id} is submitted.")
    first = stage.start_worker("worker-1")
    await_true(lambda: stage.task(task_id)["status"] == "RUNNING", START_SECONDS)
    first.kill()
    killed = stage.task(task_id)
    if killed["status"] != "RUNNING":
        raise DemoFailed("the task ended before its worker could be killed; run the demo again")
    say("2. worker-1 has claimed it, and is killed in the middle of it: kill -9.")
    say(f"   The task is still {killed['status']}: nobody has told the database.")
    say(
        f"3. No heartbeat renews the lease: it ends at {killed['lease_expires_at']}, come what may."
    )
    stage.start_worker("worker-2")
    say("   A fresh worker, worker-2, is there already, and may not touch the task before.")
    await_new_owner(stage, task_id)
    say("4. The reaper took it back and worker-2 has claimed it. It runs again, from the start.")
    await_true(lambda: stage.task(task_id)["status"] != "RUNNING", RECOVERY_SECONDS)
    judge(stage.task(task_id))


def await_new_owner(stage: Stage, task_id: int) -> None:
    """Count down until the lease of the killed worker has run out and another holds one."""
    started = time.monotonic()
    lease = stage.task(task_id)["lease_expires_at"]
    shown = -1
    while True:
        task = stage.task(task_id)
        waited = time.monotonic() - started
        if task["worker"] == "worker-2":
            clear_line()
            return
        if task["lease_expires_at"] not in (lease, None):
            raise DemoFailed("the lease of a killed worker was renewed")
        if waited > RECOVERY_SECONDS:
            raise DemoFailed("no worker took the task over")
        if int(waited) != shown:
            shown = int(waited)
            count_up(
                f"   {shown:3} s: {task['status']}, lease_expires_at {task['lease_expires_at']}"
            )
        stop.pause(LOOK_EVERY_SECONDS)


def count_up(text: str) -> None:
    """Redraw one line of a terminal; in a log, a line every ten seconds."""
    if sys.stdout.isatty():
        clear_line()
        sys.stdout.write(text)
        sys.stdout.flush()
    elif text.split()[0].endswith("0"):
        say(text)


def clear_line() -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\r\x1b[K")
        sys.stdout.flush()


def judge(task: dict[str, Any]) -> None:
    """Show how it ended, and fail if it is not what the README promises."""
    shown = ("status", "delivery_count", "retry_count", "worker", "completion_tokens", "cost")
    say(f"5. {' '.join(f'{name}={task[name]}' for name in shown)}")
    if task["status"] != "SUCCEEDED":
        raise DemoFailed(f"the task ended {task['status']}: {task['error']}")
    if (task["delivery_count"], task["retry_count"]) != (2, 0):
        raise DemoFailed("delivery_count is to be 2 and retry_count 0")
    say("\n   delivery_count=2: it was handed out twice, once to each worker.")
    say("   retry_count=0: the work itself never failed. A crash is redelivery, not failure.")


def main() -> int:
    signal.signal(signal.SIGTERM, stop.note)
    signal.signal(signal.SIGINT, stop.note)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="orchestrator-demo-") as folder,
            stage_in(Path(folder)) as stage,
        ):
            show_recovery(stage)
    except (DemoFailed, httpx.HTTPError) as failed:
        say(f"\nThe demo failed: {failed}")
        return 1
    except DemoStopped:
        say("\nStopped.")
        return 130
    say("\nThe demo came true, and everything it started is gone.")
    return 0


@contextlib.contextmanager
def stage_in(folder: Path) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        yield Stage(folder, stack)


if __name__ == "__main__":
    sys.exit(main())

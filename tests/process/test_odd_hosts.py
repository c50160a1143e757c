"""Hosts that are not as they should be: wrong clocks, and a session that sits on an old view."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import db
from tests.support.fake_ollama import FakeOllama, slow
from tests.support.processes import Processes
from tests.support.queue import Queue

# Python runs this before the worker: its clock is off by so many hours.
WRONG_CLOCK = """
import time
real = time.time
time.time = lambda: real() + {hours} * 3600
time.time_ns = lambda: int(time.time() * 1e9)
"""


def with_clock_off_by(hours: int, folder: Path) -> dict[str, str]:
    """The environment of a process whose clock is wrong."""
    place = folder / f"clock{hours}"
    place.mkdir()
    (place / "sitecustomize.py").write_text(WRONG_CLOCK.format(hours=hours))
    return {"PYTHONPATH": str(place)}


def test_workers_whose_clocks_are_hours_off_take_nothing_from_each_other(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    fake.default = slow(0.3)
    fast = processes.worker(env=with_clock_off_by(+7, tmp_path))
    late = processes.worker(env=with_clock_off_by(-7, tmp_path))
    first_hour = [worker.log.split()[1][:2] for worker in (fast, late)]
    assert first_hour[0] != first_hour[1], "their logs show two times"
    ids = queue.submit(*(f"task {number}" for number in range(24)))
    queue.await_all("SUCCEEDED")
    assert {queue.row(task_id)["attempt"] for task_id in ids} == {1}
    assert {queue.row(task_id)["worker"] for task_id in ids} == {fast.name, late.name}
    queue.check()


def test_a_worker_whose_clock_is_hours_behind_takes_over_from_a_dead_one(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    processes.configure(worker={"lease_seconds": 3})  # its end is told by some clock
    fake.on("shared", slow())
    (task_id,) = queue.submit("shared")
    first = processes.worker(env=with_clock_off_by(+7, tmp_path))
    fake.wait_for("shared")
    first.kill()
    fake.release()
    processes.worker(env=with_clock_off_by(-7, tmp_path))
    row = queue.await_final(task_id)
    assert (row["status"], row["delivery_count"], row["retry_count"]) == ("SUCCEEDED", 2, 0)
    assert 0 <= row["duration_seconds"] < 60
    queue.check()


def test_a_session_that_is_idle_in_its_transaction_stops_nobody(
    processes: Processes, queue: Queue, connect: Callable[[], db.Connection]
) -> None:
    processes.worker()
    with db.transaction(connect(), "ISOLATION LEVEL REPEATABLE READ") as cursor:
        cursor.execute("SELECT count(*) FROM tasks")  # its snapshot keeps every old row version
        ids = queue.submit(*(f"task {number}" for number in range(200)))
        queue.await_all("SUCCEEDED")
    assert {queue.row(task_id)["attempt"] for task_id in ids} == {1}
    queue.check()

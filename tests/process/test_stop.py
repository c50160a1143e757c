"""SIGTERM and SIGINT at any instant of a worker's life."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from config import Settings
from execution.routes import Routes
from execution.runner import Runner
from queries.leases import ClaimedTask, Lease
from scheduler import decide_route
from tests.support.fake_ollama import FakeOllama, answer, slow
from tests.support.processes import Processes, Worker, eventually
from tests.support.queue import Queue

NEVER = 600
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT]


def await_stopping(worker: Worker) -> None:
    eventually(lambda: "action=stopping" in worker.log, what="it has taken the signal")


def check_untouched(queue: Queue, task_id: int) -> None:
    """The task waits as if the worker had never had it, but for its attempt."""
    row = queue.row(task_id)
    assert (row["status"], row["reason"]) == ("PENDING", "released"), row
    assert (row["delivery_count"], row["retry_count"], row["attempt"]) == (0, 0, 1)
    assert row["lease_token"] is row["lease_expires_at"] is row["last_error"] is None
    assert row["due"], "it can be claimed at once"
    queue.check()


@pytest.mark.parametrize("stop", STOP_SIGNALS)
def test_a_task_under_way_may_finish_after_the_signal_and_no_other_is_begun(
    processes: Processes, fake: FakeOllama, queue: Queue, stop: signal.Signals
) -> None:
    fake.on("under way", slow())
    (task_id,) = queue.submit("under way")
    worker = processes.worker()
    fake.wait_for("under way")
    worker.signal(stop)
    await_stopping(worker)
    (late,) = queue.submit("too late")
    fake.release()
    assert worker.wait() == 0
    assert queue.row(task_id)["status"] == "SUCCEEDED"
    assert queue.story(late) == ["created"]
    assert "action=stopped" in worker.log


def test_leases_are_renewed_while_the_last_tasks_finish(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(
        worker={"lease_seconds": 2, "heartbeat_seconds": 0.2, "grace_seconds": NEVER}
    )
    fake.on("long", slow(3.5))
    (task_id,) = queue.submit("long")
    worker = processes.worker()
    fake.wait_for("long")
    processes.worker()  # would take the task over
    assert worker.terminate() == 0
    assert queue.story(task_id) == ["created", "claimed", "succeeded"]


def test_a_task_longer_than_the_grace_period_is_handed_back_and_another_worker_does_it(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker={"grace_seconds": 0.5})
    fake.on("endless", [slow(), answer("done after all")])
    (task_id,) = queue.submit("endless")
    worker = processes.worker()
    (call,) = fake.wait_for("endless")
    assert worker.terminate() == 0
    check_untouched(queue, task_id)
    assert fake.wait_for("endless", outcome="hung up") == [call]

    processes.worker()
    row = queue.await_status(task_id, "SUCCEEDED")
    assert (row["delivery_count"], row["attempt"]) == (1, 2)
    assert queue.story(task_id) == ["created", "claimed", "released", "claimed", "succeeded"]


@pytest.mark.parametrize("stop", STOP_SIGNALS)
def test_a_second_signal_hands_all_tasks_back_at_once(
    processes: Processes, fake: FakeOllama, queue: Queue, stop: signal.Signals
) -> None:
    processes.configure(worker={"grace_seconds": NEVER})
    fake.default = slow()
    ids = queue.submit(*(f"endless {number}" for number in range(4)))
    worker = processes.worker("--concurrency", "4")
    fake.wait_for(count=4)
    worker.signal(stop)
    await_stopping(worker)
    worker.signal(stop)
    assert worker.wait() == 0
    for task_id in ids:
        check_untouched(queue, task_id)


@pytest.mark.parametrize("stop", STOP_SIGNALS)
def test_an_idle_worker_ends_at_once(
    processes: Processes, queue: Queue, stop: signal.Signals
) -> None:
    processes.configure(
        worker={"poll_seconds": NEVER, "reap_seconds": NEVER, "grace_seconds": NEVER}
    )
    worker = processes.worker()
    queue.await_idle(worker.name)
    worker.signal(stop)
    assert worker.wait() == 0


@pytest.mark.parametrize("stop", STOP_SIGNALS)
@pytest.mark.parametrize("drain", [False, True])
def test_signals_that_come_until_the_process_is_gone_do_not_change_its_exit_code(
    processes: Processes, queue: Queue, stop: signal.Signals, drain: bool
) -> None:
    """Python itself needs some time to end, long after the worker has said that it has stopped."""
    worker = processes.worker_starting(*["--drain"] * drain)
    await_started(worker)
    if drain:  # it is to end of its own
        await_stopping(worker)
    while worker.is_running():
        worker.signal(stop)
        time.sleep(0.001)
    assert worker.wait() == 0
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("stop", STOP_SIGNALS)
def test_a_signal_at_any_instant_of_start_up_leaves_no_task_leased_and_burns_none(
    processes: Processes, fake: FakeOllama, queue: Queue, stop: signal.Signals
) -> None:
    """Six workers at a time, so that thirty instants of their first seconds are hit."""
    fake.default = answer("done", delay=0.01)
    begun = time.monotonic()
    for worker in [processes.worker_starting() for _ in range(6)]:
        await_started(worker)
        worker.kill()
    # As long as it takes six to start on this machine now, and half as long again.
    instants = [number * 1.5 * (time.monotonic() - begun) / 30 for number in range(30)]
    queue.submit(*(f"task {number}" for number in range(3000)))
    codes = []
    for first in range(5):
        workers = [processes.worker_starting() for _ in range(6)]
        if stop == signal.SIGINT:
            # Python itself may swallow a Ctrl-C that comes before the program's first line.
            for worker in workers:
                eventually(lambda: has_begun_to_import(worker.pid))  # noqa: B023
        begun = time.monotonic()
        # Spread over the whole time in each group: its start-up is the slower for the company.
        for worker, instant in zip(workers, instants[first::5], strict=True):
            time.sleep(max(0, begun + instant - time.monotonic()))
            if worker is workers[-1]:
                await_started(worker)  # however long that takes: one of them is to work
            worker.signal(stop)
        codes += [worker.wait() for worker in workers]
        assert queue.count("RUNNING") == 0
    # Before the program listens to signals, they end it in their own way.
    assert set(codes) <= {0, -stop}, codes
    assert 0 in codes, "no worker lived long enough to stop by itself"
    assert queue.count("PENDING") > 0, "the work was over before the last signal"
    burned = "status <> 'SUCCEEDED' AND (delivery_count > 0 OR retry_count > 0)"
    assert queue.ask(f"SELECT * FROM tasks WHERE {burned}") == []  # noqa: S608
    assert queue.ask("SELECT * FROM audit_log WHERE reason IN ('reaped', 'retry')") == []
    queue.check()


def await_started(worker: Worker) -> None:
    eventually(lambda: "action=started" in worker.log, 60, "the worker has started")


def has_begun_to_import(pid: int) -> bool:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return "lib-dynload" in maps or "site-packages" in maps


def test_tasks_that_were_claimed_just_before_the_signal_are_handed_back(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """Hardly a grace period, and still time to write that they go back."""
    processes.configure(worker={"grace_seconds": 0.001})
    fake.default = slow()
    queue.submit(*(f"endless {number}" for number in range(30)))
    for _ in range(3):
        worker = processes.worker_starting("--concurrency", "30")
        eventually(lambda: "action=claimed" in worker.log, what="it claims")  # noqa: B023
        assert worker.terminate() == 0
        handed_out = "status <> 'PENDING' OR delivery_count > 0"
        assert queue.ask(f"SELECT * FROM tasks WHERE {handed_out}") == []  # noqa: S608
    queue.check()


def test_a_task_that_is_stopped_before_its_first_step_is_handed_back_all_the_same(
    settings: Settings,
) -> None:
    routes = Routes(settings.routing, decide_route)
    runner = Runner(settings, routes, lambda: None, lambda *_: None)
    task = ClaimedTask(Lease(1, "token"), 1, "prompt", {"prompt": "hello"}, "auto", None, 1, 1, 0)
    runner.start(task, "local")
    runner.stop([task.lease])
    runner.open()  # only now: both requests are met by the same turn of its loop
    finished = eventually(runner.take_finished, what="somebody hears of this lease again")
    assert [(lease, outcome.verdict) for lease, outcome in finished] == [(task.lease, "released")]
    runner.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_ends_within_its_grace_period_while_postgres_is_stopped(
    own_server: Any, own_queue: Queue, fake: FakeOllama, tmp_path: Any, busy: bool
) -> None:
    grace_seconds, much_later = 1.0, 30
    fake.default = slow()
    with Processes(own_queue.url, fake.url, tmp_path) as processes:
        processes.configure(worker={"grace_seconds": grace_seconds})
        worker = processes.worker()
        own_queue.await_idle(worker.name)
        if busy:
            own_queue.submit("endless")
            fake.wait_for("endless")
        own_server.stop("immediate")
        eventually(lambda: "action=database_away" in worker.log, what="it has noticed")
        assert worker.terminate(grace_seconds + much_later) == 0

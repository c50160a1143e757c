"""A task that kills its worker becomes a dead letter, and takes no neighbour with it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.fake_ollama import Behaviour, FakeOllama, Reply, slow
from tests.support.processes import Processes, Worker, eventually
from tests.support.queue import Queue

psutil = pytest.importorskip("psutil", reason="comes with requirements-local.txt")


def kill_the_caller(after_seconds: float) -> Behaviour:
    """SIGKILL to the process at the other end of this call: its task was poison."""

    def kill(reply: Reply) -> None:
        reply.wait(after_seconds)
        ours, theirs = reply._handler.connection.getsockname(), reply._handler.client_address
        # The port alone does not tell it: connections to elsewhere may begin at it, too.
        eventually(lambda: kill_who_has(theirs, ours), what="the caller is found")

    return kill


def kill_who_has(here: tuple[str, int], there: tuple[str, int]) -> bool:
    for connection in psutil.net_connections("tcp4"):
        if (connection.laddr, connection.raddr) == (here, there) and connection.pid:
            os.kill(connection.pid, signal.SIGKILL)
            return True
    return False


def await_end_of_all(processes: Processes, queue: Queue) -> None:
    """Until no task is unfinished; a worker that was killed is replaced."""
    workers: list[Worker] = []

    def all_ended() -> bool:
        if not any(worker.is_running() for worker in workers):
            workers.append(processes.worker("--concurrency", "4"))
        queue.expire_leases_of_the_dead()
        return queue.ask("SELECT count(*) AS n FROM tasks WHERE finished_at IS NULL") == [{"n": 0}]

    eventually(all_ended, seconds=90)


def test_one_poison_and_fifty_healthy_tasks_make_exactly_one_dead_letter(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("poison", kill_the_caller(0))
    fake.default = slow(0.05)
    api = processes.api()
    poison = api.submit("poison", priority=9)
    healthy = [api.submit(f"healthy {n}", priority=9) for n in range(50)]
    await_end_of_all(processes, queue)
    assert {api.task(task_id)["status"] for task_id in healthy} == {"SUCCEEDED"}
    dead = api.task(poison)
    assert (dead["status"], dead["error"]["type"]) == ("FAILED", "max_delivery")
    assert len(fake.calls_for("poison")) == 3


def test_neighbours_that_go_down_with_poison_each_time_are_not_blamed_for_it(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    # All four run together whenever the poison strikes: without a last try alone, all would die.
    fake.on("poison", kill_the_caller(1))
    fake.default = slow(3)
    api = processes.api()
    poison = api.submit("poison")
    healthy = [api.submit(f"healthy {n}") for n in range(3)]
    await_end_of_all(processes, queue)
    assert {api.task(task_id)["status"] for task_id in healthy} == {"SUCCEEDED"}
    assert api.task(poison)["error"]["type"] == "max_delivery"


def test_the_last_try_of_a_suspect_is_in_a_process_of_its_own(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("suspect", slow())
    api = processes.api()
    suspect = api.submit("suspect")
    for killed in range(2):
        worker = processes.worker()
        fake.wait_for("suspect", count=killed + 1)
        worker.kill()
        queue.await_loss()
    worker = processes.worker()
    fake.wait_for("suspect", count=3)
    assert api.task(suspect)["worker"] == f"{worker.name}-alone"
    healthy = api.submit("healthy")
    api.await_status(healthy, "SUCCEEDED")
    assert api.task(healthy)["worker"] == worker.name
    fake.release()
    assert api.await_status(suspect, "SUCCEEDED")["delivery_count"] == 3


def test_a_suspect_without_a_route_gets_its_last_try_where_it_would_go_while_the_other_is_away(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(ollama={"cloud_url": "http://127.0.0.1:9"})  # nobody listens there
    api = processes.api()
    suspects = [api.submit("long " * 30), api.submit("short")]
    queue.ask("UPDATE tasks SET alone = true, delivery_count = 2, attempt = 2")
    processes.worker()
    assert api.await_status(suspects[1], "SUCCEEDED")["route"] == "local"
    assert api.task(suspects[0])["status"] == "PENDING"


def test_a_worker_that_is_stopped_stops_its_suspects_process_too(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker={"grace_seconds": 1})
    fake.on("suspect", slow())
    api = processes.api()
    suspect = api.submit("suspect")
    queue.ask("UPDATE tasks SET alone = true, delivery_count = 2, attempt = 2")
    worker = processes.worker()
    fake.wait_for("suspect")
    children = psutil.Process(worker.pid).children()
    assert len(children) == 1
    assert worker.terminate() == 0
    assert not children[0].is_running()
    task = api.task(suspect)
    assert (task["status"], task["delivery_count"], task["attempt"]) == ("PENDING", 2, 3)

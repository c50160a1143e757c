"""Worker processes at work: who claims what, when they wake, when they end."""

from __future__ import annotations

import threading
import uuid
from collections import Counter, defaultdict

import pytest

from queries.schema import wanted_version
from tests.conftest import administrator, at_database
from tests.support.fake_ollama import FakeOllama, Reply, answer, echo, slow, status
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue, most_running_at_once

# Long enough that nothing in these tests is decided by it.
NEVER = 600


def test_eight_workers_run_two_thousand_tasks_each_once_and_settle_each_once(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker={"lease_seconds": 120, "heartbeat_seconds": 5})
    ids = queue.submit(*(f"task {number:04}" for number in range(2000)))
    workers = [processes.worker_starting("--concurrency", "4") for _ in range(8)]
    queue.await_all("SUCCEEDED", 120)

    assert Counter(call.prompt for call in fake.calls) == {
        f"task {number:04}": 1 for number in range(2000)
    }
    stories = queue.ask(
        "SELECT reasons, count(*) AS n FROM (SELECT array_agg(reason ORDER BY id) AS reasons"
        " FROM audit_log GROUP BY task_id) AS stories GROUP BY reasons"
    )
    assert [dict(story) for story in stories] == [
        {"reasons": ["created", "claimed", "succeeded"], "n": 2000}
    ]
    answers = queue.ask("SELECT task_id, result->>'text' AS text FROM tasks ORDER BY task_id")
    assert [row["text"] for row in answers] == [f"echo: task {n:04}" for n in range(len(ids))]
    took_part = {row["worker"] for row in queue.ask("SELECT DISTINCT worker FROM tasks")}
    assert took_part <= {worker.name for worker in workers}
    assert len(took_part) > 1


def test_a_worker_claims_only_as_many_tasks_as_it_has_free_slots(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    open_calls: list[int] = []
    counting = threading.Lock()
    now_open = 0

    def held(reply: Reply) -> None:
        nonlocal now_open
        with counting:
            now_open += 1
            open_calls.append(now_open)
        try:
            reply.wait(None)
            reply.wait(0.02)
        finally:
            with counting:
                now_open -= 1
        echo(reply)

    fake.default = held
    queue.submit(*(f"task {number}" for number in range(12)))
    processes.worker("--concurrency", "2")
    fake.wait_for(count=2)
    assert queue.statuses() == {"RUNNING": 2, "PENDING": 10}
    fake.release()
    queue.await_all("SUCCEEDED")
    assert max(open_calls) == 2
    assert most_running_at_once(queue.ask("SELECT * FROM audit_log ORDER BY id")) == 2


def test_drain_ends_at_once_when_there_is_nothing_to_do(processes: Processes, queue: Queue) -> None:
    assert processes.worker_starting("--drain").wait() == 0


def test_drain_waits_for_delayed_tasks(processes: Processes, queue: Queue) -> None:
    queue.submit("now")
    queue.submit("later", delay_seconds=2)
    assert processes.worker_starting("--drain").wait() == 0
    assert queue.statuses() == {"SUCCEEDED": 2}


def test_drain_waits_for_retries_and_their_delays(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("flaky", [lambda reply: reply.send(500, b"{}"), echo])
    (task_id,) = queue.submit("flaky")
    assert processes.worker_starting("--drain").wait() == 0
    assert queue.story(task_id) == ["created", "claimed", "retry", "claimed", "succeeded"]


def test_drain_waits_for_tasks_that_another_worker_runs(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.on("long", slow(3))
    queue.submit("long")
    processes.worker("--concurrency", "1")
    fake.wait_for("long")
    assert processes.worker_starting("--drain").wait() == 0
    assert queue.statuses() == {"SUCCEEDED": 1}


def test_the_name_given_to_a_worker_stands_in_its_tasks_and_their_audit(
    processes: Processes, queue: Queue
) -> None:
    (task_id,) = queue.submit("who are you")
    processes.worker("--name", "night-shift")
    assert queue.await_status(task_id, "SUCCEEDED")["worker"] == "night-shift"
    assert [entry["worker"] for entry in queue.audit(task_id)] == [
        None,
        "night-shift",
        "night-shift",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "0"], "a whole number, 1 or more"),
        (["--concurrency", "-1"], "a whole number, 1 or more"),
        (["--concurrency", "two"], "a whole number, 1 or more"),
        (["--concurrency", "1.5"], "a whole number, 1 or more"),
        (["--concurrency"], "expected one argument"),
        (["--nonsense"], "--nonsense"),
        (["queue"], "queue"),
    ],
)
def test_bad_arguments_end_the_worker_with_words(
    processes: Processes, arguments: list[str], words: str
) -> None:
    worker = processes.worker_starting(*arguments)
    assert worker.wait() not in (0, None)
    assert words in worker.log
    assert "Traceback" not in worker.log


def test_bad_settings_end_the_worker_and_name_the_key(processes: Processes) -> None:
    processes.configure(worker={"lease_seconds": 2, "heartbeat_seconds": 1})
    worker = processes.worker_starting()
    assert worker.wait() == 1
    assert "lease_seconds = 2" in worker.log
    assert "Traceback" not in worker.log


def test_a_notification_wakes_an_idle_worker(processes: Processes, queue: Queue) -> None:
    processes.configure(worker={"poll_seconds": NEVER, "reap_seconds": NEVER})
    worker = processes.worker()
    for prompt in ("first", "second"):
        queue.await_idle(worker.name)
        (task_id,) = queue.submit(prompt)
        queue.await_status(task_id, "SUCCEEDED")


def test_a_lost_notification_only_costs_a_poll(processes: Processes, queue: Queue) -> None:
    processes.configure(worker={"poll_seconds": 1, "reap_seconds": NEVER})
    deaf = {"DATABASE_LISTEN_URL": at_database(queue.url, "postgres")}
    worker = processes.worker(env=deaf)
    for prompt in ("first", "second"):
        queue.await_idle(worker.name)
        (task_id,) = queue.submit(prompt)
        queue.await_status(task_id, "SUCCEEDED")


def test_delayed_tasks_start_when_they_are_due_without_a_poll(
    processes: Processes, queue: Queue
) -> None:
    processes.configure(worker={"poll_seconds": NEVER, "reap_seconds": NEVER})
    ids = [queue.submit(f"in {delay}", delay_seconds=delay)[0] for delay in (1.5, 2, 2.5)]
    processes.worker()
    for task_id in ids:
        row = queue.await_status(task_id, "SUCCEEDED")
        assert row["started_at"] >= row["available_at"] > row["created_at"]


def test_a_retry_starts_when_its_delay_is_over_without_a_poll(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker={"poll_seconds": NEVER, "reap_seconds": NEVER})
    fake.on("fails", status(500))
    worker = processes.worker()
    queue.await_idle(worker.name)
    (task_id,) = queue.submit("fails")
    queue.await_status(task_id, "FAILED")
    assert len(fake.calls_for("fails")) == 3


def test_a_task_that_is_submitted_with_a_delay_to_a_sleeping_worker_waits_for_a_poll_at_most(
    processes: Processes, queue: Queue
) -> None:
    processes.configure(worker={"poll_seconds": 1, "reap_seconds": NEVER})
    worker = processes.worker()
    queue.await_idle(worker.name)
    (task_id,) = queue.submit("in a second", delay_seconds=1)
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["started_at"] >= row["available_at"]


def test_workers_that_start_together_on_an_empty_database_install_the_schema_once(
    server_url: str, fake: FakeOllama, processes: Processes
) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with administrator(server_url) as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    url = at_database(server_url, name)
    with Queue(url) as queue:
        workers = [processes.worker_starting(env={"DATABASE_URL": url}) for _ in range(6)]
        all_listen = (
            "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE '%% listen'"
            " AND datname = %s HAVING count(*) = 6"
        )
        eventually(lambda: queue.ask(all_listen, name), what="all six listen")
        (task_id,) = queue.submit("hello")
        queue.await_status(task_id, "SUCCEEDED")
        versions = [row["version"] for row in queue.ask("SELECT version FROM schema_version")]
        assert versions == [wanted_version()]
        assert all(worker.is_running() for worker in workers)
        assert not any("Traceback" in w.log or "database_away" in w.log for w in workers)
        for worker in workers:
            worker.kill()
    with administrator(server_url) as cursor:
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_two_workers_share_the_work_of_many_tenants_fairly(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.default = slow(then=answer("done", delay=0.005))
    queue.submit(*(f"big {number}" for number in range(200)), tenant="big")
    small = [f"small{number}" for number in range(5)]
    for tenant in small:
        queue.submit(*(f"{tenant} {number}" for number in range(4)), tenant=tenant)
    workers = [processes.worker("--concurrency", "2") for _ in range(2)]
    fake.wait_for(count=4)  # both are at work before anything can end
    fake.release()
    queue.await_all("SUCCEEDED")

    claimed = queue.ask("SELECT tenant, worker FROM audit_log WHERE reason = 'claimed' ORDER BY id")
    order = [row["tenant"] for row in claimed]
    last_small = max(place for place, tenant in enumerate(order) if tenant != "big")
    assert order[:last_small].count("big") <= 40, order
    of_worker: defaultdict[str, int] = defaultdict(int)
    for row in claimed:
        of_worker[row["worker"]] += 1
    assert all(of_worker[worker.name] >= 20 for worker in workers), dict(of_worker)


def test_a_worker_folds_the_figures(processes: Processes, queue: Queue) -> None:
    (task_id,) = queue.submit("hello")
    processes.worker()
    queue.await_status(task_id, "SUCCEEDED")
    folded = eventually(lambda: queue.ask("SELECT tenant, kind FROM figures"), what="a fold")
    assert [dict(row) for row in folded] == [{"tenant": "default", "kind": "prompt"}]

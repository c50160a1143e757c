"""An outage of a model server burns nothing, pauses its route only, and ends by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import db
from tests.support.fake_ollama import FakeOllama, answer, slow, status
from tests.support.processes import Api, Processes, eventually


@pytest.fixture
def cloud() -> Iterator[FakeOllama]:
    """A second model server, behind route cloud."""
    with FakeOllama() as server:
        yield server


def figures(conn: db.Connection) -> list[tuple[str, int, int]]:
    rows = db.fetch(
        conn, "SELECT status::text, retry_count, delivery_count FROM tasks ORDER BY task_id"
    )
    return [(row["status"], row["retry_count"], row["delivery_count"]) for row in rows]


def paused_routes(conn: db.Connection) -> set[str]:
    rows = db.fetch(conn, "SELECT DISTINCT jsonb_object_keys(paused_routes) AS route FROM workers")
    return {row["route"] for row in rows}


def test_an_outage_fails_no_task_and_burns_nothing_and_all_finish_once_it_is_over(
    processes: Processes, fake: FakeOllama, conn: db.Connection
) -> None:
    api = processes.api()
    fake.down()
    workers = [processes.worker(), processes.worker()]
    tasks = [api.submit(f"task {n}", route="local") for n in range(30)]
    eventually(lambda: "local" in paused_routes(conn))
    assert figures(conn) == [("PENDING", 0, 0)] * 30
    fake.up()
    for task_id in tasks:
        api.await_status(task_id, "SUCCEEDED")
    assert figures(conn) == [("SUCCEEDED", 0, 1)] * 30
    assert all(worker.is_running() for worker in workers)


def test_a_worker_that_starts_during_an_outage_claims_nothing_for_that_route(
    processes: Processes, fake: FakeOllama, conn: db.Connection
) -> None:
    fake.down()
    api = processes.api()
    worker = processes.worker()
    eventually(lambda: "action=route_paused route=cloud" in worker.log)
    api.submit("anything")
    eventually(lambda: paused_routes(conn) == {"local", "cloud"})
    assert "action=claimed" not in worker.log
    assert db.fetch(conn, "SELECT attempt FROM tasks") == [{"attempt": 0}]


def test_a_server_that_answers_probes_but_no_calls_is_left_alone_for_longer_and_longer(
    processes: Processes, fake: FakeOllama
) -> None:
    fake.on("busy", [status(503)] * 3 + [answer("at last")])
    api = processes.api()
    worker = processes.worker()
    task = api.await_status(api.submit("busy"), "SUCCEEDED", seconds=60)
    assert (task["retry_count"], task["delivery_count"], task["attempt"]) == (0, 1, 4)
    waits = [
        float(line.split("probe_in_seconds=")[1].split()[0])
        for line in worker.log.splitlines()
        if "action=route_paused" in line
    ]
    assert waits == [1, 2, 4]


def test_a_paused_route_does_not_stop_the_other(
    processes: Processes, fake: FakeOllama, cloud: FakeOllama
) -> None:
    processes.configure(ollama={"cloud_url": cloud.url})
    api = processes.api()
    fake.down()
    processes.worker()
    waiting = [api.submit(f"short {n}") for n in range(3)]
    pinned = api.submit("pinned to the cloud", route="cloud")
    long = api.submit("long " * 30)
    assert api.await_status(pinned, "SUCCEEDED")["route"] == "cloud"
    assert api.await_status(long, "SUCCEEDED")["route"] == "cloud"
    assert [api.task(task_id)["status"] for task_id in waiting] == ["PENDING"] * 3
    fake.up()
    for task_id in waiting:
        assert api.await_status(task_id, "SUCCEEDED")["route"] == "local"


def test_with_a_deep_queue_short_prompts_go_to_the_cloud_while_local_is_away(
    processes: Processes, fake: FakeOllama, cloud: FakeOllama
) -> None:
    processes.configure(ollama={"cloud_url": cloud.url})
    api = processes.api()
    fake.down()
    tasks = [api.submit(f"short {n}") for n in range(20)]
    processes.worker()

    def states() -> list[str]:
        return sorted(api.task(task_id)["status"] for task_id in tasks)

    # Down to the threshold of 5 waiting tasks; those would be local's.
    eventually(lambda: states() == ["PENDING"] * 6 + ["SUCCEEDED"] * 14)
    fake.up()
    eventually(lambda: states() == ["SUCCEEDED"] * 20)


def test_with_fallback_the_tasks_of_a_paused_route_go_to_the_other(
    processes: Processes, fake: FakeOllama, cloud: FakeOllama
) -> None:
    processes.configure(ollama={"cloud_url": cloud.url}, routing={"fallback": True})
    api = processes.api()
    fake.down()
    processes.worker()
    pinned = api.submit("pinned to local", route="local")
    short = api.submit("short")
    assert api.await_status(pinned, "SUCCEEDED")["route"] == "cloud"
    assert api.await_status(short, "SUCCEEDED")["route"] == "cloud"


def test_a_refused_key_pauses_the_route_with_an_alarm_that_names_the_key(
    processes: Processes, cloud: FakeOllama
) -> None:
    processes.configure(ollama={"cloud_url": cloud.url})
    cloud.on("secret", [status(401, "unauthorized"), answer("ok")])
    api = processes.api()
    worker = processes.worker(env={"OLLAMA_API_KEY": "k-123"})
    task = api.await_status(api.submit("secret", route="cloud"), "SUCCEEDED")
    assert task["retry_count"] == 0
    assert cloud.calls[0].headers["authorization"] == "Bearer k-123"
    alarms = [line for line in worker.log.splitlines() if " ERROR " in line]
    assert len(alarms) == 1
    assert "OLLAMA_API_KEY" in alarms[0]
    assert "k-123" not in worker.log


def test_a_limit_on_calls_in_flight_holds_across_all_workers(
    processes: Processes, fake: FakeOllama
) -> None:
    processes.configure(routing={"local_max_in_flight": 3}, worker={"concurrency": 8})
    most = 0

    def watch(call: object) -> None:
        nonlocal most
        most = max(most, sum(one.outcome == "open" for one in fake.calls))

    fake.script = watch  # gives no behaviour of its own: the default answers
    fake.default = slow(0.2)
    api = processes.api()
    for _ in range(3):
        processes.worker()
    tasks = [api.submit(f"task {n}", route="local") for n in range(24)]
    for task_id in tasks:
        api.await_status(task_id, "SUCCEEDED")
    assert most <= 3


def test_a_full_route_does_not_hold_up_the_other(
    processes: Processes, fake: FakeOllama, cloud: FakeOllama
) -> None:
    processes.configure(routing={"local_max_in_flight": 1}, ollama={"cloud_url": cloud.url})
    fake.on("endless", slow())
    api = processes.api()
    processes.worker()
    api.submit("endless", route="local")
    fake.wait_for("endless")
    waiting = api.submit("next", route="local")
    assert api.await_status(api.submit("other", route="cloud"), "SUCCEEDED")
    assert api.task(waiting)["status"] == "PENDING"
    fake.release()
    api.await_status(waiting, "SUCCEEDED")


def test_while_its_route_is_paused_a_task_says_what_it_waits_for(
    api: Api, processes: Processes, fake: FakeOllama
) -> None:
    fake.down()
    processes.worker()
    task_id = api.submit("short", route="local")
    eventually(lambda: api.task(task_id)["waiting_for"] == "backend local")

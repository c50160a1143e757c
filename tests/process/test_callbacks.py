"""Callbacks by real processes to a real receiver, which checks them by its own means."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.bench import Bench
from tests.support.fake_ollama import FakeOllama, answer, slow, status
from tests.support.processes import Api, Processes, Worker, eventually
from tests.support.queue import Queue, Row
from tests.support.receiver import Answer, Receiver, is_signed, receiving

# Leases that no pause of the machine ends, and attempts that follow at once.
PATIENT = {"lease_seconds": 60, "heartbeat_seconds": 0.5, "poll_seconds": 0.2}
QUICK = {"max_retry": 4, "max_delay_seconds": 0.05, "timeout_seconds": 5}


@pytest.fixture(scope="module")
def shared_bench(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One API and one worker; no API key was ever created."""
    with fresh_database(server_url) as url, FakeOllama() as fake, Queue(url) as queue:
        bench = Bench(queue, fake, tmp_path_factory.mktemp("callbacks"))
        with bench.processes:
            bench.start(worker=PATIENT, callbacks=QUICK, retry={"max_delay_seconds": 0.05})
            yield bench


@pytest.fixture(scope="module")
def shared_api(shared_bench: Bench) -> Api:
    return shared_bench.processes.api()


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    yield shared_bench
    shared_bench.check_worker()


@pytest.fixture
def open_api(bench: Bench, shared_api: Api) -> Api:
    return shared_api


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def submit(api: Api, url: str, prompt: str = "Say something.", **more: Any) -> int:
    headers = more.pop("headers", {})
    body = {"prompt": prompt, "callback_url": url, **more}
    answered = api.http.post("/tasks", json=body, headers=headers)
    assert answered.status_code == 201, answered.text
    return int(answered.json()["task_id"])


def callbacks(queue: Queue, task_id: int) -> list[Row]:
    """The callbacks about a task, in order."""
    return queue.ask(
        "SELECT * FROM tasks WHERE kind = 'callback' AND payload ->> 'task_id' = %s"
        " ORDER BY task_id",
        str(task_id),
    )


def the_callback(queue: Queue, task_id: int) -> Row:
    """The one callback about a task, once it is final."""
    queue.await_final(task_id)
    (found,) = callbacks(queue, task_id)
    return queue.await_final(found["task_id"])


# --- what arrives ----------------------------------------------------------------------------


def test_whoever_asked_is_told_of_the_end_with_the_body_of_get(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    bench.fake.on("tells its end", [answer('Gr\u00fc\u00dfe \U0001f989 \u2028 \\ "q"', tokens=7)])
    metadata = {"order": 7, "f": 1.50, "big": 2**60, "n": None}
    task_id = submit(open_api, receiver.url("/hook?a=b"), "tells its end", metadata=metadata)
    done = the_callback(bench.queue, task_id)
    assert (done["status"], done["result"], done["attempt"]) == ("SUCCEEDED", {"status": 200}, 1)
    (received,) = receiver.of_task(task_id)
    assert received.body == open_api.http.get(f"/tasks/{task_id}").content
    assert received.json()["status"] == "SUCCEEDED"
    assert (received.method, received.path) == ("POST", "/hook?a=b")
    assert received.headers["content-type"] == "application/json"
    assert received.id == f"msg_{done['task_id']}"
    assert "webhook-signature" not in received.headers  # nobody has made a secret
    bench.queue.check([task_id, done["task_id"]])


def test_a_failed_task_is_told_of(bench: Bench, open_api: Api, receiver: Receiver) -> None:
    bench.fake.on("fails for good", [status(400, "no such prompt")])
    task_id = submit(open_api, receiver.url(), "fails for good", max_retry=1)
    the_callback(bench.queue, task_id)
    (received,) = receiver.of_task(task_id)
    shown = open_api.http.get(f"/tasks/{task_id}")
    assert received.body == shown.content
    assert received.json()["status"] == "FAILED"
    assert received.json()["error"]["message"]


def test_a_cancelled_task_is_told_of_whether_it_waits_or_runs(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    waits = submit(open_api, receiver.url(), delay_seconds=600)
    assert open_api.http.delete(f"/tasks/{waits}").status_code == 200
    bench.fake.on("is stopped in the middle", [slow()])
    runs = submit(open_api, receiver.url(), "is stopped in the middle")
    bench.fake.wait_for("is stopped in the middle")
    assert open_api.http.delete(f"/tasks/{runs}").status_code == 202
    for task_id in (waits, runs):
        assert the_callback(bench.queue, task_id)["status"] == "SUCCEEDED"
        (received,) = receiver.of_task(task_id)
        assert received.json()["status"] == "CANCELLED"
        assert received.body == open_api.http.get(f"/tasks/{task_id}").content


def test_each_task_of_a_batch_that_asked_is_told_of(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    tasks = [{"prompt": f"of a batch {n}"} for n in range(6)]
    for task in tasks[::2]:
        task["callback_url"] = receiver.url()
    answered = open_api.http.post("/tasks/batch", json={"tasks": tasks})
    assert answered.status_code == 201, answered.text
    ids = [task["task_id"] for task in answered.json()["tasks"]]
    for task_id in ids[::2]:
        receiver.await_received(task_id)
    for task_id in ids:
        bench.queue.await_final(task_id)
    assert sorted(one.json()["id"] for one in receiver.received) == ids[::2]
    assert [callbacks(bench.queue, task_id) for task_id in ids[1::2]] == [[], [], []]


def test_a_task_that_is_requeued_and_ends_again_is_told_of_again_under_another_id(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    bench.fake.on("succeeds at last", [status(400, "not now"), answer("yes")])
    task_id = submit(open_api, receiver.url(), "succeeds at last", max_retry=1)
    receiver.await_received(task_id)
    assert open_api.http.post(f"/tasks/{task_id}/requeue").status_code == 200
    first, second = receiver.await_received(task_id, 2)
    assert [one.json()["status"] for one in (first, second)] == ["FAILED", "SUCCEEDED"]
    assert first.id != second.id


def test_an_agent_jobs_end_is_told_of_with_its_state(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    """Cancelled before it begins: what a job does is tested elsewhere."""
    body = {"task": "Write it.", "task_id": "job-a", "delay_seconds": 600}
    answered = open_api.http.post("/tasks", json={**body, "callback_url": receiver.url()})
    assert answered.status_code == 201, answered.text
    number = open_api.http.get("/tasks/job-a").json()["id"]
    bench.queue.ask(
        "INSERT INTO job_states (task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version,"
        " state, prompt_tokens, completion_tokens)"
        " VALUES (%s, 'c1', 1, '{supervisor}', '{coder}', 'v', '{\"plan\": \"a plan\"}', 1, 2)",
        number,
    )
    assert open_api.http.delete("/tasks/job-a").status_code == 200
    (received,) = receiver.await_received(number)
    assert received.json()["task_id"] == "job-a"
    assert received.json()["state"]["plan"] == "a plan"
    assert received.body == open_api.http.get("/tasks/job-a").content


# --- attempts --------------------------------------------------------------------------------


def test_it_is_tried_again_under_the_same_id_until_the_receiver_says_yes(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    elsewhere = Answer(302, (("Location", receiver.url("/elsewhere")),))
    receiver.answers(500, elsewhere, 404, 202)
    task_id = submit(open_api, receiver.url())
    done = the_callback(bench.queue, task_id)
    assert (done["status"], done["result"], done["retry_count"]) == (
        "SUCCEEDED", {"status": 202}, 3,
    )  # fmt: skip
    received = receiver.of_task(task_id)
    assert [one.path for one in received] == ["/hook"] * 4
    assert {one.id for one in received} == {f"msg_{done['task_id']}"}
    sent_at = [int(one.headers["webhook-timestamp"]) for one in received]
    assert sent_at == sorted(sent_at)
    assert len({one.body for one in received}) == 1
    bench.queue.check([done["task_id"]])


def test_one_that_nobody_takes_is_a_dead_letter_that_can_be_requeued(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    receiver.answers(Answer(500, body=b"SECRET of the inside"))
    task_id = submit(open_api, receiver.url())
    dead = the_callback(bench.queue, task_id)
    assert (dead["reason"], dead["retry_count"]) == ("max_retry", QUICK["max_retry"])
    assert dead["last_error"] == "127.0.0.1 answered 500"
    letters = open_api.http.get("/dead-letters").json()["tasks"]
    (letter,) = [one for one in letters if one["id"] == dead["task_id"]]
    assert (letter["kind"], letter["error"]["message"]) == ("callback", "127.0.0.1 answered 500")
    assert len(receiver.of_task(task_id)) == QUICK["max_retry"]
    receiver.answers(200)
    assert open_api.http.post(f"/tasks/{dead['task_id']}/requeue").status_code == 200
    assert bench.queue.await_final(dead["task_id"])["status"] == "SUCCEEDED"
    assert {one.id for one in receiver.of_task(task_id)} == {f"msg_{dead['task_id']}"}


def test_410_is_a_dead_letter_at_once(bench: Bench, open_api: Api, receiver: Receiver) -> None:
    receiver.answers(410)
    dead = the_callback(bench.queue, submit(open_api, receiver.url()))
    assert (dead["status"], dead["reason"], dead["attempt"]) == ("FAILED", "permanent", 1)


def test_it_can_be_cancelled_while_it_is_sent(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    let_go = threading.Event()
    receiver.answers(Answer(after=let_go))
    task_id = submit(open_api, receiver.url())
    receiver.await_received(task_id)
    (callback,) = callbacks(bench.queue, task_id)
    assert open_api.http.delete(f"/tasks/{callback['task_id']}").status_code == 202
    assert bench.queue.await_final(callback["task_id"])["status"] == "CANCELLED"
    let_go.set()


# --- where it does not go --------------------------------------------------------------------


def test_what_is_plainly_wrong_is_refused_at_the_post(open_api: Api) -> None:
    urls = ["http://10.0.0.1/", "http://[::ffff:7f00:1]/", "ftp://a/", "http://u:p@a.example/"]
    for url in urls:
        for what in ({"prompt": "p"}, {"task": "t"}):
            refused = open_api.http.post("/tasks", json={**what, "callback_url": url})
            assert refused.status_code == 422, refused.text
            assert "callback_url" in refused.text
    batch = {"tasks": [{"prompt": "p"}, {"prompt": "p", "callback_url": "http://10.0.0.1/"}]}
    refused = open_api.http.post("/tasks/batch", json=batch)
    assert refused.status_code == 422
    assert "tasks.1.callback_url" in refused.text
    assert "callbacks.allow_private_addresses" in refused.text


def test_what_became_private_since_is_not_called(
    bench: Bench, open_api: Api, receiver: Receiver
) -> None:
    """As a name does whose address was changed; here by what no POST would have taken."""
    task_id = submit(open_api, receiver.url(), delay_seconds=600)
    bench.queue.ask(
        "UPDATE tasks SET callback_url = 'http://0xa000001/' WHERE task_id = %s", task_id
    )
    open_api.http.delete(f"/tasks/{task_id}")
    dead = the_callback(bench.queue, task_id)
    assert (dead["reason"], dead["attempt"]) == ("permanent", 1)
    assert "callbacks.allow_private_addresses" in dead["last_error"]


# --- with keys, and in trouble ---------------------------------------------------------------


def key_of(processes: Processes, tenant: str) -> dict[str, str]:
    key, *_ = processes.admin("keys", "create", "--tenant", tenant).splitlines()
    return {"X-API-Key": key}


def secret_of(processes: Processes, tenant: str) -> str:
    secret, *_ = processes.admin("webhooks", "secret", "--tenant", tenant).splitlines()
    return secret


def test_with_keys_each_tenants_callbacks_are_signed_with_its_own_secret(
    processes: Processes, queue: Queue, receiver: Receiver
) -> None:
    processes.configure(worker=PATIENT, callbacks={**QUICK, "allow_private_addresses": True})
    acme, other = key_of(processes, "acme"), key_of(processes, "other")
    api = processes.api()
    body = {"prompt": "p", "callback_url": receiver.url()}
    refused = api.http.post("/tasks", json=body, headers=acme)
    assert refused.status_code == 422
    assert "python admin.py webhooks secret --tenant acme" in refused.text
    secrets = {name: secret_of(processes, name) for name in ("acme", "other")}
    receiver.answers(503, 200)
    ids = {
        "acme": submit(api, receiver.url(), headers=acme),
        "other": submit(api, receiver.url(), headers=other),
    }
    processes.worker()
    for tenant, task_id in ids.items():
        assert the_callback(queue, task_id)["status"] == "SUCCEEDED"
        for received in receiver.of_task(task_id):
            assert is_signed(received, secrets[tenant])
            assert not is_signed(received, secrets["acme" if tenant == "other" else "other"])
    assert len(receiver.received) == 3
    replaced = secret_of(processes, "acme")
    again = submit(api, receiver.url(), headers=acme)
    (received,) = receiver.await_received(again)
    assert is_signed(received, replaced)
    assert not is_signed(received, secrets["acme"])


def test_the_first_key_closes_this_machine_to_callbacks(
    processes: Processes, queue: Queue, receiver: Receiver
) -> None:
    api = processes.api()
    task_id = submit(api, receiver.url())
    acme = key_of(processes, "acme")
    secret_of(processes, "acme")
    processes.worker()
    dead = the_callback(queue, task_id)
    assert (dead["reason"], dead["attempt"]) == ("permanent", 1)
    assert "loopback" in dead["last_error"]
    assert receiver.received == []

    def refused() -> bool:
        body = {"prompt": "p", "callback_url": receiver.url()}
        answered: httpx.Response = api.http.post("/tasks", json=body, headers=acme)
        return answered.status_code == 422 and "allow_private_addresses" in answered.text

    eventually(refused)


def test_a_task_that_is_gone_before_it_is_told_of_leaves_a_dead_letter(
    processes: Processes, queue: Queue, receiver: Receiver
) -> None:
    api = processes.api()
    task_id = submit(api, receiver.url(), delay_seconds=600)
    api.http.delete(f"/tasks/{task_id}")
    (callback,) = callbacks(queue, task_id)
    queue.ask("DELETE FROM tasks WHERE task_id = %s", task_id)
    processes.worker()
    dead = queue.await_final(callback["task_id"])
    assert dead["last_error"] == f"task {task_id} is gone, so there is nothing to tell of it"
    assert receiver.received == []


def test_no_model_server_is_needed(
    processes: Processes, fake: FakeOllama, queue: Queue, receiver: Receiver
) -> None:
    fake.down()
    api = processes.api()
    task_id = submit(api, receiver.url())
    worker = processes.worker()
    eventually(lambda: "action=route_paused" in worker.log)
    api.http.delete(f"/tasks/{task_id}")
    receiver.await_received(task_id)


def test_a_worker_that_dies_while_it_delivers_is_followed_by_another_with_the_same_message(
    processes: Processes, queue: Queue, receiver: Receiver
) -> None:
    processes.configure(
        worker={"lease_seconds": 2, "heartbeat_seconds": 0.4, "reap_seconds": 0.3}, callbacks=QUICK
    )
    api = processes.api()
    let_go = threading.Event()

    receiver.answers(Answer(after=let_go), 200)
    task_id = submit(api, receiver.url())
    first = processes.worker()
    receiver.await_received(task_id)
    first.kill()
    processes.worker()
    one, two = receiver.await_received(task_id, 2)
    assert (one.id, one.body) == (two.id, two.body)
    assert the_callback(queue, task_id)["status"] == "SUCCEEDED"
    let_go.set()


def test_a_worker_that_stops_hands_its_callback_back_and_burns_no_attempt(
    processes: Processes, queue: Queue, receiver: Receiver
) -> None:
    processes.configure(worker={**PATIENT, "grace_seconds": 0.1}, callbacks=QUICK)
    api = processes.api()
    let_go = threading.Event()
    receiver.answers(Answer(after=let_go), 200)
    task_id = submit(api, receiver.url())
    first: Worker = processes.worker()
    receiver.await_received(task_id)
    first.signal(signal.SIGTERM)
    eventually(lambda: not first.is_running())
    (callback,) = callbacks(queue, task_id)
    assert (callback["status"], callback["reason"], callback["delivery_count"]) == (
        "PENDING", "released", 0,
    )  # fmt: skip
    processes.worker()
    assert the_callback(queue, task_id)["status"] == "SUCCEEDED"
    let_go.set()

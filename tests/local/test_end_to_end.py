"""One prompt all the way: HTTP, Postgres, a worker and a language model, nothing scripted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.ports import free_port
from tests.support.processes import Api, Process, Processes, Worker, eventually
from tests.support.queue import Queue

pytestmark = pytest.mark.needs_local

PROMPT = "Write one sentence about durable queues."
LONG_PROMPT = f"{PROMPT} Say in it what a lease is, and who takes a task back from a lost worker."
CURLS_HEADERS = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "curl/8.5.0"}
MODELS = {"local": "llama3.2:latest", "cloud": "qwen3:14b"}
RATES = {"local": Decimal("0.00001"), "cloud": Decimal("0.0001")}


class House:
    """A database, the real model, an API and a worker, each a process of its own."""

    def __init__(self, queue: Queue, api: Api, worker: Worker) -> None:
        self.queue, self.api, self.worker = queue, api, worker

    def submit(self, key: str, body: dict[str, Any]) -> int:
        headers = {**CURLS_HEADERS, "Idempotency-Key": key}
        answer = self.api.http.post("/tasks", headers=headers, json=body)
        assert answer.status_code == 201, answer.text
        assert answer.json()["status"] == "PENDING"
        return int(answer.json()["task_id"])


@pytest.fixture(scope="module")
def model_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`python -m local.model` on a port of its own."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.toml").touch()
    port = free_port()
    model = Process(
        [sys.executable, "-m", "local.model", "--port", str(port)],
        {**os.environ, "ORCHESTRATOR_CONFIG": str(folder / "config.toml")},
        folder / "model.log",
    )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(
            lambda: httpx.get(f"{url}/api/version").status_code == 200,
            seconds=60,
            what="the model answers",
        )
        yield url
    finally:
        model.kill()


@pytest.fixture(scope="module")
def house(
    server_url: str, model_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    with (
        fresh_database(server_url) as url,
        Queue(url) as queue,
        Processes(url, model_url, tmp_path_factory.mktemp("house")) as processes,
    ):
        processes.configure(ollama={"num_predict": 64})
        yield House(queue, processes.api(), processes.worker())


@pytest.mark.parametrize(
    ("body", "route"),
    [
        pytest.param({"prompt": PROMPT}, "local", id="a short prompt"),
        pytest.param({"prompt": PROMPT, "route": "cloud"}, "cloud", id="asked for the cloud"),
        pytest.param({"prompt": LONG_PROMPT}, "cloud", id="a long prompt"),
    ],
)
def test_a_prompt_comes_back_as_an_answer_with_its_price_and_its_story(
    house: House, body: dict[str, Any], route: str, request: pytest.FixtureRequest
) -> None:
    spent = Decimal(house.api.http.get("/metrics").json()["cost_by_route"].get(route, "0"))
    task_id = house.submit(request.node.name, body)

    task = house.api.task(task_id, wait=60)

    assert task["status"] == "SUCCEEDED", task
    assert task["result"]["text"].strip()
    assert (task["route"], task["model"]) == (route, MODELS[route])
    assert 0 < task["completion_tokens"] <= 64
    assert task["prompt_tokens"] > 0
    assert Decimal(task["cost"]) == task["completion_tokens"] * RATES[route]
    assert house.queue.row(task_id)["cost"] == task["completion_tokens"] * RATES[route]
    assert (task["delivery_count"], task["retry_count"], task["attempt"]) == (1, 0, 1)
    assert task["worker"] == house.worker.name
    assert 0 < task["duration_seconds"] < 60
    assert house.queue.story(task_id) == ["created", "claimed", "succeeded"]
    house.queue.check([task_id])
    shown = house.api.http.get(f"/tasks/{task_id}/audit").json()["audit"]
    assert [step["to"] for step in shown] == ["PENDING", "RUNNING", "SUCCEEDED"]
    metrics = house.api.http.get("/metrics").json()
    assert Decimal(metrics["cost_by_route"][route]) == spent + Decimal(task["cost"])


def test_the_team_takes_a_job_from_the_supervisor_to_a_persons_approval_and_a_verdict(
    house: House,
) -> None:
    """What a model so small says is its own affair; that each role is asked and heard is ours."""
    job = {
        "task": "Write a Python function that doubles a number.",
        "require_approval": True,
        "max_revisions": 0,
    }
    task_id = house.submit("team", job)
    eventually(
        lambda: house.api.task(task_id)["status"] == "AWAITING_APPROVAL",
        seconds=240,
        what="the coder has written",
    )
    asked = house.api.task(task_id)["state"]["approval"]
    assert asked["asks"]["code"].strip()
    decision = {"approved": True, "artefact": asked["artefact"]}
    assert house.api.http.post(f"/tasks/{task_id}/approve", json=decision).status_code == 200
    eventually(
        lambda: house.api.task(task_id)["status"] == "SUCCEEDED",
        seconds=120,
        what="the reviewer has judged",
    )

    task = house.api.task(task_id)
    assert task["result"]["code"] == asked["asks"]["code"]
    assert task["result"]["verdict"] in ("approved", "rejected")
    assert house.queue.story(task_id) == [
        "created", "claimed", "parked", "approved", "claimed", "succeeded",
    ]  # fmt: skip
    assert (task["delivery_count"], task["retry_count"], task["attempt"]) == (1, 0, 2)
    pages = house.api.http.get(f"/tasks/{task_id}/checkpoints").json()["checkpoints"]
    ran = [node for page in reversed(pages) for node in page["nodes"]]
    assert ran in (
        ["supervisor", "researcher", "coder", "approval", "reviewer"],
        ["supervisor", "coder", "approval", "reviewer"],
    )
    assert Decimal(task["cost"]) == task["completion_tokens"] * RATES[task["route"]] > 0

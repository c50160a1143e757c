from __future__ import annotations

from tests.support.fake_ollama import FakeOllama, answer
from tests.support.processes import Api, Worker


def test_a_prompt_travels_to_the_model_and_its_answer_comes_back(
    api: Api, worker: Worker, fake: FakeOllama
) -> None:
    fake.on("durable", answer("Rows outlive processes.", tokens=7))
    task_id = api.submit("Write one sentence about durable queues.")
    task = api.task(task_id, wait=20)
    assert task["status"] == "SUCCEEDED"
    assert task["result"] == {"text": "Rows outlive processes."}
    assert task["cost"] == "0.00007000"

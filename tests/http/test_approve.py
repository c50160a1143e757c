"""POST /tasks/{id}/approve: a person decides, once, and the run goes on."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from db import Connection
from tests.support.client import Client, refused
from tests.support.processes import Api
from tests.support.run_client import RunClient, approval, llm, tool
from tests.support.runs import finish, take


@pytest.fixture
def runs(client: Client) -> RunClient:
    return RunClient(client.http, client.tenant)


@pytest.fixture
def gate(runs: RunClient) -> dict[str, Any]:
    """A run with an approval that waits, a step behind it and one beside it."""
    prompt = "{{ approval.ok.output.feedback }}"
    return runs.submit(
        approval("approval.ok", text="May I?"), llm("then", "approval.ok", prompt=prompt),
        tool("beside"),
    )  # fmt: skip


YES: list[Any] = [None, {}, {"approved": True}, {"feedback": None, "artefact": None}]


@pytest.mark.parametrize("body", YES, ids=repr)
def test_without_a_word_the_answer_is_yes(runs: RunClient, gate: dict[str, Any], body: Any) -> None:
    task_id = gate["steps"][0]["task_id"]
    answer = runs.approve(task_id, body)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"task_id": task_id, "status": "SUCCEEDED"}
    task = runs.read(f"/tasks/{task_id}")
    assert task["result"] == {"approved": True, "feedback": None}
    assert (task["error"], task["attempt"]) == (None, 0)
    assert task["finished_at"] is not None
    assert runs.statuses(gate["run_id"]) == {
        "run": "RUNNING", "approval.ok": "SUCCEEDED", "then": "PENDING", "beside": "PENDING",
    }  # fmt: skip


def test_an_empty_body_that_says_it_is_json_means_yes(
    runs: RunClient, gate: dict[str, Any]
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = runs.approve(gate["steps"][0]["task_id"], content=b"", headers=headers)
    assert (answer.status_code, answer.json()["status"]) == (200, "SUCCEEDED")


def test_feedback_is_kept_with_who_gave_it(runs: RunClient, gate: dict[str, Any]) -> None:
    task_id = gate["steps"][0]["task_id"]
    feedback = "Grüße {{ then.output }} ' 🐘 \\"
    runs.approve(task_id, {"approved": True, "feedback": feedback})
    result = {"approved": True, "feedback": feedback}
    assert runs.run(gate["run_id"])["steps"][0]["result"] == result
    last = runs.read(f"/tasks/{task_id}/audit")["audit"][-1]
    assert (last["reason"], last["from"], last["to"]) == (
        "approved", "AWAITING_APPROVAL", "SUCCEEDED",
    )  # fmt: skip
    assert last["detail"] == {"by": runs.tenant, "feedback": feedback}


def test_no_ends_what_depends_on_it_and_is_no_dead_letter(
    runs: RunClient, gate: dict[str, Any], conn: Connection
) -> None:
    task_id = gate["steps"][0]["task_id"]
    answer = runs.approve(task_id, {"approved": False, "feedback": "not now"})
    assert answer.json() == {"task_id": task_id, "status": "FAILED"}
    assert runs.statuses(gate["run_id"]) == {
        "run": "RUNNING", "approval.ok": "FAILED", "then": "CANCELLED", "beside": "PENDING",
    }  # fmt: skip
    task = runs.read(f"/tasks/{task_id}")
    assert task["result"] == {"approved": False, "feedback": "not now"}
    assert task["error"]["type"] == "rejected"
    assert "not now" in task["error"]["message"]
    assert runs.read("/dead-letters")["tasks"] == []
    finish(conn, gate["run_id"], "beside")
    assert runs.run(gate["run_id"])["status"] == "FAILED"


def test_a_no_can_be_asked_again_and_answered_with_yes(
    runs: RunClient, gate: dict[str, Any]
) -> None:
    task_id = gate["steps"][0]["task_id"]
    runs.approve(task_id, {"approved": False})
    answer = runs.call("POST", f"/tasks/{task_id}/requeue")
    assert answer.json() == {"task_id": task_id, "status": "AWAITING_APPROVAL"}
    assert runs.read(f"/tasks/{task_id}")["result"] is None
    assert runs.statuses(gate["run_id"])["then"] == "BLOCKED"
    assert runs.approve(task_id).json()["status"] == "SUCCEEDED"
    assert runs.statuses(gate["run_id"])["then"] == "PENDING"


def test_the_last_approval_ends_its_run(runs: RunClient) -> None:
    run = runs.submit(approval("approval.a"), approval("approval.b", "approval.a"))
    for step in run["steps"]:
        assert runs.run(run["run_id"])["status"] == "RUNNING"
        assert runs.approve(step["task_id"]).status_code == 200
    assert runs.run(run["run_id"])["status"] == "SUCCEEDED"


# --- refused ---------------------------------------------------------------------------------


def test_what_does_not_wait_cannot_be_decided(
    runs: RunClient, client: Client, conn: Connection
) -> None:
    run = runs.submit(approval("approval.a"), approval("approval.b", "approval.a"), tool("c"))
    a, b, c = (step["task_id"] for step in run["steps"])
    assert f"task {b} is BLOCKED" in refused(runs.approve(b), 409)
    assert f"task {c} is PENDING" in refused(runs.approve(c), 409)
    take(conn, run["run_id"], "c")
    assert f"task {c} is RUNNING" in refused(runs.approve(c), 409)
    lone = client.submit()
    assert f"task {lone} is PENDING" in refused(runs.approve(lone), 409)
    runs.approve(a, {"approved": False})
    for body in (None, {"approved": True}, {"approved": False}):
        assert f"task {a} is FAILED" in refused(runs.approve(a, body), 409)
        assert f"task {b} is CANCELLED" in refused(runs.approve(b, body), 409)


def test_a_decision_that_came_too_late_changes_nothing(
    runs: RunClient, gate: dict[str, Any]
) -> None:
    task_id = gate["steps"][0]["task_id"]
    runs.approve(task_id, {"feedback": "first"})
    before = runs.run(gate["run_id"])
    refused(runs.approve(task_id, {"approved": False, "feedback": "second"}), 409)
    assert runs.run(gate["run_id"]) == before
    runs.cancel(gate["run_id"])
    refused(runs.approve(task_id), 409)


BODIES: list[tuple[Any, str]] = [
    *(({"approved": value}, "approved") for value in (None, "yes", "true", 1, 0, [], {})),
    *(({"feedback": value}, "feedback") for value in (1, True, ["x"], {}, "a\0b")),
    *(({"artefact": value}, "artefact") for value in ("x", {}, {"a": 1}, [], 0, False)),
    ({"approve": True}, "approve"), ({"by": "me"}, "by"), ({"": 1}, "body"),
    ([], "body"), ("yes", "body"), (True, "body"), (17, "body"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), BODIES, ids=[f"{b!r:.30}" for b, _ in BODIES])
def test_a_decision_that_is_none_is_refused_and_the_task_still_waits(
    runs: RunClient, gate: dict[str, Any], body: Any, field: str
) -> None:
    task_id = gate["steps"][0]["task_id"]
    refused(runs.approve(task_id, json=body), 422, field=field)
    assert runs.read(f"/tasks/{task_id}")["status"] == "AWAITING_APPROVAL"


RAW = [b"{", b"yes", b'{"feedback": "\\ud800"}', b'{"approved": NaN}', b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("content", RAW)
def test_bytes_that_are_no_decision_are_refused(
    runs: RunClient, gate: dict[str, Any], content: bytes
) -> None:
    task_id = gate["steps"][0]["task_id"]
    headers = {"Content-Type": "application/json"}
    refused(runs.approve(task_id, content=content, headers=headers), 400, 422)
    assert runs.read(f"/tasks/{task_id}")["status"] == "AWAITING_APPROVAL"


def test_a_yes_that_does_not_say_it_is_json_is_refused_rather_than_overlooked(
    runs: RunClient, gate: dict[str, Any]
) -> None:
    task_id = gate["steps"][0]["task_id"]
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = runs.approve(task_id, content=b'{"approved": false}', headers=headers)
    assert "Content-Type: application/json" in refused(answer, 422)
    assert runs.read(f"/tasks/{task_id}")["status"] == "AWAITING_APPROVAL"


def test_feedback_above_its_limit_is_refused_with_the_limits_name(
    runs: RunClient, gate: dict[str, Any]
) -> None:
    task_id = gate["steps"][0]["task_id"]
    answer = runs.approve(task_id, {"feedback": "x" * (16 * 1024 + 1)})
    assert "limits.max_metadata_bytes" in refused(answer, 413, field="feedback")
    assert runs.approve(task_id, {"feedback": "x" * 16 * 1024}).status_code == 200


@pytest.mark.parametrize("reference", ["0", "-1", str(2**63), "9" * 5000, "nobody", "%00", "1.0"])
def test_a_task_that_is_not_there_is_not_found(runs: RunClient, reference: str) -> None:
    assert refused(runs.approve(reference), 404) == "not found"


# --- at once ---------------------------------------------------------------------------------


def test_of_twenty_decisions_at_once_one_is_taken(
    module_api: Api, second_api: Api, tenant: str
) -> None:
    apis = [module_api, second_api]
    runs = RunClient(module_api.http, tenant)
    for _ in range(5):
        run = runs.submit(approval("approval.a"), tool("b", "approval.a"))
        task_id = run["steps"][0]["task_id"]
        together = threading.Barrier(20)

        def decide(
            number: int, task_id: int = task_id, together: threading.Barrier = together
        ) -> tuple[int, bool, str]:
            body = {"approved": number % 3 > 0, "feedback": f"says {number}"}
            client = RunClient(apis[number % 2].http, tenant)
            together.wait()
            answer = client.approve(task_id, body)
            return answer.status_code, body["approved"] is True, body["feedback"]

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(decide, range(20)))
        assert Counter(status for status, _, _ in answers) == {200: 1, 409: 19}
        _, approved, feedback = next(answer for answer in answers if answer[0] == 200)
        a, b = runs.run(run["run_id"])["steps"]
        assert a["result"] == {"approved": approved, "feedback": feedback}
        assert b["status"] == ("PENDING" if approved else "CANCELLED")
        reasons = [entry["reason"] for entry in runs.read(f"/tasks/{task_id}/audit")["audit"]]
        assert reasons == ["created", "approved" if approved else "rejected"]

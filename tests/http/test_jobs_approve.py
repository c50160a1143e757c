"""POST /tasks/{id}/approve of an agent job: a person decides, once, about what that person saw."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import db
from db import Connection
from tests.support import jobs, lives, rows
from tests.support.client import Client, refused
from tests.support.processes import Api, eventually
from tests.support.run_client import RunClient, agent, llm
from tests.support.runs import finish

ASKS = {"code": "print('x')", "revision": 0}


@pytest.fixture
def runs(client: Client) -> RunClient:
    return RunClient(client.http, client.tenant)


@pytest.fixture
def job(client: Client, conn: Connection) -> tuple[int, str]:
    """A job that waits for a person: its number, and the hash of what it asks."""
    return jobs.parked(conn, client.tenant, ASKS)


BODIES: list[tuple[Any, bool, str | None]] = [
    (None, True, None), ({}, True, None), ({"approved": True}, True, None),
    ({"approved": False, "feedback": "no\n'\\ 🐘 {{ a.output }}"}, False,
     "no\n'\\ 🐘 {{ a.output }}"),
    ({"feedback": "nice"}, True, "nice"), ({"approved": False}, False, None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "approved", "feedback"), BODIES)
def test_a_decision_sends_the_job_back_to_the_queue_and_is_kept_for_its_worker(
    runs: RunClient, conn: Connection, job: tuple[int, str], body: Any, approved: bool,
    feedback: str | None,
) -> None:  # fmt: skip
    task_id, artefact = job
    before = rows.row(conn, task_id)
    answer = runs.approve(task_id, body)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"task_id": task_id, "status": "PENDING"}
    row = rows.row(conn, task_id)
    reason = "approved" if approved else "rejected"
    assert (row["reason"], row["due"]) == (reason, True)
    assert row["gate"] == {
        **before["gate"], "decision": {"approved": approved, "feedback": feedback},
    }  # fmt: skip
    for kept in ("attempt", "delivery_count", "retry_count", "result", "payload", "last_error"):
        assert row[kept] == before[kept], kept
    last = runs.read(f"/tasks/{task_id}/audit")["audit"][-1]
    assert (last["from"], last["to"], last["reason"]) == ("AWAITING_APPROVAL", "PENDING", reason)
    told = {"by": runs.tenant, "artefact": artefact, "feedback": feedback}
    assert last["detail"] == {key: value for key, value in told.items() if value is not None}
    assert rows.claim_this(conn, task_id).gate == row["gate"]
    assert rows.row(conn, task_id)["delivery_count"] == 1  # parking had given one back


def test_a_decision_wakes_a_worker(runs: RunClient, conn: Connection, job: tuple[int, str]) -> None:
    rows.sql(conn, "LISTEN tasks_claimable")
    runs.approve(job[0])
    eventually(lambda: "tasks_claimable" in [one.channel for one in db.heard(conn)])
    rows.sql(conn, "UNLISTEN *")


def test_a_decision_by_name_is_about_the_newest_of_that_name(
    client: Client, runs: RunClient, conn: Connection
) -> None:
    for _ in range(2):
        assert client.post({"task": "t", "task_id": "t1"}).status_code == 201
        task_id = client.task("t1")["id"]
        jobs.park(conn, task_id, ASKS)
        assert runs.approve("t1").json() == {"task_id": "t1", "status": "PENDING"}
        lives.end(conn, task_id, "succeeded", result={})


# --- bound to what was seen ------------------------------------------------------------------


@pytest.mark.parametrize("approved", [True, False])
def test_with_the_artefact_that_is_asked_about_a_decision_holds(
    runs: RunClient, job: tuple[int, str], approved: bool
) -> None:
    shown = runs.read(f"/tasks/{job[0]}")["state"]["approval"]
    assert shown == {"artefact": job[1], "asks": ASKS}
    answer = runs.approve(job[0], {"approved": approved, "artefact": shown["artefact"]})
    assert answer.status_code == 200


def test_a_decision_about_what_has_changed_since_is_refused(
    runs: RunClient, conn: Connection, job: tuple[int, str]
) -> None:
    task_id, seen = job
    runs.approve(task_id, {"approved": False})
    artefact = jobs.park(conn, task_id, {**ASKS, "revision": 1})
    for stale in (seen, "", "x", seen.upper(), artefact[:-1]):
        said = refused(runs.approve(task_id, {"artefact": stale}), 409, field="artefact")
        assert f"what task {task_id} asks has changed since" in said
    row = rows.row(conn, task_id)
    assert (row["status"], row["gate"].get("decision")) == ("AWAITING_APPROVAL", None)
    assert runs.approve(task_id, {"artefact": artefact}).status_code == 200


@pytest.mark.parametrize("artefact", [1, True, {}, [], "a\0"])
def test_an_artefact_that_is_none_is_refused(
    runs: RunClient, job: tuple[int, str], artefact: Any
) -> None:
    refused(runs.approve(job[0], {"artefact": artefact}), 422, field="artefact")
    assert runs.read(f"/tasks/{job[0]}")["status"] == "AWAITING_APPROVAL"


# --- refused ---------------------------------------------------------------------------------


def test_a_job_that_does_not_wait_cannot_be_decided(
    client: Client, runs: RunClient, conn: Connection
) -> None:
    task_id = int(client.post({"task": "t"}).json()["task_id"])
    assert f"task {task_id} is PENDING" in refused(runs.approve(task_id), 409)
    artefact = jobs.park(conn, task_id, ASKS)
    runs.approve(task_id)
    for body in (None, {"approved": False}, {"artefact": artefact}):
        assert f"task {task_id} is PENDING" in refused(runs.approve(task_id, body), 409)
    lives.take(conn, task_id)
    assert f"task {task_id} is RUNNING" in refused(runs.approve(task_id), 409)
    client.http.delete(f"/tasks/{task_id}", headers={"X-Tenant-Id": client.tenant})
    assert f"task {task_id} is RUNNING" in refused(runs.approve(task_id), 409)


def test_feedback_above_its_limit_is_refused_and_the_job_still_waits(
    runs: RunClient, job: tuple[int, str]
) -> None:
    answer = runs.approve(job[0], {"approved": False, "feedback": "x" * (16 * 1024 + 1)})
    assert "limits.max_metadata_bytes" in refused(answer, 413, field="feedback")
    assert runs.read(f"/tasks/{job[0]}")["status"] == "AWAITING_APPROVAL"


def test_a_parked_job_can_be_cancelled(
    runs: RunClient, conn: Connection, job: tuple[int, str]
) -> None:
    answer = runs.call("DELETE", f"/tasks/{job[0]}")
    assert (answer.status_code, answer.json()["status"]) == (200, "CANCELLED")
    assert f"task {job[0]} is CANCELLED" in refused(runs.approve(job[0]), 409)
    assert runs.read(f"/tasks/{job[0]}")["state"] is None
    assert rows.reasons(conn, job[0]) == ["created", "claimed", "parked", "cancelled"]


# --- as a step of a run ----------------------------------------------------------------------


def test_a_step_is_asked_about_in_its_run_and_goes_on_when_it_is_decided(
    runs: RunClient, conn: Connection
) -> None:
    prompt = "{{ agent_call.team.output.code }}"
    run = runs.submit(agent("agent_call.team"), llm("then", "agent_call.team", prompt=prompt))
    task_id = run["steps"][0]["task_id"]
    assert run["steps"][0]["approval"] is None
    artefact = jobs.park(conn, task_id, ASKS, run["run_id"])
    step, behind = runs.run(run["run_id"])["steps"]
    assert (step["status"], step["waiting_for"]) == ("AWAITING_APPROVAL", "approval")
    assert step["approval"] == {"artefact": artefact, "asks": ASKS}
    assert behind["approval"] is None
    assert runs.run(run["run_id"])["status"] == "RUNNING"
    refused(runs.approve(task_id, {"artefact": "stale"}), 409)
    answer = runs.approve(task_id, {"artefact": artefact})
    assert answer.json() == {"task_id": task_id, "status": "PENDING"}
    assert runs.run(run["run_id"])["steps"][0]["approval"] is None
    assert runs.statuses(run["run_id"]) == {
        "run": "RUNNING", "agent_call.team": "PENDING", "then": "BLOCKED",
    }  # fmt: skip
    finish(conn, run["run_id"], "agent_call.team", result={"code": "x"})
    assert runs.statuses(run["run_id"])["then"] == "PENDING"


def test_a_parked_step_is_cancelled_with_its_run(runs: RunClient, conn: Connection) -> None:
    run = runs.submit(agent("agent_call.team"))
    task_id = run["steps"][0]["task_id"]
    jobs.park(conn, task_id, ASKS, run["run_id"])
    assert runs.cancel(run["run_id"]).json()["status"] == "CANCELLED"
    refused(runs.approve(task_id), 409)


# --- at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("as_step", [False, True])
def test_of_twenty_decisions_at_once_one_is_taken(
    module_api: Api, second_api: Api, conn: Connection, tenant: str, as_step: bool
) -> None:
    apis = [module_api, second_api]
    runs = RunClient(module_api.http, tenant)
    for _ in range(5):
        if as_step:
            run = runs.submit(agent("agent_call.team"))
            task_id = run["steps"][0]["task_id"]
            artefact = jobs.park(conn, task_id, ASKS, run["run_id"])
        else:
            task_id, artefact = jobs.parked(conn, tenant, ASKS)
        together = threading.Barrier(20)

        def decide(
            number: int, task_id: int = task_id, artefact: str = artefact,
            together: threading.Barrier = together,
        ) -> tuple[int, dict[str, Any]]:  # fmt: skip
            said = {"approved": number % 3 > 0, "feedback": f"says {number}"}
            client = RunClient(apis[number % 2].http, tenant)
            together.wait()
            about = {"artefact": artefact} if number % 4 else {}
            return client.approve(task_id, {**said, **about}).status_code, said

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(decide, range(20)))
        assert Counter(status for status, _ in answers) == {200: 1, 409: 19}
        decision = next(said for status, said in answers if status == 200)
        row = rows.row(conn, task_id)
        assert (row["status"], row["gate"]["decision"]) == ("PENDING", decision)
        reason = "approved" if decision["approved"] else "rejected"
        assert rows.reasons(conn, task_id) == ["created", "claimed", "parked", reason]

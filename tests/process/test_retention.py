"""python admin.py purge, as an operator runs it, and what the API says of what is gone."""

from __future__ import annotations

from typing import Any

from tests.support.processes import Api, Processes
from tests.support.queue import Queue

STEPS = [
    {"name": "tool_call.a", "input": {"tool": "echo"}},
    {"name": "tool_call.b", "input": {"tool": "echo"}, "dependsOn": ["tool_call.a"]},
]
FORTY_DAYS_LATER = """
UPDATE tasks SET created_at = created_at - interval '40 days',
    finished_at = finished_at - interval '40 days'
"""
NOTHING_ELSE = [
    "Left of jobs whose tasks are gone, and deleted: jobs 0.",
    "Counted for tenants more than two days ago, and deleted: requests 0, tokens 0.",
]


def post(api: Api, path: str, body: Any) -> Any:
    answer = api.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_what_ended_long_ago_is_deleted_and_its_number_is_found_no_more(
    processes: Processes, queue: Queue
) -> None:
    processes.configure(retention={"finished_days": 30, "audit_days": 365})
    api = processes.api()
    worker = processes.worker()
    task_id = post(api, "/tasks", {"prompt": "hello"})["task_id"]
    run_id = post(api, "/runs", {"goal": "g", "steps": STEPS})["run_id"]
    batch = post(api, "/tasks/batch", {"tasks": [{"prompt": "one"}, {"prompt": "two"}]})["tasks"]
    api.await_status(task_id, "SUCCEEDED")
    queue.await_all("SUCCEEDED")
    assert worker.terminate() == 0
    queue.ask(FORTY_DAYS_LATER)
    young, waiting = api.submit("young"), api.submit("waiting", delay_seconds=3600)

    said = processes.admin("purge")

    assert said.splitlines() == [
        "Finished more than 30 days ago, and deleted: tasks 3, runs 1 with steps 2 and edges 1.",
        "Checkpoints are kept as long as their tasks: retention.checkpoints_days is 0.",
        *NOTHING_ELSE,
        "Months of the audit log dropped: none.",
    ]
    gone = [f"/tasks/{task_id}", f"/tasks/{task_id}/audit", f"/tasks/{task_id}/events"]
    gone += [f"/runs/{run_id}", f"/runs/{run_id}/events", f"/tasks/{run_id + 1}"]
    gone += [f"/tasks/{one['task_id']}" for one in batch]
    assert {path: api.http.get(path).status_code for path in gone} == dict.fromkeys(gone, 404)
    assert api.http.post(f"/tasks/{task_id}/requeue").status_code == 404
    assert api.http.delete(f"/runs/{run_id}").status_code == 404
    assert [api.task(one)["status"] for one in (young, waiting)] == ["PENDING"] * 2
    assert post(api, "/tasks", {"prompt": "another"})["task_id"] > waiting
    assert post(api, "/runs", {"goal": "another", "steps": STEPS})["run_id"] > waiting
    assert len(post(api, "/tasks/batch", {"tasks": [{"prompt": "one"}]})["tasks"]) == 1
    assert (
        processes.admin("purge")
        .splitlines()[0]
        .endswith("deleted: tasks 0, runs 0 with steps 0 and edges 0.")
    )


def test_as_long_as_nobody_says_otherwise_everything_is_kept(
    processes: Processes, queue: Queue
) -> None:
    (task_id,) = queue.submit("hello")
    processes.worker("--drain").wait()
    queue.ask(FORTY_DAYS_LATER)
    assert processes.admin("purge").splitlines() == [
        "Finished tasks are kept for ever: retention.finished_days is 0.",
        "Checkpoints are kept as long as their tasks: retention.checkpoints_days is 0.",
        *NOTHING_ELSE,
        "The audit log is kept for ever: retention.audit_days is 0.",
    ]
    assert queue.row(task_id)["status"] == "SUCCEEDED"


# With three checkpoints, each of which names a blob of its own and has a write.
AN_OLD_JOB = """
INSERT INTO tasks (task_id, kind, payload) VALUES (7, 'agent', '{"task": "t"}');
UPDATE tasks SET status = 'CANCELLED', reason = 'cancelled', due = false,
    finished_at = current_instant() - interval '8 days';
INSERT INTO checkpoints (thread_id, checkpoint_id, checkpoint)
SELECT '7', n, jsonb_build_object('channel_versions', jsonb_build_object('notes', n::text))
FROM generate_series(1, 3) AS n;
INSERT INTO checkpoint_blobs (thread_id, channel, version, type)
SELECT '7', 'notes', n, 'null' FROM generate_series(1, 3) AS n;
INSERT INTO checkpoint_writes (thread_id, checkpoint_id, task_id, idx, channel, blob)
SELECT '7', n, 'x', 0, 'notes', '' FROM generate_series(1, 3) AS n;
INSERT INTO job_states (
    task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version, state, prompt_tokens,
    completion_tokens)
SELECT 7, n, 1, '{}', '{}', 'v', '{}', 0, 0 FROM generate_series(1, 3) AS n;
"""


def test_of_a_job_that_ended_long_ago_the_last_checkpoint_is_kept(
    processes: Processes, queue: Queue
) -> None:
    processes.configure(retention={"checkpoints_days": 7})
    queue.ask(AN_OLD_JOB)
    assert processes.admin("purge").splitlines()[1] == (
        "Older checkpoints of jobs that finished more than 7 days ago, and deleted: "
        "jobs 1, checkpoints 2, writes 2, blobs 2, states 2."
    )
    assert queue.ask("SELECT checkpoint_id FROM checkpoints") == [{"checkpoint_id": "3"}]
    assert queue.ask("SELECT version FROM checkpoint_blobs") == [{"version": "3"}]

"""Graphs of a user's own in real workers: gates, versions, what cannot be loaded, live events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import db
from config import DatabaseSettings
from queries.tokens import TOKENS_CHANNEL, say_watched
from tests.support.agent_jobs import decide, nodes_run, submit_job, watched_events
from tests.support.fake_ollama import FakeOllama, answer
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue
from tests.support.team_model import CODE, TeamModel

BUILT = "tests.support.sample_graphs:build_"


def with_graph(processes: Processes, function: str) -> None:
    """Workers started from now on know this graph, as `own`."""
    processes.configure(graphs={"own": function})


def test_the_documented_graph_parks_and_is_carried_on_with_what_the_person_said(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    with_graph(processes, "examples.translation:build")
    fake.on("Translate", [answer("Bonjour"), answer("Salut")])
    fake.on("Correct", answer("Salut !"))
    processes.worker()
    task_id = submit_job(queue, "Hello", graph="own")
    row = decide(queue, task_id, approved=False, feedback="Less formal.")
    assert row["gate"]["asks"] == {"draft": "Bonjour"}
    eventually(lambda: queue.row(task_id)["gate"]["asks"] == {"draft": "Salut"})
    decide(queue, task_id, approved=True, feedback="With an exclamation mark.")
    result = queue.await_status(task_id, "SUCCEEDED")["result"]
    assert (result["draft"], result["text"]) == ("Salut", "Salut !")
    assert len(fake.calls) == 3
    queue.check()


def test_questions_that_a_graph_has_at_once_are_asked_one_after_the_other(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """Each decision reaches the question that was seen, and no other."""
    with_graph(processes, f"{BUILT}gates")
    processes.worker()
    task_id = submit_job(queue, graph="own")
    asked = []
    for approved, feedback in [(True, "one"), (False, "two"), (True, "three")]:
        row = decide(queue, task_id, approved, feedback)
        asked.append((row["gate"]["asks"], approved, feedback))
        eventually(lambda attempt=row["attempt"]: queue.row(task_id)["attempt"] > attempt)
    row = queue.await_status(task_id, "SUCCEEDED")
    ((left, _),) = [of for asks, *of in asked if asks == {"about": "left", "said": "echo: left"}]
    ((again, _),) = [of for asks, *of in asked if asks == "and again?"]
    ((_, right),) = [of for asks, *of in asked if asks == {"about": "right"}]
    assert row["result"]["said"] == [f"left {left} {again}", f"right {right}"]
    assert [call.prompt for call in fake.calls] == ["left"], "asked once, though it ran three times"
    queue.check()


def test_a_decision_answers_no_second_question_of_a_node_that_failed_behind_the_first(
    processes: Processes, queue: Queue
) -> None:
    with_graph(processes, f"{BUILT}asking_twice")
    processes.worker()
    task_id = submit_job(queue, graph="own")
    assert decide(queue, task_id, approved=True)["gate"]["asks"] == "publish?"
    eventually(lambda: queue.row(task_id)["attempt"] == 3, seconds=30)
    assert decide(queue, task_id, approved=False)["gate"]["asks"] == "delete everything?"
    assert queue.await_status(task_id, "SUCCEEDED")["result"] == {"said": ["True", "False"]}
    assert queue.story(task_id) == [
        "created", "claimed", "parked", "approved", "claimed", "retry", "claimed", "parked",
        "rejected", "claimed", "succeeded",
    ]  # fmt: skip


def test_a_decision_is_for_the_question_that_was_asked(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    """A decision about something that is not asked any more resumes nothing."""
    with_graph(processes, f"{BUILT}gate")
    processes.worker()
    task_id = submit_job(queue, str(tmp_path), graph="own")
    gate = queue.await_status(task_id, "AWAITING_APPROVAL")["gate"]
    queue.ask(
        "UPDATE tasks SET status = 'PENDING', reason = 'approved', due = true, gate = gate ||"
        """ '{"interrupt": "of another time", "decision": {"approved": true, "feedback": null}}'"""
        " WHERE task_id = %s",
        task_id,
    )
    eventually(lambda: queue.row(task_id)["attempt"] == 2)
    assert queue.await_status(task_id, "AWAITING_APPROVAL")["gate"] == gate
    assert not (tmp_path / "last").exists()


def test_a_job_goes_on_in_a_later_version_of_its_graph_that_knows_where_it_stands(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    row = begun_in_one_version_and_continued_in(
        f"{BUILT}gate_with_more", processes, queue, str(tmp_path)
    )
    assert row["status"] == "SUCCEEDED"
    assert row["result"]["said"] == ["True", "echo: last", "echo: first"]


def test_a_job_ends_loudly_if_a_later_version_of_its_graph_does_not_know_where_it_stands(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    row = begun_in_one_version_and_continued_in(
        f"{BUILT}gate_renamed", processes, queue, str(tmp_path)
    )
    assert (row["status"], row["reason"]) == ("FAILED", "permanent")
    assert row["last_error"].startswith("begun by another version of graph own")
    assert row["last_error"].endswith("submit it again")
    assert not (tmp_path / "last").exists()


def begun_in_one_version_and_continued_in(
    version: str, processes: Processes, queue: Queue, task: str
) -> dict[str, Any]:
    with_graph(processes, f"{BUILT}gate")
    first = processes.worker()
    task_id = submit_job(queue, task, graph="own")
    queue.await_status(task_id, "AWAITING_APPROVAL")
    first.terminate()
    with_graph(processes, version)
    decide(queue, task_id)
    processes.worker()
    return queue.await_final(task_id)


def test_a_job_that_had_ended_is_settled_with_what_it_had_and_runs_nothing(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """Its worker died behind the last checkpoint and before it could settle."""
    task_id = submit_job(queue)
    queue.ask(
        "INSERT INTO job_states (task_id, checkpoint_id, attempt, nodes, next_nodes,"
        " graph_version, state, prompt_tokens, completion_tokens)"
        " VALUES (%s, '1', 1, '{reviewer}', '{}', 'old', '{\"code\": \"done\"}', 0, 0)",
        task_id,
    )
    processes.worker()
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["result"]["code"] == "done"
    assert row["result"]["stopped"] is None
    assert fake.calls == []


@pytest.mark.parametrize(
    ("function", "reason", "says"),
    [
        ("tests.support.no_such_module:build", "max_retry", "cannot be loaded"),
        (f"{BUILT}nothing", "permanent", "not a StateGraph"),
    ],
)
def test_a_graph_that_cannot_be_loaded_is_named(
    processes: Processes, fake: FakeOllama, queue: Queue, function: str, reason: str, says: str
) -> None:
    with_graph(processes, function)
    processes.worker()
    row = queue.await_status(submit_job(queue, graph="own", max_retry=1), "FAILED")
    assert row["reason"] == reason
    assert f"graphs.own = '{function}'" in row["last_error"]
    assert says in row["last_error"]


def test_who_watches_a_job_sees_its_nodes_start_and_finish_and_what_their_models_say(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.script = TeamModel(coder=answer(CODE, chunks=30, delay=0.1))
    queue.await_idle(processes.worker().name)  # from then on it listens
    task_id = submit_job(queue)
    conn = db.listen(queue.url, DatabaseSettings(), "tests", TOKENS_CHANNEL)
    try:
        say_watched(conn, [task_id])
        queue.await_status(task_id, "SUCCEEDED")
        events = watched_events(conn, until={"node": "reviewer", "phase": "finished"})
    finally:
        conn.close()
    head = {"root_id": task_id, "task_id": task_id, "attempt": 1}
    assert all(event.items() >= head.items() for event in events)
    of_coder = [event for event in events if event["node"] == "coder"]
    said = "".join(event.get("text", "") for event in of_coder)
    assert said
    assert CODE.endswith(said)
    assert of_coder[-1] == {**head, "node": "coder", "phase": "finished"}
    phases = [(event["node"], event["phase"]) for event in events if "phase" in event][-3:]
    assert phases == [("coder", "finished"), ("reviewer", "started"), ("reviewer", "finished")]


def test_nobody_is_told_of_nodes_whom_nobody_watches(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    fake.script = TeamModel()
    processes.worker()
    conn = db.listen(queue.url, DatabaseSettings(), "tests", TOKENS_CHANNEL)
    try:
        task_id = submit_job(queue)
        queue.await_status(task_id, "SUCCEEDED")
        assert db.heard(conn) == []
    finally:
        conn.close()
    assert len(nodes_run(queue, task_id)) == 4

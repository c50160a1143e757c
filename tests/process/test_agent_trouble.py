"""Agent jobs whose worker dies, freezes or is told to stop, and whose servers go away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_jobs import decide, nodes_run, submit_job, traces
from tests.support.fake_ollama import Call, FakeOllama, Reply, answer, slow, status
from tests.support.processes import Processes, Worker, eventually
from tests.support.queue import Queue
from tests.support.team_model import CODE, TeamModel, role_of

ROLES = ("supervisor", "researcher", "coder", "reviewer")
ONCE_EACH = dict.fromkeys(ROLES, 1)
SHORT = {"lease_seconds": 2, "heartbeat_seconds": 0.4, "reap_seconds": 0.3}
GRAPHS = {
    name: f"tests.support.sample_graphs:build_{name}"
    for name in (
        "waiting",
        "choosing",
        "choosing_by_a_call",
        "swallowing",
        "deaf",
        "stumbling",
        "failing",
        "reduced",
    )
}
GOOD = {
    "supervisor": answer('{"route": "research", "plan": "go"}'),
    "researcher": answer("notes"),
    "coder": answer(CODE),
    "reviewer": answer('{"verdict": "approved", "feedback": ""}'),
}


@pytest.fixture(autouse=True)
def short_leases(processes: Processes) -> None:
    processes.configure(worker=SHORT, graphs=GRAPHS)


def script(fake: FakeOllama, **behaviours: Any) -> TeamModel:
    team = TeamModel(**behaviours)
    fake.script = team
    return team


def call_of(fake: FakeOllama, role: str, count: int = 1) -> Call:
    """The latest call of a role, once there are so many."""

    def look() -> Call | None:
        calls = [call for call in fake.calls if role_of(call.prompt) == role]
        return calls[-1] if len(calls) == count else None

    return eventually(look, what=f"{count} calls of the {role}")  # type: ignore[return-value]


# --- workers that die ---------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_a_job_whose_worker_is_killed_in_a_node_goes_on_at_that_node(
    processes: Processes, fake: FakeOllama, queue: Queue, role: str
) -> None:
    team = script(fake, **{role: [slow(), GOOD[role]]})
    task_id = submit_job(queue)
    first = processes.worker()
    call_of(fake, role)
    first.kill()
    processes.worker()
    row = queue.await_status(task_id, "SUCCEEDED")
    assert team.counts == {**ONCE_EACH, role: 2}, "only the call that was cut off is made again"
    assert row["result"]["code"] == CODE
    assert nodes_run(queue, task_id) == list(ROLES)
    assert queue.story(task_id) == ["created", "claimed", "reaped", "claimed", "succeeded"]
    queue.check()


def test_a_job_whose_worker_is_killed_while_it_waits_for_a_person_loses_nothing(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake)
    first = processes.worker()
    task_id = submit_job(queue, require_approval=True)
    queue.await_status(task_id, "AWAITING_APPROVAL")
    first.kill()
    processes.worker()
    decide(queue, task_id)
    queue.await_status(task_id, "SUCCEEDED")
    assert team.counts == ONCE_EACH
    queue.check()


def test_a_node_that_had_its_reply_when_its_worker_was_killed_does_not_pay_again(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    task_id = submit_job(queue, str(tmp_path), graph="waiting")
    first = processes.worker()
    eventually((tmp_path / "entered 1").exists)
    first.kill()
    (tmp_path / "2").touch()
    processes.worker()
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["result"]["said"] == ["echo: first", "echo: waits in attempt 2", "echo: last"]
    assert sorted(call.prompt for call in fake.calls) == ["first", "last", "waits"]
    queue.check()


@pytest.mark.parametrize("graph", ["choosing", "choosing_by_a_call"])
def test_nor_does_a_branch_in_front_of_all_nodes(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path, graph: str
) -> None:
    task_id = submit_job(queue, str(tmp_path), graph=graph)
    first = processes.worker()
    eventually((tmp_path / "entered 1").exists)
    first.kill()
    (tmp_path / "2").touch()
    processes.worker()
    assert queue.await_status(task_id, "SUCCEEDED")["result"]["said"] == ["echo: last"]
    assert sorted(call.prompt for call in fake.calls) == ["last", "waits"]
    queue.check()


def test_fields_that_nobody_wrote_are_in_the_result_as_nodes_would_see_them(
    processes: Processes, queue: Queue
) -> None:
    task_id = submit_job(queue, "go", graph="reduced")
    processes.worker()
    result = queue.await_status(task_id, "SUCCEEDED")["result"]
    assert result == {"text": "x", "notes": [], "score": 0}


def entered_after(attempt: int, folder: Path) -> int:
    """The attempt in which the node was entered again; 0: in none yet."""
    entered = [int(one.name.removeprefix("entered ")) for one in folder.glob("entered *")]
    return next((one for one in sorted(entered) if one > attempt), 0)


def test_a_worker_that_wakes_after_its_lease_writes_no_checkpoint(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    """Its node has ended, and the checkpoint behind it is all that is left to write."""
    task_id = submit_job(queue, str(tmp_path), graph="waiting")
    first = processes.worker()
    eventually((tmp_path / "entered 1").exists)
    first.signal(signal.SIGSTOP)
    (tmp_path / "1").touch()
    processes.worker()
    # On a busy machine the second attempt can be lost as well, before it comes so far.
    attempt = eventually(lambda: entered_after(1, tmp_path), what="another worker is in the node")
    before = traces(queue)
    first.signal(signal.SIGCONT)
    eventually(lambda: f"action=lease_lost task_id={task_id}" in first.log, what="it says so")
    assert first.terminate() == 0
    assert traces(queue) == before
    (tmp_path / f"{attempt}").touch()
    row = queue.await_status(task_id, "SUCCEEDED")
    waited = f"echo: waits in attempt {attempt}"
    assert row["result"]["said"] == ["echo: first", waited, "echo: last"]
    queue.check()


def test_a_worker_that_wakes_after_its_lease_writes_no_reply(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """The reply had come: it lies in the socket, and the ledger's row is all that is missing."""
    may_answer = threading.Event()

    def of_the_first(reply: Reply) -> None:
        while not may_answer.is_set():
            reply.wait(0.05)
        answer("by the first, too late", tokens=1000)(reply)

    script(fake, coder=[of_the_first, slow(then=answer(CODE))])
    task_id = submit_job(queue)
    first = processes.worker()
    call = call_of(fake, "coder")
    first.signal(signal.SIGSTOP)
    may_answer.set()
    eventually(lambda: call.outcome == "finished")
    processes.worker()
    call_of(fake, "coder", 2)
    before = traces(queue)
    first.signal(signal.SIGCONT)
    eventually(lambda: f"action=lease_lost task_id={task_id}" in first.log, what="it says so")
    assert first.terminate() == 0
    assert traces(queue) == before
    fake.release()
    row = queue.await_status(task_id, "SUCCEEDED")
    assert (row["result"]["code"], row["completion_tokens"] < 1000) == (CODE, True)
    queue.check()


# --- workers that are told to stop ----------------------------------------------------------------


def test_a_job_is_handed_over_at_its_next_node_when_its_worker_is_to_stop(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake, coder=slow(then=GOOD["coder"]))
    task_id = submit_job(queue)
    first = processes.worker()
    call_of(fake, "coder")
    first.signal(signal.SIGTERM)
    eventually(lambda: "action=stopping" in first.log)
    fake.release()
    assert first.wait() == 0
    row = queue.row(task_id)
    assert (row["status"], row["reason"], row["delivery_count"]) == ("PENDING", "released", 0)
    assert "reviewer" not in team.counts
    processes.worker()
    queue.await_status(task_id, "SUCCEEDED")
    assert team.counts == ONCE_EACH
    assert queue.story(task_id) == ["created", "claimed", "released", "claimed", "succeeded"]
    queue.check()


@pytest.mark.parametrize("hurry", ["a second signal", "the end of the grace period"])
def test_a_call_is_cut_off_when_a_worker_cannot_wait_for_it(
    processes: Processes, fake: FakeOllama, queue: Queue, hurry: str
) -> None:
    grace = {"grace_seconds": 600 if hurry == "a second signal" else 0.5}
    processes.configure(worker={**SHORT, **grace})
    team = script(fake, coder=[slow(), GOOD["coder"]])
    task_id = submit_job(queue)
    first = processes.worker()
    call = call_of(fake, "coder")
    first.signal(signal.SIGTERM)
    if hurry == "a second signal":
        eventually(lambda: "action=stopping" in first.log)
        first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert call.outcome == "hung up"
    assert queue.row(task_id)["delivery_count"] == 0
    processes.worker()
    queue.await_status(task_id, "SUCCEEDED")
    assert team.counts == {**ONCE_EACH, "coder": 2}
    queue.check()


# --- jobs that are to stop ------------------------------------------------------------------------


def request_cancel(queue: Queue, task_id: int) -> None:
    queue.ask("UPDATE tasks SET cancel_requested = true WHERE task_id = %s", task_id)


def test_a_cancelled_job_s_model_call_ends_at_once(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake, coder=slow())
    processes.worker()
    task_id = submit_job(queue)
    call = call_of(fake, "coder")
    request_cancel(queue, task_id)
    row = queue.await_status(task_id, "CANCELLED", 5)
    eventually(lambda: call.outcome == "hung up", 5)
    assert row["prompt_tokens"] > 0, "what was paid before stays"
    assert "reviewer" not in team.counts
    queue.check()


def test_a_job_that_runs_longer_than_it_may_is_a_dead_letter(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    script(fake, coder=slow())
    processes.worker()
    task_id = submit_job(queue, timeout_seconds=6)
    call = call_of(fake, "coder")
    assert queue.await_status(task_id, "FAILED")["reason"] == "deadline"
    eventually(lambda: call.outcome == "hung up")


def test_a_node_that_swallows_every_exception_does_not_keep_its_job_from_stopping(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    fake.on("swallows", slow())
    worker = processes.worker()
    task_id = submit_job(queue, str(tmp_path), graph="swallowing")
    fake.wait_for("swallows")
    request_cancel(queue, task_id)
    queue.await_status(task_id, "CANCELLED")
    assert worker.terminate() == 0
    assert not (tmp_path / "last").exists()
    assert len(fake.calls_for("swallows")) == 1


def test_an_outage_goes_past_a_node_that_swallows_every_exception(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    fake.on("swallows", [status(503), answer("here again")])
    processes.worker()
    task_id = submit_job(queue, str(tmp_path), graph="swallowing")
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["result"]["said"] == ["echo: first", "here again", "echo: last"]


def test_a_worker_ends_in_order_around_nodes_that_listen_to_nothing(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path
) -> None:
    worker = processes.worker()
    task_id = submit_job(queue, str(tmp_path), graph="deaf")
    eventually((tmp_path / "other deaf").exists)
    request_cancel(queue, task_id)
    queue.await_status(task_id, "CANCELLED")
    (other,) = queue.submit("others go on")
    queue.await_status(other, "SUCCEEDED")
    assert worker.terminate(20) == 0
    assert "action=stopped" in worker.log
    queue.check()


# --- servers that go away -------------------------------------------------------------------------


def test_a_model_server_that_goes_away_in_the_middle_burns_nothing(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake, coder=[status(503), GOOD["coder"]])
    processes.worker()
    task_id = submit_job(queue)
    row = queue.await_status(task_id, "SUCCEEDED")
    assert team.counts == {**ONCE_EACH, "coder": 2}
    assert (row["retry_count"], row["delivery_count"], row["attempt"]) == (0, 1, 2)
    assert queue.story(task_id) == ["created", "claimed", "outage", "claimed", "succeeded"]
    unpaid = queue.ask("SELECT * FROM model_calls WHERE ended_at IS NULL")
    assert unpaid == [], "a call that no server took reserves nothing"
    queue.check()


def test_a_call_that_fails_is_tried_again_and_no_other(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    processes.configure(worker=SHORT, retry={"max_delay_seconds": 0.1})
    team = script(fake, coder=[status(500), GOOD["coder"]])
    processes.worker()
    task_id = submit_job(queue)
    row = queue.await_status(task_id, "SUCCEEDED")
    assert team.counts == {**ONCE_EACH, "coder": 2}
    assert (row["retry_count"], row["attempt"]) == (1, 2)
    queue.check()


@pytest.mark.parametrize(("graph", "attempts"), [("stumbling", 1), ("failing", 2)])
def test_a_node_that_runs_again_is_given_the_replies_it_had(
    processes: Processes, fake: FakeOllama, queue: Queue, tmp_path: Path, graph: str, attempts: int
) -> None:
    """LangGraph runs it again, or the next attempt does."""
    processes.configure(worker=SHORT, graphs=GRAPHS, retry={"max_delay_seconds": 0.1})
    processes.worker()
    task_id = submit_job(queue, str(tmp_path), graph=graph)
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["result"]["said"] == ["echo: one", "echo: two"]
    assert [call.prompt for call in fake.calls] == ["one", "two"]
    assert row["attempt"] == attempts
    if attempts == 2:
        (retry,) = [entry for entry in queue.audit(task_id) if entry["reason"] == "retry"]
        assert retry["detail"]["error"] == "ConnectionError: it stumbled"


@pytest.fixture
def own_processes(own_queue: Queue, fake: FakeOllama, tmp_path: Path) -> Iterator[Processes]:
    with Processes(own_queue.url, fake.url, tmp_path) as started:
        started.configure(worker={"lease_seconds": 20, "heartbeat_seconds": 1, "reap_seconds": 0.5})
        yield started


@pytest.mark.parametrize("answered", ["while Postgres is away", "afterwards"])
def test_a_restart_of_postgres_in_the_middle_of_a_call_loses_and_burns_nothing(
    own_processes: Processes, own_server: Any, own_queue: Queue, fake: FakeOllama, answered: str
) -> None:
    team = script(fake, coder=slow(then=GOOD["coder"]))
    worker: Worker = own_processes.worker()
    own_queue.await_idle(worker.name)  # it installs the schema
    task_id = submit_job(own_queue)
    call = call_of(fake, "coder")
    own_server.stop("immediate")
    if answered == "while Postgres is away":
        fake.release()
        eventually(lambda: call.outcome == "finished")
    own_server.start()
    fake.release()
    row = own_queue.await_status(task_id, "SUCCEEDED", 60)
    assert team.counts == ONCE_EACH, "the reply that came meanwhile was paid and is kept"
    assert (row["retry_count"], row["delivery_count"]) == (0, 1)
    assert worker.is_running()
    own_queue.check()


def test_a_restart_of_postgres_behind_a_node_is_a_release(
    own_processes: Processes, own_server: Any, own_queue: Queue, fake: FakeOllama, tmp_path: Path
) -> None:
    """The checkpoint cannot be written; the node runs again, with the reply that it had."""
    own_processes.configure(
        worker={"lease_seconds": 20, "heartbeat_seconds": 1, "reap_seconds": 0.5}, graphs=GRAPHS
    )
    worker = own_processes.worker()
    own_queue.await_idle(worker.name)  # it installs the schema
    task_id = submit_job(own_queue, str(tmp_path), graph="waiting")
    eventually((tmp_path / "entered 1").exists)
    own_server.stop("immediate")
    (tmp_path / "1").touch()
    eventually(lambda: "cannot go on" in worker.log, 60)
    own_server.start()
    (tmp_path / "2").touch()
    row = own_queue.await_status(task_id, "SUCCEEDED", 60)
    assert row["result"]["said"] == ["echo: first", "echo: waits in attempt 2", "echo: last"]
    assert sorted(call.prompt for call in fake.calls) == ["first", "last", "waits"]
    assert own_queue.story(task_id) == ["created", "claimed", "released", "claimed", "succeeded"]
    own_queue.check()

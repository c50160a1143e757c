"""Agent jobs in real workers: the whole path, the gate, the budget, and what models may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.agent_jobs import decide, nodes_run, submit_job
from tests.support.fake_ollama import FakeOllama, answer, empty, slow
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue
from tests.support.team_model import CODE, NOTES, PLAN, TeamModel, approves, rejects, routes


def script(fake: FakeOllama, **behaviours: Any) -> TeamModel:
    team = TeamModel(**behaviours)
    fake.script = team
    return team


def test_a_job_goes_from_supervisor_to_reviewer_and_its_state_is_its_result(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake)
    processes.worker()
    task_id = submit_job(queue)
    row = queue.await_status(task_id, "SUCCEEDED")
    assert row["result"] == {
        "route": "research",
        "plan": PLAN,
        "research": NOTES,
        "code": CODE,
        "verdict": "approved",
        "feedback": row["result"]["feedback"],
        "revisions": 0,
        "stopped": None,
    }
    assert team.counts == {"supervisor": 1, "researcher": 1, "coder": 1, "reviewer": 1}
    assert nodes_run(queue, task_id) == ["supervisor", "researcher", "coder", "reviewer"]
    assert (row["route"], row["model"]) == ("local", "llama3.2:latest")
    (used,) = queue.ask(
        "SELECT sum(prompt_tokens) AS prompt, sum(completion_tokens) AS completion,"
        " sum(cost) AS cost FROM model_calls"
    )
    assert (row["prompt_tokens"], row["completion_tokens"]) == (used["prompt"], used["completion"])
    assert row["cost"] == used["cost"] > 0
    queue.check()


def test_a_supervisor_may_send_a_job_straight_to_the_coder(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake, supervisor=routes("code"))
    processes.worker()
    queue.await_status(submit_job(queue), "SUCCEEDED")
    assert team.counts == {"supervisor": 1, "coder": 1, "reviewer": 1}


def test_a_rejected_job_goes_back_to_the_coder_until_it_is_approved(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake, reviewer=[rejects(), approves()])
    processes.worker()
    row = queue.await_status(submit_job(queue), "SUCCEEDED")
    assert (row["result"]["verdict"], row["result"]["revisions"]) == ("approved", 1)
    assert team.counts == {"supervisor": 1, "researcher": 1, "coder": 2, "reviewer": 2}


def test_a_job_that_is_always_rejected_stops_at_max_revisions(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake, reviewer=rejects())
    processes.worker()
    row = queue.await_status(submit_job(queue, max_revisions=1), "SUCCEEDED")
    assert (row["result"]["verdict"], row["result"]["stopped"]) == ("rejected", "max_revisions")
    assert team.counts["coder"] == 2


def test_a_job_that_is_rejected_for_ever_is_a_dead_letter_at_the_recursion_limit(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    script(fake, reviewer=rejects())
    processes.worker()
    row = queue.await_status(submit_job(queue, max_revisions=100), "FAILED")
    assert row["reason"] == "recursion_limit"
    assert "agents.recursion_limit (25)" in row["last_error"]
    queue.check()


def test_the_gate_parks_a_job_and_each_version_of_the_code_is_asked_about_once(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(
        fake,
        coder=[answer("one"), answer("two"), answer("three")],
        reviewer=[rejects(), approves()],
    )
    processes.worker()
    task_id = submit_job(queue, require_approval=True)

    row = decide(queue, task_id, approved=False, feedback="Shorter, please.")
    assert row["gate"]["asks"] == {"code": "one", "revision": 0}
    assert (row["delivery_count"], row["attempt"], row["lease_token"]) == (0, 1, None)
    second = queue_asks(queue, task_id, "two")
    assert second["delivery_count"] == 0
    assert "Shorter, please." in team.prompts("coder")[-1]
    assert "reviewer" not in team.counts

    decide(queue, task_id)  # then the reviewer rejects what the person has approved
    queue_asks(queue, task_id, "three")
    decide(queue, task_id)
    row = queue.await_status(task_id, "SUCCEEDED")
    assert (row["result"]["verdict"], row["result"]["revisions"]) == ("approved", 2)
    assert team.counts == {"supervisor": 1, "researcher": 1, "coder": 3, "reviewer": 2}
    assert (row["delivery_count"], row["retry_count"], row["attempt"]) == (1, 0, 4)
    queue.check()


def queue_asks(queue: Queue, task_id: int, code: str) -> dict[str, Any]:
    """The row once it waits with this code."""

    def look() -> dict[str, Any]:
        row = queue.row(task_id)
        assert row["status"] == "AWAITING_APPROVAL", row
        assert row["gate"]["asks"]["code"] == code
        return row

    return eventually(look, what=f"it asks about {code}")


def test_a_parked_job_is_decided_without_a_worker_and_carried_on_by_the_next(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    team = script(fake)
    first = processes.worker()
    task_id = submit_job(queue, require_approval=True)
    queue.await_status(task_id, "AWAITING_APPROVAL")
    assert first.terminate() == 0
    decide(queue, task_id)
    assert queue.row(task_id)["status"] == "PENDING"
    processes.worker()
    queue.await_status(task_id, "SUCCEEDED")
    assert team.counts == {"supervisor": 1, "researcher": 1, "coder": 1, "reviewer": 1}
    queue.check()


def test_a_job_that_has_spent_its_budget_ends_with_what_it_has(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """A call is made if the most that it may use is left; then it counts with what it used."""
    processes.configure(ollama={"num_predict": 100, "num_ctx": 2000})
    team = script(
        fake,
        supervisor=answer('{"route": "code", "plan": "go"}', tokens=10, prompt_tokens=20),
        coder=answer("half of it", tokens=100, prompt_tokens=1970),
    )
    processes.worker()
    task_id = submit_job(queue, token_budget=2200)
    row = queue.await_status(task_id, "SUCCEEDED")
    assert (row["result"]["stopped"], row["result"]["code"]) == ("token_budget", "half of it")
    assert row["result"]["verdict"] is None
    assert row["prompt_tokens"] + row["completion_tokens"] == 2100
    assert team.counts == {"supervisor": 1, "coder": 1}
    queue.check()


def test_two_jobs_of_a_tenant_never_use_more_together_than_its_day_has(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    """Each call reserves 1100 and uses 1100: of 8 that the jobs would make, 5 fit into 5999."""
    processes.configure(
        ollama={"num_predict": 100, "num_ctx": 1000}, limits={"tenant_tokens_per_day": 5999}
    )
    used = {"tokens": 100, "prompt_tokens": 1000}
    long = "Long: " + "x" * 1000  # so that the estimate is the context
    team = script(
        fake,
        supervisor=answer('{"route": "research", "plan": "go"}', **used),
        researcher=answer("notes", **used),
        coder=answer("code", **used),
        reviewer=answer('{"verdict": "approved", "feedback": ""}', **used),
    )
    ids = [submit_job(queue, long), submit_job(queue, long)]
    processes.worker("--concurrency", "2")
    results = [queue.await_status(task_id, "SUCCEEDED")["result"] for task_id in ids]
    assert sum(team.counts.values()) == 5
    (day,) = queue.ask("SELECT * FROM tenant_tokens")
    assert day["taken"] == 5 * 1100
    assert "tenant_tokens_per_day" in [result["stopped"] for result in results]
    queue.check()


def test_what_models_say_is_stored_whatever_it_is(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    odd = "naïve 漢字 🎉 \x00 \x1b end"
    script(
        fake,
        supervisor=answer("APPROVE! ```json\n{]"),
        researcher=empty(),
        coder=answer(odd),
        reviewer=[answer("I approve of this."), answer("APPROVED"), approves()],
    )
    processes.worker()
    row = queue.await_status(submit_job(queue, f"Say {odd!r}"), "SUCCEEDED")
    result = row["result"]
    assert result["code"] == odd.replace("\0", "\ufffd")
    assert (result["route"], result["research"]) == ("research", "")
    assert (result["verdict"], result["revisions"]) == ("approved", 1)
    queue.check()


def test_many_jobs_run_beside_each_other_in_one_worker_over_few_connections(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    together = 32
    team = script(fake, coder=slow(then=answer(CODE)))
    processes.configure(agents={"pool_size": 4})
    ids = [submit_job(queue, f"Job number {number:02}.") for number in range(together)]
    worker = processes.worker("--concurrency", str(together))
    eventually(lambda: team.count("coder") == together, 60, "all are in the same node")
    (held,) = queue.ask(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE ANY (ARRAY['agent jobs', 'orchestrator checkpoints'])"
    )
    assert held["n"] <= 8
    fake.release()
    queue.await_all("SUCCEEDED", 90)
    assert team.counts == dict.fromkeys(("supervisor", "researcher", "coder", "reviewer"), together)
    assert {queue.row(task_id)["attempt"] for task_id in ids} == {1}, "none was handed back"
    assert worker.terminate() == 0
    queue.check()


def test_a_worker_that_has_had_no_job_has_not_loaded_what_jobs_need(
    processes: Processes, fake: FakeOllama, queue: Queue
) -> None:
    script(fake)
    worker = processes.worker()
    queue.await_idle(worker.name)
    loaded = Path(f"/proc/{worker.pid}/maps")
    assert "psycopg_binary" not in loaded.read_text()
    queue.await_status(submit_job(queue), "SUCCEEDED")
    assert "psycopg_binary" in loaded.read_text(), "or this test shows nothing"

"""Steps of runs in a real worker: what flows from one to the next, and what stops a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import db
from config import DatabaseSettings
from queries.operations import approve_task
from queries.runs import NewRun, NewStep, submit_run
from tests.conftest import fresh_database
from tests.support.bench import Bench
from tests.support.fake_ollama import FakeOllama, answer, slow, status
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue, Row

SAMPLES = "tests.support.sample_tools"
TOOLS = {name: f"{SAMPLES}:{name}" for name in ("add", "told", "give", "die")}


def tool(name: str, tool: str, needs: Any = (), /, **args: Any) -> NewStep:
    return NewStep(f"tool_call.{name}", "tool", {"tool": tool, "args": args}, tuple(needs))


def llm(name: str, prompt: str, needs: Any = (), **more: Any) -> NewStep:
    payload = {"prompt": prompt, **more}
    return NewStep(f"llm_call.{name}", "prompt", payload, tuple(needs), "local")


def submit(queue: Queue, *steps: NewStep) -> int:
    conn = db.connect(queue.url, DatabaseSettings(), "tests")
    try:
        return submit_run(conn, NewRun("default", "a goal", steps)).task_id
    finally:
        conn.close()


def approve(queue: Queue, task_id: int, feedback: str) -> None:
    conn = db.connect(queue.url, DatabaseSettings(), "tests")
    try:
        approve_task(conn, "default", str(task_id), True, feedback)
    finally:
        conn.close()


def steps(queue: Queue, run_id: int) -> dict[str, Row]:
    rows = queue.ask("SELECT * FROM tasks WHERE parent_id = %s ORDER BY task_id", run_id)
    return {row["step"].partition(".")[2]: row for row in rows}


@pytest.fixture(scope="module")
def shared_bench(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with fresh_database(server_url) as url, FakeOllama() as fake, Queue(url) as queue:
        bench = Bench(queue, fake, tmp_path_factory.mktemp("steps"))
        with bench.processes:
            bench.start(
                worker={"lease_seconds": 60, "heartbeat_seconds": 1},
                retry={"max_delay_seconds": 0.05},
                limits={"max_prompt_bytes": 2000},
                tools=TOOLS,
            )
            yield bench


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    yield shared_bench
    shared_bench.check_worker()


def play(bench: Bench, *given: NewStep) -> tuple[str, dict[str, Row]]:
    """How a run has ended, and its steps."""
    run_id = submit(bench.queue, *given)
    run = bench.queue.await_final(run_id)
    bench.queue.check([run_id])
    return run["status"], steps(bench.queue, run_id)


# --- what flows ------------------------------------------------------------------------------


def test_the_reference_s_example_runs_as_it_stands(bench: Bench) -> None:
    ended, ran = play(
        bench,
        NewStep("tool_call.fetch_data", "tool", {"tool": "fetch_data"}),
        llm("summarize", "...", ["tool_call.fetch_data"]),
    )  # fmt: skip
    assert ended == "SUCCEEDED"
    assert ran["fetch_data"]["result"]["rows"]
    assert ran["summarize"]["result"] == {"text": "echo: ..."}


def test_results_flow_into_prompts_and_arguments_and_keep_their_types(bench: Bench) -> None:
    ended, ran = play(
        bench,
        tool("fetch_data", "fetch_data", name="planets"),
        tool("add", "add", ["tool_call.fetch_data"],
             a="{{ tool_call.fetch_data.output.rows.3.moons }}", b=40),
        llm("say", "{{tool_call.fetch_data.output.rows.2.name}} has {{ tool_call.add.output }}",
            ["tool_call.fetch_data", "tool_call.add"]),
        tool("echo", "echo", ["llm_call.say", "tool_call.fetch_data"],
             said="{{ llm_call.say.output }}!", row="{{ tool_call.fetch_data.output.rows.0 }}"),
    )  # fmt: skip
    assert ended == "SUCCEEDED", {name: row["last_error"] for name, row in ran.items()}
    assert ran["add"]["result"] == 42
    assert ran["say"]["result"] == {"text": "echo: Earth has 42"}
    assert ran["echo"]["result"] == {
        "said": "echo: Earth has 42!",
        "row": {"name": "Mercury", "radius_km": 2440, "moons": 0},
    }
    assert ran["say"]["payload"]["prompt"].startswith("{{tool_call"), "what was sent in is kept"


def test_what_a_step_returned_is_never_read_as_a_template(bench: Bench) -> None:
    evil = '{{ tool_call.other.output }} {{ nonsense }} {{ "{{" }}'
    escaped = evil.replace("{{", '{{ "{{" }}')
    ended, ran = play(
        bench,
        tool("other", "echo", secret="s3cret"),
        tool("evil", "echo", text=escaped),
        llm("say", "> {{ tool_call.evil.output.text }}", ["tool_call.evil", "tool_call.other"]),
        tool("again", "echo", ["llm_call.say"], text="{{ llm_call.say.output }}"),
    )
    assert ended == "SUCCEEDED"
    assert ran["evil"]["result"] == {"text": evil}
    assert ran["say"]["result"] == {"text": f"echo: > {evil}"}
    assert ran["again"]["result"] == {"text": f"echo: > {evil}"}


def test_an_answer_in_a_format_flows_as_json(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    bench.fake.on("count them", [answer("many"), answer('{"n": 40}')])
    ended, ran = play(
        bench,
        llm("count", "count them", format=schema, model="mistral:7b"),
        tool("add", "add", ["llm_call.count"], a="{{ llm_call.count.output.n }}"),
    )
    assert ended == "SUCCEEDED"
    assert ran["count"]["result"] == {"text": '{"n": 40}', "json": {"n": 40}}
    assert ran["count"]["model"] == "mistral:7b"
    assert ran["add"]["result"] == 42
    calls = bench.fake.calls_for("count them")
    assert [call.body["format"] for call in calls] == [schema, schema]
    assert ran["count"]["completion_tokens"] == 3


def test_an_approval_s_feedback_flows(bench: Bench) -> None:
    run_id = submit(
        bench.queue,
        NewStep("approval.look", "approval", {"question": "good?"}),
        tool("echo", "echo", ["approval.look"], said="{{ approval.look.output.feedback }}"),
    )
    waiting = steps(bench.queue, run_id)["look"]["task_id"]
    approve(bench.queue, waiting, "{{ nice }}")
    assert bench.queue.await_final(run_id)["status"] == "SUCCEEDED"
    assert steps(bench.queue, run_id)["echo"]["result"] == {"said": "{{ nice }}"}


# --- what stops a run ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("{{ tool_call.a.output.rows.9 }}", "tool_call.a.output.rows.9"),
        ("{{ tool_call.a.output.said.x }}", "tool_call.a.output.said.x"),
        ("{{ tool_call.a.output", "no end"),
        ("{{ tool_call.a.output.said }}" * 21, "more than 2000 bytes"),
        ("x" * 1950 + "{{ tool_call.a.output.said }}", "is 2050 bytes long"),
    ],
)
def test_a_prompt_that_cannot_be_filled_in_fails_its_run_at_once(
    bench: Bench, prompt: str, says: str
) -> None:
    ended, ran = play(
        bench,
        tool("a", "echo", said="y" * 100),
        llm("b", prompt, ["tool_call.a"]),
        tool("c", "echo", ["llm_call.b"]),
    )
    assert ended == "FAILED"
    assert (ran["b"]["status"], ran["b"]["reason"]) == ("FAILED", "permanent")
    assert says in ran["b"]["last_error"]
    assert (ran["a"]["status"], ran["c"]["status"]) == ("SUCCEEDED", "CANCELLED")


def test_only_the_step_that_fails_is_tried_again(bench: Bench) -> None:
    ended, ran = play(
        bench,
        tool("a", "echo", x=1),
        tool("b", "flaky", ["tool_call.a"], failures=2),
        tool("c", "echo", ["tool_call.b"], attempt="{{ tool_call.b.output.attempt }}"),
    )
    assert ended == "SUCCEEDED"
    assert [(row["attempt"], row["retry_count"]) for row in ran.values()] == [
        (1, 0),
        (3, 2),
        (1, 0),
    ]
    assert ran["c"]["result"] == {"attempt": 3}


def test_a_step_whose_model_is_missing_says_which_one(bench: Bench) -> None:
    bench.fake.on("ask nobody", status(404, "not found"))
    ended, ran = play(bench, llm("a", "ask nobody", model="mistral:7b"))
    assert (ended, ran["a"]["reason"]) == ("FAILED", "permanent")
    assert "ollama pull mistral:7b" in ran["a"]["last_error"]


def test_a_lone_prompt_is_never_a_template(bench: Bench) -> None:
    for prompt in ("{{ tool_call.a.output }}", "{{ nonsense }} {{"):
        row = bench.play(prompt)
        assert row["result"] == {"text": f"echo: {prompt}"}


def test_an_outage_burns_no_step_and_the_run_goes_on_when_it_is_over(bench: Bench) -> None:
    bench.fake.on("while you are away", [status(503), status(503), answer("I am back")])
    ended, ran = play(
        bench,
        tool("a", "echo", said="away"),
        llm("b", "while you are {{ tool_call.a.output.said }}", ["tool_call.a"]),
    )
    assert ended == "SUCCEEDED"
    row = ran["b"]
    assert (row["result"], row["retry_count"], row["delivery_count"]) == (
        {"text": "I am back"},
        0,
        1,
    )
    assert bench.queue.story(row["task_id"]).count("outage") == 2


def test_the_next_step_begins_in_the_transaction_that_has_ended_the_one_before(
    bench: Bench,
) -> None:
    names = [f"s{number}" for number in range(20)]
    needs = {name: [f"tool_call.{before}"] for before, name in itertools.pairwise(names)}
    ended, ran = play(bench, *(tool(name, "echo", needs.get(name, [])) for name in names))
    assert ended == "SUCCEEDED"
    transactions = {
        (row["task_id"], row["reason"]): row["xid"]
        for row in bench.queue.ask("SELECT task_id, reason, xmin::text AS xid FROM audit_log")
    }
    numbers = [ran[name]["task_id"] for name in names]
    together = [
        transactions[before, "succeeded"] == transactions[after, "claimed"]
        for before, after in itertools.pairwise(numbers)
    ]
    # Not where the worker's main thread looks for work just then.
    assert sum(together) > len(together) / 2


# --- workers that die ------------------------------------------------------------------------


def test_a_step_whose_worker_dies_is_told_the_same_key_by_the_next_one(
    processes: Processes, queue: Queue, fake: FakeOllama
) -> None:
    """The key of every attempt of a step is the same, whatever ended the attempt before."""
    fake.on("hold on", [slow(first="a"), answer("done")])
    processes.configure(tools=TOOLS)
    first = processes.worker()
    run_id = submit(
        queue,
        tool("a", "told", word="w"),
        llm("b", "hold on to {{ tool_call.a.output.key }}", ["tool_call.a"]),
        tool("c", "told", ["llm_call.b"], word="{{ llm_call.b.output }}"),
    )
    eventually(lambda: fake.calls_for("hold on"))
    first.kill()
    queue.await_loss()
    processes.worker()
    assert queue.await_final(run_id)["status"] == "SUCCEEDED"
    ran = steps(queue, run_id)
    assert ran["a"]["result"] == {"word": "w", "key": f"{run_id}:tool_call.a", "attempt": 1}
    assert ran["c"]["result"] == {"word": "done", "key": f"{run_id}:tool_call.c", "attempt": 1}
    assert (ran["a"]["attempt"], ran["b"]["attempt"], ran["b"]["retry_count"]) == (1, 2, 0)
    prompts = {call.prompt for call in fake.calls_for("hold on")}
    assert prompts == {f"hold on to {run_id}:tool_call.a"}
    queue.check([run_id])

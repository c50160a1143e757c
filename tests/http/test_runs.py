"""POST /runs and what can be seen and done afterwards, without a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from db import Connection
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.processes import Api
from tests.support.run_client import EXAMPLE, RunClient, agent, approval, llm, tool
from tests.support.runs import finish, take


@pytest.fixture
def runs(client: Client) -> RunClient:
    return RunClient(client.http, client.tenant)


@pytest.fixture
def stranger(client: Client) -> RunClient:
    return RunClient(client.http, f"{client.tenant}-stranger")


# --- submit ----------------------------------------------------------------------------------


def test_the_example_of_the_reference_is_taken_as_it_stands(
    runs: RunClient, module_api: Api
) -> None:
    answer = runs.post(EXAMPLE)
    assert answer.status_code == 201, answer.text
    run = answer.json()
    number = run["run_id"]
    assert list(run)[:6] == ["run_id", "goal", "status", "created_at", "finished_at", "watch"]
    assert (run["goal"], run["status"]) == ("Research and summarize a topic", "RUNNING")
    assert run["created_at"].endswith("Z")
    assert run["finished_at"] is None
    assert run["watch"] == f"{module_api.url.replace('http', 'ws')}/runs/{number}/events"
    fetch, summarize = run["steps"]
    assert fetch == {
        "name": "tool_call.fetch_data", "task_id": number + 1, "kind": "tool", "status": "PENDING",
        "dependsOn": [], "input": {"tool": "fetch_data", "args": {}}, "result": None,
        "result_left_out": False, "approval": None, "error": None, "retry_count": 0,
        "delivery_count": 0,
        "attempt": 0, "worker": None, "duration_seconds": None, "waiting_for": fetch["waiting_for"],
        "started_at": None, "finished_at": None,
    }  # fmt: skip
    assert summarize["name"] == "llm_call.summarize"
    assert (summarize["kind"], summarize["status"]) == ("prompt", "BLOCKED")
    assert summarize["dependsOn"] == ["tool_call.fetch_data"]
    assert summarize["input"] == {"prompt": "..."}
    assert summarize["waiting_for"] == "dependencies"


def test_get_shows_what_post_answered(runs: RunClient) -> None:
    answered = runs.submit(tool("fetch"), llm("write", "fetch", prompt="{{ fetch.output }}"))
    answered.pop("watch")
    assert runs.run(answered["run_id"]) == answered


def test_steps_without_dependencies_wait_for_a_worker_or_a_person_and_others_are_blocked(
    runs: RunClient,
) -> None:
    run = runs.submit(
        llm("llm_call.a"), tool("tool_call.b"), approval("approval.c"),
        approval("approval.d", "llm_call.a"), tool("e", "approval.c"),
    )  # fmt: skip
    assert [step["status"] for step in run["steps"]] == [
        "PENDING", "PENDING", "AWAITING_APPROVAL", "BLOCKED", "BLOCKED",
    ]  # fmt: skip
    assert run["steps"][2]["waiting_for"] == "approval"


def test_steps_are_numbered_parents_first_whatever_their_order_in_the_body(runs: RunClient) -> None:
    run = runs.submit(tool("d", "c", "b"), tool("c", "a"), tool("b", "a"), tool("a"), tool("z"))
    assert [step["name"] for step in run["steps"]] == ["a", "c", "b", "d", "z"]
    numbers = [step["task_id"] for step in run["steps"]]
    assert numbers == sorted(numbers)
    assert run["run_id"] < numbers[0]
    assert sorted(run["steps"][3]["dependsOn"]) == ["b", "c"]


FORMAT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
INPUTS: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    (llm("llm_call.x", prompt="p"), "prompt", {"prompt": "p"}, "auto"),
    (llm("x", prompt="p", route="cloud"), "prompt", {"prompt": "p"}, "cloud"),
    (llm("x", prompt="p", model="hf.co/a/b-C_1:Q4", format=FORMAT), "prompt",
     {"prompt": "p", "model": "hf.co/a/b-C_1:Q4", "format": FORMAT}, "auto"),
    (llm("x", prompt="p", model=None, format=None), "prompt", {"prompt": "p"}, "auto"),
    (tool("tool_call.x"), "tool", {"tool": "echo", "args": {}}, "none"),
    ({"name": "x", "input": {"tool": "echo", "args": {"a": [1, None]}}}, "tool",
     {"tool": "echo", "args": {"a": [1, None]}}, "none"),
    (agent("agent_call.x", task="t"), "agent",
     {"task": "t", "graph": "team", "require_approval": False, "max_revisions": 2}, "auto"),
    (agent("agent_call.x", task="t", graph="team", require_approval=True, max_revisions=0,
           token_budget=9, route="local"), "agent",
     {"task": "t", "graph": "team", "require_approval": True, "max_revisions": 0,
      "token_budget": 9}, "local"),
    ({"name": "approval.x"}, "approval", {}, "none"),
    (approval("approval.x", text="ok?", more={"a": 1}), "approval",
     {"text": "ok?", "more": {"a": 1}}, "none"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "kind", "payload", "route"), INPUTS)
def test_a_step_is_stored_as_a_task_of_its_kind(
    runs: RunClient, conn: Connection, step: dict[str, Any], kind: str, payload: Any, route: str
) -> None:
    run = runs.submit({**step, "max_retry": 7})
    stored = rows.row(conn, run["steps"][0]["task_id"])
    assert (stored["kind"], stored["payload"], stored["max_retry"]) == (kind, payload, 7)
    assert (stored["requested_route"], stored["parent_id"]) == (route, run["run_id"])


TEMPLATES = [
    "{{ tool_call.a.output }}", "{{tool_call.a.output.rows.0.x}} and {{ b.output }}",
    '{{ "{{" }} is no template', "}} neither", "{ { nor } } this {",
    "{{ approval.c.output.feedback }}{{ approval.c.output.approved }}{{ approval.c.output }}",
    "{{ f.output.any.part.0 }}",
]  # fmt: skip


@pytest.mark.parametrize("text", TEMPLATES)
def test_templates_may_refer_to_direct_dependencies_and_their_parts(
    runs: RunClient, text: str
) -> None:
    needs = ("tool_call.a", "b", "approval.c", "f")
    runs.submit(
        tool("tool_call.a"), llm("b"), approval("approval.c"), llm("f", format=FORMAT),
        llm("llm_call.x", *needs, prompt=f"Look: {text}"),
        tool("y", *needs, input={"tool": "echo", "args": {"deep": [{"er": text}]}}),
        approval("approval.z", *needs, text=text),
    )  # fmt: skip


def test_a_thousand_references_are_taken_and_one_that_comes_again_is_not_counted(
    runs: RunClient,
) -> None:
    parts = [f"{{{{ a.output.{n} }}}}" for n in range(1000)]
    runs.submit(tool("a"), tool("x", "a", input={"tool": "echo", "args": {"all": parts * 2}}))


def test_what_is_no_string_of_args_is_no_template(runs: RunClient) -> None:
    key = {"{{ nobody.output }}": 1}
    runs.submit({"name": "a", "input": {"tool": "echo", "args": key}})


def test_a_run_is_stored_with_its_goal_and_steps_whatever_their_letters(runs: RunClient) -> None:
    goal = "Grüße: 漢字 🐘 {{ no.template }} ' \" \\ \u2028"
    body = {"goal": goal, "steps": [llm("a", prompt=goal.replace("{{ no.template }}", ""))]}
    run = runs.post(body).json()
    assert (run["goal"], runs.run(run["run_id"])["goal"]) == (goal, goal)


def test_a_chain_and_a_star_of_a_thousand_steps_are_taken(
    runs: RunClient, conn: Connection
) -> None:
    names = [f"s{n}" for n in range(1000)]
    chain = [tool(name, *names[n - 1 : n] if n else []) for n, name in enumerate(names)]
    star = [*(tool(name) for name in names[1:]), tool("s0", *names[1:])]
    for steps, waiting in ((chain, 999), (list(reversed(chain)), 999), (star, 1)):
        run = runs.submit(*steps)
        assert len(run["steps"]) == 1000
        statuses = [step["status"] for step in run["steps"]]
        assert statuses == ["PENDING"] * (1000 - waiting) + ["BLOCKED"] * waiting


def test_five_thousand_edges_are_taken(runs: RunClient) -> None:
    roots = [tool(f"r{n}") for n in range(50)]
    leaves = [tool(f"l{n}", *(f"r{m}" for m in range(50))) for n in range(100)]
    run = runs.submit(*roots, *leaves)
    assert sum(len(step["dependsOn"]) for step in run["steps"]) == 5000


@pytest.mark.parametrize(
    ("headers", "address"),
    [({"Host": "runs.example:8443"}, "ws://runs.example:8443/"),
     ({"Host": "runs.example", "X-Forwarded-Proto": "https"}, "wss://runs.example/")],
)  # fmt: skip
def test_the_address_to_watch_is_that_of_the_request(
    runs: RunClient, headers: dict[str, str], address: str
) -> None:
    body = {"goal": "g", "steps": [tool("a")]}
    run = runs.call("POST", "/runs", json=body, headers=headers).json()
    assert run["watch"] == f"{address}runs/{run['run_id']}/events"


@pytest.mark.parametrize("host", ["[", "a b", "[::1", "x:99999999", "%", "é", "@", "a/b?c#d"])
def test_a_host_that_is_none_is_no_fault_of_ours(runs: RunClient, host: str) -> None:
    headers = {"Host": host.encode("latin-1")}
    answer = runs.call("POST", "/runs", json={"goal": "g", "steps": [tool("a")]}, headers=headers)
    assert answer.status_code in (201, 400), answer.text


# --- look ------------------------------------------------------------------------------------


def test_a_step_is_a_task_that_tells_its_run_and_name(runs: RunClient) -> None:
    run = runs.submit(tool("a"), tool("tool_call.b", "a"))
    task = runs.read(f"/tasks/{run['steps'][1]['task_id']}")
    assert (task["run_id"], task["step"], task["kind"]) == (run["run_id"], "tool_call.b", "tool")
    assert (task["status"], task["waiting_for"]) == ("BLOCKED", "dependencies")


def test_a_run_ends_with_its_last_step_and_shows_results_and_errors(
    runs: RunClient, conn: Connection
) -> None:
    run_id = runs.submit(tool("a"), tool("b", "a"), llm("c"))["run_id"]
    finish(conn, run_id, "a", "succeeded", result={"rows": [1]})
    assert runs.statuses(run_id) == {
        "run": "RUNNING", "a": "SUCCEEDED", "b": "PENDING", "c": "PENDING",
    }  # fmt: skip
    finish(conn, run_id, "c", "permanent", error="no such model")
    finish(conn, run_id, "b", "succeeded", result=[0, None])
    run = runs.run(run_id)
    assert run["status"] == "FAILED"
    assert run["finished_at"] is not None
    shown = {step["name"]: (step["result"], step["error"]) for step in run["steps"]}
    assert shown["a"] == ({"rows": [1]}, None)
    assert shown["c"] == (None, {"type": "permanent", "message": "no such model"})
    assert {step["attempt"] for step in run["steps"]} == {1}


def test_a_step_whose_result_is_null_has_succeeded_all_the_same(
    runs: RunClient, conn: Connection
) -> None:
    run_id = runs.submit(tool("a"), tool("b", "a"))["run_id"]
    finish(conn, run_id, "a", "succeeded", result=None)
    a, b = runs.run(run_id)["steps"]
    assert (a["status"], a["result"], a["result_left_out"]) == ("SUCCEEDED", None, False)
    assert b["status"] == "PENDING"


def test_results_too_large_for_one_answer_are_left_out_and_say_so(
    runs: RunClient, conn: Connection
) -> None:
    run_id = runs.submit(tool("a"), tool("b"), tool("c"))["run_id"]
    for name in ("a", "b", "c"):
        # Digits that do not compress: what counts is the size as stored.
        text = "".join(f"{n * n * 7919 % 1000003:x}" for n in range(700_000))
        finish(conn, run_id, name, "succeeded", result=text)
    steps = {step["name"]: step for step in runs.run(run_id)["steps"]}
    left_out = [name for name, step in steps.items() if step["result_left_out"]]
    assert left_out
    assert "a" not in left_out
    for name, step in steps.items():
        assert (step["result"] is None) == (name in left_out)
    task = runs.read(f"/tasks/{steps[left_out[0]]['task_id']}")
    assert len(task["result"]) > 1_000_000


NOWHERE = ["0", "-1", str(2**63), "9" * 5000, "nobody", "%00", "%F0%9F%90%98", "1.0", "%D9%A3"]


@pytest.mark.parametrize("reference", NOWHERE)
def test_a_run_that_is_not_there_is_not_found(runs: RunClient, reference: str) -> None:
    for method, path in (("GET", ""), ("GET", "/audit"), ("DELETE", "")):
        answer = runs.call(method, f"/runs/{reference}{path}")
        assert refused(answer, 404) == "not found"


def test_a_task_or_a_step_is_no_run(runs: RunClient, client: Client) -> None:
    step = runs.submit(tool("a"))["steps"][0]["task_id"]
    for number in (step, client.submit()):
        for method, path in (("GET", ""), ("GET", "/audit"), ("DELETE", "")):
            refused(runs.call(method, f"/runs/{number}{path}"), 404)
        assert client.task(number)["status"] == "PENDING"


def test_another_tenants_run_is_not_found_and_stays_as_it_is(
    runs: RunClient, stranger: RunClient
) -> None:
    run = runs.submit(tool("a"), approval("approval.b"))
    number, step = run["run_id"], run["steps"][1]["task_id"]
    for method, path in (
        ("GET", f"/runs/{number}"), ("GET", f"/runs/{number}/audit"), ("DELETE", f"/runs/{number}"),
        ("GET", f"/tasks/{step}"), ("DELETE", f"/tasks/{step}"), ("GET", f"/tasks/{step}/audit"),
        ("POST", f"/tasks/{step}/approve"), ("POST", f"/tasks/{step}/requeue"),
    ):  # fmt: skip
        assert refused(stranger.call(method, path), 404) == "not found"
    assert stranger.read("/runs") == {"runs": [], "next_cursor": None}
    run.pop("watch")
    assert runs.run(number) == run


def test_a_run_never_shows_among_tasks(
    runs: RunClient, client: Client, conn: Connection, module_api: Api
) -> None:
    before = (module_api.http.get("/metrics").json(), module_api.http.get("/stats").json())
    run = runs.submit(tool("a"), tool("b", "a"))
    number, (a, b) = run["run_id"], [step["task_id"] for step in run["steps"]]
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("GET", "/audit"), ("GET", "/events"), ("POST", "/requeue"),
        ("POST", "/approve"),
    ):  # fmt: skip
        assert refused(runs.call(method, f"/tasks/{number}{path}"), 404) == "not found"

    def listed(path: str, **params: Any) -> list[int]:
        return [task["id"] for task in runs.read(path, **params)["tasks"]]

    assert listed("/tasks") == [b, a]
    assert listed("/tasks", status="BLOCKED") == [b]
    metrics, stats = module_api.http.get("/metrics").json(), module_api.http.get("/stats").json()
    assert metrics["by_status"]["BLOCKED"] == before[0]["by_status"].get("BLOCKED", 0) + 1
    assert stats["depth"] == before[1]["depth"] + 1
    finish(conn, number, "a", "permanent")
    assert runs.statuses(number) == {"run": "FAILED", "a": "FAILED", "b": "CANCELLED"}
    assert listed("/dead-letters") == [a]
    assert listed("/tasks", status="FAILED") == [a]
    after = module_api.http.get("/metrics").json()["by_status"]
    assert after["FAILED"] == before[0]["by_status"].get("FAILED", 0) + 1


# --- lists -----------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_page_by_page(runs: RunClient, client: Client) -> None:
    numbers = []
    for _ in range(7):
        client.submit()
        numbers.append(runs.submit(tool("a"), tool("b", "a"), tool("c"))["run_id"])
    seen, cursor = [], None
    for _ in range(3):
        page = runs.read("/runs", limit=3, **({"cursor": cursor} if cursor else {}))
        seen += [run["run_id"] for run in page["runs"]]
        cursor = page["next_cursor"]
        runs.submit(tool("later"))
    assert cursor is None
    assert seen == numbers[::-1]


def test_a_list_shows_each_run_with_its_steps_counted(runs: RunClient, conn: Connection) -> None:
    run = runs.submit(tool("a"), tool("b", "a"), tool("c"))
    finish(conn, run["run_id"], "c")
    assert runs.read("/runs")["runs"] == [
        {
            "run_id": run["run_id"], "goal": "a goal", "status": "RUNNING", "tenant": runs.tenant,
            "created_at": run["created_at"], "finished_at": None,
            "steps_by_status": {"PENDING": 1, "BLOCKED": 1, "SUCCEEDED": 1},
        }
    ]  # fmt: skip


def test_a_list_can_be_narrowed_to_a_status(runs: RunClient, conn: Connection) -> None:
    ended: dict[str, int] = {}
    for status in ("RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"):
        run = runs.submit(tool("a"))
        ended[status] = run["run_id"]
        if status == "CANCELLED":
            runs.cancel(run["run_id"])
        elif status != "RUNNING":
            verdict = {"SUCCEEDED": "succeeded", "FAILED": "permanent"}[status]
            finish(conn, run["run_id"], "a", verdict)
    for status, number in ended.items():
        page = runs.read("/runs", status=status)
        assert [(run["run_id"], run["status"]) for run in page["runs"]] == [(number, status)]


@pytest.mark.parametrize(
    "query",
    ["status=BLOCKED", "status=PENDING", "status=running", "status=", "limit=0", "limit=201",
     "limit=x", "cursor=x", "cursor=", "cursor=MA==", "cursor=%00"],
)  # fmt: skip
def test_a_list_refuses_what_it_does_not_know(runs: RunClient, query: str) -> None:
    for path in ("/runs", f"/runs/{runs.submit(tool('a'))['run_id']}/audit"):
        if "status" not in query or path == "/runs":
            answer = runs.call("GET", f"{path}?{query}")
            said = refused(answer, 422, field=query.split("=")[0])
            assert "<" not in said


# --- audit -----------------------------------------------------------------------------------


def shown(entry: dict[str, Any]) -> tuple[str | None, str | None, str, str]:
    return entry["step"], entry["from"], entry["to"], entry["reason"]


def test_the_audit_of_a_run_tells_all_of_it_oldest_first(runs: RunClient, conn: Connection) -> None:
    run = runs.submit(tool("a"), approval("approval.b", "a"))
    number, (a, b) = run["run_id"], [step["task_id"] for step in run["steps"]]
    finish(conn, number, "a", "permanent")
    runs.call("POST", f"/tasks/{a}/requeue")
    finish(conn, number, "a")
    runs.approve(b, {"feedback": "fine"})
    audit = runs.read(f"/runs/{number}/audit")
    assert audit["next_cursor"] is None
    assert [shown(entry) for entry in audit["audit"]] == [
        (None, None, "RUNNING", "created"),
        ("a", None, "PENDING", "created"),
        ("approval.b", None, "BLOCKED", "created"),
        ("a", "PENDING", "RUNNING", "claimed"),
        ("a", "RUNNING", "FAILED", "permanent"),
        ("approval.b", "BLOCKED", "CANCELLED", "dependency_failed"),
        (None, "RUNNING", "FAILED", "dependency_failed"),
        ("a", "FAILED", "PENDING", "requeued"),
        ("approval.b", "CANCELLED", "BLOCKED", "requeued"),
        (None, "FAILED", "RUNNING", "requeued"),
        ("a", "PENDING", "RUNNING", "claimed"),
        ("a", "RUNNING", "SUCCEEDED", "succeeded"),
        ("approval.b", "BLOCKED", "AWAITING_APPROVAL", "promoted"),
        ("approval.b", "AWAITING_APPROVAL", "SUCCEEDED", "approved"),
        (None, "RUNNING", "SUCCEEDED", "succeeded"),
    ]
    assert {entry["run_id"] for entry in audit["audit"]} == {number}
    assert {entry["task_id"] for entry in audit["audit"]} == {number, a, b}
    of_step = runs.read(f"/tasks/{b}/audit")["audit"]
    assert of_step == [entry for entry in audit["audit"] if entry["task_id"] == b]
    assert of_step[-1]["detail"] == {"by": runs.tenant, "feedback": "fine"}


def test_the_audit_of_a_run_comes_in_pages(runs: RunClient) -> None:
    number = runs.submit(*(tool(f"s{n}") for n in range(6)))["run_id"]
    whole = runs.read(f"/runs/{number}/audit")["audit"]
    assert len(whole) == 7
    seen, cursor = [], None
    while True:
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = runs.read(f"/runs/{number}/audit", **params)
        seen += page["audit"]
        assert len(page["audit"]) <= 3
        if (cursor := page["next_cursor"]) is None:
            break
    assert seen == whole


# --- cancel ----------------------------------------------------------------------------------


def test_a_run_that_nobody_works_on_is_cancelled_at_once_with_all_its_steps(
    runs: RunClient,
) -> None:
    number = runs.submit(tool("a"), tool("b", "a"), approval("approval.c"))["run_id"]
    answer = runs.cancel(number)
    assert (answer.status_code, answer.json()) == (200, {"run_id": number, "status": "CANCELLED"})
    assert set(runs.statuses(number).values()) == {"CANCELLED"}
    assert runs.run(number)["finished_at"] is not None


def test_a_run_of_which_a_step_runs_is_asked_to_stop_as_often_as_one_likes(
    runs: RunClient, conn: Connection
) -> None:
    number = runs.submit(tool("a"), tool("b", "a"), tool("c"))["run_id"]
    take(conn, number, "a")
    for _ in range(2):
        answer = runs.cancel(number)
        assert (answer.status_code, answer.json()) == (202, {"run_id": number, "status": "RUNNING"})
    assert runs.statuses(number) == {
        "run": "RUNNING", "a": "RUNNING", "b": "CANCELLED", "c": "CANCELLED",
    }  # fmt: skip
    assert runs.run(number)["cancel_requested"] is True


Ending = Callable[[RunClient, Connection, dict[str, Any]], object]
ENDINGS: dict[str, Ending] = {
    "SUCCEEDED": lambda runs, conn, run: finish(conn, run["run_id"], "a"),
    "FAILED": lambda runs, conn, run: finish(conn, run["run_id"], "a", "permanent"),
    "CANCELLED": lambda runs, conn, run: runs.cancel(run["run_id"]),
}


@pytest.mark.parametrize(("status", "end"), ENDINGS.items(), ids=ENDINGS.keys())
def test_a_run_that_has_ended_cannot_be_cancelled(
    runs: RunClient, conn: Connection, status: str, end: Ending
) -> None:
    run = runs.submit(tool("a"))
    end(runs, conn, run)
    before = runs.run(run["run_id"])
    said = refused(runs.cancel(run["run_id"]), 409)
    assert f"run {run['run_id']} is {status} already" in said
    assert runs.run(run["run_id"]) == before


# --- description -----------------------------------------------------------------------------


def test_the_interface_describes_runs_as_they_are(module_api: Api) -> None:
    described: httpx.Response = module_api.http.get("/openapi.json")
    paths, schemas = described.json()["paths"], described.json()["components"]["schemas"]
    declared = {
        (path, method): set(said["responses"])
        for path, methods in paths.items()
        for method, said in methods.items()
    }
    assert declared["/runs", "post"] >= {"200", "201", "400", "413", "422", "503"}
    assert declared["/runs", "get"] >= {"200", "422", "503"}
    assert declared["/runs/{run_id}", "get"] >= {"200", "404", "503"}
    assert declared["/runs/{run_id}/audit", "get"] >= {"200", "404", "422", "503"}
    assert declared["/runs/{run_id}", "delete"] >= {"200", "202", "404", "409", "503"}
    assert declared["/tasks/{task_id}/approve", "post"] >= {"200", "404", "409", "413", "422"}
    assert set(schemas["StepBody"]["properties"]) == {"name", "input", "dependsOn", "max_retry"}
    assert schemas["StepBody"]["required"] == ["name"]
    assert "dependsOn" in schemas["RunStep"]["properties"]

"""POST /runs refuses what cannot be a run, names what is to blame, and stores nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from db import Connection
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.run_client import RunClient, agent, approval, llm, tool

KIB, MIB = 1024, 1024 * 1024


@pytest.fixture(autouse=True)
def nothing_is_stored(conn: Connection) -> Iterator[None]:
    statement = """
        SELECT (SELECT count(*) FROM tasks) AS tasks, (SELECT count(*) FROM step_edges) AS edges,
               (SELECT count(*) FROM audit_log) AS audit
    """
    before = rows.sql(conn, statement)
    yield
    assert rows.sql(conn, statement) == before


@pytest.fixture
def runs(client: Client) -> RunClient:
    return RunClient(client.http, client.tenant)


# --- the graph -------------------------------------------------------------------------------

A, B, C = tool("a"), tool("b", "a"), tool("c", "b")
GRAPHS: dict[str, tuple[list[Any], str, str]] = {
    "a circle of two": (
        [tool("a", "b"), tool("b", "a")], "steps.0.dependsOn", "in a circle: a -> b -> a"),
    "a circle of three behind and before others": (
        [tool("start"), tool("end", "c"), tool("c", "b"), tool("b", "a", "start"), tool("a", "c")],
        "steps.2.dependsOn", "in a circle: c -> b -> a -> c"),
    "a step that depends on itself": (
        [A, tool("b", "b")], "steps.1.dependsOn", "in a circle: b -> b"),
    "a circle of a thousand": (
        [tool("s0", "s999"), *(tool(f"s{n}", f"s{n - 1}") for n in range(1, 1000))],
        "steps.0.dependsOn", "in a circle: s0 -> s999 -> s998 -> "),
    "an unknown dependency": ([A, tool("b", "x")], "steps.1.dependsOn.0", "there is no step x"),
    "a dependency without its prefix": (
        [tool("tool_call.a"), tool("b", "a")], "steps.1.dependsOn.0", "there is no step a"),
    "a dependency on a run": ([tool("a", "1")], "steps.0.dependsOn.0", "there is no step 1"),
    "an empty dependency": ([tool("a", "")], "steps.0.dependsOn.0", "there is no step"),
    "a very long dependency": ([tool("a", "x" * MIB)], "steps.0.dependsOn.0", "at most"),
    "a dependency twice": (
        [A, tool("b", "a", "a")], "steps.1.dependsOn.1", "a stands here twice"),
    "a doubled name": ([A, B, A], "steps.2.name", "a is the name of steps.0 already"),
    "a doubled name with a prefix": (
        [tool("tool_call.a"), tool("tool_call.a")], "steps.1.name", "tool_call.a is the name of"),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "field", "words"), GRAPHS.values(), ids=GRAPHS.keys())
def test_steps_that_are_no_graph_are_refused(
    runs: RunClient, steps: list[Any], field: str, words: str
) -> None:
    said = refused(runs.post_steps(*steps), 422, field=field)
    assert f"{field}: " in said
    assert words in said
    assert len(said) < 1000


# --- names and kinds -------------------------------------------------------------------------

NAMES: list[tuple[dict[str, Any], str, str]] = [
    *((tool(name), "name", "1 to 64 of A-Z a-z 0-9 _ -") for name in (
        "", " ", "a b", "a.b", "a.", ".a", "run.a", "Tool_call.a", "tool_call.", "tool_call.a.b",
        "tool_call.ü", "tool_call.a\n", "{{ a }}", "x" * 65, "tool_call." + "x" * 65, "x" * MIB)),
    *((tool(name), "name", "it is a prefix") for name in (
        "llm_call", "tool_call", "agent_call", "approval")),
    ({"name": "a"}, "name", "no telling what kind it is"),
    ({"name": "a", "input": {}}, "name", "neither input.prompt nor input.tool"),
    ({"name": "a", "input": {"args": {}}}, "name", "neither input.prompt nor input.tool"),
    ({"name": "a", "input": {"prompt": "p", "tool": "echo"}}, "name", "both input.prompt and"),
    ({"name": "a", "input": {"task": "t"}}, "name", "begin the name with llm_call. tool_call. ag"),
    (tool("agent_call.a"), "input.tool", "takes no tool"),
    (llm("agent_call.a"), "input.prompt", "takes no prompt"),
    (agent("llm_call.a"), "input.task", "takes no task"),
    (agent("tool_call.a"), "input.task", "takes no task"),
    (tool("llm_call.a"), "input.tool", "takes no tool"),
    (llm("tool_call.a"), "input.prompt", "takes no prompt"),
    (llm("llm_call.a", tool="echo"), "input.tool", "takes no tool"),
    ({"input": {"tool": "echo"}}, "name", "required"),
    *(({"name": name, "input": {"tool": "echo"}}, "name", "") for name in (
        None, 1, 1.5, True, ["a"], {"a": 1}, "a\0")),
]  # fmt: skip


@pytest.mark.parametrize(("step", "field", "words"), NAMES, ids=[f"{s!r:.40}" for s, _, _ in NAMES])
def test_a_name_that_is_none_or_tells_no_kind_is_refused(
    runs: RunClient, step: dict[str, Any], field: str, words: str
) -> None:
    said = refused(runs.post_steps(tool("fine"), step), 422, field=f"steps.1.{field}")
    assert f"steps.1.{field}: " in said
    assert words in said
    assert len(said) < 1000


# --- inputs ----------------------------------------------------------------------------------

DEEP: Any = "x"
for _ in range(101):
    DEEP = [DEEP]

INPUTS: list[tuple[dict[str, Any], str, str]] = [
    # llm_call
    ({"name": "llm_call.a"}, "input.prompt", "required"),
    *((llm("llm_call.a", prompt=prompt), "input.prompt", "it is empty") for prompt in ("", " \n")),
    *((llm("llm_call.a", prompt=p), "input.prompt", "string") for p in (None, 1, ["x"], {"a": 1})),
    (llm("a", temperature=0), "input.temperature", "not known here"),
    (llm("a", args={}), "input.args", "not known here"),
    (llm("a", Model="x"), "input.Model", "not known here"),
    *((llm("a", route=r), "input.route", "") for r in ("moon", "", "AUTO", None, 1, ["auto"])),
    *((llm("a", model=m), "input.model", "no name of a model") for m in (
        "", " ", "a b", "-a", ":latest", "a\n", "é", "x" * 300, "../a", "a;b", "{{ b.output }}")),
    *((llm("a", model=m), "input.model", "") for m in (1, ["x"], {"x": 1}, True)),
    *((llm("a", format=f), "input.format", "") for f in ("json", [], 1, True)),
    (llm("a", format={"type": "strin"}), "input.format", "is none of array, boolean"),
    (llm("a", format={"pattern": "(a+)+"}), "input.format", "regular expression"),
    (llm("a", format={"$ref": "http://x/y"}), "input.format", "only #/"),
    (llm("a", format={"$ref": "#"}), "input.format", "may not hold itself"),
    (llm("a", format={"items": 1}), "input.format", "is to be a schema"),
    (llm("a", format={"description": "x" * 70_000}), "input.format", "the most is 65536"),
    (llm("a", format={"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]}), "input.format", "no such"),
    # tool_call
    ({"name": "tool_call.a"}, "input.tool", "required"),
    ({"name": "tool_call.a", "input": {"args": {}}}, "input.tool", "required"),
    (tool("a", tool="no_such"), "input.tool",
     "there is no tool no_such; there are: echo, fetch_data, flaky, http_get, sleep"),
    *((tool("a", tool=t), "input.tool", "there is no tool") for t in (
        "Echo", "echo ", "execution.tools.builtin:echo", "os:system", "__class__", "x" * 5000)),
    *((tool("a", tool=t), "input.tool", "") for t in ("", None, 1, ["echo"], {"echo": 1}, False)),
    *(({"name": "a", "input": {"tool": "echo", "args": args}}, "input.args", "") for args in (
        None, [], "x", 1, True)),
    ({"name": "a", "input": {"tool": "echo", "text": "x"}}, "input.text", "not known here"),
    ({"name": "a", "input": {"tool": "echo", "depends_on": []}}, "input.depends_on", "not known"),
    # agent_call
    ({"name": "agent_call.a"}, "input.task", "required"),
    *((agent("agent_call.a", task=t), "input.task", "") for t in ("", " ", None, 1, ["x"], {})),
    *((agent("agent_call.a", graph=g), "input.graph", "there is no graph") for g in (
        "Team", "", "execution.agent.team:build", "x" * 5000)),
    *((agent("agent_call.a", graph=g), "input.graph", "") for g in (None, 1, ["team"])),
    *((agent("agent_call.a", require_approval=r), "input.require_approval", "") for r in (
        None, 1, "yes", "{{ b.output }}")),
    *((agent("agent_call.a", token_budget=b), "input.token_budget", "") for b in (
        0, -1, 1.5, "5", True, 10**12 + 1)),
    *((agent("agent_call.a", max_revisions=m), "input.max_revisions", "") for m in (
        -1, 1001, 1.5, "2", True)),
    (agent("agent_call.a", route="moon"), "input.route", ""),
    (agent("agent_call.a", task_id="t1"), "input.task_id", "not known here"),
    (agent("agent_call.a", task="a\0b"), "input", "NUL"),
    (agent("agent_call.a", task="{{ nobody.output }}"), "input.task", "no step nobody"),
    (agent("agent_call.a", task="{{ "), "input.task", "{{"),
    # of each kind
    *(({"name": "approval.a", "input": i}, "input", "") for i in (None, [], "x", 1, True)),
    *((approval("approval.a", text=text), "input", words) for text, words in (
        ("a\0b", "NUL"), (["\0"], "NUL"), ({"a\0": 1}, "NUL"), (DEEP, "nested"))),
    *(({"name": "a", "input": {"tool": "echo", "args": {"x": x}}}, "input", words)
      for x, words in (("\0", "NUL"), (DEEP, "nested"))),
    (llm("a", prompt="a\0b"), "input", "NUL"),
    (llm("a", format={"title": "\0"}), "input", "NUL"),
    # of the step
    *(({**A, "max_retry": m}, "max_retry", "") for m in (0, -1, 10_001, 1.5, "3", True, 2**31)),
    *(({**A, "dependsOn": d}, "dependsOn", "") for d in (None, "b", {"b": 1}, 1)),
    *(({**A, "dependsOn": [d]}, "dependsOn.0", "") for d in (None, 1, ["b"], {}, True, "a\0")),
    ({**A, "depends_on": []}, "depends_on", "not known here"),
    ({**A, "needs": []}, "needs", "not known here"),
    ({**A, "kind": "tool"}, "kind", "not known here"),
    ({**A, "status": "SUCCEEDED"}, "status", "not known here"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "field", "words"), INPUTS, ids=[f"{f} {s!r:.40}" for s, f, _ in INPUTS]
)
def test_a_step_that_cannot_be_carried_out_is_refused_by_the_field_to_blame(
    runs: RunClient, step: dict[str, Any], field: str, words: str
) -> None:
    said = refused(runs.post_steps(tool("fine"), step), 422, field=f"steps.1.{field}")
    assert f"steps.1.{field}: " in said
    assert words in said
    assert len(said) < 1000


@pytest.mark.parametrize("step", [None, 1, "a", [], ["a"], True], ids=repr)
def test_a_step_that_is_no_object_is_refused(runs: RunClient, step: Any) -> None:
    refused(runs.post_steps(tool("fine"), step), 422, field="steps.1")


# --- templates -------------------------------------------------------------------------------

TEMPLATES: list[tuple[str, str]] = [
    # no reference
    *((text, "{{") for text in (
        "{{", "{{ }}", "{{}}", "{{ a }}", "{{ a.result }}", "{{ a.output", "{{ a.output }",
        "{{ a.output. }}", "{{ a..output }}", "{{ a.output..x }}", "{{ a.output.x y }}",
        "{{ a.output[0] }}", "{{ a.output | upper }}", "{{ {{ a.output }} }}", "{{{ a.output }}}",
        "{{ 'a'.output }}", "{{ a.b.output }}", "{{ a.Output }}", "{{ ü.output }}", "{{ 1 + 1 }}",
        "{{ agent.a.output }}", "{{ a.output.ü }}", "{{ __import__('os') }}")),
    # not depended on
    ("{{ nobody.output }}", "there is no step nobody"),
    ("{{ agent_call.a.output }}", "there is no step agent_call.a"),
    ("{{ tool_call.a.output }}", "there is no step tool_call.a"),
    ("{{ llm_call.output }}", "there is no step llm_call"),
    ("{{ x.output }}", "x does not depend on x; put it into dependsOn"),
    ("{{ root.output }}", "x does not depend on root; put it into dependsOn"),
    ("{{ later.output }}", "x does not depend on later; put it into dependsOn"),
    ("fine: {{ a.output }}, {{ root.output.rows }}", "x does not depend on root"),
    # what can never be there
    ("{{ llm_call.text.output.rows }}", "is a text without parts"),
    ("{{ llm_call.text.output.0 }}", "is a text without parts"),
    ("{{ approval.ok.output.text }}", "has approved and feedback, and no other parts"),
    ("{{ approval.ok.output.feedback.0 }}", "has approved and feedback, and no other parts"),
    ("{{ a.output." + "x" * 100_000 + " }} {{ root.output." + "y" * 100_000 + " }}", "root"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), TEMPLATES, ids=[f"{t:.40}" for t, _ in TEMPLATES])
def test_a_template_that_can_never_be_filled_is_refused(
    runs: RunClient, text: str, words: str
) -> None:
    needs = ("a", "llm_call.text", "approval.ok")
    others = [
        tool("root"), tool("a", "root"), llm("llm_call.text"), approval("approval.ok"),
        tool("later", "x"),
    ]  # fmt: skip
    for step, field in (
        ({"name": "x", "input": {"prompt": f"Look: {text}"}}, "input.prompt"),
        ({"name": "x", "input": {"tool": "echo", "args": {"k": [{"l": text}]}}}, "input.args"),
    ):
        answer = runs.post_steps(*others, {**step, "dependsOn": needs})
        said = refused(answer, 422, field=f"steps.5.{field}")
        assert words in said
        assert len(said) < 1000
    step = approval("approval.x", *needs, text=text)
    refused(runs.post_steps(*others[:-1], step), 422, field="steps.4.input")


# --- the whole -------------------------------------------------------------------------------

GOALS: list[Any] = ["", " \t\n\u3000", None, 1, True, ["g"], {"g": 1}, "a\0b"]


@pytest.mark.parametrize("goal", GOALS, ids=repr)
def test_a_goal_that_is_none_is_refused(runs: RunClient, goal: Any) -> None:
    refused(runs.post({"goal": goal, "steps": [A]}), 422, field="goal")


@pytest.mark.parametrize("steps", [None, [], {}, "a", 1, {"0": A}], ids=repr)
def test_steps_that_are_none_are_refused(runs: RunClient, steps: Any) -> None:
    refused(runs.post({"goal": "g", "steps": steps}), 422, field="steps")


def test_what_is_missing_or_unknown_is_refused_by_its_name(runs: RunClient) -> None:
    refused(runs.post({"steps": [A]}), 422, field="goal")
    refused(runs.post({"goal": "g"}), 422, field="steps")
    for unknown in ("tenant", "run_id", "status", "priority", "__proto__", "a\0b"):
        body = {"goal": "g", "steps": [A], unknown: 1}
        assert "not known here" in refused(runs.post(body), 422, field=unknown)


def test_everything_that_is_to_blame_is_named(runs: RunClient) -> None:
    steps = [tool("a", "x"), llm("b", prompt=""), tool("c", tool="y"), tool("d", "a", "a")]
    answer = runs.post_steps(*steps)
    refused(answer, 422)
    assert sorted(problem["field"] for problem in answer.json()["detail"]) == [
        "steps.0.dependsOn.0", "steps.1.input.prompt", "steps.2.input.tool", "steps.3.dependsOn.1",
    ]  # fmt: skip


def test_of_very_much_that_is_wrong_some_is_told(runs: RunClient) -> None:
    answer = runs.post_steps(*(tool(f"s{n}", "x", "y") for n in range(1000)))
    assert "and 1980 more" in refused(answer, 422)
    assert len(answer.json()["detail"]) == 20


RAW: dict[str, bytes] = {
    "half a surrogate pair in the goal": b'{"goal": "\\ud800", "steps": []}',
    "half a surrogate pair in a name": b'{"goal": "g", "steps": [{"name": "\\ud800"}]}',
    "half a pair in a dependency":
        b'{"goal": "g", "steps": [{"name": "a", "dependsOn": ["\\ud800"]}]}',
    "half a pair in a prompt":
        b'{"goal": "g", "steps": [{"name": "a", "input": {"prompt": "\\udc00"}}]}',
    "half a pair in args":
        b'{"goal":"g","steps":[{"name":"a","input":{"tool":"echo","args":{"x":["\\ud800"]}}}]}',
    "half a pair in a key of args":
        b'{"goal":"g","steps":[{"name":"a","input":{"tool":"echo","args":{"\\ud800":1}}}]}',
    "half a pair in the name of a tool":
        b'{"goal":"g","steps":[{"name":"a","input":{"tool":"\\ud800"}}]}',
    "half a pair in a template":
        b'{"goal":"g","steps":[{"name":"a","input":{"prompt":"{{ \\ud800 }}"}}]}',
    "NaN": b'{"goal":"g","steps":[{"name":"a","input":{"tool":"echo","args":{"x":NaN}}}]}',
    "infinity":
        b'{"goal":"g","steps":[{"name":"a","input":{"tool":"echo","args":{"x":-Infinity}}}]}',
    "a number that is infinite":
        b'{"goal":"g","steps":[{"name":"approval.a","input":{"x":[1e400]}}]}',
    "a number of 5,000 digits":
        b'{"goal":"g","steps":[{"name":"approval.a","input":{"x":' + b"9" * 5000 + b"}}]}",
    "nothing": b"", "an object": b"{}", "a list": b"[]", "null": b"null", "a text": b'"x"',
    "half an object": b'{"goal": "g", "steps": [', "bytes that are not UTF-8": b'{"goal": "\xff"}',
    "a raw NUL": b'{"goal": "\0"}', "a hundred thousand lists": b"[" * 100_000,
    "steps that are a deep list": b'{"goal": "g", "steps": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "an input that is deep": b'{"goal":"g","steps":[{"name":"approval.a","input":'
        + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]}",
    "an army of fields": json.dumps({f"f{n}": 1 for n in range(100_000)}).encode(),
    "an army of fields of a step":
        json.dumps({"goal": "g", "steps": [{f"f{n}": 1 for n in range(100_000)}]}).encode(),
    "an army of fields of an input": json.dumps(
        {"goal": "g", "steps": [llm("a", **{f"f{n}": 1 for n in range(100_000)})]}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("body", RAW.values(), ids=RAW.keys())
def test_a_body_that_is_no_run_is_refused(runs: RunClient, body: bytes) -> None:
    for key in (None, "k"):
        answer = runs.post(body, key)
        refused(answer, 400, 422)
        assert len(answer.content) < 20_000


@pytest.mark.parametrize(
    ("body", "field"),
    [(b'{"goal": "g", "steps": [%s]}', "steps"),
     (b'{"goal": "g", "steps": [{"name": "a", "dependsOn": [%s]}]}', "steps.0.dependsOn")],
)  # fmt: skip
def test_an_army_of_entries_is_counted_and_not_looked_at(
    runs: RunClient, body: bytes, field: str
) -> None:
    answer = runs.post(body % (b"1," * 90_000 + b"1"))
    said = refused(answer, 422, field=field)
    assert said == f"{field}: it has 90001 items; no list here has more than 10000"


# --- too much --------------------------------------------------------------------------------


def test_more_than_a_thousand_steps_are_refused_with_the_limits_name(runs: RunClient) -> None:
    for count in (1001, 10_000, 10_001, 15_000):
        said = refused(runs.post_steps(*(tool(f"s{n}") for n in range(count))), 422, field="steps")
        assert "limits.max_run_steps" in said or "no list here has more" in said
        assert str(count) in said


def test_more_than_five_thousand_dependencies_are_refused_with_the_limits_name(
    runs: RunClient,
) -> None:
    roots = [f"r{n}" for n in range(51)]
    leaves = [tool(f"l{n}", *roots) for n in range(98)] + [tool("last", roots[0], roots[1], "r2")]
    steps = [*(tool(name) for name in roots), *leaves]
    assert sum(len(step["dependsOn"]) for step in steps) == 5001
    said = refused(runs.post_steps(*steps), 422, field="steps")
    assert "limits.max_run_edges" in said
    assert "5001" in said


def test_a_goal_above_its_limit_is_refused_with_the_limits_name(runs: RunClient) -> None:
    for goal in ("x" * (16 * KIB + 1), "€" * (16 * KIB // 3 + 1)):
        said = refused(runs.post({"goal": goal, "steps": [A]}), 413, field="goal")
        assert "limits.max_goal_bytes (16384 bytes)" in said


def test_an_input_above_the_limit_of_prompts_is_refused_with_its_name(runs: RunClient) -> None:
    large = "€" * (MIB // 3)
    for step in (llm("a", prompt=large + "xx"), approval("approval.a", text=large),
                 {"name": "a", "input": {"tool": "echo", "args": {"x": large}}}):  # fmt: skip
        said = refused(runs.post_steps(A | {"name": "first"}, step), 413, field="steps.1.input")
        assert "limits.max_prompt_bytes (1048576 bytes)" in said


def test_more_references_than_a_step_may_have_are_refused_with_the_limits_name(
    runs: RunClient,
) -> None:
    parts = [f"{{{{ a.output.{n} }}}}" for n in range(1001)]
    for step, field in (
        (llm("x", "a", prompt=" ".join(parts)), "input.prompt"),
        (tool("x", "a", input={"tool": "echo", "args": {"all": parts}}), "input.args"),
        (approval("approval.x", "a", all=parts), "input"),
    ):
        said = refused(runs.post_steps(A, step), 422, field=f"steps.1.{field}")
        assert "at most 1000 different references (limits.max_step_references)" in said
        assert "1001" in said


def test_a_refused_body_does_not_use_up_its_key(runs: RunClient, conn: Connection) -> None:
    refused(runs.post_steps(tool("a", "x"), key="k"), 422)
    refused(runs.post_steps(tool("a", "y"), key="k"), 422)
    statement = "SELECT count(*) AS n FROM tasks WHERE idempotency_key = 'k' AND tenant = %(who)s"
    assert rows.sql(conn, statement, who=runs.tenant)[0]["n"] == 0

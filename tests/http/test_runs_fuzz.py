"""Whatever JSON comes in as a run, the answer is 201 and all of its rows, or a 4xx and none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from db import Connection
from tests.support import rows
from tests.support.client import Client, refused
from tests.support.run_client import RunClient

hypothesis = pytest.importorskip(
    "hypothesis", reason="needs hypothesis: pip install -r requirements-dev.txt"
)
st = hypothesis.strategies

SETTINGS = {
    "deadline": None,
    "database": None,
    "derandomize": True,  # the same bodies in every run
    "suppress_health_check": list(hypothesis.HealthCheck),
}


@pytest.fixture
def runs(client: Client) -> RunClient:
    return RunClient(client.http, client.tenant)


text = st.text(st.characters(codec=None), max_size=8)  # lone surrogates and NUL, too
plain = st.none() | st.booleans() | st.integers() | st.floats() | text
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)
names = st.sampled_from(["a", "b", "c", "llm_call.a", "tool_call.b", "approval.c", "agent_call.d"])
pieces = st.sampled_from(
    ["{{", "}}", "{{ a.output }}", "{{ llm_call.a.output.x.0 }}", '{{ "{{" }}', "{", " ", "x",
     "{{ approval.c.output.feedback }}", ".output", "\0", "tool_call."]
)  # fmt: skip
templates = st.lists(pieces | text, max_size=5).map("".join)
schemas = st.recursive(
    st.booleans()
    | st.fixed_dictionaries({"type": st.sampled_from(["object", "string", "nonsense"]) | values})
    | st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/anyOf/0", "x"]) | text}),
    lambda inner: (
        st.dictionaries(
            st.sampled_from(["items", "not", "additionalProperties", "then"]), inner, max_size=3
        )
        | st.dictionaries(
            st.sampled_from(["properties", "$defs"]),
            st.dictionaries(st.sampled_from(["a", "b", "~", "/"]) | text, inner, max_size=2),
        )
        | st.dictionaries(st.sampled_from(["anyOf", "allOf"]), st.lists(inner, max_size=2))
    ),
    max_leaves=6,
)
inputs = (
    values
    | st.fixed_dictionaries(
        {"prompt": templates | values},
        optional={
            "model": st.sampled_from(["llama3.2:latest"]) | values,
            "route": st.sampled_from(["auto", "local", "cloud"]) | values,
            "format": schemas | values,
        },
    )
    | st.fixed_dictionaries(
        {"tool": st.sampled_from(["echo", "sleep", "nothing"]) | values},
        optional={"args": st.dictionaries(text, templates | values, max_size=3) | values},
    )
    | st.fixed_dictionaries(
        {"task": templates | values},
        optional={
            "require_approval": st.booleans() | values,
            "token_budget": st.integers(0, 3) | values,
            "max_revisions": st.integers(-1, 3) | values,
            "graph": st.sampled_from(["team", "nothing"]) | values,
        },
    )
    | st.dictionaries(text, templates | values, max_size=3)
)
steps = st.fixed_dictionaries(
    {"name": names},
    optional={
        "input": inputs,
        "dependsOn": st.lists(names, max_size=3) | values,
        "max_retry": st.integers(0, 5) | values,
        "unknown": st.nothing() | values,
    },
)


@st.composite
def graphs(draw: Any, given: Any) -> dict[str, Any]:
    """Runs whose names and dependencies are right, with such inputs."""
    made: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 5))):
        before = [step["name"] for step in made]
        needs = draw(st.lists(st.sampled_from(before), unique=True)) if before else []
        made.append({"name": f"s{number}", "input": draw(given), "dependsOn": needs})
    return {"goal": "g", "steps": draw(st.permutations(made))}


@st.composite
def tangles(draw: Any) -> dict[str, Any]:
    """Runs that are right but for dependencies and templates, which lead anywhere."""
    anywhere = st.sampled_from(["s0", "s1", "s2", "llm_call.a", "approval.c", "nobody"])
    text = st.just("p") | templates | anywhere.map(lambda name: f"{{{{ {name}.output }}}}")
    made = [
        {
            "name": name,
            "input": {"prompt": draw(text)},
            "dependsOn": draw(st.lists(anywhere, max_size=3)),
        }
        for name in draw(st.lists(anywhere, min_size=1, max_size=5, unique=True))
    ]
    return {"goal": "g", "steps": made}


echo = st.fixed_dictionaries(
    {"tool": st.just("echo")}, optional={"args": st.dictionaries(st.text("ab"), st.integers())}
)
prompts = st.fixed_dictionaries(
    {"prompt": st.text("ab{} ", min_size=1)}, optional={"format": schemas, "route": st.just("auto")}
)
bodies = (
    values
    | graphs(echo | prompts)
    | tangles()
    | graphs(echo | inputs)
    | st.fixed_dictionaries(
        {"goal": text | values, "steps": st.lists(steps | values, max_size=4) | values},
        optional={"unknown": st.nothing() | values},
    )
)
keys = st.none() | st.sampled_from(["a", "b", "c"])


@hypothesis.settings(max_examples=600, **SETTINGS)
@hypothesis.given(body=bodies, key=keys)
def test_any_json_is_stored_whole_or_refused_in_plain_words(
    runs: RunClient, conn: Connection, body: Any, key: str | None
) -> None:
    before = rows.count_tasks(conn)
    answer = runs.post(json.dumps(body).encode(), key)
    stored = rows.count_tasks(conn) - before
    if answer.status_code == 201:
        assert stored == 1 + len(body["steps"])
        run = runs.run(answer.json()["run_id"])
        assert {step["name"] for step in run["steps"]} == {step["name"] for step in body["steps"]}
    else:
        assert stored == 0
        if answer.status_code != 200:  # a replay
            refused(answer, 400, 422)


@hypothesis.settings(max_examples=100, **SETTINGS)
@hypothesis.given(body=graphs(echo))
def test_any_graph_is_taken_and_shown_parents_first(runs: RunClient, body: Any) -> None:
    answer = runs.post(body)
    assert answer.status_code == 201, answer.text
    shown = {step["name"]: step for step in answer.json()["steps"]}
    sent = {step["name"]: set(step["dependsOn"]) for step in body["steps"]}
    assert {name: set(step["dependsOn"]) for name, step in shown.items()} == sent
    for step in shown.values():
        assert all(shown[name]["task_id"] < step["task_id"] for name in step["dependsOn"])
        assert step["status"] == ("BLOCKED" if step["dependsOn"] else "PENDING")


@hypothesis.settings(max_examples=200, **SETTINGS)
@hypothesis.given(
    body=values
    | st.dictionaries(st.sampled_from(["approved", "feedback", "artefact"]) | text, values),
)
def test_any_json_as_an_approval_is_refused_in_plain_words_where_nothing_waits(
    runs: RunClient, body: Any
) -> None:
    task_id = runs.submit({"name": "a", "input": {"tool": "echo"}})["steps"][0]["task_id"]
    headers = {"Content-Type": "application/json"}
    answer = runs.approve(task_id, content=json.dumps(body).encode(), headers=headers)
    refused(answer, 400, 409, 422)

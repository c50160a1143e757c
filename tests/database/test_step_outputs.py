"""What `{{ step.output… }}` stands for, read from the rows of the steps that succeeded."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

import db
from db import Connection
from errors import TooLarge
from queries import operations, runs, steps
from queries.leases import ClaimedTask, Outcome
from queries.runs import NewRun
from queries.steps import read_outputs
from runs.templates import Reference
from tests.support import rows
from tests.support.plans import plan_of
from tests.support.runs import finish, new_step, number
from worker.outputs import with_outputs

TOOL = {"rows": [{"id": 1, "ü": None}, 2.5, "three"], "empty": {}, "none": None}


@pytest.fixture
def run_id(conn: Connection) -> int:
    """A run with a finished step of each kind, and one that has not run."""
    told = {"prompt": "p"}
    sent = [
        new_step("tool"),
        new_step("text", kind="prompt", payload=told, requested_route="auto"),
        new_step("json", kind="prompt", payload={**told, "format": {}}, requested_route="auto"),
        new_step("approval.x"),
        new_step("agent_call.x", kind="agent", payload={"task": "t"}, requested_route="auto"),
        new_step("waits"),
    ]
    run_id = runs.submit_run(conn, NewRun("default", "outputs", sent)).task_id
    finish(conn, run_id, "tool", result=TOOL)
    finish(conn, run_id, "text", result={"text": "said"})
    finish(conn, run_id, "json", result={"text": '{"a": [0]}', "json": {"a": [0]}})
    finish(conn, run_id, "agent_call.x", result={"code": "x", "text": [1], "json": None})
    gate = number(conn, run_id, "approval.x")
    operations.approve_task(conn, "default", str(gate), True, "fine")
    return run_id


FOUND: list[tuple[Reference, Any]] = [
    (Reference("tool"), TOOL),
    (Reference("tool", ("rows", "0", "id")), 1),
    (Reference("tool", ("rows", "1")), 2.5),
    (Reference("tool", ("rows", "-1")), "three"),
    (Reference("tool", ("rows", "0", "ü")), None),
    (Reference("tool", ("empty",)), {}),
    (Reference("tool", ("none",)), None),
    (Reference("text"), "said"),
    (Reference("json"), {"a": [0]}),
    (Reference("json", ("a", "0")), 0),
    (Reference("agent_call.x"), {"code": "x", "text": [1], "json": None}),
    (Reference("agent_call.x", ("text", "0")), 1),
    (Reference("agent_call.x", ("code",)), "x"),
    (Reference("approval.x"), {"approved": True, "feedback": "fine"}),
    (Reference("approval.x", ("feedback",)), "fine"),
]
NOT_FOUND = [
    Reference("tool", ("row",)),
    Reference("tool", ("rows", "3")),
    Reference("tool", ("rows", "first")),
    Reference("tool", ("none", "deeper")),
    Reference("text", ("text",)),
    Reference("waits"),
    Reference("nobody"),
]


def test_a_reference_stands_for_what_its_path_leads_to(conn: Connection, run_id: int) -> None:
    assert read_outputs(conn, run_id, [one for one, _ in FOUND]) == dict(FOUND)


def test_a_reference_that_leads_nowhere_is_left_out_and_null_is_something(
    conn: Connection, run_id: int
) -> None:
    assert read_outputs(conn, run_id, [*NOT_FOUND, Reference("text")]) == {
        Reference("text"): "said"
    }


def test_steps_of_other_runs_are_not_found(conn: Connection, run_id: int) -> None:
    assert read_outputs(conn, run_id + 100, [Reference("tool")]) == {}


def test_more_than_a_step_can_take_is_refused_before_it_is_read(
    conn: Connection, run_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Reference("tool"), Reference("text")]
    monkeypatch.setattr(steps, "MOST_OUTPUT_BYTES", 20)
    with pytest.raises(TooLarge, match="larger than 20 bytes together"):
        read_outputs(conn, run_id, asked)
    assert read_outputs(conn, run_id, [Reference("text")]) == {Reference("text"): "said"}


def claimed(conn: Connection, payload: dict[str, Any], **step: Any) -> ClaimedTask:
    """A claimed step with that payload, behind a finished one called tool."""
    sent = [new_step("tool"), new_step("user", ["tool"], payload=payload, **step)]
    run_id = runs.submit_run(conn, NewRun("default", "outputs", sent)).task_id
    finish(conn, run_id, "tool", result=TOOL)
    return rows.claim_only(conn, number(conn, run_id, "user"))


def test_a_claimed_step_gets_the_outputs_that_its_input_refers_to(conn: Connection) -> None:
    args = {"a": "{{ tool.output.rows.1 }}", "deep": ["{{ tool.output.nothing }}"]}
    task = claimed(conn, {"tool": "echo", "args": args})
    ready = with_outputs(conn, task)
    assert isinstance(ready, ClaimedTask)
    assert ready.outputs == {Reference("tool", ("rows", "1")): 2.5}
    assert (ready.lease, ready.step, ready.run_id) == (task.lease, "user", task.root_id)


def test_a_lone_task_is_no_template(conn: Connection) -> None:
    task = rows.claimed(conn, payload={"prompt": "{{ tool.output }} and {{ nonsense"})
    assert with_outputs(conn, task) is task


def test_a_step_whose_template_cannot_be_read_fails_for_good(conn: Connection) -> None:
    ready = with_outputs(conn, claimed(conn, {"tool": "echo", "args": {"a": "{{ nonsense }}"}}))
    assert isinstance(ready, Outcome)
    assert ready.verdict == "permanent"
    assert "nonsense" in (ready.error or "")


def test_when_postgres_goes_away_the_step_is_handed_back_unburned(
    conn: Connection, connect: Any
) -> None:
    task = claimed(conn, {"tool": "echo", "args": {"a": "{{ tool.output }}"}})
    broken = connect()
    broken.close()
    assert with_outputs(broken, task) == Outcome("released", delay_seconds=1)


def test_a_read_that_takes_too_long_is_a_failure_and_not_tried_for_ever(
    conn: Connection, connect: Any
) -> None:
    task = claimed(conn, {"tool": "echo", "args": {"a": "{{ tool.output }}"}})
    with db.transaction(connect()) as cursor:
        cursor.execute("LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
        conn.lock_timeout_seconds, conn.reply_timeout_seconds = 60, 0.5
        outcome = with_outputs(conn, task)
    assert isinstance(outcome, Outcome)
    assert outcome.verdict == "failure"
    assert "in time" in (outcome.error or "")


def test_a_thousand_parts_of_a_large_result_are_read_as_one(conn: Connection) -> None:
    """The pages of the result are read once, and not for each part."""
    run_id = runs.submit_run(conn, NewRun("default", "large", [new_step("tool")])).task_id
    texts = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(5000)]
    finish(conn, run_id, "tool", result=texts)
    asked = [{"ordinal": n, "step": "tool", "path": [str(n)]} for n in range(1000)]
    values = {"run_id": run_id, "references": json.dumps(asked), "most_bytes": 2**25}
    assert plan_of(conn, steps.READ_OUTPUTS, values).pages < 300
    values["references"] = json.dumps(asked[:1])
    assert plan_of(conn, steps.READ_OUTPUTS, values).pages > 30

"""The page: a step in which the agent team works, and asks a person about its code."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import Stack, Visit
from tests.support.fake_ollama import answer, slow
from tests.support.processes import eventually
from tests.support.team_model import CODE, TeamModel, rejects

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt"
).expect
if importlib.util.find_spec("langgraph") is None:
    pytest.skip("needs langgraph: pip install -r requirements-agents.txt", allow_module_level=True)

# Neither markup nor a template: what a model wrote is data.
BETTER = "def double(x):\n    return x + x  # <b>{{ tool_call.first.output.said }}</b>"
JOB = {"task": "Double a number.", "require_approval": True}
TEAM = {"name": "agent_call.team", "input": JOB}


@pytest.fixture
def team(stack: Stack) -> Iterator[TeamModel]:
    """Plays the roles of every job of the test."""
    stack.fake.released.clear()
    team = TeamModel()
    stack.fake.script = team
    yield team
    stack.fake.script = None
    stack.fake.released.clear()


def test_a_job_is_watched_node_by_node_and_its_code_is_decided_about_by_a_person(
    visit: Visit, stack: Stack, team: TeamModel
) -> None:
    # Before the coder speaks, the worker has had time to hear that somebody watches.
    notes = answer("Notes.", chunks=3, delay=1.0)
    team.on(
        "", researcher=notes, coder=[slow(then=answer(CODE[5:]), first=CODE[:5]), answer(BETTER)]
    )
    told: list[Any] = []
    page = visit.page
    page.on(
        "request",
        lambda sent: told.append(sent.post_data_json) if "/approve" in sent.url else None,
    )
    explain = {"prompt": "Tell of it: {{ agent_call.team.output.code }}"}
    first_step = {"name": "tool_call.first", "input": {"tool": "echo", "args": {"said": "!"}}}
    run_id = stack.submit(
        first_step,
        {**TEAM, "dependsOn": ["tool_call.first"]},
        {"name": "llm_call.tell", "input": explain, "dependsOn": ["agent_call.team"]},
    )
    visit.open(run_id)
    job = visit.step("agent_call.team")
    expect(job.locator(".step-note")).to_have_text("coder: def d")
    expect(page.locator(".node", has_text="team")).to_contain_text("agent · executing")
    stack.fake.release()
    expect(job.locator(".question pre").first).to_have_text(CODE)
    expect(job.locator(".question dt")).to_have_text(["code", "revision"])
    expect(job.locator(".badge").first).to_have_text("needs approval")
    first = stack.run(run_id)["steps"][1]["approval"]["artefact"]
    job.get_by_role("textbox").fill("shorter, please")
    job.get_by_role("button", name="Reject agent_call.team").click()
    expect(job.locator(".question pre").first).to_have_text(BETTER)
    expect(job.get_by_role("textbox")).to_have_value("")
    second = stack.run(run_id)["steps"][1]["approval"]["artefact"]
    job.get_by_role("button", name="Approve agent_call.team").click()
    expect(page.locator("#run-badge")).to_have_text("done")
    expect(job.locator(".step-note")).to_contain_text("approved: def double(x): return x + x")
    expect(visit.step("llm_call.tell")).to_contain_text("return x + x")
    assert told == [
        {"approved": False, "feedback": "shorter, please", "artefact": first},
        {"approved": True, "feedback": None, "artefact": second},
    ]
    visit.opener("agent_call.team").click()
    expect(job.locator(".step-more")).to_contain_text(f"code:\n{BETTER}", use_inner_text=True)
    expect(job.locator(".facts")).to_contain_text("0 failures, 1 hand-out")
    parked = page.locator("#trail tr", has_text="parked").first
    expect(parked).to_contain_text(f"about {first[:8]}")
    visit.expect_trail(stack.trail(run_id))


def test_who_comes_when_the_job_already_waits_sees_what_it_asks(
    visit: Visit, stack: Stack, team: TeamModel
) -> None:
    run_id = stack.submit(TEAM)
    task_id = stack.run(run_id)["steps"][0]["task_id"]
    eventually(lambda: stack.api.task(task_id)["status"] == "AWAITING_APPROVAL")
    visit.open(run_id)
    job = visit.step("agent_call.team")
    expect(job.locator(".question pre").first).to_have_text(CODE)
    answer = stack.api.http.post(f"/tasks/{task_id}/approve", json={"approved": True})
    assert answer.status_code == 200, answer.text
    expect(job.locator(".step-note")).to_contain_text("approved: def double")
    expect(job.get_by_role("button", name="Approve")).to_have_count(0)


def test_a_decision_about_code_that_has_changed_since_is_refused_in_plain_words(
    visit: Visit, stack: Stack, team: TeamModel
) -> None:
    visit.expected += ["Failed to load resource"]
    team.on("", coder=[answer(CODE), answer(BETTER)])
    run_id = stack.submit(TEAM)
    task = f"/tasks/{stack.run(run_id)['steps'][0]['task_id']}"
    page = visit.open(run_id)
    job = visit.step("agent_call.team")
    expect(job.locator(".question pre").first).to_have_text(CODE)

    def waiting() -> Any:
        return stack.run(run_id)["steps"][0]["approval"]

    def be_late(route: Any) -> None:
        """Somebody else sends the code back, and the next version is there, before we are."""
        stack.api.http.post(f"{task}/approve", json={"approved": False})
        eventually(lambda: (waiting() or {}).get("asks", {}).get("revision") == 1)
        route.continue_()

    page.route("**/approve", be_late, times=1)
    with page.expect_response("**/approve") as refused:
        job.get_by_role("button", name="Approve agent_call.team").click()
    assert refused.value.status == 409
    expect(job.locator(".question pre").first).to_have_text(BETTER)
    assert stack.run(run_id)["status"] == "RUNNING"
    job.get_by_role("button", name="Approve agent_call.team").click()
    expect(page.locator("#run-badge")).to_have_text("done")


def test_a_job_that_its_reviewer_rejects_for_good_says_so_and_why_it_stopped(
    visit: Visit, stack: Stack, team: TeamModel
) -> None:
    team.on("", reviewer=[rejects(), rejects("Still not.")])
    visit.open(
        stack.submit({"name": "agent_call.team", "input": {"task": "t", "max_revisions": 1}})
    )
    note = visit.step("agent_call.team").locator(".step-note")
    expect(note).to_contain_text("rejected (stopped by max_revisions): def double")


def test_the_example_with_the_team_is_accepted_and_asks(visit: Visit, team: TeamModel) -> None:
    page = visit.open()
    page.get_by_label("Begin with an example").select_option(
        label="A team writes code, a person reads it"
    )
    page.get_by_role("button", name="Submit run").click()
    job = visit.step("agent_call.team")
    job.get_by_role("button", name="Approve agent_call.team").click()
    expect(page.locator("#run-badge")).to_have_text("done")

"""The page: what a person can do to a run, by mouse and by keyboard."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Stack, Visit
from tests.support.fake_ollama import answer

if TYPE_CHECKING:
    from playwright.sync_api import Route

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt"
).expect

MOST_TABS = 60
# What a browser says when one comes back to a tab; the page then does not wait for its next look.
LOOK_AGAIN = "document.dispatchEvent(new Event('visibilitychange'))"


def sleep(name: str, seconds: float = 60) -> dict[str, object]:
    return {"name": name, "input": {"tool": "sleep", "args": {"seconds": seconds}}}


def test_a_step_is_approved_by_keyboard_alone(visit: Visit, stack: Stack) -> None:
    stack.fake.on("Draft", answer("Good news."))
    ask = {"question": "May it go out?", "text": "{{ llm_call.draft.output }}"}
    final = {"prompt": "Take it: {{ approval.review.output.feedback }}"}
    run_id = stack.submit(
        {"name": "llm_call.draft", "input": {"prompt": "Draft it"}},
        {"name": "approval.review", "input": ask, "dependsOn": ["llm_call.draft"]},
        {"name": "llm_call.final", "input": final, "dependsOn": ["approval.review"]},
    )
    page = visit.open(run_id)
    review = visit.step("approval.review")
    expect(review.get_by_role("textbox")).to_be_visible()
    expect(review.locator(".question")).to_contain_text("Good news.")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the open run")).to_be_focused()
    page.keyboard.press("Enter")
    names = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.innerText || document.activeElement.id"))
        if str(names[-1]).startswith("feedback-"):
            break
    assert names[0] == "Cancel run", names  # the skip link has led past form and list
    page.keyboard.type("warmer, please")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Approve approval.review")).to_be_focused()
    page.keyboard.press("Enter")
    expect(review).to_contain_text("approved: warmer, please")
    expect(visit.opener("approval.review")).to_be_focused()
    expect(visit.step("llm_call.final")).to_contain_text("echo: Take it: warmer, please")
    expect(page.locator("#run-badge")).to_have_text("done")
    expect(page.locator("#trail tr", has_text="approved")).to_contain_text("warmer, please")
    assert page.url.split("#")[0].endswith(f"/?run={run_id}")


def test_a_rejected_step_says_so_and_can_be_asked_again(visit: Visit, stack: Stack) -> None:
    page = visit.open(stack.submit({"name": "approval.review", "input": {"question": "Well?"}}))
    review = visit.step("approval.review")
    review.get_by_role("textbox").fill("not like this")
    review.get_by_role("button", name="Reject").click()
    expect(review.locator(".badge").first).to_have_text("rejected")
    expect(page.locator("#run-badge")).to_have_text("failed")
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    review.get_by_role("button", name="Ask again").click()
    expect(review.get_by_role("textbox")).to_have_value("")
    review.get_by_role("button", name="Approve").click()
    expect(page.locator("#run-badge")).to_have_text("done")
    reasons = page.locator("#trail tr", has_text="approval.review").locator(".trail-reason")
    assert reasons.all_inner_texts() == ["created", "rejected", "requeued", "approved"]


def test_a_failed_step_is_run_again_and_the_page_follows_though_the_run_was_over(
    visit: Visit, stack: Stack
) -> None:
    wrong = {"tool": "fetch_data", "args": {"name": "nothing"}}
    run_id = stack.submit({"name": "tool_call.wrong", "input": wrong})
    page = visit.open(run_id)
    step = visit.step("tool_call.wrong")
    expect(step).to_contain_text("there is no data set")
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    step.get_by_role("button", name="Run it again").click()
    expect(step).to_contain_text("try 2")
    expect(page.locator("#run-badge")).to_have_text("failed")
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    visit.expect_trail(stack.trail(run_id))
    assert "requeued" in page.locator("#trail .trail-reason").all_inner_texts()


def test_a_run_that_somebody_else_revived_is_followed_again(visit: Visit, stack: Stack) -> None:
    run_id = stack.submit({"name": "approval.review", "input": {"question": "Well?"}})
    task = f"/tasks/{stack.run(run_id)['steps'][0]['task_id']}"

    def reject() -> None:
        answer = stack.api.http.post(f"{task}/approve", json={"approved": False})
        assert answer.status_code == 200, answer.text

    reject()
    page = visit.open(run_id)
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    assert stack.api.http.post(f"{task}/requeue").status_code == 200
    reject()  # over again before the page can have seen it go on
    page.evaluate(LOOK_AGAIN)
    visit.expect_trail(stack.trail(run_id))
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    assert stack.api.http.post(f"{task}/requeue").status_code == 200
    page.evaluate(LOOK_AGAIN)
    expect(visit.step("approval.review")).to_contain_text("needs approval")


def test_a_run_is_cancelled_in_two_presses(visit: Visit, stack: Stack) -> None:
    run_id = stack.submit(
        sleep("tool_call.sleep"), {**sleep("tool_call.later"), "dependsOn": ["tool_call.sleep"]}
    )
    page = visit.open(run_id)
    expect(visit.step("tool_call.sleep")).to_contain_text("executing")
    page.get_by_role("button", name="Cancel run").click()
    expect(page.get_by_role("button", name="Yes, cancel it")).to_be_focused()
    page.get_by_role("button", name="No", exact=True).click()
    expect(page.get_by_role("button", name="Yes, cancel it")).to_be_hidden()
    assert stack.run(run_id)["cancel_requested"] is False
    page.get_by_role("button", name="Cancel run").click()
    page.keyboard.press("Enter")
    expect(page.locator("#run-badge")).to_have_text("cancelled")
    expect(page.locator(".step[data-look=cancelled]")).to_have_count(2)
    expect(page.get_by_role("button", name="Cancel run")).to_be_hidden()
    assert stack.run(run_id)["status"] == "CANCELLED"


def test_a_refused_run_shows_the_words_of_the_api_at_the_field(visit: Visit, stack: Stack) -> None:
    visit.expected += ["Failed to load resource"]
    page = visit.open()
    steps = [
        {"name": "tool_call.a", "input": {"tool": "echo"}, "dependsOn": ["tool_call.b"]},
        {"name": "tool_call.b", "input": {"tool": "echo"}, "dependsOn": ["tool_call.a"]},
    ]
    visit.submit(json.dumps({"goal": "A circle", "steps": steps}))
    refused = page.get_by_role("alert").first
    expect(refused).to_contain_text("steps depend on each other in a circle")
    expect(refused).to_contain_text("tool_call.a -> tool_call.b -> tool_call.a")
    field = page.get_by_label("The run, as JSON")
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    assert "refused" in str(field.get_attribute("aria-describedby"))
    field.fill('{"goal": "half')
    expect(refused).to_be_empty()
    page.get_by_role("button", name="Submit run").click()
    expect(refused).to_contain_text("This is not JSON yet")
    expect(page.get_by_role("heading", name="No run is open")).to_be_visible()


def test_a_submission_whose_answer_was_lost_makes_one_run_however_often_it_is_pressed(
    visit: Visit, stack: Stack
) -> None:
    visit.expected += ["Failed to load resource"]
    page = visit.open()

    def lose_the_answer(route: Route) -> None:
        if route.request.method == "POST":
            route.fetch()
            route.abort()
        else:
            route.continue_()

    page.route("**/runs", lose_the_answer)
    step = {"name": "tool_call.once", "input": {"tool": "echo"}}
    visit.submit(json.dumps({"goal": "Only once", "steps": [step]}))
    expect(page.get_by_role("alert").first).to_contain_text("the same run, not a second one")
    page.unroute("**/runs")
    page.get_by_role("button", name="Submit run").click()
    expect(page.get_by_role("heading", name="Only once")).to_be_visible()
    runs = stack.api.http.get("/runs").json()["runs"]
    assert [run["goal"] for run in runs].count("Only once") == 1


def test_a_draft_survives_a_reload(visit: Visit) -> None:
    page = visit.open()
    page.get_by_label("The run, as JSON").fill('{"goal": "mine"}')
    page.reload()
    expect(page.get_by_label("The run, as JSON")).to_have_value('{"goal": "mine"}')
    page.get_by_label("Begin with an example").select_option(index=1)
    expect(page.get_by_label("The run, as JSON")).to_have_value(re.compile(r"approval\.review"))

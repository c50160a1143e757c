"""The page: submit a run, watch it, come back to it."""

from __future__ import annotations

import json
import re

import pytest

from tests.browser.conftest import Stack, Visit
from tests.support.fake_ollama import answer, slow

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt"
).expect

FETCH = {"name": "tool_call.fetch_data", "input": {"tool": "fetch_data"}}


def echo(name: str, *needs: str, **args: object) -> dict[str, object]:
    return {"name": name, "input": {"tool": "echo", "args": args}, "dependsOn": list(needs)}


def test_the_example_is_submitted_and_watched_to_its_end_with_its_retry(
    visit: Visit, stack: Stack
) -> None:
    words = "Queues in Postgres survive crashes."
    stack.fake.on("Summarize", answer(words, chunks=10, delay=0.2))
    page = visit.open()
    expect(page.get_by_role("heading", name="No run is open")).to_be_visible()
    expect(page.locator("#engine")).to_contain_text("1 worker")
    page.get_by_role("button", name="Submit run").click()
    expect(page.get_by_role("heading", name="Research and summarize a topic")).to_be_visible()
    flaky = visit.step("tool_call.flaky_check")
    expect(flaky).to_contain_text(re.compile(r"tries again in \d s .* simulated"))
    expect(visit.step("llm_call.summarize")).to_contain_text("waits for tool_call.flaky_check")
    expect(page.locator(".node", has_text="summarize")).to_contain_text("executing")
    # Written before our eyes, then kept as the result.
    expect(visit.step("llm_call.summarize").locator(".step-note")).to_have_text(re.compile("^Que"))
    expect(page.locator("#run-badge")).to_have_text("done")
    expect(page.locator("#run-progress")).to_have_text("3 of 3 steps done")
    expect(visit.step("llm_call.summarize")).to_contain_text(words)
    expect(flaky).to_contain_text("try 2")
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    expect(page.locator(".node[data-look=done]")).to_have_count(3)
    run_id = int(page.locator("#run-id").inner_text())
    visit.expect_trail(stack.trail(run_id))
    retry = page.locator("#trail tr", has_text="retry")
    expect(retry).to_contain_text("tool_call.flaky_check")
    expect(retry).to_contain_text("next try after 2.0 s · a transient failure, simulated")
    assert page.url.endswith(f"/?run={run_id}")


def test_a_run_that_is_reloaded_in_the_middle_goes_on_where_it_stands(
    visit: Visit, stack: Stack
) -> None:
    stack.fake.on("Reload", slow(first="Once upon"))
    prompt = {"prompt": "Reload: {{ tool_call.fetch_data.output.name }}"}
    steps = [FETCH, {"name": "llm_call.tell", "input": prompt, "dependsOn": [FETCH["name"]]}]
    page = visit.open()
    visit.submit(json.dumps({"goal": "To be reloaded", "steps": steps}))
    expect(visit.step("llm_call.tell")).to_contain_text("executing")
    page.reload()
    expect(visit.step("llm_call.tell")).to_contain_text("executing")
    expect(visit.step("tool_call.fetch_data")).to_contain_text("durable_queues")
    ticking = visit.step("llm_call.tell").locator(".step-seconds")
    before = ticking.inner_text()
    expect(ticking).not_to_have_text(before)
    stack.fake.release()
    expect(page.locator("#run-badge")).to_have_text("done")
    expect(visit.step("llm_call.tell")).to_contain_text("echo: Reload: durable_queues")
    visit.expect_trail(stack.trail(int(page.locator("#run-id").inner_text())))


def test_an_earlier_run_is_opened_by_its_address_or_from_the_list(
    visit: Visit, stack: Stack
) -> None:
    first = stack.submit(echo("tool_call.first"), goal="The first of two")
    second = stack.submit(echo("tool_call.second"), goal="The second of two")
    stack.await_run(first, "SUCCEEDED")
    stack.await_run(second, "SUCCEEDED")
    page = visit.open(first)
    expect(page.get_by_role("heading", name="The first of two")).to_be_visible()
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    visit.expect_trail(stack.trail(first))
    page.get_by_role("link", name="The second of two").click()
    expect(page.get_by_role("heading", name="The second of two")).to_be_visible()
    expect(visit.step("tool_call.second")).to_contain_text("done")
    page.go_back()
    expect(page.get_by_role("heading", name="The first of two")).to_be_visible()
    expect(visit.step("tool_call.first")).to_contain_text("done")
    expect(page.locator(".step")).to_have_count(1)
    assert page.url.endswith(f"/?run={first}")


def test_a_run_that_is_not_there_is_said_to_be_not_there(visit: Visit) -> None:
    visit.expected += ["Failed to load resource", "WebSocket connection to"]
    page = visit.open(987654)
    expect(page.get_by_text("There is no run 987654 here.")).to_be_visible()
    page.goto(f"{visit.url}/?run=nonsense")
    expect(page.get_by_text("“nonsense” is no number of a run.")).to_be_visible()


def test_what_a_step_brought_and_what_happened_to_it_is_behind_its_button(
    visit: Visit, stack: Stack
) -> None:
    text = "".join(f"line {number}\n" for number in range(1000))
    run_id = stack.submit(
        echo("tool_call.long", text=text), echo("tool_call.next", "tool_call.long")
    )
    stack.await_run(run_id, "SUCCEEDED")
    page = visit.open(run_id)
    button = page.get_by_role("button", name="tool_call.long, tool step, done")
    expect(button).to_have_attribute("aria-expanded", "false")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    row = visit.step("tool_call.long")
    result = row.locator(".part", has_text="Result")
    expect(result.locator("pre")).not_to_contain_text("line 999")
    result.get_by_role("button", name="Show all").click()
    expect(result.locator("pre")).to_contain_text("line 999")
    expect(row.locator(".facts")).to_contain_text("tool_call.next")
    expect(row.locator(".story li")).to_have_count(3)
    # The drawing leads to the same place.
    page.locator(".node", has_text="next").click()
    expect(visit.opener("tool_call.next")).to_be_focused()


def test_hostile_text_is_shown_as_text_and_nothing_of_it_is_carried_out(
    visit: Visit, stack: Stack
) -> None:
    hostile = (
        """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> 🎉 \u202e {{"""
    )
    steps = [
        echo("tool_call.evil", text=hostile.replace("{{", '{{ "{{" }}')),
        echo("tool_call.on", "tool_call.evil", got="{{ tool_call.evil.output.text }}"),
    ]
    run_id = stack.submit(*steps, goal=hostile)
    stack.await_run(run_id, "SUCCEEDED")
    page = visit.open(run_id)
    expect(page.locator("#run-goal")).to_have_text(hostile)
    visit.opener("tool_call.on").click()
    expect(visit.step("tool_call.on").locator(".part", has_text="Result")).to_contain_text(
        json.dumps(hostile, ensure_ascii=False)
    )
    expect(page.get_by_role("link", name="window.hacked")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1


def test_a_thousand_steps_are_drawn_as_marks_and_stay_usable(visit: Visit, stack: Stack) -> None:
    gate = {"name": "approval.gate"}
    many = [echo(f"tool_call.part_{number}", "approval.gate") for number in range(999)]
    page = visit.open(stack.submit(gate, *many, goal="Many"))
    expect(page.locator(".tile")).to_have_count(1000)
    expect(page.locator("#filters")).to_contain_text("999 blocked")
    # By keyboard: to the drawing, along it, into the step.
    page.locator(".tile").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    # To look for a button by its name among thousands of them takes the browser five seconds.
    opener = page.locator(":focus")
    expect(opener).to_have_role("button")
    expect(opener).to_have_accessible_name(re.compile(r"^tool_call\.part_997, "))
    shown = page.locator("#filters").get_by_role("button", name="1 needs approval")
    shown.click()
    expect(page.locator(".step:visible")).to_have_count(1)
    shown.click()
    expect(page.locator(".step:visible")).to_have_count(1000)
    expect(page.locator("#trail-count")).to_have_text("1001")
    expect(page.locator("#trail tr")).to_have_count(200)
    earlier = page.locator("#trail-more")
    expect(earlier).to_have_accessible_name("Show 801 earlier")
    earlier.click()
    expect(page.locator("#trail tr")).to_have_count(1001)
    page.get_by_role("button", name="Cancel run").click()
    page.get_by_role("button", name="Yes, cancel it").click()
    expect(page.locator("#filters")).to_contain_text("1000 cancelled")

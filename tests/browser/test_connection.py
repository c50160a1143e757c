"""The page's live connection: lost and found again, without a gap and without a repeat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import Stack, Visit, visiting
from tests.support.fake_ollama import FakeOllama, slow
from tests.support.processes import Api, Processes, eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt"
).expect

NO_WEBSOCKET = """
window.WebSocket = class {
    constructor() { setTimeout(() => this.onclose?.(), 5); }
    close() {}
};
"""
# Opens, and then never says a word: a connection that somebody on the way has forgotten.
SILENT_WEBSOCKET = """
window.WebSocket = class {
    constructor() {
        window.sockets = (window.sockets ?? 0) + 1;
        setTimeout(() => this.onopen?.(), 5);
    }
    close() {}
};
"""
FOLLOW = """
async () => {
    const { Connection } = await import("/web/connection.js");
    window.states = [];
    const connection = new Connection({
        address: "/runs/1/events", admitted: async (path) => path, cursor: () => null,
        onEvent: () => {}, silenceMs: 200,
        probe: async () => ({ found: "there" }), onState: (state) => window.states.push(state),
    });
    connection.start();
}
"""


@pytest.fixture
def own_visit(browser: Browser, api: Api, context_options: dict[str, Any]) -> Iterator[Visit]:
    """A tab on an API of the test's own, which may be killed."""
    yield from visiting(browser, api.url, context_options)


def sleeping(api: Api) -> int:
    answer = api.http.post("/runs", json=three_steps())
    assert answer.status_code == 201, answer.text
    return int(answer.json()["run_id"])


def three_steps() -> dict[str, Any]:
    """A call of the model between two tools."""
    middle = {"prompt": "The middle of three"}
    return {
        "goal": "To be interrupted",
        "steps": [
            {"name": "tool_call.first", "input": {"tool": "echo"}},
            {"name": "llm_call.middle", "input": middle, "dependsOn": ["tool_call.first"]},
            {"name": "tool_call.last", "input": {"tool": "echo"}, "dependsOn": ["llm_call.middle"]},
        ],
    }


def audit_of(api: Api, run_id: int) -> list[int]:
    return [entry["id"] for entry in api.http.get(f"/runs/{run_id}/audit").json()["audit"]]


def test_the_api_is_killed_and_comes_back_and_the_page_shows_it_and_misses_nothing(
    own_visit: Visit, api: Api, processes: Processes, fake: FakeOllama
) -> None:
    own_visit.expected += ["Failed to load resource", "WebSocket connection to"]
    fake.on("The middle", slow())
    processes.worker()
    run_id = sleeping(api)
    page = own_visit.open(run_id)
    expect(own_visit.step("llm_call.middle")).to_contain_text("executing")
    expect(page.locator("#connection-said")).to_contain_text("Live")
    marked = "document.getElementById('run-goal').dataset.marked = 'the same page'"
    page.evaluate(marked)
    port = int(api.url.rsplit(":", 1)[1])
    api.kill()
    expect(page.locator("#connection").get_by_role("status")).to_contain_text("Connection lost")
    expect(page.locator("#engine-word")).to_have_text("away")
    fake.release()  # the rest happens while nobody listens
    again = processes.api(port=port)
    expect(page.locator("#run-badge")).to_have_text("done")
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    expect(own_visit.step("llm_call.middle")).to_contain_text("echo: The middle of three")
    expect(page.locator("#engine-word")).to_have_text("idle")
    own_visit.expect_trail(audit_of(again, run_id))
    assert page.locator("#run-goal").get_attribute("data-marked") == "the same page"


def test_a_page_that_is_opened_while_the_api_is_away_says_so_and_shows_the_run_later(
    own_visit: Visit, api: Api, processes: Processes
) -> None:
    own_visit.expected += ["Failed to load resource", "WebSocket connection to"]
    run_id = sleeping(api)
    page = own_visit.open()
    expect(page.get_by_role("heading", name="No run is open")).to_be_visible()
    link = page.get_by_role("link", name="To be interrupted")
    expect(link).to_be_visible()
    port = int(api.url.rsplit(":", 1)[1])
    api.kill()
    link.click()
    expect(page.get_by_text("The API does not answer. Trying again…")).to_be_visible()
    again = processes.api(port=port)
    expect(page.get_by_role("heading", name="To be interrupted")).to_be_visible()
    expect(page.locator("#connection-said")).to_contain_text("Live")
    expect(page.locator("#trail-count")).to_have_text("4")
    own_visit.expect_trail(audit_of(again, run_id))


def test_a_cut_connection_is_resumed_behind_the_last_transition(visit: Visit, stack: Stack) -> None:
    addresses: list[str] = []
    visit.page.on("websocket", lambda socket: addresses.append(socket.url))
    gates = [{"name": "approval.one"}, {"name": "approval.two", "dependsOn": ["approval.one"]}]
    run_id = stack.submit(*gates)
    page = visit.page
    page.add_init_script(
        "const Real = WebSocket; window.WebSocket = class extends Real {"
        " constructor(...a) { super(...a); window.socket = this; } };"
    )
    visit.open(run_id)
    visit.step("approval.one").get_by_role("button", name="Approve").click()
    expect(visit.step("approval.two")).to_contain_text("needs approval")
    page.evaluate("window.socket.close()")
    expect(page.locator("#connection-said")).to_contain_text("Connection lost")
    expect(page.locator("#connection-said")).to_contain_text("Live")
    visit.step("approval.two").get_by_role("button", name="Approve").click()
    expect(page.locator("#run-badge")).to_have_text("done")
    visit.expect_trail(stack.trail(run_id))
    assert ["after=" in address for address in addresses] == [False, True]


def test_where_no_websocket_can_be_had_the_events_come_another_way(
    visit: Visit, stack: Stack
) -> None:
    page = visit.page
    page.add_init_script(NO_WEBSOCKET)
    run_id = stack.submit({"name": "approval.gate"}, {"name": "approval.other"})
    visit.open(run_id)
    expect(page.locator("#connection-said")).to_contain_text("Live")
    for name in ("approval.gate", "approval.other"):
        visit.step(name).get_by_role("button", name="Approve").click()
        expect(visit.step(name)).to_contain_text("approved")
    expect(page.locator("#run-badge")).to_have_text("done")
    expect(page.locator("#connection-said")).to_have_text("This run is over")
    visit.expect_trail(stack.trail(run_id))


def test_a_connection_that_has_gone_silent_is_given_up_and_made_anew(visit: Visit) -> None:
    page = visit.page
    page.add_init_script(SILENT_WEBSOCKET)
    visit.open()
    page.evaluate(FOLLOW)
    eventually(lambda: page.evaluate("window.sockets > 2"))
    assert page.evaluate("window.states.slice(0, 4)") == ["connecting", "live", "lost", "live"]

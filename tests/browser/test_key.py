"""The page where a key is needed: it asks for one, keeps it to itself, and says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from db import Connection
from tests.browser.conftest import Visit, visiting
from tests.browser.test_connection import NO_WEBSOCKET
from tests.support.keys import KeyHolder, holder, revoke
from tests.support.processes import Api, Processes
from tests.support.run_client import approval

if TYPE_CHECKING:
    from playwright.sync_api import Browser

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt"
).expect

REFUSED = ["Failed to load resource", "WebSocket connection to"]


@pytest.fixture
def api(processes: Processes) -> Api:
    processes.configure(limits={"key_cache_seconds": 0.05})
    return processes.api()


@pytest.fixture
def mine(conn: Connection, api: Api) -> KeyHolder:
    return holder(conn, api, "acme")


@pytest.fixture
def visit(
    browser: Browser, api: Api, mine: KeyHolder, context_options: dict[str, Any]
) -> Iterator[Visit]:
    """A tab on an API that wants a key."""
    yield from visiting(browser, api.url, context_options)


def give(visit: Visit, key: str) -> None:
    visit.page.get_by_label("API key").fill(key)
    visit.page.get_by_role("button", name="Use this key").click()


@pytest.mark.parametrize("script", ["", NO_WEBSOCKET], ids=["websocket", "server-sent events"])
def test_the_page_asks_for_a_key_and_follows_a_run_with_it_without_showing_it_to_anybody(
    visit: Visit, mine: KeyHolder, script: str
) -> None:
    visit.expected += REFUSED
    addresses: list[str] = []
    page = visit.page
    page.on("request", lambda request: addresses.append(request.url))
    page.on("websocket", lambda socket: addresses.append(socket.url))
    page.add_init_script(script)
    run = mine.submit_run(approval("approval.one"), approval("approval.two", "approval.one"))
    visit.open(run["run_id"])
    expect(page.get_by_role("heading", name="This API needs a key")).to_be_visible()
    expect(page.locator("#engine-word")).to_have_text("needs a key")
    expect(page.locator("#loading-lost")).to_have_text("Waiting for a key that the API accepts")
    expect(page.locator("#runs-said")).to_have_text("They show once there is a key.")
    give(visit, "my password")
    expect(page.get_by_role("alert").first).to_contain_text("a key begins with ak_")
    give(visit, f"{mine.key[:-1]}{'0' if mine.key[-1] != '0' else '1'}")
    expect(page.get_by_role("alert").first).to_contain_text("It was refused: this key is wrong.")
    give(visit, mine.key)
    expect(page.get_by_role("heading", name="a goal")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_hidden()
    expect(page.locator("#connection-said")).to_contain_text("Live")
    visit.step("approval.one").get_by_role("button", name="Approve").click()
    expect(visit.step("approval.two")).to_contain_text("needs approval")
    page.reload()
    visit.step("approval.two").get_by_role("button", name="Approve").click()
    expect(page.locator("#run-badge")).to_have_text("done")
    secret = mine.key[-64:]
    assert any("ticket=" in address for address in addresses)
    assert [address for address in addresses if secret in address] == []
    kept = "JSON.stringify([localStorage, document.cookie, document.body.outerHTML])"
    assert secret not in page.evaluate(kept)


def test_a_key_that_was_revoked_is_said_to_be_and_another_one_takes_its_place(
    visit: Visit, mine: KeyHolder, api: Api, conn: Connection
) -> None:
    visit.expected += REFUSED
    run = mine.submit_run(approval("approval.one"))
    page = visit.open(run["run_id"])
    give(visit, mine.key)
    expect(page.locator("#connection-said")).to_contain_text("Live")
    revoke(conn, mine.key)
    expect(
        page.get_by_text("The API refuses the key of this tab: this key was revoked.")
    ).to_be_visible()
    expect(page.locator("#engine-word")).to_have_text("needs a key")
    give(visit, holder(conn, api, "acme").key)
    expect(page.get_by_label("API key")).to_be_hidden()
    expect(page.locator("#connection-said")).to_contain_text("Live")
    page.get_by_role("button", name="Forget key").click()
    expect(page.get_by_role("heading", name="This API needs a key")).to_be_visible()
    expect(page.get_by_role("heading", name="a goal")).to_be_hidden()

"""A real browser in front of a real API, a real worker and a scripted model server."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.fake_ollama import FakeOllama
from tests.support.processes import Api, Processes, eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
STEP_SECONDS = 20  # the longest wait for something to show


@dataclass
class Stack:
    """What stands behind the page."""

    api: Api
    fake: FakeOllama

    def submit(self, *steps: dict[str, Any], goal: str = "a test") -> int:
        answer = self.api.http.post("/runs", json={"goal": goal, "steps": list(steps)})
        assert answer.status_code == 201, answer.text
        return int(answer.json()["run_id"])

    def run(self, run_id: int) -> dict[str, Any]:
        shown: dict[str, Any] = self.api.http.get(f"/runs/{run_id}").json()
        return shown

    def await_run(self, run_id: int, status: str) -> dict[str, Any]:
        def look() -> dict[str, Any]:
            run = self.run(run_id)
            assert run["status"] == status, run
            return run

        return eventually(look, what=f"run {run_id} is {status}")

    def trail(self, run_id: int) -> list[int]:
        """The ids of its transitions, as the API tells them."""
        path = f"/runs/{run_id}/audit"
        return [entry["id"] for entry in self.api.http.get(f"{path}?limit=200").json()["audit"]]


@dataclass
class Visit:
    """One tab, and what its console complained of."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # beginnings of what may be complained of

    def open(self, run_id: int | None = None) -> Page:
        self.page.goto(self.url if run_id is None else f"{self.url}/?run={run_id}")
        return self.page

    def step(self, name: str) -> Locator:
        """The list's row of a step."""
        return self.page.locator(".step").filter(has=self.page.get_by_text(name, exact=True))

    def opener(self, name: str) -> Locator:
        """The button of that row, which bears the step's name."""
        return self.page.locator(".step").get_by_role("button", name=f"{name}, ")

    def expect_trail(self, ids: list[int]) -> None:
        """Until the page shows exactly these transitions, from top to bottom."""
        script = "rows => rows.map(row => Number(row.dataset.id))"

        def look() -> bool:
            assert self.page.locator("#trail tr").evaluate_all(script) == ids
            return True

        eventually(look, STEP_SECONDS, f"the audit trail is {ids}")

    def submit(self, text: str) -> None:
        self.page.get_by_label("The run, as JSON").fill(text)
        self.page.get_by_role("button", name="Submit run").click()

    def unexpected(self) -> list[str]:
        return [said for said in self.complaints if not said.startswith(tuple(self.expected))]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium without a window; it is gone when the last test of this folder has ended."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)}")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("needs playwright: pip install -r requirements-dev.txt")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=STEP_SECONDS * 1000)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="package")
def stack(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One API and one worker for all tests that stop neither."""
    folder = tmp_path_factory.mktemp("browser")
    with (
        fresh_database(server_url) as database,
        FakeOllama() as fake,
        Processes(database, fake.url, folder) as processes,
    ):
        api = processes.api()
        processes.worker()
        yield Stack(api, fake)


@pytest.fixture
def context_options() -> dict[str, Any]:
    """How the browser is; a test parametrizes it for a phone or the dark."""
    return {"viewport": {"width": 1280, "height": 900}}


@pytest.fixture
def visit(browser: Browser, stack: Stack, context_options: dict[str, Any]) -> Iterator[Visit]:
    """A fresh tab; a test fails when its console complained of anything unexpected."""
    yield from visiting(browser, stack.api.url, context_options)


def visiting(browser: Browser, url: str, options: dict[str, Any]) -> Iterator[Visit]:
    context = browser.new_context(**options)
    context.set_default_timeout(STEP_SECONDS * 1000)
    page = context.new_page()
    visit = Visit(page, url)
    page.on(
        "console",
        lambda said: visit.complaints.append(said.text) if said.type != "log" else None,
    )
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    yield visit
    if folder := os.environ.get("SCREENSHOTS"):  # to look at
        name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)
    context.close()
    assert visit.unexpected() == []


@pytest.fixture
def http(stack: Stack) -> httpx.Client:
    return stack.api.http

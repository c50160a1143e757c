"""The page's looks: readable in light and dark, whole on a phone, still for those who want it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Stack, Visit

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt"
).expect

PHONE = {"width": 360, "height": 740}
LOOKS = (
    "blocked", "queued", "executing", "retrying", "paused", "waiting", "done", "failed",
    "cancelled",
)  # fmt: skip

# For each element: its text, and the contrast of its colour to what is really behind it.
CONTRASTS = """
elements => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const color = rgba(getComputedStyle(at).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255, 255];
    };
    const light = (color) => {
        const [r, g, b] = color.slice(0, 3).map((value) => value / 255)
            .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (element) => {
        const fill = element instanceof SVGElement;
        const ink = light(rgba(getComputedStyle(element)[fill ? "fill" : "color"]));
        const box = fill && element.parentElement.querySelector("rect");
        const paper = light(box ? rgba(getComputedStyle(box).fill) : ground(element));
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    };
    return elements
        .filter((element) => element.checkVisibility() && element.textContent.trim())
        .map((element) => [element.textContent, contrast(element)]);
}
"""
FOCUSED = """
() => {
    const at = document.activeElement;
    const shows = (style) => style.outlineStyle !== "none" && style.outlineWidth !== "0px";
    const box = at.querySelector("rect");
    return at === document.body ? null : {
        name: at.ariaLabel || at.innerText || at.labels?.[0]?.innerText || "",
        shown: shows(getComputedStyle(at)) || shows(getComputedStyle(at, "::after"))
            || (box !== null && getComputedStyle(box).strokeWidth === "3px"),
    };
}
"""
MOST_TABS = 100
TEXTS = (
    ".badge, .hint, .figures, h1, h2, h3, h4, label, button, td, th, dt, dd, pre, a, .step-note,"
    " .step-tries, .step-seconds, .step-worker, .run-facts span, .connection p, textarea, time,"
    " .node text, .error-text"
)


@pytest.fixture
def context_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen = getattr(request, "param", {})
    return {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **chosen}


def open_varied_run(visit: Visit, stack: Stack) -> None:
    """A run with steps done, failed, cancelled, retrying and waiting for a person."""
    long = "a-long-name-without-a-place-to-break-it-anywhere-at-all-0123456"
    flaky = {"tool": "flaky", "args": {"failures": 9}}
    wrong = {"tool": "fetch_data", "args": {"name": "nothing"}}
    run_id = stack.submit(
        {"name": f"tool_call.{long}", "input": {"tool": "echo", "args": {"x": "y" * 3000}}},
        {"name": "tool_call.flaky", "input": flaky},
        {"name": "tool_call.wrong", "input": wrong},
        {"name": "tool_call.after", "input": wrong, "dependsOn": ["tool_call.wrong"]},
        {"name": "approval.gate", "input": {"question": "w" * 200}},
        {"name": "tool_call.last", "input": wrong, "dependsOn": ["approval.gate"]},
        goal=f"Everything at once {long * 2}",
    )
    visit.open(run_id)
    for name in (long, "tool_call.wrong", "approval.gate"):
        visit.page.locator(".step-open", has_text=name).click()
    for look in ("done", "retrying", "failed", "cancelled", "waiting", "blocked"):
        expect(visit.page.locator(f".step[data-look={look}]")).to_have_count(1)


@pytest.mark.parametrize(
    "context_options", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True,
    ids=["light", "dark"],
)  # fmt: skip
def test_every_text_stands_out_from_its_ground(visit: Visit, stack: Stack) -> None:
    page = visit.open()
    expect(page.locator("#legend .badge")).to_have_count(len(LOOKS))
    legend = page.locator("#legend .badge").evaluate_all(CONTRASTS)
    assert len(legend) == len(LOOKS)
    open_varied_run(visit, stack)
    texts = page.locator(TEXTS).evaluate_all(CONTRASTS)
    assert len(texts) > 100
    faint = {text[:60]: round(ratio, 2) for text, ratio in [*legend, *texts] if ratio < 4.5}
    assert faint == {}


def test_the_dark_page_is_dark(browser: Any, stack: Stack) -> None:
    def ground(scheme: str) -> str:
        with browser.new_context(color_scheme=scheme) as context:
            page = context.new_page()
            page.goto(stack.api.url)
            color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
            return color

    assert ground("light") != ground("dark")


@pytest.mark.parametrize("context_options", [{"viewport": PHONE}], indirect=True, ids=["phone"])
def test_a_phone_shows_all_without_sideways_scrolling(visit: Visit, stack: Stack) -> None:
    width = "document.documentElement.scrollWidth"
    page = visit.open()
    expect(page.locator("#legend .badge").first).to_be_visible()
    assert page.evaluate(width) == PHONE["width"]
    open_varied_run(visit, stack)
    assert page.evaluate(width) == PHONE["width"]
    # What can be pressed can be hit: nothing of it lies outside.
    outside = page.locator("button:visible, a:visible").evaluate_all(
        "(all, width) => all.filter(one => one.getBoundingClientRect().right > width).length",
        PHONE["width"],
    )
    assert outside == 0


def test_states_are_told_by_word_and_mark_and_nothing_moves_for_those_who_ask(
    visit: Visit, stack: Stack
) -> None:
    open_varied_run(visit, stack)
    page = visit.page
    for badge in page.locator(".steps .badge").all():
        look = badge.locator("use").get_attribute("href")
        assert look == f"#mark-{badge.get_attribute('data-look')}"
        assert page.locator(str(look)).count() == 1
        assert badge.inner_text().strip()
    assert page.evaluate("document.getAnimations().length") == 0


def test_everything_that_takes_the_focus_shows_it_and_has_a_name(
    visit: Visit, stack: Stack
) -> None:
    open_varied_run(visit, stack)
    page = visit.page
    page.locator(".skip").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")  # now it is the keyboard's focus, and not a script's
    seen = []
    while (stop := page.evaluate(FOCUSED)) is not None and len(seen) < MOST_TABS:
        seen.append(stop)
        page.keyboard.press("Tab")
    names = " ".join(stop["name"] for stop in seen)
    for part in (
        "Skip to",
        "The run, as JSON",
        "Submit run",
        "Cancel run",
        "Approve",
        "Run it again",
    ):
        assert part in names, names
    assert [stop for stop in seen if not stop["shown"] or not stop["name"].strip()] == []

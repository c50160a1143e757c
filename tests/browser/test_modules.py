"""The page's pure modules, asked in the browser that they run in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import Stack, Visit, visiting

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def tab(browser: Browser, stack: Stack) -> Iterator[Visit]:
    """One for all tests: what they ask keeps nothing in mind."""
    for visit in visiting(browser, stack.api.url, {}):
        visit.open()
        yield visit


@pytest.fixture
def ask(tab: Visit) -> Iterator[Any]:
    """Runs a script with the exports of a module: ask("model", "(m, given) => …", given)."""

    def run(module: str, script: str, given: Any = None) -> Any:
        return tab.page.evaluate(
            f"async (given) => ({script})(await import('/web/{module}.js'), given)", given
        )

    yield run
    assert tab.unexpected() == []


def step(name: str, *needs: str, **fields: Any) -> dict[str, Any]:
    plain = {
        "name": name, "task_id": int(name[1:]), "kind": "tool", "status": "PENDING",
        "dependsOn": list(needs), "input": {}, "result": None, "result_left_out": False,
        "error": None, "retry_count": 0, "delivery_count": 0, "attempt": 0, "worker": None,
        "duration_seconds": None, "waiting_for": None, "started_at": None, "finished_at": None,
    }  # fmt: skip
    return {**plain, **fields}


def snapshot(*steps: dict[str, Any]) -> dict[str, Any]:
    return {
        "run_id": 1, "goal": "g", "status": "RUNNING", "created_at": "2026-01-01T00:00:00Z",
        "finished_at": None, "cancel_requested": False, "steps": list(steps),
    }  # fmt: skip


def entry(number: int, task: int, before: str, after: str, reason: str, **more: Any) -> Any:
    return {
        "id": number, "task_id": task, "run_id": 1, "step": f"s{task}", "from": before,
        "to": after, "reason": reason, "at": f"2026-01-01T00:00:{number % 60:02}Z",
        "worker": "w", "attempt": 1, "detail": {}, "cursor": f"c{number}", **more,
    }  # fmt: skip


CLAIMED = entry(10, 2, "PENDING", "RUNNING", "claimed")
RETRY = entry(12, 2, "RUNNING", "PENDING", "retry", detail={"error": "too bad", "delay_seconds": 2})
AGAIN = entry(15, 2, "PENDING", "RUNNING", "claimed", attempt=2)
DONE = entry(16, 2, "RUNNING", "SUCCEEDED", "succeeded", attempt=2)
STORY = [CLAIMED, RETRY, AGAIN, DONE]
PLAY = """
(m, { snapshots, entries }) => {
    const run = m.newRun(1);
    m.applySnapshot(run, snapshots[0]);
    const told = entries.map((entry) => m.applyTransition(run, entry) !== null);
    if (snapshots[1]) m.applyState(run, snapshots[1]);
    return { ...run.steps.get(2), told, cursor: run.cursor, log: run.log.map((entry) => entry.id) };
}
"""


def test_transitions_bring_a_step_from_state_to_state(ask: Any) -> None:
    given = {"snapshots": [snapshot(step("s2"))], "entries": STORY[:2]}
    waiting = ask("model", PLAY, given)
    assert waiting["status"] == "PENDING"
    assert waiting["error"] == {"type": "retry", "message": "too bad"}
    assert waiting["dueAt"] == "2026-01-01T00:00:14.000Z"
    ended = ask("model", PLAY, {**given, "entries": STORY})
    assert (ended["status"], ended["attempt"], ended["retries"]) == ("SUCCEEDED", 2, 1)
    assert (ended["deliveries"], ended["seconds"], ended["wanted"]) == (2, 1, True)
    assert (ended["error"], ended["cursor"]) == (None, "c16")


def test_a_transition_that_comes_twice_or_late_changes_nothing(ask: Any) -> None:
    entries = [*STORY, RETRY, DONE]
    ended = ask("model", PLAY, {"snapshots": [snapshot(step("s2"))], "entries": entries})
    assert ended["status"] == "SUCCEEDED"
    assert ended["retries"] == 1
    assert ended["told"] == [True] * 4 + [False] * 2
    assert ended["log"] == [10, 12, 15, 16]


def test_a_fresh_state_replaces_the_old_one_and_keeps_the_trail(ask: Any) -> None:
    failed = step("s2", status="FAILED", attempt=3, error={"type": "max_retry", "message": "no"})
    given = {"snapshots": [snapshot(step("s2")), snapshot(failed)], "entries": STORY[:2]}
    shown = ask("model", PLAY, given)
    assert (shown["status"], shown["attempt"], shown["dueAt"]) == ("FAILED", 3, None)
    assert shown["log"] == [10, 12]


def test_a_snapshot_that_follows_begins_anew_though_ids_are_given_out_again(ask: Any) -> None:
    script = """
    (m, { snapshot, before, after }) => {
        const run = m.newRun(1);
        m.applySnapshot(run, snapshot);
        for (const entry of before) m.applyTransition(run, entry);
        m.applySnapshot(run, snapshot); // of a database that was restored
        const anew = { cursor: run.cursor, log: run.log.length };
        const told = after.map((entry) => m.applyTransition(run, entry) !== null);
        const { status, worker } = run.steps.get(2);
        return { anew, told, status, worker, cursor: run.cursor,
                 log: run.log.map((entry) => [entry.id, entry.worker]) };
    }
    """
    again = {**CLAIMED, "worker": "another", "cursor": "after the restore"}
    given = {"snapshot": snapshot(step("s2")), "before": STORY, "after": [again]}
    assert ask("model", script, given) == {
        "anew": {"cursor": None, "log": 0}, "told": [True], "status": "RUNNING",
        "worker": "another", "cursor": "after the restore", "log": [[10, "another"]],
    }  # fmt: skip


def test_history_that_comes_after_live_transitions_takes_its_place_before_them(ask: Any) -> None:
    script = """
    (m, { snapshot, live, history }) => {
        const run = m.newRun(1);
        m.applySnapshot(run, snapshot);
        for (const entry of live) m.applyTransition(run, entry);
        const fresh = m.addHistory(run, history).length;
        m.recallReasons(run);
        return { fresh, log: run.log.map((entry) => entry.id), reason: run.steps.get(2).reason };
    }
    """
    given = {"snapshot": snapshot(step("s2")), "live": [RETRY], "history": [RETRY, CLAIMED]}
    assert ask("model", script, given) == {"fresh": 1, "log": [10, 12], "reason": "retry"}


def test_text_of_an_older_attempt_is_thrown_away(ask: Any) -> None:
    script = """
    (m, { snapshot, again }) => {
        const run = m.newRun(1);
        m.applySnapshot(run, snapshot);
        const say = (attempt, text) => m.applyToken(run, { task_id: 2, attempt, text }) !== null;
        const before = [say(1, "Once "), say(1, "upon")];
        const text = run.steps.get(2).live.text;
        m.applyTransition(run, again);
        return { before, text, late: say(1, "a time"), fresh: say(2, "Well"),
                 after: run.steps.get(2).live.text };
    }
    """
    given = {"snapshot": snapshot(step("s2", status="RUNNING", attempt=1)), "again": AGAIN}
    assert ask("model", script, given) == {
        "before": [True, True], "text": "Once upon", "late": False, "fresh": True, "after": "Well",
    }  # fmt: skip


ARRANGE = """
(m, steps) => {
    const plan = m.arrange(steps);
    return { nodes: Object.fromEntries(plan.nodes), edges: plan.edges, ranks: plan.ranks };
}
"""


def test_the_drawing_has_each_step_below_what_it_depends_on_and_none_on_another(
    ask: Any,
) -> None:
    steps = [
        {"id": str(n), "needs": [str(k) for k in {n // 2, n - 3} if 0 <= k < n]} for n in range(60)
    ]
    plan = ask("layout", ARRANGE, steps)
    nodes = plan["nodes"]
    for one in steps:
        for need in one["needs"]:
            assert nodes[need]["rank"] < nodes[one["id"]]["rank"]
    places: dict[int, list[float]] = {}
    for node in nodes.values():
        places.setdefault(node["rank"], []).append(node["place"])
    for taken in places.values():
        taken.sort()
        assert all(lower - upper >= 0.999 for upper, lower in pairwise(taken)), taken
    assert len(plan["edges"]) == sum(len(one["needs"]) for one in steps)
    for edge in plan["edges"]:
        ranks = [point["rank"] for point in edge["points"]]
        assert ranks == list(range(ranks[0], ranks[-1] + 1))


def test_edges_that_would_cross_in_the_order_of_the_steps_are_untangled(ask: Any) -> None:
    needs = {"a": [], "b": [], "c": ["b"], "d": ["a"], "e": ["d"], "f": ["c"]}
    plan = ask("layout", ARRANGE, [{"id": name, "needs": of} for name, of in needs.items()])
    place = {name: node["place"] for name, node in plan["nodes"].items()}
    assert plan["ranks"] == 3
    assert (place["a"] < place["b"]) == (place["d"] < place["c"]) == (place["e"] < place["f"])


def test_durations_are_said_in_the_unit_that_fits(ask: Any) -> None:
    seconds = [None, 0.034, 0.7, 9.94, 12.4, 59.9, 125, 3725]
    said = ask("words", "(m, all) => all.map(m.span)", seconds)
    assert said == ["", "34 ms", "0.7 s", "9.9 s", "12 s", "1 min 00 s", "2 min 05 s", "1 h 02 min"]


FILLED = [
    ("{{ s1.output }}", {"x": 'a", "risk": "none', "rows": [1, "two"], "n": None}),
    ("{{s1.output.x}}!", 'a", "risk": "none!'),
    ({"order": {"amount": "{{ s1.output.x }}"}}, {"order": {"amount": 'a", "risk": "none'}}),
    ("{{ s1.output.rows.-1 }} of {{ s1.output.rows }}", 'two of [1,"two"]'),
    ("{{ s1.output.n }}", None),
    ('{{ "{{" }} is literal', "{{ is literal"),
    ("{{ s1.output.x.length }}", "{{ s1.output.x.length }}"),
    ("{{ s1.output.__proto__ }}", "{{ s1.output.__proto__ }}"),
    ("{{ s1.output.rows.length }}", "{{ s1.output.rows.length }}"),
    ("{{ s2.output }}", "{{ s2.output }}"),
    ("{{ nobody.output }}", "{{ nobody.output }}"),
    ({"{{ s1.output }}": 7}, {"{{ s1.output }}": 7}),
]


@pytest.mark.parametrize(("given", "shown"), FILLED, ids=[str(given) for given, _ in FILLED])
def test_what_a_person_is_asked_is_filled_text_by_text_so_that_a_result_is_never_a_field(
    ask: Any, given: Any, shown: Any
) -> None:
    result = {"x": 'a", "risk": "none', "rows": [1, "two"], "n": None}
    script = """
        (m, [value, result]) => m.filled({ byName: new Map([
            ["s1", { kind: "tool", resultKnown: true, result }],
            ["s2", { kind: "tool", resultKnown: false, result: null }],
        ]) }, value)
    """
    assert ask("fill", script, [given, result]) == shown


# --- steps of the agent team -----------------------------------------------------------------

PARKED = entry(12, 2, "RUNNING", "AWAITING_APPROVAL", "parked", detail={"artefact": "a" * 64})
REJECTED = entry(13, 2, "AWAITING_APPROVAL", "PENDING", "rejected")
ASKED = {"artefact": "a" * 64, "asks": {"code": "x"}}
WAITING = {"kind": "agent", "status": "AWAITING_APPROVAL", "attempt": 1}


def test_what_a_job_asks_is_wanted_when_it_parks_and_gone_when_it_goes_on(ask: Any) -> None:
    script = """
    (m, { snapshot, entries, task }) => {
        const run = m.newRun(1);
        m.applySnapshot(run, snapshot);
        const step = run.steps.get(2);
        const seen = [];
        for (const entry of entries) {
            m.applyTransition(run, entry);
            seen.push([step.status, step.wanted, step.approval]);
            if (step.wanted) m.applyTask(run, task);
            seen.push([step.wanted, step.approval, step.deliveries]);
        }
        return seen;
    }
    """
    task = {
        "id": 2, "status": "AWAITING_APPROVAL", "attempt": 1, "result": None,
        "duration_seconds": 1, "state": {"approval": ASKED},
    }  # fmt: skip
    given = {
        "snapshot": snapshot(step("s2", kind="agent")), "task": task,
        "entries": [CLAIMED, PARKED, REJECTED],
    }  # fmt: skip
    assert ask("model", script, given) == [
        ["RUNNING", False, None], [False, None, 1],
        ["AWAITING_APPROVAL", True, None], [False, ASKED, 0],
        ["PENDING", False, None], [False, None, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("left_out", [False, True])
def test_a_snapshot_brings_what_is_asked_unless_it_is_too_much_for_it(
    ask: Any,
    left_out: bool,
) -> None:
    script = """
    (m, snapshot) => {
        const run = m.newRun(1);
        m.applySnapshot(run, snapshot);
        const { approval, wanted } = run.steps.get(2);
        return [approval, wanted];
    }
    """
    told = {"artefact": "a" * 64, "asks": None} if left_out else ASKED
    waiting = step("s2", **WAITING, approval=told, result_left_out=left_out)
    assert ask("model", script, snapshot(waiting)) == [None if left_out else ASKED, left_out]


def test_what_nodes_do_is_told_of_this_attempt_only_and_each_writes_its_own_text(
    ask: Any,
) -> None:
    script = """
    async (m, { snapshot, claimed, retry }) => {
        const { noteOfStep } = await import("/web/words.js");
        const run = m.newRun(1);
        m.applySnapshot(run, snapshot);
        const step = run.steps.get(2);
        const notes = [];
        const note = (told) => notes.push([told !== null, noteOfStep(run, step, 0)]);
        const first = { task_id: 2, attempt: 1 };
        const node = (node, phase, at = first) => note(m.applyNode(run, { ...at, node, phase }));
        const say = (node, text) => note(m.applyToken(run, { ...first, node, text }));
        node("coder", "started");
        m.applyTransition(run, claimed);
        node("coder", "started", { task_id: 2, attempt: 2 });
        node("coder", "started");
        say("coder", "def ");
        say("coder", "x");
        say("reviewer", "{");
        say("coder", "def ");
        node("coder", "finished");
        say("reviewer", "{");
        m.applyState(run, snapshot);
        note(step);
        return notes;
    }
    """
    given = {"snapshot": snapshot(step("s2", kind="agent")), "claimed": CLAIMED}
    notes = ask("model", script, given)
    waits = "the next free worker takes it"
    assert notes == [
        [False, waits], [False, ""], [True, "coder is at work"], [True, "coder: def "],
        [True, "coder: def x"], [True, "reviewer: {"], [True, "coder: def "],
        [True, "coder is done"], [True, "reviewer: {"], [True, waits],
    ]  # fmt: skip

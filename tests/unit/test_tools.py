"""execution/tools: what a tool gets, returns and raises, and how it is stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from config import ConfigError, Settings
from execution.errors import CallEnded, Failure, Permanent
from execution.routes import Routes
from execution.runner import Finished, Runner
from execution.tool import ToolCalls
from execution.tools import ToolContext
from execution.tools.functions import FunctionTool, load_function
from execution.tools.threads import Thread, _Caller
from queries.leases import ClaimedTask, Lease, Outcome
from runs.templates import Reference, fill
from scheduler import decide_route
from tests.conftest import settings_for
from tests.support import sample_tools
from tests.support.processes import eventually

TOKEN = "00000000-0000-4000-8000-000000000000"
SAMPLES = [
    "add", "add_async", "typed", "numbers", "counted", "told", "greet", "decorated", "give", "fail",
    "fail_async", "cancel_itself", "exit_from_a_task_of_its_own", "listen", "deaf", "deaf_async",
    "block", "marked", "note", "leave_a_task_behind", "fail_slowly",
]  # fmt: skip
SETTINGS = settings_for(
    "postgresql://nobody@nowhere/none",
    tools={name: f"tests.support.sample_tools:{name}" for name in SAMPLES},
    limits={"max_result_bytes": 1000},
)


def task_of(tool: Any, args: Any, number: int = 7, **fields: Any) -> ClaimedTask:
    payload = {"tool": tool, "args": args}
    task = ClaimedTask(Lease(number, TOKEN), number, "tool", payload, "none", None, 1, 1, 0)
    return dataclasses.replace(task, **fields)


def step_of(tool: str, args: Any, outputs: dict[Reference, Any], attempt: int = 1) -> ClaimedTask:
    return task_of(
        tool, args, lease=Lease(7, TOKEN, 3), step="tool_call.it", outputs=outputs, attempt=attempt
    )


async def outcome_of(task: ClaimedTask, settings: Settings = SETTINGS) -> Outcome:
    calls = ToolCalls(settings)
    try:
        return await calls.run(task)
    finally:
        await calls.close()


async def begun_and_outcome(
    task: ClaimedTask, settings: Settings = SETTINGS
) -> tuple[Outcome | Thread[Any] | None, Outcome]:
    """What is there when a call was begun, and what comes of it."""
    calls = ToolCalls(settings)
    begun = calls.begin(task, lambda outcome: None, lambda: None)
    return begun, begun if isinstance(begun, Outcome) else await calls.run(task, begun)


def call(tool: Any, settings: Settings = SETTINGS, **args: Any) -> Any:
    """The result of one call."""
    outcome = asyncio.run(outcome_of(task_of(tool, args), settings))
    assert outcome.verdict == "succeeded"
    return outcome.result


def refused(tool: Any, **args: Any) -> str:
    """Why a call is never going to succeed."""
    with pytest.raises(Permanent) as ended:
        call(tool, **args)
    return str(ended.value)


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["add", "add_async"])
def test_a_plain_and_an_async_function_get_their_arguments_and_defaults(tool: str) -> None:
    assert (call(tool, a=1), call(tool, a=1, b=5)) == (3, 6)


def test_arguments_become_what_the_parameters_say() -> None:
    address = {"street": "Lane", "number": 5}
    got = call("typed", day="2026-02-03", share=1, address=address, tags=["a"])
    assert got == ["2026-02-03", 1.0, "Lane", "fast", ["a"]]


def test_a_function_may_take_arguments_of_any_name_and_objects_may_be_functions() -> None:
    assert call("numbers", x=1, y=2, function=3) == 6
    assert call("greet", name="Ada") == "Hello, Ada"
    assert call("decorated", a=4) == 4
    assert "y: " in refused("numbers", x=1, y="2")
    assert call("counted", x=5) == [1, 5]
    assert "there is no call" in refused("counted", x=5, call=6)


WRONG = {
    "missing": ("add", {}, "a is missing"),
    "unknown": ("add", {"a": 1, "c": 2}, "there is no c"),
    "a text for a number": ("add", {"a": "1"}, "a: "),
    "a truth value for a number": ("add", {"a": True}, "a: "),
    "a fraction for a whole number": ("add", {"a": 1.5}, "a: "),
    "nothing for a number": ("add", {"a": None}, "a: "),
    "the context": ("told", {"word": "w", "call": {}}, "there is no call"),
    "deep inside": (
        "typed",
        {"day": "2026-02-03", "share": 0.5, "address": {"street": "s", "number": "x"}},
        "address.number: ",
    ),
    "out of bounds": (
        "typed",
        {"day": "2026-02-03", "share": 2, "address": {"street": "", "number": 1}},
        "share: ",
    ),
    "all at once": ("typed", {"day": 5, "mode": "x"}, "address is missing"),
}  # fmt: skip


@pytest.mark.parametrize(("tool", "args", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_permanent_and_named(tool: str, args: Any, says: str) -> None:
    said = refused(tool, **args)
    assert f"the arguments of the tool {tool} are refused: " in said
    assert says in said


def test_every_wrong_argument_is_named_up_to_five() -> None:
    said = refused("typed", day=5, mode="x")
    for name in ("day", "mode", "share is missing", "address is missing"):
        assert name in said
    assert refused("add", **{f"x{n}": 1 for n in range(1000)}).count("there is no") <= 5
    assert len(refused("add", **{"n" * 100_000: 1})) < 1000


@pytest.mark.parametrize("args", [[1], "a", 5, True])
def test_arguments_that_are_no_object_are_permanent(args: Any) -> None:
    with pytest.raises(Permanent, match="an object"):
        asyncio.run(outcome_of(task_of("echo", args)))


def test_no_arguments_are_an_empty_object() -> None:
    assert asyncio.run(outcome_of(task_of("echo", None))).result == {}
    assert call("fetch_data")["rows"]


@pytest.mark.parametrize("tool", ["nope", None, 5, ["echo"], ""])
def test_a_tool_that_is_not_there_is_a_failure_and_the_others_are_named(tool: Any) -> None:
    with pytest.raises(Failure) as failed:
        call(tool)
    assert repr(str(tool)) in str(failed.value)
    assert "echo, " in str(failed.value)


def test_a_function_is_told_a_key_that_stays_and_an_attempt_that_counts() -> None:
    first = asyncio.run(outcome_of(step_of("told", {"word": "w"}, {}, attempt=1))).result
    second = asyncio.run(outcome_of(step_of("told", {"word": "w"}, {}, attempt=2))).result
    assert first == {"word": "w", "key": "3:tool_call.it", "attempt": 1}
    assert second == {**first, "attempt": 2}
    assert call("told", word="w")["key"] == "task:7"


# --- templates -------------------------------------------------------------------------------


def test_a_step_s_arguments_are_filled_in_and_keep_their_types() -> None:
    outputs = {Reference("n"): 40, Reference("t"): "{{ n.output }}"}
    got = asyncio.run(outcome_of(step_of("add", {"a": "{{ n.output }}"}, outputs))).result
    assert got == 42
    echoed = step_of("echo", {"a": ["{{ t.output }}", "is {{ n.output }}"]}, outputs)
    assert asyncio.run(outcome_of(echoed)).result == {"a": ["{{ n.output }}", "is 40"]}


def test_a_lone_task_s_arguments_are_never_templates() -> None:
    assert call("echo", a="{{ n.output }} {{") == {"a": "{{ n.output }} {{"}


def test_what_cannot_be_filled_in_is_permanent() -> None:
    for args, says in (({"a": "{{ n.output }}"}, "n.output"), ({"a": "{{ n }}"}, "{{ n }}")):
        with pytest.raises(Permanent, match=says.replace("{", r"\{")):
            asyncio.run(outcome_of(step_of("echo", args, {})))
    many = step_of("echo", {"a": ["{{ n.output }}"] * 11}, {Reference("n"): "x" * 98})
    with pytest.raises(Permanent, match="more than 1000 bytes"):
        asyncio.run(outcome_of(many))


# --- results ---------------------------------------------------------------------------------


def test_a_result_is_json_and_what_postgres_cannot_hold_is_replaced_at_any_depth() -> None:
    assert call("give", what="nothing") is None
    assert call("give", what="tuple") == [1, 2.5, True, "ü"]
    assert call("give", what="dirty") == {"a\ufffdb": ["c\ufffdd", {"\ufffd": "\ufffd"}]}


BAD_RESULTS = {
    "nan": "nan",
    "infinity": "-inf",
    "set": "a set",
    "bytes": "a bytes",
    "object": "an? object",
    "class": "a type",
    "number key": "a key is a int",
    "endless": "deeper than 100|larger",
    "wide": "larger than limits.max_result_bytes",
    "deep": "deeper than 100",
    "huge number": "thousands of digits",
    "large": r"larger than limits.max_result_bytes \(1000 bytes\)",
    "large key": "larger",
    "many": "larger",
}


@pytest.mark.parametrize(("what", "says"), BAD_RESULTS.items())
def test_a_result_that_cannot_be_kept_is_permanent(what: str, says: str) -> None:
    begun = time.process_time()
    with pytest.raises(Permanent, match=says):
        call("give", what=what)
    assert time.process_time() - begun < 5


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["fail", "fail_async"])
@pytest.mark.parametrize("how", [how for how in sample_tools.ERRORS if how != "permanent"])
def test_whatever_a_tool_raises_is_a_failure_of_its_task(tool: str, how: str) -> None:
    with pytest.raises(Failure) as ended:
        call(tool, how=how)
    # Of a StopIteration Python itself makes a RuntimeError that names it.
    assert type(sample_tools.ERRORS[how]()).__name__ in str(ended.value)


@pytest.mark.parametrize("tool", ["fail", "fail_async"])
def test_the_documented_permanent_error_is_permanent(tool: str) -> None:
    assert refused(tool, how="permanent") == "no such customer"


def test_a_tool_that_cancels_itself_is_a_failure_and_not_a_release() -> None:
    with pytest.raises(Failure, match="CancelledError"):
        call("cancel_itself")


# --- deadline, cancel, stuck threads ---------------------------------------------------------


@pytest.fixture
def runner() -> Iterator[Runner]:
    sample_tools.RELEASED.clear()
    sample_tools.SEEN.clear()
    runner = Runner(SETTINGS, Routes(SETTINGS.routing, decide_route), lambda: None, lambda *_: None)
    runner.open()
    yield runner
    sample_tools.RELEASED.set()
    runner.close()


def finished(runner: Runner, seconds: float = 30) -> tuple[int, Outcome]:
    taken: list[Finished] = eventually(runner.take_finished, seconds)
    ((lease, outcome),) = taken
    return lease.task_id, outcome


@pytest.mark.parametrize("tool", ["listen", "deaf", "deaf_async", "block", "sleep"])
def test_a_deadline_is_kept_whether_the_tool_listens_or_not(
    runner: Runner, tool: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"seconds": 600} if tool == "sleep" else {}
    # Long enough for the tool to have begun, on a busy machine too.
    runner.start(task_of(tool, args, timeout_seconds=1.0), None)
    assert finished(runner)[1].verdict == "deadline"
    if tool in ("deaf", "deaf_async", "block"):
        eventually(lambda: "does not listen" in caplog.text)
        assert "ask 7" in caplog.text
    if tool == "deaf_async":
        eventually(lambda: sample_tools.SEEN == ["deaf_async: heard and went on"])
    elif tool == "listen":
        eventually(lambda: sample_tools.SEEN == ["listen: True, True"])


@pytest.mark.parametrize("tool", ["listen", "deaf", "deaf_async", "block", "sleep"])
def test_a_cancelled_tool_is_told_and_not_waited_for(runner: Runner, tool: str) -> None:
    args = {"seconds": 600} if tool == "sleep" else {}
    task = task_of(tool, args)
    runner.start(task, None)
    runner.start(task_of("add", {"a": 1}, number=8), None)
    assert finished(runner)[0] == 8
    runner.stop([task.lease])
    assert finished(runner)[1].verdict == "released"
    if tool == "listen":
        eventually(lambda: sample_tools.SEEN == ["listen: True, True"])


def test_a_tool_that_listens_is_not_called_deaf(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.start(task_of("listen", {}, timeout_seconds=0.1), None)
    runner.start(task_of("deaf", {}, number=8, timeout_seconds=0.2), None)
    eventually(lambda: "does not listen" in caplog.text)
    assert "task 7" not in caplog.text


def test_fifty_stuck_threads_hold_nobody_up(runner: Runner) -> None:
    for number in range(100, 150):
        runner.start(task_of("deaf", {}, number=number), None)
    eventually(lambda: sum("task 1" in one.name for one in threading.enumerate()) == 50)
    runner.start(task_of("add", {"a": 1}), None)
    assert finished(runner)[1].result == 3


@pytest.mark.parametrize("tool", ["block", "fail_slowly"])
def test_a_tool_that_blocks_its_event_loop_holds_nobody_up(runner: Runner, tool: str) -> None:
    runner.start(task_of(tool, {}, timeout_seconds=1), None)
    runner.start(task_of("add_async", {"a": 1}, number=8), None)
    assert finished(runner)[0] == 8
    number, outcome = finished(runner)
    assert (number, outcome.verdict) == (7, "deadline")


def test_a_tool_that_exits_from_a_task_of_its_own_leaves_the_worker_alive(runner: Runner) -> None:
    runner.start(task_of("exit_from_a_task_of_its_own", {}), None)
    outcome = finished(runner)[1]
    assert (outcome.verdict, outcome.error) == ("failure", "SystemExit: 3")
    runner.start(task_of("add", {"a": 1}), None)
    assert finished(runner)[1].result == 3


@pytest.mark.parametrize(
    ("args", "is_quick"),
    [
        ({}, True),
        ({"seq": 1, "pad": "x" * 176, "list": [1, {"a": None}]}, True),
        ({"Grüße": "🙂" * 1000}, True),
        ({"pad": "x" * 3000}, False),
        ({"x" * 3000: 1}, False),
        ({"list": [0] * 3000}, False),
        ({str(n): n for n in range(3000)}, False),
        ({"deep": {"deep": [["x" * 1500], "x" * 1500]}}, False),
    ],
)
def test_only_a_small_call_of_echo_is_made_without_a_thread(
    args: dict[str, Any], is_quick: bool
) -> None:
    with_room = settings_for("postgresql://nobody@nowhere/none")
    begun, outcome = asyncio.run(begun_and_outcome(task_of("echo", args), with_room))
    assert isinstance(begun, Outcome if is_quick else Thread)
    assert outcome.result == args
    begun, _ = asyncio.run(begun_and_outcome(task_of("sleep", {"seconds": 0}), with_room))
    assert isinstance(begun, Thread)


def test_a_call_whose_arguments_have_to_be_read_needs_a_thread_though_it_returns_at_once() -> None:
    begun, outcome = asyncio.run(begun_and_outcome(task_of("marked", {"number": 5})))
    assert isinstance(begun, Thread)
    assert outcome.result == 5
    assert "number: " in refused("marked", number="5")


def test_a_call_that_takes_no_time_has_ended_when_it_was_begun(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[str] = []
    monkeypatch.setattr(runner, "_on_finished", lambda: rings.append("rung"))
    runner._loop.call_soon_threadsafe(sample_tools.RELEASED.wait)  # nothing can begin there
    runner.start(task_of("echo", {"a": 1}), None)
    runner.start(step_of("echo", {"a": "{{ n.output }}"}, {Reference("n"): 40}), None)
    assert [outcome.result for _, outcome in runner.take_finished()] == [{"a": 1}, {"a": 40}]
    assert rings == ["rung", "rung"]
    assert runner.take_finished() == []


def test_a_function_is_called_and_succeeds_though_the_loop_has_no_time_for_anything(
    runner: Runner,
) -> None:
    runner._loop.call_soon_threadsafe(sample_tools.RELEASED.wait)
    runner.start(task_of("note", {"what": 1}), None)
    runner.start(step_of("note", {"what": "{{ n.output }}"}, {Reference("n"): 2}), None)
    eventually(lambda: len(runner._finished) == 2)
    assert sorted(sample_tools.SEEN) == ["note: 1", "note: 2"]
    sample_tools.RELEASED.set()
    assert [outcome.verdict for _, outcome in runner.take_finished()] == ["succeeded"] * 2
    assert len(sample_tools.SEEN) == 2  # by nobody else


def test_the_loop_begins_nothing_for_a_task_that_ended_before_it_had_time(runner: Runner) -> None:
    held_up, running = threading.Event(), []
    runner._loop.call_soon_threadsafe(held_up.wait)
    task = task_of("note", {"what": 1})
    runner.start(task, None)
    runner._loop.call_soon_threadsafe(lambda: running.append(list(runner._running)))
    assert finished(runner)[1].verdict == "succeeded"
    runner.stop([task.lease])
    held_up.set()
    eventually(lambda: running)
    assert running == [[]]
    assert runner.take_finished() == []


def test_of_many_short_calls_the_loop_hears_once(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("execution.runner.LOOK_SECONDS", 600)
    told: list[Any] = []
    monkeypatch.setattr(runner, "_tell", lambda what, *about: told.append(what))
    for number in range(20):
        runner.start(task_of("note", {"what": number}, number=number), None)
    eventually(lambda: len(runner._finished) == 20)
    assert told == [runner._loop.call_later]


@pytest.mark.parametrize("tool", ["fail", "fail_async", "cancel_itself"])
def test_what_a_tool_raises_is_told_before_the_loop_would_look(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.setattr("execution.runner.LOOK_SECONDS", 600)
    runner.start(task_of(tool, {"how": "value"} if "fail" in tool else {}), None)
    assert finished(runner)[1].verdict == "failure"


def test_a_stop_reaches_a_tool_before_the_loop_would_look(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("execution.runner.LOOK_SECONDS", 600)
    task = task_of("listen", {})
    runner.start(task, None)
    runner.stop([task.lease])
    assert finished(runner)[1].verdict == "released"


def test_a_deadline_counts_from_the_start_and_not_from_the_look(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []
    timeout_at = asyncio.timeout_at
    monkeypatch.setattr(
        "execution.runner.asyncio.timeout_at", lambda at: ends.append(at) or timeout_at(at)
    )
    runner.start(task_of("listen", {}, timeout_seconds=0.2), None)
    started = time.monotonic()
    assert finished(runner)[1].verdict == "deadline"
    assert ends[0] <= started + 0.2


def test_a_task_ends_once_though_its_thread_and_the_loop_both_hear_of_its_end(
    runner: Runner,
) -> None:
    runner.start(task_of("deaf", {}), None)
    eventually(lambda: runner._running)
    sample_tools.RELEASED.set()
    eventually(lambda: not runner._running)
    assert [outcome.result for _, outcome in runner.take_finished()] == ["done"]


def test_what_a_tool_returns_after_it_was_stopped_is_nobody_s(runner: Runner) -> None:
    task = task_of("deaf", {})
    runner.start(task, None)
    eventually(lambda: runner._running)
    runner.stop([task.lease])
    assert finished(runner)[1].verdict == "released"
    sample_tools.RELEASED.set()
    eventually(lambda: not any("task 7" in one.name for one in threading.enumerate()))
    assert sample_tools.SEEN == ["deaf: done"]
    assert runner.take_finished() == []


def test_a_stop_reaches_a_tool_that_began_before_the_loop_knew_of_it(runner: Runner) -> None:
    def is_called() -> bool:
        return any("task 7" in one.name for one in threading.enumerate())

    released = threading.Event()
    runner._loop.call_soon_threadsafe(released.wait)
    task = task_of("listen", {})
    runner.start(task, None)
    assert is_called()
    runner.stop([task.lease])
    released.set()
    assert finished(runner)[1].verdict == "released"
    eventually(lambda: not is_called())


def test_a_thread_that_cannot_begin_fails_its_task_and_nobody_else(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(_Caller, "begin", refuse)
        runner.start(task_of("add", {"a": 1}), None)
        outcome = finished(runner)[1]
    assert outcome.verdict == "failure"
    assert "can't start new thread" in (outcome.error or "")
    runner.start(task_of("add", {"a": 1}, number=8), None)
    assert finished(runner)[1].result == 3


@pytest.mark.parametrize(
    ("tool", "args", "verdict"),
    [
        ("add", None, "permanent"),
        ("add", [1], "permanent"),
        ("add", {"a": "{{ n.output }}"}, "permanent"),
        ("add", {"a": "{{"}, "permanent"),
        ("nobody", {}, "failure"),
        (7, {}, "failure"),
    ],
)
def test_what_cannot_begin_at_once_is_told_by_the_way_that_all_calls_go(
    runner: Runner, tool: Any, args: Any, verdict: str
) -> None:
    runner.start(step_of(tool, args, {}), None)
    assert finished(runner)[1].verdict == verdict


@pytest.mark.parametrize("text", ["x", "\u20ac", "\n"])
def test_the_limit_of_a_result_is_exact_however_the_call_is_made(runner: Runner, text: str) -> None:
    """JSON of 1000 bytes passes, of 1001 not, whether a glance is enough or all is counted."""
    for args in ({"a": ""}, {"a": [], "b": {}}):
        room = 1000 - len(json.dumps({**args, "text": ""}, separators=(",", ":")))
        size = len(json.dumps(text, ensure_ascii=False).encode()) - 2
        longest = {**args, "text": text * (room // size) + "x" * (room % size)}
        runner.start(task_of("echo", longest), None)
        assert finished(runner)[1].result == longest
        longest["text"] += "x"
        runner.start(task_of("echo", longest), None)
        outcome = finished(runner)[1]
        assert (outcome.verdict, "larger" in (outcome.error or "")) == ("permanent", True)


def test_large_arguments_are_filled_in_by_nobody_that_others_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr("execution.tool.fill", lambda args, *_: begun.append(args) or args)
    calls = ToolCalls(SETTINGS)
    large = "x" * 3000
    for pad, output, times in (("x", "y", 1), (large, "y", 0), ("x", large, 0)):
        begun.clear()
        step = step_of("echo", {"a": "{{ n.output }}", "pad": pad}, {Reference("n"): output})
        calls.begin(step, lambda outcome: None, lambda: None)
        assert len(begun) == times


def test_a_tool_that_returns_at_once_and_exits_ends_nobody_who_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(name: str) -> None:
        raise SystemExit(3)

    calls = ToolCalls(SETTINGS)
    monkeypatch.setattr(calls._registry, "find", leave)
    assert calls.begin(task_of("echo", {}), lambda outcome: None, lambda: None) is None


def test_what_was_filled_in_is_made_storable_for_the_quickest_call_too(runner: Runner) -> None:
    runner.start(step_of("echo", {"a": "{{ n.output }}"}, {Reference("n"): "a\0b"}), None)
    assert finished(runner)[1].result == {"a": "a\ufffdb"}


def test_what_a_tool_leaves_on_its_loop_is_ended_after_it(runner: Runner) -> None:
    runner.start(task_of("leave_a_task_behind", {}), None)
    assert finished(runner)[1].result == "done"
    eventually(lambda: sample_tools.SEEN == ["linger: ended"])


def test_a_tool_that_is_cancelled_before_its_arguments_are_read_is_not_called() -> None:
    sample_tools.SEEN.clear()

    async def run() -> None:
        tool = load_function("block", "tests.support.sample_tools:block")
        context = ToolContext("k", 1, 7, SETTINGS)
        context.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tool.call({}, context)

    asyncio.run(run())
    assert sample_tools.SEEN == []


@pytest.mark.parametrize(("part", "is_small"), [("x", True), ("x" * 3000, False)])
def test_large_arguments_are_filled_in_and_all_are_read_off_the_runner_s_loop(
    monkeypatch: pytest.MonkeyPatch, part: str, is_small: bool
) -> None:
    threads: list[threading.Thread] = []

    def noted(function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*args, **more)

        return call

    monkeypatch.setattr("execution.tool.fill", noted(fill))
    monkeypatch.setattr(FunctionTool, "_read", noted(FunctionTool._read))
    outputs = {Reference("n"): 40, Reference("of_another"): part}
    assert asyncio.run(outcome_of(step_of("add", {"a": "{{ n.output }}"}, outputs))).result == 42
    filled_in, read_in = threads
    assert (filled_in is threading.current_thread()) == is_small
    assert read_in is not threading.current_thread()


def test_a_stuck_thread_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    program = (
        "import asyncio, time\n"
        "from execution.tools.threads import Thread\n"
        "async def main():\n"
        "    Thread('stuck', lambda: time.sleep(600))\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


# --- the registry ----------------------------------------------------------------------------

NO_TOOLS = {
    "a module that is missing": ("nowhere.at_all:f", "ModuleNotFoundError"),
    "a function that is missing": ("tests.support.sample_tools:nope", "AttributeError"),
    "no function": ("tests.support.sample_tools:no_function", "is no function"),
    "a class": ("tests.support.sample_tools:Address", "is no function"),
    "an untyped parameter": ("tests.support.sample_tools:untyped", "parameter a has no type"),
    "a positional parameter": ("tests.support.sample_tools:positional", "by name"),
    "a starred parameter": ("tests.support.sample_tools:starred", "by name"),
    "an unknown type": ("tests.support.sample_tools:unknown_type", "Nowhere"),
}


@pytest.mark.parametrize(("entry", "says"), NO_TOOLS.values(), ids=NO_TOOLS.keys())
def test_what_cannot_be_a_tool_is_a_config_error_with_key_and_reason(entry: str, says: str) -> None:
    settings = settings_for("postgresql://nobody@nowhere/none", tools={"mine": entry})
    with pytest.raises(ConfigError) as error:
        ToolCalls(settings)
    assert f"tools.mine = '{entry}'" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "1/0", "def f(:", "import nowhere"])
def test_a_module_that_breaks_while_it_is_imported_is_a_config_error(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = settings_for("postgresql://nobody@nowhere/none", tools={"mine": f"{name}:f"})
    with pytest.raises(ConfigError, match="cannot be imported: "):
        ToolCalls(settings)


def test_a_tool_that_is_taken_away_is_not_there() -> None:
    settings = settings_for("postgresql://nobody@nowhere/none", tools={"echo": False})
    with pytest.raises(Failure, match=r"no tool 'echo', only f"):
        call("echo", settings)


# --- built in --------------------------------------------------------------------------------


def test_echo_returns_its_arguments() -> None:
    args = {"a": [1, {"b": None}], "function": "x", "context": 1, "self": 2}
    assert call("echo", **args) == args


def test_sleep_sleeps() -> None:
    begun = time.monotonic()
    assert call("sleep", seconds=0.1) == {"slept_seconds": 0.1}
    assert time.monotonic() - begun >= 0.1
    for seconds in (-1, 86_401, "1", None):
        assert "seconds" in refused("sleep", seconds=seconds)


def test_fetch_data_returns_a_bundled_data_set() -> None:
    assert call("fetch_data", plain_settings())["rows"][0]["topic"] == "claiming"
    planets = call("fetch_data", plain_settings(), name="planets")
    assert (planets["name"], len(planets["rows"])) == ("planets", 8)
    assert "durable_queues, planets" in refused("fetch_data", name="nope")


def plain_settings() -> Settings:
    return settings_for("postgresql://nobody@nowhere/none")


def test_flaky_fails_at_first_and_says_which_attempt_worked() -> None:
    def attempt(number: int, **args: Any) -> Coroutine[Any, Any, Outcome]:
        return outcome_of(task_of("flaky", args, attempt=number))

    with pytest.raises(Failure, match="simulated, at attempt 1"):
        asyncio.run(attempt(1))
    assert asyncio.run(attempt(2)).result == {"attempt": 2}
    with pytest.raises(Failure):
        asyncio.run(attempt(3, failures=3))
    assert asyncio.run(attempt(1, failures=0)).result == {"attempt": 1}
    with pytest.raises(Failure):
        asyncio.run(attempt(9, probability=1))
    assert asyncio.run(attempt(1, probability=0)).result == {"attempt": 1}
    ended = [asyncio.run(ended_well(attempt(1, probability=0.5))) for _ in range(60)]
    assert 5 < sum(ended) < 55


async def ended_well(attempt: Coroutine[Any, Any, Outcome]) -> bool:
    try:
        await attempt
    except CallEnded:
        return False
    return True


def test_a_failure_is_logged_with_its_traceback_and_a_simulated_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(Failure):
        call("flaky")
    assert caplog.text == ""
    with pytest.raises(Failure):
        call("fail", how="key")
    assert "KeyError: 'k'" in caplog.text
    assert "Traceback" in caplog.text

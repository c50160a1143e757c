"""Tool tasks in a real worker: what becomes of them, and of the worker that they misbehave in."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import fresh_database
from tests.support.bench import Bench
from tests.support.fake_ollama import FakeOllama
from tests.support.ports import free_port
from tests.support.processes import Processes, eventually
from tests.support.queue import Queue, Row

SAMPLES = "tests.support.sample_tools"
MCP_SERVER = Path(__file__).parent.parent / "support" / "mcp_server.py"
TOOLS: dict[str, Any] = {
    name: f"{SAMPLES}:{name}"
    for name in (
        "add",
        "give",
        "fail",
        "fail_async",
        "told",
        "listen",
        "deaf",
        "deaf_async",
        "block",
        "die",
    )
} | {"leave": f"{SAMPLES}:exit_from_a_task_of_its_own"}


def submit(queue: Queue, tool: str, args: Any = None, **fields: Any) -> int:
    payload = {"tool": tool, "args": {} if args is None else args}
    (task_id,) = queue.submit("", kind="tool", requested_route="none", payload=payload, **fields)
    return task_id


@pytest.fixture(scope="module")
def shared_bench(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One worker whose model server is not there: tools do not need one."""
    folder = tmp_path_factory.mktemp("tools")
    with fresh_database(server_url) as url, FakeOllama() as fake, Queue(url) as queue:
        bench = Bench(queue, fake, folder)
        with bench.processes:
            bench.start(
                "--concurrency", "8",
                worker={"lease_seconds": 60, "heartbeat_seconds": 0.3},
                retry={"max_delay_seconds": 0.05},
                ollama={"connect_timeout_seconds": 1},
                tools=TOOLS,
                **{"tools.plus.mcp": {
                    "command": [sys.executable, "-P", str(MCP_SERVER), str(folder)], "tool": "add",
                }},
            )  # fmt: skip
            yield bench


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    yield shared_bench
    shared_bench.check_worker()


def play(bench: Bench, tool: str, args: Any = None, **fields: Any) -> Row:
    """The row of a tool task once it is final."""
    task_id = submit(bench.queue, tool, args, **fields)
    row = bench.queue.await_final(task_id)
    bench.queue.check([task_id])
    return row


# --- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "args", "result"),
    [
        ("echo", {"a": [1, {"b": None}], "ü": "🦉"}, {"a": [1, {"b": None}], "ü": "🦉"}),
        ("echo", {"a": "{{ b.output }}"}, {"a": "{{ b.output }}"}),
        ("add", {"a": 1}, 3),
        ("plus", {"a": 1, "b": 3}, {"result": 4}),
        ("give", {"what": "tuple"}, [1, 2.5, True, "ü"]),
        (
            "give",
            {"what": "dirty"},
            {"a\ufffdb": ["c\ufffdd", {"\ufffd": "\ufffd"}]},
        ),
    ],
)
def test_a_result_of_any_kind_is_kept(bench: Bench, tool: str, args: Any, result: Any) -> None:
    row = play(bench, tool, args)
    assert (row["status"], row["result"]) == ("SUCCEEDED", result), row["last_error"]
    assert (row["route"], row["model"], row["cost"]) == (None, None, None)


def test_a_tool_that_returns_nothing_has_the_result_null(bench: Bench) -> None:
    row = play(bench, "give", {"what": "nothing"})
    assert (row["status"], row["result"]) == ("SUCCEEDED", None)
    (kind,) = bench.queue.ask(
        "SELECT jsonb_typeof(result) AS kind FROM tasks WHERE task_id = %s", row["task_id"]
    )
    assert kind["kind"] == "null"


@pytest.mark.parametrize("what", ["nan", "infinity", "set", "deep", "endless", "huge number"])
def test_a_result_that_is_no_json_is_a_dead_letter_at_once(bench: Bench, what: str) -> None:
    row = play(bench, "give", {"what": what})
    assert (row["status"], row["reason"], row["attempt"]) == ("FAILED", "permanent", 1)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["fail", "fail_async"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("value", "ValueError: bad\ufffd value"),
        ("cancelled", "CancelledError: not ours"),
        ("timeout", "TimeoutError: not ours"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: ctrl-c"),
        ("unprintable", "Unprintable: without a text"),
    ],
)
def test_what_a_tool_raises_is_tried_again_and_then_a_dead_letter(
    bench: Bench, tool: str, how: str, says: str
) -> None:
    row = play(bench, tool, {"how": how})
    assert (row["status"], row["reason"], row["retry_count"]) == ("FAILED", "max_retry", 3)
    assert row["last_error"].startswith(says)


def test_a_tool_s_permanent_error_is_a_dead_letter_at_once(bench: Bench) -> None:
    row = play(bench, "fail", {"how": "permanent"})
    assert (row["reason"], row["attempt"]) == ("permanent", 1)
    assert row["last_error"] == "no such customer"


def test_a_tool_that_this_worker_does_not_have_is_tried_again_where_there_may_be_another(
    bench: Bench,
) -> None:
    row = play(bench, "nope", max_retry=1)
    assert row["reason"] == "max_retry"
    assert "this worker has no tool 'nope', only add, " in row["last_error"]


def test_wrong_arguments_are_dead_letters_that_say_what_is_wrong(
    bench: Bench,
) -> None:
    for tool, args, says in (
        ("add", {"a": "1", "z": 1}, "there is no z"),
        ("add", [], "an object"),
    ):
        row = play(bench, tool, args)
        assert (row["reason"], row["attempt"]) == ("permanent", 1)
        assert says in row["last_error"]


def test_a_flaky_tool_succeeds_at_its_second_attempt(bench: Bench) -> None:
    row = play(bench, "flaky")
    assert (row["status"], row["result"]) == ("SUCCEEDED", {"attempt": 2})
    assert (row["retry_count"], row["delivery_count"]) == (1, 2)


def test_a_tool_is_told_the_same_key_at_each_attempt(bench: Bench) -> None:
    row = play(bench, "told", {"word": "w"})
    assert row["result"] == {"word": "w", "key": f"task:{row['task_id']}", "attempt": 1}


def test_a_tool_that_exits_from_a_task_of_its_own_ends_no_worker(bench: Bench) -> None:
    assert play(bench, "leave")["status"] in ("SUCCEEDED", "FAILED")
    assert play(bench, "add", {"a": 5})["result"] == 7


# --- stopping --------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["listen", "deaf", "deaf_async", "block"])
def test_a_tool_task_that_is_cancelled_ends_within_a_heartbeat_whether_it_listens_or_not(
    bench: Bench, tool: str
) -> None:
    task_id = submit(bench.queue, tool, {"seconds": 600})
    bench.queue.await_status(task_id, "RUNNING")
    bench.queue.ask("UPDATE tasks SET cancel_requested = true WHERE task_id = %s", task_id)
    row = bench.queue.await_status(task_id, "CANCELLED")
    assert row["reason"] == "cancelled"
    assert bench.worker is not None
    log = bench.worker
    if tool != "listen":
        eventually(lambda: f"task {task_id} was cancelled and does not listen" in log.log)
    assert play(bench, "add", {"a": 1})["result"] == 3


def test_a_tool_task_that_runs_longer_than_it_may_is_a_dead_letter(bench: Bench) -> None:
    row = play(bench, "deaf", {"seconds": 5}, timeout_seconds=0.3)
    assert (row["reason"], row["retry_count"]) == ("deadline", 1)


def test_an_async_tool_that_blocks_meets_its_deadline_and_holds_nobody_up(bench: Bench) -> None:
    blocking = submit(bench.queue, "block", timeout_seconds=1)
    bench.queue.await_status(blocking, "RUNNING")
    neighbour = submit(bench.queue, "flaky", {"failures": 0}, timeout_seconds=20)
    assert bench.queue.await_final(neighbour)["status"] == "SUCCEEDED"
    row = bench.queue.await_final(blocking)
    assert (row["status"], row["reason"]) == ("FAILED", "deadline")
    bench.queue.check([blocking, neighbour])


def test_a_worker_ends_although_a_tool_does_not(
    processes: Processes, queue: Queue, fake: FakeOllama
) -> None:
    processes.configure(tools=TOOLS)
    worker = processes.worker()
    deaf = [submit(queue, tool) for tool in ("deaf", "deaf_async", "block")]
    for task_id in deaf:
        queue.await_status(task_id, "RUNNING")
    worker.signal(signal.SIGTERM)
    eventually(lambda: "action=stopping" in worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert "Traceback" not in worker.log
    for task_id in deaf:
        row = queue.row(task_id)
        assert (row["status"], row["reason"], row["delivery_count"]) == ("PENDING", "released", 0)


def test_a_tool_that_kills_its_worker_is_a_lost_delivery_and_not_a_failure(
    processes: Processes, queue: Queue, fake: FakeOllama
) -> None:
    processes.configure(tools=TOOLS, retry={"max_delivery": 1})
    worker = processes.worker()
    task_id = submit(queue, "die")
    assert worker.wait(30) == 7
    queue.await_loss()
    processes.worker()
    row = queue.await_final(task_id)
    assert (row["reason"], row["retry_count"], row["delivery_count"]) == ("max_delivery", 0, 1)


# --- the worker ------------------------------------------------------------------------------


def test_tools_run_while_no_model_server_is_there(
    database_url: str, queue: Queue, tmp_path: Path
) -> None:
    with Processes(database_url, f"http://127.0.0.1:{free_port()}", tmp_path) as processes:
        processes.worker()
        task_id = submit(queue, "fetch_data")
        row = queue.await_final(task_id)
        assert row["result"]["name"] == "durable_queues"


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ({"mine": "no_such_module:f"}, "tools.mine = 'no_such_module:f' cannot be imported"),
        ({"mine": f"{SAMPLES}:untyped"}, "parameter a has no type"),
        ({"mine": 5}, "tools.mine = 5"),
    ],
)
def test_a_worker_does_not_start_with_a_tool_that_is_none(
    processes: Processes, tools: dict[str, Any], says: str
) -> None:
    processes.configure(tools=tools)
    worker = processes.worker_starting()
    assert worker.wait(30) == 1
    assert says in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_mcp_server_ends_with_its_worker_however_that_ends(
    processes: Processes, queue: Queue, fake: FakeOllama, tmp_path: Path, how: signal.Signals
) -> None:
    command = [sys.executable, "-P", str(MCP_SERVER), str(tmp_path)]
    processes.configure(**{"tools.add.mcp": {"command": command}})
    worker = processes.worker()
    task_id = submit(queue, "add", {"a": 1, "b": 1})
    assert queue.await_final(task_id)["result"] == {"result": 2}
    server = int((tmp_path / "started").read_text())
    os.kill(server, 0)
    worker.signal(how)
    worker.wait(30)
    eventually(lambda: not is_alive(server))


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody asks for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_an_mcp_server_that_is_away_is_tried_again_and_kills_no_worker(
    processes: Processes, queue: Queue, fake: FakeOllama
) -> None:
    processes.configure(
        retry={"max_delay_seconds": 0.05},
        **{"tools.far.mcp": {"url": f"http://127.0.0.1:{free_port()}/mcp"}},
    )
    worker = processes.worker()
    row = queue.await_final(submit(queue, "far"))
    assert (row["reason"], row["retry_count"]) == ("max_retry", 3)
    assert "the MCP server 127.0.0.1 cannot be reached" in row["last_error"]
    assert worker.is_running()

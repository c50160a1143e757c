"""execution/tools/mcp.py against a real server: calls, errors, cancellation, servers that die."""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from config import McpServer, Settings
from execution.errors import Failure, Permanent
from execution.tool import ToolCalls
from queries.leases import ClaimedTask, Lease
from tests.conftest import settings_for
from tests.support.ports import free_port
from tests.support.processes import eventually

pytest.importorskip("mcp", reason="needs mcp: pip install -r requirements-agents.txt")

SERVER = Path(__file__).parent.parent / "support" / "mcp_server.py"
PROGRAM = [sys.executable, "-P", str(SERVER)]  # -P: its folder has modules with common names
TOOLS = ("add", "person", "say", "fail", "meta", "secret", "refuse", "die", "wait", "nope")
INVALID_REQUEST = -32600
TOKEN = "00000000-0000-4000-8000-000000000000"


def settings_of(place: dict[str, Any], start_timeout_seconds: float = 20) -> Settings:
    """All tools of the server, and `plus`, which is another name of `add`."""
    tools: dict[str, Any] = {name: {"mcp": place} for name in TOOLS}
    return settings_for(
        "postgresql://nobody@nowhere/none",
        tools={**tools, "plus": {"mcp": {**place, "tool": "add"}}},
        mcp={"start_timeout_seconds": start_timeout_seconds},
    )


def by_command(folder: Path, **more: Any) -> dict[str, Any]:
    return {"command": [*PROGRAM, str(folder)], **more}


Call = Callable[..., Awaitable[Any]]


def with_calls(settings: Settings, body: Callable[[Call, ToolCalls], Awaitable[None]]) -> None:
    """Run `body` on a loop of its own; call(tool, **args) is one call."""

    async def run() -> None:
        calls = ToolCalls(settings)

        async def call(tool: str, **args: Any) -> Any:
            payload = {"tool": tool, "args": args}
            task = ClaimedTask(Lease(7, TOKEN), 7, "tool", payload, "none", None, 1, 1, 0)
            return (await calls.run(task)).result

        try:
            await body(call, calls)
        finally:
            await calls.close()

    asyncio.run(run())


def lines(folder: Path, name: str) -> list[str]:
    file = folder / name
    return file.read_text().split() if file.exists() else []


def let_go(folder: Path) -> None:
    """Of the calls that wait at the server."""
    (folder / "let_go").touch()


async def until(look: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.02)


def takes_calls(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def http_server(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Starts the server on a port, which stays the same when it is started again."""
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []

    def start() -> str:
        for old in started:
            old.kill()
            old.wait()
        command = [*PROGRAM, str(tmp_path), str(port)]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        eventually(lambda: takes_calls(port))
        return f"http://127.0.0.1:{port}/mcp"

    yield start
    for process in started:
        process.kill()
        process.wait()


# --- calls -----------------------------------------------------------------------------------


async def every_kind_of_result(call: Call, calls: ToolCalls) -> None:
    assert await call("add", a=1, b=2) == {"result": 3}
    assert await call("plus", a=2, b=2) == {"result": 4}
    assert await call("person", name="Ada") == {"name": "Ada", "tags": ["a\ufffdb"]}
    assert await call("say", text="Grüße {{ x }}") == "Grüße {{ x }}"
    assert await call("meta") == "task:7"
    with pytest.raises(Failure, match=r"the tool fail failed: .*broken"):
        await call("fail", text="broken")
    with pytest.raises((Failure, Permanent), match="nope"):
        await call("nope")
    with pytest.raises((Failure, Permanent), match="b"):
        await call("add", a=1)
    assert await asyncio.gather(*(call("add", a=n, b=n) for n in range(20))) == [
        {"result": 2 * n} for n in range(20)
    ]


def test_a_server_that_is_a_command_answers_calls_in_one_session(tmp_path: Path) -> None:
    with_calls(settings_of(by_command(tmp_path)), every_kind_of_result)
    assert len(lines(tmp_path, "started")) == 1
    assert len(lines(tmp_path, "ended")) == 1  # and nobody is left behind


def test_a_server_behind_a_url_answers_calls(
    tmp_path: Path, http_server: Callable[[], str]
) -> None:
    with_calls(settings_of({"url": http_server()}), every_kind_of_result)


def test_a_command_gets_the_variables_that_are_named_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN_KEY", "k1")
    monkeypatch.setenv("OTHER_KEY", "k2")

    async def body(call: Call, calls: ToolCalls) -> None:
        assert await call("secret", name="GIVEN_KEY") == "k1"
        assert await call("secret", name="OTHER_KEY") == "none"

    with_calls(settings_of(by_command(tmp_path, env=["GIVEN_KEY", "MISSING_KEY"])), body)


def test_a_url_gets_its_token_and_no_other_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from execution.tools.mcp_sdk import _headers

    monkeypatch.setenv("SEARCH_TOKEN", "t1")
    given = McpServer(url="http://a", token_env="SEARCH_TOKEN")
    assert _headers(given) == {"Authorization": "Bearer t1"}
    assert _headers(McpServer(url="http://a")) == {}
    assert _headers(McpServer(url="http://a", token_env="MISSING_TOKEN")) == {}


# --- cancellation ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["command", "url"])
def test_a_call_that_is_cancelled_is_cancelled_at_the_server_and_others_go_on(
    tmp_path: Path, http_server: Callable[[], str], kind: str
) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        other = asyncio.ensure_future(call("wait", seconds=600))
        waiting = asyncio.ensure_future(call("wait", seconds=600))
        await until(lambda: len(lines(tmp_path, "waiting")) == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 60)
        await until(lambda: len(lines(tmp_path, "cancelled")) == 1)
        let_go(tmp_path)
        assert await other == {"result": "waited"}

    place = by_command(tmp_path) if kind == "command" else {"url": http_server()}
    with_calls(settings_of(place), body)
    assert len(lines(tmp_path, "cancelled")) == 1


def test_who_is_cancelled_while_the_server_starts_takes_nobody_along(tmp_path: Path) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        first = asyncio.ensure_future(call("add", a=1, b=1))
        second = asyncio.ensure_future(call("add", a=2, b=2))
        await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        first.cancel()
        assert await second == {"result": 4}

    with_calls(settings_of(by_command(tmp_path)), body)
    assert len(lines(tmp_path, "started")) == 1


# --- calls that are refused ------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "times"), [("command", 1), ("url", 2)])
def test_a_call_that_is_refused_harms_no_other_of_its_session(
    tmp_path: Path, http_server: Callable[[], str], kind: str, times: int
) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        waiting = asyncio.ensure_future(call("wait", seconds=600))
        await until(lambda: lines(tmp_path, "waiting"))
        with pytest.raises(Failure, match="refused the call: not like this"):
            await call("refuse", code=INVALID_REQUEST)
        # A server behind a URL may have forgotten the session: asked again in a new one.
        assert lines(tmp_path, "refused") == [str(INVALID_REQUEST)] * times
        assert await call("add", a=1, b=2) == {"result": 3}
        assert not waiting.done()
        let_go(tmp_path)
        assert await waiting == {"result": "waited"}
        assert lines(tmp_path, "waiting") == ["once"]
        assert await call("add", a=2, b=2) == {"result": 4}

    place = by_command(tmp_path) if kind == "command" else {"url": http_server()}
    with_calls(settings_of(place), body)
    assert len(lines(tmp_path, "started")) == 1
    assert lines(tmp_path, "cancelled") == []


def test_a_session_that_was_replaced_ends_with_the_last_call_that_needs_it(
    tmp_path: Path, http_server: Callable[[], str]
) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        (session,) = calls._registry._servers._sessions.values()
        waiting = asyncio.ensure_future(call("wait", seconds=600))
        await until(lambda: lines(tmp_path, "waiting"))
        for _ in range(3):
            with pytest.raises(Failure):
                await call("refuse", code=INVALID_REQUEST)
        await until(lambda: len(session._links) == 2)
        let_go(tmp_path)
        await waiting
        await until(lambda: len(session._links) == 1)

    with_calls(settings_of({"url": http_server()}), body)


# --- servers that are away -------------------------------------------------------------------


def test_a_server_that_died_while_nobody_called_is_started_again(tmp_path: Path) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        assert await call("add", a=1, b=2) == {"result": 3}
        os.kill(int(lines(tmp_path, "started")[0]), signal.SIGKILL)
        assert await call("add", a=1, b=2) == {"result": 3}

    with_calls(settings_of(by_command(tmp_path)), body)
    assert len(lines(tmp_path, "started")) == 2


def test_a_call_that_kills_its_server_is_a_failure_and_later_calls_work(tmp_path: Path) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        with pytest.raises(Failure, match="went away"):
            await call("die")
        assert await call("add", a=1, b=2) == {"result": 3}
        with pytest.raises(Failure, match="went away"):
            await call("die")
        assert await call("add", a=1, b=2) == {"result": 3}
        waiting = asyncio.ensure_future(call("wait", seconds=60))
        await until(lambda: lines(tmp_path, "waiting"))
        os.kill(int(lines(tmp_path, "started")[-1]), signal.SIGKILL)
        await until(lambda: len(lines(tmp_path, "waiting")) == 2)  # called once more
        os.kill(int(lines(tmp_path, "started")[-1]), signal.SIGKILL)
        with pytest.raises(Failure, match="went away"):
            await waiting

    with_calls(settings_of(by_command(tmp_path)), body)


def test_a_server_behind_a_url_may_be_restarted_between_calls(
    http_server: Callable[[], str],
) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        assert await call("add", a=1, b=2) == {"result": 3}
        await asyncio.to_thread(http_server)
        assert await call("add", a=2, b=2) == {"result": 4}

    with_calls(settings_of({"url": http_server()}), body)


AWAY: dict[str, tuple[dict[str, Any], str]] = {
    "a program that is missing": ({"command": ["no-such-program-here"]}, "no-such-program-here"),
    "a program that ends at once": ({"command": [sys.executable, "-c", ""]}, "cannot be reached"),
    "a program that speaks another language": (
        {"command": [sys.executable, "-c", "print('hello'); input()"]}, "cannot be reached"),
    "a program that says nothing": (
        {"command": [sys.executable, "-c", "import time; time.sleep(600)"]}, "not within 0.2 s"),
    "nobody at the port": ({"url": "http://127.0.0.1:9/mcp"}, "cannot be reached"),
    "no such host": ({"url": "http://nowhere.invalid/mcp"}, "cannot be reached"),
}  # fmt: skip


@pytest.mark.parametrize(("place", "says"), AWAY.values(), ids=AWAY.keys())
def test_a_server_that_is_away_is_a_failure_that_is_tried_again(
    place: dict[str, Any], says: str
) -> None:
    async def body(call: Call, calls: ToolCalls) -> None:
        for _ in range(2):
            both = await asyncio.gather(call("add", a=1), call("say"), return_exceptions=True)
            assert [type(one) for one in both] == [Failure, Failure]
            assert says in str(both[0])

    # Only silence is known by how long it lasts; the others are to be told from it at any speed.
    with_calls(settings_of(place, start_timeout_seconds=0.2 if "0.2 s" in says else 60), body)


def test_without_the_package_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("mcp", "httpx2"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "execution.tools.mcp_sdk", raising=False)
    monkeypatch.delattr("execution.tools.mcp_sdk", raising=False)

    async def body(call: Call, calls: ToolCalls) -> None:
        with pytest.raises(Permanent, match=r"needs the package mcp .*requirements-agents\.txt"):
            await call("add", a=1, b=2)

    with_calls(settings_of(by_command(tmp_path)), body)

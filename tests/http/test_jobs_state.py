"""What is shown of an agent job: its state with GET, its checkpoints, and its events."""

from __future__ import annotations

import json
import secrets
from typing import Any

import httpx
import pytest

from db import Connection
from queries.jobs import MOST_COMPARED_BYTES
from queries.tokens import send_tokens
from tests.support import jobs, lives, rows
from tests.support.client import Client, refused
from tests.support.processes import Api, eventually
from tests.support.run_client import RunClient, agent
from tests.support.streams import EventSource, Socket, Watcher


@pytest.fixture
def job(client: Client) -> int:
    return int(client.post({"task": "Write something."}).json()["task_id"])


def read(client: Client, path: str, **params: Any) -> httpx.Response:
    return client.http.get(path, params=params, headers={"X-Tenant-Id": client.tenant})


def checkpoints(client: Client, task_id: Any, **params: Any) -> dict[str, Any]:
    answer = read(client, f"/tasks/{task_id}/checkpoints", **params)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


# --- the state -------------------------------------------------------------------------------


def test_a_job_has_no_state_before_its_first_checkpoint(
    client: Client, conn: Connection, job: int
) -> None:
    assert client.task(job)["state"] is None
    jobs.reach(conn, job, [], ["__start__"])  # LangGraph's own, of the input
    assert client.task(job)["state"] is None


def test_the_state_is_that_of_the_newest_checkpoint_with_what_was_used_so_far(
    client: Client, conn: Connection, job: int
) -> None:
    lives.take(conn, job)
    jobs.reach(conn, job, [], ["supervisor"])
    jobs.reach(conn, job, ["supervisor"], ["coder"], plan="a plan", route="code", verdict=None)
    used = "UPDATE tasks SET prompt_tokens = 30, completion_tokens = 4, cost = 0.001 WHERE task_id = %(id)s"  # noqa: E501
    rows.sql(conn, used, id=job)
    state = {
        "plan": "a plan", "route": "code", "verdict": None, "next": ["coder"],
        "prompt_tokens": 30, "completion_tokens": 4, "cost": "0.00100000", "approval": None,
    }  # fmt: skip
    assert client.task(job)["state"] == state
    listed = read(client, "/tasks").json()["tasks"]
    assert [task["state"] for task in listed] == [None]
    lives_state = jobs.reach(conn, job, ["coder"], [], plan="a plan", code="x")
    assert lives_state
    assert client.task(job)["state"]["next"] == []


@pytest.mark.parametrize("verdict", ["succeeded", "permanent"])
def test_of_a_job_that_has_ended_nothing_comes_next(
    client: Client, conn: Connection, job: int, verdict: str
) -> None:
    """Also of one whose budget ended before its graph did."""
    jobs.reach(conn, job, ["supervisor"], ["coder"], plan="a plan")
    assert client.task(job)["state"]["next"] == ["coder"]
    lives.end(conn, job, verdict)
    state = client.task(job)["state"]
    assert (state["plan"], state["next"]) == ("a plan", [])


def test_what_a_parked_job_asks_is_shown_even_before_its_first_checkpoint(
    client: Client, conn: Connection, job: int
) -> None:
    asks = {"code": "ü", "revision": 0}
    artefact = jobs.park(conn, job, asks)
    state = client.task(job)["state"]
    assert state["approval"] == {"artefact": artefact, "asks": asks}
    assert state["next"] == []
    jobs.reach(conn, job, ["coder"], ["approval"], code="ü")
    shown = client.task(job)
    assert (shown["state"]["code"], shown["state"]["next"]) == ("ü", ["approval"])
    assert shown["waiting_for"] == "approval"
    assert shown["state"]["approval"]["asks"] == asks


def test_a_channel_of_a_graph_cannot_pass_for_what_is_ours(
    client: Client, conn: Connection, job: int
) -> None:
    jobs.reach(conn, job, ["a"], ["b"], approval={"artefact": "x"}, cost="free", next=["z"])
    state = client.task(job)["state"]
    assert (state["approval"], state["cost"], state["next"]) == (None, None, ["b"])


def test_of_another_kind_there_is_no_state(client: Client, conn: Connection) -> None:
    task_id = client.submit()
    jobs.reach(conn, task_id, ["a"], [], x=1)  # nobody writes one
    assert client.task(task_id)["state"] is None


# --- checkpoints -----------------------------------------------------------------------------


def test_checkpoints_are_told_newest_first_each_with_what_it_brought(
    client: Client, conn: Connection, job: int
) -> None:
    jobs.reach(conn, job, [], ["__start__"])
    ids = [
        jobs.reach(conn, job, [], ["supervisor"]),
        jobs.reach(conn, job, ["supervisor"], ["coder"], plan="p" * 1204, route="code",
                   verdict=None, revisions=0),
        jobs.reach(conn, job, ["coder"], ["reviewer"], plan="p" * 1204, route="code",
                   verdict=None, revisions=1, code="x" * 41),
        jobs.reach(conn, job, ["reviewer"], [], plan="p" * 1204, route="code",
                   verdict="approved", revisions=1, code="x" * 41, feedback=""),
    ]  # fmt: skip
    told = checkpoints(client, job)
    assert told["next_cursor"] is None
    shown = told["checkpoints"]
    assert [one["id"] for one in shown] == ids[::-1]
    assert [one["summary"] for one in shown] == [
        "reviewer wrote verdict (approved), feedback (empty)",
        "coder wrote code (41 characters), revisions (1)",
        "supervisor wrote plan (1,204 characters), route (code), revisions (0)",
        "the job begins",
    ]
    newest = shown[0]
    assert set(newest) == {
        "id", "at", "attempt", "nodes", "next", "summary", "prompt_tokens", "completion_tokens",
    }  # fmt: skip
    assert (newest["nodes"], newest["next"], newest["attempt"]) == (["reviewer"], [], 1)
    assert newest["at"].endswith("Z")
    assert newest["prompt_tokens"] > shown[1]["prompt_tokens"]


SUMMARIES: list[tuple[list[str], dict[str, Any], dict[str, Any], str]] = [
    (["a"], {"x": 1}, {"x": 1}, "a changed nothing"),
    (["a", "b"], {}, {"notes": ["x"], "found": {"k": 1, "l": 2}},
     "a and b wrote found (2 items), notes (1 item)"),
    (["a"], {"x": "y" * 50}, {"x": "z" * 50}, "a wrote x (50 characters)"),
    (["a"], {"x": "y"}, {"x": None, "new": None}, "a wrote x (empty)"),
    (["a"], {}, {"x": True, "y": 1.5, "z": "two\nlines "},
     "a wrote x (true), y (1.5), z (two lines)"),
    (["a"], {}, {f"c{n}": n for n in range(8)},
     "a wrote c0 (0), c1 (1), c2 (2), c3 (3), c4 (4), c5 (5), 2 more"),
    (["n" * 100], {}, {"c" * 100: {}}, f"{'n' * 80}… wrote {'c' * 80}… (0 items)"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "before", "after", "summary"), SUMMARIES)
def test_a_summary_fits_any_graph(
    client: Client, conn: Connection, job: int, nodes: list[str], before: dict[str, Any],
    after: dict[str, Any], summary: str,
) -> None:  # fmt: skip
    jobs.reach(conn, job, ["first"], nodes, **before)
    jobs.reach(conn, job, nodes, [], **after)
    assert checkpoints(client, job)["checkpoints"][0]["summary"] == summary


def test_states_that_are_very_large_are_not_compared(
    client: Client, conn: Connection, job: int
) -> None:
    large = secrets.token_hex(MOST_COMPARED_BYTES)  # twice as many characters, which pack badly
    jobs.reach(conn, job, ["a"], ["b"], x=1)
    jobs.reach(conn, job, ["b"], ["c"], x=large)
    jobs.reach(conn, job, ["c"], [], x=2)
    too_large = "wrote a state that is too large to be compared"
    summaries = [one["summary"] for one in checkpoints(client, job)["checkpoints"]]
    assert summaries == [f"c {too_large}", f"b {too_large}", "a wrote x (1)"]


def test_pages_bring_each_checkpoint_once_though_others_come_meanwhile(
    client: Client, conn: Connection, job: int
) -> None:
    ids = [jobs.reach(conn, job, ["a"], ["a"], n=number) for number in range(7)]
    whole = checkpoints(client, job)["checkpoints"]
    found: list[Any] = []
    cursor = None
    while True:
        page = checkpoints(client, job, limit=3, **({"cursor": cursor} if cursor else {}))
        found += page["checkpoints"]
        jobs.reach(conn, job, ["a"], ["a"], n=-len(found))
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [one["id"] for one in found] == ids[::-1]
    assert found == whole


def test_a_task_without_checkpoints_has_an_empty_list(client: Client, job: int) -> None:
    for task_id in (job, client.submit()):
        assert checkpoints(client, task_id) == {"checkpoints": [], "next_cursor": None}


CURSORS = ["", "x", "####", "MQ=", "YSBi", "w7w=", "x" * 500, "AAAA", "J3wn"]


@pytest.mark.parametrize("cursor", CURSORS)
def test_a_cursor_that_no_page_gave_out_is_refused(client: Client, job: int, cursor: str) -> None:
    answer = read(client, f"/tasks/{job}/checkpoints", cursor=cursor)
    assert "no page gave this one out" in refused(answer, 422, field="cursor")


@pytest.mark.parametrize("limit", ["0", "201", "-1", "x"])
def test_a_page_has_one_to_two_hundred_entries(client: Client, job: int, limit: str) -> None:
    refused(read(client, f"/tasks/{job}/checkpoints", limit=limit), 422, field="limit")


def test_checkpoints_are_found_by_name_and_only_by_whose_they_are(
    client: Client, conn: Connection
) -> None:
    client.post({"task": "t", "task_id": "t1"})
    jobs.reach(conn, client.task("t1")["id"], [], ["a"])
    assert len(checkpoints(client, "t1")["checkpoints"]) == 1
    other = Client(client.http, f"{client.tenant}-other")
    for reference in ("t1", client.task("t1")["id"], "nobody", "0"):
        refused(read(other, f"/tasks/{reference}/checkpoints"), 404)


# --- events ----------------------------------------------------------------------------------


def watch(api: Api, path: str, tenant: str, over: type[Watcher] = EventSource) -> Watcher:
    watcher = over(api, path, **{"X-Tenant-Id": tenant})
    eventually(lambda: bool(watcher.events))
    return watcher


def test_a_stream_begins_with_the_state_and_tells_of_each_node(
    module_api: Api, client: Client, conn: Connection, job: int
) -> None:
    lives.take(conn, job)
    jobs.reach(conn, job, ["supervisor"], ["coder"], plan="a plan")
    watcher = watch(module_api, f"/tasks/{job}/events", client.tenant)
    assert watcher.events[0].data == json.loads(read(client, f"/tasks/{job}").text)
    assert watcher.events[0].data["state"]["plan"] == "a plan"
    piece = {"root_id": job, "task_id": job, "attempt": 1, "node": "coder"}
    send_tokens(
        conn,
        [{**piece, "phase": "started"}, {**piece, "text": "def "}, {**piece, "phase": "finished"}],
    )
    eventually(lambda: len(watcher.events) == 4)
    shown = {"step": None, "task_id": job, "attempt": 1, "node": "coder"}
    assert [(event.name, event.data, event.cursor) for event in watcher.events[1:]] == [
        ("node", {**shown, "phase": "started"}, None),
        ("token", {**shown, "text": "def "}, None),
        ("node", {**shown, "phase": "finished"}, None),
    ]
    client.http.delete(f"/tasks/{job}", headers={"X-Tenant-Id": client.tenant})


@pytest.mark.parametrize("over", [EventSource, Socket])
def test_a_runs_stream_tells_of_the_nodes_of_its_step(
    module_api: Api, client: Client, conn: Connection, over: type[Watcher]
) -> None:
    run = RunClient(client.http, client.tenant).submit(agent("agent_call.team"))
    run_id, task_id = run["run_id"], run["steps"][0]["task_id"]
    watcher = watch(module_api, f"/runs/{run_id}/events", client.tenant, over)
    piece = {"root_id": run_id, "task_id": task_id, "attempt": 1, "node": "coder"}
    send_tokens(conn, [{**piece, "phase": "started"}])
    eventually(lambda: len(watcher.events) == 2)
    event = watcher.events[1]
    assert (event.name, event.data["step"], event.data["phase"]) == (
        "node", "agent_call.team", "started",
    )  # fmt: skip
    assert watcher.events[0].data["steps"][0]["kind"] == "agent"

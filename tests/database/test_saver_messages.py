"""execution/agent/saver.py: what is sent together, what at once, and what nobody asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain as flat
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.func import task as as_task
from langgraph.graph import START, StateGraph
from langgraph.types import Send, interrupt

from db import Connection
from errors import LeaseLost
from execution.agent import saver as saver_module
from execution.agent.saver import CheckpointPool, FencedSaver
from tests.support.processes import eventually
from tests.support.rows import sql
from tests.support.small_graphs import (
    Notes,
    chain,
    job,
    of_job,
    resume,
    run,
    says,
    states,
    taken_over,
)

TRANSACTIONS = """
    SELECT (SELECT count(DISTINCT xmin::text) FROM checkpoints) AS of_checkpoints,
           (SELECT count(DISTINCT xmin::text) FROM job_states) AS of_states
"""
WRITES_WITHOUT_CHECKPOINT = """
    SELECT channel FROM checkpoint_writes w WHERE NOT EXISTS (
        SELECT FROM checkpoints c
        WHERE c.parent_checkpoint_id = w.checkpoint_id AND c.xmin = w.xmin)
"""


def written(conn: Connection) -> list[str]:
    """The nodes and calls of which there are writes."""
    found = sql(conn, "SELECT DISTINCT task_path FROM checkpoint_writes ORDER BY task_path")
    return [row["task_path"].removeprefix("~__pregel_pull, ") for row in found]


# --- together --------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_writes", [True, False])
def test_a_node_is_one_transaction_and_the_checkpoint_before_the_first_comes_with_it(
    conn: Connection, pool: CheckpointPool, keeps_writes: bool
) -> None:
    task = job(conn)
    graph = chain(("a", says("a")), ("b", says("b")))
    saver = FencedSaver(pool, task, "v1", opening_waits=True, keeps_writes=keeps_writes)
    run(graph, saver, task)
    assert [row["next_nodes"] for row in states(conn)] == [["__start__"], ["a"], ["b"], []]
    assert sql(conn, TRANSACTIONS) == [{"of_checkpoints": 3, "of_states": 3}]
    assert written(conn) == (["__start__", "a", "b"] if keeps_writes else [])
    assert sql(conn, WRITES_WITHOUT_CHECKPOINT) == []


def test_a_node_begins_when_all_that_was_before_it_is_committed(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    seen: list[Any] = []

    def looks(state: Any) -> Any:
        seen.append([row["next_nodes"] for row in states(conn)])
        return {}

    saver = FencedSaver(pool, task, "v1", is_new=True, opening_waits=True)
    run(chain(("a", looks), ("b", looks)), saver, task)
    assert seen == [[["__start__"], ["a"]], [["__start__"], ["a"], ["b"]]]


@pytest.mark.parametrize("opening_waits", [False, True])
def test_the_opening_is_saved_while_a_branch_from_the_start_runs_unless_it_waits(
    conn: Connection, pool: CheckpointPool, opening_waits: bool
) -> None:
    """The name of a model call tells behind what it was made: that must be there after a crash."""
    task = job(conn)

    def chooses(state: Any) -> str:
        if opening_waits:
            assert states(conn) == []
        else:
            eventually(lambda: [row["next_nodes"] for row in states(conn)] == [["__start__"]])
        return "a"

    graph = StateGraph(Notes)
    graph.add_node("a", says("a"))
    graph.add_conditional_edges(START, chooses, ["a"])
    saver = FencedSaver(pool, task, "v1", opening_waits=opening_waits)
    assert run(graph, saver, task)["notes"] == ["a"]


# --- at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["edges", "sends", "an edge and a send"])
def test_what_a_node_wrote_is_saved_while_others_run_beside_it(
    conn: Connection, pool: CheckpointPool, by: str
) -> None:
    task = job(conn)
    graph = StateGraph(Notes)

    def works(state: Any) -> Any:
        if state.get("text") == "slow":
            eventually(lambda: set(written(conn)) - {"__start__"})
        return {"notes": ["done"]}

    fast, slow = ({"notes": [], "text": text} for text in ("fast", "slow"))
    graph.add_node("a", works)
    graph.add_node("b", lambda state: works({"text": "slow"}))
    if by == "edges":
        graph.add_edge(START, "a")
        graph.add_edge(START, "b")
    elif by == "sends":
        graph.add_conditional_edges(START, lambda state: [Send("a", fast), Send("a", slow)], ["a"])
    else:
        graph.add_edge(START, "a")
        graph.add_conditional_edges(START, lambda state: [Send("a", slow)], ["a"])
    result = run(graph, FencedSaver(pool, task, "v1", keeps_writes=False), task)
    assert result["notes"] == ["done", "done"]


def test_what_a_node_asks_is_saved_at_once(conn: Connection, pool: CheckpointPool) -> None:
    task = job(conn)
    run(chain(("a", lambda state: interrupt("?"))), FencedSaver(pool, task, "v1"), task)
    assert written(conn) == ["__start__", "a"]


def test_what_waits_is_there_for_who_reads(conn: Connection, pool: CheckpointPool) -> None:
    task = job(conn)
    saver = FencedSaver(pool, task, "v1", is_new=True, opening_waits=True)
    config: Any = {"configurable": {"thread_id": str(task.task_id), "checkpoint_ns": ""}}
    opening: Any = {**empty_checkpoint(), "channel_values": {START: "in"}}
    saver.put(config, opening, {"source": "input", "step": -1}, {START: "1"})
    assert states(conn) == []
    found = saver.get_tuple(config)
    assert found is not None
    assert found.checkpoint["channel_values"] == {START: "in"}
    assert [row["next_nodes"] for row in states(conn)] == [[START]]


def test_what_a_call_of_a_node_brought_is_saved_while_the_node_runs(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)

    @as_task
    def part() -> str:
        return "part"

    def whole(state: Any) -> Any:
        found = part().result()
        eventually(lambda: any("push" in path for path in written(conn)))
        return {"notes": [found]}

    graph = chain(("whole", whole))
    result = run(graph, FencedSaver(pool, task, "v1", keeps_writes=False), task)
    assert result["notes"] == ["part"]


class Broken(Exception):
    """What a reducer raises, between the end of a node and its checkpoint."""


BEFORE_IT_BREAKS: list[Callable[[], object]] = []


def breaks(old: int, new: int) -> int:
    if new and BEFORE_IT_BREAKS:
        BEFORE_IT_BREAKS.pop()()
        raise Broken
    return old + new


class Summed(Notes, total=False):
    sum: Annotated[int, breaks]


def test_what_a_node_wrote_is_saved_if_no_checkpoint_follows(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    ran: list[str] = []
    graph = StateGraph(Summed)
    graph.add_node("a", lambda state: ran.append("a") or {"notes": ["a"], "sum": 1})
    graph.add_edge(START, "a")
    saver = FencedSaver(pool, task, "v1", keeps_writes=False)
    BEFORE_IT_BREAKS.append(lambda: None)
    with pytest.raises(Broken), saver.running():
        run(graph, saver, task)
    assert written(conn) == ["a"]
    assert resume(graph, FencedSaver(pool, task, "v1"), task)["notes"] == ["a"]
    assert ran == ["a"]


def test_a_worker_that_lost_its_lease_behind_a_node_does_not_save_what_that_wrote(
    conn: Connection, pool: CheckpointPool
) -> None:
    stale = job(conn)
    graph = StateGraph(Summed)
    graph.add_node("a", lambda state: {"notes": ["a"], "sum": 1})
    graph.add_edge(START, "a")
    saver = FencedSaver(pool, stale, "v1")
    BEFORE_IT_BREAKS.append(lambda: taken_over(conn, stale))
    with pytest.raises(Broken), saver.running():
        run(graph, saver, stale)
    assert written(conn) == ["__start__"]
    assert states(conn)[-1]["next_nodes"] == ["a"]


# --- a checkpoint that cannot be read without the writes before it -------------------------------


def all_of(old: list[str], new: Sequence[list[str]]) -> list[str]:
    return [*old, *flat.from_iterable(new)]


class Replayed(TypedDict, total=False):
    task: str
    notes: Annotated[list[str], DeltaChannel(all_of)]


@pytest.mark.parametrize(("keeps_writes", "found"), [(True, ["a", "b"]), (False, [])])
def test_a_field_that_is_made_of_writes_needs_them(
    conn: Connection, pool: CheckpointPool, keeps_writes: bool, found: Sequence[str]
) -> None:
    task = job(conn)
    graph = StateGraph(Replayed)
    for name in ("a", "b"):
        graph.add_node(name, says(name))
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    saver = FencedSaver(pool, task, "v1", keeps_writes=keeps_writes)
    run(graph, saver, task, {"task": "the task"})
    compiled = graph.compile(checkpointer=saver)
    assert compiled.get_state(of_job(task)).values.get("notes", []) == found


# --- not asked for ---------------------------------------------------------------------------


def test_a_new_job_reads_nothing_until_something_was_written(
    conn: Connection, pool: CheckpointPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = job(conn)
    graph = chain(("a", says("a")), ("b", says("b")))
    saver = FencedSaver(pool, task, "v1", is_new=True)
    with monkeypatch.context() as patched:
        patched.setattr(saver_module, "_require_tables", lambda pool, conn: None)
        patched.setattr(saver_module, "Reader", None)
        run(graph, saver, task)
    snapshot = graph.compile(checkpointer=saver).get_state(of_job(task))
    assert snapshot.values["notes"] == ["a", "b"]


def test_what_a_job_ended_with_is_what_its_last_checkpoint_says(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    saver = FencedSaver(pool, task, "v1")
    graph = chain(("a", says("a")), ("b", lambda state: {"notes": ["b"], "text": "done"}))
    run(graph, saver, task)
    values = graph.compile(checkpointer=saver).get_state(of_job(task)).values
    assert saver.ended_with is not None
    assert {name: saver.ended_with[name] for name in values} == values


def test_a_job_that_has_not_ended_has_ended_with_nothing(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)

    def fails(state: Any) -> Any:
        raise RuntimeError

    saver = FencedSaver(pool, task, "v1")
    with pytest.raises(RuntimeError):
        run(chain(("a", says("a")), ("b", fails)), saver, task)
    assert saver.ended_with is None


def test_nor_has_one_whose_last_checkpoint_was_not_written(
    conn: Connection, pool: CheckpointPool
) -> None:
    stale = job(conn)
    saver = FencedSaver(pool, stale, "v1")
    with pytest.raises(LeaseLost):
        run(chain(("a", lambda state: taken_over(conn, stale) and {})), saver, stale)
    assert saver.ended_with is None

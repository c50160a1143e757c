"""A worker's clock may be wrong: the newest checkpoint of a job is the one made last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from langgraph.checkpoint.base import id as ids
from langgraph.graph import StateGraph
from langgraph.types import Command, interrupt

from db import Connection
from execution.agent.saver import CheckpointPool, FencedSaver
from tests.support.small_graphs import chain, job, of_job, run, says, states, taken_over

AHEAD_NS = 3600 * 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock by which LangGraph makes ids; `ahead_ns` is how wrong it is. Each worker is a
    process, which remembers no ids of another."""
    real = ids.time.time_ns
    fake = SimpleNamespace(ahead_ns=0)
    fake.time_ns = lambda: real() + fake.ahead_ns
    monkeypatch.setattr(ids, "time", fake)
    monkeypatch.setattr(ids, "_last_v6_timestamp", None)

    def next_worker(ahead_ns: int) -> None:
        fake.ahead_ns = ahead_ns
        ids._last_v6_timestamp = None

    fake.next_worker = next_worker
    return fake


def asks_in_the_middle() -> StateGraph:
    return chain(
        ("one", says("one")),
        ("gate", lambda state: {"notes": [interrupt("go on?")]}),
        ("two", says("two")),
    )


def test_a_worker_whose_clock_is_behind_goes_on_behind_the_one_before(
    conn: Connection, pool: CheckpointPool, clock: SimpleNamespace
) -> None:
    first = job(conn)
    clock.next_worker(ahead_ns=AHEAD_NS)
    run(asks_in_the_middle(), FencedSaver(pool, first, "v1"), first)
    second = taken_over(conn, first)
    clock.next_worker(ahead_ns=0)
    graph = asks_in_the_middle().compile(checkpointer=FencedSaver(pool, second, "v1"))
    (asked,) = graph.get_state(of_job(second)).interrupts
    done = graph.invoke(Command(resume={asked.id: "yes"}), of_job(second), durability="sync")
    assert done["notes"] == ["one", "yes", "two"]
    assert graph.get_state(of_job(second)).next == ()
    assert [row["next_nodes"] for row in states(conn)] == [
        ["__start__"], ["one"], ["gate"], ["two"], [],
    ]  # fmt: skip


def test_so_does_one_that_goes_on_inside_of_a_subgraph(
    conn: Connection, pool: CheckpointPool, clock: SimpleNamespace
) -> None:
    def outer() -> StateGraph:
        inner: Any = asks_in_the_middle().compile()
        return chain(("before", says("before")), ("inner", inner), ("after", says("after")))

    first = job(conn)
    clock.next_worker(ahead_ns=AHEAD_NS)
    run(outer(), FencedSaver(pool, first, "v1"), first)
    second = taken_over(conn, first)
    clock.next_worker(ahead_ns=0)
    graph = outer().compile(checkpointer=FencedSaver(pool, second, "v1"))
    (asked,) = graph.get_state(of_job(second)).interrupts
    done = graph.invoke(Command(resume={asked.id: "yes"}), of_job(second), durability="sync")
    assert done["notes"][-3:] == ["yes", "two", "after"]
    assert graph.get_state(of_job(second)).values == done

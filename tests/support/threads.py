"""Threads of LangGraph that real graphs have written, and what is stored of them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any, TypedDict

from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from db import Connection
from tests.support.rows import sql


class State(TypedDict, total=False):
    task: str
    notes: Annotated[list[str], operator.add]
    rounds: int


def add_all(notes: list[str], writes: Sequence[list[str]]) -> list[str]:
    return [*notes, *chain.from_iterable(writes)]


class SummedState(TypedDict, total=False):
    """Of which a checkpoint holds the notes only now and then: they are the sum of the writes."""

    task: str
    notes: Annotated[list[str], DeltaChannel(add_all)]
    rounds: int


class SnapshotState(SummedState, total=False):
    notes: Annotated[list[str], DeltaChannel(add_all, snapshot_frequency=1)]


class NotToday(Exception):
    """A node does not work yet."""


def note(state: State) -> State:
    rounds = state.get("rounds", 0) + 1
    return {"notes": [f"note {rounds}"], "rounds": rounds}


def ask(state: State) -> State:
    return {"notes": [interrupt("may it go on?")]}


def fail(_: State) -> State:
    raise NotToday


def plain(last: Any = note, schema: type = State) -> StateGraph[Any]:
    """Three rounds of notes, then the last node."""
    graph: StateGraph[Any] = StateGraph(schema)
    graph.add_node("note", note, input_schema=schema)
    graph.add_node("last", last, input_schema=schema)
    graph.add_edge(START, "note")
    graph.add_conditional_edges(
        "note", lambda state: "note" if state["rounds"] < 3 else "last", ["note", "last"]
    )
    return graph


def nested(checkpointer: bool | None, last: Any = note) -> StateGraph[Any]:
    """Three rounds of a subgraph, with a memory of its own or without, then the last node."""
    inner = plain().compile(checkpointer=checkpointer)
    graph: StateGraph[Any] = StateGraph(State)
    graph.add_node("inner", inner)
    graph.add_node("note", note)
    graph.add_node("last", last)
    graph.add_edge(START, "inner")
    graph.add_edge("inner", "note")
    graph.add_conditional_edges(
        "note", lambda state: "inner" if state["rounds"] < 12 else "last", ["inner", "last"]
    )
    return graph


GRAPHS = {
    "plain": lambda: plain(),
    "that asks": lambda: plain(ask),
    "that fails": lambda: plain(fail),
    "with a subgraph": lambda: nested(None),
    "with a subgraph that asks": lambda: nested(None, plain(ask).compile()),
    "with a subgraph that remembers": lambda: nested(True),
}


@contextmanager
def saver(database_url: str) -> Iterator[PostgresSaver]:
    with PostgresSaver.from_conn_string(database_url) as opened:
        yield opened


def config(thread: int | str) -> Any:
    return {"configurable": {"thread_id": str(thread)}}


def run(graph: StateGraph[Any], opened: PostgresSaver, thread: int | str) -> None:
    """As far as it comes."""
    with contextlib.suppress(NotToday):
        graph.compile(opened).invoke({"task": "t"}, config(thread), durability="sync")


def state_of(graph: StateGraph[Any], opened: PostgresSaver, thread: int | str) -> Any:
    """What LangGraph loads of the thread: values, next, the checkpoint's id, what it asks."""
    found = graph.compile(opened).get_state(config(thread), subgraphs=True)
    asked = [one.value for one in found.interrupts]
    return found.values, found.next, found.config["configurable"]["checkpoint_id"], asked


TABLES = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")


def stored(conn: Connection, thread: int | str) -> dict[str, list[Any]]:
    """The rows of a thread, by table, without its name."""
    statement = """
        SELECT to_jsonb(t) - 'thread_id' AS row FROM {} t
        WHERE thread_id = %(thread)s ORDER BY to_jsonb(t)::text
    """
    return {
        table: [one["row"] for one in sql(conn, statement.format(table), thread=str(thread))]
        for table in TABLES
    }


def copy(conn: Connection, thread: int | str, to: str) -> None:
    """Let there be the same thread under another name."""
    statement = """
        INSERT INTO {} SELECT (jsonb_populate_record(
            t, jsonb_build_object('thread_id', %(to)s::text))).*
        FROM {} t WHERE thread_id = %(thread)s
    """
    for table in TABLES:
        sql(conn, statement.format(table, table), thread=str(thread), to=to)


def note_state(conn: Connection, task_id: int) -> None:
    """Let there be what people are shown of the job at each of its checkpoints, and one call."""
    statement = """
        INSERT INTO job_states (
            task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version, state,
            prompt_tokens, completion_tokens)
        SELECT %(task_id)s, checkpoint_id, 1, '{}', '{}', 'v', '{}', 0, 0
        FROM checkpoints WHERE thread_id = %(task_id)s::text AND checkpoint_ns = '';
        INSERT INTO model_calls (task_id, node, node_run, ordinal, reserved_tokens)
        VALUES (%(task_id)s, 'note', 'r', 0, 1);
    """
    sql(conn, statement, task_id=task_id)

"""Small graphs, run as an agent job that a test holds, and what is stored of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, StateGraph

from db import Connection, Row
from execution.agent.saver import FencedSaver
from queries.leases import ClaimedTask
from tests.support import rows
from tests.support.processes import eventually
from tests.support.rows import sql

TABLES = "checkpoints", "checkpoint_blobs", "checkpoint_writes", "job_states"
Node = Callable[[Any], Any]


class Notes(TypedDict, total=False):
    task: str
    notes: Annotated[list[str], operator.add]
    text: Any


def job(conn: Connection) -> ClaimedTask:
    return rows.claimed(conn, kind="agent", payload={"task": "t", "graph": "g"})


def of_job(task: ClaimedTask) -> dict[str, Any]:
    return {"configurable": {"thread_id": str(task.task_id)}}


def says(name: str) -> Node:
    return lambda state: {"notes": [name]}


def chain(*nodes: tuple[str, Node]) -> StateGraph:
    """One node after the other."""
    graph = StateGraph(Notes)
    for before, (name, node) in zip([START, *(name for name, _ in nodes)], nodes, strict=False):
        graph.add_node(name, node)
        graph.add_edge(before, name)
    return graph


def run(graph: StateGraph, saver: PostgresSaver, task: ClaimedTask, start: Any = None) -> Any:
    """Start the job, or go on with it."""
    given = {"task": "the task", "notes": []} if start is None else start
    compiled = graph.compile(checkpointer=saver)
    return compiled.invoke(given, of_job(task), durability="sync")


def resume(graph: StateGraph, saver: PostgresSaver, task: ClaimedTask) -> Any:
    return graph.compile(checkpointer=saver).invoke(None, of_job(task), durability="sync")


def stored(conn: Connection) -> dict[str, list[Row]]:
    """Everything that a late worker must not change."""
    statement = "SELECT * FROM {} AS t ORDER BY t::text"
    return {name: sql(conn, statement.format(name)) for name in TABLES}


def states(conn: Connection) -> list[Row]:
    return sql(conn, "SELECT * FROM job_states ORDER BY checkpoint_id")


def taken_over(conn: Connection, stale: ClaimedTask) -> ClaimedTask:
    rows.expire(conn, stale.task_id)
    rows.reap(conn)
    return rows.claim_only(conn, stale.task_id, "w2")


def put(saver: FencedSaver, task: ClaimedTask, value: object = "late") -> None:
    config: Any = {"configurable": {"thread_id": str(task.task_id), "checkpoint_ns": ""}}
    checkpoint = {**empty_checkpoint(), "channel_values": {"notes": [value]}}
    saver.put(config, checkpoint, {"source": "loop", "step": 9}, {"notes": "9"})  # type: ignore


def put_writes(saver: FencedSaver, task: ClaimedTask) -> None:
    config: Any = {
        "configurable": {"thread_id": str(task.task_id), "checkpoint_ns": "", "checkpoint_id": "1"}
    }
    saver.put_writes(config, [("notes", ["late"])], "task")


@contextmanager
def checkpoint_being_written(
    saver: FencedSaver,
    task: ClaimedTask,
    connect: Callable[[], Connection],
    threads: ThreadPoolExecutor,
) -> Iterator[Future[None]]:
    """It holds the task's row, and waits for LangGraph's tables until the block ends."""
    witness = connect()
    with connect().cursor() as holder:
        holder.execute("BEGIN; LOCK TABLE checkpoints")
        written = threads.submit(put, saver, task)
        eventually(lambda: "Lock" in waits_of_savers(witness))
        yield written
        holder.execute("ROLLBACK")


def waits_of_savers(conn: Connection) -> list[str]:
    statement = """
        SELECT coalesce(wait_event_type, '') AS waits FROM pg_stat_activity
        WHERE application_name = 'orchestrator checkpoints' AND datname = current_database()
    """
    return [row["waits"] for row in sql(conn, statement)]

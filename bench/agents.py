"""The team graph with a model that answers at once: our jobs against plain LangGraph.

    python -m bench.agents

One process runs the same graph with the same answers in three ways, each checkpoint committed
before the next node (durability "sync"), over checkpoint pools of the same size that stay open:

    PostgresSaver   LangGraph and its own saver, nothing else: a graph and a saver for each thread,
                    made before the first job (one saver does one thing at a time)
    FencedSaver     with our saver, which holds the task's row by its lease token and keeps the row
                    that people see; as in a worker, each job has its own
    whole jobs      as a worker runs them: the saver above, and each model call in the ledger before
                    and after it is made; a call is a coroutine of the runner's loop

A job has four nodes: supervisor, researcher, coder, reviewer. Each asks the model once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from langgraph.checkpoint.postgres import PostgresSaver
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

import db
from bench.common import ROOT, MeasureFailed, Stage
from bench.report import Record, run
from bench.tool import connected
from config import Settings, load_config
from db import Connection, NewTask
from execution.agent import team
from execution.agent.graphs import Graph, version_of
from execution.agent.saver import CheckpointPool, FencedSaver, open_pool
from execution.backends.interface import Completion, OnPiece
from execution.jobs import JobCalls
from queries.claims import Look, Wanted, claim_tasks
from queries.leases import ClaimedTask

NODES = 4
ANSWER = "x" * 1500
ONE_BY_ONE = 20  # jobs
IN_PARALLEL = 32
PARALLEL_JOBS = 64
REPETITIONS = 9
QUICK_REPETITIONS = 5
LEASE_SECONDS = 3600.0

Tasks = Sequence[ClaimedTask]
RunAll = Callable[[Tasks, int], None]  # these jobs, so many at a time
Lent = Callable[[ClaimedTask], AbstractContextManager[Any]]  # a compiled graph for a job


def measure(stage: Stage, record: Record, quick: bool) -> None:
    url = stage.database()
    settings = load_config(ROOT / "config.toml", {"DATABASE_URL": url})
    graph = Graph("team", team.build().compile(), version_of(team.build()), {})
    with (
        connected(url) as conn,
        pools(settings) as (ours, plain),
        worker_jobs(settings) as run_jobs,
    ):
        for jobs, threads in ((ONE_BY_ONE, 1), (PARALLEL_JOBS, IN_PARALLEL)):
            # A plain saver has no task; it gets one all the same: all work on equal tables.
            ways: dict[str, RunAll] = {
                "PostgresSaver": invoke_all(plain_graphs(plain, threads)),
                "FencedSaver": invoke_all(
                    lambda task: nullcontext(graph.with_saver(fenced(ours, task, graph)))
                ),
                "whole jobs": run_jobs,
            }
            for run_all in ways.values():
                node_ms(run_all, claimed_jobs(conn, threads), threads)
            for repetition in range(QUICK_REPETITIONS if quick else REPETITIONS):
                order = list(ways) if repetition % 2 else list(reversed(ways))
                took = {
                    name: node_ms(ways[name], claimed_jobs(conn, jobs), threads) for name in order
                }
                keep(record, took, threads)


def keep(record: Record, took: Mapping[str, float], threads: int) -> None:
    where = "one at a time" if threads == 1 else f"{threads} at a time"
    for name, ms in took.items():
        record.add(f"a node, {where}: {name}", ms, "ms")
    plain, fenced, whole = (took[way] for way in ("PostgresSaver", "FencedSaver", "whole jobs"))
    if threads == 1:
        record.ratio("node / plain LangGraph", fenced / plain)
        record.ratio("node of a whole job / plain LangGraph", whole / plain)
    else:
        record.ratio(f"{threads} jobs / {threads} savers on one pool", plain / fenced)
        record.ratio(f"{threads} whole jobs / {threads} savers on one pool", plain / whole)


def node_ms(run_all: RunAll, tasks: Tasks, threads: int) -> float:
    """Milliseconds for each node of these jobs."""
    gc.collect()
    began = time.perf_counter()
    run_all(tasks, threads)
    return (time.perf_counter() - began) * 1000 / (len(tasks) * NODES)


# --- the graph with a saver ------------------------------------------------------------------


def invoke_all(lent: Lent) -> RunAll:
    def run_job(task: ClaimedTask) -> None:
        config = {"configurable": {"thread_id": str(task.task_id)}}
        with lent(task) as graph:
            state = graph.invoke({"task": "Do it."}, config, context=Instant(), durability="sync")
        check_end(state)

    def run_all(tasks: Tasks, threads: int) -> None:
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(run_job, tasks))

    return run_all


def plain_graphs(pool: ConnectionPool[Any], count: int) -> Lent:
    """As many graphs, each with its own saver, for as many threads."""
    free: SimpleQueue[Any] = SimpleQueue()
    for _ in range(count):
        free.put(team.build().compile(checkpointer=PostgresSaver(pool)))

    @contextmanager
    def lent(task: ClaimedTask) -> Iterator[Any]:
        graph = free.get()
        try:
            yield graph
        finally:
            free.put(graph)

    return lent


def fenced(pool: CheckpointPool, task: ClaimedTask, graph: Graph) -> FencedSaver:
    """As a worker makes them for a new job."""
    return FencedSaver(
        pool,
        task,
        graph.version,
        is_new=True,
        opening_waits=graph.opens_plainly,
        keeps_writes=not graph.is_saved_as_it_is,
    )


@contextmanager
def pools(settings: Settings) -> Iterator[tuple[CheckpointPool, ConnectionPool[Any]]]:
    """The pool that our savers have, and one of the same size as LangGraph's documents set it."""
    size = settings.agents.pool_size
    kwargs = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    ours = open_pool(settings)
    plain: ConnectionPool[Any] = ConnectionPool(
        settings.database_url, min_size=size, max_size=size, open=True, kwargs=kwargs
    )
    try:
        plain.wait()
        yield ours, plain
    finally:
        ours.close()
        plain.close()


def check_end(state: Any) -> None:
    if state["verdict"] != "approved" or state["code"] != ANSWER:
        raise MeasureFailed(f"the team did something else: {state}")


# --- whole jobs ------------------------------------------------------------------------------


@contextmanager
def worker_jobs(settings: Settings) -> Iterator[RunAll]:
    jobs = JobCalls(settings, lambda task, node, piece: None, lambda task, node, phase: None)

    async def run_all(tasks: Tasks, at_a_time: int) -> None:
        places = asyncio.Semaphore(at_a_time)

        async def run_job(task: ClaimedTask) -> None:
            async with places:
                check_end((await jobs.run(task, "local", InstantServer())).result)

        await asyncio.gather(*map(run_job, tasks))

    with asyncio.Runner() as runner:
        try:
            yield lambda tasks, at_a_time: runner.run(run_all(tasks, at_a_time))
        finally:
            runner.run(jobs.close())


# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instant:
    """A JobContext whose model answers at once, and is content with the first attempt."""

    task_id: int = 1
    attempt: int = 1
    require_approval: bool = False
    max_revisions: int = 2

    def ask(self, prompt: str) -> str:
        return ANSWER

    def ask_for(self, prompt: str, schema: Mapping[str, Any]) -> Any:
        if "route" in schema["properties"]:
            return {"route": "research", "plan": ANSWER[:200]}
        return {"verdict": "approved", "feedback": "fine"}

    def check(self) -> None:
        pass


class InstantServer:
    """The same model as a Backend."""

    async def probe(self) -> None:
        pass

    async def complete(
        self, model: str, prompt: str, on_piece: OnPiece, schema: Mapping[str, Any] | None = None
    ) -> Completion:
        said = Instant()
        text = said.ask(prompt) if schema is None else json.dumps(said.ask_for(prompt, schema))
        on_piece(text)
        return Completion(text, prompt_tokens=100, completion_tokens=100, truncated=False)

    async def close(self) -> None:
        pass


# --- the queue -------------------------------------------------------------------------------


class WhateverIsDue:
    """A claim policy for a queue in which nothing but agent jobs waits."""

    has_limits = False
    depth_that_matters = 0

    def routes_at_any_depth(self) -> list[str] | None:
        return ["auto"]

    def wanted(self, look: Look) -> tuple[list[Wanted], dict[str, int | None]]:
        return [Wanted("auto", "all")], {}

    def choose(self, tasks: Sequence[ClaimedTask], depth: int) -> list[str | None]:
        return ["local" for _ in tasks]


def claimed_jobs(conn: Connection, count: int) -> list[ClaimedTask]:
    """New jobs whose leases are ours, for longer than all of this takes."""
    job = NewTask("default", "agent", {"task": "Do it.", "graph": "team"})
    db.submit_tasks(conn, [job] * count)
    claim = claim_tasks(conn, "bench", count, LEASE_SECONDS, WhateverIsDue())
    return [task for task, _ in claim.tasks]


if __name__ == "__main__":
    run("agents", "Agents: a node in our jobs and in LangGraph", measure, "--quick" in sys.argv)

"""Graphs of a user's own, for tests of what a graph may do to its worker.

They tell of themselves by files in the folder that the task's text names, and wait for others.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.func import task as as_task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime, get_runtime
from langgraph.types import RetryPolicy, interrupt
from pydantic import BaseModel

from execution.agent.context import JobContext

WAIT_SECONDS = 0.02


class State(BaseModel):
    task: str  # a folder
    said: Annotated[list[str], operator.add] = []


Run = Runtime[JobContext]
Patch = dict[str, Any]


def mark(state: State, name: str) -> None:
    (Path(state.task) / name).touch()


def wait_for(state: State, name: str) -> None:
    """Until the file is there, whatever else happens."""
    while not (Path(state.task) / name).exists():
        time.sleep(WAIT_SECONDS)


def first(state: State, runtime: Run) -> Patch:
    return {"said": [runtime.context.ask("first")]}


def last(state: State, runtime: Run) -> Patch:
    mark(state, "last")
    return {"said": [runtime.context.ask("last")]}


def line(*nodes: Callable[..., Patch], **options: Any) -> StateGraph[Any, Any, Any, Any]:
    """One node after the other."""
    graph = StateGraph(State, context_schema=JobContext)
    names = [node.__name__ for node in nodes]
    for node in nodes:
        graph.add_node(node.__name__, node, **options)
    for source, target in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(source, target)
    return graph


# --- a node that waits between its model call and its end -----------------------------------------


def waits(state: State, runtime: Run) -> Patch:
    """Ask, then wait for the file that is named like this attempt."""
    said = runtime.context.ask("waits")
    mark(state, f"entered {runtime.context.attempt}")
    wait_for(state, str(runtime.context.attempt))
    return {"said": [f"{said} in attempt {runtime.context.attempt}"]}


def build_waiting() -> StateGraph[Any, Any, Any, Any]:
    return line(first, waits, last)


def chooses(state: State, runtime: Run) -> str:
    """A branch in front of all nodes, which asks and waits as that node does."""
    waits(state, runtime)
    return "last"


def build_choosing() -> StateGraph[Any, Any, Any, Any]:
    return chosen_by(chooses)


@as_task
def waits_in_a_call(state: State) -> None:
    waits(state, get_runtime(JobContext))


def chooses_by_a_call(state: State) -> str:
    waits_in_a_call(state).result()
    return "last"


def build_choosing_by_a_call() -> StateGraph[Any, Any, Any, Any]:
    return chosen_by(chooses_by_a_call)


def chosen_by(chooses: Callable[..., str]) -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(State, context_schema=JobContext)
    graph.add_node("last", last)
    graph.add_conditional_edges(START, chooses, ["last"])
    return graph


# --- nodes that swallow, and that listen to nothing -----------------------------------------------


def swallows(state: State, runtime: Run) -> Patch:
    try:
        return {"said": [runtime.context.ask("swallows")]}
    except Exception:
        return {"said": ["swallowed"]}


def build_swallowing() -> StateGraph[Any, Any, Any, Any]:
    return line(first, swallows, last, retry_policy=RetryPolicy(initial_interval=0.01))


def deaf(state: State) -> Patch:
    mark(state, "deaf")
    wait_for(state, "never")
    return {}


def other_deaf(state: State) -> Patch:
    mark(state, "other deaf")
    wait_for(state, "never")
    return {}


def build_deaf() -> StateGraph[Any, Any, Any, Any]:
    """Two at once, which LangGraph runs in threads of a pool."""
    graph = StateGraph(State)
    for node in (deaf, other_deaf):
        graph.add_node(node.__name__, node)
        graph.add_edge(START, node.__name__)
    return graph


# --- a node that LangGraph runs again -------------------------------------------------------------


def stumbles(state: State, runtime: Run) -> Patch:
    """Two calls; then an error the first time."""
    said = [runtime.context.ask("one"), runtime.context.ask("two")]
    if not (Path(state.task) / "stumbled").exists():
        mark(state, "stumbled")
        raise ConnectionError("it stumbled")
    return {"said": said}


def build_stumbling() -> StateGraph[Any, Any, Any, Any]:
    return line(stumbles, retry_policy=RetryPolicy(initial_interval=0.01))


def build_failing() -> StateGraph[Any, Any, Any, Any]:
    """Without that policy: the job itself is tried again."""
    return line(stumbles)


# --- gates ----------------------------------------------------------------------------------------


def left(state: State, runtime: Run) -> Patch:
    said = runtime.context.ask("left")
    one = interrupt({"about": "left", "said": said})
    two = interrupt("and again?")
    return {"said": [f"left {one['approved']} {two['approved']}"]}


def right(state: State) -> Patch:
    return {"said": [f"right {interrupt({'about': 'right'})['feedback']}"]}


def build_gates() -> StateGraph[Any, Any, Any, Any]:
    """Two questions in one node, beside one in another."""
    graph = StateGraph(State, context_schema=JobContext)
    for node in (left, right):
        graph.add_node(node.__name__, node)
        graph.add_edge(START, node.__name__)
    return graph


def asks(state: State) -> Patch:
    return {"said": [str(interrupt("go on?")["approved"])]}


def build_gate() -> StateGraph[Any, Any, Any, Any]:
    return line(asks, last)


def build_gate_with_more() -> StateGraph[Any, Any, Any, Any]:
    """A later version that knows where the earlier one waits."""
    return line(asks, last, first)


def asks_anew(state: State) -> Patch:
    return asks(state)


def build_gate_renamed() -> StateGraph[Any, Any, Any, Any]:
    """A later version that does not."""
    return line(asks_anew, last)


class Reduced(TypedDict, total=False):
    task: str
    notes: Annotated[list[str], operator.add]
    score: Annotated[int, operator.add]
    text: str


def build_reduced() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(Reduced)
    graph.add_node("writes", lambda state: {"text": "x"})
    graph.add_edge(START, "writes")
    return graph


def build_nothing() -> object:
    return {}


# --- what a state may hold ------------------------------------------------------------------------


class OddState(BaseModel):
    """Values that JSON does not have, of which nobody writes one."""

    task: str
    seen: set[str] = {"a"}
    since: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    texts: list[str] = []


def writes_much(state: OddState) -> Patch:
    """So many bytes as the task says."""
    return {"texts": ["x" * int(state.task)]}


def build_odd() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(OddState)
    graph.add_node("writes", writes_much)
    graph.add_edge(START, "writes")
    return graph


def asks_much(state: OddState) -> Patch:
    interrupt({"text": "x" * int(state.task)})
    return {}


def build_large_gate() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(OddState)
    graph.add_node("asks", asks_much)
    graph.add_edge(START, "asks")
    return graph


# --- two at once, of which one asks a model -------------------------------------------------------


def at_once(state: State) -> Patch:
    return {"said": ["at once"]}


def build_parallel() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(State, context_schema=JobContext)
    for node in (at_once, first):
        graph.add_node(node.__name__, node)
        graph.add_edge(START, node.__name__)
    return graph


# --- graphs in nodes ------------------------------------------------------------------------------


def endless() -> CompiledStateGraph[Any, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("again", lambda state: {"said": ["again"]})
    graph.add_edge(START, "again")
    graph.add_edge("again", "again")
    return graph.compile()


def goes_deep(state: State) -> Patch:
    endless().invoke({"task": state.task})
    return {}


def build_deep() -> StateGraph[Any, Any, Any, Any]:
    return line(goes_deep)


def build_unsaved() -> StateGraph[Any, Any, Any, Any]:
    inner = line(at_once).compile(checkpointer=False)
    graph = StateGraph(State)
    graph.add_node("inner", inner)
    graph.add_edge(START, "inner")
    return graph


def build_unsaved_within() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("outer", build_unsaved().compile())
    graph.add_edge(START, "outer")
    return graph


# --- functions that a worker's thread cannot run --------------------------------------------------


async def waits_async(state: State) -> Patch:
    return {}


async def chooses_async(state: State) -> str:
    return "last"


def build_async_node() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("waits", waits_async)
    graph.add_edge(START, "waits")
    return graph


def build_async_branch() -> StateGraph[Any, Any, Any, Any]:
    graph = line(first)
    graph.add_node("last", last)
    graph.add_conditional_edges("first", chooses_async, ["last"])
    return graph


def build_limited() -> StateGraph[Any, Any, Any, Any]:
    return line(at_once, timeout=1.0)


# --- a graph that changes while it is compiled ----------------------------------------------------


def fails(state: State) -> Patch:
    raise ValueError("it always does")


def says_that_it_failed(state: State) -> Patch:
    return {"said": ["it failed"]}


def build_with_default_handler() -> StateGraph[Any, Any, Any, Any]:
    """Compiling it adds a node, and compiling it twice fails."""
    graph = line(fails)
    return graph.set_node_defaults(error_handler=says_that_it_failed)


# --- nodes that raise what is not theirs to raise -------------------------------------------------


def raises_what_it_is_told(state: State, runtime: Run) -> Patch:
    """The exception that the task's text names, with what it is called by."""
    from langgraph.errors import GraphDrained

    from errors import DatabaseUnavailable, LeaseLost, SchemaOutdated
    from execution.agent.context import JobStopped
    from execution.errors import Outage

    engine = (GraphDrained, DatabaseUnavailable, LeaseLost, SchemaOutdated, JobStopped, Outage)
    raised = {one.__name__: one for one in engine}[state.task]
    raise raised("said by a node")


def build_engine_raising() -> StateGraph[Any, Any, Any, Any]:
    return line(raises_what_it_is_told)


# --- a node that asks twice, and fails in between -------------------------------------------------


def asks_twice(state: State, runtime: Run) -> Patch:
    first_answer = interrupt("publish?")
    if runtime.context.attempt == 2:
        raise ValueError("between the questions")
    second_answer = interrupt("delete everything?")
    return {"said": [str(one["approved"]) for one in (first_answer, second_answer)]}


def build_asking_twice() -> StateGraph[Any, Any, Any, Any]:
    return line(asks_twice)

"""One agent job in its thread: begun or resumed, carried on node by node, and what came of it.

Where a job stands is told by its checkpoints alone. Its graph may be the user's: what its nodes
raise is a failure of the job, and what a model call or a write to Postgres has found out ends the
attempt whatever the nodes make of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphDrained, GraphRecursionError
from langgraph.runtime import RunControl
from langgraph.types import Command, Interrupt, StateSnapshot

from config import TEAM, Settings
from connection import Row
from errors import DatabaseUnavailable, LeaseLost, SchemaOutdated, words_of
from execution.agent.context import BudgetSpent, JobStopped
from execution.agent.graphs import CompiledGraph, Graph, Graphs
from execution.agent.model import Calls, Frames, JobModel
from execution.agent.saver import FencedSaver, open_pool
from execution.agent.shown import shown
from execution.agent.signals import Signals
from execution.errors import CallEnded, Failure, Outage, Permanent
from pool import Pool
from queries.jobs import newest_state
from queries.leases import ClaimedTask, Outcome
from runs.templates import TemplateError, filled_text

logger = logging.getLogger(__name__)

OnNode = Callable[[str, str], None]  # a node's name, "started" or "finished"

# Before a job is tried again that failed for no fault of its own.
DATABASE_AWAY_SECONDS = 1.0
WRONG_TABLES_SECONDS = 5.0
INPUT = "task"
RESUME = "__resume__"  # LangGraph's channel of answers
# By what the engine ends an attempt of its own accord.
ENDS_ITSELF = (
    GraphDrained,
    JobStopped,
    LeaseLost,
    DatabaseUnavailable,
    SchemaOutdated,
    Outage,
)
# Far below what one statement carries, and more than anybody reads before they decide.
MOST_ASKS_BYTES = 4 * 1024 * 1024


class Shared:
    """What the jobs of a process share: graphs, connections for checkpoints and ledger, and what
    is known of the servers' own tokens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.graphs = Graphs(settings.graphs)
        size = {"pool_size": settings.agents.pool_size}
        self.ledger = Pool(
            settings.database_url, settings.database.model_copy(update=size), "agent jobs"
        )
        self.checkpoints = open_pool(settings)
        self.frames = Frames()

    def close(self) -> None:
        self.checkpoints.close()
        self.ledger.close()


@dataclass(frozen=True)
class Job:
    """One attempt of one job."""

    task: ClaimedTask
    route: str
    shared: Shared
    calls: Calls
    signals: Signals
    on_node: OnNode

    def run(self) -> Outcome:
        """What came of it; raises the errors of execution/errors.py, without tokens: the ledger
        has told the task's row what its calls used."""
        try:
            outcome = self._carry_on()
        except (GraphDrained, LeaseLost):  # of a lost lease nothing can be written, nor is
            return Outcome("released")
        except DatabaseUnavailable as away:
            return self._postponed(away)
        except SchemaOutdated as wrong:  # an installation's fault: jobs wait for its end
            logger.error("Task %s cannot go on: %s", self.task.task_id, wrong)
            return Outcome("released", delay_seconds=WRONG_TABLES_SECONDS)
        except JobStopped:
            return self._stopped()
        except CallEnded:
            raise
        except BaseException as failed:  # of a node, or of LangGraph about one
            logger.warning("The graph of task %s failed", self.task.task_id, exc_info=failed)
            said = f"{type(failed).__name__}: {words_of(failed)}"
            raise Failure(said.removesuffix(": ")) from failed
        return replace(
            outcome, route=self.route, model=self.calls.model, truncated=self.calls.truncated
        )

    # --- where it stands -----------------------------------------------------------------------

    def _carry_on(self) -> Outcome:
        newest = self._newest_state()
        if newest is not None and not newest["next_nodes"]:
            return self._succeeded({**self._defaults(), **newest["state"]})  # it had ended before
        graph = self._graph()
        most = self.shared.settings.limits.max_result_bytes
        saver = FencedSaver(
            self.shared.checkpoints,
            self.task,
            graph.version,
            most,
            is_new=newest is None,
            opening_waits=graph.opens_plainly,
            keeps_writes=not graph.is_saved_as_it_is,
        )
        compiled = graph.with_saver(saver)
        config: RunnableConfig = {
            "configurable": {"thread_id": str(self.task.task_id)},
            "recursion_limit": self.shared.settings.agents.recursion_limit,
            "metadata": {"graph_version": graph.version},
        }
        has_run: set[str] = set()
        if newest is None:
            given: Any = {INPUT: self._text()}
        else:
            snapshot = compiled.get_state(config)
            self._check_version(graph, newest, snapshot)
            has_run = {task.id for task in snapshot.tasks if task.result is not None}
            given = None
            if snapshot.interrupts:
                answered = answers_stored(saver, config, snapshot)
                if not self._is_decided(snapshot.interrupts):
                    return _parked(snapshot.interrupts[0], answered)
                given = self._answer(answered)
        try:
            with saver.running():
                self._stream(compiled, given, config, has_run)
        except ENDS_ITSELF as raised:
            if self._is_ours(raised, saver):
                raise
            raise Failure(
                f"a node raised {type(raised).__name__}, which is not its to raise"
            ) from None
        except BudgetSpent as spent:  # what there is, is the result: also of finished branches
            values = compiled.get_state(config).values
            return self._succeeded({**graph.defaults, **values, "stopped": spent.which})
        except GraphRecursionError as reached:
            return self._out_of_steps(compiled.get_state(config), reached)
        if saver.ended_with is not None and graph.is_saved_as_it_is:  # nothing has to be read back
            return self._succeeded({**graph.defaults, **saver.ended_with})
        return self._outcome(graph, compiled.get_state(config), saver, config)

    def _graph(self) -> Graph:
        return self.shared.graphs.load(self.task.payload.get("graph") or TEAM)

    def _defaults(self) -> Mapping[str, Any]:
        """Those of the state, for a job that has ended; its graph may be gone."""
        try:
            return self._graph().defaults
        except CallEnded:
            return {}

    def _newest_state(self) -> Row | None:
        with self.shared.ledger.connection() as conn:
            return newest_state(conn, self.task.task_id)

    def _text(self) -> str:
        """What the job is to do; in a step with the outputs of others filled in."""
        text = self.task.payload.get("task")
        if not isinstance(text, str):
            raise Permanent("the task's payload has no task; submit it again with one")
        if self.task.run_id is None:
            return text
        max_bytes = self.shared.settings.limits.max_prompt_bytes
        try:
            return filled_text(self.task.kind, self.task.payload, self.task.outputs, max_bytes)
        except TemplateError as refused:
            raise Permanent(str(refused)) from refused

    def _check_version(self, graph: Graph, newest: Row, snapshot: StateSnapshot) -> None:
        """Raise Permanent if this graph cannot go on where another version of it stopped."""
        gone = set(newest["next_nodes"]) - {"__start__", *graph.compiled.builder.nodes}
        if (newest["graph_version"] != graph.version and gone) or not snapshot.tasks:
            raise Permanent(
                f"begun by another version of graph {graph.name}, "
                f"which was to go on with {', '.join(newest['next_nodes'])}; submit it again"
            )

    def _is_decided(self, interrupts: tuple[Interrupt, ...]) -> bool:
        """Whether one of these was decided; a decision counts for no other."""
        gate = self.task.gate or {}
        return "decision" in gate and gate["interrupt"] in {one.id for one in interrupts}

    def _answer(self, answered: Mapping[str, int]) -> Command[Any] | None:
        """What resumes the graph with the decision, once: an attempt that failed behind the
        question has stored the answer, and given again it would answer that node's next one."""
        gate = self.task.gate or {}
        asked = gate["interrupt"]
        if answered[asked] > gate["answered"]:
            return None
        return Command(resume={asked: gate["decision"]})

    # --- going on ------------------------------------------------------------------------------

    def _stream(
        self, compiled: CompiledGraph, given: Any, config: RunnableConfig, has_run: Set[str]
    ) -> None:
        """Run until there is nothing to run; LangGraph tells again of what `has_run` beside what
        is to run now."""
        control = RunControl()
        self.signals.on_drain(partial(control.request_drain, "the worker stops"))
        payload, agents = self.task.payload, self.shared.settings.agents
        model = JobModel(
            task_id=self.task.task_id,
            attempt=self.task.attempt,
            require_approval=bool(payload.get("require_approval")),
            max_revisions=payload.get("max_revisions", agents.max_revisions),
            calls=self.calls,
        )
        stream = compiled.stream(
            given,
            config,
            context=model,
            stream_mode="tasks",
            durability="sync",
            control=control,
        )
        with closing(stream) as events:  # type: ignore[type-var]  # it is a generator
            for event in events:
                self.calls.check()  # a node may have swallowed that it is to stop
                if event["id"] in has_run or event.get("error") or event.get("interrupts"):
                    continue  # or it has to run again before it has finished
                self.on_node(event["name"], "finished" if "result" in event else "started")

    def _is_ours(self, raised: BaseException, saver: FencedSaver) -> bool:
        """Whether the engine raised this; nodes can as well, and it says nothing if they do."""
        if isinstance(raised, GraphDrained):
            return self.signals.is_draining
        if isinstance(raised, JobStopped):
            return self.signals.is_stopped or self.calls.ended is not None
        return any(raised is one for one in saver.raised)

    # --- what came of it -----------------------------------------------------------------------

    def _outcome(
        self, graph: Graph, snapshot: StateSnapshot, saver: FencedSaver, config: RunnableConfig
    ) -> Outcome:
        """The end of the stream alone says nothing: LangGraph ends it in silence, too, when there
        is nothing that it could do."""
        if snapshot.interrupts:
            return _parked(snapshot.interrupts[0], answers_stored(saver, config, snapshot))
        if snapshot.tasks:
            names = ", ".join(task.name for task in snapshot.tasks)
            raise Failure(f"the graph stopped at {names}, which is not its end")
        return self._succeeded({**graph.defaults, **snapshot.values})

    def _succeeded(self, state: Mapping[str, Any]) -> Outcome:
        """With the state as it is shown, so that no result of a job that has ended is refused."""
        return Outcome(
            "succeeded", result=shown(state, self.shared.settings.limits.max_result_bytes)
        )

    def _out_of_steps(self, snapshot: StateSnapshot, reached: GraphRecursionError) -> Outcome:
        """The job's own limit; raises Failure if it was that of a graph that a node runs: then it
        is the node that has failed."""
        if failed := [task.name for task in snapshot.tasks if task.error]:
            names, said = ", ".join(failed), words_of(reached)
            raise Failure(f"a graph inside of {names} took too many steps: {said}") from reached
        limit = self.shared.settings.agents.recursion_limit
        error = f"it took more steps than agents.recursion_limit ({limit}) in one attempt"
        return Outcome("recursion_limit", error=error)

    def _postponed(self, away: Exception) -> Outcome:
        logger.warning("Task %s cannot go on: %s", self.task.task_id, words_of(away))
        return Outcome("released", delay_seconds=DATABASE_AWAY_SECONDS)

    def _stopped(self) -> Outcome:
        """What a call has found out; else somebody outside has stopped it, who knows why."""
        match self.calls.ended:
            case None | LeaseLost():
                return Outcome("released")
            case DatabaseUnavailable() as away:
                return self._postponed(away)
            case ended:
                raise ended


def answers_stored(
    saver: FencedSaver, config: RunnableConfig, snapshot: StateSnapshot
) -> dict[str, int]:
    """How many answers LangGraph has stored for the node that asks, by interrupt."""
    found = saver.get_tuple(config)
    stored: Counter[str] = Counter()
    for task_id, channel, value in (found and found.pending_writes) or ():
        if channel == RESUME:
            stored[task_id] += len(value) if isinstance(value, list) else 1
    return {one.id: stored[task.id] for task in snapshot.tasks for one in task.interrupts}


def _parked(interrupt: Interrupt, answered: Mapping[str, int]) -> Outcome:
    """The artefact stands for this question: the next has another, though it asks the same."""
    question = {
        "interrupt": interrupt.id,
        "asks": shown({"asks": interrupt.value}, MOST_ASKS_BYTES)["asks"],
    }
    text = json.dumps(question, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    artefact = hashlib.sha256(text.encode()).hexdigest()
    gate = {**question, "artefact": artefact, "answered": answered[interrupt.id]}
    return Outcome("parked", gate=gate)

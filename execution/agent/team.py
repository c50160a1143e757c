"""The agent team: a supervisor, a researcher, a coder and a reviewer, as a LangGraph graph.

    supervisor ──▶ researcher ──▶ coder ──▶ approval ──▶ reviewer ──▶ end
        └───────────────────────▶  ▲ └───────────────────▶  │
                                   └──────── rejected ──────┘

A person approves only in jobs that require it, and rejects as the reviewer does. Each rejection is
one revision, and after the last of them the job ends with the code as it is.

A node is a function of the state that returns what it changes. It asks models through its job's
context and does nothing else outside: so it may run again after a crash, and needs no database and
no model to be tested.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import interrupt
from pydantic import BaseModel

from execution.agent import prompts
from execution.agent.context import InvalidReply, JobContext

NO_CODE = "There is no code."
UNREADABLE = "The reviewer's reply could not be read. Check the code once more."

MARKDOWN = re.compile(r"```[^\n`]*\n(.*)```", re.DOTALL)

Patch = dict[str, Any]


class TeamState(BaseModel):
    """What the team knows of its job, checkpointed after every node and shown to its user.

    All but the task have a default: a checkpoint from before a field existed can still go on.
    """

    task: str
    route: Literal["research", "code"] = "research"
    plan: str = ""
    research: str = ""
    code: str = ""
    verdict: Literal["approved", "rejected"] | None = None  # on this code; None: not judged yet
    feedback: str = ""
    revisions: int = 0
    stopped: Literal["max_revisions"] | None = None


# --- nodes -----------------------------------------------------------------------------------


def supervisor(state: TeamState, runtime: Runtime[JobContext]) -> Patch:
    """Choose the route and make a plan; by a reply that cannot be read, the longer route.

    It writes all fields, those of the others as they are before them: a user sees all from here on.
    """
    try:
        reply = runtime.context.ask_for(prompts.for_supervisor(state.task), prompts.ROUTE)
        begun = TeamState(task=state.task, route=reply["route"], plan=reply["plan"])
    except InvalidReply:
        begun = TeamState(task=state.task)
    return begun.model_dump(exclude={"task"})


def researcher(state: TeamState, runtime: Runtime[JobContext]) -> Patch:
    return {"research": runtime.context.ask(prompts.for_researcher(state.task, state.plan))}


def coder(state: TeamState, runtime: Runtime[JobContext]) -> Patch:
    """Write the code, or write it again after a rejection, which is one revision."""
    is_revision = state.verdict == "rejected"
    if is_revision:
        prompt = prompts.for_coder_again(state.task, state.research, state.code, state.feedback)
    else:
        prompt = prompts.for_coder(state.task, state.plan, state.research)
    code = without_markdown(runtime.context.ask(prompt))
    return {"code": code, "verdict": None, "revisions": state.revisions + is_revision}


def approval(state: TeamState, runtime: Runtime[JobContext]) -> Patch:
    """Ask a person, once for each version of the code; the job is parked until they answer.

    LangGraph runs this node again from its first line when they have: nothing may come before
    `interrupt`, and nothing may catch what it raises.
    """
    answer = interrupt({"code": state.code, "revision": state.revisions})
    if answer["approved"] is True:
        return {}
    return rejection(state, runtime, answer["feedback"] or "")


def reviewer(state: TeamState, runtime: Runtime[JobContext]) -> Patch:
    """Judge the code; a reply that cannot be read approves of nothing."""
    if not state.code.strip():
        return rejection(state, runtime, NO_CODE)
    try:
        reply = runtime.context.ask_for(
            prompts.for_reviewer(state.task, state.code), prompts.REVIEW
        )
    except InvalidReply:
        return rejection(state, runtime, UNREADABLE)
    if reply["verdict"] == "approved":
        return {"verdict": "approved", "feedback": reply["feedback"]}
    return rejection(state, runtime, reply["feedback"])


def rejection(state: TeamState, runtime: Runtime[JobContext], feedback: str) -> Patch:
    """Back to the coder, unless there was the last revision already."""
    is_last = state.revisions >= runtime.context.max_revisions
    stopped = "max_revisions" if is_last else None
    return {"verdict": "rejected", "feedback": feedback, "stopped": stopped}


def without_markdown(reply: str) -> str:
    """The inside of a reply that is one block of markdown; any other as it is."""
    block = MARKDOWN.fullmatch(reply.strip())
    if block is None or "```" in block[1]:
        return reply
    return block[1].removesuffix("\n")


# --- edges -----------------------------------------------------------------------------------


def after_supervisor(state: TeamState) -> str:
    return "coder" if state.route == "code" else "researcher"


def after_coder(state: TeamState, runtime: Runtime[JobContext]) -> str:
    return "approval" if runtime.context.require_approval else "reviewer"


def after_approval(state: TeamState) -> str:
    return after_reviewer(state) if state.verdict == "rejected" else "reviewer"


def after_reviewer(state: TeamState) -> str:
    return "coder" if state.verdict == "rejected" and state.stopped is None else END


def build() -> StateGraph[TeamState, JobContext]:
    """The graph `team` of config.toml."""
    graph = StateGraph(TeamState, context_schema=JobContext)
    for node in (supervisor, researcher, coder, approval, reviewer):
        graph.add_node(node)
    graph.add_edge(START, "supervisor")
    graph.add_conditional_edges("supervisor", after_supervisor, ["researcher", "coder"])
    graph.add_edge("researcher", "coder")
    graph.add_conditional_edges("coder", after_coder, ["approval", "reviewer"])
    graph.add_conditional_edges("approval", after_approval, ["reviewer", "coder", END])
    graph.add_conditional_edges("reviewer", after_reviewer, ["coder", END])
    return graph

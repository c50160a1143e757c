"""A graph of one's own: a translation that a person corrects. docs/own-graph.md explains it.

    draft ──▶ correction ──▶ polish ──▶ end
      ▲───────────┘ rejected

In config.toml, below [graphs]: translation = "examples.translation:build"
"""

from __future__ import annotations

from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import interrupt
from pydantic import BaseModel

from execution.agent.context import JobContext
from execution.agent.prompts import Fence


class Translation(BaseModel):
    """The job's state; `task` is what was submitted, and the rest has defaults."""

    task: str
    draft: str = ""
    approved: bool = False
    feedback: str = ""
    text: str = ""


def draft(state: Translation, runtime: Runtime[JobContext]) -> dict[str, Any]:
    """Translate, the second time with what a person has said of the first."""
    fence = Fence()  # holds in what others have written, so that it is not taken for the prompt
    prompt = f"Translate the text into French.\n{fence.around('text', state.task)}"
    if state.feedback:
        prompt += f"\nKeep in mind:\n{fence.around('feedback', state.feedback)}"
    return {"draft": runtime.context.ask(f"{prompt}\nReply only with the translation.")}


def correction(state: Translation) -> dict[str, Any]:
    """Park the job until a person has seen the draft; then the node runs again, with the answer."""
    answer = interrupt({"draft": state.draft})
    return {"approved": answer["approved"], "feedback": answer["feedback"] or ""}


def polish(state: Translation, runtime: Runtime[JobContext]) -> dict[str, Any]:
    """Work in what the person said, if anything."""
    if not state.feedback:
        return {"text": state.draft}
    fence = Fence()
    prompt = f"""Correct the French text as the feedback says.
{fence.around("text", state.draft)}
{fence.around("feedback", state.feedback)}
Reply only with the corrected text."""
    return {"text": runtime.context.ask(prompt)}


def after_correction(state: Translation) -> str:
    return "polish" if state.approved else "draft"


def build() -> StateGraph[Translation, JobContext]:
    """Not compiled: the worker does that, with a checkpointer that its lease fences."""
    graph = StateGraph(Translation, context_schema=JobContext)
    graph.add_node(draft)
    graph.add_node(correction)
    graph.add_node(polish)
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "correction")
    graph.add_conditional_edges("correction", after_correction, ["polish", "draft"])
    graph.add_edge("polish", END)
    return graph

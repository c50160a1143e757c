"""What a node may use of the job it runs in: its `runtime.context`, whatever the graph.

    def draft(state: State, runtime: Runtime[JobContext]) -> dict[str, Any]:
        return {"draft": runtime.context.ask(f"Write about this: {state.task}")}

docs/own-graph.md shows a whole graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class InvalidReply(Exception):
    """The model's reply does not follow the schema, nor does the one after it was told so."""


class BudgetSpent(Exception):
    """No tokens are left for a call; a node lets it through, and the job ends with what it has.

    `which`: what said how many there were.
    """

    def __init__(self, which: Literal["token_budget", "tenant_tokens_per_day"]) -> None:
        super().__init__(f"{which} is spent")
        self.which = which


class JobStopped(BaseException):
    """The job is cancelled, lost to another worker or out of time; a node lets it through.

    It is no Exception, so that no `except Exception` of a node swallows it.
    """


@dataclass(frozen=True)  # so that LangGraph's types take it as a context: implement it as one, too
class JobContext(Protocol):
    """The job as its nodes see it.

    A node that runs again after a crash gets the replies it had got already; they are not paid for
    again. So a node asks in the same order each time it runs.
    """

    task_id: int
    attempt: int
    require_approval: bool  # a person is to see the work before it goes on
    max_revisions: int  # times the work may be sent back to be done again

    def ask(self, prompt: str) -> str:
        """The model's reply, fit to be stored; "" if it said nothing."""

    def ask_for(self, prompt: str, schema: Mapping[str, Any]) -> Any:
        """The model's reply as JSON that follows the schema; raises InvalidReply."""

    def check(self) -> None:
        """Raise JobStopped if the job is to stop; cheap, for between the steps of long work."""

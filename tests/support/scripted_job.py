"""A job's context for graphs that are tested in memory: a list of replies for each who is asked.

    job = ScriptedJob({"coder": ["first", "second"], "reviewer": [REJECTED, APPROVED]})
    graph.invoke({"task": "…"}, config, context=job)
    assert job.order == ["coder", "reviewer", "coder", "reviewer"]

A reply is what the model says, so that one which is to be JSON is read, checked and asked for again
as in a worker. The last of a list is given for ever; a reply that is an exception is raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from execution.agent.context import InvalidReply
from execution.agent.prompts import for_repair
from execution.answers import InvalidAnswer, reader
from tests.support.team_model import role_of

MAX_BYTES = 1_000_000
Replies = Mapping[str, Sequence[str | BaseException]]


@dataclass
class ScriptedJob:
    """A JobContext; `who` tells from a prompt who is asked."""

    replies: Replies
    require_approval: bool = False
    max_revisions: int = 2
    task_id: int = 1
    attempt: int = 1
    who: Callable[[str], str | None] = role_of
    asked: list[tuple[str, str]] = field(default_factory=list)  # who, and the prompt

    def ask(self, prompt: str) -> str:
        who = str(self.who(prompt))
        self.asked.append((who, prompt))
        replies = self.replies[who]
        reply = replies[min(Counter(self.order)[who], len(replies)) - 1]
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def ask_for(self, prompt: str, schema: Mapping[str, Any]) -> Any:
        read = reader(schema, MAX_BYTES)
        answer = self.ask(prompt)
        try:
            return read(answer)
        except InvalidAnswer as complaint:
            again = for_repair(prompt, answer, complaint)
        try:
            return read(self.ask(again))
        except InvalidAnswer as invalid:
            raise InvalidReply(str(invalid)) from invalid

    def check(self) -> None:
        """Nothing stops this job."""

    @property
    def order(self) -> list[str]:
        """Who was asked, in order."""
        return [who for who, _ in self.asked]

    def prompts(self, who: str) -> list[str]:
        return [prompt for asked, prompt in self.asked if asked == who]

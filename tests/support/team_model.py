"""The models of the agent team, scripted: plugs into the fake server, one list per role.

    team = TeamModel(supervisor=routes("code"), reviewer=[rejects("no tests"), approves()])
    fake.script = team
    ...                                   # a worker runs a job
    assert team.counts == {"supervisor": 1, "coder": 2, "reviewer": 2}

A role's behaviours are played in order, then its last for ever; a role that was given none plays
its part well. Jobs that run beside each other are told apart by words of their tasks, which stand
in every prompt:

    team.on("sorts a list", coder=slow())
    assert team.count("coder", "sorts a list") == 1

A call that is not the team's is left to the fake.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence

from tests.support.fake_ollama import Behaviour, Call, answer

ROLES = ("supervisor", "researcher", "coder", "reviewer")
PLAN = "Write one function and show how it is called."
NOTES = "Python's sorted() is stable."
CODE = "def double(x):\n    return 2 * x"

Behaviours = Behaviour | Sequence[Behaviour]


def role_of(prompt: str) -> str | None:
    """Whose prompt this is: its first line says so."""
    return next((role for role in ROLES if prompt.startswith(f"You are the {role} ")), None)


def routes(route: str, plan: str = PLAN) -> Behaviour:
    """What a supervisor says."""
    return answer(json.dumps({"route": route, "plan": plan}))


def approves(feedback: str = "Good.") -> Behaviour:
    """What a content reviewer says."""
    return answer(json.dumps({"verdict": "approved", "feedback": feedback}))


def rejects(feedback: str = "Handle zero, too.") -> Behaviour:
    """What a reviewer says who wants it done again."""
    return answer(json.dumps({"verdict": "rejected", "feedback": feedback}))


WELL_PLAYED: dict[str, Behaviours] = {
    "supervisor": routes("research"),
    "researcher": answer(NOTES),
    "coder": answer(CODE),
    "reviewer": approves(),
}


class TeamModel:
    """A `script` of FakeOllama; safe to be called by all of its threads."""

    def __init__(self, **behaviours: Behaviours) -> None:
        self._lock = threading.Lock()
        self._calls: list[tuple[str, str]] = []  # role and prompt of each call, as they came
        self._played: Counter[tuple[str, str]] = Counter()  # by words of the task, and role
        self._parts: dict[str, dict[str, Behaviours]] = {}  # by words of the task; "": every task
        self.on("", **behaviours)

    def on(self, task: str, **behaviours: Behaviours) -> None:
        """The roles in jobs whose task has these words play so, from now on."""
        if wrong := set(behaviours) - set(ROLES):
            raise ValueError(f"the team has no {', '.join(sorted(wrong))}")
        with self._lock:
            self._parts.setdefault(task, {}).update(behaviours)
            for role in behaviours:
                self._played[task, role] = 0

    def __call__(self, call: Call) -> Behaviour | None:
        role = role_of(call.prompt)
        if role is None:
            return None
        with self._lock:
            self._calls.append((role, call.prompt))
            return self._next_of(role, call.prompt)

    def _next_of(self, role: str, prompt: str) -> Behaviour:
        told = [task for task, parts in self._parts.items() if role in parts and task in prompt]
        task = max(told, key=len, default="")
        part = self._parts[task].get(role, WELL_PLAYED[role])
        if callable(part):
            return part
        self._played[task, role] += 1
        return part[min(self._played[task, role], len(part)) - 1]

    @property
    def counts(self) -> dict[str, int]:
        """How many calls of each role have come, whatever became of them."""
        with self._lock:
            return dict(Counter(role for role, _ in self._calls))

    def count(self, role: str, task: str = "") -> int:
        """How many calls of this role have come, for a task with these words."""
        return len(self.prompts(role, task))

    def prompts(self, role: str, task: str = "") -> list[str]:
        """What this role was asked, for a task with these words."""
        with self._lock:
            return [prompt for known, prompt in self._calls if known == role and task in prompt]

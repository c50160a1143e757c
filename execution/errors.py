"""How a call of a model or a tool can end without an answer, and what that means for its task.

CallEnded
├── Outage      the other side is away or overloaded: the task goes back, nothing is burned
├── Failure     this attempt failed: retry with backoff
│   └── EmptyAnswer   the model said nothing, which some callers can use
└── Permanent   it will fail every time: a dead letter at once, with what to do
"""

from __future__ import annotations


class CallEnded(Exception):
    """A call brought no answer.

    `prompt_tokens`, `completion_tokens`: what was used all the same, as far as the other side said
    so; `model`: by which model.
    """

    prompt_tokens = 0
    completion_tokens = 0
    model: str | None = None


class Outage(CallEnded):
    """`retry_after_seconds`: when the other side asked to be tried again, if it said so;
    `alarm`: somebody has to do something; `hung_up`: it took the call and then went away;
    `refused`: it answered that it does not take the call."""

    def __init__(
        self,
        message: str,
        retry_after_seconds: float | None = None,
        alarm: bool = False,
        hung_up: bool = False,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.alarm = alarm
        self.hung_up = hung_up
        self.refused = refused


class Failure(CallEnded):
    def __init__(self, message: str, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


class EmptyAnswer(Failure):
    pass


class Permanent(CallEnded):
    """`refused`: the other side answered that it does not take the call."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def not_installed(what: str, package: str, missing: ImportError) -> Permanent:
    """What a task ends with that needs a package which is not there."""
    return Permanent(
        f"{what} needs the package {package} ({missing}); "
        "run: pip install -r requirements-agents.txt"
    )

"""Every error that one module raises for another to handle.

OrchestratorError
├── DatabaseUnavailable    Postgres cannot be asked now; try again
├── SchemaOutdated         the database holds another version of the schema
├── LeaseLost              another worker may own the task now
├── BudgetRefused          a model call needs more tokens than there are left
└── RequestRefused         the caller asked for something that is not to be had (4xx)
    ├── NotFound
    ├── Unauthorized       it brought no key that opens anything
    ├── OtherTenant        its key is another tenant's than it says
    ├── TooLarge
    ├── FieldRefused       one field is to blame, and named
    ├── TooMany            its tenant asks for too much; later it may be had
    ├── KeyReused
    └── StateConflict      the task is not in a state that allows it
        └── NameInUse      another task of that name has not ended

A class's docstring is its default message. Below the tree is what may be told of others' errors.
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Something went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


class DatabaseUnavailable(OrchestratorError):
    """The database cannot be reached; try again shortly."""


class SchemaOutdated(OrchestratorError):
    """The database's schema is of another version; run: python admin.py migrate"""


class LeaseLost(OrchestratorError):
    """The lease of this task is gone; whatever was to be written is not."""


class BudgetRefused(OrchestratorError):
    """The tokens that are left do not suffice for this call."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which  # token_budget or tenant_tokens_per_day


class RequestRefused(OrchestratorError):
    """The request cannot be carried out."""

    def __init__(self, message: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field  # the one to blame


class NotFound(RequestRefused):
    """not found"""


class Unauthorized(RequestRefused):
    """A valid key is needed."""


class OtherTenant(RequestRefused):
    """The key is another tenant's."""


class TooLarge(RequestRefused):
    """The request is too large."""


class TooMany(RequestRefused):
    """The tenant asks for more than its share."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class FieldRefused(RequestRefused):
    """A field of the request cannot be accepted."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field)


class KeyReused(RequestRefused):
    """This Idempotency-Key came with another body before; use a new key for a new task."""


class StateConflict(RequestRefused):
    """The task is not in a state that allows this."""


class NameInUse(StateConflict):
    """Another task of this name has not ended yet."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"another task named {name} has not ended yet; wait for its end, or cancel it"
        )
        self.name = name


# The one of agent jobs may not be there, so both are known by their names.
DRIVERS = {"psycopg2", "psycopg"}


def is_of_database(error: BaseException) -> bool:
    """Whether it is an error of a Postgres driver."""
    return any(str(kind.__module__).partition(".")[0] in DRIVERS for kind in type(error).__mro__)


def words_of(error: BaseException) -> str:
    """What an error says, for a log or a task's row; of a database's error its first line only.

    What Postgres says after that may quote a row, and with it a prompt or an answer. An error of
    somebody else's making may fail at saying anything.
    """
    try:
        return first_line(error) if is_of_database(error) else str(error)
    except BaseException as worse:
        return f"without a text: {type(worse).__name__}"


def first_line(error: BaseException) -> str:
    """Never empty."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__

"""The states of a task, as schema.sql's task_status has them (a test compares), and its kinds."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    BLOCKED = "BLOCKED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    AWAITING_APPROVAL = "AWAITING_APPROVAL"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in (Status.SUCCEEDED, Status.FAILED, Status.CANCELLED)


class Kind(StrEnum):
    """What a task can be. A run, the parent of its steps, is none: it is in no list of tasks."""

    PROMPT = "prompt"
    TOOL = "tool"
    AGENT = "agent"
    APPROVAL = "approval"
    CALLBACK = "callback"

"""A tool task: one call of a tool, which may raise whatever it likes and end whenever it likes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from config import Settings
from execution.errors import Failure, Permanent
from execution.text import error_text
from execution.tools.context import PermanentError, ToolContext
from execution.tools.registry import Registry, Tool
from execution.tools.threads import DEAF_SECONDS
from queries.leases import ClaimedTask, Outcome
from runs.templates import TemplateError, fill

logger = logging.getLogger(__name__)


class ToolCalls:
    """Calls tools on the runner's loop; remembers the calls that nobody waits for any more."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError if `[tools]` names something that cannot be a tool."""
        self._settings = settings
        self._registry = Registry(settings)
        self._left_behind: set[asyncio.Task[Any]] = set()

    async def run(self, task: ClaimedTask) -> Outcome:
        """Call the tool of a task; raises the errors of execution/errors.py.

        When this is cancelled it ends at once: the tool is told, and nobody waits until it listens.
        """
        tool, args = self._read(task)
        context = ToolContext(_key_of(task), task.attempt, task.task_id, self._settings)
        # A task of its own: whatever the tool cancels or is cancelled by, it is not us.
        calling = asyncio.create_task(_call(tool, args, context))
        try:
            await asyncio.wait({calling})
        except asyncio.CancelledError:
            context.cancel()
            calling.cancel()
            self._leave_behind(calling, task)
            raise
        result, error = calling.result()
        if error is not None:
            raise self._verdict(task, error)
        return Outcome("succeeded", result=result)

    async def close(self) -> None:
        for calling in self._left_behind:
            calling.cancel()
        await self._registry.close()

    def _read(self, task: ClaimedTask) -> tuple[Tool, Mapping[str, Any]]:
        name, args = task.payload.get("tool"), task.payload.get("args")
        tool = self._registry.find(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(self._registry.names())
            raise Permanent(f"this worker has no tool {str(name)[:80]!r}, only {known}")
        if task.run_id is not None:
            try:
                args = fill(args, task.outputs, self._settings.limits.max_result_bytes)
            except TemplateError as refused:
                raise Permanent(str(refused)) from refused
        if args is not None and not isinstance(args, Mapping):
            raise Permanent("the arguments of a tool are to be an object")
        return tool, args or {}

    def _verdict(self, task: ClaimedTask, error: BaseException) -> Failure | Permanent:
        """What an error of a tool means for its task."""
        max_bytes = self._settings.limits.max_error_bytes
        if isinstance(error, Failure | Permanent):
            return error
        if isinstance(error, PermanentError):
            return Permanent(error_text(_text_of(error), max_bytes))
        logger.warning("The tool of task %s failed", task.task_id, exc_info=error)
        return Failure(f"{type(error).__name__}: {_text_of(error)}".removesuffix(": "))

    def _leave_behind(self, calling: asyncio.Task[Any], task: ClaimedTask) -> None:
        self._left_behind.add(calling)
        calling.add_done_callback(self._left_behind.discard)
        asyncio.get_running_loop().call_later(DEAF_SECONDS, _say_if_deaf, calling, task)


async def _call(
    tool: Tool, args: Mapping[str, Any], context: ToolContext
) -> tuple[Any, BaseException | None]:
    """What the tool returned or raised. Nothing that it raises may reach the event loop: that would
    end on a SystemExit, and take a CancelledError for ours."""
    try:
        return await tool.call(args, context), None
    except BaseException as error:
        return None, error


def _say_if_deaf(calling: asyncio.Task[Any], task: ClaimedTask) -> None:
    if not calling.done():
        logger.warning("The tool of task %s was cancelled and does not listen", task.task_id)


def _key_of(task: ClaimedTask) -> str:
    if task.run_id is not None:
        return f"{task.run_id}:{task.step}"
    return f"task:{task.task_id}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as worse:  # an error whose text is one, too
        return f"without a text: {type(worse).__name__}"

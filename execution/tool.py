"""A tool task: one call of a tool, which may raise whatever it likes and end whenever it likes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from config import Settings
from errors import words_of
from execution.errors import Failure, Permanent
from execution.text import error_text, shortened
from execution.tools.context import PermanentError, ToolContext
from execution.tools.functions import MOST_BYTES_AT_ONCE, FunctionTool
from execution.tools.registry import Registry, Tool
from execution.tools.results import is_plain
from execution.tools.threads import Thread, in_thread
from queries.leases import ClaimedTask, Outcome
from runs.templates import TemplateError, fill

logger = logging.getLogger(__name__)


class ToolCalls:
    """Calls tools from the runner's loop, which runs nothing of theirs but MCP sessions."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError if `[tools]` names something that cannot be a tool."""
        self._settings = settings
        self._registry = Registry(settings)
        self._most_bytes_at_once = min(MOST_BYTES_AT_ONCE, settings.limits.max_result_bytes)
        self._left_behind: set[asyncio.Task[Any]] = set()  # asyncio holds tasks by weak references

    def begin(
        self,
        task: ClaimedTask,
        on_success: Callable[[Outcome], None],
        on_error: Callable[[], None],
    ) -> Outcome | Thread[Any] | None:
        """The outcome of a call that takes no time, or the thread that makes one already, for
        `run` to await; None: `run` has something to do before the call.

        On any thread. That thread calls one of the others when the tool has ended; of what it
        raised, `run` tells.
        """
        try:
            tool, args = self._registry.find(task.payload["tool"]), task.payload["args"]
            if not isinstance(tool, FunctionTool) or not isinstance(args, Mapping):
                return None
            if task.run_id is not None:
                if not is_plain([args, *task.outputs.values()], MOST_BYTES_AT_ONCE):
                    return None
                args = fill(args, task.outputs, MOST_BYTES_AT_ONCE)
            if tool.returns_at_once:
                result = tool.function(**args)
                if is_plain(result, self._most_bytes_at_once):
                    return Outcome("succeeded", result=result)
            return tool.begin(
                args,
                self._context_of(task),
                lambda result: on_success(Outcome("succeeded", result=result)),
                on_error,
            )
        except BaseException:  # whatever is wrong, the way that all calls go will tell it
            return None

    async def run(self, task: ClaimedTask, thread: Thread[Any] | None = None) -> Outcome:
        """Call the tool of a task, unless `thread` does; raises the errors of execution/errors.py.

        When this is cancelled it ends at once: the tool is told, and nobody waits until it listens.
        """
        result, error = await (self._make(task) if thread is None else thread.outcome())
        if error is not None:
            # Its text is of the tool's making, too.
            verdict = partial(self._verdict, task, error)
            raise await in_thread(f"error of task {task.task_id}", verdict)
        return Outcome("succeeded", result=result)

    async def _make(self, task: ClaimedTask) -> tuple[Any, BaseException | None]:
        """What the tool returned or raised."""
        tool, args = await self._read(task)
        if isinstance(tool, FunctionTool):
            return await tool.begin(args, self._context_of(task)).outcome()
        return await self._call(tool, args, self._context_of(task))

    async def _call(
        self, tool: Tool, args: Mapping[str, Any], context: ToolContext
    ) -> tuple[Any, BaseException | None]:
        """What a tool that runs on this loop returned or raised."""
        # A task of its own: whatever the tool cancels or is cancelled by, it is not us.
        calling = asyncio.create_task(_call(tool, args, context))
        try:
            await asyncio.wait({calling})
        except asyncio.CancelledError:
            context.cancel()
            calling.cancel()
            self._left_behind.add(calling)
            calling.add_done_callback(self._left_behind.discard)
            raise
        return calling.result()

    async def close(self) -> None:
        await self._registry.close()

    def _context_of(self, task: ClaimedTask) -> ToolContext:
        return ToolContext(_key_of(task), task.attempt, task.task_id, self._settings)

    async def _read(self, task: ClaimedTask) -> tuple[Tool, Mapping[str, Any]]:
        name, args = task.payload.get("tool"), task.payload.get("args")
        tool = self._registry.find(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(self._registry.names())
            # A failure that is retried: another worker may have been given it already.
            raise Failure(f"this worker has no tool {shortened(str(name))!r}, only {known}")
        if task.run_id is not None:
            args = await self._filled(task, args)
        if args is not None and not isinstance(args, Mapping):
            raise Permanent("the arguments of a tool are to be an object")
        return tool, args or {}

    async def _filled(self, task: ClaimedTask, args: Any) -> Any:
        filling = partial(fill, args, task.outputs, self._settings.limits.max_result_bytes)
        try:
            if is_plain([args, *task.outputs.values()], MOST_BYTES_AT_ONCE):
                return filling()
            return await in_thread(f"arguments of task {task.task_id}", filling)
        except TemplateError as refused:
            raise Permanent(str(refused)) from refused

    def _verdict(self, task: ClaimedTask, error: BaseException) -> Failure | Permanent:
        """What an error of a tool means for its task."""
        max_bytes = self._settings.limits.max_error_bytes
        if isinstance(error, Failure | Permanent):
            return error
        text = words_of(error)  # before logging, which keeps other threads out of the log meanwhile
        if isinstance(error, PermanentError):
            return Permanent(error_text(text, max_bytes))
        logger.warning("The tool of task %s failed", task.task_id, exc_info=error)
        return Failure(f"{type(error).__name__}: {text}".removesuffix(": "))


async def _call(
    tool: Tool, args: Mapping[str, Any], context: ToolContext
) -> tuple[Any, BaseException | None]:
    """What the tool returned or raised. Nothing that it raises may reach the event loop: that would
    end on a SystemExit, and take a CancelledError for ours."""
    try:
        return await tool.call(args, context), None
    except BaseException as error:
        return None, error


def _key_of(task: ClaimedTask) -> str:
    if task.run_id is not None:
        return f"{task.run_id}:{task.step}"
    return f"task:{task.task_id}"

"""A tool that is a Python function: found by its name, its arguments checked, called.

All of that happens in a thread of the call's own, with an event loop of its own for an async
function: whatever it does there, and however long, no other task waits for it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from config import ConfigError
from execution.errors import Permanent
from execution.text import shortened
from execution.tools.context import ToolContext
from execution.tools.results import storable_result
from execution.tools.threads import OwnLoop, Thread

MOST_PROBLEMS_TOLD = 5
# Of what is done while all others wait for it: of JSON, at worst.
MOST_BYTES_AT_ONCE = 12_000

F = TypeVar("F", bound=Callable[..., Any])


def returns_at_once(function: F) -> F:
    """Mark a tool that neither waits nor raises nor computes: a call of it needs no thread.

    It has to take any arguments, by **args: Any, for to read them takes time, too; and to change
    nothing, for a call whose result is large is made again, in a thread.
    """
    function.returns_at_once = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class FunctionTool:
    """A plain or an async function, and how to read its arguments."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, TypeAdapter[Any]]
    required: frozenset[str]
    rest: TypeAdapter[Any] | None  # of **rest: takes arguments of any name
    context_name: str | None
    returns_at_once: bool  # may be called on any thread, with whatever arguments there are

    async def call(self, args: Mapping[str, Any], context: ToolContext) -> Any:
        """The function's result, storable; raises what the function raises, and Permanent."""
        return await self.begin(args, context).result()

    def begin(
        self,
        args: Mapping[str, Any],
        context: ToolContext,
        on_result: Callable[[Any], None] = lambda result: None,
        on_error: Callable[[], None] = lambda: None,
    ) -> Thread[Any]:
        """Such a call, in its thread. When nobody waits for it any more, the function is told.

        That thread calls one of the others, before who waits hears of the end.
        """
        own = OwnLoop()

        def stop() -> None:
            context.cancel()
            own.cancel()

        title = f"tool {self.name} of task {context.task_id}"

        def call() -> Any:
            try:
                result = self._call(args, context, own)
            except BaseException:
                on_error()
                raise
            on_result(result)
            return result

        return Thread(title, call, on_cancel=stop, afterwards=own.close)

    def _call(self, args: Mapping[str, Any], context: ToolContext, loop: OwnLoop) -> Any:
        values = self._read(args, context)
        if context.cancelled:
            raise asyncio.CancelledError
        result = self.function(**values)
        if inspect.isawaitable(result):  # an async function, maybe behind a decorator
            result = loop.run(result)
        return storable_result(result, context.settings.limits.max_result_bytes)

    def _read(self, args: Mapping[str, Any], context: ToolContext) -> dict[str, Any]:
        """The arguments as the function takes them, or Permanent with what is wrong with them."""
        problems = [f"{name} is missing" for name in self.required if name not in args]
        values: dict[str, Any] = {}
        for name, given in args.items():
            adapter = self.parameters.get(name, self.rest)
            if adapter is None or name == self.context_name:
                problems.append(f"there is no {shortened(name)}")
                continue
            try:
                # As JSON, strictly: "5" is no number, but a text may be a date.
                values[name] = adapter.validate_json(json.dumps(given), strict=True)
            except (ValidationError, RecursionError) as refused:
                problems += _in_plain_words(name, refused)
        if problems:
            shown = "; ".join(sorted(problems)[:MOST_PROBLEMS_TOLD])
            raise Permanent(f"the arguments of the tool {self.name} are refused: {shown}")
        if self.context_name is not None:
            values[self.context_name] = context
        return values


def load_function(name: str, entry: str) -> FunctionTool:
    """Import `module:function` for the tool `name`; raises ConfigError with the reason."""
    key = f"tools.{name} = {entry!r}"
    module_name, _, function_name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as failed:  # anything can happen while a module is imported
        raise ConfigError(f"{key} cannot be imported: {_said(failed)}") from failed
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{key} is no function")
    try:
        return _described(name, function)
    except Exception as failed:  # pydantic and inspect have many ways to refuse
        raise ConfigError(f"{key} cannot be a tool: {_said(failed)}") from failed


def _described(name: str, function: Callable[..., Any]) -> FunctionTool:
    types = get_type_hints(
        function if inspect.isroutine(function) else type(function).__call__, include_extras=True
    )
    adapters: dict[str, TypeAdapter[Any]] = {}
    required: set[str] = set()
    rest: TypeAdapter[Any] | None = None
    takes_anything = False
    context_name: str | None = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(f"its parameter {parameter.name} cannot be given by name")
        if parameter.name not in types:
            raise TypeError(f"its parameter {parameter.name} has no type")
        wanted = types[parameter.name]
        if wanted is ToolContext or ToolContext in get_args(wanted):
            context_name = parameter.name
        elif parameter.kind == parameter.VAR_KEYWORD:
            rest, takes_anything = TypeAdapter(wanted), wanted is Any
        else:
            adapters[parameter.name] = TypeAdapter(wanted)
            if parameter.default is parameter.empty:
                required.add(parameter.name)
    needs_no_reading = takes_anything and not adapters and context_name is None
    return FunctionTool(
        name,
        function,
        adapters,
        frozenset(required),
        rest,
        context_name,
        getattr(function, "returns_at_once", False) and needs_no_reading,
    )


def _in_plain_words(name: str, refused: ValidationError | RecursionError) -> list[str]:
    if isinstance(refused, RecursionError):
        return [f"{shortened(name)} is nested too deeply"]
    return [
        f"{'.'.join([shortened(name), *map(str, error['loc'])])}: {error['msg']}"
        for error in refused.errors(include_url=False, include_context=False, include_input=False)
    ]


def _said(failed: BaseException) -> str:
    return f"{type(failed).__name__}: {failed}"

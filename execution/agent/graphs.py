"""The graphs of `[graphs]`: loaded and compiled once, and lent to each job with its own saver."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from langgraph.channels import BinaryOperatorAggregate, LastValue
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import BaseModel

from errors import words_of
from execution.errors import Failure, Permanent
from execution.text import shortened

logger = logging.getLogger(__name__)

CompiledGraph = CompiledStateGraph[Any, Any, Any, Any]

VERSION_LENGTH = 16
AS_THEY_ARE = (LastValue, BinaryOperatorAggregate)  # channels that are saved so, once written


@dataclass(frozen=True)
class Graph:
    """A graph under the name that jobs give it; another `version` has other nodes, edges or state.

    `defaults` are what fields of its state hold that nobody has written.
    """

    name: str
    compiled: CompiledGraph
    version: str
    defaults: Mapping[str, Any]

    @cached_property
    def opens_plainly(self) -> bool:
        """Whether its first code is that of a node; a branch may ask models before any has run."""
        return START not in self.compiled.builder.branches

    @cached_property
    def is_saved_as_it_is(self) -> bool:
        """Whether a checkpoint holds each field of the state as nodes see it."""
        channels = self.compiled.builder.channels.values()
        return all(type(channel) in AS_THEY_ARE for channel in channels)

    def with_saver(self, saver: BaseCheckpointSaver[Any]) -> CompiledGraph:
        """The same graph, which any number of jobs may run at once, with a saver of its own."""
        lent = copy.copy(self.compiled)
        lent.checkpointer = saver
        return lent


class Graphs:
    """Loads graphs when they are first asked for; may be used from any thread."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries = entries
        self._lock = threading.Lock()  # a module is imported, and a graph built, once
        self._loaded: dict[str, Graph] = {}

    def load(self, name: str) -> Graph:
        """Raises Permanent or Failure if there is no such graph here."""
        if (entry := self._entries.get(name)) is None:
            known = ", ".join(sorted(self._entries))
            # A failure that is retried: another worker may have been given it already.
            raise Failure(f"this worker has no graph {shortened(name)!r}, only {known}")
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = _loaded(name, entry)
            return self._loaded[name]


def _loaded(name: str, entry: str) -> Graph:
    module_name, _, function_name = entry.partition(":")
    key = f"graphs.{name} = {entry!r}"
    try:
        builder = getattr(importlib.import_module(module_name), function_name)()
    except (Exception, SystemExit) as failed:  # anything can happen while a module is imported
        logger.warning("%s cannot be loaded", key, exc_info=failed)
        said = f"{type(failed).__name__}: {words_of(failed)}"
        raise Failure(f"{key} cannot be loaded: {said}") from failed
    if not isinstance(builder, StateGraph):
        is_compiled = isinstance(builder, CompiledStateGraph)
        hint = "; leave its compile() out" if is_compiled else ""
        raise Permanent(f"{key} returns a {type(builder).__name__}, not a StateGraph{hint}")
    try:
        _check(builder)
        compiled = builder.compile(name=name)
        return Graph(name, compiled, version_of(builder), _defaults(builder))
    except Exception as refused:
        said = f"{type(refused).__name__}: {words_of(refused)}"
        raise Permanent(f"{key} is no graph that can run: {said}") from refused


def _check(builder: StateGraph[Any, Any, Any, Any]) -> None:
    """Raise ValueError if there is something in it that fails when a job comes to it: an async
    function, or a graph that cannot be saved step by step as all else is."""
    for name, node in builder.nodes.items():
        _check_is_plain(name, node.runnable)
        if isinstance(inner := node.runnable, CompiledStateGraph):
            if inner.checkpointer is False:
                raise ValueError(
                    f"node {name} is a graph compiled with checkpointer=False; leave that out"
                )
            _check(inner.builder)
    for source, branches in builder.branches.items():
        for branch in branches.values():
            _check_is_plain(f"{source}'s branch", branch.path)


def _check_is_plain(name: str, runnable: object) -> None:
    """LangGraph has wrapped functions: an async one alone is its `afunc`."""
    if getattr(runnable, "func", runnable) is None:
        raise ValueError(f"{name} is an async function; make it a plain one")


def version_of(builder: StateGraph[Any, Any, Any, Any]) -> str:
    """A digest of what a checkpoint refers to: nodes, edges and the names of the state's fields."""
    branches = [
        [source, name, sorted((branch.ends or {}).items(), key=str)]
        for source, of_source in builder.branches.items()
        for name, branch in of_source.items()
    ]
    shape = {
        "nodes": sorted(builder.nodes),
        "edges": sorted(builder.edges),
        "joins": sorted([sorted(sources), end] for sources, end in builder.waiting_edges),
        "branches": sorted(branches, key=str),
        "channels": sorted(builder.channels),
    }
    text = json.dumps(shape, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:VERSION_LENGTH]


def _defaults(builder: StateGraph[Any, Any, Any, Any]) -> dict[str, Any]:
    """What a field holds that no node has written yet; LangGraph leaves such fields out."""
    # One with a reducer begins with an empty value of its type, where there is such a value.
    empty = {
        name: channel.get()
        for name, channel in builder.channels.items()
        if type(channel) is BinaryOperatorAggregate and channel.is_available()
    }
    schema = builder.state_schema
    if not issubclass(schema, BaseModel):
        return empty
    return empty | {
        name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in schema.model_fields.items()
        if not field.is_required()
    }

"""The tools echo, sleep, fetch_data and flaky: for examples, tests and demonstrations."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from execution.errors import Failure
from execution.text import shortened
from execution.tools.context import PermanentError, ToolContext
from execution.tools.functions import returns_at_once

DATA_SETS = Path(__file__).with_name("data_sets.json")

Seconds = Annotated[float, Field(ge=0, le=86_400)]


@returns_at_once
def echo(**args: Any) -> dict[str, Any]:
    """Return the arguments."""
    return args


async def sleep(seconds: Seconds) -> dict[str, Any]:
    """Sleep, unless the call is cancelled."""
    await asyncio.sleep(seconds)
    return {"slept_seconds": seconds}


def fetch_data(name: str = "durable_queues") -> Any:
    """One of the data sets that are bundled: name, title, rows."""
    data_sets = _read_data_sets()
    if name not in data_sets:
        raise PermanentError(
            f"there is no data set {shortened(name)!r}, only {', '.join(data_sets)}"
        )
    return {"name": name, **data_sets[name]}


async def flaky(
    context: ToolContext,
    failures: Annotated[int, Field(ge=0)] = 1,
    probability: Annotated[float, Field(ge=0, le=1)] | None = None,
    seconds: Seconds = 0,
) -> dict[str, Any]:
    """Fail the first `failures` attempts (or each with `probability`), then say which one worked.

    Each attempt takes `seconds`.
    """
    await asyncio.sleep(seconds)
    by_count = context.attempt <= failures
    if by_count if probability is None else random.random() < probability:
        raise Failure(f"a transient failure, simulated, at attempt {context.attempt}")
    return {"attempt": context.attempt}


@cache
def _read_data_sets() -> dict[str, Any]:
    data_sets: dict[str, Any] = json.loads(DATA_SETS.read_text(encoding="utf-8"))
    return data_sets

"""Which checkpoint of a job is the newest, whatever the clocks of its workers say.

A checkpoint's id begins with the time at which it was made, and the largest one is the newest. A
worker whose clock is behind that of the worker before would write checkpoints that count as older
than those it goes on from, and nobody would ever see them.
"""

from __future__ import annotations

import threading

from langgraph.checkpoint.base import id as ids

_one_at_a_time = threading.Lock()


def go_on_behind(checkpoint_id: str) -> None:
    """From now on the ids that this process makes are larger than this one.

    LangGraph makes ids that only grow within a process, from a module's variable.
    """
    with _one_at_a_time:
        made_at = ids.UUID(checkpoint_id).time
        ids._last_v6_timestamp = max(made_at, ids._last_v6_timestamp or 0)  # type: ignore[assignment]

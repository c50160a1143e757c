"""Logs: sentences for people with the same fixed fields for machines, on standard error.

    12:00:01 INFO  Claimed task 7. action=claimed task_id=7 worker=host-12 attempt=1

Actions of a task: claimed, succeeded, retry, released, outage, reaped, cancelled, max_retry,
max_delivery, permanent, deadline, lease_lost. Of a route: route_paused, route_open. Of a
process: started, stopping, stopped, database_away, alone. Prompts, answers and secrets are never
logged.
"""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


def set_up_logs() -> None:
    """Send the records of this process to standard error, from INFO up."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=FORMAT, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def say(logger: logging.Logger, level: int, sentence: str, action: str, **fields: object) -> None:
    """Log `sentence` with its fields; a field that is None is left out."""
    named = {"action": action, **fields}
    pairs = " ".join(f"{key}={_value(value)}" for key, value in named.items() if value is not None)
    logger.log(level, "%s %s", sentence, pairs)


def _value(value: object) -> str:
    """One word stays as it is; a text is quoted, and can add no line and no field of its own."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)

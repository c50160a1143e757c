"""Pieces of answers, and what the nodes of jobs do, on their way to watchers: never stored, best
effort, only while watched.

Who watches says so on one channel, every few seconds, with the numbers of runs or lone tasks;
who streams such a task sends its pieces on the other. Both are hints that may be lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from connection import Connection, fetch

WATCHED_CHANNEL = "tasks_watched"
TOKENS_CHANNEL = "task_tokens"

SAY_WATCHED = "SELECT pg_notify('tasks_watched', %(root_ids)s)"


def say_watched(conn: Connection, root_ids: Sequence[int]) -> None:
    """Ask for the pieces of these roots, for the next WATCHED_SECONDS of each worker."""
    page = 400  # ids of up to 19 digits: a payload has a limit of 8,000 bytes
    for start in range(0, len(root_ids), page):
        ids = ",".join(map(str, root_ids[start : start + page]))
        fetch(conn, SAY_WATCHED, {"root_ids": ids})


# Not worth waiting for the disk: nothing is stored.
SEND_TOKENS = """
SET LOCAL synchronous_commit = off;
SELECT pg_notify('task_tokens', piece) FROM unnest(%(pieces)s::text[]) AS piece
"""


def send_tokens(conn: Connection, pieces: Sequence[dict[str, object]]) -> None:
    """Send {"root_id", "task_id", "attempt", "text"} for each piece, its text at most 1,500
    characters long; of a job with "node", its name, and then perhaps with "phase", which is
    "started" or "finished", in place of "text"."""
    fetch(
        conn, SEND_TOKENS, {"pieces": [json.dumps(piece, ensure_ascii=False) for piece in pieces]}
    )

"""The checkpoints of an agent job, each with one sentence on what became of its state there."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from api.lists import WRONG_CURSOR, Limit
from api.models import Checkpoint, CheckpointList, Problem
from api.services import Services
from api.tenants import AnyTenant
from api.words import quoted
from errors import FieldRefused
from queries.jobs import list_states
from queries.operations import find_task
from views import iso_utc

router = APIRouter(
    tags=["tasks"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 422, 429, 503)},
)

CHECKPOINT_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
MOST_CHANGES_TOLD = 6

Channels = Mapping[str, Any]  # of a state: what list_states tells of each


def checkpoint_in_cursor(
    cursor: Annotated[str | None, Query(description="next_cursor of the page before")] = None,
) -> str | None:
    """The checkpoint on which the page before ended; FieldRefused if no page has given this out."""
    if cursor is None:
        return None
    try:
        found = base64.b64decode(cursor, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        found = ""
    if not CHECKPOINT_ID.fullmatch(found):
        raise FieldRefused("cursor", WRONG_CURSOR)
    return found


CheckpointCursor = Annotated[str | None, Depends(checkpoint_in_cursor)]


@router.get("/tasks/{task_id}/checkpoints")
def get_checkpoints(
    task_id: str, services: Services, tenant: AnyTenant, cursor: CheckpointCursor, limit: Limit = 50
) -> CheckpointList:
    """Where an agent job stood after each of its nodes, newest first; of other tasks, nothing."""
    task = services.database.run(find_task, tenant, task_id)
    rows = services.database.run(list_states, task["task_id"], limit=limit, before=cursor)
    older = [*(row["channels"] for row in rows[1:]), {}]
    shown = [checkpoint_view(*pair) for pair in zip(rows, older, strict=False)][:limit]
    has_more = len(rows) > limit
    return CheckpointList(
        checkpoints=shown, next_cursor=cursor_of(shown[-1].id) if has_more else None
    )


# --- helpers of the route above --------------------------------------------------------------


def cursor_of(checkpoint_id: str) -> str:
    return base64.urlsafe_b64encode(checkpoint_id.encode()).decode()


def checkpoint_view(row: dict[str, Any], channels_before: Channels | None) -> Checkpoint:
    """A row of list_states as the API shows it."""
    return Checkpoint(
        id=row["checkpoint_id"],
        at=str(iso_utc(row["at"])),
        attempt=row["attempt"],
        nodes=row["nodes"],
        next=row["next_nodes"],
        summary=summary(row["nodes"], channels_before, row["channels"]),
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
    )


def summary(nodes: Sequence[str], before: Channels | None, after: Channels | None) -> str:
    """What the nodes wrote, whatever graph they are of: "coder wrote code (1,204 characters)"."""
    if not nodes:
        return "the job begins"
    who = " and ".join(map(quoted, nodes))
    if before is None or after is None:
        return f"{who} wrote a state that is too large to be compared"
    changed = [
        f"{quoted(channel)} ({size_of(value)})"
        for channel, value in after.items()
        if is_other(value, before.get(channel))
    ]
    if (left_out := len(changed) - MOST_CHANGES_TOLD) > 0:
        changed[MOST_CHANGES_TOLD:] = [f"{left_out} more"]
    return f"{who} wrote {', '.join(changed)}" if changed else f"{who} changed nothing"


def is_other(value: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    if before is None:  # there was no such channel, which is as good as null
        return bool(value["type"] != "null")
    return bool(value["digest"] != before["digest"])


def size_of(value: Mapping[str, Any]) -> str:
    """A short value itself, on one line; else how large it is."""
    if value["type"] in ("array", "object"):
        return counted(value["size"], "item")
    if value["text"] is None and value["type"] != "null":
        return counted(value["size"], "character")
    return " ".join((value["text"] or "").split()) or "empty"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"

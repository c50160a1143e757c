"""Tickets: what a browser shows for its live events, since its streams can send no header."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.gate import EVENTS
from api.models import Body, Problem
from api.services import Services
from api.tenants import AnyTenant, Key
from errors import FieldRefused, StateConflict
from queries.keys import create_ticket
from queries.operations import find_task
from queries.runs import find_run

router = APIRouter(
    tags=["keys"],
    responses={status: {"model": Problem} for status in (400, 401, 403, 404, 409, 422, 429, 503)},
)

NO_EVENTS = "only /runs/{id}/events and /tasks/{id}/events are opened by a ticket"


class TicketFor(Body):
    """The body of POST /tickets."""

    path: str = Field(description="/runs/{id}/events or /tasks/{id}/events", max_length=200)


class IssuedTicket(BaseModel):
    """The answer to POST /tickets."""

    ticket: str = Field(description="goes behind that path as ?ticket=")
    expires_in: float = Field(description="seconds; till then it may be used again")


@router.post("/tickets", status_code=201)
def post_ticket(body: TicketFor, services: Services, key: Key, tenant: AnyTenant) -> IssuedTicket:
    """A ticket for the live events of one run or task. Once they are open, they outlive it.

    409 while no key was ever created: then no ticket is needed.
    """
    if key is None:
        raise StateConflict("no key was ever created, so live events need no ticket")
    asked = EVENTS.fullmatch(body.path)
    if asked is None:
        raise FieldRefused("path", NO_EVENTS)
    find = find_run if asked["kind"] == "runs" else find_task
    services.database.run(find, tenant, asked["reference"])
    seconds = services.settings.limits.ticket_seconds
    ticket = services.database.run(create_ticket, key.key_id, body.path, seconds)
    return IssuedTicket(ticket=ticket, expires_in=seconds)

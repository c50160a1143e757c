"""A callback: one POST that tells how a task has ended, by the conventions of Standard Webhooks.

2xx is the receiver's yes. 410 says that nobody is there any more: a dead letter at once. Everything
else is tried again, other 4xx and redirects as well (a receiver that is being set up, or moved,
answers so): the address stays what the submitter gave, and no redirect is followed. Of an answer
nothing but its status goes on record: the tenant could read what is not meant for it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac

import httpx

from addresses import web_url
from config import Settings
from execution.errors import Failure, Permanent
from execution.tools.dial import Call, Leave, dial
from queries.leases import ClaimedTask, Outcome
from queries.webhooks import Message

GONE = 410
# Some of an answer is read, so that its sender can end in order.
MOST_READ_BYTES = 4096
LONGEST_READ_SECONDS = 1.0


async def run_callback(task: ClaimedTask, settings: Settings) -> Outcome:
    """Deliver the message of a callback; raises the errors of execution/errors.py."""
    own = settings.callbacks
    if task.message is None:
        raise Permanent("there is nothing to deliver")
    url = _url_of(task)
    leave = Leave(
        own.allow_private_addresses,
        "callbacks.allow_private_addresses",
        loopback=not task.message.sender.keys_exist,
    )
    headers = headers_of(f"msg_{task.task_id}", task.message)  # the same at each attempt
    call = Call("POST", url, headers, task.message.body)
    try:
        async with asyncio.timeout(own.timeout_seconds):
            status = await dial(call, leave, own.timeout_seconds, _status)
    except TimeoutError as late:
        raise Failure(f"{url.host} gave no answer within {own.timeout_seconds:g} s") from late
    except httpx.HTTPError as failed:  # its text may quote the answer
        raise Failure(f"{url.host} gave no answer: {type(failed).__name__}") from failed
    if 200 <= status < 300:
        return Outcome("succeeded", result={"status": status})
    if status == GONE:
        raise Permanent(f"{url.host} answered {GONE}: it wants no more callbacks")
    followed = "; redirects are not followed" if 300 <= status < 400 else ""
    raise Failure(f"{url.host} answered {status}{followed}")


def headers_of(message_id: str, message: Message) -> dict[str, str]:
    """What a receiver needs to tell a repetition, and whether it comes from us and now."""
    sender = message.sender
    headers = {
        "Content-Type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(sender.at_seconds),
    }
    if sender.secret is not None:
        signed = f"{message_id}.{sender.at_seconds}.".encode() + message.body
        digest = hmac.digest(sender.secret, signed, hashlib.sha256)
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def _url_of(task: ClaimedTask) -> httpx.URL:
    """Looked at again: a program that stores tasks by SQL may store anything."""
    try:
        return web_url(str(task.payload.get("url")))
    except ValueError as refused:
        raise Permanent(str(refused)) from refused


async def _status(response: httpx.Response) -> int:
    """The status, whatever becomes of the rest."""
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(LONGEST_READ_SECONDS):
            received = 0
            async for piece in response.aiter_raw():
                received += len(piece)
                if received >= MOST_READ_BYTES:
                    break
    return response.status_code

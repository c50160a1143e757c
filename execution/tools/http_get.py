"""The tool http_get: reads a public URL, by the rules of execution/tools/dial.py.

Redirects are followed, and where each one leads to is judged anew. 408, 425, 429 and 5xx are
failures that are tried again, as is silence; other 4xx are permanent, lest an error page goes on as
data.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx

from addresses import web_url
from config import HttpGet
from execution.errors import Failure, Permanent
from execution.tools.context import ToolContext
from execution.tools.dial import Call, Leave, dial, words

MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
TRIED_AGAIN = (408, 425, 429)
HEADERS_TOLD = ("content-type", "etag", "last-modified", "location")
# A codec of Python's may take quadratic time; these do not.
CHARSETS = ("utf-8", "us-ascii", "iso-8859-1", "windows-1252", "utf-16")


async def http_get(url: str, context: ToolContext) -> dict[str, Any]:
    """Read `url`: status, some headers, and the text, cut at http_get.max_bytes."""
    settings = context.settings.http_get
    try:
        async with asyncio.timeout(settings.timeout_seconds):
            return await _get(_parsed(url), settings)
    except TimeoutError as late:
        raise Failure(f"no answer within {settings.timeout_seconds:g} s") from late


async def _get(url: httpx.URL, settings: HttpGet) -> dict[str, Any]:
    for _ in range(MOST_REDIRECTS + 1):
        answer = await _get_one(url, settings)
        if answer["status"] not in REDIRECTS or "location" not in answer["headers"]:
            return answer
        url = _parsed(answer["headers"]["location"], url)
    raise Permanent(f"more than {MOST_REDIRECTS} redirects")


async def _get_one(url: httpx.URL, settings: HttpGet) -> dict[str, Any]:
    """The answer of one URL, redirects not followed."""
    leave = Leave(settings.allow_private_addresses, "http_get.allow_private_addresses")
    read = partial(_answer, url, max_bytes=settings.max_bytes)
    try:
        return await dial(Call("GET", url, {}), leave, settings.timeout_seconds, read)
    except httpx.HTTPError as failed:
        raise Failure(f"{url.host}: {words(failed)}") from failed


def _parsed(text: str, base: httpx.URL | None = None) -> httpx.URL:
    try:
        return web_url(text, base)
    except ValueError as refused:
        raise Permanent(str(refused)) from refused


async def _answer(url: httpx.URL, response: httpx.Response, max_bytes: int) -> dict[str, Any]:
    status = response.status_code
    if status in TRIED_AGAIN or status >= 500:
        raise Failure(f"{url.host} answered {status}")
    if status >= 400:
        raise Permanent(f"{url.host} answered {status}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise Permanent(f"{url.host} answered compressed, although asked not to")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > max_bytes:
            break
    return {
        "url": str(url),
        "status": status,
        "headers": {
            name: response.headers[name] for name in HEADERS_TOLD if name in response.headers
        },
        "text": _text(bytes(body[:max_bytes]), response.charset_encoding),
        "truncated": len(body) > max_bytes,
    }


def _text(body: bytes, charset: str | None) -> str:
    known = charset if charset and charset.lower() in CHARSETS else "utf-8"
    return body.decode(known, errors="replace")

"""The tool http_get: reads a public URL.

The name is looked up once, every address it has is judged, and exactly one that was judged is
dialled. Redirects are judged anew, each one. Nothing of the environment is used: no proxy, no
netrc. 408, 425, 429 and 5xx are failures that are tried again, as is silence; other 4xx are
permanent, lest an error page goes on as data.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from functools import lru_cache
from typing import Any

import httpx

from config import HttpGet
from execution.errors import Failure, Permanent
from execution.tools import guard
from execution.tools.context import ToolContext
from execution.tools.threads import in_thread

MOST_REDIRECTS = 5
MOST_ADDRESSES_TRIED = 3
REDIRECTS = (301, 302, 303, 307, 308)
TRIED_AGAIN = (408, 425, 429)
HEADERS_TOLD = ("content-type", "etag", "last-modified", "location")
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]+")
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
    tls = await _tls()
    for _ in range(MOST_REDIRECTS + 1):
        answer = await _get_one(url, settings, tls)
        if answer["status"] not in REDIRECTS or "location" not in answer["headers"]:
            return answer
        url = _parsed(answer["headers"]["location"], url)
    raise Permanent(f"more than {MOST_REDIRECTS} redirects")


async def _get_one(url: httpx.URL, settings: HttpGet, tls: ssl.SSLContext) -> dict[str, Any]:
    """The answer of one URL, redirects not followed, from the first address that takes calls."""
    addresses = await _judged_addresses(url, settings)
    unreachable: Exception = OSError("it has no address")
    timeout = httpx.Timeout(settings.timeout_seconds, connect=settings.timeout_seconds / 3)
    async with httpx.AsyncClient(
        verify=tls, timeout=timeout, trust_env=False, follow_redirects=False
    ) as client:
        for address in addresses[:MOST_ADDRESSES_TRIED]:
            try:
                async with client.stream(
                    "GET",
                    url.copy_with(host=address, fragment=None),
                    headers={
                        "Host": url.netloc.decode("ascii"),
                        "User-Agent": "agent-orchestrator",
                        "Accept-Encoding": "identity",  # what is read is what is counted
                    },
                    extensions={"sni_hostname": url.raw_host.decode("ascii").rstrip(".")},
                ) as response:
                    return await _answer(url, response, settings.max_bytes)
            except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
                unreachable = failed
            except httpx.HTTPError as failed:
                raise Failure(f"{url.host}: {_words(failed)}") from failed
    raise Failure(f"{url.host} cannot be reached: {_words(unreachable)}") from unreachable


def _parsed(text: str, base: httpx.URL | None = None) -> httpx.URL:
    try:
        url = base.join(text) if base else httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as refused:
        raise Permanent(f"this is no URL: {refused}") from refused
    if url.scheme not in ("http", "https") or not url.host:
        raise Permanent("the URL is to begin with http:// or https:// and a host")
    host = url.raw_host.decode("ascii", errors="replace")
    if not HOST.fullmatch(host) or (url.port or 0) > 65_535:
        raise Permanent("the URL's host or port is none")
    if url.userinfo:
        raise Permanent("a URL with a name and password is not read: they would be on record")
    return url


async def _judged_addresses(url: httpx.URL, settings: HttpGet) -> list[str]:
    """All addresses of the host, if each of them may be called."""
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        addresses = await guard.resolve(url.raw_host.decode("ascii"), port)
    except (OSError, UnicodeError) as failed:
        raise Failure(f"the name {url.host[:300]} leads nowhere: {failed}") from failed
    if settings.allow_private_addresses:
        return addresses
    for address in addresses:
        if what := guard.why_not_public(address):
            # The address itself stays with us: it would tell about the inside of a network.
            raise Permanent(
                f"{url.host[:300]} leads to an address that is not public ({what}); "
                f"http_get.allow_private_addresses lets such calls through"
            )
    return addresses


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


def _words(failed: Exception) -> str:
    return f"{type(failed).__name__}: {failed}" if str(failed) else type(failed).__name__


async def _tls() -> ssl.SSLContext:
    """Made once: reading all certificates takes a while, so not on the loop's thread."""
    return await in_thread("certificates", _read_certificates)


@lru_cache(maxsize=1)
def _read_certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)

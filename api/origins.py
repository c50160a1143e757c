"""Web pages of other origins: a browser lets them open a WebSocket and send a form to us.

Both come with the header Origin, which a page cannot change. Programs send none.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.headers import header
from api.problems import problem

DEFAULT_PORTS = {"http": 80, "https": 443}
ONLY_LOOK = ("GET", "HEAD", "OPTIONS")  # their answers a browser keeps from other pages
OTHER_PAGE = "this is not for pages of other origins: the headers Origin and Host differ"


def is_of_our_page(headers: Headers) -> bool:
    """Whether no web page asks, or one of our own."""
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        page = urlsplit(origin)
        asked = urlsplit(f"//{headers.get('host', '')}")
        usual = DEFAULT_PORTS.get(page.scheme)
        return page.hostname is not None and (page.hostname, page.port or usual) == (
            asked.hostname,
            asked.port or usual,
        )
    except ValueError:  # no port at all
        return False


class OwnPagesOnly:
    """Middleware: refuses what changes something, if a page of another origin asks for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        changes = scope["type"] == "http" and scope["method"] not in ONLY_LOOK
        from_a_page = changes and header(scope, b"origin") is not None
        if from_a_page and not is_of_our_page(Headers(scope=scope)):
            await problem(403, OTHER_PAGE)(scope, receive, send)
            return
        await self._app(scope, receive, send)

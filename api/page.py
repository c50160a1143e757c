"""The page: its files as they lie in web/, which run in a browser without being built."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Response
from starlette.exceptions import HTTPException

WEB = Path(__file__).resolve().parent.parent / "web"
NAME = re.compile(r"[a-z]+\.(?P<kind>[a-z]+)")
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Everything the page loads is ours, and text never becomes markup: not even by mistake.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for again each time: the modules fit together
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(include_in_schema=False)

IfNoneMatch = Annotated[str | None, Header()]


@router.api_route("/", methods=["GET", "HEAD"])
async def get_page(if_none_match: IfNoneMatch = None) -> Response:
    """The page itself; which run it shows is in the part of its address after `?`."""
    return read_file("index.html", if_none_match)


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def get_file(name: str, if_none_match: IfNoneMatch = None) -> Response:
    """A file of the page."""
    return read_file(name, if_none_match)


def read_file(name: str, known: str | None) -> Response:
    """A file of web/, or 304 where the browser has it already."""
    plain = NAME.fullmatch(name)
    kind = TYPES.get(plain["kind"]) if plain else None
    if kind is None or not (WEB / name).is_file():
        raise HTTPException(404)
    content = (WEB / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    if known and tag in known:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)

"""Whose certificates are believed."""

from __future__ import annotations

import ssl
from functools import lru_cache

import httpx


@lru_cache(maxsize=1)
def trusted() -> ssl.SSLContext:
    """All that the machine's Python packages trust; read once, which takes a while and memory."""
    return httpx.create_ssl_context(trust_env=False)


def trusted_by(url: str) -> ssl.SSLContext:
    """What a client needs that calls nothing but this server: for plain HTTP, no certificate."""
    if url.startswith("https:"):
        return trusted()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it believes nobody

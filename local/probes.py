"""Looking at what answers on a port, without changing it."""

from __future__ import annotations

import contextlib
import http.client
import json
from urllib.parse import urlsplit

import psycopg2

TIMEOUT_SECONDS = 5


def fetch(url: str) -> tuple[int, bytes] | None:
    """Status and body of a GET, or None if nothing there speaks HTTP. No proxy is asked."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    try:
        connection = connect(parts.hostname or "localhost", parts.port, timeout=TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", parts.path or "/")
            response = connection.getresponse()
            return response.status, response.read()
    except (OSError, ValueError, http.client.HTTPException):  # ValueError: no such port number
        return None


def answers_like_ollama(url: str) -> bool:
    """GET /api/version gives a version."""
    answer = fetch(f"{url.rstrip('/')}/api/version")
    return answer is not None and answer[0] == 200 and "version" in _object(answer[1])


def models_of(url: str) -> set[str]:
    """The names in /api/tags, with their tag."""
    answer = fetch(f"{url.rstrip('/')}/api/tags")
    models = _object(answer[1]).get("models") if answer is not None else None
    entries = models if isinstance(models, list) else []
    return {with_tag(str(entry.get("name"))) for entry in entries if isinstance(entry, dict)}


def with_tag(model: str) -> str:
    """Ollama's full name of a model: without a tag, `latest` is meant."""
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"


def is_ready(api_url: str) -> bool:
    """The API says that it can serve."""
    answer = fetch(f"{api_url}/readyz")
    return answer is not None and answer[0] == 200


def why_refused(database_url: str) -> str | None:
    """Why that Postgres does not let us in; None if it does."""
    try:
        psycopg2.connect(database_url, connect_timeout=TIMEOUT_SECONDS).close()
    except psycopg2.Error as exc:
        return str(exc).strip()
    return None


def _object(body: bytes) -> dict[str, object]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

"""API keys in tests: making one, revoking it, and asking with it."""

from __future__ import annotations

from typing import Any

import httpx

from db import Connection
from queries.keys import KEY, create_key, revoke_key
from tests.support.processes import Api


def id_of(key: str) -> str:
    found = KEY.fullmatch(key)
    assert found, key
    return found["id"]


def revoke(conn: Connection, key: str) -> None:
    revoke_key(conn, id_of(key))


class KeyHolder:
    """Sends requests with one key."""

    def __init__(self, api: Api, key: str) -> None:
        self.api, self.key = api, key

    def call(self, method: str, path: str, **sent: Any) -> httpx.Response:
        headers = {"X-API-Key": self.key, **sent.pop("headers", {})}
        return self.api.http.request(method, path, headers=headers, **sent)

    def get(self, path: str, **sent: Any) -> httpx.Response:
        return self.call("GET", path, **sent)

    def read(self, path: str, **sent: Any) -> Any:
        answer = self.get(path, **sent)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, **fields: Any) -> int:
        """The number of a new task."""
        answer = self.call("POST", "/tasks", json={"prompt": "Say something.", **fields})
        assert answer.status_code == 201, answer.text
        return int(answer.json()["task_id"])

    def submit_run(self, *steps: dict[str, Any]) -> Any:
        answer = self.call("POST", "/runs", json={"goal": "a goal", "steps": list(steps)})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def ticket(self, path: str) -> str:
        answer = self.call("POST", "/tickets", json={"path": path})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["ticket"])


def holder(conn: Connection, api: Api, tenant: str | None) -> KeyHolder:
    """Who has a new key of the tenant, or (None) of an operator."""
    return KeyHolder(api, create_key(conn, tenant))

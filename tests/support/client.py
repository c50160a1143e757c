"""A tenant's view of the API: requests that bear its name, and what an error has to look like."""

from __future__ import annotations

from typing import Any

import httpx

JSON = {"Content-Type": "application/json"}


class Client:
    """Sends requests of one tenant."""

    def __init__(self, http: httpx.Client, tenant: str) -> None:
        self.http, self.tenant = http, tenant

    def post(self, body: Any = None, key: str | None = None, **fields: Any) -> httpx.Response:
        """POST /tasks with `body`, or with a prompt and `fields`."""
        sent = {"prompt": "Say something.", **fields} if body is None else body
        return self.http.post("/tasks", json=sent, headers=self._headers(key))

    def post_raw(self, content: Any, **headers: str) -> httpx.Response:
        """POST /tasks with these very bytes, as JSON unless `headers` say otherwise."""
        return self.http.post("/tasks", content=content, headers={**self._headers(), **headers})

    def submit(self, **fields: Any) -> int:
        """The number of a new task."""
        answer = self.post(**fields)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["task_id"])

    def get(self, task_id: Any, **params: Any) -> httpx.Response:
        return self.http.get(f"/tasks/{task_id}", params=params, headers=self._headers())

    def task(self, task_id: Any, **params: Any) -> dict[str, Any]:
        answer = self.get(task_id, **params)
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    def _headers(self, key: str | None = None) -> dict[str, str]:
        return {"X-Tenant-Id": self.tenant} | ({} if key is None else {"Idempotency-Key": key})


def refused(answer: httpx.Response, *statuses: int, field: str | None = None) -> str:
    """The plain words of a refusal; AssertionError if it is none, or says it in another shape."""
    assert answer.status_code in statuses, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json"
    said = answer.json()
    assert set(said) <= {"error", "detail"}
    assert isinstance(said["error"], str)
    assert said["error"].strip()
    if field is not None:
        assert field in [problem["field"] for problem in said["detail"]], said
    return str(said["error"])

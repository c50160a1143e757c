"""A web page of another origin changes nothing; browsers send its forms with the header Origin."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.client import Client

OTHERS = ["http://evil.example", "null", "http://127.0.0.1:1", "https://", "http://[", ""]
CHANGES = [
    ("POST", "/tasks/{id}/approve"),
    ("POST", "/tasks/{id}/requeue"),
    ("DELETE", "/tasks/{id}"),
    ("POST", "/tasks"),
]


@pytest.mark.parametrize("origin", OTHERS)
@pytest.mark.parametrize(("method", "path"), CHANGES, ids=[" ".join(one) for one in CHANGES])
def test_a_page_of_another_origin_changes_nothing(
    client: Client, method: str, path: str, origin: str
) -> None:
    task_id = client.submit()
    headers = {"Origin": origin, "X-Tenant-Id": client.tenant}
    answer = client.http.request(method, path.format(id=task_id), headers=headers)
    assert answer.status_code == 403
    assert "other origins" in answer.json()["error"]
    assert client.task(task_id)["status"] == "PENDING"


def test_our_own_page_and_programs_may_change_things(client: Client) -> None:
    for headers in ({}, {"Origin": str(client.http.base_url).rstrip("/")}):
        tenant: dict[str, Any] = {"X-Tenant-Id": client.tenant, **headers}
        answer = client.http.delete(f"/tasks/{client.submit()}", headers=tenant)
        assert answer.status_code == 200

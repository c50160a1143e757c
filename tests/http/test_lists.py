"""GET /tasks, /dead-letters, /tasks/{id}/audit, /stats, waiting_for, and /metrics as text."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

import db
from db import Connection
from queries.workers import report_worker
from tests.support import lives
from tests.support.client import Client, refused

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
)


def get(client: Client, path: str, **params: Any) -> httpx.Response:
    return client.http.get(path, params=params, headers={"X-Tenant-Id": client.tenant})


def listed(client: Client, path: str = "/tasks", **params: Any) -> dict[str, Any]:
    answer = get(client, path, **params)
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def ids(page: dict[str, Any]) -> list[int]:
    return [task["id"] for task in page["tasks"]]


# --- GET /tasks ------------------------------------------------------------------------------


def test_tasks_are_listed_newest_first_and_as_get_shows_them(client: Client) -> None:
    assert listed(client) == {"tasks": [], "next_cursor": None}
    submitted = [client.submit(prompt=f"p{n}", metadata={"n": n}) for n in range(3)]
    page = listed(client)
    assert ids(page) == submitted[::-1]
    assert page["tasks"] == [client.task(task_id) for task_id in submitted[::-1]]
    assert page["next_cursor"] is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pages_hold_every_task_once_even_when_more_come_meanwhile(
    client: Client, count: int
) -> None:
    submitted = [client.submit() for _ in range(6)]
    seen: list[int] = []
    cursor: str | None = None
    while cursor is not None or not seen:
        page = listed(client, limit=count, **({} if cursor is None else {"cursor": cursor}))
        assert len(page["tasks"]) == count
        seen += ids(page)
        cursor = page["next_cursor"]
        client.submit()
    assert seen == submitted[::-1]


def test_a_filter_shows_just_what_it_names(client: Client, conn: Connection) -> None:
    by_status: dict[str, int] = {}
    for status, verdict in (("SUCCEEDED", "succeeded"), ("FAILED", "permanent")):
        by_status[status] = client.submit()
        lives.end(conn, by_status[status], verdict)
    by_status["RUNNING"] = client.submit()
    lives.take(conn, by_status["RUNNING"])
    by_status["PENDING"] = client.submit()
    by_status["BLOCKED"] = lives.insert(conn, "BLOCKED", client.tenant)
    for status, task_id in by_status.items():
        assert ids(listed(client, status=status)) == [task_id]
    assert ids(listed(client, status="CANCELLED")) == []
    assert ids(listed(client, kind="approval")) == [by_status["BLOCKED"]]
    assert ids(listed(client, kind="prompt", status="PENDING")) == [by_status["PENDING"]]
    assert ids(listed(client)) == sorted(by_status.values(), reverse=True)


def test_a_run_is_in_no_list_and_has_no_address_here(client: Client, conn: Connection) -> None:
    run = lives.insert(conn, "BLOCKED", client.tenant, kind="run")
    assert ids(listed(client)) == []
    assert refused(get(client, f"/tasks/{run}/audit"), 404) == "not found"
    refused(get(client, "/tasks", kind="run"), 422, field="kind")


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


REFUSED_QUERIES = [
    ("status", "pending"),
    ("status", "DONE"),
    ("kind", "tree"),
    ("limit", "0"),
    ("limit", "201"),
    ("limit", "many"),
    ("cursor", "not one"),
    ("cursor", "\0"),
    ("cursor", ""),
    ("cursor", encoded("0")),
    ("cursor", encoded("-1")),
    ("cursor", encoded(str(2**63))),
    ("cursor", encoded("²")),
    ("cursor", encoded("9" * 5000)),
]


@pytest.mark.parametrize(("field", "value"), REFUSED_QUERIES)
def test_a_query_that_means_nothing_is_refused_in_plain_words(
    client: Client, field: str, value: str
) -> None:
    said = refused(get(client, "/tasks", **{field: value}), 422, field=field)
    assert said.startswith(f"{field}: ")


@pytest.mark.parametrize("path", ["/dead-letters", "/tasks/{}/audit"])
def test_each_list_refuses_a_cursor_that_it_never_gave_out(client: Client, path: str) -> None:
    address = path.format(client.submit())
    refused(get(client, address, cursor="x"), 422, field="cursor")
    refused(get(client, address, limit="201"), 422, field="limit")


def test_a_page_of_huge_results_ends_early_and_loses_none(client: Client, conn: Connection) -> None:
    submitted = [client.submit() for _ in range(4)]
    for task_id in submitted:
        # Hex of random bytes does not compress to less than half of it.
        statement = """
            SELECT string_agg(md5(random()::text), '') AS text FROM generate_series(1, 100000)
        """
        text = db.fetch(conn, statement)[0]["text"]
        lives.end(conn, task_id, "succeeded", result={"text": text})
    seen: list[int] = []
    page = listed(client)
    while page["next_cursor"]:
        assert 1 <= len(page["tasks"]) < 4
        seen += ids(page)
        page = listed(client, cursor=page["next_cursor"])
    assert seen + ids(page) == submitted[::-1]


# --- GET /dead-letters -----------------------------------------------------------------------


def test_dead_letters_are_what_failed_and_why_without_runs_and_rejected_approvals(
    client: Client, conn: Connection
) -> None:
    dead = [client.submit() for _ in range(3)]
    for task_id in dead:
        lives.end(conn, task_id, "permanent", error=f"{task_id} is beyond help")
    lives.end(conn, client.submit(), "succeeded")
    lives.reject(conn, lives.insert(conn, "AWAITING_APPROVAL", client.tenant))
    run = lives.insert(conn, "BLOCKED", client.tenant, kind="run")
    fail = """
        UPDATE tasks SET status = 'FAILED', reason = 'dependency_failed',
                         finished_at = current_instant()
        WHERE task_id = %(run)s
    """
    db.fetch(conn, fail, {"run": run})
    page = listed(client, "/dead-letters")
    assert ids(page) == dead[::-1]
    assert page["tasks"][0]["error"] == {
        "type": "permanent",
        "message": f"{dead[-1]} is beyond help",
    }
    first = listed(client, "/dead-letters", limit=2)
    rest = listed(client, "/dead-letters", limit=2, cursor=first["next_cursor"])
    assert (ids(first) + ids(rest), rest["next_cursor"]) == (dead[::-1], None)


def test_no_list_shows_what_belongs_to_another_tenant(client: Client, conn: Connection) -> None:
    stranger = Client(client.http, f"{client.tenant}-stranger")
    theirs = stranger.submit()
    lives.end(conn, theirs, "permanent")
    assert ids(listed(client)) == ids(listed(client, "/dead-letters")) == []
    assert refused(get(client, f"/tasks/{theirs}/audit"), 404) == "not found"
    # Nor by a cursor that was made for the other one.
    assert ids(listed(client, cursor=encoded(str(theirs + 1)))) == []


# --- GET /tasks/{id}/audit -------------------------------------------------------------------


def test_the_audit_tells_every_transition_oldest_first(client: Client, conn: Connection) -> None:
    task_id = client.submit()
    lives.end(conn, task_id, "failure", error="HTTP 500")
    db.fetch(conn, "UPDATE tasks SET due = true WHERE task_id = %(id)s", {"id": task_id})
    lives.end(conn, task_id, "succeeded")
    audit = listed(client, f"/tasks/{task_id}/audit")["audit"]
    assert [(entry["from"], entry["to"], entry["reason"]) for entry in audit] == [
        (None, "PENDING", "created"),
        ("PENDING", "RUNNING", "claimed"),
        ("RUNNING", "PENDING", "retry"),
        ("PENDING", "RUNNING", "claimed"),
        ("RUNNING", "SUCCEEDED", "succeeded"),
    ]
    keys = "id task_id run_id step from to reason at worker attempt detail cursor"
    assert " ".join(audit[0]) == keys
    assert [entry["attempt"] for entry in audit] == [0, 1, 1, 2, 2]
    assert [entry["worker"] for entry in audit] == [None, "w1", "w1", "w1", "w1"]
    assert audit[2]["detail"] == {"error": "HTTP 500", "delay_seconds": 2}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", entry["at"]) for entry in audit)


def test_the_audit_goes_on_after_a_page_and_after_any_entry(
    client: Client, conn: Connection
) -> None:
    task_id = client.submit()
    lives.end(conn, task_id, "succeeded")
    address = f"/tasks/{task_id}/audit"
    whole = listed(client, address)["audit"]
    first = listed(client, address, limit=2)
    rest = listed(client, address, limit=2, cursor=first["next_cursor"])
    assert (first["audit"] + rest["audit"], rest["next_cursor"]) == (whole, None)
    after_first = listed(client, address, cursor=whole[0]["cursor"])
    assert after_first["audit"] == whole[1:]


# --- /stats and waiting_for ------------------------------------------------------------------


@pytest.fixture
def worker_says(conn: Connection) -> Iterator[Any]:
    """Lets a worker report its paused routes, as its heartbeat does; forgotten afterwards."""

    def say(name: str = "w1", running: int = 0, **paused_routes: str) -> None:
        report_worker(conn, uuid.uuid4(), name, 4, running, paused_routes)

    yield say
    db.fetch(conn, "DELETE FROM workers")


def test_stats_count_what_is_due_delayed_running_and_dead(client: Client, conn: Connection) -> None:
    keys = ("depth", "delayed", "running", "dead_letters")
    before = listed(client, "/stats")
    for _ in range(2):
        client.submit()
    client.submit(delay_seconds=3600)
    come = client.submit(delay_seconds=3600)
    arrive = "UPDATE tasks SET available_at = current_instant() WHERE task_id = %(id)s"
    db.fetch(conn, arrive, {"id": come})
    lives.take(conn, client.submit())
    lives.end(conn, client.submit(), "permanent")
    lives.reject(conn, lives.insert(conn, "AWAITING_APPROVAL", client.tenant))
    after = listed(client, "/stats")
    assert [after[key] - before[key] for key in keys] == [3, 1, 1, 1]


def test_stats_name_the_workers_seen_lately_and_the_routes_that_any_finds_closed(
    client: Client, conn: Connection, worker_says: Any
) -> None:
    assert listed(client, "/stats")["workers"] == []
    worker_says("a", running=2)
    worker_says("b", local="connection refused", cloud="401")
    worker_says("gone", local="it was so an hour ago")
    forget = "UPDATE workers SET seen_at = current_instant() - interval '1 h' WHERE name = 'gone'"
    db.fetch(conn, forget)
    stats = listed(client, "/stats")
    assert stats["paused_routes"] == {"cloud": "401", "local": "connection refused"}
    seen = [(w["name"], w["concurrency"], w["running"]) for w in stats["workers"]]
    assert seen == [("a", 4, 2), ("b", 4, 0)]
    assert stats["workers"][0]["paused_routes"] == {}
    times = [w[column] for w in stats["workers"] for column in ("started_at", "seen_at")]
    assert all(time.endswith("Z") for time in times)


def test_a_task_of_a_paused_route_says_which_backend_it_waits_for(
    client: Client, conn: Connection, worker_says: Any
) -> None:
    auto, cloud = client.submit(), client.submit(route="cloud")
    later = client.submit(delay_seconds=3600)
    assert client.task(auto)["waiting_for"] is None
    worker_says(local="connection refused")
    assert client.task(auto)["waiting_for"] == "backend local"
    assert client.task(cloud)["waiting_for"] is None
    assert client.task(later)["waiting_for"] is None
    worker_says(cloud="503")
    assert client.task(cloud)["waiting_for"] == "backend cloud"
    chosen = "UPDATE tasks SET route = 'cloud' WHERE task_id = %(id)s"
    db.fetch(conn, chosen, {"id": auto})
    shown = {task["id"]: task["waiting_for"] for task in listed(client)["tasks"]}
    assert shown == {auto: "backend cloud", cloud: "backend cloud", later: None}
    lives.take(conn, auto)
    assert client.task(auto)["waiting_for"] is None


def test_a_task_says_what_else_it_waits_for(client: Client, conn: Connection) -> None:
    retried, out = client.submit(), client.submit()
    lives.end(conn, retried, "failure")
    lives.end(conn, out, "outage", route="local", delay_seconds=60)
    assert client.task(retried)["waiting_for"] == "backoff"
    assert client.task(out)["waiting_for"] == "backend local"
    blocked = lives.insert(conn, "BLOCKED", client.tenant)
    asked = lives.insert(conn, "AWAITING_APPROVAL", client.tenant)
    assert client.task(blocked)["waiting_for"] == "dependencies"
    assert client.task(asked)["waiting_for"] == "approval"


# --- GET /metrics as text --------------------------------------------------------------------

SAMPLE = re.compile(r'orchestrator_[a-z_]+(\{[a-z]+="([^"\\\n]|\\.)*"\})? (NaN|[0-9.e+-]+)')


def test_prometheus_gets_the_figures_in_its_own_format(client: Client, conn: Connection) -> None:
    paid = client.submit()
    lives.end(conn, paid, "succeeded", route="local", cost=Decimal("0.00007"))
    lives.end(conn, client.submit(), "failure")
    lives.end(conn, client.submit(), "permanent")
    answer = client.http.get("/metrics", headers={"Accept": PROMETHEUS})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text.endswith("\n")
    lines = answer.text.splitlines()
    for line in lines:
        assert line.startswith(("# HELP ", "# TYPE ")) or SAMPLE.fullmatch(line), line
    figures = client.http.get("/metrics").json()
    for status, number in figures["by_status"].items():
        assert f'orchestrator_tasks{{status="{status}"}} {number}' in lines
    assert 'orchestrator_tasks{status="CANCELLED"} ' in answer.text
    spent = figures["cost_by_route"]["local"]
    assert f'orchestrator_cost{{route="local"}} {spent}' in lines
    stats = client.http.get("/stats").json()
    for name, key in (("depth", "depth"), ("dead_letters", "dead_letters")):
        assert f"orchestrator_{name} {stats[key]}" in lines
    assert any(re.fullmatch(r"orchestrator_retries [1-9]\d*", line) for line in lines)


@pytest.mark.parametrize(
    ("accept", "is_text"),
    [
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/plain, */*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;q=0", False),
        ("text/plain;q=x", False),
        ("", False),
        ("text/plain", True),
        ("Text/Plain", True),
        ("application/openmetrics-text", True),
        ("application/json;q=0.5, text/plain", True),
        (PROMETHEUS, True),
    ],
)
def test_text_goes_to_those_who_would_rather_have_it(
    client: Client, accept: str, is_text: bool
) -> None:
    answer = client.http.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain") == is_text
    if not is_text:
        assert set(json.loads(answer.text)) == {
            "by_status",
            "avg_retry",
            "reclaimed_count",
            "avg_duration_seconds",
            "cost_by_route",
        }

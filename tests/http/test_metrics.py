"""GET /metrics: exact figures over all tasks, also when there are none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from config import Retry
from db import Connection
from tests.support import rows
from tests.support.client import Client
from tests.support.processes import Api

KEYS = {"by_status", "avg_retry", "reclaimed_count", "avg_duration_seconds", "cost_by_route"}
BASE = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def no_tasks(conn: Connection) -> None:
    rows.sql(conn, "TRUNCATE tasks")
    rows.set_clock(conn, BASE.isoformat())


@pytest.fixture
def figures(module_api: Api) -> Any:
    """figures(): the figures of now."""

    def ask() -> dict[str, Any]:
        answer = module_api.http.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        found: dict[str, Any] = answer.json()
        assert set(found) == KEYS
        return found

    return ask


def end(conn: Connection, seconds: float, verdict: str = "succeeded", **fields: Any) -> int:
    """A task that ran for so many seconds."""
    rows.set_clock(conn, BASE.isoformat())
    task = rows.claimed(conn)
    rows.set_clock(conn, (BASE + timedelta(seconds=seconds)).isoformat())
    rows.settle(conn, task.lease, verdict, **fields)
    return task.task_id


def test_without_tasks_the_figures_are_zero_empty_or_null(figures: Any) -> None:
    assert figures() == {
        "by_status": {},
        "avg_retry": 0,
        "reclaimed_count": 0,
        "avg_duration_seconds": None,
        "cost_by_route": {},
    }


def test_by_status_counts_the_tasks_of_each_status_that_is_there(
    figures: Any, conn: Connection
) -> None:
    end(conn, 1)
    end(conn, 1, "permanent")
    rows.claimed(conn)
    rows.submit(conn, delay_seconds=60)
    rows.submit(conn)
    assert figures()["by_status"] == {"SUCCEEDED": 1, "FAILED": 1, "RUNNING": 1, "PENDING": 2}


def test_avg_retry_is_the_mean_number_of_failures_of_all_tasks(
    figures: Any, conn: Connection
) -> None:
    for _ in range(3):
        end(conn, 1)
    assert figures()["avg_retry"] == 0
    end(conn, 1, "permanent")
    assert figures()["avg_retry"] == 0.25


def test_avg_duration_is_that_of_the_tasks_that_succeeded(figures: Any, conn: Connection) -> None:
    end(conn, 1)
    end(conn, 4)
    end(conn, 1000, "permanent")
    rows.claimed(conn)
    assert figures()["avg_duration_seconds"] == 2.5


def test_reclaimed_count_counts_tasks_and_not_how_often_they_were_taken_back(
    figures: Any, conn: Connection
) -> None:
    task_id = rows.submit(conn)
    for _ in range(2):
        rows.claim_only(conn, task_id)
        rows.expire(conn, task_id)
        rows.reap(conn)
        assert figures()["reclaimed_count"] == 1
    rows.settle(conn, rows.claim_only(conn, task_id).lease, "succeeded")
    end(conn, 1)
    assert figures()["reclaimed_count"] == 1
    assert figures()["by_status"] == {"SUCCEEDED": 2}


def test_cost_by_route_adds_up_exactly_with_eight_places(figures: Any, conn: Connection) -> None:
    for _ in range(10):
        end(conn, 1, route="local", cost=Decimal("0.1"))
    end(conn, 1, route="cloud", cost=Decimal("0.00000001"))
    end(conn, 1, "permanent", route="cloud", cost=Decimal("2"))
    end(conn, 1)
    assert figures()["cost_by_route"] == {"local": "1.00000000", "cloud": "2.00000001"}


def test_what_failed_attempts_cost_is_counted_too(figures: Any, conn: Connection) -> None:
    task = rows.claimed(conn)
    rows.settle(conn, task.lease, "failure", Retry(), route="local", cost=Decimal("0.5"))
    assert figures()["cost_by_route"] == {"local": "0.50000000"}
    assert figures()["by_status"] == {"PENDING": 1}


def test_while_no_key_exists_the_figures_are_those_of_all_tenants(
    figures: Any, module_api: Api
) -> None:
    for tenant in ("a", "b"):
        Client(module_api.http, tenant).submit()
    assert figures()["by_status"] == {"PENDING": 2}
    assert Client(module_api.http, "a").http.get("/metrics").json()["by_status"] == {"PENDING": 2}

"""Every list reads by an index what it shows and no more, also with statistics that are stale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

import db
from db import Connection
from queries import listings, operations
from states import Kind, Status
from tests.conftest import administrator, fresh_database, settings_for

LIMIT = 20
SHORT = ("figures", "figure_changes")  # some rows for each tenant, and all of them are read

# Finished tasks of one tenant among those of 500 others; what one looks for is rare or old. Without
# the triggers, which are made for statements of a few hundred rows.
FILL = """
ALTER TABLE tasks DISABLE TRIGGER USER;
INSERT INTO tasks (
    tenant, kind, payload, status, reason, due, result, last_error, finished_at,
    batch_id, idempotency_scope, idempotency_key, request_hash)
SELECT CASE WHEN n % 4 = 0 THEN 'tenant-' || n % 2000 ELSE 'default' END, 'prompt',
       '{"prompt": "p"}', s.status::task_status, s.reason, s.status = 'PENDING',
       CASE s.status WHEN 'SUCCEEDED' THEN '{"text": "done"}'::jsonb END,
       CASE s.status WHEN 'FAILED' THEN 'it went wrong' END,
       CASE WHEN s.status <> 'PENDING' THEN current_instant() END,
       CASE WHEN n BETWEEN 2 AND 9 THEN 1
            WHEN n > 60000 AND n % 1000 <> 1 THEN (n - 1) / 1000 * 1000 + 1 END,
       CASE WHEN n % 7 = 1 THEN 'batch' END, CASE WHEN n % 7 = 1 THEN n::text END,
       CASE WHEN n % 7 = 1 THEN 'x'::bytea END
FROM generate_series(1, 80000) AS n CROSS JOIN LATERAL (VALUES
    (CASE WHEN n < 500 THEN 'FAILED' WHEN n % 1000 = 7 THEN 'PENDING' ELSE 'SUCCEEDED' END,
     CASE WHEN n < 500 THEN 'permanent' WHEN n % 1000 = 7 THEN 'created' ELSE 'succeeded' END)
) AS s(status, reason);
INSERT INTO tasks (kind, payload, status, due)
SELECT 'approval', '{}', 'AWAITING_APPROVAL', false FROM generate_series(1, 30);
INSERT INTO tasks (kind, payload, due, available_at)
SELECT 'prompt', '{}', false, current_instant() + make_interval(mins => n * 7919 % 20000 - 10)
FROM generate_series(1, 20000) AS n;
ALTER TABLE tasks ENABLE TRIGGER USER;
SELECT recount_figures();
INSERT INTO audit_log (root_id, task_id, tenant, to_status, reason, attempt)
SELECT task_id, task_id, tenant, status, reason, 1 FROM tasks CROSS JOIN generate_series(1, 3);
"""


@pytest.fixture(scope="module")
def many_rows(server_url: str) -> Iterator[str]:
    """The name of a database with many tasks, of which the planner knows nothing."""
    with fresh_database(server_url) as url:
        with administrator(url) as cursor:
            cursor.execute("ALTER TABLE tasks SET (autovacuum_enabled = false)")
            cursor.execute("ANALYZE tasks, audit_log")  # while they are empty
            cursor.execute(FILL)
        yield urlsplit(url).path.removeprefix("/")


@pytest.fixture(scope="module", params=["analyzed", "stale"])
def filled(request: pytest.FixtureRequest, server_url: str, many_rows: str) -> Iterator[Connection]:
    """A table with many rows, of which the planner knows all or nothing."""
    with fresh_database(server_url, many_rows) as url:
        if request.param == "analyzed":
            with administrator(url) as cursor:
                cursor.execute("ANALYZE tasks, audit_log")
        with contextlib.closing(db.connect(url, settings_for(url).database, "test")) as conn:
            yield conn


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def rows_touched(node: dict[str, Any]) -> int:
    """What a scan read, whether it passed it on or not."""
    read = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    return int(read * node["Actual Loops"])


def check_reads_little(conn: Connection, statement: str, values: dict[str, Any], most: int) -> None:
    explained = db.fetch(conn, "EXPLAIN (ANALYZE, FORMAT JSON) " + statement, values)
    plan = explained[0]["QUERY PLAN"][0]["Plan"]
    for node in nodes(plan):
        if "Relation Name" in node or node["Node Type"].startswith("Bitmap Index"):
            # A table scan is right where there is nothing: in next month's partition.
            is_short = node.get("Relation Name") in SHORT
            assert node["Node Type"] != "Seq Scan" or not rows_touched(node) or is_short, plan
            assert rows_touched(node) <= most, node
        if node["Node Type"].endswith("Sort"):
            assert rows_touched(node) <= most, node


PAGE = {
    "tenant": "default",
    "limit": LIMIT,
    "before": db.LARGEST_ID,
    "most_bytes": 2**20,
    "present_seconds": 30,
}
ALL = {"statuses": list(Status), "kinds": list(Kind)}


@pytest.mark.parametrize("before", [db.LARGEST_ID, 30_000, 400])
@pytest.mark.parametrize(
    "asked",
    [
        ALL,
        {**ALL, "kinds": ["approval"]},
        *({**ALL, "statuses": [status]} for status in Status),
        {"statuses": ["FAILED"], "kinds": ["prompt"]},
    ],
    ids=lambda asked: f"{len(asked['kinds'])} kinds {' '.join(asked['statuses'])}",
)
def test_a_page_of_tasks_reads_no_more_than_a_page_of_each_status(
    filled: Connection, asked: dict[str, Any], before: int
) -> None:
    most = (LIMIT + 1) * 4  # of this table four groups of kind and status are filled
    values = {**PAGE, **asked, "before": before}
    check_reads_little(filled, listings.LIST_TASKS, values, most)


@pytest.mark.parametrize("before", [db.LARGEST_ID, 30_000, 400])
@pytest.mark.parametrize(
    "asked",
    [{**ALL, "kinds": ["prompt"]}, *({**ALL, "statuses": [status]} for status in Status)],
    ids=lambda asked: f"{len(asked['kinds'])} kinds {' '.join(asked['statuses'])}",
)
def test_a_page_of_all_tenants_reads_few_rows_of_each(
    filled: Connection, asked: dict[str, Any], before: int
) -> None:
    """There are 500 tenants with something of each of two statuses: 20 rows of each are 20,000."""
    values = {**PAGE, **asked, "before": before}
    check_reads_little(filled, listings.LIST_TASKS_OF_ALL, values, 3000)


@pytest.mark.parametrize("before", [db.LARGEST_ID, 30_000, 400])
def test_a_page_of_everything_reads_a_page(filled: Connection, before: int) -> None:
    check_reads_little(filled, listings.LIST_ALL_TASKS, {**PAGE, "before": before}, LIMIT + 1)


@pytest.mark.parametrize("before", [db.LARGEST_ID, 400])
def test_a_page_of_all_dead_letters_reads_few_rows_of_each_tenant(
    filled: Connection, before: int
) -> None:
    values = {**PAGE, "before": before}
    check_reads_little(filled, listings.LIST_DEAD_LETTERS_OF_ALL, values, 1000)


@pytest.mark.parametrize("before", [db.LARGEST_ID, 400])
def test_a_page_of_dead_letters_reads_a_page(filled: Connection, before: int) -> None:
    check_reads_little(filled, listings.LIST_DEAD_LETTERS, {**PAGE, "before": before}, LIMIT + 1)


@pytest.mark.parametrize("after", [0, 100_000])
def test_a_page_of_the_audit_reads_one_task(filled: Connection, after: int) -> None:
    values = {"task_id": 4711, "after": after, "limit": LIMIT}
    check_reads_little(filled, listings.LIST_TRANSITIONS, values, 3)


@pytest.mark.parametrize("tenant", [None, "default"])
def test_of_the_queue_only_what_became_due_unseen_is_counted(
    filled: Connection, tenant: str | None
) -> None:
    """Ten of 20,000 delayed tasks; the figures of 501 tenants, of two kinds at most, are read."""
    check_reads_little(filled, listings.READ_QUEUE, {"tenant": tenant}, 510)


@pytest.mark.parametrize("tenant", [None, "default"])
def test_the_metrics_read_figures_and_no_task(filled: Connection, tenant: str | None) -> None:
    check_reads_little(filled, db.METRICS, {"tenant": tenant}, 510)


@pytest.mark.parametrize(
    "reference", [{"number": 4711, "name": None}, {"number": None, "name": "x"}]
)
def test_one_task_is_found_by_its_index(filled: Connection, reference: dict[str, Any]) -> None:
    values = {**PAGE, **reference}
    check_reads_little(filled, operations.FIND_TASK, values, 1)
    check_reads_little(filled, db.GET_TASK, values, 1)


@pytest.mark.parametrize(("key", "size"), [("1", 9), ("77001", 1000)], ids=["early", "late"])
@pytest.mark.parametrize("nested_loops", ["on", "off"])
def test_a_batch_is_found_by_its_key_whatever_is_thought_of_joins(
    filled: Connection, key: str, size: int, nested_loops: str
) -> None:
    values = {"tenant": "default", "scope": "batch", "key": key}
    db.fetch(filled, f"SET enable_nestloop = {nested_loops}")
    assert len(db.fetch(filled, operations.BATCH_OF_KEY, values)) == size
    check_reads_little(filled, operations.BATCH_OF_KEY, values, size)
    db.fetch(filled, "RESET enable_nestloop")


def test_the_check_itself_sees_a_list_that_reads_everything(filled: Connection) -> None:
    unindexed = "SELECT task_id FROM tasks WHERE tenant = 'default' ORDER BY created_at LIMIT 20"
    with pytest.raises(AssertionError):
        check_reads_little(filled, unindexed, {}, 100)

"""The history of bench.growth is one that the product could have made, made otherwise."""

from __future__ import annotations

import pytest

from bench import history, laden
from bench.common import administrator, ask
from bench.growth import CLAIMS_BEFORE, LAST_ENTRY, NEXT_TRANSACTION
from bench.history import Size, add_crowd, fill
from db import Connection
from tests.support import proof, rows
from tests.support.rows import sql

SIZE = Size(finished=400, delayed=50, pending=60, tenants=7)
SHAPE = """
SELECT count(*) FILTER (WHERE status IN ('SUCCEEDED', 'FAILED')) AS finished,
       count(*) FILTER (WHERE status = 'PENDING' AND NOT due
                          AND available_at > current_instant()) AS delayed,
       count(*) FILTER (WHERE due AND requested_route = 'cloud') AS pending,
       count(DISTINCT tenant) AS tenants
FROM tasks
"""
INDEXES = """
SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) AS definition
FROM pg_index
WHERE indrelid IN (SELECT relid FROM pg_partition_tree('audit_log'))
   OR indrelid IN ('audit_log'::regclass, 'tasks'::regclass)
ORDER BY 1, 2
"""


@pytest.fixture
def filled(own_conn: Connection, own_database: str, monkeypatch: pytest.MonkeyPatch) -> Connection:
    monkeypatch.setattr(history, "CHUNK", 70)
    fill(own_database, SIZE)
    return own_conn


def test_the_history_has_the_size_that_was_asked_for(filled: Connection) -> None:
    (shape,) = sql(filled, SHAPE)
    assert shape == vars(SIZE)


def test_every_promise_about_tasks_and_their_audit_log_is_kept_in_it(filled: Connection) -> None:
    proof.check(filled)


def test_what_comes_after_it_is_audited_again(filled: Connection) -> None:
    assert rows.reasons(filled, rows.submit(filled)) == ["created"]


def test_its_audit_rows_are_in_the_partitions_of_their_months(filled: Connection) -> None:
    assert sql(filled, "SELECT count(*) AS n FROM audit_log_other") == [{"n": 0}]


def test_all_indexes_are_there_again(
    own_conn: Connection, own_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql(own_conn, history.OLD_PARTITIONS)
    before = sql(own_conn, INDEXES)
    fill(own_database, SIZE)
    assert sql(own_conn, INDEXES) == before


def test_the_queue_goes_on_behind_it(filled: Connection) -> None:
    submitted = rows.submit(filled, requested_route="none", kind="tool")
    assert submitted == SIZE.tasks + 1
    tasks = rows.claim(filled, slots=SIZE.pending + 1).tasks
    assert submitted in {task.task_id for task in tasks}
    proof.check(filled)


@pytest.mark.parametrize("kind", ["due", "running"])
def test_a_drain_ends_with_the_tasks_that_can_run(filled: Connection, kind: str) -> None:
    def is_work_left() -> bool:
        return bool(sql(filled, f"SELECT ({laden.IS_WORK_LEFT}) AS found")[0]["found"])

    assert not is_work_left()
    rows.submit(filled, requested_route="none", kind="tool")
    if kind == "running":
        rows.claim(filled, slots=500)
    assert is_work_left()


def test_claims_that_passed_over_a_newcomer_are_counted(
    own_conn: Connection, own_database: str
) -> None:
    add_crowd(own_database, "greedy", 20)

    def claim_after(tenant: str) -> list[str]:
        return [task.tenant for task in rows.claim(own_conn, 1, after_tenant=tenant).tasks]

    claim_after("f")
    with administrator(own_database) as watcher:
        last = ask(watcher, LAST_ENTRY)
        assert claim_after("f") == ["greedy"]  # before the newcomer
        newcomer = rows.submit(own_conn, tenant="modest")
        after = ask(watcher, NEXT_TRANSACTION)
        assert claim_after("f") + claim_after("f") == ["greedy"] * 2
        assert claim_after("greedy") == ["modest"]
        assert claim_after("f") == ["greedy"]  # after it
        assert ask(watcher, CLAIMS_BEFORE, last, "greedy", after, newcomer) == 2

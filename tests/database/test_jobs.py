"""queries/jobs.py: the states of a job that people are shown, newest first."""

from __future__ import annotations

import pytest

from db import Connection
from queries import jobs
from tests.conftest import administrator
from tests.support.rows import sql


@pytest.fixture(autouse=True)
def _states(database_url: str) -> None:
    """Three of job 7, two of job 8."""
    with administrator(database_url) as cursor:
        cursor.execute("TRUNCATE job_states")
        cursor.execute("""
            INSERT INTO job_states (task_id, checkpoint_id, attempt, nodes, next_nodes,
                graph_version, state, prompt_tokens, completion_tokens)
            SELECT task_id, id, 1, '{a}', '{b,c}', 'v1', '{"code": "x"}', 3, 4
            FROM (VALUES (7, '1f-2'), (7, '1f-1'), (7, '1f-3'), (8, '1f-4'), (8, '1f-0'))
                AS job(task_id, id)
        """)


def ids(conn: Connection, task_id: int, limit: int, before: str | None = None) -> list[str]:
    found = jobs.list_states(conn, task_id, limit=limit, before=before)
    return [row["checkpoint_id"] for row in found]


def test_the_newest_state_is_that_of_the_newest_checkpoint(conn: Connection) -> None:
    newest = jobs.newest_state(conn, 7)
    (stored,) = sql(conn, "SELECT * FROM job_states WHERE checkpoint_id = '1f-3'")
    assert newest == stored
    assert (newest["next_nodes"], newest["state"]) == (["b", "c"], {"code": "x"})


def test_a_job_before_its_first_checkpoint_has_no_state(conn: Connection) -> None:
    assert jobs.newest_state(conn, 9) is None
    assert jobs.list_states(conn, 9, limit=5, before=None) == []


def test_states_are_listed_newest_first_and_one_more_tells_that_there_are_more(
    conn: Connection,
) -> None:
    assert ids(conn, 7, limit=5) == ["1f-3", "1f-2", "1f-1"]
    assert ids(conn, 7, limit=2) == ["1f-3", "1f-2", "1f-1"]
    assert ids(conn, 7, limit=1) == ["1f-3", "1f-2"]


def test_a_page_begins_behind_a_checkpoint(conn: Connection) -> None:
    assert ids(conn, 7, limit=5, before="1f-3") == ["1f-2", "1f-1"]
    assert ids(conn, 7, limit=5, before="1f-1") == []

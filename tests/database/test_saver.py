"""execution/agent/saver.py: only the holder of a task's lease writes its checkpoints."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg.errors
import pytest
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from psycopg import ClientCursor

from db import Connection, Row
from errors import LeaseLost
from execution.agent import saver as saver_module
from execution.agent.saver import CheckpointPool, FencedSaver, _texts, next_nodes, open_pool
from queries.jobs import newest_state
from queries.leases import ClaimedTask
from tests.conftest import settings_for
from tests.support import rows
from tests.support.processes import eventually
from tests.support.rows import sql
from tests.support.small_graphs import (
    Node,
    Notes,
    chain,
    checkpoint_being_written,
    job,
    of_job,
    put,
    put_writes,
    resume,
    run,
    says,
    states,
    stored,
    taken_over,
    waits_of_savers,
)
from tests.support.stage import Stage

# --- what people are shown -------------------------------------------------------------------


def test_each_checkpoint_comes_with_the_state_what_ran_and_what_is_next(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    run(chain(("a", says("a")), ("b", says("b"))), FencedSaver(pool, task, "v7"), task)
    told = [(row["nodes"], row["next_nodes"], row["state"]) for row in states(conn)]
    assert told == [
        ([], ["__start__"], {}),
        ([], ["a"], {"notes": []}),
        (["a"], ["b"], {"notes": ["a"]}),
        (["b"], [], {"notes": ["a", "b"]}),
    ]
    assert {row["graph_version"] for row in states(conn)} == {"v7"}
    ids = [row["checkpoint_id"] for row in sql(conn, "SELECT checkpoint_id FROM checkpoints")]
    assert sorted(ids) == [row["checkpoint_id"] for row in states(conn)]


def test_a_state_has_the_tokens_of_the_job_so_far(conn: Connection, pool: CheckpointPool) -> None:
    task = job(conn)

    def pays(state: Any) -> Any:
        statement = """
            UPDATE tasks SET prompt_tokens = prompt_tokens + 10,
                completion_tokens = completion_tokens + 1
            WHERE task_id = %(task_id)s
        """
        sql(conn, statement, task_id=task.task_id)
        return {}

    run(chain(("a", pays), ("b", pays)), FencedSaver(pool, task, "v1"), task)
    tokens = [(row["prompt_tokens"], row["completion_tokens"]) for row in states(conn)]
    assert tokens == [(0, 0), (0, 0), (10, 1), (20, 2)]


def test_a_state_after_a_resume_tells_what_ran_before_it_and_in_which_attempt(
    conn: Connection, pool: CheckpointPool
) -> None:
    first = job(conn)
    broken = iter([True, False])

    def breaks_once(state: Any) -> Any:
        if next(broken):
            raise RuntimeError
        return {"notes": ["b"]}

    graph = chain(("a", says("a")), ("b", breaks_once))
    with pytest.raises(RuntimeError):
        run(graph, FencedSaver(pool, first, "v1"), first)
    second = taken_over(conn, first)
    resume(graph, FencedSaver(pool, second, "v2"), second)
    newest = newest_state(conn, first.task_id)
    assert newest is not None
    told = newest["nodes"], newest["next_nodes"], newest["attempt"], newest["graph_version"]
    assert told == (["b"], [], 2, "v2")


def fans_out(state: Any) -> list[Send]:
    return [Send("worker", {"notes": []}) for _ in range(3)]


def many_shapes() -> StateGraph:
    """Edges, branches, Sends, commands, edges that meet, a deferred node, a loop, and a gate."""
    graph = StateGraph(Notes)
    graph.add_node("left", says("left"))
    graph.add_node("right", says("right"))
    graph.add_node("longer", says("longer"))
    graph.add_node("join", says("join"))
    graph.add_node("worker", says("worker"))
    graph.add_node("late", says("late"), defer=True)
    graph.add_node("both+late", says("both+late"), defer=True)
    graph.add_node("sends", lambda state: Command(goto="gate"), destinations=("gate",))
    graph.add_node("gate", lambda state: {"notes": [interrupt("?")]})
    graph.add_node("again", says("again"))
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.add_edge("right", "longer")
    graph.add_edge(["left", "longer"], "join")
    graph.add_edge("left", "late")
    graph.add_conditional_edges("join", fans_out, ["worker"])
    graph.add_edge(["worker", "right"], "both+late")
    graph.add_edge("late", "sends")
    graph.add_edge("gate", "again")
    graph.add_conditional_edges(
        "again", lambda state: "again" if state["notes"].count("again") < 3 else END
    )
    return graph


def test_what_is_next_is_what_langgraph_says_it_is(conn: Connection, pool: CheckpointPool) -> None:
    task = job(conn)
    saver = FencedSaver(pool, task, "v1")
    run(many_shapes(), saver, task)
    run(many_shapes(), saver, task, Command(resume="yes"))
    history = list(many_shapes().compile(checkpointer=saver).get_state_history(of_job(task)))
    theirs = {one.config["configurable"]["checkpoint_id"]: sorted(set(one.next)) for one in history}
    ours = {row["checkpoint_id"]: row["next_nodes"] for row in states(conn)}
    assert ours == theirs
    seen = {name for names in ours.values() for name in names}
    assert seen == {*many_shapes().nodes, "__start__"}


def test_a_channel_of_the_graph_is_not_taken_for_an_edge() -> None:
    assert next_nodes({"branch": "x", "join": ["a"], "task": "t", "branch:to:a": None}) == ["a"]


def test_a_graph_in_a_node_has_checkpoints_and_none_that_is_shown(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    inner = chain(("inner", says("inner")), ("gate", lambda state: {"notes": [interrupt("?")]}))
    run(chain(("outer", inner.compile())), FencedSaver(pool, task, "v1"), task)
    spaces = sql(conn, "SELECT DISTINCT left(checkpoint_ns, 5) AS ns FROM checkpoints ORDER BY ns")
    assert [row["ns"] for row in spaces] == ["", "outer"]
    assert [row["next_nodes"] for row in states(conn)] == [["__start__"], ["outer"]]


def test_a_checkpoint_and_what_is_shown_of_it_are_one_transaction(
    own_conn: Connection, own_database: str
) -> None:
    sql(own_conn, "ALTER TABLE job_states ADD CONSTRAINT never CHECK (state ->> 'text' <> 'no')")
    task = job(own_conn)
    graph = chain(("a", lambda state: {"text": "no"}))
    with (
        open_pool(settings_for(own_database)) as pool,
        pytest.raises(psycopg.errors.CheckViolation),
    ):
        run(graph, FencedSaver(pool, task, "v1"), task)
    assert len(states(own_conn)) == len(stored(own_conn)["checkpoints"]) == 2


def test_a_state_that_is_too_large_to_be_shown_is_cut_and_saved_whole(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    graph = chain(("a", lambda state: {"text": "long " * 1000, "notes": ["short"]}))
    saver = FencedSaver(pool, task, "v1", max_state_bytes=500)
    assert run(graph, saver, task)["text"] == "long " * 1000
    state = states(conn)[-1]["state"]
    assert state["notes"] == ["short"]
    assert state["text"].startswith("long long")
    assert len(state["text"]) < 500


# --- the fence -------------------------------------------------------------------------------


def test_a_worker_that_lost_its_lease_in_a_node_writes_nothing_and_another_goes_on_there(
    conn: Connection, pool: CheckpointPool
) -> None:
    stale = job(conn)
    ran: list[str] = []
    before: dict[str, list[Row]] = {}
    fresh: list[ClaimedTask] = []

    def a(state: Any) -> Any:
        ran.append("a")
        return {"notes": ["a"]}

    def b(state: Any) -> Any:
        ran.append("b")
        if not fresh:
            fresh.append(taken_over(conn, stale))
            before.update(stored(conn))
        return {"notes": ["b"]}

    graph = chain(("a", a), ("b", b), ("c", says("c")))
    with pytest.raises(LeaseLost):
        run(graph, FencedSaver(pool, stale, "v1"), stale)
    assert stored(conn) == before
    assert states(conn)[-1]["next_nodes"] == ["b"]
    result = resume(graph, FencedSaver(pool, fresh[0], "v1"), fresh[0])
    assert result["notes"] == ["a", "b", "c"]
    assert ran == ["a", "b", "b"]


def delete_thread(saver: FencedSaver, task: ClaimedTask) -> None:
    saver.delete_thread(str(task.task_id))


WRITES = [put, put_writes, delete_thread]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("loss", ["taken over", "waits again", "settled"])
def test_no_write_of_a_worker_that_lost_its_lease_changes_anything(
    conn: Connection,
    pool: CheckpointPool,
    write: Callable[[FencedSaver, ClaimedTask], None],
    loss: str,
) -> None:
    stale = job(conn)
    saver = FencedSaver(pool, stale, "v1")
    run(chain(("a", says("a"))), saver, stale)
    if loss == "settled":
        rows.settle(conn, stale.lease, "succeeded")
    else:
        rows.expire(conn, stale.task_id)
        rows.reap(conn)
    if loss == "taken over":
        rows.claim_only(conn, stale.task_id, "w2")
    before = stored(conn)
    with pytest.raises(LeaseLost):
        write(saver, stale)
    assert stored(conn) == before


@pytest.mark.parametrize("write", WRITES)
def test_the_same_writes_of_the_holder_do_change_something(
    conn: Connection, pool: CheckpointPool, write: Callable[[FencedSaver, ClaimedTask], None]
) -> None:
    task = job(conn)
    saver = FencedSaver(pool, task, "v1")
    run(chain(("a", says("a"))), saver, task)
    before = stored(conn)
    write(saver, task)
    assert stored(conn) != before


def test_a_task_is_not_taken_from_a_worker_while_it_writes_a_checkpoint(
    conn: Connection,
    connect: Callable[[], Connection],
    pool: CheckpointPool,
    threads: ThreadPoolExecutor,
) -> None:
    task = job(conn)
    rows.expire(conn, task.task_id)
    with checkpoint_being_written(FencedSaver(pool, task, "v1"), task, connect, threads) as written:
        assert rows.reap(conn) == []
    written.result(20)
    assert [one.reason for one in rows.reap(conn)] == ["reaped"]
    assert len(states(conn)) == 1


def test_a_checkpoint_that_waits_behind_the_loss_of_its_lease_is_not_written(
    stage: Stage, pool: CheckpointPool, threads: ThreadPoolExecutor
) -> None:
    task = job(stage.witness)
    saver = FencedSaver(pool, task, "v1")
    with stage.held_back(rows.settle, task.lease, "succeeded"):
        late = threads.submit(put, saver, task)
        eventually(lambda: "Lock" in waits_of_savers(stage.witness))
    with pytest.raises(LeaseLost):
        late.result(20)
    assert states(stage.witness) == []


def test_the_writes_of_a_node_are_one_statement_and_special_ones_one_each(
    pool: CheckpointPool,
) -> None:
    """LangGraph may write one special channel twice at once, which one statement could not."""
    rows = [("1", "", "c", "t", "", n, f"it's {n} %", "null", b"'") for n in range(2)]
    with pool.connection() as conn, ClientCursor(conn) as cursor:
        (added,) = _texts(cursor, PostgresSaver.INSERT_CHECKPOINT_WRITES_SQL, rows)
        changed = _texts(cursor, PostgresSaver.UPSERT_CHECKPOINT_WRITES_SQL, rows)
        (blobs,) = _texts(cursor, PostgresSaver.UPSERT_CHECKPOINT_BLOBS_SQL, [r[:6] for r in rows])
    assert added.count("INSERT") == 1
    assert added.count("'it''s 1 %'") == 1
    assert blobs.count("INSERT") == 1
    assert len(changed) == 2


def test_the_writes_of_nodes_that_end_at_once_are_all_saved(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    together = threading.Barrier(4, timeout=20)  # LangGraph has few threads on a small machine
    graph = StateGraph(Notes)

    def node(name: str) -> Node:
        def waits_for_all(state: Any) -> Any:
            together.wait()
            return {"notes": [name]}

        return waits_for_all

    for n in range(4):
        graph.add_node(f"n{n}", node(f"n{n}"))
        graph.add_edge(START, f"n{n}")
    result = run(graph, FencedSaver(pool, task, "v1"), task)
    assert sorted(result["notes"]) == sorted(f"n{n}" for n in range(4))
    assert [len(row["nodes"]) for row in states(conn)] == [0, 0, 4]


def test_a_write_in_another_thread_does_not_bring_the_state_of_a_checkpoint_that_fails(
    conn: Connection,
    pool: CheckpointPool,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_there, may_go_on = threading.Event(), threading.Event()

    def waits(value: Any) -> Any:
        is_there.set()
        assert may_go_on.wait(20)
        return value

    monkeypatch.setattr(saver_module, "_storable", waits)
    task = job(conn)
    saver = FencedSaver(pool, task, "v1")
    late = threads.submit(put, saver, task, threading.Lock())
    assert is_there.wait(20)  # the state of the checkpoint
    put_writes(saver, task)
    may_go_on.set()
    with pytest.raises(TypeError):
        late.result(20)
    assert states(conn) == []


# --- values that a checkpoint could choke on -------------------------------------------------

ODD_VALUES = {
    "a NUL": "a\0b",
    "a lone surrogate": "a\ud800b",
    "not a number": math.nan,
    "endless": -math.inf,
    "a large number": 1e300,
    "all of them, nested": {"texts": ["a\0b", "a\ud800b"], "numbers": (math.nan, math.inf)},
}


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_a_value_that_json_does_not_have_is_saved_shown_and_there_after_a_resume(
    conn: Connection, pool: CheckpointPool, value: Any
) -> None:
    task = job(conn)
    found: list[Any] = []

    def looks(state: Any) -> Any:
        found.append(state["text"])
        if len(found) == 1:
            raise RuntimeError
        return {}

    graph = chain(("a", lambda state: {"text": value}), ("b", looks))
    with pytest.raises(RuntimeError):
        run(graph, FencedSaver(pool, task, "v1"), task)
    resume(graph, FencedSaver(pool, task, "v1"), task)
    assert repr(found[0]) == repr(value)
    # A lone surrogate is no text: msgpack makes a question mark of it.
    assert repr(found[1]) == repr(value).replace("\\ud800", "?").replace("(nan, inf)", "[nan, inf]")
    assert "text" in states(conn)[-1]["state"]


def test_a_value_that_no_checkpoint_can_hold_fails_the_job_with_its_reason(
    conn: Connection, pool: CheckpointPool
) -> None:
    task = job(conn)
    graph = chain(("a", lambda state: {"text": threading.Lock()}))
    with pytest.raises(TypeError, match="not msgpack serializable"):
        run(graph, FencedSaver(pool, task, "v1"), task)


def test_a_checkpoint_that_is_too_large_for_a_message_fails_the_job_with_its_reason(
    conn: Connection, pool: CheckpointPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "LONGEST_MESSAGE", 10_000)
    task = job(conn)
    graph = chain(("a", lambda state: {"text": "x" * 10_000}))
    with pytest.raises(ValueError, match="bytes are more than Postgres takes at once"):
        run(graph, FencedSaver(pool, task, "v1"), task)


def test_it_knows_each_error_that_it_has_raised_whichever_langgraph_passes_on(
    conn: Connection, pool: CheckpointPool
) -> None:
    stale = job(conn)
    saver = FencedSaver(pool, stale, "v1")
    taken_over(conn, stale)
    raised = []
    for value in ("one", "two"):
        with pytest.raises(LeaseLost) as lost:
            put(saver, stale, value)
        raised.append(lost.value)
    assert [id(one) for one in saver.raised] == [id(one) for one in raised]

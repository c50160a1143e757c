"""What is around an agent job and needs no worker: signals, versions, live pieces, no packages."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import Annotated, Any, TypedDict, cast

import pytest

pytest.importorskip("langgraph", reason="comes with requirements-agents.txt")

from langchain_core.runnables import RunnableConfig
from langgraph.channels import Topic
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from execution.agent import team
from execution.agent.graphs import Graph, Graphs, version_of
from execution.agent.model import Frames, JobModel
from execution.agent.signals import Signals
from execution.backends.server import Answer
from execution.errors import EmptyAnswer, Failure, Permanent
from execution.routes import Routes
from execution.runner import Runner
from queries.leases import ClaimedTask, Lease
from scheduler import decide_route
from tests.conftest import settings_for
from tests.support import sample_graphs
from tests.support.processes import eventually, free_port
from worker.tokens import LONGEST_PIECE, Source, Unsent, coalesced

TOKEN = "00000000-0000-4000-8000-000000000000"


# --- signals --------------------------------------------------------------------------------------


def test_a_stop_cancels_the_calls_under_way_and_each_that_is_begun_later() -> None:
    signals, early, late = Signals(), Future[Any](), Future[Any]()
    with signals.calling(early):
        signals.stop()
        assert early.cancelled()
    with signals.calling(late):
        assert late.cancelled()
    assert signals.is_stopped


def test_a_call_that_has_ended_is_not_held() -> None:
    signals, call = Signals(), Future[Any]()
    with signals.calling(call):
        pass
    signals.stop()
    assert not call.cancelled()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_drain_reaches_a_graph_whether_it_runs_already_or_not(is_early: bool) -> None:
    signals, heard = Signals(), []
    if is_early:
        signals.drain()
    signals.on_drain(lambda: heard.append("drain"))
    if not is_early:
        assert heard == []
        signals.drain()
    assert heard == ["drain"]


# --- replies --------------------------------------------------------------------------------------


class Replies:
    """What stands for a job's calls: the model says one text after the other."""

    max_bytes = 1_000_000

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.prompts: list[str] = []

    def reply(self, prompt: str, schema: Any = None) -> str:
        self.prompts.append(prompt)
        return self.texts.pop(0)


@pytest.mark.parametrize("large", [2**64, -(2**63) - 1, 10**3000])
def test_a_number_that_no_checkpoint_holds_is_asked_for_once_more(large: int) -> None:
    """Else the job would fail at that paid reply in each of its attempts."""
    schema = {"type": "object", "properties": {"x": {"type": "array"}}}
    calls = Replies(f'{{"x": [1, {{"y": {large}}}]}}', '{"x": [2]}')
    job = JobModel(7, 1, False, 2, calls=cast(Any, calls))
    assert job.ask_for("How many?", schema) == {"x": [2]}
    assert "a number in it is too large" in calls.prompts[1]
    fits = Replies(f'{{"x": [{2**64 - 1}, {-(2**63)}, 1.5, true]}}')
    job = JobModel(7, 1, False, 2, calls=cast(Any, fits))
    assert job.ask_for("How many?", schema)["x"][0] == 2**64 - 1


# --- graphs ---------------------------------------------------------------------------------------


def test_a_version_is_of_what_checkpoints_refer_to() -> None:
    build = sample_graphs.build_gate
    assert version_of(build()) == version_of(build())
    others = [sample_graphs.build_gate_renamed(), sample_graphs.build_gate_with_more()]
    assert len({version_of(graph) for graph in [build(), *others]}) == 3
    more_state = build()
    more_state.channels["more"] = more_state.channels["task"]
    assert version_of(more_state) != version_of(build())


def test_a_graph_is_built_once_and_its_defaults_are_known() -> None:
    graphs = Graphs({"own": "tests.support.sample_graphs:build_gate"})
    graph = graphs.load("own")
    assert graphs.load("own") is graph
    assert graph.defaults == {"said": []}
    with pytest.raises(Failure, match="no graph 'other', only own"):
        graphs.load("other")


def test_a_field_with_a_reducer_is_empty_until_it_is_written() -> None:
    graphs = Graphs({"reduced": "tests.support.sample_graphs:build_reduced"})
    assert graphs.load("reduced").defaults == {"notes": [], "score": 0}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unsaved", "node inner is a graph compiled with checkpointer=False"),
        ("unsaved_within", "node inner is a graph compiled with checkpointer=False"),
        ("async_node", "waits is an async function"),
        ("async_branch", "first's branch is an async function"),
        ("limited", "timeouts are only supported for async nodes"),
    ],
)
def test_a_graph_that_would_fail_in_every_job_is_refused_with_what_is_wrong(
    name: str, says: str
) -> None:
    graphs = Graphs({"own": f"tests.support.sample_graphs:build_{name}"})
    with pytest.raises(Permanent, match=f"is no graph that can run.*{says}"):
        graphs.load("own")


def test_a_graph_is_compiled_once_and_runs_with_the_saver_of_each_job() -> None:
    graph = Graphs({"own": "tests.support.sample_graphs:build_with_default_handler"}).load("own")
    savers = InMemorySaver(), InMemorySaver()
    first, second = map(graph.with_saver, savers)
    of_one: RunnableConfig = {"configurable": {"thread_id": "1"}}
    assert first.invoke({"task": "t"}, of_one)["said"] == ["it failed"]
    assert first.get_state(of_one).values["said"] == ["it failed"]
    assert second.get_state(of_one).values == {}
    assert (first.checkpointer, second.checkpointer) == savers
    assert graph.compiled.checkpointer is None


def test_a_graph_opens_plainly_if_no_branch_is_in_front_of_its_nodes() -> None:
    assert graph_of(team.build()).opens_plainly
    branching = StateGraph(team.TeamState)
    branching.add_node("coder", lambda state: {})
    branching.add_conditional_edges(START, lambda state: "coder", ["coder"])
    assert not graph_of(branching).opens_plainly


class Collected(TypedDict):
    said: Annotated[list[str], Topic(str)]


def test_a_graph_is_saved_as_it_is_if_each_field_is() -> None:
    assert graph_of(team.build()).is_saved_as_it_is
    collecting = StateGraph(Collected)
    collecting.add_node("a", lambda state: {})
    collecting.add_edge(START, "a")
    assert not graph_of(collecting).is_saved_as_it_is


def graph_of(builder: StateGraph[Any, Any, Any, Any]) -> Graph:
    return Graph("own", builder.compile(), "v1", {})


# --- reservations ---------------------------------------------------------------------------------


def test_what_a_server_puts_around_a_prompt_is_known_from_its_count() -> None:
    frames = Frames()
    assert frames.most_tokens("local", 100, None) == 164
    frames.learn("local", 100, 90)
    assert frames.most_tokens("local", 100, None) == 164
    frames.learn("local", 100, 1100)
    frames.learn("local", 5000, 1500)
    assert frames.most_tokens("local", 100, None) == 1100
    assert frames.most_tokens("cloud", 100, None) == 164, "that is another server"


def test_a_context_bounds_a_prompt_until_a_longer_one_was_counted() -> None:
    frames = Frames()
    assert frames.most_tokens("local", 10_000, 4096) == 4096
    frames.learn("local", 10_000, 5000)
    assert frames.most_tokens("local", 10_000, 4096) == 5000
    assert frames.most_tokens("local", 10, 4096) == 74


# --- what models say ------------------------------------------------------------------------------


def answer_of(*pieces: object) -> str:
    heard: list[str] = []
    answer = Answer(heard.append, 1000)
    for piece in pieces:
        answer.add(piece)
    text = answer.completion(1, 2, truncated=False).text
    assert "".join(heard) == text
    return text


def test_an_answer_in_blocks_is_the_text_of_its_text_blocks() -> None:
    thought = {"type": "thinking", "thinking": "hm"}
    blocks = [thought, {"type": "text", "text": "a"}, "b", {"text": "c"}]
    assert answer_of(blocks, "d", [{"type": "text", "text": "e"}]) == "abcde"


@pytest.mark.parametrize("piece", [7, None, {"text": "a"}, [7], [{"type": "text"}], [["a"]]])
def test_a_piece_that_is_no_text_is_a_failure(piece: object) -> None:
    with pytest.raises(Failure, match="no text"):
        answer_of(piece)


@pytest.mark.parametrize("pieces", [(), ("",), (" \n",), ([],), ([{"type": "thinking"}],)])
def test_an_empty_answer_can_be_told_from_other_failures_and_has_its_tokens(
    pieces: tuple[object, ...],
) -> None:
    with pytest.raises(EmptyAnswer) as caught:
        answer_of(*pieces)
    assert (caught.value.prompt_tokens, caught.value.completion_tokens) == (1, 2)


# --- live pieces ----------------------------------------------------------------------------------


def test_pieces_are_joined_by_node_and_stay_between_its_start_and_its_finish() -> None:
    coder, reviewer = Source(1, 2, 3, "coder"), Source(1, 2, 3, "reviewer")
    sent = coalesced(
        [
            Unsent(coder, phase="started"),
            Unsent(coder, "a"),
            Unsent(reviewer, "x"),
            Unsent(coder, "b"),
            Unsent(coder, phase="finished"),
            Unsent(coder, "c"),
        ]
    )
    head = {"root_id": 1, "task_id": 2, "attempt": 3}
    assert sent == [
        {**head, "node": "coder", "phase": "started"},
        {**head, "node": "coder", "text": "ab"},
        {**head, "node": "reviewer", "text": "x"},
        {**head, "node": "coder", "phase": "finished"},
        {**head, "node": "coder", "text": "c"},
    ]


def test_a_long_piece_is_sent_in_parts() -> None:
    sent = coalesced([Unsent(Source(1, 2, 3), "x" * (LONGEST_PIECE + 1))])
    assert [len(str(part["text"])) for part in sent] == [LONGEST_PIECE, 1]
    assert "node" not in sent[0]


# --- without the packages -------------------------------------------------------------------------


def test_a_job_on_a_worker_without_the_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "langgraph.graph", None)
    for name in [name for name in sys.modules if name.startswith("execution.agent.")]:
        monkeypatch.delitem(sys.modules, name)
    settings = settings_for(f"postgresql://nobody@127.0.0.1:{free_port()}/none")
    runner = Runner(settings, Routes(settings.routing, decide_route), lambda: None, lambda *_: None)
    lease = Lease(1, TOKEN)
    runner.open()
    try:
        runner.start(ClaimedTask(lease, 1, "agent", {"task": "x"}, "auto", None, 1, 1, 0), "local")
        ((_, outcome),) = eventually(runner.take_finished)
    finally:
        runner.close()
    assert outcome.verdict == "permanent"
    assert "pip install -r requirements-agents.txt" in (outcome.error or "")


def test_a_job_while_postgres_is_away_is_handed_back() -> None:
    settings = settings_for(f"postgresql://nobody@127.0.0.1:{free_port()}/none")
    runner = Runner(settings, Routes(settings.routing, decide_route), lambda: None, lambda *_: None)
    runner.open()
    try:
        task = ClaimedTask(Lease(1, TOKEN), 1, "agent", {"task": "x"}, "auto", None, 1, 1, 0)
        runner.start(task, "local")
        ((_, outcome),) = eventually(runner.take_finished)
    finally:
        runner.close()
    assert (outcome.verdict, outcome.delay_seconds) == ("released", 1.0)

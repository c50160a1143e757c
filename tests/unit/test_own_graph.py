"""examples/translation.py, the worked example of docs/own-graph.md, does what it says there."""

# ruff: noqa: E402 - first a look whether the packages are there that the imports need

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NEEDS = "needs {0}: pip install -r requirements-agents.txt"
pytest.importorskip("langgraph", reason=NEEDS.format("langgraph"))
pytest.importorskip("jsonschema", reason=NEEDS.format("jsonschema"))

import tomli
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from config import load_config
from examples import translation
from tests.support.scripted_job import ScriptedJob

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"configurable": {"thread_id": "1"}}


def who(prompt: str) -> str:
    """Which node asks: its prompt's first word says so."""
    return prompt.split()[0]


@pytest.fixture
def job() -> ScriptedJob:
    return ScriptedJob({"Translate": ["du pain", "le pain"], "Correct": ["Le pain !"]}, who=who)


@pytest.fixture
def graph() -> Any:
    return translation.build().compile(checkpointer=InMemorySaver())


def go_on(graph: Any, job: ScriptedJob, given: Any) -> dict[str, Any]:
    return graph.invoke(given, CONFIG, context=job, durability="sync")


def decide(graph: Any, job: ScriptedJob, approved: bool, feedback: str | None) -> dict[str, Any]:
    (question,) = graph.get_state(CONFIG).interrupts
    answer = {"approved": approved, "feedback": feedback}
    return go_on(graph, job, Command(resume={question.id: answer}))


def test_a_person_sees_the_draft_and_what_they_say_is_worked_in(
    graph: Any, job: ScriptedJob
) -> None:
    (question,) = go_on(graph, job, {"task": "bread"})["__interrupt__"]
    assert question.value == {"draft": "du pain"}
    assert decide(graph, job, True, "Say it louder.")["text"] == "Le pain !"
    assert graph.get_state(CONFIG).next == ()
    (asked,) = job.prompts("Correct")
    assert "Say it louder." in asked
    assert "du pain" in asked


def test_a_draft_that_is_good_is_the_text(graph: Any, job: ScriptedJob) -> None:
    go_on(graph, job, {"task": "bread"})
    assert decide(graph, job, True, None)["text"] == "du pain"
    assert job.order == ["Translate"]


def test_a_draft_that_is_rejected_is_made_again_and_asked_about_again(
    graph: Any, job: ScriptedJob
) -> None:
    go_on(graph, job, {"task": "bread"})
    (question,) = decide(graph, job, False, "The bread.")["__interrupt__"]
    assert question.value == {"draft": "le pain"}
    assert "The bread." in job.prompts("Translate")[1]
    assert decide(graph, job, True, None)["text"] == "le pain"


def test_the_table_in_the_document_is_one_that_config_takes(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "own-graph.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"```toml\n(.*?)```", document, re.DOTALL)
    assert tomli.loads(table)["graphs"] == {"translation": "examples.translation:build"}
    (tmp_path / "config.toml").write_text(table, encoding="utf-8")
    assert (
        load_config(tmp_path / "config.toml").graphs["translation"] == "examples.translation:build"
    )

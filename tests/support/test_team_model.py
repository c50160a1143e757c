"""The scripted team plays what it was told, since the tests of agent jobs believe it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.fake_ollama import FakeOllama, answer, status
from tests.support.team_model import CODE, ROLES, TeamModel, approves, rejects, routes


@pytest.fixture
def fake() -> Iterator[FakeOllama]:
    with FakeOllama() as server:
        yield server


def ask(fake: FakeOllama, role: str, task: str = "double a number") -> str:
    prompt = f"You are the {role} of a small software team.\n\nThe task: {task}"
    body = {"model": "m", "prompt": prompt, "stream": False}
    return httpx.post(f"{fake.url}/api/generate", json=body).json().get("response", "")


def test_every_role_plays_its_part_well_unless_it_is_told_otherwise(fake: FakeOllama) -> None:
    fake.script = TeamModel()
    said = {role: ask(fake, role) for role in ROLES}
    assert json.loads(said["supervisor"])["route"] == "research"
    assert json.loads(said["reviewer"])["verdict"] == "approved"
    assert said["coder"] == CODE
    assert said["researcher"]


def test_each_role_has_a_list_of_its_own_and_its_calls_are_counted(fake: FakeOllama) -> None:
    fake.script = team = TeamModel(
        supervisor=routes("code"), reviewer=[rejects("no"), approves()], coder=[status(500)]
    )
    assert json.loads(ask(fake, "supervisor"))["route"] == "code"
    verdicts = [json.loads(ask(fake, "reviewer"))["verdict"] for _ in range(3)]
    assert verdicts == ["rejected", "approved", "approved"]
    assert ask(fake, "coder") == ""
    assert team.counts == {"supervisor": 1, "reviewer": 3, "coder": 1}


def test_jobs_beside_each_other_are_told_apart_by_their_tasks(fake: FakeOllama) -> None:
    fake.script = team = TeamModel(coder=answer("any"))
    team.on("sort", coder=[answer("first"), answer("second")])
    asked = ["sort a list", "double it", "sort a list"]
    assert [ask(fake, "coder", task) for task in asked] == ["first", "any", "second"]
    assert (team.count("coder"), team.count("coder", "sort")) == (3, 2)
    assert json.loads(ask(fake, "reviewer", "sort a list"))["verdict"] == "approved"


def test_what_is_not_the_teams_is_left_to_the_fake(fake: FakeOllama) -> None:
    fake.script = team = TeamModel()
    body = {"model": "m", "prompt": "You are the best.", "stream": False}
    reply = httpx.post(f"{fake.url}/api/generate", json=body).json()
    assert reply["response"] == "echo: You are the best."
    assert team.counts == {}


def test_a_role_that_there_is_not_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no tester"):
        TeamModel(tester=approves())

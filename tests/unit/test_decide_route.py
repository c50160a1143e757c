"""decide_route: the long prompt or the deep queue goes to the cloud. No database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from config import Routing, current_config
from scheduler import decide_route

ROUTING = Routing(prompt_threshold=100, pending_threshold=5)
SHORT = {"prompt": "short"}


def depth(pending: int) -> dict[str, Any]:
    return {"by_status": {"PENDING": pending}}


@pytest.mark.parametrize(("length", "route"), [(0, "local"), (100, "local"), (101, "cloud")])
def test_a_prompt_at_the_threshold_stays_local_and_one_character_more_goes_to_the_cloud(
    length: int, route: str
) -> None:
    assert decide_route({"prompt": "x" * length}, depth(0), ROUTING) == route


@pytest.mark.parametrize(("pending", "route"), [(0, "local"), (5, "local"), (6, "cloud")])
def test_a_queue_at_the_threshold_stays_local_and_one_task_more_goes_to_the_cloud(
    pending: int, route: str
) -> None:
    assert decide_route(SHORT, depth(pending), ROUTING) == route


@pytest.mark.parametrize(
    ("length", "pending", "route"),
    [(100, 5, "local"), (101, 5, "cloud"), (100, 6, "cloud"), (101, 6, "cloud")],
)
def test_either_signal_alone_is_enough(length: int, pending: int, route: str) -> None:
    assert decide_route({"prompt": "x" * length}, depth(pending), ROUTING) == route


def test_a_prompt_is_measured_in_characters_and_not_in_bytes() -> None:
    assert decide_route({"prompt": "€" * 100}, depth(0), ROUTING) == "local"
    assert decide_route({"prompt": "€" * 101}, depth(0), ROUTING) == "cloud"


@pytest.mark.parametrize("payload", [{}, {"prompt": None}, {"prompt": ""}, {"tool": "add"}])
@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"by_status": None},
        {"by_status": {}},
        {"by_status": {"PENDING": None}},
        {"by_status": {"RUNNING": 99}},
        {"PENDING": 99},
    ],
)
def test_what_is_missing_means_local(
    payload: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    assert decide_route(payload, metrics, ROUTING) == "local"


def test_a_missing_prompt_does_not_hide_a_deep_queue() -> None:
    assert decide_route({}, depth(6), ROUTING) == "cloud"


def test_a_missing_depth_does_not_hide_a_long_prompt() -> None:
    assert decide_route({"prompt": "x" * 101}, {}, ROUTING) == "cloud"


def test_the_thresholds_are_those_of_the_routing_that_is_passed() -> None:
    tight = Routing(prompt_threshold=0, pending_threshold=0)
    assert decide_route({"prompt": "x"}, depth(0), tight) == "cloud"
    assert decide_route({}, depth(1), tight) == "cloud"
    assert decide_route({}, depth(0), tight) == "local"


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A config.toml that ORCHESTRATOR_CONFIG names, for this process and this test."""
    file = tmp_path / "config.toml"
    monkeypatch.setenv("ORCHESTRATOR_CONFIG", str(file))
    current_config.cache_clear()
    yield file
    current_config.cache_clear()


def test_without_a_routing_the_thresholds_are_those_of_orchestrator_config(
    own_config: Path,
) -> None:
    own_config.write_text("[routing]\nprompt_threshold = 3\npending_threshold = 1\n")
    assert decide_route({"prompt": "abc"}, depth(1)) == "local"
    assert decide_route({"prompt": "abcd"}, depth(1)) == "cloud"
    assert decide_route({"prompt": "abc"}, depth(2)) == "cloud"

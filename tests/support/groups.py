"""Which tests stay together when several workers (pytest -n) run them: one after the other.

A file is a group, because its tests share a database or an API, but for these:
"""

from __future__ import annotations

import os

# The longest groups, which begin first, by the beginnings of their tests' names.
TOGETHER = {
    # A clean clone, in which one thing at a time is installed and run.
    "commands": ("tests/local/test_commands.py",),
    # One browser and one stack for all of them.
    "browser": ("tests/browser/",),
    # Each of them makes a language model compute on all cores.
    "model": (
        "tests/local/test_model.py",
        "tests/local/test_end_to_end.py",
        "tests/local/test_openai_engine.py",
    ),
}
# Long tests, each of which brings its own world with it: they go where there is room.
APART = (
    "tests/database/test_run_machine.py",
    "tests/database/test_state_machine.py",
    "tests/local/test_start.py",
    "tests/process/",
)
# The files even there whose tests share processes, or a Postgres of their own.
SHARING = (
    "tests/process/test_agent_trouble.py",
    "tests/process/test_answers.py",
    "tests/process/test_callbacks.py",
    "tests/process/test_openai.py",
    "tests/process/test_outcomes.py",
    "tests/process/test_postgres_trouble.py",
    "tests/process/test_run_events.py",
    "tests/process/test_run_events_trouble.py",
    "tests/process/test_steps.py",
    "tests/process/test_stop.py",
    "tests/process/test_tools.py",
)


def group_of(name: str) -> str:
    """The group of the test of that name; that name: it goes by itself."""
    for group, beginnings in TOGETHER.items():
        if name.startswith(beginnings):
            return group
    if name.startswith(APART) and not name.startswith(SHARING):
        return name
    return name.partition("::")[0]


def place_of(name: str) -> int:
    """Where it stands in line: what takes longest begins first, and what goes by itself last."""
    group = group_of(name)
    if group == name:
        return len(TOGETHER) + 1
    return list(TOGETHER).index(group) if group in TOGETHER else len(TOGETHER)


def workers() -> int:
    """How many for this machine: many tests wait more than they compute. 0: no workers at all."""
    if os.environ.get("TEST_DATABASE_URL"):
        return 0  # on one server, with its hundred connections, tests would meet
    return min(8, 2 * (os.cpu_count() or 1))

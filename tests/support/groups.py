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
# Long tests, each of which brings its own world with it: they go where there is room, in this
# order, so that nobody waits at the end for one that takes half a minute.
APART = (
    "tests/database/test_state_machine.py",
    "tests/database/test_run_machine.py",
    "tests/process/test_poison.py",
    "tests/process/test_chaos.py",
    "tests/process/test_watchers.py",
    "tests/process/test_worker.py",
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
    """Where it stands in line: the longest groups, then the files, then what goes by itself."""
    group = group_of(name)
    if group == name:
        places = (place for place, part in enumerate(APART) if name.startswith(part))
        return len(TOGETHER) + 1 + next(places, len(APART))
    return list(TOGETHER).index(group) if group in TOGETHER else len(TOGETHER)


def workers() -> int:
    """How many for this machine: many tests wait more than they compute. 0: no workers at all."""
    if os.environ.get("TEST_DATABASE_URL"):
        return 0  # on one server, with its hundred connections, tests would meet
    return min(8, 2 * (os.cpu_count() or 1))

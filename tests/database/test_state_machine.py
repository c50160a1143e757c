"""Any order of calls, by workers who may not know that they lost: tests/support/machine.py.

A failure prints the steps that led to it and its seed; STATE_MACHINE_SEED=… repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest

from db import Connection
from queries import leases, operations
from tests.support.functions import rewritten

pytest.register_assert_rewrite("tests.support.machine")  # so that a failure shows both sides
REASON = "needs hypothesis: pip install -r requirements-dev.txt"
hypothesis = pytest.importorskip("hypothesis", reason=REASON)
stateful = pytest.importorskip("hypothesis.stateful", reason=REASON)
machine = pytest.importorskip("tests.support.machine", reason=REASON)

Connect = Callable[[], Connection]
OF_THE_QUEUE = {
    "stateful_step_count": 40,
    "deadline": None,
    "database": None,
    "print_blob": True,
    "report_multiple_bugs": False,
    "suppress_health_check": list(hypothesis.HealthCheck),
}


def run_machine(connect: Connect, seed: int, **settings: Any) -> None:
    """Play that many games, each of up to forty steps, on an empty queue."""

    class Machine(machine.QueueMachine):
        connections = tuple(connect() for _ in range(4))

    stateful.run_state_machine_as_test(
        hypothesis.seed(seed)(Machine), settings=hypothesis.settings(**OF_THE_QUEUE, **settings)
    )


def test_whatever_happens_in_whatever_order_every_promise_of_the_queue_is_kept(
    connect: Connect,
) -> None:
    seed = int(os.environ.get("STATE_MACHINE_SEED", random.randrange(2**32)))
    print(f"STATE_MACHINE_SEED={seed}")  # noqa: T201
    run_machine(connect, seed, max_examples=60)


# Each guard, where it stands in its statement, and what the statement is like without it.
GUARDS = {
    "the token of a settle": (
        None,
        "settle_tasks",
        {"AND t.lease_token IS NOT DISTINCT FROM o.token": ""},
    ),
    "the token of a heartbeat": (
        leases,
        "RENEW_LEASES",
        {" AND t.lease_token = ours.token": "", "t.lease_token::text AS token": "ours.token"},
    ),
    "the expiry in the reaper": (
        None,
        "reap_tasks",
        {" AND t.lease_expires_at < current_instant()": ""},
    ),
    "the request to cancel in a settle": (
        None,
        "settle_tasks",
        {
            "WHEN t.cancel_requested THEN 'cancelled'": "",
            "lease_token = NULL,": "lease_token = NULL, cancel_requested = false,",
        },
    ),
    "the fresh counters of a requeue": (operations, "REQUEUE_IF_DEAD", {"retry_count = 0,": ""}),
}


@pytest.mark.parametrize(("module", "name", "changes"), GUARDS.values(), ids=GUARDS.keys())
def test_without_a_guard_the_same_machine_finds_what_goes_wrong(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType | None,
    name: str,
    changes: dict[str, str],
) -> None:
    changed: AbstractContextManager[None] = nullcontext()
    if module is None:  # a function of the database
        changed = rewritten(connect(), name, changes)
    else:
        statement = getattr(module, name)
        for guard, without in changes.items():
            assert guard in statement
            statement = statement.replace(guard, without)
        monkeypatch.setattr(module, name, statement)
    with changed, pytest.raises(AssertionError):
        run_machine(
            connect,
            seed=1,
            max_examples=200,
            phases=[hypothesis.Phase.generate],  # no shrinking
        )

"""worker/held.py: each lease is dropped once, by who knows its end first."""

from __future__ import annotations

import pytest

from queries.leases import ClaimedTask, Lease
from worker.held import Held

ONE, TWO, THREE = (Lease(number, f"token {number}") for number in (1, 2, 3))


@pytest.fixture
def held() -> Held:
    held = Held()
    held.add(
        ClaimedTask(lease, lease.task_id, "tool", {}, "none", None, 1, 1, 0)
        for lease in (ONE, TWO, THREE)
    )
    return held


def test_what_is_settled_is_forgotten_and_what_was_lost_before_is_not_counted(held: Held) -> None:
    assert held.drop_lost([TWO]) == [TWO]
    held.begin_settling([ONE, TWO])
    assert held.drop_settled([ONE, TWO]) == [ONE]
    assert held.leases() == [THREE]
    assert held.drop_settled([ONE]) == []


def test_the_heartbeat_loses_nothing_that_is_being_settled(held: Held) -> None:
    held.begin_settling([ONE])
    assert held.drop_lost([ONE]) == []
    assert held.leases() == [ONE, TWO, THREE]
    assert held.drop_lost([ONE, TWO]) == [TWO]
    assert held.drop_lost([ONE, TWO]) == []
    assert held.leases() == [ONE, THREE]


def test_a_lease_that_was_settled_is_not_being_settled_any_more(held: Held) -> None:
    held.begin_settling([ONE])
    held.drop_settled([ONE])
    held.add([ClaimedTask(ONE, 1, "tool", {}, "none", None, 1, 1, 0)])
    assert held.drop_lost([ONE]) == [ONE]


def test_another_claim_s_lease_of_the_same_task_stays(held: Held) -> None:
    assert held.drop_settled([Lease(1, "another token")]) == []
    assert len(held) == 3

"""A job of many nodes takes as many steps: what one step costs must not grow with the nodes.

Counted are calls, which depend on neither the machine nor its load.
"""

from __future__ import annotations

import cProfile
from collections.abc import Callable

import pytest

from rdzv.core.commands import Fail, Join, MarkLost, Resume
from rdzv.core.invariants import violations
from rdzv.core.life.restoring import restore
from rdzv.core.life.runs import vacant
from rdzv.core.model import Offer, Settings, State, Tuning
from rdzv.core.rendezvous import step
from tests.support.builders import report

pytestmark = pytest.mark.slow

SMALL, LARGE = 600, 1_800
"""Both are large enough that maps are shared."""
MOST_GROWTH = 1.3
"""Of the calls for each node, from `SMALL` to `LARGE`: 3 would be a cost that is quadratic."""


class Group:
    """Nodes of one job that run its first round."""

    def __init__(self, nodes: int) -> None:
        self.settings = Settings(nodes - 1, nodes, max_restarts=9)
        self.names = [f"n{number}" for number in range(nodes)]
        self.state: State = vacant("job", Tuning())
        self.now_ms = 1_000
        self.join(None)
        assert self.round == 0

    @property
    def round(self) -> int:
        """The round that runs; -1 if none does."""
        found = self.state.membership.round
        return found.number if found is not None and found.live else -1

    def do(self, command: Fail | Join | MarkLost | Resume) -> None:
        transition = step(self.state, command, self.now_ms)
        assert not violations(self.state, transition.state)
        self.state = transition.state

    def join(self, left_round: int | None, *, but: str = "") -> None:
        for name in self.names:
            if name != but:
                run, offer = self.state.membership.run, Offer("10.0.0.1", store_port=4_000)
                self.do(Join(name, 1, run, self.settings, offer, left_round, new_run="run"))

    def fail(self, name: str) -> None:
        failed = report(message="x", pid=99)
        self.do(Fail(name, 1, "run", 0, (failed,)))


def all_fail(group: Group) -> None:
    for name in group.names:
        group.fail(name)
    group.join(0)
    assert group.round == 1


def one_is_lost(group: Group) -> None:
    group.do(MarkLost("n0", 1, "gone"))
    group.join(0, but="n0")
    assert group.round == 1


def a_server_takes_over_and_a_worker_has_failed(group: Group) -> None:
    group.state = restore(group.state.membership, Tuning(), group.now_ms)
    for name in group.names:
        group.do(Resume(name, 1, "run", 0))
        if name == "n0":
            group.fail(name)
    assert not group.state.away
    group.join(0)
    assert group.round == 1


def a_server_takes_over_and_no_node_returns(group: Group) -> None:
    group.state = restore(group.state.membership, Tuning(), group.now_ms)
    for name in group.names:
        group.do(MarkLost(name, 1, "did not return"))
    assert not group.state.seats


@pytest.mark.parametrize(
    "act",
    [
        all_fail,
        one_is_lost,
        a_server_takes_over_and_a_worker_has_failed,
        a_server_takes_over_and_no_node_returns,
    ],
)
def test_the_calls_of_a_step_do_not_grow_with_the_nodes(act: Callable[[Group], None]) -> None:
    def calls_for_each_node(nodes: int) -> float:
        group = Group(nodes)
        profile = cProfile.Profile()
        profile.runcall(act, group)
        return sum(entry.callcount for entry in profile.getstats()) / nodes

    assert calls_for_each_node(LARGE) < MOST_GROWTH * calls_for_each_node(SMALL)

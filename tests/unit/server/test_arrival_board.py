"""Nodes report arrivals at different moments; all ranks are compared in common collectives."""

from __future__ import annotations

from rdzv.agent.observers.arrival_watch import arrivals as reported_by
from rdzv.agent.observers.flight_records import GroupTimes
from rdzv.agent.observers.server_clock import Reading
from rdzv.core.evidence.stragglers import arrivals
from rdzv.messages import Arrivals
from rdzv.server.diagnosis.round_reports import ArrivalBoard

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


class Node:
    """One of two nodes; its two ranks enter a collective every 100 ms, RANK 3 20 ms late."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._ranks = [rank for rank, node in NODES.items() if node == node_id]
        self._reported: dict[str, int] = {}

    def report(self, last: int) -> Arrivals:
        """Report all arrivals up to a collective that were not reported yet, at most 64."""
        by_rank = {}
        for rank in self._ranks:
            at_us = {n: 100_000 * n + 20_000 * (rank == 3) for n in range(1, last + 1)}
            by_rank[rank] = {"0": GroupTimes(at_us, at_us)}
        (group,) = reported_by(by_rank, self._reported, 64, Reading(0, 500))
        return Arrivals("job", "run", 0, (group,))


def looks(*upto: tuple[int, int]) -> list[tuple[list[int], int]]:
    """Return for each look which ranks were compared, and in how many collectives.

    The nodes report by turns, each up to the collectives given.
    """
    board, first, second = ArrivalBoard(), Node("n1"), Node("n2")
    found = []
    for of_first, of_second in upto:
        board.note("n1", first.report(of_first))
        board.note("n2", second.report(of_second))
        if groups := board.take():
            seen = arrivals(groups, NODES)
            found.append((sorted(seen), len(seen[0].late_us)))
    return found


def test_the_node_that_is_ahead_is_compared_in_each_look() -> None:
    assert looks((40, 60), (80, 110), (120, 160)) == [
        ([0, 1, 2, 3], 39),
        ([0, 1, 2, 3], 40),
        ([0, 1, 2, 3], 40),
    ]


def test_a_node_that_has_chosen_fewer_is_compared_in_those() -> None:
    """The second has so many to report that it leaves out every other one."""
    ((ranks, compared),) = looks((64, 100))
    assert ranks == [0, 1, 2, 3]
    assert 20 <= compared < 64

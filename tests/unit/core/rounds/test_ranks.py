"""Assignment of seats: GROUP_RANK, RANK and ROLE_RANK of a round."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.core.model import Offer, Participant, Standby, StandbyState, WaitingNode
from rdzv.core.rounds.ranks import assign_seats
from rdzv.structs import replace


def node(
    size: int = 8, topology: str = "", since_ms: int = 0, role: str = "default"
) -> WaitingNode:
    return WaitingNode(1, Offer("h", size, role=role, topology=topology), since_ms)


def order(participants: tuple[Participant, ...]) -> list[str]:
    return [p.node_id for p in participants]


def first_ranks(participants: tuple[Participant, ...]) -> dict[str, int]:
    return {p.node_id: p.rank_first for p in participants}


def seats(prior: dict[str, WaitingNode], now: dict[str, WaitingNode], max_nodes: int) -> list[str]:
    """Form a round of `prior`, then another of `now`."""
    return order(assign_seats(assign_seats((), prior, len(prior)), now, max_nodes))


def test_the_first_formation_is_ordered_by_topology_then_name() -> None:
    nodes = {"n1": node(topology="b"), "n9": node(topology="a"), "n5": node(topology="a")}
    assert order(assign_seats((), nodes, 3)) == ["n5", "n9", "n1"]


def test_who_waited_longest_gets_the_first_seats() -> None:
    nodes = {"n1": node(since_ms=30), "n2": node(since_ms=10), "n3": node(since_ms=20)}
    assert order(assign_seats((), nodes, 2)) == ["n2", "n3"]


def test_group_ranks_of_survivors_do_not_move() -> None:
    prior = {name: node() for name in ("n1", "n2", "n3", "n4")}
    now = {"n4": node(since_ms=9), "n1": node(since_ms=8), "s": node()}
    now["n3"] = node(since_ms=7)
    assert seats(prior, now, 4) == ["n1", "s", "n3", "n4"]


def test_who_was_replaced_and_came_back_in_time_has_its_place_again() -> None:
    prior = {name: node() for name in ("n1", "n2")}
    now = {"n1": node(since_ms=99), "n2": node(), "s": node()}
    assert seats(prior, now, 2) == ["n1", "n2"]


def test_a_lost_seat_goes_to_the_same_size_then_topology_then_longest_waiting_then_name() -> None:
    prior = {"n1": node(8, "r1"), "n2": node(8, "r2")}
    left = {"n1": node(8, "r1")}
    candidates = {
        "other-size": node(4, "r2", since_ms=0),
        "other-rack": node(8, "r9", since_ms=1),
        "0-later": node(8, "r2", since_ms=9),
        "b": node(8, "r2", since_ms=5),
        "a": node(8, "r2", since_ms=5),
    }
    for best in ("a", "b", "0-later", "other-rack", "other-size"):
        assert seats(prior, {**left, **candidates}, 2) == ["n1", best]
        del candidates[best]


def test_among_equals_a_lost_seat_goes_to_a_spare_whose_standby_is_ready() -> None:
    hot = replace(node(8, "r2", since_ms=9), standby=Standby(StandbyState.READY))
    cold = replace(node(8, "r2"), standby=Standby(StandbyState.STARTING))
    prior = {"n1": node(8, "r1"), "n2": node(8, "r2")}
    now = {
        "n1": node(8, "r1"),
        "cold": cold,
        "hot": hot,
        "far": replace(hot, offer=prior["n1"].offer),
    }
    assert seats(prior, now, 2) == ["n1", "hot"]


def test_the_lost_seats_choose_in_group_rank_order() -> None:
    prior = {"n1": node(8), "n2": node(8), "n3": node(8)}
    assert seats(prior, {"n2": node(8), "s8": node(8), "s4": node(4)}, 3) == ["s8", "n2", "s4"]


def test_unfilled_seats_close_up() -> None:
    prior = {name: node() for name in ("n1", "n2", "n3")}
    assert seats(prior, {"n1": node(), "n3": node()}, 3) == ["n1", "n3"]


def test_newcomers_for_the_room_that_is_left_follow() -> None:
    prior = {"n5": node(), "n6": node()}
    now = {"n5": node(), "n6": node(), "n1": node(topology="z"), "n2": node(topology="a")}
    assert seats(prior, now, 4) == ["n5", "n6", "n2", "n1"]


def test_a_lowered_maximum_removes_the_highest_group_ranks() -> None:
    prior = {name: node() for name in ("n1", "n2", "n3", "n4")}
    assert seats(prior, dict(reversed(prior.items())), 2) == ["n1", "n2"]
    assert seats(prior, {"n2": node(), "n3": node(), "n4": node(), "s": node()}, 2) == ["n2", "n3"]


def test_ranks_are_prefix_sums_and_move_only_where_sizes_differ() -> None:
    prior = {"n1": node(2), "n2": node(3), "n3": node(4)}
    first = assign_seats((), prior, 3)
    assert first_ranks(first) == {"n1": 0, "n2": 2, "n3": 5}
    same = assign_seats(first, {"n1": node(2), "s": node(3), "n3": node(4)}, 3)
    assert first_ranks(same) == {"n1": 0, "s": 2, "n3": 5}
    smaller = assign_seats(first, {"n1": node(2), "s": node(1), "n3": node(4)}, 3)
    assert first_ranks(smaller) == {"n1": 0, "s": 2, "n3": 3}


def test_role_ranks_are_counted_per_role() -> None:
    nodes = {"n1": node(2, role="a"), "n2": node(1, role="b"), "n3": node(4, role="a")}
    found = {p.node_id: (p.role_rank_first, p.role_world_size) for p in assign_seats((), nodes, 3)}
    assert found == {"n1": (0, 6), "n2": (0, 1), "n3": (2, 6)}


fleets = st.dictionaries(
    st.sampled_from([f"n{i}" for i in range(12)]),
    st.builds(
        node,
        size=st.integers(1, 4),
        topology=st.sampled_from(["", "r1", "r2"]),
        since_ms=st.integers(0, 3),
        role=st.sampled_from(["a", "b"]),
    ),
    min_size=1,
)


@pytest.mark.slow
@settings(SETTLED, max_examples=60)
@given(fleets, fleets, st.integers(1, 12), st.integers(1, 12))
def test_whoever_comes_and_goes_ranks_tile_and_survivors_keep_their_order(
    before: dict[str, WaitingNode], now: dict[str, WaitingNode], max_before: int, max_now: int
) -> None:
    prior = assign_seats((), before, max_before)
    after = assign_seats(prior, now, max_now)
    assert len(after) == min(len(now), max_now)
    assert after == assign_seats(prior, dict(reversed(now.items())), max_now)
    expected = 0
    for participant in after:
        assert participant.rank_first == expected
        expected += participant.offer.local_world_size
    for role in ("a", "b"):
        of_role = [p for p in after if p.offer.role == role]
        sizes = [p.offer.local_world_size for p in of_role]
        assert [p.role_rank_first for p in of_role] == [sum(sizes[:i]) for i in range(len(sizes))]
        assert all(p.role_world_size == sum(sizes) for p in of_role)
    survivors = [name for name in order(prior) if name in now][:max_now]
    assert [name for name in order(after) if name in survivors] == survivors
    if len(now) >= len(prior) <= max_now:
        at = {name: i for i, name in enumerate(order(after))}
        assert all(at[name] == i for i, name in enumerate(order(prior)) if name in now)

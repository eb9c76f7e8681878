"""Which node keeps copies of which snapshots."""

from __future__ import annotations

import pytest

from rdzv.core.model import Offer, Participant, Snapshot, SnapshotMark
from rdzv.core.snapshots import MAX_COPIES, are_kept, keepers, orders
from rdzv.structs import replace

MARK = SnapshotMark(0, 40, "a", 4)


def nodes(*topologies: str, machines: str = "", workers: int = 2) -> list[Participant]:
    """Nodes n0, n1, ... of these topologies."""
    return [
        Participant(
            f"n{n}",
            1,
            Offer("h", workers, topology=topology, machine=machines[n : n + 1]),
            n * workers,
            0,
            0,
        )
        for n, topology in enumerate(topologies)
    ]


def part(shard: int, mark: SnapshotMark = MARK, local_rank: int = 0) -> Snapshot:
    return Snapshot(local_rank, mark, shard, 1_000, f"digest {shard}")


@pytest.mark.parametrize(
    ("topologies", "machines", "expected"),
    [
        ("ab", "", {"n0": "n1", "n1": "n0"}),
        ("aabb", "", {"n0": "n2", "n1": "n3", "n2": "n0", "n3": "n1"}),
        ("abc", "", {"n0": "n1", "n1": "n2", "n2": "n0"}),
        ("abbc", "", {"n1": "n0", "n2": "n3", "n0": "n1", "n3": "n2"}),
        # One topology: another machine is enough; and on one machine there is no use in it.
        ("aa", "xy", {"n0": "n1", "n1": "n0"}),
        ("aa", "xx", {}),
        ("a", "x", {}),
        ("", "", {}),
        # Too many in one topology: some keep more than one, up to a limit.
        ("aaab", "", {"n0": "n3", "n1": "n3", "n2": "n3", "n3": "n0"}),
        ("aaaab", "", {"n0": "n4", "n1": "n4", "n2": "n4", "n4": "n0"}),
    ],
)
def test_copies_are_kept_elsewhere(
    topologies: str, machines: str, expected: dict[str, str]
) -> None:
    assert keepers(nodes(*topologies, machines=machines)) == expected


@pytest.mark.parametrize("sizes", [(1, 1), (5, 3, 2), (4, 4), (2, 2, 2, 2), (7, 1), (9, 3, 3)])
def test_no_node_keeps_those_of_its_own_topology(sizes: tuple[int, ...]) -> None:
    participants = nodes(*(str(n) for n, size in enumerate(sizes) for _ in range(size)))
    where = {one.node_id: one.offer.topology for one in participants}
    chosen = keepers(participants)
    assert all(where[one] != where[keeper] for one, keeper in chosen.items())
    loads = [list(chosen.values()).count(one) for one in set(chosen.values())]
    assert max(loads) <= MAX_COPIES
    if 2 * max(sizes) <= sum(sizes):
        assert len(chosen) == len(participants) and max(loads) == 1


def test_a_copy_is_wanted_of_what_one_topology_alone_holds() -> None:
    held = {
        "n0": [part(0), part(1, local_rank=1)],
        "n1": [part(2), part(3, local_rank=1), part(0, replace(MARK, step=50))],
    }
    found = orders(MARK, nodes("a", "b"), held)
    assert [(one.keeper, one.source) for one in found] == [("n1", "n0"), ("n0", "n1")]
    assert [(one.shard, one.local_rank, one.copy_of) for one in found[0].snapshots] == [
        (0, 0, 0),
        (1, 1, 1),
    ]
    assert [one.copy_of for one in found[1].snapshots] == [2, 3]


def test_replicas_and_copies_elsewhere_need_none() -> None:
    all_ = replace(MARK, shards=1)
    assert orders(all_, nodes("a", "b"), {"n0": [part(0, all_)], "n1": [part(0, all_)]}) == ()
    copy = replace(part(0), copy_of=0)
    found = orders(MARK, nodes("a", "b"), {"n0": [part(0)], "n1": [part(2), copy]})
    assert [one.source for one in found] == ["n1"]


def test_of_two_replicas_in_one_topology_one_is_copied() -> None:
    found = orders(MARK, nodes("a", "a", "b"), {"n0": [part(0)], "n1": [part(0)], "n2": []})
    assert [(one.keeper, one.source) for one in found] == [("n2", "n0")]


def test_nodes_that_carry_no_copies_are_left_out() -> None:
    assert orders(MARK, nodes("a", "b"), {"n0": [part(0)]}) == ()


def test_a_small_node_keeps_few() -> None:
    big, small = nodes("a", workers=8)[0], nodes("b", "b", workers=1)[1]
    held = {"n0": [part(shard) for shard in range(4)], "n1": []}
    assert orders(MARK, [big, small], held) == ()
    held["n0"].pop()
    (found,) = orders(MARK, [big, small], held)
    assert [one.local_rank for one in found.snapshots] == [0, 0, 0]


def test_only_what_has_the_digest_of_its_saver_counts_as_kept() -> None:
    wanted = [replace(part(0), copy_of=0)]
    assert are_kept(wanted, [part(1), replace(part(0), copy_of=0)])
    assert not are_kept(wanted, [replace(part(0), copy_of=0, digest="another")])
    assert not are_kept(wanted, [replace(part(0, replace(MARK, step=41)), copy_of=0)])

"""Copies of snapshots on other nodes: which node keeps copies for which other node, and of what.

If only nodes of one topology hold a part of the state, that part is lost with them, so a node of
another topology keeps a copy. If all nodes have the same topology, a node on another machine is
enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from rdzv.bounds import Label, OwnPort, Printable, Sentence
from rdzv.core.model import Participant, Snapshot, SnapshotMark
from rdzv.structs import replace, struct

MAX_COPIES = 3
"""The maximum number of workers on other nodes for which a node keeps copies, per own worker."""


@struct(frozen=True)
class CopyCarrier:
    """The endpoint from which other nodes of a job fetch copies of a node's snapshots."""

    port: OwnPort
    token: Printable
    """A token that each side proves to the other that it knows."""
    fingerprint: Label = ""
    """The SHA-256 fingerprint of its certificate in hexadecimal, or empty if it does not use
    encryption."""


@struct(frozen=True)
class MissingCopies:
    """Copies that a node was asked to keep but cannot obtain."""

    mark: SnapshotMark
    reason: Sentence


@struct(frozen=True)
class CopySource:
    """A node, and the snapshots that another node must fetch from it."""

    node_id: str
    address: str
    port: int
    token: str
    snapshots: tuple[Snapshot, ...]
    fingerprint: str = ""


@struct(frozen=True)
class CopyOrder:
    """The snapshots of one node that another node must copy and keep."""

    keeper: str
    source: str
    snapshots: tuple[Snapshot, ...]


def keepers(participants: Sequence[Participant]) -> dict[str, str]:
    """Map each node to the node that keeps its copies, omitting nodes that have no keeper.

    The choice depends only on the nodes and their order. As far as possible, each node keeps copies
    for only one other node.
    """
    groups = sorted(_apart(participants).values(), key=len, reverse=True)
    if len(groups) < 2:
        return {}
    largest, others = groups[0], list(chain(*groups[1:]))
    if len(largest) > len(others):
        largest = largest[: MAX_COPIES * len(others)]
        shared = {one: others[n % len(others)] for n, one in enumerate(largest)}
        return shared | dict(zip(others, largest, strict=False))
    order = [*largest, *others]
    return {one: order[(n + len(largest)) % len(order)] for n, one in enumerate(order)}


def orders(
    mark: SnapshotMark,
    participants: Sequence[Participant],
    held: Mapping[str, Collection[Snapshot]],
) -> tuple[CopyOrder, ...]:
    """Return orders for a state's missing copies; `held` maps participants to their snapshots."""
    able = [one for one in participants if one.node_id in held]
    place = {name: where for where, names in _apart(able).items() for name in names}
    where_held: dict[int, set[str]] = {}
    for name, snapshots in held.items():
        for one in snapshots:
            if one.mark == mark and name in place:
                where_held.setdefault(one.shard, set()).add(place[name])
    chosen, by_name, ordered = keepers(able), {one.node_id: one for one in able}, set[int]()
    found, counts = [], Counter[str]()
    for source in able:
        keeper = by_name.get(chosen.get(source.node_id, ""))
        own = (one for one in held[source.node_id] if one.mark == mark and one.copy_of is None)
        alone = [one for one in own if len(where_held[one.shard]) < 2 and one.shard not in ordered]
        if keeper is None or not alone:
            continue
        counts[keeper.node_id] += len(alone)
        if counts[keeper.node_id] > MAX_COPIES * keeper.offer.local_world_size:
            continue
        ordered.update(one.shard for one in alone)
        found.append(
            CopyOrder(
                keeper.node_id,
                source.node_id,
                tuple(
                    replace(
                        one,
                        local_rank=one.local_rank % keeper.offer.local_world_size,
                        copy_of=source.rank_first + one.local_rank,
                    )
                    for one in alone
                ),
            )
        )
    return tuple(found)


def why_no_keeper(node_id: str, participants: Sequence[Participant], able: Collection[str]) -> str:
    if len(participants) < 2:
        return "no other node takes part"
    groups = _apart(participants)
    if len(groups) < 2:
        return "all nodes are on one machine, and of one topology"
    if node_id not in able:
        return "it exchanges no copies: its log says why, or --snapshot-copy-rate is 0"
    if len(_apart([one for one in participants if one.node_id in able])) < 2:
        return "the nodes that could keep copies for it exchange none"
    return f"the nodes that could keep copies for it have {MAX_COPIES} for each worker"


def are_kept(wanted: Iterable[Snapshot], held: Collection[Snapshot]) -> bool:
    """Return whether all `wanted` copies are held, with the digests that their savers reported."""
    there = {(one.mark, one.shard, one.digest) for one in held}
    return all((one.mark, one.shard, one.digest) in there for one in wanted)


def _apart(participants: Sequence[Participant]) -> dict[str, list[str]]:
    """Group node_ids that may fail together: by topology or, if all share one, by machine."""
    by_topology = len({one.offer.topology for one in participants}) > 1
    groups: dict[str, list[str]] = {}
    for one in participants:
        name = one.offer.topology if by_topology else one.offer.machine or one.node_id
        groups.setdefault(name, []).append(one.node_id)
    return groups

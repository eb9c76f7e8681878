"""Determines which snapshots of a job's state are whole, and whether a round loads them.

A *snapshot* is one part of the state at one sealed step, in memory that outlives its worker. Parts
fit together only if they have the same *mark*: the same lineage, step and series. A mark is *whole*
if participants hold every part of it. A *lineage* begins with each round that has only new workers,
and kept workers continue it. The same step in two lineages is not the same state.

Kept workers are never older than the snapshots of the rounds that they took part in, so a round
loads snapshots only if no kept worker has a state. A round that has neither begins from the
script's own checkpoint. From then on, snapshots of earlier lineages are not loaded, whatever their
steps are.

If only nodes of one topology hold a part of the state, that part is lost with them, so a node of
another topology keeps a copy. If all nodes have the same topology, a node on another machine is
enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from itertools import chain

from rdzv.bounds import Label, OwnPort, Printable, Sentence
from rdzv.core.model import (
    Cause,
    Membership,
    Participant,
    Round,
    Snapshot,
    SnapshotMark,
    WaitingNode,
)
from rdzv.structs import replace, struct

MAX_LOADS = 3
"""Snapshots are no longer loaded if this many consecutive rounds have loaded them and failed soon.
"""

MAX_SOLE_HOLDERS = 8


class WhyNotLoaded(StrEnum):
    """The reason why a round loads no snapshots although some exist and no kept worker has any."""

    NOT_WHOLE = "not whole"
    OUTDATED = "outdated"
    IN_VAIN = "in vain"


WHY_NOT_LOADED: Mapping[str, str] = {
    WhyNotLoaded.NOT_WHOLE: "no step has all parts",
    WhyNotLoaded.OUTDATED: "an earlier round continued without them",
    WhyNotLoaded.IN_VAIN: f"{MAX_LOADS} rounds in a row that loaded them failed soon",
}


def newest_whole(held: Iterable[Collection[Snapshot]], lineages: range) -> SnapshotMark | None:
    """Return the newest mark of these lineages that is whole among the snapshots that nodes hold.

    Any number of workers can use its parts: they divide the state anew.
    """
    parts: dict[SnapshotMark, set[int]] = {}
    for snapshots in held:
        for one in snapshots:
            mark = one.mark
            if mark.lineage in lineages:
                parts.setdefault(mark, set()).add(one.shard)
    whole = (mark for mark, shards in parts.items() if len(shards) == mark.shards)
    return max(whole, default=None)


def has_whole(round_: Round, waiting: Iterable[WaitingNode]) -> bool:
    """Return whether waiting nodes hold a whole mark newer than the one this round began with."""
    mark = newest_whole((one.snapshots for one in waiting), sealed_in(round_))
    return mark is not None and (round_.snapshot is None or mark > round_.snapshot)


def sealed_in(round_: Round) -> range:
    """Return the lineages to which the steps sealed by a round may belong."""
    # Kept workers that have no state begin another lineage, which is not known here.
    return range(round_.lineage, round_.number + 1)


def base(
    membership: Membership, round_: Round, joins: Iterable[WaitingNode]
) -> tuple[Round, WhyNotLoaded | None]:
    """Return a new round with the snapshots that it begins with, or why it loads none."""
    prior, number = membership.round, round_.number
    origin = prior.origin if prior is not None else number
    held = [one.snapshots for one in joins]
    if round_.source is not None and prior is not None:
        lineage = prior.lineage
        past = [before(snapshots, lineage, round_.resume_step) for snapshots in held]
        mark = newest_whole(past, range(origin, number))
        return replace(round_, snapshot=mark, origin=origin, lineage=lineage), None
    mark = newest_whole(held, range(origin, number))
    loads = prior.snapshot_loads if prior is not None and prior.snapshot == mark else 0
    anew = replace(round_, origin=number, lineage=number)
    if mark is None:
        return anew, _why_not_whole(held, origin)
    if _in_vain(membership, loads):
        return anew, WhyNotLoaded.IN_VAIN
    return replace(anew, snapshot=mark, snapshot_loads=loads + 1, origin=origin), None


def before(snapshots: Collection[Snapshot], lineage: int, step: int | None) -> tuple[Snapshot, ...]:
    """Return the snapshots, except those of steps that kept workers redo with different results."""
    marks = (one.mark for one in snapshots)
    undone = {mark for mark in marks if mark.lineage == lineage and mark.step > (step or 0)}
    return tuple(one for one in snapshots if one.mark not in undone)


def _why_not_whole(held: Iterable[Collection[Snapshot]], origin: int) -> WhyNotLoaded | None:
    """Return why no snapshot that nodes hold is whole, or None if they hold no snapshots."""
    lineages = {one.mark.lineage for snapshots in held for one in snapshots}
    if any(lineage >= origin for lineage in lineages):
        return WhyNotLoaded.NOT_WHOLE
    return WhyNotLoaded.OUTDATED if lineages else None


def _in_vain(membership: Membership, loads: int) -> bool:
    end = membership.round.end if membership.round is not None else None
    failed = end is not None and end.cause is Cause.WORKER_FAILURE
    return failed and min(loads, membership.spent.soon) >= MAX_LOADS


@struct(frozen=True)
class NodeHolding:
    """The number and total size of a job's snapshots that a node holds."""

    snapshots: int
    bytes: int


@struct(frozen=True)
class SoleHolder:
    """The only node that holds a part of the newest whole step, and why no other has a copy."""

    node_id: str
    reason: str


@struct(frozen=True)
class RemainingSnapshots:
    """The snapshots that would remain after the loss of one node, in the worst case."""

    whole: SnapshotMark | None
    sole_holders: tuple[SoleHolder, ...] = ()
    """The nodes, or the first few of them, without any one of which the newest state would not be
    whole."""
    sole_holder_count: int = 0


@struct(frozen=True)
class SnapshotsKnown:
    """The state of a job's snapshots: the newest whole ones, and those held by each node."""

    whole: SnapshotMark | None = None
    whole_ms: int = 0
    held: Mapping[str, NodeHolding] = field(default_factory=dict)
    node_loss: RemainingSnapshots | None = None
    """The worst-case loss of a node, or None until nodes have reported that they hold all of
    `whole`."""

    def lost_steps(self, steps: Iterable[int]) -> int | None:
        """Return how many steps would be redone if all workers, now at `steps`, failed.

        Return None if that is not known.
        """
        return _steps_after(self.whole, steps)

    def lost_steps_with_node(self, steps: Iterable[int]) -> int | None:
        """Return the most steps that would be redone if any one node and all workers were lost.

        Return None if that is not known, or if nothing whole would remain in memory.
        """
        return _steps_after(self.node_loss.whole if self.node_loss else None, steps)


class HeldByNodes:
    """The snapshots that nodes of a live round hold, and the newest mark that is whole among them.

    `whole` moves to a newer mark of the round's lineages when the last part of that mark is held.
    It never goes back, even if a part is lost.
    """

    def __init__(self, round_: Round, last: HeldByNodes | None = None) -> None:
        """Start with the mark in the round's record and what its nodes held in `last`, if given."""
        self.whole = round_.snapshot
        self.whole_in_round: SnapshotMark | None = None
        """The newest whole mark, if it became whole in this round."""
        self._lineages = sealed_in(round_)
        self._loadable = range(round_.origin, round_.number + 1)
        self._held: dict[str, tuple[Snapshot, ...]] = {}
        self._holders: dict[SnapshotMark, dict[int, int]] = {}
        """The number of nodes that hold each part, by mark and part."""
        for participant in round_.participants if last is not None else ():
            if last is not None and (known := last._held.get(participant.node_id)):
                past = before(known, round_.lineage, round_.resume_step)
                self.note(participant.node_id, past)

    def note(self, node_id: str, snapshots: tuple[Snapshot, ...]) -> bool:
        """Replace a node's snapshots, and return whether a newer mark has become whole."""
        for mark, shard in _parts(self._held.get(node_id, ())):
            holders = self._holders[mark]
            holders[shard] -= 1
            if not holders[shard]:
                del holders[shard]
            if not holders:
                del self._holders[mark]
        self._held[node_id] = snapshots
        for mark, shard in _parts(snapshots):
            holders = self._holders.setdefault(mark, {})
            holders[shard] = holders.get(shard, 0) + 1
        known = self.whole
        for mark, _ in _parts(snapshots):
            if self._is_whole(mark) and (self.whole is None or mark > self.whole):
                self.whole = self.whole_in_round = mark
        return self.whole != known

    def held_by(self, node_id: str) -> tuple[Snapshot, ...]:
        return self._held.get(node_id, ())

    def stopped_us(self, mark: SnapshotMark) -> int:
        """Return how long saving a mark has stopped training: all wait for the slowest worker."""
        snapshots = chain(*self._held.values())
        return max((one.stopped_us for one in snapshots if one.mark == mark), default=0)

    def sole_holders(self, mark: SnapshotMark) -> set[str] | None:
        """Return the nodes that alone hold a part of a mark, or None if some part is not held."""
        holders = self._holders.get(mark, {})
        if len(holders) < mark.shards:
            return None
        return {
            name
            for name, snapshots in self._held.items()
            for one in snapshots
            if one.mark == mark and holders[one.shard] == 1
        }

    def whole_without_a_node(self) -> SnapshotMark | None:
        """Return the newest mark that is certain to remain whole after the loss of any one node.

        After a node's loss, the newest remaining mark is the newest one of which that node is not a
        sole holder. The result is the oldest of these marks over all nodes.
        """
        worse_off = set(self._held)
        for mark in sorted(self._holders, reverse=True):
            sole = self.sole_holders(mark) if mark.lineage in self._loadable else None
            if sole is not None and not (worse_off := worse_off & sole):
                return mark
        return None

    def _is_whole(self, mark: SnapshotMark) -> bool:
        return mark.lineage in self._lineages and len(self._holders[mark]) == mark.shards


class BlockedSaves:
    """Detects that no rank can save any more because the ranks hold different steps.

    A rank keeps the announced mark and saves over the older of its two snapshots, so it waits as
    long as the newer one is not announced. Ranks learn of a mark at slightly different times. If
    one rank saves a step and another does not, that step never becomes whole, and both may wait
    forever.
    """

    def __init__(self, node_ids: Iterable[str], announced: SnapshotMark | None) -> None:
        """Ranks overwrite snapshots up to `announced`; with None, they save without waiting."""
        self._bound = announced
        self._newest: dict[str, list[SnapshotMark]] = {}
        """The newest mark of each rank that holds two marks, by node."""
        self._free = set(node_ids)
        """The nodes with a rank that can save, and those that have reported nothing yet."""

    def note(self, node_id: str, snapshots: Iterable[Snapshot]) -> None:
        marks: dict[int, list[SnapshotMark]] = {}
        for one in snapshots:
            if one.copy_of is None:
                marks.setdefault(one.local_rank, []).append(one.mark)
        self._newest[node_id] = [max(held) for held in marks.values() if len(held) > 1]
        self._compare(node_id, ranks=len(marks))

    def advance(self, mark: SnapshotMark) -> None:
        if self._bound is None or mark > self._bound:
            self._bound = mark
            for node_id in self._newest.keys() - self._free:
                self._compare(node_id, ranks=len(self._newest[node_id]))

    def given_up(self) -> SnapshotMark | None:
        """Return the newest mark held, or None if a rank can still save or none ever saved."""
        if self._free:
            return None
        return max((mark for held in self._newest.values() for mark in held), default=None)

    def _compare(self, node_id: str, ranks: int) -> None:
        newest, bound = self._newest[node_id], self._bound
        blocked = len(newest) == ranks and bound is not None and all(m > bound for m in newest)
        if blocked:
            self._free.discard(node_id)
        else:
            self._free.add(node_id)


def _steps_after(mark: SnapshotMark | None, steps: Iterable[int]) -> int | None:
    furthest = max(steps, default=None)
    return None if mark is None or furthest is None else max(furthest - mark.step, 0)


def _parts(snapshots: Iterable[Snapshot]) -> set[tuple[SnapshotMark, int]]:
    return {(one.mark, one.shard) for one in snapshots}


# ------------------------------------------------------------------ copies on other nodes

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

"""Makes nodes keep copies of snapshots that would otherwise be lost with a topology or machine.

Marks are copied one at a time: a newer mark waits until the keepers of the current mark's copies
have kept them or given them up. Nodes without a copy carrier do not take part.
"""

from __future__ import annotations

from collections.abc import Iterator

from rdzv.core.model import Round, Snapshot, SnapshotMark
from rdzv.core.snapshot_copies import CopyCarrier, CopySource, are_kept, orders, why_no_keeper
from rdzv.core.snapshots import HeldByNodes
from rdzv.messages import KeepCopies, SnapshotsHeld


class Copying:
    """The copies of snapshots in one live round."""

    def __init__(self, rdzv_id: str, run: str, round_: Round) -> None:
        self._rdzv_id = rdzv_id
        self._run = run
        self._participants = {one.node_id: one for one in round_.participants}
        self._carriers: dict[str, CopyCarrier] = {}
        self._can_do_more = False
        """Whether a carrier has appeared or changed since copying of the current mark began, so
        that copies that were given up might succeed now."""
        self._orders: dict[str, tuple[CopySource, ...]] = {}
        """The sources of the copies that each keeper still has to make of the current mark, by
        keeper."""
        self._keepers: dict[str, str] = {}
        """The node that keeps copies of each source node's snapshots of the current mark, by source
        node."""
        self._given_up: dict[str, str] = {}
        """The reason why a keeper does not keep its copies of the current mark, by keeper."""
        self._sent: set[str] = set()
        """The nodes that have been sent their orders on their current streams."""
        self._mark: SnapshotMark | None = None
        """The mark that is being copied or was copied last."""
        self.settled: SnapshotMark | None = None
        """The newest whole mark in this round whose copies have been kept or given up, or None if
        there is none yet."""

    def note(self, node_id: str, said: SnapshotsHeld, held: HeldByNodes) -> None:
        """Record what a node holds, and move on to a newer mark if the current one is settled."""
        if said.carrier is None:
            self._carriers.pop(node_id, None)
        else:
            self._can_do_more |= self._carriers.get(node_id) != said.carrier
            self._carriers[node_id] = said.carrier
        if sources := self._orders.get(node_id):
            wanted = [one for source in sources for one in source.snapshots]
            if are_kept(wanted, said.snapshots):
                del self._orders[node_id]
            elif why := self._why_given_up(said):
                self._given_up[node_id] = why
                del self._orders[node_id]
        if not self._orders:
            self.settled = self._mark
            mark = held.whole_in_round
            if mark is not None and (mark != self._mark or self._can_do_more):
                self._begin(mark, held)

    def unsent(self) -> Iterator[tuple[str, KeepCopies]]:
        """Yield the orders that have not been sent yet, each with its node."""
        if self._mark is None:
            return
        for keeper, sources in self._orders.items():
            if keeper not in self._sent:
                yield keeper, KeepCopies(self._rdzv_id, self._run, self._mark, sources)

    def note_sent(self, keeper: str) -> None:
        """Record that a keeper has been sent its orders."""
        self._sent.add(keeper)

    def note_gone(self, node_id: str) -> None:
        """Record that a node's stream has ended."""
        self._sent.discard(node_id)

    def why_missing(self, node_id: str, mark: SnapshotMark) -> str:
        """Return why no other node has a copy of this node's part of the newest whole mark."""
        keeper = self._keepers.get(node_id)
        if mark.shards == 1 and len(self._participants) > 1:
            return "the other nodes have not saved it yet"
        if self._orders and self._mark is not None and self._mark != mark:
            return f"step {self._mark.step} is copied first"
        if keeper is None:
            return why_no_keeper(node_id, list(self._participants.values()), self._carriers)
        if keeper in self._given_up:
            return f"{keeper} keeps no copy: {self._given_up[keeper]}"
        return f"{keeper} is fetching a copy"

    def _begin(self, mark: SnapshotMark, held: HeldByNodes) -> None:
        self._mark, self._orders, self._sent, self._can_do_more = mark, {}, set(), False
        self._keepers, self._given_up = {}, {}
        able = {name: held.held_by(name) for name in self._participants if name in self._carriers}
        for order in orders(mark, list(self._participants.values()), able):
            source = self._source(order.source, order.snapshots)
            self._orders[order.keeper] = (*self._orders.get(order.keeper, ()), source)
            self._keepers[order.source] = order.keeper
        if not self._orders:
            self.settled = mark

    def _why_given_up(self, said: SnapshotsHeld) -> str:
        """Return why a node will not keep its copies of the current mark; empty if it still may."""
        missing = said.missing
        if missing is not None and missing.mark == self._mark and missing.reason:
            return missing.reason
        return "" if said.carrier else "it exchanges copies no longer; its log says why"

    def _source(self, node_id: str, snapshots: tuple[Snapshot, ...]) -> CopySource:
        carrier, address = self._carriers[node_id], self._participants[node_id].offer.address
        return CopySource(
            node_id, address, carrier.port, carrier.token, snapshots, carrier.fingerprint
        )

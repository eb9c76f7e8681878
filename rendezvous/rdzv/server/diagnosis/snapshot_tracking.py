"""Tracks the snapshots held by the nodes in live rounds, and the newest step that is whole.

Everything is kept in memory: nodes repeat what they hold after a reconnect and with each join, and
the joins decide what the next round loads. While a mark's copies are awaited, nodes overwrite
neither the newer nor the older snapshots, and newer marks wait to be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rdzv.core.events import SnapshotsSaved
from rdzv.core.model import Round, Snapshot, SnapshotMark, State
from rdzv.core.snapshots import (
    MAX_SOLE_HOLDERS,
    BlockedSaves,
    CopyCarrier,
    CopySource,
    HeldByNodes,
    NodeHolding,
    RemainingSnapshots,
    SnapshotsKnown,
    SoleHolder,
    are_kept,
    orders,
    why_no_keeper,
)
from rdzv.messages import Announcement, KeepCopies, SnapshotsHeld, SnapshotWatermark


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
        self._orders: dict[str, KeepCopies] = {}
        """The copies that each keeper still has to make of the current mark, by keeper."""
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

    def note(self, node_id: str, report: SnapshotsHeld, held: HeldByNodes) -> None:
        """Record what a node holds, and move on to a newer mark if the current one is settled."""
        if report.carrier is None:
            self._carriers.pop(node_id, None)
        else:
            self._can_do_more |= self._carriers.get(node_id) != report.carrier
            self._carriers[node_id] = report.carrier
        if order := self._orders.get(node_id):
            wanted = [one for source in order.sources for one in source.snapshots]
            if are_kept(wanted, report.snapshots):
                del self._orders[node_id]
            elif why := self._why_given_up(report):
                self._given_up[node_id] = why
                del self._orders[node_id]
        if not self._orders:
            self.settled = self._mark
            mark = held.whole_in_round
            if mark is not None and (mark != self._mark or self._can_do_more):
                self._begin(mark, held)

    def send_orders(self, send: Callable[[str, Announcement], bool]) -> None:
        for keeper, order in self._orders.items():
            if keeper not in self._sent and send(keeper, order):
                self._sent.add(keeper)

    def note_gone(self, node_id: str) -> None:
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
            known = self._orders.get(order.keeper)
            sources = (source,) if known is None else (*known.sources, source)
            self._orders[order.keeper] = KeepCopies(self._rdzv_id, self._run, mark, sources)
            self._keepers[order.source] = order.keeper
        if not self._orders:
            self.settled = mark

    def _why_given_up(self, report: SnapshotsHeld) -> str:
        """Return why a node will not keep its copies of the current mark; empty if it still may."""
        missing = report.missing
        if missing is not None and missing.mark == self._mark and missing.reason:
            return missing.reason
        return "" if report.carrier else "it exchanges copies no longer; its log says why"

    def _source(self, node_id: str, snapshots: tuple[Snapshot, ...]) -> CopySource:
        carrier, address = self._carriers[node_id], self._participants[node_id].offer.address
        return CopySource(
            node_id, address, carrier.port, carrier.token, snapshots, carrier.fingerprint
        )


@dataclass(slots=True)
class _Job:
    run: str
    round: Round
    held: HeldByNodes
    copying: Copying
    blocked: BlockedSaves
    whole_ms: int | None = None
    """When the newest mark became whole, or None if that was before the round."""
    given_up: SnapshotMark | None = None
    times: int = 0
    """How many marks became whole in the round, and how long saving them has stopped training."""
    stopped_us: int = 0

    @property
    def announced(self) -> SnapshotMark | None:
        """The newest mark that was announced to the nodes, by the round itself or during it."""
        return self.copying.settled or self.round.snapshot

    def note_blocked(self, node_id: str, report: SnapshotsHeld) -> None:
        """Give up the newest mark held if no rank can save and no whole mark awaits its copies."""
        self.blocked.note(node_id, report.snapshots)
        if self.announced is not None:
            self.blocked.advance(self.announced)
        if self.held.whole == self.announced and (mark := self.blocked.given_up()) is not None:
            self.given_up = mark
            self.blocked.advance(mark)

    def node_loss(self) -> RemainingSnapshots | None:
        """Return what would remain after the loss of one node, or None if this is not known."""
        mark = self.held.whole
        names = None if mark is None else self.held.sole_holders(mark)
        if mark is None or names is None:
            return None
        first = sorted(names)[:MAX_SOLE_HOLDERS]
        sole = (SoleHolder(name, self.copying.why_missing(name, mark)) for name in first)
        return RemainingSnapshots(self.held.whole_without_a_node(), tuple(sole), len(names))


class SnapshotTracking:
    """The snapshots of one server's jobs."""

    def __init__(
        self,
        send: Callable[[str, Announcement], bool],
        tell: Callable[[str, tuple[SnapshotsSaved, ...]], object],
    ) -> None:
        self._send, self._tell_history = send, tell
        self._jobs: dict[str, _Job] = {}
        self._told: dict[str, dict[str, tuple[int, SnapshotMark, SnapshotMark | None]]] = {}
        """The round, mark and given-up mark that were last sent on each node's stream, by node_id
        and rdzv_id."""

    def note(self, state: State, node_id: str, report: SnapshotsHeld, now_ms: int) -> None:
        """Record the snapshots that a participant holds.

        Once copying of a newer whole mark is settled, or a mark is given up, the mark is sent to
        all participants.
        """
        job = self._job(state)
        if job.held.note(node_id, report.snapshots) and job.held.whole is not None:
            job.whole_ms = now_ms
            job.times += 1
            job.stopped_us += job.held.stopped_us(job.held.whole)
        before = job.announced, job.given_up
        job.copying.note(node_id, report, job.held)
        job.note_blocked(node_id, report)
        job.copying.send_orders(self._send)
        news = (job.announced, job.given_up) != before
        for participant in state.seats if news else (node_id,):
            self._tell(participant, report.rdzv_id, job)

    def note_gone(self, node_id: str) -> None:
        self._told.pop(node_id, None)
        for job in self._jobs.values():
            job.copying.note_gone(node_id)

    def tidy(self, state: State) -> None:
        membership = state.membership
        if (job := self._jobs.get(membership.rdzv_id)) is None:
            return
        if membership.ended is not None or membership.run != job.run:
            del self._jobs[membership.rdzv_id]
        elif job.times and not membership.is_live(job.run, job.round.number):
            stopped_ms = round(job.stopped_us / 1000)
            saved = SnapshotsSaved(job.round.number, job.times, stopped_ms)
            job.times = 0
            self._tell_history(membership.rdzv_id, (saved,))

    def shown(self, state: State) -> SnapshotsKnown:
        """Return what is known about a job's snapshots, which is nothing once the job has ended."""
        membership, round_ = state.membership, state.membership.round
        if round_ is None or membership.ended is not None:
            return SnapshotsKnown()
        job = self._jobs.get(membership.rdzv_id)
        if job is None or (job.run, job.round.number) != (membership.run, round_.number):
            return SnapshotsKnown(round_.snapshot, round_.at_ms)
        since_ms = round_.at_ms if job.whole_ms is None else job.whole_ms
        names = (participant.node_id for participant in round_.participants)
        held = {node_id: job.held.held_by(node_id) for node_id in names}
        sizes = {
            node_id: NodeHolding(len(all_), sum(one.bytes for one in all_))
            for node_id, all_ in held.items()
            if all_
        }
        return SnapshotsKnown(job.held.whole, since_ms, sizes, job.node_loss())

    def _job(self, state: State) -> _Job:
        membership, round_ = state.membership, state.membership.live_round
        assert round_ is not None
        job = self._jobs.get(membership.rdzv_id)
        if job is None or not membership.is_live(job.run, job.round.number):
            before = job.held if job is not None and job.run == membership.run else None
            held = HeldByNodes(round_, before)
            whole_ms = None if held.whole == round_.snapshot else round_.at_ms
            copying = Copying(membership.rdzv_id, membership.run, round_)
            names = (one.node_id for one in round_.participants)
            blocked = BlockedSaves(names, round_.snapshot)
            job = _Job(membership.run, round_, held, copying, blocked, whole_ms)
            self._jobs[membership.rdzv_id] = job
        return job

    def _tell(self, node_id: str, rdzv_id: str, job: _Job) -> None:
        """Send a node the newest mark settled or given up in this round, unless already sent."""
        mark, given_up = job.announced, job.given_up
        if mark is None or (job.copying.settled is None and given_up is None):
            return
        announced = self._told.setdefault(node_id, {})
        news = job.round.number, mark, given_up
        if announced.get(rdzv_id) == news:
            return
        whole = SnapshotWatermark(rdzv_id, job.run, mark, job.whole_ms or 0, given_up)
        if self._send(node_id, whole):
            announced[rdzv_id] = news

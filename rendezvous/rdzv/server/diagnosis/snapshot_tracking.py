"""Tracks the snapshots that nodes of live rounds hold, and the newest step that is whole.

Everything is kept in memory: nodes repeat what they hold after a reconnect and with each join; the
joins decide what the next round loads. When a newer mark has become whole, it is sent to the nodes:
they keep their snapshots of it, and may overwrite older ones. If nodes keep copies for each other,
the mark is sent only once its copies are kept or given up; until then, nodes overwrite neither the
newer nor the older snapshots (`snapshot_copying`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rdzv.core.model import SnapshotMark, State
from rdzv.core.snapshots import (
    MAX_SOLE_HOLDERS,
    HeldByNodes,
    NodeHolding,
    NodeLoss,
    SnapshotsKnown,
    SoleHolder,
)
from rdzv.server.diagnosis.snapshot_copying import Copying
from rdzv.server.messages import Announcement, SnapshotsHeld, SnapshotWatermark


@dataclass(slots=True)
class _Job:
    """What is known about one live round."""

    run: str
    round: int
    held: HeldByNodes
    copying: Copying
    whole_ms: int | None = None
    """When the newest mark became whole; None if that was before the round."""

    def node_loss(self) -> NodeLoss | None:
        """Return what would remain after the loss of one node; None if that is not known."""
        mark = self.held.whole
        names = None if mark is None else self.held.sole_holders(mark)
        if mark is None or names is None:
            return None
        first = sorted(names)[:MAX_SOLE_HOLDERS]
        sole = (SoleHolder(name, self.copying.why_missing(name, mark)) for name in first)
        return NodeLoss(self.held.whole_without_a_node(), tuple(sole), len(names))


class SnapshotTracking:
    """The snapshots of one server's jobs."""

    def __init__(self, send: Callable[[str, Announcement], bool]) -> None:
        """`send` sends a message to a node, and returns whether the node has a stream."""
        self._send = send
        self._jobs: dict[str, _Job] = {}
        self._told: dict[str, dict[str, SnapshotMark]] = {}
        """By node_id and rdzv_id: the last mark that was sent on the node's stream."""

    def note(
        self, state: State, node_id: str, incarnation: int, said: SnapshotsHeld, now_ms: int
    ) -> bool:
        """Note the snapshots that a participant holds; return whether they were noted.

        A report is ignored if no round of its run is live, or if the node has no seat. If copying
        of a newer whole mark is settled, the mark is sent to all participants.
        """
        membership, seat = state.membership, state.seats.get(node_id)
        if membership.live_round is None or said.run != membership.run:
            return False
        if seat is None or seat.incarnation != incarnation:
            return False
        job = self._job(state)
        if job.held.note(node_id, said.snapshots):
            job.whole_ms = now_ms
        settled = job.copying.settled
        job.copying.note(node_id, said, job.held)
        for keeper, order in job.copying.unsent():
            if self._send(keeper, order):
                job.copying.note_sent(keeper)
        for participant in state.seats if job.copying.settled != settled else (node_id,):
            self._tell(participant, said.rdzv_id, job)
        return True

    def note_gone(self, node_id: str) -> None:
        """Forget what was sent on a node's stream, which has ended."""
        self._told.pop(node_id, None)
        for job in self._jobs.values():
            job.copying.note_gone(node_id)

    def tidy(self, state: State) -> None:
        """Forget what is known about a job's run if it is over."""
        membership = state.membership
        job = self._jobs.get(membership.rdzv_id)
        if job is not None and (membership.ended is not None or membership.run != job.run):
            del self._jobs[membership.rdzv_id]

    def shown(self, state: State) -> SnapshotsKnown:
        """Return what is known about a job's snapshots; nothing once the job has ended."""
        membership, round_ = state.membership, state.membership.round
        if round_ is None or membership.ended is not None:
            return SnapshotsKnown()
        job = self._jobs.get(membership.rdzv_id)
        if job is None or (job.run, job.round) != (membership.run, round_.number):
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
        if job is None or not membership.is_live(job.run, job.round):
            before = job.held if job is not None and job.run == membership.run else None
            held = HeldByNodes(round_, before)
            whole_ms = None if held.whole == round_.snapshot else round_.at_ms
            copying = Copying(membership.rdzv_id, membership.run, round_)
            job = _Job(membership.run, round_.number, held, copying, whole_ms)
            self._jobs[membership.rdzv_id] = job
        return job

    def _tell(self, node_id: str, rdzv_id: str, job: _Job) -> None:
        """Send a node the newest mark settled in this round, unless it was sent already."""
        mark = job.copying.settled
        told = self._told.setdefault(node_id, {})
        if mark is None or told.get(rdzv_id) == mark:
            return
        if self._send(node_id, SnapshotWatermark(rdzv_id, job.run, mark, job.whole_ms or 0)):
            told[rdzv_id] = mark

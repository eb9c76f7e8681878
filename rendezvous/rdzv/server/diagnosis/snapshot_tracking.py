"""What the nodes of live rounds hold of each job's state, and the newest step that is whole.

In memory: nodes repeat what they hold after a reconnect, and with each join, by which the next
round decides. Nodes are sent each newer mark that has become whole: they keep their snapshots of
it, and may overwrite older ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rdzv.core.model import SnapshotMark, State
from rdzv.core.snapshots import HeldByNodes
from rdzv.server.messages import Announcement, SnapshotsHeld, SnapshotWatermark
from rdzv.structs import struct


@struct(frozen=True)
class Held:
    """How many snapshots of a job's state a node holds, and their size."""

    snapshots: int
    bytes: int


@dataclass(slots=True)
class _Job:
    """What is known of one live round."""

    run: str
    round: int
    held: HeldByNodes
    whole_ms: int | None = None
    """When the newest mark became whole; None if that was before the round."""


class SnapshotTracking:
    """The snapshots of one server's jobs."""

    def __init__(self, send: Callable[[str, Announcement], bool]) -> None:
        """`send` sends to a node, and returns whether it has a stream."""
        self._send = send
        self._jobs: dict[str, _Job] = {}
        self._told: dict[str, dict[str, SnapshotMark]] = {}
        """By node_id and rdzv_id: the last mark that was sent on the node's stream."""

    def note(
        self, state: State, node_id: str, incarnation: int, said: SnapshotsHeld, now_ms: int
    ) -> bool:
        """Note what a participant of the live round holds; return whether it is the present one.

        If a newer mark has become whole, all participants are sent it.
        """
        membership, seat = state.membership, state.seats.get(node_id)
        if membership.live_round is None or said.run != membership.run:
            return False
        if seat is None or seat.incarnation != incarnation:
            return False
        job = self._job(state)
        if job.held.note(node_id, said.snapshots):
            job.whole_ms = now_ms
            for participant in state.seats:
                self._tell(participant, said.rdzv_id, job)
        else:
            self._tell(node_id, said.rdzv_id, job)
        return True

    def note_gone(self, node_id: str) -> None:
        """Forget what was sent on a node's stream, which has ended."""
        self._told.pop(node_id, None)

    def tidy(self, state: State) -> None:
        """Forget a run that is over."""
        membership = state.membership
        job = self._jobs.get(membership.rdzv_id)
        if job is not None and (membership.ended is not None or membership.run != job.run):
            del self._jobs[membership.rdzv_id]

    def whole(self, state: State) -> tuple[SnapshotMark, int] | None:
        """Return the newest whole mark of a job and since when it has been; None: there is none."""
        round_ = state.membership.round
        if round_ is None or state.membership.ended is not None:
            return None
        job = self._jobs.get(state.membership.rdzv_id)
        known = job is not None and (job.run, job.round) == (state.membership.run, round_.number)
        mark = job.held.whole if known and job is not None else round_.snapshot
        since_ms = job.whole_ms if known and job is not None else None
        return None if mark is None else (mark, round_.at_ms if since_ms is None else since_ms)

    def held(self, state: State, node_id: str) -> Held:
        """Return what a node has reported to hold."""
        job = self._jobs.get(state.membership.rdzv_id)
        snapshots = () if job is None else job.held.held_by(node_id)
        return Held(len(snapshots), sum(one.bytes for one in snapshots))

    def _job(self, state: State) -> _Job:
        membership, round_ = state.membership, state.membership.live_round
        assert round_ is not None
        job = self._jobs.get(membership.rdzv_id)
        if job is None or not membership.is_live(job.run, job.round):
            before = job.held if job is not None and job.run == membership.run else None
            held = HeldByNodes(round_, before)
            whole_ms = None if held.whole == round_.snapshot else round_.at_ms
            job = _Job(membership.run, round_.number, held, whole_ms)
            self._jobs[membership.rdzv_id] = job
        return job

    def _tell(self, node_id: str, rdzv_id: str, job: _Job) -> None:
        """Send a node the newest mark that became whole in this round, unless it has it."""
        mark = job.held.whole
        told = self._told.setdefault(node_id, {})
        if mark is None or job.whole_ms is None or told.get(rdzv_id) == mark:
            return
        if self._send(node_id, SnapshotWatermark(rdzv_id, job.run, mark)):
            told[rdzv_id] = mark

"""The snapshots that a node holds, and the mark of the newest step that is whole in all ranks."""

from __future__ import annotations

from rdzv.agent.core.commands import AnnounceWatermark, FetchCopies, SaySnapshots
from rdzv.agent.core.draft import Draft
from rdzv.agent.core.events import CopiesWanted, SnapshotsHeld, SnapshotWatermark
from rdzv.agent.core.model import AgentState, Phase
from rdzv.agent.core.stopping import rejoin
from rdzv.structs import replace


def note_snapshots(work: Draft, event: SnapshotsHeld) -> None:
    """Report the snapshots held here. A node waiting for a round repeats its join instead."""
    before = work.state
    work.state = state = replace(
        before, snapshots=event.snapshots, carrier=event.carrier, missing_copies=event.missing
    )
    if state == before or state.is_ending:
        return
    if state.phase is not Phase.JOINING:
        work.do(snapshots_held(state))
    elif state.snapshots != before.snapshots and not state.ending_kept:
        work.do(rejoin(state))


def snapshots_held(state: AgentState) -> SaySnapshots:
    """Return the report of the snapshots that this node holds."""
    return SaySnapshots(state.run, state.snapshots, state.carrier, state.missing_copies)


def apply_to_snapshots(work: Draft, event: SnapshotWatermark | CopiesWanted) -> None:
    """Announce a newer mark to the workers, or fetch copies.

    Within a round the mark never goes back, even if the server changes.
    """
    state = work.state
    if event.run != state.run:
        return
    if isinstance(event, CopiesWanted):
        # No newer mark is announced to the others before the copies are kept or given up.
        if state.phase in (Phase.RUNNING, Phase.SUCCEEDED):
            work.do(FetchCopies(event.mark, event.sources))
    elif _is_newer(event, state):
        work.state = replace(state, watermark=event.mark, given_up=event.given_up)
        work.do(AnnounceWatermark(event.mark, event.whole_ms, event.given_up))


def _is_newer(event: SnapshotWatermark, state: AgentState) -> bool:
    """Return whether an announcement has a newer whole mark, or gives up newer snapshots.

    A server that does not know what was announced in this round announces it again.
    """
    if state.watermark is None or event.mark > state.watermark:
        return True
    if event.mark < state.watermark or event.given_up is None:
        return False
    return state.given_up is None or event.given_up > state.given_up

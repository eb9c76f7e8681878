"""What a node tells a server that it finds, or of its snapshots; how long it waits for a server."""

from __future__ import annotations

from rdzv.agent.core.commands import Work
from rdzv.agent.core.events import ServerLost, SnapshotsChanged
from rdzv.agent.core.model import (
    EXIT_FAILED,
    EXIT_SUCCESS,
    EXIT_TRY_AGAIN,
    AgentState,
    Outcome,
    Phase,
)
from rdzv.agent.core.stopping import rejoin
from rdzv.core.commands import ReportStoreHost, ReportStuck
from rdzv.messages import KeepCopies, SnapshotsHeld, SnapshotWatermark
from rdzv.structs import replace


def note_server_found(work: Work) -> None:
    """Repeat messages that the belief does not contain, as an earlier stream may have lost them."""
    state = work.state
    work.state = replace(state, disconnected_since_ms=None)
    if state.assignment is None:
        return
    if (state.snapshots or state.carrier) and state.phase is not Phase.JOINING:
        # A waiting node's join already contains them.
        work.do(snapshots_held(state))
    if state.stuck_pids and state.has_workers:
        work.do(ReportStuck(*state.speaker, state.run, state.assignment.round, state.stuck_pids))
    if state.store_host_failed and (state.phase.needs_store or state.phase is Phase.STOPPING):
        run, round_, reason = state.run, state.assignment.round, state.store_host_failed
        work.do(ReportStoreHost(*state.speaker, run, round_, reason))


def note_server_lost(work: Work, event: ServerLost) -> None:
    since_ms = work.state.disconnected_since_ms
    work.state = replace(
        work.state,
        disconnected_since_ms=work.now_ms if since_ms is None else since_ms,
        disconnected_reason=event.reason,
    )


def server_due_ms(state: AgentState) -> int | None:
    """Return when a node without workers gives up on an absent server."""
    since_ms = state.disconnected_since_ms
    if since_ms is None or not state.workers_gone or state.phase is Phase.ENDED:
        return None
    if state.is_ending:
        return None  # It is only waiting for the parked workers to end.
    if state.assignment is None:
        # A server that accepts the stream and then refuses the node does not put the end off.
        since_ms = since_ms if state.run else state.idle_since_ms
        return since_ms + state.job.settings.join_timeout_ms
    return max(since_ms, state.idle_since_ms) + state.job.server_timeout_ms


def without_server(state: AgentState) -> Outcome:
    """Return the outcome as indicated by this node's own workers, as nothing else is known."""
    if state.assignment is None:
        seconds = state.job.settings.join_timeout_ms / 1000
        text = f"no server admitted this node within {seconds:g} s: {state.disconnected_reason}"
        return Outcome(EXIT_TRY_AGAIN, text)
    seconds = state.job.server_timeout_ms / 1000
    why = state.disconnected_reason
    text = f"no server for {seconds:g} s ({why}); judging by this node's own workers"
    if state.phase is Phase.SUCCEEDED:
        return Outcome(EXIT_SUCCESS, f"{text}: all exited 0")
    # A suspect may have been affected by a peer's death.
    own = [failure for failure in state.failures if not failure.suspect]
    if own:
        return Outcome(EXIT_FAILED, f"{text}: {own[0].message}")
    if state.fenced:
        return Outcome(EXIT_TRY_AGAIN, f"{text}: they were killed because of --fence-after")
    return Outcome(EXIT_TRY_AGAIN, f"{text}: they were stopped for a new round that never came")


def note_snapshots(work: Work, event: SnapshotsChanged) -> None:
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


def snapshots_held(state: AgentState) -> SnapshotsHeld:
    return SnapshotsHeld(
        state.job.rdzv_id, state.run, state.snapshots, state.carrier, state.missing_copies
    )


def apply_to_snapshots(work: Work, event: SnapshotWatermark | KeepCopies) -> None:
    """Announce a newer mark to the workers, or fetch copies."""
    state = work.state
    if event.run != state.run:
        return
    if isinstance(event, KeepCopies):
        # No newer mark is announced to the others before the copies are kept or given up.
        if state.phase in (Phase.RUNNING, Phase.SUCCEEDED):
            work.do(event)
    elif _is_newer(event, state):
        work.state = replace(state, watermark=event.mark, given_up=event.given_up)
        work.do(event)


def _is_newer(event: SnapshotWatermark, state: AgentState) -> bool:
    """A server that does not know what was announced in this round announces it again."""
    if state.watermark is None or event.mark > state.watermark:
        return True
    if event.mark < state.watermark or event.given_up is None:
        return False
    return state.given_up is None or event.given_up > state.given_up

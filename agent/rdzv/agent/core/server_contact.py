"""What a node repeats to a server that it finds, and how long it waits for one that it lost."""

from __future__ import annotations

from rdzv.agent.core.commands import SayStoreHostFailed, SayStuck
from rdzv.agent.core.draft import Draft
from rdzv.agent.core.events import ServerLost
from rdzv.agent.core.exit_codes import EXIT_FAILED, EXIT_SUCCESS, EXIT_TRY_AGAIN
from rdzv.agent.core.model import AgentState, Outcome, Phase
from rdzv.agent.core.snapshot_marks import snapshots_held
from rdzv.structs import replace


def note_server_found(work: Draft) -> None:
    """Repeat messages that the belief does not contain, as an earlier stream may have lost them."""
    state = work.state
    work.state = replace(state, disconnected_since_ms=None)
    if state.assignment is None:
        return
    if (state.snapshots or state.carrier) and state.phase is not Phase.JOINING:
        # A waiting node's join already contains them.
        work.do(snapshots_held(state))
    if state.stuck_pids and state.has_workers:
        work.do(SayStuck(state.run, state.assignment.round, state.stuck_pids))
    if state.store_host_failed and (state.phase.needs_store or state.phase is Phase.STOPPING):
        work.do(SayStoreHostFailed(state.run, state.assignment.round, state.store_host_failed))


def note_server_lost(work: Draft, event: ServerLost) -> None:
    """Remember since when there is no connection to a server, and why."""
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

"""When a node that waits for a seat starts its workers in advance, and what becomes of them.

They are started once all nodes of the running round have shown that the workers of this script call
a function under @elastic, and so never begin to train without a rank. All workers of the node are
parked there, or it has no standby.
"""

from __future__ import annotations

from rdzv import messages
from rdzv.agent.core import events
from rdzv.agent.core.commands import StartStandby, Work
from rdzv.agent.core.model import AgentState, JobTerms, Phase
from rdzv.agent.core.stopping import end_kept, rejoin
from rdzv.core.model import NO_STANDBY, Assignment, Standby, StandbyState
from rdzv.structs import replace

HOT = "hot"
AGAIN_MS = 60_000
"""How long after the end of one that had parked they are started again."""


def has_hot_standby(job: JobTerms) -> bool:
    return job.standby == HOT and job.keep_timeout_ms > 0


def note_joined(work: Work, joined: messages.Joined) -> None:
    """Start standbys, or end outdated ones, which are started anew with the next `Joined`."""
    if work.state.phase is not Phase.JOINING:
        return
    state = work.state = replace(work.state, run=joined.run)
    standby = state.standby
    if not joined.script or state.is_ending or state.ending_kept or not state.workers_gone:
        return
    same = state.standby_of == (joined.script, joined.renewed)
    if same and (standby.state is not StandbyState.COLD or standby.why):
        return
    if standby.state in (StandbyState.STARTING, StandbyState.READY):
        end_kept(work)
        return
    if state.kept:
        # Others have gone on without them, so no later round can keep them.
        if has_hot_standby(state.job):
            end_kept(work)
        return
    standby = Standby(StandbyState.STARTING)
    if not has_hot_standby(state.job):
        why = f"--standby={state.job.standby}" if state.job.standby != HOT else "--keep-timeout=0"
        standby = Standby(StandbyState.OFF, why)
    of = (joined.script, joined.renewed)
    work.state = replace(state, standby=standby, standby_of=of)
    if standby.state is StandbyState.STARTING:
        work.do(StartStandby(joined.script))
    work.do(rejoin(work.state))


def note_settled(work: Work, event: events.StandbySettled) -> None:
    state = work.state
    if state.standby.state is StandbyState.COLD or state.ending_kept:
        return
    kept = event.kept if state.phase is Phase.JOINING else state.kept
    work.state = replace(state, standby=event.standby, kept=kept)
    if state.phase is Phase.JOINING and work.state != state:
        work.do(rejoin(work.state))


def note_exit(work: Work, event: events.KeptExited) -> None:
    """End the others of a standby that has lost one of its workers."""
    how = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
    why = f"local_rank {event.local_rank} had parked, and ended with {how}"
    again_ms = work.now_ms + AGAIN_MS
    work.state = replace(work.state, standby=Standby(why=why), standby_again_ms=again_ms)
    end_kept(work)
    work.do(rejoin(work.state))  # The node is not to be chosen for it any more.


def again_due_ms(state: AgentState) -> int | None:
    waits = state.phase is Phase.JOINING and not state.has_workers and not state.is_ending
    return state.standby_again_ms if waits else None


def begin_again(work: Work) -> None:
    """Ask for the `Joined` with which they are started."""
    work.state = replace(work.state, standby_of=("", 0), standby_again_ms=None)
    work.do(rejoin(work.state))


def seated(state: AgentState, assignment: Assignment) -> Standby:
    """Return the standby that a node has in a round: none if it is older than the script."""
    outdated = state.ending_kept or state.standby_of[1] < assignment.renewed
    return NO_STANDBY if outdated else state.standby


def after_round(state: AgentState) -> Standby:
    starts = state.standby.state is StandbyState.STARTING
    return state.standby if starts else NO_STANDBY

"""One job on one node: turns events into commands.

`step()` is pure. Its messages to the server need no response: after a reconnect, the node's
`Belief` (the state itself) is sent in full, so losing a message along with its stream does no harm.
"""

from __future__ import annotations

from rdzv import messages
from rdzv.agent.core import drain_notice, events, server_contact, standbys
from rdzv.agent.core.commands import (
    Command,
    EndKept,
    StartWorkers,
    StopWorkers,
    Work,
)
from rdzv.agent.core.model import (
    EXIT_DENIED,
    EXIT_FAILED,
    EXIT_NO_PROGRESS,
    EXIT_SUCCESS,
    EXIT_TRY_AGAIN,
    EXIT_USAGE,
    AgentState,
    JobTerms,
    Leaving,
    Outcome,
    Phase,
)
from rdzv.agent.core.stopping import (
    conclude,
    end_kept,
    finish,
    joins_anew,
    leave,
    rejoin,
    said_leave,
    stop,
)
from rdzv.core.commands import Fail, ReportStoreHost, ReportStuck, Succeed
from rdzv.core.model import NO_STANDBY, UNMOVED, Assignment, LeaveCause, Result, StandbyState
from rdzv.core.root_cause import is_odd_replica
from rdzv.structs import replace, struct

_RESUME_LEAST_MS = 600_000
"""The minimum time that kept workers wait in a new round for others to start."""

_OVER_FOR_THIS_NODE = ("RendezvousClosedError", "NodeSupersededError")
"""Refusals that end even running workers, because they mean that the node has lost its place."""

_DENIED = ("DeniedError", "UnauthenticatedError")
"""Refusals of the caller rather than of the request."""


@struct(frozen=True)
class Decision:
    """The next state, the commands in order, and the latest time for the next tick."""

    state: AgentState
    commands: tuple[Command, ...] = ()
    wake_at_ms: int | None = None


def begin(job: JobTerms, now_ms: int, run: str = "") -> AgentState:
    return AgentState(
        job, run=run, placed=bool(run), idle_since_ms=now_ms, disconnected_since_ms=now_ms
    )


def step(state: AgentState, event: events.Event, now_ms: int) -> Decision:
    """Apply one event and decide what follows from it.

    Guarantees: a round's workers are started once, and only when every worker of earlier rounds is
    gone or parked. Running workers are stopped only because of their own failure, a signal to this
    agent, or an explicit message from the server about this run and round. After the end, events
    have no effect.
    """
    work = Work(state, now_ms)
    if state.phase is not Phase.ENDED:
        _apply(work, event)
        _check_deadlines(work)
    return Decision(work.state, tuple(work.commands), _wake_at_ms(work.state))


def _apply(work: Work, event: events.Event) -> None:
    match event:
        case events.ServerConnected():
            server_contact.note_server_found(work)
        case events.ServerLost():
            server_contact.note_server_lost(work, event)
        case messages.Joined():
            standbys.note_joined(work, event)
        case Assignment():
            _start(work, event)
        case messages.RoundOver():
            _end_round(work, event)
        case messages.Closed():
            _close(work, event)
        case messages.Refused():
            _accept_refusal(work, event)
        case events.Unhealthy():
            _record_unhealthy(work, event)
        case (
            events.WorkerExited()
            | events.WorkerSuspected()
            | events.WorkersGone()
            | events.WorkersStuck()
            | events.Fenced()
            | events.StartFailed()
        ):
            _apply_to_workers(work, event)
        case events.WorkerResumed():
            _record_resumed(work, event)
        case events.KeptExited():
            _note_kept_exit(work, event)
        case events.KeptGone():
            _note_kept_gone(work)
        case events.StandbySettled():
            standbys.note_settled(work, event)
        case events.SnapshotsChanged():
            server_contact.note_snapshots(work, event)
        case messages.SnapshotWatermark() | messages.KeepCopies():
            server_contact.apply_to_snapshots(work, event)
        case events.StoreHostReady():
            if _is_current(work.state, event.round):
                work.state = replace(work.state, store_host_due_ms=None)
        case events.StoreHostExited():
            if _is_current(work.state, event.round):
                _fail_store_host(work, event.reason)
        case events.RunnerLost():
            _lose_runner(work, event)
        case events.Signalled():
            _leave_by_signal(work, event)
        case messages.Withdrawn():
            _withdraw(work, event)
        case events.NoticeGiven():
            drain_notice.give_drain_notice(work, event)
        case events.NoticeLifted():
            drain_notice.lift_drain_notice(work)
        case events.Ticked():
            pass


# ------------------------------------------------------------------ the server


def _start(work: Work, assignment: Assignment) -> None:
    """Start the workers of a new round, ignoring a round that is stale or already known."""
    state = work.state
    stale = state.left_round is not None and assignment.round <= state.left_round
    if state.phase is not Phase.JOINING or stale or (state.run and assignment.run != state.run):
        return
    if state.outcome is not None:
        return  # It is only waiting for the parked workers to end.
    parked = () if state.ending_kept else tuple(worker.local_rank for worker in state.kept)
    assignment = replace(assignment, kept=tuple(n for n in assignment.kept if n in parked))
    due_ms = work.now_ms + state.job.store_host_timeout_ms
    work.state = replace(
        state,
        phase=Phase.RUNNING,
        run=assignment.run,
        assignment=assignment,
        alive=frozenset(range(state.job.local_world_size)),
        workers_gone=False,
        kept=(),
        standby=standbys.seated(state, assignment),
        resuming=tuple(one for one in state.kept if one.local_rank in assignment.kept),
        resume_due_ms=work.now_ms + resume_ms(state.job),
        # This may go back, because kept workers may redo the last step.
        watermark=assignment.snapshot,
        given_up=None,
        ending_kept=False,
        failures=(),
        finished=(),
        moved=UNMOVED,
        stopping_since_ms=None,
        stuck_pids=(),
        fenced=False,
        store_host_due_ms=due_ms if assignment.hosts_store else None,
        store_host_failed="",
    )
    work.do(StartWorkers(assignment))
    if assignment.snapshot is not None and assignment.snapshot != state.watermark:
        work.do(messages.SnapshotWatermark(assignment.rdzv_id, assignment.run, assignment.snapshot))


def _end_round(work: Work, event: messages.RoundOver) -> None:
    if event.run != work.state.run:
        return
    if work.state.phase is Phase.JOINING:
        _give_back_seat(work, event.round)
    elif not _is_current(work.state, event.round):
        return
    elif work.state.phase is Phase.RUNNING:
        job, notice = work.state.job, work.state.notice
        if notice is not None and notice.due_ms is not None:
            # After the notice, workers may be saving, which a broken collective does not prevent.
            leave(work, notice.leaving, drain_notice.notice_grace_ms(work), signum=None)
            return
        grace_ms = job.failure_stop_timeout_ms if event.end.broken else job.shutdown_timeout_ms
        stop(work, grace_ms, keep=event.end.keep, not_kept=event.culprits)
    elif work.state.phase is Phase.SUCCEEDED:
        work.state = replace(work.state, phase=Phase.STOPPING)
        if work.state.workers_gone:
            conclude(work)


def _give_back_seat(work: Work, round_: int) -> None:
    """Give back the seat in a round whose completion never arrived, so no workers were started."""
    state = work.state
    if state.left_round is None or state.left_round < round_:
        work.state = replace(
            state, left_round=round_, failures=(), finished=(), moved=UNMOVED, fenced=False
        )
        if state.kept and state.standby.state is not StandbyState.READY:
            # They took part in a round before that one, so no later round can keep them.
            end_kept(work)
        work.do(rejoin(work.state))


def _close(work: Work, event: messages.Closed) -> None:
    if event.run != work.state.run:
        return
    ended = event.ended
    if ended.result is Result.SUCCEEDED:
        exit_code = EXIT_SUCCESS
    else:
        exit_code = EXIT_TRY_AGAIN if ended.retry_sensible else EXIT_FAILED
        exit_code = EXIT_NO_PROGRESS if ended.no_progress else exit_code
    node_id, kept = work.state.job.node_id, {worker.local_rank for worker in work.state.kept}
    charged = {failure.local_rank for failure in ended.failures if failure.node_id == node_id}
    text = f"the job has {ended.result}: {ended.reason}"
    if ended.result is Result.STOPPED:
        text = f"the job was stopped: {ended.reason}"
    anew = joins_anew(work.state, ended)
    outcome = Outcome(exit_code, text, ended.failures, ended.result, joins_anew=anew)
    finish(work, outcome, charged=tuple(sorted(charged & kept)))


def _accept_refusal(work: Work, event: messages.Refused) -> None:
    """Accept a refusal as final for a node that wants a place, as repeating changes nothing.

    Workers continue unless it means that they have no place; then the node asks again.
    """
    if work.state.phase is not Phase.JOINING and event.code not in _OVER_FOR_THIS_NODE:
        return
    exit_code = EXIT_FAILED
    if event.code in _DENIED:
        exit_code = EXIT_DENIED
    elif work.state.assignment is None and event.code != "RendezvousClosedError":
        # The launch settings are wrong.
        exit_code = EXIT_USAGE
    finish(work, Outcome(exit_code, event.message))


# ------------------------------------------------------------------ the workers


def _apply_to_workers(
    work: Work,
    event: events.WorkerExited
    | events.WorkerSuspected
    | events.WorkersGone
    | events.WorkersStuck
    | events.Fenced
    | events.StartFailed,
) -> None:
    if not _is_current(work.state, event.round) or not work.state.has_workers:
        return
    if work.state.workers_gone and not isinstance(event, events.WorkersStuck):
        return
    match event:
        case events.WorkerExited():
            _note_exit(work, event)
        case events.WorkerSuspected():
            _record_suspect(work, event)
        case events.WorkersGone():
            work.state = replace(
                work.state,
                workers_gone=True,
                alive=frozenset(),
                idle_since_ms=work.now_ms,
                moved=event.moved,
                kept=event.kept,
                standby=standbys.after_round(work.state),
            )
            if work.state.phase is not Phase.SUCCEEDED or work.state.outcome is not None:
                conclude(work)
        case events.WorkersStuck():
            work.state = replace(work.state, stuck_pids=event.pids)
            work.do(ReportStuck(*work.state.speaker, work.state.run, event.round, event.pids))
        case events.Fenced():
            _record_fence(work, event)
        case events.StartFailed():
            leaving = Leaving(LeaveCause.START_FAILED, event.reason, EXIT_FAILED)
            leave(work, leaving, grace_ms=0, signum=None)


def _is_current(state: AgentState, round_: int) -> bool:
    return state.assignment is not None and state.assignment.round == round_


def _note_exit(work: Work, event: events.WorkerExited) -> None:
    state = work.state
    if event.local_rank not in state.alive:
        return
    work.state = replace(state, alive=state.alive - {event.local_rank})
    if state.phase is Phase.RUNNING and drain_notice.follows_notice(work, event):
        drain_notice.leave_with_workers(work, event)
    elif event.exit_code != 0:
        _note_failure(work, event)
    elif state.phase is Phase.RUNNING:
        finished = events.ended_worker(event, state.assignment, work.now_ms)
        work.state = replace(work.state, finished=(*state.finished, finished))
        if not work.state.alive:
            _succeed(work)


def _note_failure(work: Work, event: events.WorkerExited | events.WorkerSuspected) -> None:
    """Record a worker that failed by itself. A worker that the agent stopped has not failed.

    A suspect may end the round before the exit that broke its collective is detected. So an exit
    still counts if nothing sent to the worker explains it; the join reports it before the server
    charges the end of the round. A node with an odd replica leaves, and thus reports it at once.
    """
    state = work.state
    failure = events.ended_worker(event, state.assignment, work.now_ms)
    by_itself = isinstance(event, events.WorkerExited) and event.by_itself
    stopping = state.stopping_since_ms is not None and failure.at_ms >= state.stopping_since_ms
    if stopping and not by_itself:
        return
    work.state = replace(state, failures=(*state.failures, failure))
    is_odd = is_odd_replica(failure)
    if state.phase is Phase.RUNNING or is_odd:
        work.do(Fail(*state.speaker, state.run, event.round, work.state.evidence))
    if state.phase is Phase.RUNNING:
        stop(work, state.job.failure_stop_timeout_ms, keep=True)
    if is_odd:
        _record_unhealthy(work, events.Unhealthy(event.round, failure.message.partition(": ")[2]))


def _record_suspect(work: Work, event: events.WorkerSuspected) -> None:
    """Record a broken collective, which may be a peer's fault. Its worker parks by itself."""
    state = work.state
    if event.local_rank not in state.alive:
        return
    if state.phase is Phase.RUNNING and drain_notice.follows_notice(work, event):
        assert state.notice is not None
        leave(work, state.notice.leaving, drain_notice.notice_grace_ms(work), signum=None)
    else:
        _note_failure(work, event)


def _record_fence(work: Work, event: events.Fenced) -> None:
    """This is no worker failure. If all have succeeded, only leftover processes are killed."""
    state = work.state
    if state.phase is Phase.SUCCEEDED:
        return
    since_ms = state.stopping_since_ms
    since_ms = event.at_ms if since_ms is None else min(since_ms, event.at_ms)
    running = state.phase is Phase.RUNNING
    phase = Phase.STOPPING if running else state.phase
    fenced = running or state.fenced
    work.state = replace(state, phase=phase, stopping_since_ms=since_ms, fenced=fenced)


def rejoins_after_failure(state: AgentState, round_: int) -> bool:
    """Return whether this node will join again once its failed workers are gone."""
    return (
        _is_current(state, round_)
        and bool(state.failures or state.stuck_pids)
        and not state.workers_gone
        and not state.is_ending
    )


def _record_unhealthy(work: Work, event: events.Unhealthy) -> None:
    """Make an unhealthy node leave instead of joining again. Its failure still counts."""
    if rejoins_after_failure(work.state, event.round):
        reason = f"unhealthy: {event.reason}"
        leaving = Leaving(LeaveCause.FAILED, reason, EXIT_TRY_AGAIN)
        work.state = replace(work.state, leaving=leaving, phase=Phase.LEAVING)
        work.do(said_leave(work.state, leaving, None))


def _succeed(work: Work) -> None:
    """Kill what successful workers have left behind, and wait at the exit barrier."""
    state = work.state
    assert state.assignment is not None
    work.state = replace(state, phase=Phase.SUCCEEDED)
    work.do(Succeed(*state.speaker, state.run, state.assignment.round))
    work.do(StopWorkers(state.assignment.round, 0))


def _fail_store_host(work: Work, reason: str) -> None:
    """Ask the server to end the round, in which no worker can start or finish without a store."""
    state = work.state
    if state.phase.needs_store and not state.store_host_failed:
        assert state.assignment is not None
        work.state = replace(state, store_host_due_ms=None, store_host_failed=reason)
        work.do(ReportStoreHost(*state.speaker, state.run, state.assignment.round, reason))


def _lose_runner(work: Work, event: events.RunnerLost) -> None:
    leaving = Leaving(LeaveCause.TIMEOUT, event.reason, EXIT_TRY_AGAIN)
    work.state = replace(
        work.state,
        workers_gone=True,
        alive=frozenset(),
        kept=(),
        standby=NO_STANDBY,
        snapshots=(),
        carrier=None,
        missing_copies=None,
        ending_kept=False,
    )
    if work.state.leaving is None:
        leave(work, leaving, grace_ms=0, signum=None)
    else:
        conclude(work)


# ------------------------------------------------------------------ parked workers


def _note_kept_exit(work: Work, event: events.KeptExited) -> None:
    state = work.state
    kept = tuple(worker for worker in state.kept if worker.pid != event.pid)
    if kept == state.kept:
        return
    if state.standby.state is StandbyState.READY and not state.ending_kept:
        standbys.note_exit(work, event)
        return
    work.state = replace(state, kept=kept)
    if not state.is_ending and not state.ending_kept:
        work.do(rejoin(work.state))


def _note_kept_gone(work: Work) -> None:
    state = work.state
    if not state.kept and not state.ending_kept:
        return
    is_cold = state.standby.state is StandbyState.COLD
    work.state = replace(
        state, kept=(), ending_kept=False, standby=state.standby if is_cold else NO_STANDBY
    )
    if state.is_ending:
        conclude(work)
    else:
        work.do(rejoin(work.state))


def _park_due_ms(state: AgentState) -> int | None:
    """Return when the parked workers of a node without a place in a round must end."""
    if state.phase is not Phase.JOINING or not state.kept or state.ending_kept:
        return None
    if state.standby.state is StandbyState.READY:
        return None
    return state.idle_since_ms + state.job.park_timeout_ms


def resume_ms(job: JobTerms) -> int:
    return max(job.park_timeout_ms, _RESUME_LEAST_MS)


def _record_resumed(work: Work, event: events.WorkerResumed) -> None:
    if _is_current(work.state, event.round):
        left = (one for one in work.state.resuming if one.local_rank != event.local_rank)
        work.state = replace(work.state, resuming=tuple(left))


def _resume_due_ms(state: AgentState) -> int | None:
    """Return when the running round's kept workers must have continued, or None if all have."""
    waits = any(one.local_rank in state.alive for one in state.resuming)
    return state.resume_due_ms if waits and state.phase is Phase.RUNNING else None


def _suspect_waiting(work: Work) -> None:
    """Treat a kept worker that has not continued as a suspect, as it may be waiting for a peer."""
    state = work.state
    assert state.assignment is not None
    one = next(one for one in state.resuming if one.local_rank in state.alive)
    seconds = resume_ms(state.job) / 1000
    message = f"it was kept, and did not continue within {seconds:g} s"
    number = state.assignment.round
    _record_suspect(
        work, events.WorkerSuspected(number, one.local_rank, one.pid, message, "", age_ms=0)
    )


# ------------------------------------------------------------------ the end


def _leave_by_signal(work: Work, event: events.Signalled) -> None:
    if work.state.is_ending:
        if work.state.outcome is not None and work.state.outcome.joins_anew:
            work.state = replace(work.state, outcome=replace(work.state.outcome, joins_anew=False))
        if not work.state.workers_gone:
            stop(work, 0, event.signum)
        elif work.state.ending_kept:
            work.do(EndKept(0))
        return
    reason = f"its agent received {event.name}"
    leaving = Leaving(LeaveCause.SIGNAL, reason, 128 + event.signum)
    leave(work, leaving, work.state.job.shutdown_timeout_ms, event.signum)


def _withdraw(work: Work, event: messages.Withdrawn) -> None:
    """The leave is announced anyway, because this node's join may have crossed the withdrawal."""
    if event.run == work.state.run and work.state.outcome is None:
        leaving = Leaving(LeaveCause.SIGNAL, event.reason, EXIT_TRY_AGAIN)
        leave(work, leaving, work.state.job.shutdown_timeout_ms, signum=None)


# ------------------------------------------------------------------ deadlines


def _check_deadlines(work: Work) -> None:
    state = work.state
    due_ms = _store_host_due_ms(state)
    if due_ms is not None and work.now_ms >= due_ms:
        _fail_store_host(work, f"not ready within {state.job.store_host_timeout_ms / 1000:g} s")
    drain_notice.keep_notice(work)
    due_ms = _park_due_ms(work.state)
    if due_ms is not None and work.now_ms >= due_ms:
        end_kept(work)
    due_ms = _resume_due_ms(work.state)
    if due_ms is not None and work.now_ms >= due_ms:
        _suspect_waiting(work)
    due_ms = standbys.again_due_ms(work.state)
    if due_ms is not None and work.now_ms >= due_ms:
        standbys.begin_again(work)
    due_ms = server_contact.server_due_ms(work.state)
    if due_ms is not None and work.now_ms >= due_ms:
        finish(work, server_contact.without_server(work.state))


def _store_host_due_ms(state: AgentState) -> int | None:
    """Return when a store host that is not ready counts as failed, or None if none is needed."""
    return state.store_host_due_ms if state.phase.needs_store else None


def _wake_at_ms(state: AgentState) -> int | None:
    if state.phase is Phase.ENDED:
        return None
    due = (
        _store_host_due_ms(state),
        server_contact.server_due_ms(state),
        drain_notice.notice_due_ms(state),
        _park_due_ms(state),
        _resume_due_ms(state),
        standbys.again_due_ms(state),
    )
    return min((due_ms for due_ms in due if due_ms is not None), default=None)

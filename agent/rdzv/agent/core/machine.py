"""One job on one node: turns events into commands.

`step()` is pure. Its messages to the server need no response: after a reconnect, the node's
`Belief` (the state itself) is sent in full, so losing a message along with its stream does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rdzv.agent.core.commands import (
    AnnounceWatermark,
    Command,
    EndKept,
    Exit,
    FetchCopies,
    NotifyWorkers,
    SayFailed,
    SayJoin,
    SayLeave,
    SaySnapshots,
    SayStoreHostFailed,
    SayStuck,
    SaySucceeded,
    StartWorkers,
    StopStoreHost,
    StopWorkers,
    TakeBackNotice,
)
from rdzv.agent.core.events import (
    CopiesWanted,
    Event,
    Fenced,
    Joined,
    KeptExited,
    KeptGone,
    NoticeGiven,
    NoticeLifted,
    Refused,
    RoundCompleted,
    RoundEnded,
    RunClosed,
    RunnerLost,
    ServerConnected,
    ServerLost,
    Signalled,
    SnapshotsHeld,
    SnapshotWatermark,
    StartFailed,
    StoreHostExited,
    StoreHostReady,
    Ticked,
    Unhealthy,
    Withdrawn,
    WorkerExited,
    WorkerResumed,
    WorkersGone,
    WorkersStuck,
    WorkerSuspected,
)
from rdzv.agent.core.model import (
    AgentState,
    Assignment,
    Job,
    Leaving,
    Notice,
    Outcome,
    Phase,
    WorkerFailure,
)
from rdzv.core.model import UNMOVED, LeaveCause, Result
from rdzv.structs import replace, struct

EXIT_SUCCESS = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75
"""The exit code if a retry may succeed: there was no server, the join timed out, the job was placed
elsewhere, the node was drained, or its runner was lost.
"""
EXIT_DENIED = 77
"""The exit code if the caller lacks the permission, so a retry is useless: EX_NOPERM of sysexits.
"""
EXIT_NO_PROGRESS = 93
"""The exit code if a retry is useless because the job kept failing without progress."""

_NEEDS_STORE = (Phase.RUNNING, Phase.SUCCEEDED)
"""The phases in which the round may need its store, on this node or on others."""

_SAME_DEADLINE_MS = 1_000
"""The difference below which deadlines count as equal, because a deadline's message takes time to
arrive.
"""

_DONE_MS = 500
"""How much later than this node's workers other nodes' workers may exit if all have finished."""

_RESUME_LEAST_MS = 600_000
"""The minimum time that kept workers wait in a new round for others to start."""

_SIGTERM = 15

_OVER_FOR_THIS_NODE = ("RendezvousClosedError", "NodeSupersededError")
"""Refusals that end even running workers, because they mean that the node has lost its place."""

_DENIED = ("DeniedError", "UnauthenticatedError")
"""Refusals of the caller rather than of the request."""


@struct(frozen=True)
class Transition:
    """The next state, the commands in order, and the latest time for the next tick."""

    state: AgentState
    commands: tuple[Command, ...] = ()
    wake_at_ms: int | None = None


def begin(job: Job, now_ms: int, run: str = "") -> AgentState:
    """Return the state of a node that is about to join a job, or only this `run` of the job."""
    return AgentState(job, run=run, idle_since_ms=now_ms, disconnected_since_ms=now_ms)


def step(state: AgentState, event: Event, now_ms: int) -> Transition:
    """Apply one event and decide what follows from it.

    Guarantees: a round's workers are started once, and only when every worker of earlier rounds is
    gone or parked. Running workers are stopped only because of their own failure, a signal to this
    agent, or an explicit message from the server about this run and round. After the end, events
    have no effect.
    """
    work = _Step(state, now_ms)
    if state.phase is not Phase.ENDED:
        _apply(work, event)
        _check_deadlines(work)
    return Transition(work.state, tuple(work.commands), _wake_at_ms(work.state))


@dataclass(slots=True)
class _Step:
    """A step in progress: its state and its commands so far. Never visible to callers of `step`."""

    state: AgentState
    now_ms: int
    commands: list[Command] = field(default_factory=list)

    def do(self, command: Command) -> None:
        self.commands.append(command)


def _apply(work: _Step, event: Event) -> None:
    match event:
        case ServerConnected():
            _note_server_found(work)
        case ServerLost():
            _note_server_lost(work, event)
        case Joined():
            if work.state.phase is Phase.JOINING:
                work.state = replace(work.state, run=event.run)
        case RoundCompleted():
            _start(work, event.assignment)
        case RoundEnded():
            _end_round(work, event)
        case RunClosed():
            _close(work, event)
        case Refused():
            _accept_refusal(work, event)
        case Unhealthy():
            _note_unhealthy(work, event)
        case (
            WorkerExited()
            | WorkerSuspected()
            | WorkersGone()
            | WorkersStuck()
            | Fenced()
            | StartFailed()
        ):
            _apply_to_workers(work, event)
        case WorkerResumed():
            _note_resumed(work, event)
        case KeptExited():
            _note_kept_exit(work, event)
        case KeptGone():
            _note_kept_gone(work)
        case SnapshotsHeld():
            _note_snapshots(work, event)
        case SnapshotWatermark() | CopiesWanted():
            _apply_to_snapshots(work, event)
        case StoreHostReady():
            if _is_current(work.state, event.round):
                work.state = replace(work.state, store_host_due_ms=None)
        case StoreHostExited():
            if _is_current(work.state, event.round):
                _fail_store_host(work, event.reason)
        case RunnerLost():
            _lose_runner(work, event)
        case Signalled():
            _leave_by_signal(work, event)
        case Withdrawn():
            _withdraw(work, event)
        case NoticeGiven():
            _give_drain_notice(work, event)
        case NoticeLifted():
            _lift_drain_notice(work)
        case Ticked():
            pass


# ------------------------------------------------------------------ the server


def _note_server_found(work: _Step) -> None:
    """Repeat messages that the belief does not contain, as an earlier stream may have lost them."""
    state = work.state
    work.state = replace(state, disconnected_since_ms=None)
    if state.assignment is None:
        return
    if (state.snapshots or state.carrier) and state.phase is not Phase.JOINING:
        # A waiting node's join already contains them.
        work.do(_snapshots_held(state))
    if state.stuck_pids and not _is_empty(state):
        work.do(SayStuck(state.run, state.assignment.round, state.stuck_pids))
    if state.store_host_failed and state.phase in (*_NEEDS_STORE, Phase.STOPPING):
        work.do(SayStoreHostFailed(state.run, state.assignment.round, state.store_host_failed))


def _note_server_lost(work: _Step, event: ServerLost) -> None:
    since_ms = work.state.disconnected_since_ms
    work.state = replace(
        work.state,
        disconnected_since_ms=work.now_ms if since_ms is None else since_ms,
        disconnected_reason=event.reason,
    )


def _start(work: _Step, assignment: Assignment) -> None:
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
        resuming=tuple(one for one in state.kept if one.local_rank in assignment.kept),
        resume_due_ms=work.now_ms + resume_ms(state.job),
        # This may go back, because kept workers may redo the last step.
        watermark=assignment.snapshot,
        given_up=None,
        ending_kept=False,
        failures=(),
        moved=UNMOVED,
        stopping_since_ms=None,
        stuck_pids=(),
        fenced=False,
        store_host_due_ms=due_ms if assignment.hosts_store else None,
        store_host_failed="",
    )
    work.do(StartWorkers(assignment))
    if assignment.snapshot is not None and assignment.snapshot != state.watermark:
        work.do(AnnounceWatermark(assignment.snapshot))


def _end_round(work: _Step, event: RoundEnded) -> None:
    """Stop the round's workers, unless they have succeeded."""
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
            _leave(work, _leaving(notice), _notice_grace_ms(work), signum=None)
            return
        grace_ms = job.failure_stop_timeout_ms if event.broken else job.shutdown_timeout_ms
        _stop(work, grace_ms, keep=event.keep, not_kept=event.culprits)
    elif work.state.phase is Phase.SUCCEEDED:
        work.state = replace(work.state, phase=Phase.STOPPING)
        if work.state.workers_gone:
            _conclude(work)


def _give_back_seat(work: _Step, round_: int) -> None:
    """Give back the seat in a round whose completion never arrived, so no workers were started."""
    state = work.state
    if state.left_round is None or state.left_round < round_:
        work.state = replace(state, left_round=round_, failures=(), moved=UNMOVED, fenced=False)
        if state.kept:
            # They took part in a round before that one, so no later round can keep them.
            _end_kept(work)
        work.do(rejoin(work.state))


def _close(work: _Step, event: RunClosed) -> None:
    if event.run != work.state.run:
        return
    if event.result is Result.SUCCEEDED:
        exit_code = EXIT_SUCCESS
    else:
        exit_code = EXIT_TRY_AGAIN if event.retry_sensible else EXIT_FAILED
        exit_code = EXIT_NO_PROGRESS if event.no_progress else exit_code
    node_id, kept = work.state.job.node_id, {worker.local_rank for worker in work.state.kept}
    charged = {failure.local_rank for failure in event.failures if failure.node_id == node_id}
    text = f"the job has {event.result}: {event.reason}"
    if event.result is Result.STOPPED:
        text = f"the job was stopped: {event.reason}"
    outcome = Outcome(exit_code, text, event.failures, event.result)
    _finish(work, outcome, charged=tuple(sorted(charged & kept)))


def _accept_refusal(work: _Step, event: Refused) -> None:
    """Accept a refusal as final for a node that wants a place, as repeating changes nothing.

    Workers continue unless the refusal means that they have no place. Once they are gone, the node
    asks again and is then refused.
    """
    if work.state.phase is not Phase.JOINING and event.code not in _OVER_FOR_THIS_NODE:
        return
    exit_code = EXIT_FAILED
    if event.code in _DENIED:
        exit_code = EXIT_DENIED
    elif work.state.assignment is None and event.code != "RendezvousClosedError":
        # The launch settings are wrong.
        exit_code = EXIT_USAGE
    _finish(work, Outcome(exit_code, event.message))


# ------------------------------------------------------------------ the workers


def _apply_to_workers(
    work: _Step,
    event: WorkerExited | WorkerSuspected | WorkersGone | WorkersStuck | Fenced | StartFailed,
) -> None:
    if not _is_current(work.state, event.round) or _is_empty(work.state):
        return
    if work.state.workers_gone and not isinstance(event, WorkersStuck):
        return
    match event:
        case WorkerExited():
            _note_exit(work, event)
        case WorkerSuspected():
            _note_suspect(work, event)
        case WorkersGone():
            work.state = replace(
                work.state,
                workers_gone=True,
                alive=frozenset(),
                idle_since_ms=work.now_ms,
                moved=event.moved,
                kept=event.kept,
            )
            if work.state.phase is not Phase.SUCCEEDED or work.state.outcome is not None:
                _conclude(work)
        case WorkersStuck():
            work.state = replace(work.state, stuck_pids=event.pids)
            work.do(SayStuck(work.state.run, event.round, event.pids))
        case Fenced():
            _note_fence(work, event)
        case StartFailed():
            leaving = Leaving(LeaveCause.START_FAILED, event.reason, EXIT_FAILED)
            _leave(work, leaving, grace_ms=0, signum=None)


def _is_current(state: AgentState, round_: int) -> bool:
    """Return whether this node has, or most recently had, workers in this round."""
    return state.assignment is not None and state.assignment.round == round_


def _is_empty(state: AgentState) -> bool:
    """Return whether no workers, parked or not, remain on this node."""
    return state.workers_gone and not state.kept and not state.ending_kept


def _note_exit(work: _Step, event: WorkerExited) -> None:
    state = work.state
    if event.local_rank not in state.alive:
        return
    work.state = replace(state, alive=state.alive - {event.local_rank})
    if state.phase is Phase.RUNNING and _follows_notice(work, event):
        _leave_with_workers(work, event)
    elif event.exit_code != 0:
        _note_failure(work, event)
    elif state.phase is Phase.RUNNING and not work.state.alive:
        _succeed(work)


def _note_failure(work: _Step, event: WorkerExited | WorkerSuspected) -> None:
    """Record a worker that failed by itself. A worker that the agent stopped has not failed.

    A suspect may end the round before the exit that broke its collective is detected. So an exit
    still counts if nothing sent to the worker explains it; the join reports it before the server
    charges the end of the round.
    """
    state, failed_at_ms = work.state, work.now_ms - event.age_ms
    assignment = state.assignment
    exit_code, signum, by_itself = None, None, False
    if isinstance(event, WorkerExited):
        exit_code, signum, by_itself = event.exit_code, event.signal, event.by_itself
    stopping = state.stopping_since_ms is not None and failed_at_ms >= state.stopping_since_ms
    if stopping and not by_itself:
        return
    failure = WorkerFailure(
        local_rank=event.local_rank,
        rank=event.local_rank + (assignment.rank_first if assignment else 0),
        pid=event.pid,
        exit_code=exit_code,
        signal=signum,
        message=event.message,
        traceback=event.traceback,
        at_ms=failed_at_ms,
        suspect=isinstance(event, WorkerSuspected),
    )
    work.state = replace(state, failures=(*state.failures, failure))
    if state.phase is Phase.RUNNING:
        work.do(SayFailed(state.run, event.round, work.state.failures))
        _stop(work, state.job.failure_stop_timeout_ms, keep=True)


def _note_suspect(work: _Step, event: WorkerSuspected) -> None:
    """Record a broken collective, which may be a peer's fault. Its worker parks by itself."""
    state = work.state
    if event.local_rank not in state.alive:
        return
    if state.phase is Phase.RUNNING and _follows_notice(work, event):
        assert state.notice is not None
        _leave(work, _leaving(state.notice), _notice_grace_ms(work), signum=None)
    else:
        _note_failure(work, event)


def _note_fence(work: _Step, event: Fenced) -> None:
    """Record that the runner is killing what remains of the round. `WorkersGone` follows.

    This is not a worker failure. If all workers had succeeded, only leftover processes are killed.
    """
    state = work.state
    if state.phase is Phase.SUCCEEDED:
        return
    at_ms = work.now_ms - event.age_ms
    since_ms = at_ms if state.stopping_since_ms is None else min(state.stopping_since_ms, at_ms)
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
        and state.leaving is None
        and state.outcome is None
    )


def _note_unhealthy(work: _Step, event: Unhealthy) -> None:
    """Make an unhealthy node leave instead of joining again. Its failure still counts."""
    if rejoins_after_failure(work.state, event.round):
        reason = f"unhealthy: {event.reason}"
        leaving = Leaving(LeaveCause.FAILED, reason, EXIT_TRY_AGAIN)
        work.state = replace(work.state, leaving=leaving, phase=Phase.LEAVING)
        work.do(SayLeave(work.state.run, leaving, None))


def _succeed(work: _Step) -> None:
    """Kill processes left behind by successful workers, and wait at the exit barrier."""
    state = work.state
    assert state.assignment is not None
    work.state = replace(state, phase=Phase.SUCCEEDED)
    work.do(SaySucceeded(state.run, state.assignment.round))
    work.do(StopWorkers(state.assignment.round, 0))


def _stop(
    work: _Step,
    grace_ms: int,
    signum: int | None = None,
    *,
    keep: bool = False,
    not_kept: tuple[int, ...] = (),
) -> None:
    """Stop the workers; if `keep` is set, those that can park are parked instead.

    The runner answers with `WorkersGone`.
    """
    state = work.state
    assert state.assignment is not None
    keep_ms = (state.job.keep_timeout_ms or None) if keep else None
    kept_out = not_kept if keep_ms is not None else ()
    phase = Phase.LEAVING if state.phase is Phase.LEAVING else Phase.STOPPING
    since_ms = work.now_ms if state.stopping_since_ms is None else state.stopping_since_ms
    work.state = replace(state, phase=phase, stopping_since_ms=since_ms)
    work.do(StopWorkers(state.assignment.round, grace_ms, signum, keep_ms, kept_out))


def _fail_store_host(work: _Step, reason: str) -> None:
    """Ask the server to end the round, in which no worker can start or finish without a store."""
    state = work.state
    if state.phase in _NEEDS_STORE and not state.store_host_failed:
        assert state.assignment is not None
        work.state = replace(state, store_host_due_ms=None, store_host_failed=reason)
        work.do(SayStoreHostFailed(state.run, state.assignment.round, reason))


def _lose_runner(work: _Step, event: RunnerLost) -> None:
    """Leave the job, as the runner and its workers are gone. Other nodes may continue."""
    leaving = Leaving(LeaveCause.TIMEOUT, event.reason, EXIT_TRY_AGAIN)
    work.state = replace(
        work.state,
        workers_gone=True,
        alive=frozenset(),
        kept=(),
        snapshots=(),
        carrier=None,
        missing_copies=None,
        ending_kept=False,
    )
    if work.state.leaving is None:
        _leave(work, leaving, grace_ms=0, signum=None)
    else:
        _conclude(work)


# ------------------------------------------------------------------ parked workers


def _note_kept_exit(work: _Step, event: KeptExited) -> None:
    """Stop offering a parked worker that has exited."""
    state = work.state
    kept = tuple(worker for worker in state.kept if worker.pid != event.pid)
    if kept == state.kept:
        return
    work.state = replace(state, kept=kept)
    if not _ends(state) and not state.ending_kept:
        work.do(rejoin(work.state))


def _note_kept_gone(work: _Step) -> None:
    """Continue without parked workers. They have exited on request, or the fence killed them."""
    state = work.state
    if not state.kept and not state.ending_kept:
        return
    work.state = replace(state, kept=(), ending_kept=False)
    if _ends(state):
        _conclude(work)
    else:
        work.do(rejoin(work.state))


def _end_kept(work: _Step, charged: tuple[int, ...] = ()) -> None:
    """End the parked workers. `KeptGone` follows."""
    state = work.state
    if not state.ending_kept:
        work.state = replace(state, ending_kept=True)
        work.do(EndKept(state.job.failure_stop_timeout_ms, charged))


def _park_due_ms(state: AgentState) -> int | None:
    """Return when the parked workers of a node without a place in a round must end."""
    if state.phase is not Phase.JOINING or not state.kept or state.ending_kept:
        return None
    return state.idle_since_ms + state.job.park_timeout_ms


def resume_ms(job: Job) -> int:
    """Return how long kept workers may take to continue in a new round."""
    return max(job.park_timeout_ms, _RESUME_LEAST_MS)


def _note_resumed(work: _Step, event: WorkerResumed) -> None:
    if _is_current(work.state, event.round):
        left = (one for one in work.state.resuming if one.local_rank != event.local_rank)
        work.state = replace(work.state, resuming=tuple(left))


def _resume_due_ms(state: AgentState) -> int | None:
    """Return when the running round's kept workers must have continued, or None if all have."""
    waits = any(one.local_rank in state.alive for one in state.resuming)
    return state.resume_due_ms if waits and state.phase is Phase.RUNNING else None


def _suspect_waiting(work: _Step) -> None:
    """Treat a kept worker that has not continued as a suspect, as it may be waiting for a peer."""
    state = work.state
    assert state.assignment is not None
    one = next(one for one in state.resuming if one.local_rank in state.alive)
    seconds = resume_ms(state.job) / 1000
    message = f"it was kept, and did not continue within {seconds:g} s"
    number = state.assignment.round
    _note_suspect(work, WorkerSuspected(number, one.local_rank, one.pid, message, "", age_ms=0))


# ------------------------------------------------------------------ snapshots


def _note_snapshots(work: _Step, event: SnapshotsHeld) -> None:
    """Report the snapshots held here. A node waiting for a round repeats its join instead."""
    before = work.state
    work.state = state = replace(
        before, snapshots=event.snapshots, carrier=event.carrier, missing_copies=event.missing
    )
    if state == before or _ends(state):
        return
    if state.phase is not Phase.JOINING:
        work.do(_snapshots_held(state))
    elif state.snapshots != before.snapshots and not state.ending_kept:
        work.do(rejoin(state))


def _snapshots_held(state: AgentState) -> SaySnapshots:
    return SaySnapshots(state.run, state.snapshots, state.carrier, state.missing_copies)


def _apply_to_snapshots(work: _Step, event: SnapshotWatermark | CopiesWanted) -> None:
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


# ------------------------------------------------------------------ the end


def _ends(state: AgentState) -> bool:
    """Return whether the job is about to end on this node."""
    return state.leaving is not None or state.outcome is not None


def _leave_by_signal(work: _Step, event: Signalled) -> None:
    """Leave in an orderly way. A second signal cuts the grace period short."""
    if _ends(work.state):
        if not work.state.workers_gone:
            _stop(work, 0, event.signum)
        elif work.state.ending_kept:
            work.do(EndKept(0))
        return
    reason = f"its agent received {event.name}"
    leaving = Leaving(LeaveCause.SIGNAL, reason, 128 + event.signum)
    _leave(work, leaving, work.state.job.shutdown_timeout_ms, event.signum)


def _withdraw(work: _Step, event: Withdrawn) -> None:
    """Give the job back to the server, which may place it here again.

    The leave is announced anyway, because this node's join may have crossed the withdrawal.
    """
    if event.run == work.state.run and work.state.outcome is None:
        leaving = Leaving(LeaveCause.SIGNAL, event.reason, EXIT_TRY_AGAIN)
        _leave(work, leaving, work.state.job.shutdown_timeout_ms, signum=None)


def _give_drain_notice(work: _Step, event: NoticeGiven) -> None:
    """Notify the workers and wait until they exit. A node without workers leaves at once.

    Workers that were already notified get no second signal; only the deadline may change.
    """
    state = work.state
    if state.leaving is not None or state.outcome is not None:
        return
    due_ms, before = work.now_ms + event.left_ms, state.notice
    notice = Notice(event.reason, work.now_ms, due_ms)
    if before is not None:
        notice = replace(before, reason=event.reason, due_ms=due_ms)
    work.state = replace(state, notice=notice)
    if state.workers_gone and state.phase is not Phase.SUCCEEDED:
        _leave(work, _leaving(notice), grace_ms=0, signum=None)
    elif state.phase is Phase.RUNNING:
        assert state.assignment is not None
        signum = state.job.notice_signum if before is None else 0
        known_ms = before.due_ms if before is not None else None
        if known_ms is None or abs(known_ms - due_ms) >= _SAME_DEADLINE_MS:
            number = state.assignment.round
            work.do(NotifyWorkers(number, event.left_ms, event.reason, signum or None))


def _lift_drain_notice(work: _Step) -> None:
    """Drop the deadline. Workers that still exit because of the notice have not failed."""
    state, notice = work.state, work.state.notice
    if notice is None or notice.due_ms is None or state.leaving is not None:
        return
    if state.phase is Phase.RUNNING:
        assert state.assignment is not None
        forget_ms = work.now_ms + state.job.shutdown_timeout_ms
        work.state = replace(state, notice=replace(notice, due_ms=None, forget_ms=forget_ms))
        work.do(TakeBackNotice(state.assignment.round))
    else:
        work.state = replace(state, notice=None)


def _follows_notice(work: _Step, event: WorkerExited | WorkerSuspected) -> bool:
    """Return whether a worker exited or failed after being notified that the node is leaving."""
    notice = work.state.notice
    return notice is not None and work.now_ms - event.age_ms >= notice.since_ms


def _leave_with_workers(work: _Step, event: WorkerExited) -> None:
    """Leave once all workers have exited, or as soon as one exits with an error.

    If all exited with 0, the whole job may have finished, so the node first waits a moment for the
    other nodes.
    """
    notice, alive = work.state.notice, work.state.alive
    assert notice is not None
    if event.exit_code != 0:
        _leave(work, _leaving(notice), _notice_grace_ms(work) if alive else 0, signum=None)
    elif not alive:
        work.state = replace(work.state, notice=replace(notice, exited_ms=work.now_ms))


def _leaving(notice: Notice) -> Leaving:
    return Leaving(LeaveCause.SIGNAL, notice.reason, EXIT_TRY_AGAIN)


def _notice_grace_ms(work: _Step) -> int:
    """Return how long notified workers may take to exit once the round is over."""
    notice, grace_ms = work.state.notice, work.state.job.shutdown_timeout_ms
    if notice is None or notice.due_ms is None:
        return grace_ms
    return max(min(grace_ms, notice.due_ms - work.now_ms), 0)


def _keep_notice(work: _Step) -> None:
    """Do whatever the notice, if there is one, requires by now."""
    state, notice = work.state, work.state.notice
    if notice is None:
        return
    if notice.exited_ms is not None:
        if state.phase is Phase.RUNNING and work.now_ms >= notice.exited_ms + _DONE_MS:
            _leave(work, replace(_leaving(notice), exited_zero=True), grace_ms=0, signum=None)
    elif notice.due_ms is None:
        if work.now_ms >= notice.forget_ms:
            work.state = replace(state, notice=None)
    elif state.phase is Phase.RUNNING and work.now_ms >= notice.due_ms:
        _end_late_workers(work, notice)
    elif state.phase is Phase.SUCCEEDED and state.workers_gone:
        # Other nodes may need the store that this node serves.
        stays = state.assignment is not None and state.assignment.hosts_store
        if work.now_ms >= notice.due_ms or not stays:
            _leave(work, _leaving(notice), grace_ms=0, signum=None)


def _notice_due_ms(state: AgentState) -> int | None:
    """Return when the notice next requires an action."""
    notice = state.notice
    if notice is None or state.phase not in _NEEDS_STORE:
        return None
    if state.phase is Phase.SUCCEEDED and not state.workers_gone:
        return None
    if notice.exited_ms is not None:
        return notice.exited_ms + _DONE_MS
    return notice.forget_ms if notice.due_ms is None else notice.due_ms


def _end_late_workers(work: _Step, notice: Notice) -> None:
    """End workers that have not exited in time, at once if they have already received SIGTERM."""
    job = work.state.job
    told = job.notice_signum == _SIGTERM
    reason = f"{notice.reason}; its workers had not exited by the deadline"
    leaving = replace(_leaving(notice), reason=reason)
    _leave(work, leaving, 0 if told else job.failure_stop_timeout_ms, signum=None)


def _leave(work: _Step, leaving: Leaving, grace_ms: int, signum: int | None) -> None:
    """Announce the leave at once, so other nodes need not wait, and exit once workers are gone."""
    if work.state.leaving is not None:
        return
    had_workers = not work.state.workers_gone
    work.state = replace(work.state, leaving=leaving, phase=Phase.LEAVING)
    if had_workers:
        work.do(SayLeave(work.state.run, leaving, None))
        _stop(work, grace_ms, signum)
        return
    if not _is_empty(work.state):
        work.do(SayLeave(work.state.run, leaving, None))
    _conclude(work)


def _finish(work: _Step, outcome: Outcome, charged: tuple[int, ...] = ()) -> None:
    """Set the outcome and end any remaining workers; the `charged` ones raise their exceptions."""
    if work.state.leaving is not None and work.state.workers_gone:
        return  # It has left and is only waiting for its parked workers to end.
    if work.state.outcome is None:
        work.state = replace(work.state, outcome=outcome)
    if work.state.workers_gone:
        _conclude(work, charged)
    elif work.state.phase is Phase.RUNNING:
        _stop(work, work.state.job.shutdown_timeout_ms)


def _conclude(work: _Step, charged: tuple[int, ...] = ()) -> None:
    """Join again or exit, now that no workers take part in a round.

    Before the node exits, its parked workers are ended.
    """
    state = work.state
    notice = state.notice
    if notice is not None and notice.due_ms is not None and not _ends(state):
        state = work.state = replace(state, leaving=_leaving(notice), phase=Phase.LEAVING)
    if _ends(state) and not _is_empty(state):
        _end_kept(work, charged)
        return
    round_ = state.assignment.round if state.assignment else None
    if round_ is not None:
        work.do(StopStoreHost(round_))
    if state.leaving is not None:
        work.do(SayLeave(state.run, state.leaving, round_))
        outcome = Outcome(state.leaving.exit_code, state.leaving.reason)
        _exit(work, state.outcome or outcome)
    elif state.outcome is not None:
        _exit(work, state.outcome)
    else:
        work.state = replace(
            state,
            phase=Phase.JOINING,
            left_round=round_,
            store_host_due_ms=None,
            notice=None,
        )
        work.do(rejoin(work.state))


def rejoin(state: AgentState) -> SayJoin:
    """Return the join request of a node whose workers are not part of any round."""
    fenced = state.fenced and not state.failures
    kept = () if state.ending_kept else state.kept
    return SayJoin(state.run, state.left_round, state.failures, fenced, state.moved, kept)


def _exit(work: _Step, outcome: Outcome) -> None:
    work.state = replace(work.state, phase=Phase.ENDED, outcome=outcome)
    work.do(Exit(outcome))


# ------------------------------------------------------------------ deadlines


def _check_deadlines(work: _Step) -> None:
    state = work.state
    due_ms = _store_host_due_ms(state)
    if due_ms is not None and work.now_ms >= due_ms:
        _fail_store_host(work, f"not ready within {state.job.store_host_timeout_ms / 1000:g} s")
    _keep_notice(work)
    due_ms = _park_due_ms(work.state)
    if due_ms is not None and work.now_ms >= due_ms:
        _end_kept(work)
    due_ms = _resume_due_ms(work.state)
    if due_ms is not None and work.now_ms >= due_ms:
        _suspect_waiting(work)
    due_ms = _server_due_ms(work.state)
    if due_ms is not None and work.now_ms >= due_ms:
        _finish(work, _without_server(work.state))


def _store_host_due_ms(state: AgentState) -> int | None:
    """Return when a store host that is not ready counts as failed, or None if none is needed."""
    return state.store_host_due_ms if state.phase in _NEEDS_STORE else None


def _server_due_ms(state: AgentState) -> int | None:
    """Return when a node without workers gives up on an absent server."""
    since_ms = state.disconnected_since_ms
    if since_ms is None or not state.workers_gone or state.phase is Phase.ENDED:
        return None
    if _ends(state):
        return None  # It is only waiting for the parked workers to end.
    if state.assignment is None:
        return since_ms + state.job.settings.join_timeout_ms
    return max(since_ms, state.idle_since_ms) + state.job.server_timeout_ms


def _without_server(state: AgentState) -> Outcome:
    """Return the outcome as indicated by this node's own workers, as nothing else is known."""
    if state.assignment is None:
        seconds = state.job.settings.join_timeout_ms / 1000
        text = f"no rendezvous server answered within {seconds:g} s: {state.disconnected_reason}"
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


def _wake_at_ms(state: AgentState) -> int | None:
    if state.phase is Phase.ENDED:
        return None
    due = (
        _store_host_due_ms(state),
        _server_due_ms(state),
        _notice_due_ms(state),
        _park_due_ms(state),
        _resume_due_ms(state),
    )
    return min((due_ms for due_ms in due if due_ms is not None), default=None)

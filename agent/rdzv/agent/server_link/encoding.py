"""Converts the stream's messages to and from values of the agent core.

No other part of the agent handles protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from rdzv.agent.core import commands, events
from rdzv.agent.core.model import (
    AgentState,
    Assignment,
    NodeFailure,
    Phase,
    StartReport,
    WorkerFailure,
)
from rdzv.agent.core.stopping import rejoin
from rdzv.agent.observers.arrival_watch import ArrivalReport
from rdzv.agent.observers.hang_watch import HungReport
from rdzv.agent.observers.progress_files import Report
from rdzv.agent.observers.stack_sampling import StacksAsked
from rdzv.agent.output.worker_log_reader import Piece, ReadRequest
from rdzv.agent.server_link.node_drain import NodeDrain
from rdzv.agent.server_link.placed_jobs import Holding, Placed
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.fleet.node_resources import FailingCheck, Resources
from rdzv.core.model import Cause, LeaveCause, Offer, Result
from rdzv.core.root_cause import MAX_FAILURES
from rdzv.transport.node_stream import settings_message
from rdzv.transport.same_fields import from_message, sendable, to_message
from rdzv.transport.tallies import tally_message, tally_of
from rdzv.v1 import rdzv_pb2 as pb

_PHASES = {
    Phase.JOINING: pb.Belief.JOINING,
    Phase.RUNNING: pb.Belief.RUNNING,
    Phase.STOPPING: pb.Belief.STOPPING,
    Phase.SUCCEEDED: pb.Belief.SUCCEEDED,
    Phase.LEAVING: pb.Belief.LEAVING,
}
_LEAVE_CAUSES = {
    LeaveCause.SIGNAL: pb.Leave.SIGNAL,
    LeaveCause.START_FAILED: pb.Leave.START_FAILED,
    LeaveCause.TIMEOUT: pb.Leave.TIMEOUT,
    LeaveCause.FAILED: pb.Leave.FAILED,
}
_CAUSES = {
    pb.WORKER_FAILURE: Cause.WORKER_FAILURE,
    pb.NODE_LOST: Cause.NODE_LOST,
    pb.NODE_LEFT: Cause.NODE_LEFT,
    pb.NODES_JOINED: Cause.NODES_JOINED,
    pb.STORE_HOST: Cause.STORE_HOST,
    pb.START_FAILED: Cause.START_FAILED,
    pb.OPERATOR: Cause.OPERATOR,
}
_RESULTS = {
    pb.RESULT_SUCCEEDED: Result.SUCCEEDED,
    pb.RESULT_FAILED: Result.FAILED,
    pb.RESULT_STOPPED: Result.STOPPED,
}


def belief(
    state: AgentState,
    offer: Offer,
    now_ms: int,
    *,
    refuse_reuse: bool,
    secret: str = "",
    preparing: bool = False,
) -> pb.Belief:
    """Encode everything that this node believes about its job."""
    # A node that is waiting for a round has already included its failures in its join.
    failures = state.evidence if state.failures and state.phase is not Phase.JOINING else ()
    believed = pb.Belief(
        phase=_PHASES[state.phase],
        join=join(
            _rejoin(state),
            state,
            offer,
            now_ms,
            refuse_reuse=refuse_reuse,
            secret=secret,
            preparing=preparing,
        ),
        failures=_failures(failures, now_ms),
    )
    if state.assignment is not None:
        believed.round.CopyFrom(_round(state.job.rdzv_id, state.assignment, now_ms))
        believed.store_host_failed = sendable(state.store_host_failed)
    if state.leaving is not None:
        left_round = state.left_round if state.workers_gone else None
        leave = commands.SayLeave(state.run, state.leaving, left_round)
        believed.leave.CopyFrom(_leave(leave, state.job.rdzv_id))
    return believed


def _rejoin(state: AgentState) -> commands.SayJoin:
    if state.phase is not Phase.JOINING:
        return commands.SayJoin(state.run, None, ())
    return rejoin(state)


def join(
    say: commands.SayJoin,
    state: AgentState,
    offer: Offer,
    now_ms: int,
    *,
    refuse_reuse: bool,
    secret: str = "",
    preparing: bool = False,
) -> pb.Join:
    """Encode a request for a place, including this node's offer."""
    fenced_ms = now_ms - (state.stopping_since_ms or now_ms) if say.fenced else 0
    return pb.Join(
        rdzv_id=state.job.rdzv_id,
        run=say.run,
        settings=settings_message(state.job.settings),
        offer=to_message(pb.Offer(), offer),
        left_round=say.left_round,
        failures=_failures(say.failures, now_ms),
        refuse_reuse=refuse_reuse,
        fenced=say.fenced,
        fenced_age_ms=fenced_ms,
        furthest_step=say.moved.step,
        snapshot_changed=say.moved.snapshot,
        secret=secret,
        kept=[to_message(pb.KeptWorker(), one, without={"pid"}) for one in say.kept],
        snapshots=_held(commands.SaySnapshots(say.run, state.snapshots)).snapshots,
        # A node that has left a round is awaited by the others already.
        preparing=preparing and say.left_round is None,
    )


def _round(rdzv_id: str, assignment: Assignment, now_ms: int) -> pb.RoundCompleted:
    message = pb.RoundCompleted(rdzv_id=rdzv_id)
    if assignment.tally is not None:
        since_ms = now_ms - assignment.heard_at_ms
        message.tally.CopyFrom(tally_message(assignment.tally, since_ms))
    return to_message(message, assignment, without={"tally", "heard_at_ms"})


def _failures(failures: Iterable[WorkerFailure], now_ms: int) -> list[pb.WorkerFailure]:
    """Encode the earliest failures, with suspects last. The server keeps no more than these."""
    earliest = sorted(failures, key=lambda one: (one.suspect, one.at_ms))[:MAX_FAILURES]
    return [
        to_message(pb.WorkerFailure(age_ms=max(now_ms - one.at_ms, 0)), one, without={"at_ms"})
        for one in earliest
    ]


def _leave(say: commands.SayLeave, rdzv_id: str) -> pb.Leave:
    return pb.Leave(
        rdzv_id=rdzv_id,
        run=say.run,
        cause=_LEAVE_CAUSES[say.leaving.cause],
        reason=sendable(say.leaving.reason),
        left_round=say.left_round,
        exited_zero=say.leaving.exited_zero,
    )


Statement: TypeAlias = (
    commands.SayFailed
    | commands.SaySucceeded
    | commands.SayLeave
    | commands.SayStuck
    | commands.SayStoreHostFailed
)
"""The reports that the core can make about a job's workers."""


def report(say: Statement, rdzv_id: str, now_ms: int) -> pb.NodeMessage:
    """Encode one of the core's reports about the job's workers."""
    match say:
        case commands.SayFailed():
            return pb.NodeMessage(
                failed=pb.Failed(
                    rdzv_id=rdzv_id,
                    run=say.run,
                    round=say.round,
                    failures=_failures(say.failures, now_ms),
                )
            )
        case commands.SaySucceeded():
            return pb.NodeMessage(
                succeeded=pb.Succeeded(rdzv_id=rdzv_id, run=say.run, round=say.round)
            )
        case commands.SayLeave():
            return pb.NodeMessage(leave=_leave(say, rdzv_id))
        case commands.SayStuck():
            return pb.NodeMessage(
                stuck=pb.Stuck(rdzv_id=rdzv_id, run=say.run, round=say.round, pids=say.pids)
            )
        case commands.SayStoreHostFailed():
            return pb.NodeMessage(
                store_host_failed=pb.StoreHostFailed(
                    rdzv_id=rdzv_id, run=say.run, round=say.round, reason=sendable(say.reason)
                )
            )


def progress(said: Report, rdzv_id: str) -> pb.NodeMessage:
    """Encode the progress of this node's workers."""
    return pb.NodeMessage(progress=to_message(pb.Progress(rdzv_id=rdzv_id), said))


def snapshots_held(say: commands.SaySnapshots, rdzv_id: str) -> pb.NodeMessage:
    """Encode all of a run's snapshots that this node holds in memory."""
    return pb.NodeMessage(snapshots_held=_held(say, rdzv_id))


def _held(say: commands.SaySnapshots, rdzv_id: str = "") -> pb.SnapshotsHeld:
    return to_message(pb.SnapshotsHeld(rdzv_id=rdzv_id), say)


def started(report: StartReport, rdzv_id: str) -> pb.NodeMessage:
    """Encode how this node's workers entered their round."""
    message = to_message(pb.WorkersStarted(rdzv_id=rdzv_id), report)
    return pb.NodeMessage(workers_started=message)


def arrivals(report: ArrivalReport, rdzv_id: str) -> pb.NodeMessage:
    """Encode the times at which this node's workers entered collectives."""
    return pb.NodeMessage(arrivals=to_message(pb.Arrivals(rdzv_id=rdzv_id), report))


def read_request(message: pb.ReadLog) -> ReadRequest:
    """Decode the server's request for logs."""
    positions = {(at.local_rank, at.stderr): at.offset for at in message.positions}
    return from_message(ReadRequest, message, number=message.request, positions=positions)


def log_piece(piece: Piece) -> pb.NodeMessage:
    return pb.NodeMessage(log_piece=to_message(pb.LogPiece(), piece))


def hung(report: HungReport, rdzv_id: str) -> pb.NodeMessage:
    """Encode a report of this node's hung workers."""
    return pb.NodeMessage(hung=to_message(pb.Hung(rdzv_id=rdzv_id), report))


def stacks_asked(message: pb.TakeStacks) -> StacksAsked:
    """Decode the server's request for stacks."""
    return StacksAsked(
        message.request, message.rdzv_id, message.run, message.round, message.timeout_ms
    )


def stacks(
    request: int, workers: Iterable[WorkerStack], *, last: bool, error: str
) -> pb.NodeMessage:
    written = [to_message(pb.WorkerStack(), stack) for stack in workers]
    return pb.NodeMessage(
        stacks=pb.Stacks(request=request, workers=written, last=last, error=sendable(error))
    )


def resources(has: Resources) -> pb.Resources:
    """Encode this node's resources for submitted jobs."""
    return to_message(pb.Resources(), has)


def holdings(held: Iterable[Holding]) -> pb.Holdings:
    """Encode the submitted jobs that may still have processes on this node."""
    return pb.Holdings(holdings=[to_message(pb.Holding(), one) for one in held])


def health(failing: Iterable[FailingCheck]) -> pb.Health:
    """Encode this node's failing health checks."""
    return pb.Health(failing=[to_message(pb.FailingCheck(), one) for one in failing])


def declined(rdzv_id: str, run: str, reason: str, *, passing: bool = False) -> pb.NodeMessage:
    """Encode that this node declines a job. `passing` means that it may accept the job later."""
    return pb.NodeMessage(
        declined=pb.Declined(rdzv_id=rdzv_id, run=run, reason=sendable(reason), passing=passing)
    )


def draining(drain: NodeDrain) -> pb.Draining | None:
    """Encode this node's drain and its own wish. Returns None if there is neither."""
    if drain.present is None:
        return None
    said = pb.Draining(number=drain.told.number if drain.told is not None else 0)
    if (wished := drain.wished) is not None:
        said.own, said.reason = True, sendable(wished.reason)
        said.deadline_ms = drain.left_ms(wished)
    return said


def gone(completed: pb.RoundCompleted) -> pb.NodeMessage:
    """Encode a leave that gives back the seat in a job that this node has left."""
    return pb.NodeMessage(
        leave=pb.Leave(
            rdzv_id=completed.rdzv_id,
            run=completed.run,
            cause=pb.Leave.SIGNAL,
            reason="it left before it received the round",
            left_round=completed.round,
        )
    )


def placed(message: pb.Placed) -> Placed:
    """Decode a job that the server has placed on this node."""
    return from_message(Placed, message)


def rdzv_id_of(message: pb.ServerMessage) -> str:
    """Return the job that a message is about, or an empty string if it concerns the node."""
    body = message.WhichOneof("body")
    return str(getattr(getattr(message, body), "rdzv_id", "")) if body else ""


def event(message: pb.ServerMessage, now_ms: int) -> events.Event | None:
    """Decode a message about a job into an event. Returns None if the core does not need it."""
    match message.WhichOneof("body"):
        case "joined":
            joined = message.joined
            forks = joined.forks if joined.HasField("forks") else None
            return events.Joined(joined.run, joined.run_number, forks)
        case "round_completed":
            return events.RoundCompleted(_assignment(message.round_completed, now_ms))
        case "round_ended":
            ended = message.round_ended
            cause = _CAUSES.get(ended.cause, Cause.NODE_LEFT)
            return events.RoundEnded(
                ended.run,
                ended.round,
                cause,
                ended.reason,
                ended.broken,
                ended.keep,
                tuple(ended.culprits),
            )
        case "closed":
            return _closed(message.closed)
        case "snapshot_watermark":
            return from_message(events.SnapshotWatermark, message.snapshot_watermark)
        case "keep_copies":
            return from_message(events.CopiesWanted, message.keep_copies)
        case "refused":
            return events.Refused(message.refused.code, message.refused.message)
        case _:
            return None


def _assignment(completed: pb.RoundCompleted, now_ms: int) -> Assignment:
    tally = tally_of(completed.tally) if completed.HasField("tally") else None
    return from_message(Assignment, completed, tally=tally, heard_at_ms=now_ms)


def _closed(closed: pb.Closed) -> events.RunClosed:
    return from_message(
        events.RunClosed,
        closed,
        result=_RESULTS.get(closed.result, Result.FAILED),
        failures=tuple(
            from_message(NodeFailure, one.failure, node_id=one.node_id, address=one.address)
            for one in closed.root_cause.failures
        ),
    )

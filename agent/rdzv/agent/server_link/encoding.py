"""Messages of the stream <-> values of the agent core. Only here the agent handles protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from rdzv.agent.core import commands, events
from rdzv.agent.core.machine import rejoin
from rdzv.agent.core.model import (
    AgentState,
    Assignment,
    NodeFailure,
    Phase,
    WorkerFailure,
)
from rdzv.agent.observers.hang_watch import HungReport
from rdzv.agent.observers.progress_files import Report
from rdzv.agent.observers.stack_sampling import StacksAsked
from rdzv.agent.output.log_reading import Piece, ReadRequest
from rdzv.agent.server_link.draining import NodeDrain
from rdzv.agent.server_link.placed_jobs import Holding, Placed
from rdzv.core.model import Cause, JobSpec, LeaveCause, Offer, Result
from rdzv.core.placement import FailingCheck, Resources
from rdzv.core.root_cause import MAX_FAILURES
from rdzv.core.stacks import WorkerStack
from rdzv.transport.node_stream import settings_message
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
    state: AgentState, offer: Offer, now_ms: int, *, refuse_reuse: bool, secret: str = ""
) -> pb.Belief:
    """Encode everything that this node believes about its job."""
    # The join of a node without workers has them already.
    failures = () if state.phase is Phase.JOINING else state.failures
    believed = pb.Belief(
        phase=_PHASES[state.phase],
        join=join(_rejoin(state), state, offer, now_ms, refuse_reuse=refuse_reuse, secret=secret),
        failures=_failures(failures, now_ms),
    )
    if state.assignment is not None:
        believed.round.CopyFrom(_round(state.job.rdzv_id, state.assignment, now_ms))
        believed.store_host_failed = _text(state.store_host_failed)
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
) -> pb.Join:
    """Encode a request for a place, with this node's offer."""
    fenced_ms = now_ms - (state.stopping_since_ms or now_ms) if say.fenced else 0
    return pb.Join(
        rdzv_id=state.job.rdzv_id,
        run=say.run,
        settings=settings_message(state.job.settings),
        offer=pb.Offer(
            address=offer.address,
            host_name=offer.host_name,
            machine=offer.machine,
            local_world_size=offer.local_world_size,
            role=offer.role,
            topology=offer.topology,
            store_port=offer.store_port,
            can_host_store=offer.can_host_store,
            shutdown_timeout_ms=offer.shutdown_timeout_ms,
        ),
        left_round=say.left_round,
        failures=_failures(say.failures, now_ms),
        refuse_reuse=refuse_reuse,
        fenced=say.fenced,
        fenced_age_ms=fenced_ms,
        furthest_step=say.moved.step,
        snapshot_changed=say.moved.snapshot,
        secret=secret,
    )


def _round(rdzv_id: str, assignment: Assignment, now_ms: int) -> pb.RoundCompleted:
    since_ms = now_ms - assignment.heard_at_ms
    tally = None if assignment.tally is None else tally_message(assignment.tally, since_ms)
    return pb.RoundCompleted(
        rdzv_id=rdzv_id,
        run=assignment.run,
        round=assignment.round,
        group_rank=assignment.group_rank,
        group_world_size=assignment.group_world_size,
        rank_first=assignment.rank_first,
        world_size=assignment.world_size,
        role_rank_first=assignment.role_rank_first,
        role_world_size=assignment.role_world_size,
        master_addr=assignment.master_addr,
        master_port=assignment.master_port,
        use_agent_store=assignment.use_agent_store,
        restarts=assignment.restarts,
        max_restarts=assignment.max_restarts,
        tally=tally,
    )


def _failures(failures: Iterable[WorkerFailure], now_ms: int) -> list[pb.WorkerFailure]:
    """Encode the earliest failures; the server keeps no more, and messages are bounded."""
    earliest = sorted(failures, key=lambda failure: failure.at_ms)[:MAX_FAILURES]
    return [
        pb.WorkerFailure(
            local_rank=failure.local_rank,
            rank=failure.rank,
            pid=failure.pid,
            exit_code=failure.exit_code,
            signal=failure.signal,
            message=_text(failure.message),
            traceback=_text(failure.traceback),
            age_ms=max(now_ms - failure.at_ms, 0),
        )
        for failure in earliest
    ]


def _text(text: str) -> str:
    """Return text that can be sent: file names may have bytes that are not valid text."""
    return text.encode(errors="backslashreplace").decode()


def _leave(say: commands.SayLeave, rdzv_id: str) -> pb.Leave:
    return pb.Leave(
        rdzv_id=rdzv_id,
        run=say.run,
        cause=_LEAVE_CAUSES[say.leaving.cause],
        reason=_text(say.leaving.reason),
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
"""The statements of the core about a job's workers."""


def report(say: Statement, rdzv_id: str, now_ms: int) -> pb.NodeMessage:
    """Turn a statement of the core about its workers into a message."""
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
                    rdzv_id=rdzv_id, run=say.run, round=say.round, reason=_text(say.reason)
                )
            )


def progress(said: Report, rdzv_id: str) -> pb.NodeMessage:
    """Encode the progress of this node's workers."""
    ranks = [
        pb.RankProgress(rank=one.rank, step=one.step, age_ms=one.age_ms, rate=one.rate)
        for one in said.ranks
    ]
    return pb.NodeMessage(
        progress=pb.Progress(rdzv_id=rdzv_id, run=said.run, round=said.round, ranks=ranks)
    )


def read_request(message: pb.ReadLog) -> ReadRequest:
    """Decode the server's request for logs."""
    return ReadRequest(
        number=message.request,
        rdzv_id=message.rdzv_id,
        credit=message.credit,
        round=message.round if message.HasField("round") else None,
        local_rank=message.local_rank if message.HasField("local_rank") else None,
        rank=message.rank if message.HasField("rank") else None,
        stdout=message.stdout,
        stderr=message.stderr,
        follow=message.follow,
        tail_bytes=message.tail_bytes,
        tail_lines=message.tail_lines,
        positions={(at.local_rank, at.stderr): at.offset for at in message.positions},
    )


def log_piece(piece: Piece) -> pb.NodeMessage:
    """Encode a piece of a log."""
    return pb.NodeMessage(
        log_piece=pb.LogPiece(
            request=piece.request,
            local_rank=piece.local_rank,
            stderr=piece.stderr,
            round=piece.round,
            data=piece.data,
            last=piece.last,
            error=_text(piece.error),
            rank=piece.rank,
            offset=piece.offset,
        )
    )


def hung(report: HungReport, rdzv_id: str) -> pb.NodeMessage:
    """Encode a report of this node's hung workers."""
    workers = [
        pb.HungWorker(
            rank=one.rank,
            local_rank=one.local_rank,
            pid=one.pid,
            silent_ms=one.silent_ms,
            reason=_text(one.reason),
        )
        for one in report.workers
    ]
    return pb.NodeMessage(
        hung=pb.Hung(rdzv_id=rdzv_id, run=report.run, round=report.round, workers=workers)
    )


def stacks_asked(message: pb.TakeStacks) -> StacksAsked:
    """Decode the server's request for stacks."""
    return StacksAsked(
        message.request, message.rdzv_id, message.run, message.round, message.timeout_ms
    )


def stacks(
    request: int, workers: Iterable[WorkerStack], *, last: bool, error: str
) -> pb.NodeMessage:
    """Encode workers' stacks."""
    return pb.NodeMessage(
        stacks=pb.Stacks(
            request=request, workers=map(_worker_stack, workers), last=last, error=_text(error)
        )
    )


def _worker_stack(stack: WorkerStack) -> pb.WorkerStack:
    return pb.WorkerStack(
        rank=stack.rank,
        local_rank=stack.local_rank,
        pid=stack.pid,
        state=stack.state,
        threads=[
            pb.ThreadStack(
                name=_text(thread.name),
                main=thread.main,
                frames=[
                    pb.StackFrame(name=_text(f.name), file=_text(f.file), line=f.line)
                    for f in thread.frames
                ],
            )
            for thread in stack.threads
        ],
        note=_text(stack.note),
        kernel=stack.kernel,
    )


def resources(has: Resources) -> pb.Resources:
    """Encode this node's resources for submitted jobs."""
    return pb.Resources(
        cpus=has.cpus,
        memory_bytes=has.memory_bytes,
        gpus=[
            pb.Gpu(uuid=gpu.uuid, name=_text(gpu.name), memory_bytes=gpu.memory_bytes)
            for gpu in has.gpus
        ],
        labels=[pb.Label(name=name, value=value) for name, value in has.labels],
        capacity=has.capacity,
        topology=has.topology,
    )


def holdings(held: Iterable[Holding]) -> pb.Holdings:
    """Encode the submitted jobs that may still have processes here."""
    return pb.Holdings(
        holdings=[pb.Holding(rdzv_id=one.rdzv_id, run=one.run, gpus=one.gpus) for one in held]
    )


def health(failing: Iterable[FailingCheck]) -> pb.Health:
    """Encode the failing health checks of this node."""
    return pb.Health(
        failing=[pb.FailingCheck(name=_text(one.name), reason=_text(one.reason)) for one in failing]
    )


def declined(rdzv_id: str, run: str, reason: str, *, passing: bool = False) -> pb.NodeMessage:
    """Encode that this node cannot take up a job; `passing` if the reason may pass."""
    return pb.NodeMessage(
        declined=pb.Declined(rdzv_id=rdzv_id, run=run, reason=_text(reason), passing=passing)
    )


def draining(drain: NodeDrain) -> pb.Draining | None:
    """Encode that this node is about to leave all its jobs; None if it is not."""
    if drain.present is None:
        return None
    said = pb.Draining(number=drain.told.number if drain.told is not None else 0)
    if (wished := drain.wished) is not None:
        said.own, said.reason = True, _text(wished.reason)
        said.deadline_ms = drain.left_ms(wished)
    return said


def gone(line: pb.RoundCompleted) -> pb.NodeMessage:
    """Encode giving back the seat in a round of a job that this node no longer takes part in."""
    return pb.NodeMessage(
        leave=pb.Leave(
            rdzv_id=line.rdzv_id,
            run=line.run,
            cause=pb.Leave.SIGNAL,
            reason="it had left before it heard of the round",
            left_round=line.round,
        )
    )


def placed(message: pb.Placed) -> Placed:
    """Decode a job that this node has to take up."""
    spec = message.spec
    return Placed(
        message.rdzv_id,
        message.run,
        JobSpec(
            args=tuple(spec.args),
            env=tuple((one.name, one.value) for one in spec.env),
            chdir=spec.chdir,
            labels=tuple((label.name, label.value) for label in spec.labels),
            priority=spec.priority,
            gpus_per_node=spec.gpus_per_node if spec.HasField("gpus_per_node") else None,
            local_world_size=spec.local_world_size,
            needs_gpu=spec.needs_gpu,
            submitter=spec.submitter,
            account=spec.account,
        ),
    )


def rdzv_id_of(message: pb.ServerMessage) -> str:
    """Return the job that a message is about; empty if it concerns the node."""
    body = message.WhichOneof("body")
    return str(getattr(getattr(message, body), "rdzv_id", "")) if body else ""


def event(message: pb.ServerMessage, now_ms: int) -> events.Event | None:
    """Turn a message about a job into an event; None for one that is only for people."""
    match message.WhichOneof("body"):
        case "joined":
            return events.Joined(message.joined.run, message.joined.run_number)
        case "round_completed":
            return events.RoundCompleted(_assignment(message.round_completed, now_ms))
        case "round_ended":
            ended = message.round_ended
            cause = _CAUSES.get(ended.cause, Cause.NODE_LEFT)
            return events.RoundEnded(ended.run, ended.round, cause, ended.reason, ended.broken)
        case "closed":
            return _closed(message.closed)
        case "refused":
            return events.Refused(message.refused.code, message.refused.message)
        case _:
            return None


def _assignment(line: pb.RoundCompleted, now_ms: int) -> Assignment:
    return Assignment(
        run=line.run,
        round=line.round,
        group_rank=line.group_rank,
        group_world_size=line.group_world_size,
        rank_first=line.rank_first,
        world_size=line.world_size,
        role_rank_first=line.role_rank_first,
        role_world_size=line.role_world_size,
        master_addr=line.master_addr,
        master_port=line.master_port,
        use_agent_store=line.use_agent_store,
        restarts=line.restarts,
        max_restarts=line.max_restarts,
        tally=tally_of(line.tally) if line.HasField("tally") else None,
        heard_at_ms=now_ms,
    )


def _closed(closed: pb.Closed) -> events.RunClosed:
    return events.RunClosed(
        run=closed.run,
        result=_RESULTS.get(closed.result, Result.FAILED),
        reason=closed.reason,
        retry_sensible=closed.retry_sensible,
        failures=tuple(_node_failure(failure) for failure in closed.root_cause.failures),
        no_progress=closed.no_progress,
    )


def _node_failure(told: pb.NodeFailure) -> NodeFailure:
    failure = told.failure
    return NodeFailure(
        node_id=told.node_id,
        address=told.address,
        local_rank=failure.local_rank,
        rank=failure.rank,
        pid=failure.pid,
        exit_code=failure.exit_code if failure.HasField("exit_code") else None,
        signal=failure.signal if failure.HasField("signal") else None,
        message=failure.message,
        traceback=failure.traceback,
    )

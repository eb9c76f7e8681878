"""Values to messages, for nodes and operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, get_args

from google.protobuf.message import Message

from rdzv.core.explain import BudgetsView, JobView, NodeView
from rdzv.core.model import Failure, JobSpec, NodeState, Result, Submission
from rdzv.core.stacks import Frame, Report, SilentNode
from rdzv.core.stragglers import Straggler
from rdzv.server.messages import (
    Closed,
    DrainNode,
    Heard,
    Joined,
    Lease,
    Line,
    LogCredit,
    LogLines,
    LogPosition,
    LookAgain,
    NodeSummary,
    Placed,
    RankProgress,
    ReadLog,
    Refused,
    RoundOver,
    ServerView,
    TakeStacks,
    Told,
    UndrainNode,
    Waiting,
    Welcome,
    Withdrawn,
)
from rdzv.server.security.tokens import Token
from rdzv.server.settings.config import PROTOCOL_VERSION
from rdzv.stores.base import Record
from rdzv.structs import field_names
from rdzv.transport.tallies import tally_message
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import event_in

_RESULTS = {
    Result.SUCCEEDED: pb.RESULT_SUCCEEDED,
    Result.FAILED: pb.RESULT_FAILED,
    Result.STOPPED: pb.RESULT_STOPPED,
}


def server_message(
    told: Told, leadership: int, server_version: str, now_ms: int
) -> pb.ServerMessage:
    """Write one message to a node."""
    message = pb.ServerMessage(leadership=leadership)
    match told:
        case Welcome():
            message.welcome.protocol_version = PROTOCOL_VERSION
            message.welcome.incarnation = told.incarnation
            message.welcome.heartbeat_interval_ms = told.heartbeat_interval_ms
            message.welcome.lease_ms = told.lease_ms
            message.welcome.server_version = server_version
        case Lease():
            message.lease.heartbeat_interval_ms = told.heartbeat_interval_ms
            message.lease.lease_ms = told.lease_ms
        case Heard():
            message.heard.number = told.number
        case Joined():
            message.joined.CopyFrom(_copied(pb.Joined(), told))
        case Line():
            message.round_completed.CopyFrom(_line(told))
        case RoundOver():
            message.round_ended.CopyFrom(_round_ended(told))
        case Closed():
            message.closed.CopyFrom(_closed(told, now_ms))
        case Refused():
            message.refused.CopyFrom(_copied(pb.Refused(), told))
        case Waiting():
            message.waiting.CopyFrom(_copied(pb.Waiting(), told))
        case ReadLog():
            message.read_log.CopyFrom(_read_log(told))
        case LogCredit():
            message.log_credit.CopyFrom(_copied(pb.LogCredit(), told))
        case Placed():
            placed = pb.Placed(rdzv_id=told.rdzv_id, run=told.run, spec=_job_spec(told.spec))
            message.placed.CopyFrom(placed)
        case Withdrawn():
            message.withdrawn.CopyFrom(_copied(pb.Withdrawn(), told))
        case LookAgain():
            message.look_again.SetInParent()
        case TakeStacks():
            message.take_stacks.CopyFrom(_copied(pb.TakeStacks(), told))
        case DrainNode():
            message.drain.deadline_ms = told.left_ms
            message.drain.reason, message.drain.number = told.reason, told.number
        case UndrainNode():
            message.undrain.SetInParent()
    return message


def _job_spec(spec: JobSpec) -> pb.JobSpec:
    return pb.JobSpec(
        args=spec.args,
        env=[pb.EnvironmentVariable(name=name, value=value) for name, value in spec.env],
        chdir=spec.chdir,
        labels=_label_messages(spec.labels),
        priority=spec.priority,
        gpus_per_node=spec.gpus_per_node,
        local_world_size=spec.local_world_size,
        needs_gpu=spec.needs_gpu,
        submitter=spec.submitter,
        account=spec.account,
    )


def _label_messages(labels: Iterable[tuple[str, str]]) -> list[pb.Label]:
    return [pb.Label(name=name, value=value) for name, value in labels]


M = TypeVar("M", bound=Message)
_Flat = (
    Joined
    | Line
    | Refused
    | Waiting
    | NodeView
    | BudgetsView
    | RankProgress
    | LogCredit
    | LogLines
    | Withdrawn
    | TakeStacks
    | SilentNode
    | Frame
)
_FIELDS = {
    kind: tuple(name for name in field_names(kind) if name != "tally")
    for kind in (*get_args(_Flat), LogPosition)
}
"""Looked up once for each kind, not for each message: a round is told to thousands of nodes. What
is no plain field is written apart."""


def _copied(message: M, value: _Flat | LogPosition) -> M:
    """Fill a message from a value whose fields have its names; None stays unset."""
    for name in _FIELDS[type(value)]:
        content = getattr(value, name)
        if content is not None:
            setattr(message, name, content)
    return message


def _line(told: Line) -> pb.RoundCompleted:
    tally, message = told.tally, _copied(pb.RoundCompleted(), told)
    if tally is not None:
        message.tally.CopyFrom(tally_message(tally))
    return message


def _read_log(told: ReadLog) -> pb.ReadLog:
    return pb.ReadLog(
        request=told.request,
        rdzv_id=told.rdzv_id,
        round=told.round,
        rank=told.rank,
        stdout=told.stdout,
        stderr=told.stderr,
        follow=told.follow,
        tail_bytes=told.tail_bytes,
        tail_lines=told.tail_lines,
        credit=told.credit,
        positions=[_copied(pb.LogPosition(), at) for at in told.positions],
    )


def _round_ended(told: RoundOver) -> pb.RoundEnded:
    return pb.RoundEnded(
        rdzv_id=told.rdzv_id,
        run=told.run,
        round=told.round,
        cause=pb.Cause.Value(told.end.cause.name),
        reason=told.end.reason,
        broken=told.end.broken,
    )


def _closed(told: Closed, now_ms: int) -> pb.Closed:
    return pb.Closed(
        rdzv_id=told.rdzv_id,
        run=told.run,
        result=_RESULTS[told.ended.result],
        reason=told.ended.reason,
        retry_sensible=told.ended.retry_sensible,
        root_cause=_root_cause(told.ended.failures, now_ms),
        no_progress=told.ended.no_progress,
    )


def _root_cause(failures: Iterable[Failure], now_ms: int) -> pb.RootCause | None:
    written = [
        pb.NodeFailure(
            node_id=failure.node_id, address=failure.address, failure=_worker(failure, now_ms)
        )
        for failure in failures
    ]
    return pb.RootCause(failures=written) if written else None


def _worker(failure: Failure, now_ms: int) -> pb.WorkerFailure:
    return pb.WorkerFailure(
        local_rank=failure.local_rank,
        rank=failure.rank,
        pid=failure.pid,
        exit_code=failure.exit_code,
        signal=failure.signal,
        message=failure.message,
        traceback=failure.traceback,
        age_ms=max(now_ms - failure.at_ms, 0),
    )


def job_status(
    view: JobView,
    now_ms: int,
    progress: Iterable[RankProgress] = (),
    stragglers: Iterable[Straggler] = (),
) -> pb.JobStatus:
    """Write everything that `status` shows of a job, and how far its workers are."""
    status = pb.JobStatus()
    status.progress.extend(_copied(pb.RankProgress(), one) for one in progress)
    status.stragglers.extend(
        pb.Straggler(
            rank=one.rank,
            step_s=one.step_s,
            median_s=one.median_s,
            age_ms=max(now_ms - one.since_ms, 0),
        )
        for one in stragglers
    )
    for name in field_names(type(view)):
        content = getattr(view, name)
        if name == "nodes":
            status.nodes.extend(_copied(pb.NodeStatus(), node) for node in content)
        elif name == "last_failure":
            if content:
                status.last_failure.CopyFrom(_root_cause(content, now_ms) or pb.RootCause())
        elif name == "submission":
            if content is not None:
                status.submission.CopyFrom(_submission(content, view.jobs_before, now_ms))
        elif name == "jobs_before":
            pass
        elif name == "budgets":
            if content is not None:
                status.budgets.CopyFrom(_copied(pb.Budgets(), content))
        elif content is not None:
            setattr(status, name, content)
    return status


def _submission(submission: Submission, jobs_before: int | None, now_ms: int) -> pb.Submission:
    spec = submission.spec
    return pb.Submission(
        submitted_by=submission.submitted_by,
        age_ms=max(now_ms - submission.at_ms, 0),
        args=spec.args,
        env_names=[name for name, _ in spec.env],
        chdir=spec.chdir,
        labels=_label_messages(spec.labels),
        priority=spec.priority,
        gpus_per_node=spec.gpus_per_node,
        placed=submission.placed,
        jobs_before=jobs_before,
        declined=[
            pb.DeclinedNode(node_id=one.node_id, reason=one.reason) for one in submission.declined
        ],
        submitter=spec.submitter,
        account=spec.account,
    )


def node_summary(summary: NodeSummary) -> pb.Node:
    """Write the line that `nodes` shows of a node."""
    resources = None
    if (has := summary.resources) is not None:
        resources = pb.Resources(
            cpus=has.cpus,
            memory_bytes=has.memory_bytes,
            gpus=[
                pb.Gpu(uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_bytes)
                for gpu in has.gpus
            ],
            labels=_label_messages(has.labels),
            capacity=has.capacity,
            topology=has.topology,
        )
    return pb.Node(
        node_id=summary.node_id,
        state=summary.state,
        state_age_ms=summary.state_age_ms,
        program=summary.program,
        address=summary.address,
        agent_version=summary.version,
        resources=resources,
        jobs=[
            pb.NodeJob(rdzv_id=job.rdzv_id, gpus=job.gpus, state=job.state) for job in summary.jobs
        ],
        gpus_free=summary.gpus_free,
        cordoned=summary.cordoned,
        cordon_reason=summary.cordon_reason,
        cordon_age_ms=summary.cordon_age_ms,
        quarantine=summary.quarantine,
        quarantine_age_ms=summary.quarantine_age_ms,
        quarantine_left_ms=summary.quarantine_left_ms,
        unhealthy=summary.unhealthy,
        unhealthy_age_ms=summary.unhealthy_age_ms,
        metrics=summary.metrics,
        drain=summary.drain,
        drain_reason=summary.drain_reason,
        drain_left_ms=summary.drain_left_ms,
        drained_by_operator=summary.drained_by_operator,
    )


def job_summary(view: JobView, hangs: str) -> pb.JobSummary:
    """Write the line that `list` shows of a job; `hangs` says who hangs, or is empty."""
    here = (NodeState.SEATED, NodeState.SUCCEEDED, NodeState.AWAY, NodeState.STOPPING)
    return pb.JobSummary(
        rdzv_id=view.rdzv_id,
        run=view.run,
        state=view.state,
        reason=view.reason,
        round=view.round,
        nodes=sum(1 for n in view.nodes if n.group_rank is not None and n.state in here),
        min_nodes=view.min_nodes,
        max_nodes=view.max_nodes,
        world_size=view.world_size,
        restarts=view.restarts,
        max_restarts=view.max_restarts,
        state_age_ms=view.state_age_ms,
        backend=view.backend,
        hangs=hangs,
    )


def log_lines(lines: LogLines) -> pb.LogLines:
    """Write a piece of a log, or a note."""
    return _copied(pb.LogLines(), lines)


def stack_report(report: Report, now_ms: int) -> pb.StackReport:
    """Write what the workers of a round were doing."""
    return pb.StackReport(
        rdzv_id=report.rdzv_id,
        run=report.run,
        round=report.round,
        age_ms=max(now_ms - report.at_ms, 0),
        reason=report.reason,
        summary=report.summary,
        groups=[pb.StackGroup(ranks=one.ranks, where=one.where) for one in report.groups],
        stacks=[
            pb.WorkerStack(
                rank=stack.rank,
                local_rank=stack.local_rank,
                pid=stack.pid,
                state=stack.state,
                threads=[
                    pb.ThreadStack(
                        name=thread.name,
                        main=thread.main,
                        frames=[_copied(pb.StackFrame(), frame) for frame in thread.frames],
                    )
                    for thread in stack.threads
                ],
                note=stack.note,
                kernel=stack.kernel,
                node_id=stack.node_id,
            )
            for stack in report.stacks
        ],
        left_out=report.left_out,
        silent=[_copied(pb.SilentNode(), node) for node in report.silent],
    )


def event_row(record: Record) -> pb.Event:
    """Write one row of a job's history."""
    event = event_in(record)
    return pb.Event(
        unix_ms=record.unix_ms,
        rdzv_id=record.rdzv_id,
        run=record.run,
        name=record.name,
        text=event.text,
        fields="" if event.fields is None else record.data,
    )


def server(view: ServerView) -> pb.Server:
    """Show one rdzvd."""
    return pb.Server(
        address=view.address,
        leads=view.leads,
        leadership=view.leadership,
        store=view.store,
        server_version=view.version,
        state_age_ms=view.state_age_ms,
        insecure=view.insecure,
        store_away=view.store_away,
    )


def token(token: Token, now_ms: int) -> pb.Token:
    """Write what may be known of a token."""
    message = pb.Token(
        id=token.id, name=token.name, roles=token.roles, age_ms=max(now_ms - token.created_ms, 0)
    )
    if token.expires_ms is not None:
        message.expires_in_ms = max(token.expires_ms - now_ms, 0)
    if token.used_ms is not None:
        message.used_age_ms = max(now_ms - token.used_ms, 0)
    return message

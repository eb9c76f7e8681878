"""Converts values to messages, for nodes and operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, get_args

from google.protobuf.message import Message
from msgspec import Struct

from rdzv.core.model import Failure, JobSpec, Result
from rdzv.server.messages import (
    Announcement,
    Assignment,
    Closed,
    DrainNode,
    Heard,
    Joined,
    Lease,
    LogCredit,
    LogLines,
    LogPosition,
    LookAgain,
    Placed,
    ReadLog,
    Refused,
    RoundOver,
    TakeStacks,
    UndrainNode,
    Waiting,
    Welcome,
    Withdrawn,
)
from rdzv.server.settings.config import PROTOCOL_VERSION
from rdzv.stores.base import Record
from rdzv.structs import field_names
from rdzv.transport.tallies import tally_message
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import answers

_RESULTS = {
    Result.SUCCEEDED: pb.RESULT_SUCCEEDED,
    Result.FAILED: pb.RESULT_FAILED,
    Result.STOPPED: pb.RESULT_STOPPED,
}


def server_message(
    told: Announcement, leadership: int, server_version: str, now_ms: int
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
        case Assignment():
            message.round_completed.CopyFrom(_round_completed(told))
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
_Flat = Joined | Assignment | Refused | Waiting | LogCredit | LogLines | Withdrawn | TakeStacks
_FIELDS = {
    kind: tuple(name for name in field_names(kind) if name != "tally")
    for kind in (*get_args(_Flat), LogPosition)
}
"""Looked up once per message type, not per message: a round is announced to thousands of nodes.
Fields that are not plain values are written separately."""


def _copied(message: M, value: _Flat | LogPosition) -> M:
    """Fill a message from a value with fields of the same names; None stays unset."""
    for name in _FIELDS[type(value)]:
        content = getattr(value, name)
        if content is not None:
            setattr(message, name, content)
    return message


def _round_completed(told: Assignment) -> pb.RoundCompleted:
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


def log_lines(lines: LogLines) -> pb.LogLines:
    """Write a piece of a log, or a note."""
    return _copied(pb.LogLines(), lines)


def event_row(record: Record) -> pb.Event:
    """Write one row of a job's history."""
    event = answers.event_in(record)
    return pb.Event(
        unix_ms=record.unix_ms,
        rdzv_id=record.rdzv_id,
        run=record.run,
        name=record.name,
        text=event.text,
        fields="" if event.fields is None else record.data,
    )


def job_status(status: answers.JobStatus) -> pb.JobStatus:
    """Write the status of a job, as `status` shows it."""
    message = _filled(pb.JobStatus(), status)
    if (last := status.last_failure) is not None:
        message.last_failure.failures.extend(
            _failure(failure, last.age_ms) for failure in (last.root_cause, *last.others)
        )
        if last.age_ms is not None:
            message.last_failure_age_ms = last.age_ms
    return message


def _failure(failure: answers.WorkerFailure, age_ms: int | None) -> pb.NodeFailure:
    """Write one failure; failures that are shown together have the same age."""
    return pb.NodeFailure(
        node_id=failure.node_id,
        address=failure.address or "",
        failure=pb.WorkerFailure(
            local_rank=failure.local_rank,
            rank=failure.rank,
            pid=failure.pid or 0,
            exit_code=failure.exit_code,
            signal=failure.signal,
            message=failure.message or "",
            traceback=failure.traceback or "",
            age_ms=age_ms or 0,
        ),
    )


def job_summary(summary: answers.JobSummary) -> pb.JobSummary:
    """Write a job's line in `list`."""
    return _filled(pb.JobSummary(), summary)


def node(shown: answers.Node) -> pb.Node:
    """Write a node, as `nodes` shows it."""
    return _filled(pb.Node(), shown)


def server(shown: answers.Server) -> pb.Server:
    """Write an rdzvd, as `servers` shows it."""
    return _filled(pb.Server(), shown)


def token(shown: answers.Token) -> pb.Token:
    """Write a token, without its secret."""
    return _filled(pb.Token(), shown)


def stack_report(report: answers.StackReport) -> pb.StackReport:
    """Write the stacks of a round's workers."""
    return _filled(pb.StackReport(), report)


_OTHERWISE = frozenset({"last_failure", "behind"})
"""Fields without a counterpart in the message: one is written elsewhere, one the reader derives."""
_NAMES = {"version": "server_version"}


def _filled(message: M, value: object) -> M:
    """Write a value into a message with fields of the same names; None is not written."""
    for name in field_names(type(value)):
        content = getattr(value, name)
        if content is None or name in _OTHERWISE:
            continue
        name = _NAMES.get(name, name)  # noqa: PLW2901
        if isinstance(content, dict):
            getattr(message, name).extend(_label_messages(content.items()))
        elif isinstance(content, tuple):
            repeated = getattr(message, name)
            if content and isinstance(content[0], Struct):
                for one in content:
                    _filled(repeated.add(), one)
            else:
                repeated.extend(content)
        elif isinstance(content, Struct):
            getattr(message, name).SetInParent()
            _filled(getattr(message, name), content)
        else:
            setattr(message, name, content)
    return message

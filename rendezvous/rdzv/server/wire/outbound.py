"""Converts values to messages for nodes and operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rdzv.core.model import Failure, Result
from rdzv.server.messages import (
    Announcement,
    Assignment,
    Closed,
    DrainNode,
    Heard,
    Joined,
    KeepCopies,
    Lease,
    LogCredit,
    LogLines,
    LookAgain,
    Placed,
    ReadLog,
    Refused,
    RoundOver,
    Servers,
    SnapshotWatermark,
    TakeStacks,
    UndrainNode,
    Waiting,
    Welcome,
    Withdrawn,
)
from rdzv.server.settings.config import PROTOCOL_VERSION
from rdzv.stores.base import Record
from rdzv.transport.same_fields import to_message
from rdzv.transport.tallies import tally_message
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import answers

_RESULTS = {
    Result.SUCCEEDED: pb.RESULT_SUCCEEDED,
    Result.FAILED: pb.RESULT_FAILED,
    Result.STOPPED: pb.RESULT_STOPPED,
}


_BODIES: Mapping[type, str] = {
    Servers: "servers",
    Lease: "lease",
    Heard: "heard",
    Joined: "joined",
    Refused: "refused",
    Waiting: "waiting",
    ReadLog: "read_log",
    LogCredit: "log_credit",
    Placed: "placed",
    Withdrawn: "withdrawn",
    LookAgain: "look_again",
    TakeStacks: "take_stacks",
    SnapshotWatermark: "snapshot_watermark",
    KeepCopies: "keep_copies",
    UndrainNode: "undrain",
}
"""The `ServerMessage` field for each kind of announcement. Only kinds that have the same fields as
their messages are listed."""


def server_message(
    told: Sequence[Announcement], leadership: int, server_version: str, now_ms: int
) -> pb.ServerMessage:
    message = pb.ServerMessage(leadership=leadership)
    _write(message, told[0], server_version, now_ms)
    for other in told[1:]:
        _write(message.more.add(), other, server_version, now_ms)
    return message


def _write(message: pb.ServerMessage, told: Announcement, server_version: str, now_ms: int) -> None:
    match told:
        case Welcome():
            message.welcome.protocol_version = PROTOCOL_VERSION
            message.welcome.server_version = server_version
            to_message(message.welcome, told)
        case Assignment():
            to_message(message.round_completed, told, without={"tally"})
            if told.tally is not None:
                message.round_completed.tally.CopyFrom(tally_message(told.tally))
        case RoundOver():
            message.round_ended.CopyFrom(_round_ended(told))
        case Closed():
            message.closed.CopyFrom(_closed(told, now_ms))
        case DrainNode():
            message.drain.deadline_ms = told.left_ms
            message.drain.reason, message.drain.number = told.reason, told.number
        case _:
            body = getattr(message, _BODIES[type(told)])
            body.SetInParent()
            to_message(body, told)


def _round_ended(told: RoundOver) -> pb.RoundEnded:
    return pb.RoundEnded(
        rdzv_id=told.rdzv_id,
        run=told.run,
        round=told.round,
        cause=pb.Cause.Value(told.end.cause.name),
        reason=told.end.reason,
        broken=told.end.broken,
        keep=told.end.keep,
        culprits=told.culprits,
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
    message = pb.WorkerFailure(age_ms=max(now_ms - failure.at_ms, 0))
    return to_message(message, failure, without=_OF_NODE | {"at_ms"})


def log_lines(lines: LogLines) -> pb.LogLines:
    """Convert a piece of a log or a note about it."""
    return to_message(pb.LogLines(), lines)


def event_row(record: Record) -> pb.Event:
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
    """Convert a job's status, as `rdzvctl status` shows it."""
    # `behind` is computed by the reader.
    message = to_message(pb.JobStatus(), status, without={"last_failure", "behind"})
    if (last := status.last_failure) is not None:
        message.last_failure.failures.extend(
            _failure(failure, last.age_ms) for failure in (last.root_cause, *last.others)
        )
        if last.age_ms is not None:
            message.last_failure_age_ms = last.age_ms
    return message


_OF_NODE = frozenset({"node_id", "address"})
"""The fields of a failure that identify its node. All other fields are about the worker."""


def _failure(failure: answers.WorkerFailure, age_ms: int | None) -> pb.NodeFailure:
    """Convert a failure; failures that are shown together have the same age."""
    message = pb.NodeFailure(node_id=failure.node_id, address=failure.address or "")
    to_message(message.failure, failure, without=_OF_NODE)
    message.failure.age_ms = age_ms or 0
    return message


def job_summary(summary: answers.JobSummary) -> pb.JobSummary:
    """Convert a job's line for `rdzvctl list`."""
    return to_message(pb.JobSummary(), summary)


def node(shown: answers.Node) -> pb.Node:
    """Convert a node, as `rdzvctl nodes` shows it."""
    return to_message(pb.Node(), shown)


def server(shown: answers.Server) -> pb.Server:
    """Convert an rdzvd, as `rdzvctl servers` shows it."""
    return to_message(pb.Server(server_version=shown.version), shown, without={"version"})


def token(shown: answers.Token) -> pb.Token:
    """Convert a token without its text."""
    return to_message(pb.Token(), shown)


def stack_report(report: answers.StackReport) -> pb.StackReport:
    """Convert the stacks of a round's workers."""
    return to_message(pb.StackReport(), report)

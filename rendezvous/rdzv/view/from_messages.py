"""Converts messages of the `Control` service to the values in `answers`."""

from __future__ import annotations

from rdzv.core.evidence.progress_lag import Word
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import history
from rdzv.view.answers import (
    OWN_BACKEND,
    Event,
    JobStatus,
    JobSummary,
    LastFailure,
    LogLines,
    Node,
    Server,
    StackReport,
    Token,
    WorkerFailure,
    rank_progress,
)
from rdzv.view.sentences import sentence


def token_of(token: pb.Token) -> Token:
    return read(Token, token)


def server_of(server: pb.Server) -> Server:
    return read(Server, server)


def job_status_of(status: pb.JobStatus) -> JobStatus:
    said = [(one.rank, Word(one.step, one.age_ms, one.rate or None)) for one in status.progress]
    return read(
        JobStatus,
        status,
        last_failure=_last_failure(status),
        backend=status.backend or OWN_BACKEND,
        progress=rank_progress(said),
    )


def _last_failure(status: pb.JobStatus) -> LastFailure | None:
    failures = [
        read(WorkerFailure, one.failure, node_id=one.node_id, address=one.address or None)
        for one in status.last_failure.failures
    ]
    if not failures:
        return None
    age_ms = status.last_failure_age_ms if status.HasField("last_failure_age_ms") else None
    return LastFailure(age_ms, failures[0], tuple(failures[1:]))


def node_of(node: pb.Node) -> Node:
    """Decode a node. Times are None unless the node is in the state to which they refer."""
    return read(
        Node,
        node,
        gpus_free=node.gpus_free if node.HasField("resources") else None,
        cordon_age_ms=node.cordon_age_ms if node.cordoned else None,
        quarantine_age_ms=node.quarantine_age_ms if node.quarantine else None,
        quarantine_left_ms=node.quarantine_left_ms if node.quarantine else None,
        unhealthy_age_ms=node.unhealthy_age_ms if node.unhealthy else None,
        drain_left_ms=node.drain_left_ms if node.drain else None,
        drain_age_ms=node.drain_age_ms if node.drain else None,
        state_age_ms=None if node.state == "gone" else node.state_age_ms,
    )


def job_summary_of(job: pb.JobSummary) -> JobSummary:
    return read(JobSummary, job, backend=job.backend or OWN_BACKEND)


def log_lines_of(lines: pb.LogLines) -> LogLines:
    """Decode a chunk of a worker's log."""
    return read(LogLines, lines)


def stack_report_of(report: pb.StackReport) -> StackReport:
    """Decode the stacks of a round's workers."""
    return read(StackReport, report)


def event_of(event: pb.Event) -> Event:
    """Decode an event."""
    fields = history.fields_in(event.fields)
    known = history.read(event.name, fields)
    text = sentence(known) if known is not None else event.text
    return Event(event.unix_ms, event.run or None, event.name, text, fields)

"""Conversion of `Control` service messages to the values of `answers`."""

from __future__ import annotations

from collections.abc import Iterable

from rdzv.core.progress_lag import Word
from rdzv.core.timed_text import TimeInText
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import (
    OWN_BACKEND,
    Budgets,
    DeclinedNode,
    Event,
    Gpu,
    JobStatus,
    JobSummary,
    LastFailure,
    LogLines,
    Node,
    NodeJob,
    NodeStatus,
    Resources,
    Server,
    SilentNode,
    StackFrame,
    StackGroup,
    StackReport,
    Straggler,
    Submission,
    ThreadStack,
    Token,
    WorkerFailure,
    WorkerStack,
    rank_progress,
)
from rdzv.view.history import fields_in, read
from rdzv.view.sentences import sentence

_Message = (
    pb.JobStatus
    | pb.JobSummary
    | pb.NodeStatus
    | pb.WorkerFailure
    | pb.Submission
    | pb.Budgets
    | pb.Token
)


def _optional(message: _Message, field: str) -> int | None:
    """Return a number that is optional on the wire; None if it is unset."""
    return int(getattr(message, field)) if message.HasField(field) else None  # type: ignore[arg-type]


def token_of(token: pb.Token) -> Token:
    """Decode a token."""
    return Token(
        id=token.id,
        name=token.name,
        roles=tuple(token.roles),
        age_ms=token.age_ms,
        expires_in_ms=_optional(token, "expires_in_ms"),
        used_age_ms=_optional(token, "used_age_ms"),
    )


def server_of(server: pb.Server) -> Server:
    """Decode an rdzvd."""
    return Server(
        address=server.address,
        leads=server.leads,
        leadership=server.leadership or None,
        store=server.store,
        version=server.server_version,
        state_age_ms=server.state_age_ms,
        insecure=server.insecure or None,
        store_away=server.store_away or None,
    )


def job_status_of(status: pb.JobStatus) -> JobStatus:
    """Decode the status of a job."""
    return JobStatus(
        rdzv_id=status.rdzv_id,
        run=status.run or None,
        run_number=status.run_number or None,
        state=status.state,
        state_age_ms=status.state_age_ms,
        reason=status.reason or None,
        run_age_ms=status.run_age_ms,
        round=_optional(status, "round"),
        min_nodes=status.min_nodes or None,
        max_nodes=status.max_nodes or None,
        world_size=status.world_size or None,
        restarts=_optional(status, "restarts"),
        max_restarts=_optional(status, "max_restarts"),
        master_addr=status.master_addr or None,
        master_port=status.master_port or None,
        nodes=tuple(map(_node_status, status.nodes)),
        last_end=status.last_end or None,
        last_failure=_last_failure(status),
        backend=status.backend or OWN_BACKEND,
        progress=rank_progress(
            [(one.rank, Word(one.step, one.age_ms, one.rate or None)) for one in status.progress]
        ),
        stragglers=tuple(
            Straggler(one.rank, one.step_s, one.median_s, one.age_ms) for one in status.stragglers
        ),
        submission=_submission(status.submission) if status.HasField("submission") else None,
        budgets=_budgets(status.budgets) if status.HasField("budgets") else None,
        no_progress=status.no_progress,
        owner=status.owner or None,
        has_secret=status.has_secret,
        reason_times=_times(status.reason_times),
    )


def _budgets(budgets: pb.Budgets) -> Budgets:
    return Budgets(
        preemptions=budgets.preemptions,
        max_preemptions=_optional(budgets, "max_preemptions"),
        store_failures=budgets.store_failures,
        max_store_failures=_optional(budgets, "max_store_failures"),
        restarts_in_vain=budgets.restarts_in_vain,
        no_progress_restarts=budgets.no_progress_restarts,
        furthest_step=_optional(budgets, "furthest_step"),
        restart_window_ms=budgets.restart_window_ms,
    )


def _submission(submission: pb.Submission) -> Submission:
    return Submission(
        submitted_by=submission.submitted_by or None,
        age_ms=submission.age_ms,
        args=tuple(submission.args),
        env_names=tuple(submission.env_names),
        chdir=submission.chdir or None,
        labels=_labels(submission.labels),
        priority=submission.priority,
        gpus_per_node=_optional(submission, "gpus_per_node"),
        placed=tuple(submission.placed),
        jobs_before=_optional(submission, "jobs_before"),
        declined=tuple(DeclinedNode(one.node_id, one.reason) for one in submission.declined),
        submitter=submission.submitter or None,
        account=submission.account or None,
    )


def _labels(labels: Iterable[pb.Label]) -> dict[str, str]:
    return {label.name: label.value for label in labels}


def node_of(node: pb.Node) -> Node:
    """Decode a node."""
    return Node(
        node_id=node.node_id,
        state=node.state,
        state_age_ms=node.state_age_ms,
        program=node.program or None,
        address=node.address or None,
        agent_version=node.agent_version or None,
        resources=_resources(node.resources) if node.HasField("resources") else None,
        gpus_free=node.gpus_free if node.HasField("resources") else None,
        jobs=tuple(NodeJob(job.rdzv_id, job.gpus, job.state) for job in node.jobs),
        cordoned=node.cordoned,
        cordon_reason=node.cordon_reason or None,
        cordon_age_ms=node.cordon_age_ms if node.cordoned else None,
        metrics=node.metrics or None,
        quarantine=node.quarantine or None,
        quarantine_age_ms=node.quarantine_age_ms if node.quarantine else None,
        quarantine_left_ms=node.quarantine_left_ms if node.quarantine else None,
        unhealthy=node.unhealthy or None,
        unhealthy_age_ms=node.unhealthy_age_ms if node.unhealthy else None,
        drain=node.drain or None,
        drain_reason=node.drain_reason or None,
        drain_left_ms=node.drain_left_ms if node.drain else None,
        drained_by_operator=node.drained_by_operator,
    )


def _resources(resources: pb.Resources) -> Resources:
    return Resources(
        cpus=resources.cpus or None,
        memory_bytes=resources.memory_bytes or None,
        gpus=tuple(
            Gpu(gpu.uuid, gpu.name or None, gpu.memory_bytes or None) for gpu in resources.gpus
        ),
        labels=_labels(resources.labels),
        capacity=resources.capacity or None,
        topology=resources.topology or None,
    )


def _node_status(node: pb.NodeStatus) -> NodeStatus:
    return NodeStatus(
        node_id=node.node_id,
        state=node.state,
        group_rank=_optional(node, "group_rank"),
        rank_first=_optional(node, "rank_first"),
        local_world_size=node.local_world_size or None,
        address=node.address or None,
        role=node.role or None,
        state_age_ms=node.state_age_ms,
        reason=node.reason or None,
        drain_left_ms=_optional(node, "drain_left_ms"),
        reason_times=_times(node.reason_times),
    )


def _times(times: Iterable[pb.ReasonTime]) -> tuple[TimeInText, ...]:
    return tuple(
        TimeInText(one.at, one.length, one.ms, one.grows, one.waits_for or None) for one in times
    )


def _last_failure(status: pb.JobStatus) -> LastFailure | None:
    failures = tuple(map(_worker_failure, status.last_failure.failures))
    if not failures:
        return None
    return LastFailure(_optional(status, "last_failure_age_ms"), failures[0], failures[1:])


def _worker_failure(failed: pb.NodeFailure) -> WorkerFailure:
    failure = failed.failure
    return WorkerFailure(
        node_id=failed.node_id,
        address=failed.address or None,
        rank=failure.rank,
        local_rank=failure.local_rank,
        pid=failure.pid or None,
        exit_code=_optional(failure, "exit_code"),
        signal=_optional(failure, "signal"),
        message=failure.message or None,
        traceback=failure.traceback or None,
    )


def job_summary_of(job: pb.JobSummary) -> JobSummary:
    """Decode a job of a list."""
    return JobSummary(
        rdzv_id=job.rdzv_id,
        run=job.run or None,
        state=job.state,
        state_age_ms=job.state_age_ms,
        reason=job.reason or None,
        round=_optional(job, "round"),
        nodes=job.nodes,
        min_nodes=job.min_nodes or None,
        max_nodes=job.max_nodes or None,
        world_size=job.world_size or None,
        restarts=_optional(job, "restarts"),
        max_restarts=_optional(job, "max_restarts"),
        backend=job.backend or OWN_BACKEND,
        hangs=job.hangs or None,
        reason_times=_times(job.reason_times),
    )


def log_lines_of(lines: pb.LogLines) -> LogLines:
    """Decode a piece of a log."""
    return LogLines(
        node_id=lines.node_id,
        rank=lines.rank,
        local_rank=lines.local_rank,
        stderr=lines.stderr,
        round=lines.round,
        data=lines.data,
        note=lines.note or None,
    )


def stack_report_of(report: pb.StackReport) -> StackReport:
    """Decode the stacks of a round's workers."""
    return StackReport(
        rdzv_id=report.rdzv_id,
        run=report.run,
        round=report.round,
        age_ms=report.age_ms,
        reason=report.reason,
        summary=report.summary,
        groups=tuple(StackGroup(tuple(one.ranks), one.where) for one in report.groups),
        stacks=tuple(map(_worker_stack, report.stacks)),
        left_out=report.left_out,
        silent=tuple(
            SilentNode(one.node_id, one.rank_first, one.local_world_size, one.reason)
            for one in report.silent
        ),
    )


def _worker_stack(stack: pb.WorkerStack) -> WorkerStack:
    threads = tuple(
        ThreadStack(
            thread.name,
            thread.main,
            tuple(StackFrame(f.name, f.file, f.line or None) for f in thread.frames),
        )
        for thread in stack.threads
    )
    return WorkerStack(
        rank=stack.rank,
        node_id=stack.node_id,
        local_rank=stack.local_rank,
        pid=stack.pid,
        state=stack.state or None,
        threads=threads,
        kernel=tuple(stack.kernel),
        note=stack.note or None,
    )


def event_of(event: pb.Event) -> Event:
    """Decode an event."""
    fields = fields_in(event.fields)
    known = read(event.name, fields)
    text = sentence(known) if known is not None else event.text
    return Event(event.unix_ms, event.run or None, event.name, text, fields)

"""Converts the server's own values to the answers that gRPC and HTTP share.

An unknown value is None in an answer, however it is represented here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdzv.core.explain import BudgetsView, JobView, NodeView
from rdzv.core.model import Failure, NodeState, Submission
from rdzv.core.placement import Resources
from rdzv.core.progress_lag import Word
from rdzv.core.stacks import Report, WorkerStack
from rdzv.core.stragglers import Straggler
from rdzv.core.timed_text import times_of
from rdzv.server.messages import LogLines, NodeSummary, RankProgress, ServerView
from rdzv.server.security.tokens import Token
from rdzv.view import answers

_HERE = (NodeState.SEATED, NodeState.SUCCEEDED, NodeState.AWAY, NodeState.STOPPING)


def job_status(
    view: JobView,
    now_ms: int,
    progress: Sequence[RankProgress] = (),
    stragglers: Iterable[Straggler] = (),
) -> answers.JobStatus:
    """Show one job, and the progress of its workers."""
    return answers.JobStatus(
        rdzv_id=view.rdzv_id,
        run=view.run or None,
        run_number=view.run_number or None,
        state=view.state.value,
        state_age_ms=view.state_age_ms,
        reason=str(view.reason) or None,
        run_age_ms=view.run_age_ms,
        round=view.round,
        min_nodes=view.min_nodes or None,
        max_nodes=view.max_nodes or None,
        world_size=view.world_size or None,
        restarts=view.restarts,
        max_restarts=view.max_restarts,
        master_addr=view.master_addr or None,
        master_port=view.master_port or None,
        nodes=tuple(map(_job_node, view.nodes)),
        last_end=view.last_end or None,
        last_failure=_last_failure(view.last_failure, view.last_failure_age_ms),
        backend=view.backend,
        progress=answers.rank_progress(
            [(one.rank, Word(one.step, one.age_ms, one.rate or None)) for one in progress]
        ),
        submission=_submission(view.submission, view.jobs_before, now_ms),
        budgets=_budgets(view.budgets),
        no_progress=view.no_progress,
        stragglers=tuple(
            answers.Straggler(one.rank, one.step_s, one.median_s, max(now_ms - one.since_ms, 0))
            for one in stragglers
        ),
        owner=view.owner or None,
        has_secret=view.has_secret,
        reason_times=times_of(view.reason),
    )


def _job_node(view: NodeView) -> answers.NodeStatus:
    return answers.NodeStatus(
        node_id=view.node_id,
        state=view.state.value,
        group_rank=view.group_rank,
        rank_first=view.rank_first,
        local_world_size=view.local_world_size or None,
        address=view.address or None,
        role=view.role or None,
        state_age_ms=view.state_age_ms,
        reason=str(view.reason) or None,
        drain_left_ms=view.drain_left_ms,
        reason_times=times_of(view.reason),
    )


def _last_failure(failures: Sequence[Failure], age_ms: int | None) -> answers.LastFailure | None:
    if not failures:
        return None
    root_cause, *others = map(_worker_failure, failures)
    return answers.LastFailure(age_ms, root_cause, tuple(others))


def _worker_failure(failure: Failure) -> answers.WorkerFailure:
    return answers.WorkerFailure(
        node_id=failure.node_id,
        address=failure.address or None,
        rank=failure.rank,
        local_rank=failure.local_rank,
        pid=failure.pid or None,
        exit_code=failure.exit_code,
        signal=failure.signal,
        message=failure.message or None,
        traceback=failure.traceback or None,
    )


def _submission(
    submission: Submission | None, jobs_before: int | None, now_ms: int
) -> answers.Submission | None:
    if submission is None:
        return None
    spec = submission.spec
    return answers.Submission(
        submitted_by=submission.submitted_by or None,
        age_ms=max(now_ms - submission.at_ms, 0),
        args=spec.args,
        env_names=tuple(name for name, _ in spec.env),
        chdir=spec.chdir or None,
        labels=dict(spec.labels),
        priority=spec.priority,
        gpus_per_node=spec.gpus_per_node,
        placed=submission.placed,
        jobs_before=jobs_before,
        declined=tuple(
            answers.DeclinedNode(one.node_id, one.reason) for one in submission.declined
        ),
        submitter=spec.submitter or None,
        account=spec.account or None,
    )


def _budgets(budgets: BudgetsView | None) -> answers.Budgets | None:
    if budgets is None:
        return None
    return answers.Budgets(
        preemptions=budgets.preemptions,
        max_preemptions=budgets.max_preemptions,
        store_failures=budgets.store_failures,
        max_store_failures=budgets.max_store_failures,
        restarts_in_vain=budgets.restarts_in_vain,
        no_progress_restarts=budgets.no_progress_restarts,
        furthest_step=budgets.furthest_step,
        restart_window_ms=budgets.restart_window_ms,
    )


def job_summary(view: JobView, hangs: str) -> answers.JobSummary:
    """Show a job as one line; `hangs` names the workers that hang, or is empty."""
    return answers.JobSummary(
        rdzv_id=view.rdzv_id,
        run=view.run or None,
        state=view.state.value,
        state_age_ms=view.state_age_ms,
        reason=str(view.reason) or None,
        round=view.round,
        nodes=sum(1 for n in view.nodes if n.group_rank is not None and n.state in _HERE),
        min_nodes=view.min_nodes or None,
        max_nodes=view.max_nodes or None,
        world_size=view.world_size or None,
        restarts=view.restarts,
        max_restarts=view.max_restarts,
        backend=view.backend,
        hangs=hangs or None,
        reason_times=times_of(view.reason),
    )


def node(summary: NodeSummary) -> answers.Node:
    """Show one node, across its jobs."""
    has = summary.resources
    return answers.Node(
        node_id=summary.node_id,
        state=summary.state,
        state_age_ms=summary.state_age_ms,
        program=summary.program or None,
        address=summary.address or None,
        agent_version=summary.version or None,
        resources=_resources(has) if has is not None else None,
        gpus_free=summary.gpus_free if has is not None else None,
        jobs=tuple(answers.NodeJob(job.rdzv_id, job.gpus, job.state) for job in summary.jobs),
        cordoned=summary.cordoned,
        cordon_reason=summary.cordon_reason or None,
        cordon_age_ms=summary.cordon_age_ms if summary.cordoned else None,
        metrics=summary.metrics or None,
        quarantine=summary.quarantine or None,
        quarantine_age_ms=summary.quarantine_age_ms if summary.quarantine else None,
        quarantine_left_ms=summary.quarantine_left_ms if summary.quarantine else None,
        unhealthy=summary.unhealthy or None,
        unhealthy_age_ms=summary.unhealthy_age_ms if summary.unhealthy else None,
        drain=summary.drain or None,
        drain_reason=summary.drain_reason or None,
        drain_left_ms=summary.drain_left_ms if summary.drain else None,
        drained_by_operator=summary.drained_by_operator,
    )


def _resources(has: Resources) -> answers.Resources:
    return answers.Resources(
        cpus=has.cpus or None,
        memory_bytes=has.memory_bytes or None,
        gpus=tuple(
            answers.Gpu(gpu.uuid, gpu.name or None, gpu.memory_bytes or None) for gpu in has.gpus
        ),
        labels=dict(has.labels),
        capacity=has.capacity or None,
        topology=has.topology or None,
    )


def server(view: ServerView) -> answers.Server:
    """Show one rdzvd."""
    return answers.Server(
        address=view.address,
        leads=view.leads,
        leadership=view.leadership or None,
        store=view.store,
        version=view.version,
        state_age_ms=view.state_age_ms,
        insecure=view.insecure or None,
        store_away=view.store_away or None,
    )


def token(token: Token, now_ms: int) -> answers.Token:
    """Show a token, without its secret."""
    expires_ms, used_ms = token.expires_ms, token.used_ms
    return answers.Token(
        id=token.id,
        name=token.name,
        roles=tuple(token.roles),
        age_ms=max(now_ms - token.created_ms, 0),
        expires_in_ms=None if expires_ms is None else max(expires_ms - now_ms, 0),
        used_age_ms=None if used_ms is None else max(now_ms - used_ms, 0),
    )


def log_lines(lines: LogLines) -> answers.LogLines:
    """Show a piece of a log, or a note."""
    return answers.LogLines(
        node_id=lines.node_id,
        rank=lines.rank,
        local_rank=lines.local_rank,
        stderr=lines.stderr,
        round=lines.round,
        data=lines.data,
        note=lines.note or None,
    )


def stack_report(report: Report, now_ms: int) -> answers.StackReport:
    """Show the stacks of a round's workers."""
    return answers.StackReport(
        rdzv_id=report.rdzv_id,
        run=report.run,
        round=report.round,
        age_ms=max(now_ms - report.at_ms, 0),
        reason=report.reason,
        summary=report.summary,
        groups=tuple(answers.StackGroup(one.ranks, one.where) for one in report.groups),
        stacks=tuple(map(_stack, report.stacks)),
        left_out=report.left_out,
        silent=tuple(
            answers.SilentNode(one.node_id, one.rank_first, one.local_world_size, one.reason)
            for one in report.silent
        ),
    )


def _stack(stack: WorkerStack) -> answers.WorkerStack:
    threads = tuple(
        answers.ThreadStack(
            thread.name,
            thread.main,
            tuple(answers.StackFrame(f.name, f.file, f.line or None) for f in thread.frames),
        )
        for thread in stack.threads
    )
    return answers.WorkerStack(
        rank=stack.rank,
        node_id=stack.node_id,
        local_rank=stack.local_rank,
        pid=stack.pid,
        state=stack.state or None,
        threads=threads,
        kernel=stack.kernel,
        note=stack.note or None,
    )

"""The answers of rdzvd, as values: in them None means "not known".

The server makes these values of its own (`rdzv.server.operations.answer_values`). Its HTTP API
writes them as JSON, its gRPC services as messages, and here messages become the same values again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rdzv.core.progress_lag import Word, lags
from rdzv.core.timed_text import TimeInText
from rdzv.structs import struct
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.history import fields_in, read
from rdzv.view.sentences import sentence, sentence_of

if TYPE_CHECKING:
    from rdzv.stores.base import Record

OWN_BACKEND = "rdzv"
"""The backend of a job unless the server names another; older servers name none."""


@struct(frozen=True)
class WorkerFailure:
    """One worker that failed. Exactly one of `exit_code` and `signal` is known if it has exited."""

    node_id: str
    address: str | None
    rank: int
    local_rank: int
    pid: int | None
    exit_code: int | None
    signal: int | None
    message: str | None
    traceback: str | None


@struct(frozen=True)
class LastFailure:
    """The last worker failure of a run: its root cause, and what failed right beside it."""

    age_ms: int | None
    root_cause: WorkerFailure
    others: tuple[WorkerFailure, ...]


@struct(frozen=True)
class NodeStatus:
    """One node of a job. `reason` says why it is not seated; None if it is, and stays.

    `drain_left_ms` is how much longer its workers have, if it is about to leave.
    """

    node_id: str
    state: str
    group_rank: int | None
    rank_first: int | None
    local_world_size: int | None
    address: str | None
    role: str | None
    state_age_ms: int
    reason: str | None
    drain_left_ms: int | None = None
    reason_times: tuple[TimeInText, ...] = ()


@struct(frozen=True)
class RankProgress:
    """The progress of one worker, as it reported `age_ms` ago. `rate` is in steps a second.

    `behind` is how many steps it is behind the foremost worker, at least, at one and the same
    moment: the steps themselves are of different moments.
    """

    rank: int
    step: int
    age_ms: int
    rate: float | None
    behind: int = 0


@struct(frozen=True)
class Straggler:
    """A worker that takes far longer for a step than the worker in the middle of its role."""

    rank: int
    step_s: float
    median_s: float
    age_ms: int


@struct(frozen=True)
class Token:
    """A token without its text. `expires_in_ms` is None if it never expires, 0 if it has expired.

    `used_age_ms` is accurate to an hour; None: it was never used.
    """

    id: str
    name: str
    roles: tuple[str, ...]
    age_ms: int
    expires_in_ms: int | None
    used_age_ms: int | None


@struct(frozen=True)
class DeclinedNode:
    """A node that could not run a submitted job, and is not chosen for it again."""

    node_id: str
    reason: str


@struct(frozen=True)
class Submission:
    """How a job was submitted, and how far it is placed. `placed` are the nodes that are chosen.

    `jobs_before` jobs are served before it; None if it does not wait. `env_names` are the names of
    its environment; values are never sent. `gpus_per_node` is None if each worker gets one GPU, as
    far as there are any.
    """

    submitted_by: str | None
    age_ms: int
    args: tuple[str, ...]
    env_names: tuple[str, ...]
    chdir: str | None
    labels: dict[str, str]
    priority: int
    gpus_per_node: int | None
    placed: tuple[str, ...]
    jobs_before: int | None
    declined: tuple[DeclinedNode, ...]
    submitter: str | None = None
    """The proven name of the submitter; None where no proof is asked for."""
    account: str | None = None
    """The account that it asks to run as; None: the one that each node has for its submitter."""


@struct(frozen=True)
class Budgets:
    """How often rounds of a run ended by each cause, and how often they may; None: any number.

    `restarts_in_vain` are those in a row that did not move the job on, beyond `furthest_step` or to
    another snapshot; after `no_progress_restarts` of them it has failed, unless that is 0.
    """

    preemptions: int
    max_preemptions: int | None
    store_failures: int
    max_store_failures: int | None
    restarts_in_vain: int
    no_progress_restarts: int
    furthest_step: int | None
    restart_window_ms: int


@struct(frozen=True)
class JobStatus:
    """One job: its state, and why. `round` and `world_size` are those of the last complete one.

    `backend` forms its group: `rdzv`, or `c10d`, which the server only watches. `progress` has the
    workers of the live round that report progress, by RANK. `submission` is None if the server
    does not choose its nodes.
    """

    rdzv_id: str
    run: str | None
    run_number: int | None
    state: str
    state_age_ms: int
    reason: str | None
    run_age_ms: int
    round: int | None
    min_nodes: int | None
    max_nodes: int | None
    world_size: int | None
    restarts: int | None
    max_restarts: int | None
    master_addr: str | None
    master_port: int | None
    nodes: tuple[NodeStatus, ...]
    last_end: str | None
    last_failure: LastFailure | None
    backend: str
    progress: tuple[RankProgress, ...]
    submission: Submission | None = None
    budgets: Budgets | None = None
    no_progress: bool = False
    """The job failed because it made no progress: the same launch would do no better."""
    stragglers: tuple[Straggler, ...] = ()
    """Workers that have straggled for a while, by RANK."""
    owner: str | None = None
    """The only caller, besides admins, that may stop it, and so on; None: only admins."""
    has_secret: bool = False
    """Whether those who join must know a secret."""
    reason_times: tuple[TimeInText, ...] = ()
    """The durations in `reason` that go on with time."""


@struct(frozen=True)
class JobSummary:
    """One job in a list. `nodes` counts those that are seated now."""

    rdzv_id: str
    run: str | None
    state: str
    state_age_ms: int
    reason: str | None
    round: int | None
    nodes: int
    min_nodes: int | None
    max_nodes: int | None
    world_size: int | None
    restarts: int | None
    max_restarts: int | None
    backend: str
    hangs: str | None = None
    """The workers that hang now, in words; None: none do."""
    reason_times: tuple[TimeInText, ...] = ()


@struct(frozen=True)
class Gpu:
    """One GPU of a node."""

    uuid: str
    name: str | None
    memory_bytes: int | None


@struct(frozen=True)
class Resources:
    """The resources of a node for submitted jobs; it takes at most `capacity` jobs at once."""

    cpus: int | None
    memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    labels: dict[str, str]
    capacity: int | None
    topology: str | None


@struct(frozen=True)
class NodeJob:
    """A job that a node is in, holds, or was chosen for."""

    rdzv_id: str
    gpus: int
    state: str


@struct(frozen=True)
class Node:
    """One node, across its jobs. `resources` is None if it takes no submitted jobs.

    `gpus_free` is None where the number of its GPUs is not known. A cordoned node takes no more,
    nor does one that is quarantined, or unhealthy; `quarantine` and `unhealthy` say why.
    """

    node_id: str
    state: str
    state_age_ms: int
    program: str | None
    address: str | None
    agent_version: str | None
    resources: Resources | None
    gpus_free: int | None
    jobs: tuple[NodeJob, ...]
    cordoned: bool
    cordon_reason: str | None
    cordon_age_ms: int | None
    metrics: str | None = None
    quarantine: str | None = None
    quarantine_age_ms: int | None = None
    quarantine_left_ms: int | None = None
    unhealthy: str | None = None
    unhealthy_age_ms: int | None = None
    drain: str | None = None
    """`draining` while something of a job is left there, then `drained`; None: it stays."""
    drain_reason: str | None = None
    drain_left_ms: int | None = None
    """How much longer its workers have; 0: their time is over."""
    drained_by_operator: bool = False


@struct(frozen=True)
class Server:
    """One rdzvd. `leadership` is the number of the one that leads."""

    address: str
    leads: bool
    leadership: int | None
    store: str
    version: str
    state_age_ms: int
    insecure: str | None = None
    """Why everyone who reaches it may do everything; of the one that answers."""
    store_away: str | None = None
    """Why it can store nothing at present, since when, and what waits; of the one that answers."""


@struct(frozen=True)
class LogLines:
    """A piece of one worker's output, or a `note` why output of its node is missing.

    A note about the whole job has an empty `node_id`. A piece may end anywhere in a line; pieces of
    one worker, round and stream are in order.
    """

    node_id: str
    rank: int
    local_rank: int
    stderr: bool
    round: int
    data: bytes
    note: str | None


@struct(frozen=True)
class StackFrame:
    """One call; `line` is None if it is not known."""

    name: str
    file: str
    line: int | None


@struct(frozen=True)
class ThreadStack:
    """One thread of a worker: its frames, innermost first."""

    name: str
    main: bool
    frames: tuple[StackFrame, ...]


@struct(frozen=True)
class WorkerStack:
    """The stack of one worker. `state` is that of its process, as in /proc."""

    rank: int
    node_id: str
    local_rank: int
    pid: int
    state: str | None
    threads: tuple[ThreadStack, ...]
    kernel: tuple[str, ...]
    note: str | None


@struct(frozen=True)
class StackGroup:
    """Workers that were at the same place."""

    ranks: tuple[int, ...]
    where: str


@struct(frozen=True)
class SilentNode:
    """A node that has not answered."""

    node_id: str
    rank_first: int
    local_world_size: int
    reason: str


@struct(frozen=True)
class StackReport:
    """The stacks of the workers of one round at one moment."""

    rdzv_id: str
    run: str
    round: int
    age_ms: int
    reason: str
    summary: str
    groups: tuple[StackGroup, ...]
    stacks: tuple[WorkerStack, ...]
    left_out: int
    silent: tuple[SilentNode, ...]


@struct(frozen=True)
class Event:
    """One event of a job's history; `unix_ms` is the server's clock, for people.

    `text` says in a line what its `fields` say; they are None where only the line is known, as of
    what older versions of rdzvd have kept.
    """

    unix_ms: int
    run: str | None
    name: str
    text: str
    fields: dict[str, Any] | None = None


# ------------------------------------------------------------------------------------ from messages

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
    """Return a number that is optional on the wire; None if it is not set."""
    return int(getattr(message, field)) if message.HasField(field) else None  # type: ignore[arg-type]


def token_of(token: pb.Token) -> Token:
    """Read a token."""
    return Token(
        id=token.id,
        name=token.name,
        roles=tuple(token.roles),
        age_ms=token.age_ms,
        expires_in_ms=_optional(token, "expires_in_ms"),
        used_age_ms=_optional(token, "used_age_ms"),
    )


def server_of(server: pb.Server) -> Server:
    """Read an rdzvd."""
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
    """Read a job."""
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


def rank_progress(said: Sequence[tuple[int, Word]]) -> tuple[RankProgress, ...]:
    """Compare what the workers of a round, by RANK, have said at different moments."""
    behind = lags([word for _, word in said])
    return tuple(
        RankProgress(rank, word.step, word.age_ms, word.rate, steps)
        for (rank, word), steps in zip(said, behind, strict=True)
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
    """Read a node."""
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
    """Read a job of a list."""
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
    """Read a piece of a log."""
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
    """Read the stacks of the workers of a round."""
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
    """Read an event."""
    fields = fields_in(event.fields)
    known = read(event.name, fields)
    text = sentence(known) if known is not None else event.text
    return Event(event.unix_ms, event.run or None, event.name, text, fields)


def event_in(row: Record) -> Event:
    """Read a row of history."""
    fields = fields_in(row.data)
    text = row.data if fields is None else sentence_of(row.name, fields)
    return Event(row.unix_ms, row.run or None, row.name, text, fields)

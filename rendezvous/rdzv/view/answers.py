"""rdzvd's answers as values, in which None means "unknown".

The server builds them from its own values (`rdzv.server.operations.answer_values`). Its HTTP API
writes them as JSON, its gRPC services as messages, which `from_messages` decodes to equal values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rdzv.core.evidence.progress_lag import Word, lags
from rdzv.core.gpu_state import GpuState
from rdzv.core.snapshots import SoleHolder
from rdzv.core.timed_text import TimeInText
from rdzv.structs import struct
from rdzv.view.history import fields_in
from rdzv.view.sentences import sentence_of

if TYPE_CHECKING:
    from rdzv.stores.base import Record

OWN_BACKEND = "rdzv"
"""The backend of a job unless the server names another; older servers name none."""


@struct(frozen=True)
class WorkerFailure:
    """A failed worker. Exactly one of `exit_code` and `signal` is known if it has exited."""

    node_id: str
    address: str | None
    rank: int
    local_rank: int
    pid: int | None
    exit_code: int | None
    signal: int | None
    message: str | None
    traceback: str | None
    suspect: bool = False
    """Whether one of its collectives failed, perhaps because of another failure; it has not exited.
    """


@struct(frozen=True)
class LastFailure:
    """The last worker failure of a run: its root cause, and others that failed with it."""

    age_ms: int | None
    root_cause: WorkerFailure
    others: tuple[WorkerFailure, ...]


@struct(frozen=True)
class NodeStatus:
    """One node of a job. `reason` says why it is not seated; None if it is seated and stays.

    `drain_left_ms` is how much time its workers have left, if the node is about to leave.
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
    kept: int | None = None
    """How many of its workers in the live round are kept; `warm` and `cold` count those forked warm
    or started cold. None if unknown."""
    warm: int | None = None
    cold: int | None = None
    snapshots: int = 0
    """How many snapshots of the job's state it holds in memory; `snapshot_bytes` is their size."""
    snapshot_bytes: int = 0


@struct(frozen=True)
class NodeLoss:
    """What would be left in memory if one node was lost now, in the worst case."""

    step: int | None
    """The newest step that would be whole; None if none would be."""
    lost_steps: int | None = None
    """How many steps would be redone if all workers failed with it; None if unknown."""
    sole_holders: tuple[SoleHolder, ...] = ()
    """Nodes without which the newest step would not be whole; the first few of them."""
    sole_holder_count: int = 0


@struct(frozen=True)
class WholeSnapshot:
    """The newest step for which participants hold all `parts` of a job's state in memory."""

    lineage: int
    step: int
    parts: int
    age_ms: int
    """How long it has been whole, as far as this server knows."""
    lost_steps: int | None = None
    """How many steps would be redone if all workers failed now; None if unknown."""
    node_loss: NodeLoss | None = None
    """None until this server knows which nodes hold the step."""


@struct(frozen=True)
class RankProgress:
    """The progress of one worker, as it reported `age_ms` ago. `rate` is in steps per second.

    `behind` is the minimum number of steps by which it trails the leading worker at the same
    moment; the reported steps themselves are from different moments.
    """

    rank: int
    step: int
    age_ms: int
    rate: float | None
    behind: int = 0


@struct(frozen=True)
class Straggler:
    """A worker that is slow by its rate (`step_s`) or by when it enters collectives (`late_ms`)."""

    rank: int
    age_ms: int
    """How long it has been slow."""
    step_s: float | None = None
    """How many seconds it takes for a step."""
    median_s: float | None = None
    """How many seconds the median worker of its role takes."""
    late_ms: float | None = None
    """How much later than the others it enters collectives: the median."""
    late_p95_ms: float | None = None
    """The 95th percentile of the same delay."""
    clock_error_ms: float | None = None
    """How far off these two may be, since the nodes' clocks differ."""
    wait_share: float | None = None
    """A lower bound on the share of time that the others spend waiting for it."""
    gpu: GpuState | None = None
    """What NVML shows about its GPU, if anything."""


@struct(frozen=True)
class Token:
    """A token without its secret.

    `expires_in_ms` is None if it never expires, 0 if it has expired. `used_age_ms` is accurate to
    an hour; None if it was never used.
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
    """How a job was submitted, and its placement so far. `placed` are the chosen nodes.

    `jobs_before` is the number of jobs served before it; None if it does not wait. `env_names` are
    the names of its environment variables; values are never sent. `gpus_per_node` is None if each
    worker gets one GPU on nodes that have any.
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
    """The authenticated name of the submitter; None if authentication is not required."""
    account: str | None = None
    """The account it asks to run as; None for each node's default account for the submitter."""


@struct(frozen=True)
class Budgets:
    """How often a run's rounds ended for each cause, and the limits; None if there is no limit.

    `restarts_in_vain` counts consecutive restarts that led neither beyond `furthest_step` nor to a
    new snapshot; after `no_progress_restarts` of them the job fails, unless that is 0.
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
    """One job: its state and the reason. `round` and `world_size` describe the last complete round.

    `backend` is the rendezvous that forms its group: `rdzv`, or `c10d`, which the server only
    watches. `progress` has the workers of the live round that report progress, by RANK.
    `submission` is None if the server does not choose the job's nodes.
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
    """How the last round ended."""
    last_failure: LastFailure | None
    backend: str
    progress: tuple[RankProgress, ...]
    submission: Submission | None = None
    budgets: Budgets | None = None
    no_progress: bool = False
    """The job failed because it made no progress: launching it again unchanged would not help."""
    stragglers: tuple[Straggler, ...] = ()
    """Workers that have been slow for a while, by RANK."""
    owner: str | None = None
    """The only caller, besides admins, that may change the job; None if only admins may."""
    has_secret: bool = False
    """Whether joining requires a secret."""
    reason_times: tuple[TimeInText, ...] = ()
    """The durations in `reason` that change with time."""
    kept: int = 0
    """How many workers of the last complete round also took part in the previous one."""
    source: int | None = None
    """RANK of the kept worker with the newest state; None if there is none."""
    resume_step: int | None = None
    """How many steps the source had sealed."""
    warm: int | None = None
    """How many workers of the live round were forked warm; None, as is `cold`, if unknown."""
    cold: int | None = None
    snapshot: WholeSnapshot | None = None
    """The newest snapshots in memory that are whole; None if there are none."""


@struct(frozen=True)
class JobSummary:
    """One job in a list. `nodes` counts the nodes seated now."""

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
    """A description of the workers that hang now; None if none hang."""
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
    """A job that a node takes part in, holds, or was chosen for."""

    rdzv_id: str
    gpus: int
    state: str
    """`placed`, `holding`, or the node's state within the job."""


@struct(frozen=True)
class Node:
    """One node, across its jobs. `resources` is None if it takes no submitted jobs.

    `gpus_free` is None if the number of its GPUs is unknown. A node that is cordoned, quarantined
    or unhealthy takes no more jobs; `quarantine` and `unhealthy` give the reasons.
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
    """The address where its agent serves /metrics."""
    quarantine: str | None = None
    quarantine_age_ms: int | None = None
    quarantine_left_ms: int | None = None
    unhealthy: str | None = None
    unhealthy_age_ms: int | None = None
    drain: str | None = None
    """`draining` while jobs are left there, then `drained`; None if it is not being drained."""
    drain_reason: str | None = None
    drain_left_ms: int | None = None
    """How much time its workers have left; 0 if none."""
    drained_by_operator: bool = False


@struct(frozen=True)
class Server:
    """One rdzvd. `leadership` is the number of the current leadership."""

    address: str
    leads: bool
    leadership: int | None
    store: str
    version: str
    state_age_ms: int
    insecure: str | None = None
    """Why anyone who can reach it can do anything; known only for the server that answers."""
    store_away: str | None = None
    """Why it cannot reach its store, since when, and what waits; only for the answering server."""
    unix_ms: int | None = None
    """The time on its clock; known only for the server that answers."""


@struct(frozen=True)
class LogLines:
    """A piece of one worker's output, or a `note` on why output from a node is missing.

    A note about the whole job has an empty `node_id`. A piece may end anywhere in a line; the
    pieces of one worker, round and stream are in order.
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
    """One call; `line` is None if unknown."""

    name: str
    file: str
    line: int | None


@struct(frozen=True)
class ThreadStack:
    """One thread of a worker: its frames, innermost first."""

    name: str
    main: bool
    frames: tuple[StackFrame, ...]
    holds_gil: bool = False
    """Whether it holds the interpreter's lock."""


@struct(frozen=True)
class CollectiveRecord:
    """One collective that a worker has entered. `sizes` are the shapes and types of its input."""

    sequence: int
    operation: str
    sizes: str
    done: bool
    age_ms: int


@struct(frozen=True)
class GroupRecord:
    """The latest collectives of one worker in one process group, oldest first.

    `entered` is the sequence number of the last collective that it has entered.
    """

    group: str
    description: str
    entered: int
    latest: tuple[CollectiveRecord, ...]


@struct(frozen=True)
class WorkerStack:
    """The stack of one worker. `state` is the state of its process, as in /proc."""

    rank: int
    node_id: str
    local_rank: int
    pid: int
    state: str | None
    threads: tuple[ThreadStack, ...]
    kernel: tuple[str, ...]
    """Where the worker sleeps in the kernel."""
    note: str | None
    """Why part of the stack is missing."""
    collectives: tuple[GroupRecord, ...] = ()
    """Torch's record of its collectives; empty if there is none."""
    no_record: str | None = None
    """Why there is no record of its collectives."""


@struct(frozen=True)
class StackGroup:
    """Workers that are at the same place in their code."""

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
class HangCause:
    """The workers that the rest of a round waits for, according to the records of collectives.

    `sentence` is for people; `details` has a line for each process group that waits.
    """

    kind: str
    ranks: tuple[int, ...]
    """The workers that the others wait for; empty if either side may be at fault."""
    group: str
    """The process group of the collective that the others wait in."""
    sequence: int
    operation: str
    waiting: tuple[int, ...]
    """The RANKs that wait in that collective."""
    waiting_ms: int
    """How long they have waited."""
    sentence: str
    details: tuple[str, ...]


@struct(frozen=True)
class StackReport:
    """The stacks of one round's workers at one moment."""

    rdzv_id: str
    run: str
    round: int
    age_ms: int
    reason: str
    """Why they were taken."""
    summary: str
    groups: tuple[StackGroup, ...]
    """The largest first."""
    stacks: tuple[WorkerStack, ...]
    """By RANK."""
    left_out: int
    """The number of workers in a group whose stacks were not kept because there were too many."""
    silent: tuple[SilentNode, ...]
    cause: HangCause | None = None
    """The workers that the others wait for, if the records of their collectives show it."""


@struct(frozen=True)
class Event:
    """One event of a job's history; `unix_ms` is the time on the server's clock, for people.

    `text` describes its `fields` in one line; they are None if only the line is known, as in rows
    of older versions of rdzvd.
    """

    unix_ms: int
    run: str | None
    name: str
    text: str
    fields: dict[str, Any] | None = None


@struct(frozen=True)
class NodeEvent:
    """An event about a node, from the history of one of its jobs."""

    rdzv_id: str
    unix_ms: int
    name: str
    text: str


def node_event_in(row: Record, node_id: str) -> NodeEvent | None:
    """Decode a row of history; None if it is not about this node."""
    if node_id not in row.data:  # Most rows do not, and need not be decoded.
        return None
    fields = fields_in(row.data) or {}
    if node_id not in (fields.get("node_id"), fields.get("cause_node_id")):
        return None
    return NodeEvent(row.rdzv_id, row.unix_ms, row.name, sentence_of(row.name, fields))


def rank_progress(said: Sequence[tuple[int, Word]]) -> tuple[RankProgress, ...]:
    """Compare the progress of a round's workers, by RANK, reported at different moments."""
    behind = lags([word for _, word in said])
    return tuple(
        RankProgress(rank, word.step, word.age_ms, word.rate, steps)
        for (rank, word), steps in zip(said, behind, strict=True)
    )


def event_in(row: Record) -> Event:
    """Decode a row of history."""
    fields = fields_in(row.data)
    text = row.data if fields is None else sentence_of(row.name, fields)
    return Event(row.unix_ms, row.run or None, row.name, text, fields)

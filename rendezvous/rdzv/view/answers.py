"""rdzvd's responses as values, in which None means "unknown".

The server builds them from its own values (`rdzv.server.operations`). Its HTTP API writes them as
JSON, and its gRPC services as messages, which the client reads into equal values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from rdzv.bounds import Coded, Else, Unsent
from rdzv.core.evidence.collectives import HangCause
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stacks import SilentNode, WorkerStack
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.fleet.node_resources import Gpu
from rdzv.core.model import DeclinedNode, Standby
from rdzv.core.reason import Reason
from rdzv.core.snapshots import SoleHolder
from rdzv.structs import struct
from rdzv.view.history import fields_in, text_of
from rdzv.view.sentences import sentence_of

if TYPE_CHECKING:
    from rdzv.stores.base import Record

OWN_BACKEND = "rdzv"


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
    """Whether one of its collectives failed, perhaps because of another failure. The worker has not
    exited."""


@struct(frozen=True)
class LastFailure:
    """The last worker failure in a run: the root cause, and other workers that failed with it."""

    age_ms: int | None
    root_cause: WorkerFailure
    others: tuple[WorkerFailure, ...]


@struct(frozen=True)
class NodeStatus:
    """One node of a job. What else there is to say about it is in the job's reason."""

    node_id: str
    state: str
    group_rank: int | None
    rank_first: int | None
    local_world_size: int | None
    address: str | None
    role: str | None
    state_age_ms: int
    kept: int | None = None
    """The number of its workers in the live round that are kept; `hot`, `warm` and `cold` count
    those that were standbys, forked warm, or started cold. None if unknown."""
    hot: int | None = None
    warm: int | None = None
    cold: int | None = None
    standby: Standby | None = None
    """The workers that it has started in advance, if it waits for a seat."""
    snapshots: int = 0
    """The number of snapshots of the job's state that it holds in memory; `snapshot_bytes` is their
    size."""
    snapshot_bytes: int = 0


@struct(frozen=True)
class NodeLoss:
    """The snapshots that would remain in memory if one node were lost now, in the worst case."""

    step: int | None
    lost_steps: int | None = None
    """The number of steps that would be redone if all workers failed with the node, or None if
    unknown."""
    sole_holders: tuple[SoleHolder, ...] = ()
    """The nodes, or the first few of them, without which the newest step would not be whole."""
    sole_holder_count: int = 0


@struct(frozen=True)
class WholeSnapshot:
    """The newest step for which participants hold all `parts` of a job's state in memory."""

    lineage: int
    step: int
    parts: int
    age_ms: int
    """The time for which it has been whole, as far as this server knows."""
    lost_steps: int | None = None
    """The number of steps that would be redone if all workers failed now, or None if unknown."""
    node_loss: NodeLoss | None = None
    """The worst-case loss of a node, or None until this server knows which nodes hold the step."""


@struct(frozen=True)
class Token:
    """A token without its secret.

    `expires_in_ms` is None if it never expires, and 0 if it has expired. `used_age_ms` is accurate
    to an hour, and None if the token was never used.
    """

    id: str
    name: str
    roles: tuple[str, ...]
    age_ms: int
    expires_in_ms: int | None
    used_age_ms: int | None


@struct(frozen=True)
class Submission:
    """A job's submission, and its placement so far. `placed` lists the chosen nodes.

    `jobs_before` is the number of jobs ahead of it in the queue, or None if it is not waiting.
    `env_names` lists the names of its environment variables; values are never sent. `gpus_per_node`
    is None if each worker gets one GPU on nodes that have any.
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
    """The authenticated name of the submitter, or None if authentication is not required."""
    account: str | None = None
    """The account that it asks to run as, or None for each node's default account for the
    submitter."""


@struct(frozen=True)
class Budgets:
    """The number of a run's rounds that ended for each cause, and the limits (None for no limit).

    `restarts_without_progress` counts consecutive restarts that led neither beyond `furthest_step`
    nor to a new snapshot. After `no_progress_restarts` of them the job fails, unless that is 0.
    """

    preemptions: int
    max_preemptions: int | None
    store_failures: int
    max_store_failures: int | None
    restarts_without_progress: int
    no_progress_restarts: int
    furthest_step: int | None
    restart_window_ms: int


ENDED = ("succeeded", "failed", "stopped")


@struct(frozen=True)
class JobStatus:
    """One job's state and its reason. `round` and `world_size` describe the last complete round.

    `backend` is the rendezvous that forms its group: `rdzv`, or `c10d`, which the server only
    observes. `progress` contains the workers of the live round that report progress, by RANK.
    `submission` is None if the server does not choose the job's nodes.
    """

    rdzv_id: str
    run: str | None
    run_number: int | None
    state: str
    state_age_ms: int
    reason: Reason
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
    last_failure: LastFailure | None
    backend: Annotated[str, Else(OWN_BACKEND)]
    progress: tuple[RankProgress, ...]
    submission: Submission | None = None
    budgets: Budgets | None = None
    no_progress: bool = False
    """Whether the job failed because it made no progress, so launching it again unchanged would not
    help."""
    ended_by_failure: bool = False
    """Whether the job failed because of `last_failure`."""
    stragglers: tuple[Straggler, ...] = ()
    owner: str | None = None
    """The only caller, apart from admins, that may change the job, or None if only admins may."""
    has_secret: bool = False
    """Whether joining requires a secret."""
    closed: bool = False
    """Whether the run forms no more rounds: it has ended, or it is being stopped."""
    kept: int = 0
    """The number of workers in the last complete round that also took part in the previous one."""
    source: int | None = None
    """The RANK of the kept worker with the newest state, or None if there is none."""
    resume_step: int | None = None
    """The number of steps that the source had sealed."""
    warm: int | None = None
    """The number of workers of the live round that were forked warm. None, like `cold` and `hot`,
    if unknown.
    """
    cold: int | None = None
    hot: int | None = None
    snapshot: WholeSnapshot | None = None


@struct(frozen=True)
class JobSummary:
    """One job in a list. `nodes` is the number of nodes currently seated."""

    rdzv_id: str
    run: str | None
    state: str
    state_age_ms: int
    reason: Reason
    """As in the job's status, with only the first few of its items."""
    round: int | None
    nodes: int
    min_nodes: int | None
    max_nodes: int | None
    world_size: int | None
    restarts: int | None
    max_restarts: int | None
    backend: Annotated[str, Else(OWN_BACKEND)]
    hangs: str | None = None


@struct(frozen=True)
class Resources:
    """A node's resources for submitted jobs. The node takes at most `capacity` jobs at once."""

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
    """The node's state within the job, or `placed` or `holding`."""


@struct(frozen=True)
class Node:
    """One node with all its jobs. `resources` is None if it takes no submitted jobs.

    `gpus_free` is None if the number of its GPUs is unknown, and `state_age_ms` if the node is
    gone. A node that is cordoned, quarantined or unhealthy takes no more jobs; `quarantine` and
    `unhealthy` give the reasons.
    """

    node_id: str
    state: str
    state_age_ms: int | None
    program: str | None
    address: str | None
    agent_version: str | None
    resources: Resources | None
    gpus_free: int | None
    jobs: tuple[NodeJob, ...]
    cordoned: bool
    cordon_reason: str | None
    cordon_age_ms: int | None
    quarantine: str | None = None
    quarantine_age_ms: int | None = None
    quarantine_left_ms: int | None = None
    unhealthy: str | None = None
    unhealthy_age_ms: int | None = None
    drain: str | None = None
    """`draining` while jobs remain on the node, `drained` afterwards, and None if it is not being
    drained."""
    drain_reason: str | None = None
    drain_left_ms: int | None = None
    """The time that its workers have left, or 0 if they have none."""
    drained_by_operator: bool = False
    cordoned_besides: bool = False
    """Whether it has a cordon besides an operator's drain, which stays when that is lifted."""
    drain_age_ms: int | None = None
    without_it: str | None = None
    """Which jobs would stop if the node was gone now, and why; or that every job goes on. None
    unless the request names one node."""


@struct(frozen=True)
class Server:
    """One rdzvd server. `leadership` is the number of the current leadership."""

    address: str
    leads: bool
    leadership: int | None
    store: str
    version: str
    state_age_ms: int
    insecure: str | None = None
    """The reason why anyone who can reach the server can do anything. Known only for the server
    that responds."""
    store_away: str | None = None
    """The reason why the server cannot reach its store, since when, and what is delayed. Known only
    for the server that responds."""
    unix_ms: int | None = None
    """The time on the server's clock. Known only for the server that responds."""
    page: str | None = None
    """The URL of its web page. Known only for servers that share their store."""


@struct(frozen=True)
class LogLines:
    """A chunk of one worker's output, or a `note` on why output from a node is missing.

    A note about the whole job has an empty `node_id`. A chunk may end anywhere in a line. The
    chunks of one worker, round and stream are in order.
    """

    node_id: str
    run: str
    rank: int = 0
    local_rank: int = 0
    stderr: bool = False
    round: int = 0
    offset: int = 0
    data: bytes = b""
    note: str | None = None


@struct(frozen=True)
class StackGroup:
    """A group of workers that are at the same place in their code."""

    ranks: tuple[int, ...]
    where: str


@struct(frozen=True)
class StackReport:
    """The stacks of one round's workers at one moment."""

    rdzv_id: str
    run: str
    round: int
    age_ms: int
    reason: str
    summary: str
    groups: tuple[StackGroup, ...]
    """The groups, largest first."""
    stacks: tuple[WorkerStack, ...]
    """The stacks, by RANK."""
    left_out: int
    """The number of workers in a group whose stacks were not kept because there were too many."""
    silent: tuple[SilentNode, ...]
    cause: HangCause | None = None
    """The workers that the others are waiting for, if the records of their collectives show it."""


@struct(frozen=True)
class Event:
    """One event in a job's history. `unix_ms` is the time on the server's clock, for display.

    `text` describes its `fields` in one line. The fields are None if only the line is known.
    """

    unix_ms: int
    run: str | None
    name: str
    text: str
    fields: Annotated[dict[str, Any] | None, Coded(text_of, fields_in)] = None


@struct(frozen=True)
class NodeEvent:
    """An event about a node, from the history of one of its jobs."""

    rdzv_id: str
    unix_ms: int
    name: str
    text: str


# ------------------------------------------------------------------------------------ lists

_STORE_AWAY = "Why the server cannot store changes, since when, and what waits; null: it can."
StoreAway = Annotated[str | None, Meta(description=_STORE_AWAY)]


@struct(frozen=True)
class JobList:
    """All jobs, by name."""

    jobs: tuple[JobSummary, ...]
    store_away: StoreAway = None


@struct(frozen=True)
class NodeList:
    """All nodes, by name, or those that were asked for."""

    nodes: tuple[Node, ...]
    store_away: StoreAway = None


@struct(frozen=True)
class ServerList:
    """The servers that share a store."""

    servers: tuple[Server, ...]


@struct(frozen=True)
class EventList:
    """A job's newest events, oldest first."""

    rdzv_id: Annotated[str, Unsent] = ""
    events: tuple[Event, ...] = ()


@struct(frozen=True)
class TokenList:
    """Tokens without their secrets."""

    tokens: tuple[Token, ...]


@struct(frozen=True)
class NewToken:
    """A token with its secret text, which no other answer contains."""

    token: Token
    text: str


def node_event_in(row: Record, node_id: str) -> NodeEvent | None:
    """Decode a row of history, or return None if it is not about this node."""
    if node_id not in row.data:  # Most rows do not, and need not be decoded.
        return None
    fields = fields_in(row.data) or {}
    if node_id not in (fields.get("node_id"), fields.get("cause_node_id")):
        return None
    return NodeEvent(row.rdzv_id, row.unix_ms, row.name, sentence_of(row.name, fields))


def event_in(row: Record) -> Event:
    fields = fields_in(row.data)
    text = row.data if fields is None else sentence_of(row.name, fields)
    return Event(row.unix_ms, row.run or None, row.name, text, fields)

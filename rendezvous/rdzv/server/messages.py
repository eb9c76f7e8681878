"""Values that the driver exchanges with nodes and operators: reports in, announcements out.

Values only. `wire` converts them from and to protobuf; `announcements` decides who gets which.
"""

from __future__ import annotations

from rdzv.core.commands import Command
from rdzv.core.hangs import HungWorker
from rdzv.core.model import Ended, JobSpec, RoundEnd, Tally
from rdzv.core.nodes import AgentKind
from rdzv.core.placement import FailingCheck, Resources
from rdzv.core.stacks import WorkerStack
from rdzv.structs import struct

# ------------------------------------------------------------------ from nodes


@struct(frozen=True)
class Hello:
    """A node opens a stream. Its beliefs about its jobs follow as `Belief`s."""

    node_id: str
    instance: str
    kind: AgentKind
    address: str
    pid: int
    leadership: int
    incarnation: int
    fence_after_ms: int = 0
    """The node kills its workers after this time without an answer; 0: never."""
    version: str = ""
    resources: Resources | None = None
    """None: it accepts no submitted jobs."""
    holdings: tuple[Holding, ...] = ()
    failing: tuple[FailingCheck, ...] = ()
    """The node's own checks that fail."""
    metrics: str = ""
    """Where its agent answers /metrics, as HOST:PORT; empty: nowhere that others can reach."""
    draining: Draining | None = None
    """Set if the node is about to leave all its jobs."""


@struct(frozen=True)
class Draining:
    """The node is about to leave all its jobs; with `own`, on its own initiative."""

    left_ms: int
    reason: str
    number: int
    """The number of the drain that a server has ordered; 0: none."""
    own: bool


@struct(frozen=True)
class Holding:
    """A submitted job that may have left something on the node."""

    rdzv_id: str
    run: str
    gpus: int


@struct(frozen=True)
class Holdings:
    """All submitted jobs that may have left something on the node."""

    held: tuple[Holding, ...]


@struct(frozen=True)
class Belief:
    """A node's belief about one job, and the commands that pass it to the job's rendezvous."""

    rdzv_id: str
    run: str
    round: int | None
    """The last round that the node knows of."""
    has_workers: bool
    """Whether workers of that round may run on the node, or have succeeded there."""
    commands: tuple[Command, ...] = ()


@struct(frozen=True)
class RankProgress:
    """The progress of one worker."""

    rank: int
    step: int
    age_ms: int
    """The age of this report."""
    rate: float
    """Recent steps per second; 0 if unknown."""


@struct(frozen=True)
class Progress:
    """The progress of a node's workers in one round; only of those that have reported any."""

    rdzv_id: str
    run: str
    round: int
    ranks: tuple[RankProgress, ...]


@struct(frozen=True)
class LogPiece:
    """A piece of a worker's output. Without data: what follows is of `round`."""

    request: int
    round: int = 0
    local_rank: int = 0
    rank: int = 0
    stderr: bool = False
    offset: int = 0
    data: bytes = b""
    last: bool = False
    """Whether this is the last piece."""
    error: str = ""
    """Why something is missing or, with `last`, everything that follows."""


@struct(frozen=True)
class Hung:
    """All workers of one round on a node that hang; empty: none hangs any longer."""

    rdzv_id: str
    run: str
    round: int
    workers: tuple[HungWorker, ...]


@struct(frozen=True)
class Stacks:
    """The stacks of some workers of a node."""

    request: int
    workers: tuple[WorkerStack, ...] = ()
    last: bool = False
    """Whether this is the last piece."""
    error: str = ""
    """Why there are no stacks."""


# ------------------------------------------------------------------ to nodes


@struct(frozen=True)
class Welcome:
    """The stream is open."""

    incarnation: int
    heartbeat_interval_ms: int
    lease_ms: int


@struct(frozen=True)
class Lease:
    """The lease was extended."""

    heartbeat_interval_ms: int
    lease_ms: int


@struct(frozen=True)
class Heard:
    """The heartbeat with this number was received."""

    number: int


@struct(frozen=True)
class Joined:
    """The node is admitted to this run of the job."""

    rdzv_id: str
    run: str
    run_number: int


@struct(frozen=True)
class Assignment:
    """A round is complete: this is the node's own assignment."""

    rdzv_id: str
    run: str
    round: int
    group_rank: int
    group_world_size: int
    rank_first: int
    world_size: int
    role_rank_first: int
    role_world_size: int
    master_addr: str
    master_port: int
    use_agent_store: bool
    restarts: int
    max_restarts: int | None
    tally: Tally | None = None


@struct(frozen=True)
class RoundOver:
    """The round is over: the node stops its workers."""

    rdzv_id: str
    run: str
    round: int
    end: RoundEnd


@struct(frozen=True)
class Closed:
    """The run is over and forms no more rounds."""

    rdzv_id: str
    run: str
    ended: Ended


@struct(frozen=True)
class Refused:
    """The node's request is refused, and has changed nothing."""

    rdzv_id: str
    code: str
    message: str


@struct(frozen=True)
class Waiting:
    """Why the node has no workers to run."""

    rdzv_id: str
    reason: str


@struct(frozen=True)
class LogPosition:
    """How much of one worker's log was read. A message to a node leaves out the node's name."""

    node_id: str
    round: int
    local_rank: int
    stderr: bool
    offset: int


@struct(frozen=True)
class ReadLog:
    """A request for the output of the node's workers. None: see `rdzv.proto`."""

    request: int
    rdzv_id: str
    round: int | None
    rank: int | None
    stdout: bool
    stderr: bool
    follow: bool
    tail_bytes: int
    tail_lines: int
    credit: int
    positions: tuple[LogPosition, ...] = ()


@struct(frozen=True)
class LogCredit:
    """The number of bytes that the node may still send for a request; with `cancel`, it stops."""

    request: int
    bytes: int
    cancel: bool = False


@struct(frozen=True)
class Placed:
    """The server has placed a submitted job on the node."""

    rdzv_id: str
    run: str
    spec: JobSpec


@struct(frozen=True)
class Withdrawn:
    """The server has withdrawn a submitted job from the node."""

    rdzv_id: str
    run: str
    reason: str


@struct(frozen=True)
class LookAgain:
    """An operator has checked the node: it runs its checks now."""


@struct(frozen=True)
class TakeStacks:
    """A request for the stacks of the node's workers in one round."""

    request: int
    rdzv_id: str
    run: str
    round: int
    timeout_ms: int


@struct(frozen=True)
class DrainNode:
    """The node must leave all its jobs; repeated with the time that remains."""

    left_ms: int
    reason: str
    number: int


@struct(frozen=True)
class UndrainNode:
    """The node may stay."""


Announcement = (
    Welcome
    | Lease
    | Heard
    | Joined
    | Assignment
    | RoundOver
    | Closed
    | Refused
    | Waiting
    | ReadLog
    | LogCredit
    | Placed
    | Withdrawn
    | LookAgain
    | TakeStacks
    | DrainNode
    | UndrainNode
)

# ------------------------------------------------------------------ requests of operators


@struct(frozen=True)
class LogsWanted:
    """A selection of one job's logs. None: all RANKs, the last round."""

    rank: int | None = None
    round: int | None = None
    stdout: bool = True
    stderr: bool = True
    follow: bool = False
    tail_bytes: int = 0
    tail_lines: int = 0
    run: str = ""
    positions: tuple[LogPosition, ...] = ()


# ------------------------------------------------------------------ answers to operators


@struct(frozen=True)
class LogLines:
    """A piece of one worker's output, or a note why something is missing."""

    node_id: str
    run: str
    rank: int = 0
    local_rank: int = 0
    stderr: bool = False
    round: int = 0
    offset: int = 0
    data: bytes = b""
    note: str = ""


@struct(frozen=True)
class NodeJob:
    """A job that a node is in, holds, or was selected for."""

    rdzv_id: str
    gpus: int
    state: str
    """placed, holding, or its state within the job."""


@struct(frozen=True)
class NodeSummary:
    """One node, across its jobs."""

    node_id: str
    state: str
    """connected, away, or gone: known only because it is cordoned or quarantined."""
    state_age_ms: int
    program: str
    address: str
    version: str
    resources: Resources | None
    gpus_free: int
    jobs: tuple[NodeJob, ...]
    cordoned: bool
    cordon_reason: str
    cordon_age_ms: int
    metrics: str = ""
    """Where its agent answers /metrics; empty: nowhere."""
    quarantine: str = ""
    """Why it is quarantined; empty if it is not."""
    quarantine_age_ms: int = 0
    quarantine_left_ms: int = 0
    unhealthy: str = ""
    """The node's own checks that fail; empty: none."""
    unhealthy_age_ms: int = 0
    drain: str = ""
    """draining, drained, or empty."""
    drain_reason: str = ""
    drain_left_ms: int = 0
    drained_by_operator: bool = False


@struct(frozen=True)
class ServerView:
    """One of the rdzvd servers that share a store."""

    address: str
    leads: bool
    leadership: int
    store: str
    version: str
    state_age_ms: int
    insecure: str = ""
    """Why every caller may do everything; known for this server only."""
    store_away: str = ""
    """Why it can store nothing now; known for this server only."""

"""Values that nodes and the server exchange: reports and announcements. Both ends use them.

`transport.wire` converts them to and from protobuf; `server.sessions.announcements` decides
which node receives which announcement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from rdzv.bounds import (
    GPUS,
    JOBS_PER_NODE,
    LOCAL_WORLD_SIZE,
    LOG_PIECE_BYTES,
    LOG_POSITIONS,
    METRICS_BYTES,
    AnyAddress,
    AnyName,
    AnyUid,
    Duration,
    Elapsed,
    First,
    Flat,
    Label,
    Name,
    Part,
    Rate,
    Sentence,
    ShortSentence,
    Uid,
    UpTo,
    Within,
)
from rdzv.core.commands import Command, Decline, Fail, Leave, ReportStoreHost, ReportStuck, Succeed
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.fleet.node_resources import FailingCheck, NodeResources
from rdzv.core.fleet.nodes import AgentKind
from rdzv.core.model import Assignment, Ended, JobSpec, RoundEnd, Snapshot, SnapshotMark
from rdzv.core.snapshots import CopyCarrier, CopySource, MissingCopies
from rdzv.structs import struct

Key = tuple[str, str]
"""Identifies a job's run by its rdzv_id and its uid."""

SNAPSHOTS_PER_WORKER = 8
"""The number of snapshots that a node holds for each of its workers: two of the worker's own, and
copies for three others."""

# ------------------------------------------------------------------ from nodes


@struct(frozen=True)
class Draining:
    """A node's report that it is about to leave all its jobs; with `own`, on its own initiative."""

    left_ms: Elapsed
    reason: Sentence
    number: int
    """The number of the drain that a server has ordered, or 0 if no server has."""
    own: bool


@struct(frozen=True)
class Holding:
    """A submitted job that may still have processes on the node."""

    rdzv_id: Name
    run: Uid
    gpus: Annotated[int, Within(0, GPUS)]


@struct(frozen=True)
class Holdings:
    """All submitted jobs that may still have processes on the node."""

    holdings: Annotated[tuple[Holding, ...], UpTo(JOBS_PER_NODE)] = ()


@struct(frozen=True)
class Health:
    """The node's health checks that are failing; only the first ones, if there are too many."""

    failing: Annotated[tuple[FailingCheck, ...], First(16)] = ()


@struct(frozen=True)
class Hello:
    """A node's request to open a stream. One `Belief` for each of its jobs follows."""

    node_id: Name
    instance: Uid
    kind: AgentKind
    address: AnyAddress
    pid: int
    leadership: int
    incarnation: int
    fence_after_ms: Duration = 0
    """How long the node waits for an answer before killing its workers; 0 if it never does."""
    agent_version: Label = ""
    resources: NodeResources | None = None
    holdings: Holdings = Holdings()
    health: Health = Health()
    draining: Draining | None = None
    """Set if the node is about to leave all its jobs."""
    takes_several: bool = False
    """Whether the node can read several messages packed into one."""


@struct(frozen=True)
class Belief:
    """A node's belief about a job, and the commands that report it to the job's rendezvous."""

    rdzv_id: str
    run: str
    round: int | None
    has_workers: bool
    """Whether workers of that round may be running on the node, or have succeeded there."""
    commands: tuple[Command, ...] = ()


@struct(frozen=True)
class Progress:
    """The progress of a node's workers in one round, for workers that have reported any."""

    rdzv_id: Name
    run: Uid
    round: int
    ranks: Annotated[tuple[RankProgress, ...], UpTo(LOCAL_WORLD_SIZE)]


@struct(frozen=True)
class StartedWorker:
    """How a worker was started for a round."""

    local_rank: int
    how: Label
    """A `WorkerStart`, or a value that only newer agents know."""
    why: ShortSentence = ""
    """Why the worker was not kept or not started warm; empty if its node does not know why."""


@struct(frozen=True)
class WorkersStarted:
    """A node's report of how its workers were started for a round."""

    rdzv_id: Name
    run: Uid
    round: int
    workers: Annotated[tuple[StartedWorker, ...], UpTo(LOCAL_WORLD_SIZE)]
    not_loaded: Sentence = ""
    """Why one of them has not loaded snapshots that it should or could have loaded."""
    forks: bool = False
    """Whether the node has a zygote that serves the script."""
    script: Label = ""
    """A digest of the script, once all these workers have entered its function under @elastic."""


@struct(frozen=True)
class SnapshotsHeld:
    """All the snapshots of a run's state that a node holds."""

    rdzv_id: Name
    run: Uid
    snapshots: Annotated[tuple[Snapshot, ...], UpTo(SNAPSHOTS_PER_WORKER * LOCAL_WORLD_SIZE)]
    carrier: CopyCarrier | None = None
    """The carrier of the copies, or None if other nodes cannot fetch copies of these snapshots."""
    missing: MissingCopies | None = None


@struct(frozen=True)
class RankArrivals:
    """When one worker entered each of several collectives."""

    rank: int
    entered_us: tuple[int, ...]


@struct(frozen=True)
class GroupArrivals:
    """When a node's ranks entered some of the collectives in one process group."""

    group: Part
    per_second: Rate
    error_us: int | None
    """The clock error relative to other nodes, or None if their times cannot be compared."""
    sequences: tuple[int, ...]
    ranks: tuple[RankArrivals, ...]

    @property
    def entered_us(self) -> dict[int, dict[int, int]]:
        """The entry times in microseconds, by sequence number and then by RANK."""
        each = enumerate(self.sequences)
        return {n: {one.rank: one.entered_us[i] for one in self.ranks} for i, n in each}


@struct(frozen=True)
class Arrivals:
    """When a node's workers in one round entered some of their most recent collectives."""

    rdzv_id: Name
    run: Uid
    round: int
    groups: Annotated[tuple[GroupArrivals, ...], First(64)]


@struct(frozen=True)
class LogPosition:
    """How far a worker's log has been read. Nodes are sent no `node_id`, and alone set an `end`."""

    node_id: AnyName
    round: int
    local_rank: int
    stderr: bool
    offset: int
    end: int | None = None


@struct(frozen=True)
class LogPiece:
    """The answer to a `ReadLog`, and the positions to continue at. It may have no data."""

    request: int
    round: int = 0
    local_rank: int = 0
    rank: int = 0
    stderr: bool = False
    offset: int = 0
    data: Annotated[bytes, UpTo(LOG_PIECE_BYTES)] = b""
    last: bool = False
    error: Sentence = ""
    """Why output is missing; with `last`, why everything after this piece is missing."""
    positions: Annotated[tuple[LogPosition, ...], UpTo(2 * LOCAL_WORLD_SIZE)] = ()


@struct(frozen=True)
class Hung:
    """All of a node's workers that hang in one round; empty once none of them hangs."""

    rdzv_id: Name
    run: Uid
    round: int
    workers: Annotated[tuple[HungWorker, ...], UpTo(LOCAL_WORLD_SIZE)]


@struct(frozen=True)
class Stacks:
    """The stacks of some of a node's workers."""

    request: int
    workers: Annotated[tuple[WorkerStack, ...], UpTo(256)] = ()
    last: bool = False
    error: Sentence = ""


@struct(frozen=True)
class NodeMetrics:
    """The answer to a `ReadMetrics`: the metrics of an rdzv-agent, as Prometheus reads them."""

    request: int
    page: Annotated[bytes, UpTo(METRICS_BYTES)] = b""


Report = (
    Progress
    | WorkersStarted
    | SnapshotsHeld
    | Arrivals
    | LogPiece
    | Hung
    | Stacks
    | Health
    | Holdings
    | Draining
    | NodeMetrics
)
"""What a node reports that is no command. Whether it has such workers is checked later."""

Said = Fail | Succeed | Leave | ReportStuck | ReportStoreHost | Decline
SAID: Mapping[str, type[Said]] = {
    "failed": Fail,
    "succeeded": Succeed,
    "leave": Leave,
    "stuck": ReportStuck,
    "store_host_failed": ReportStoreHost,
    "declined": Decline,
}
"""The commands to its job that a node sends whole, by the names of their messages."""


# ------------------------------------------------------------------ to nodes


@struct(frozen=True)
class Welcome:
    """Confirms that the stream is open."""

    incarnation: int
    heartbeat_interval_ms: int
    lease_ms: int


@struct(frozen=True)
class Servers:
    """The standby servers, in the order in which a node should try them."""

    addresses: tuple[str, ...]


@struct(frozen=True)
class Lease:
    """Announces that the node's lease was extended."""

    heartbeat_interval_ms: int
    lease_ms: int


@struct(frozen=True)
class Heard:
    """Confirms that the heartbeat with this number was received."""

    number: int
    clock_us: int
    """The server's clock at that moment."""


@struct(frozen=True)
class Joined:
    """Confirms that the node was admitted to this run of the job."""

    rdzv_id: str
    run: str
    run_number: int
    forks: bool | None = None
    """Whether zygotes serve the script on all nodes of the running round; None if none is running.
    """
    script: str = ""
    """The script of which all nodes of the running round have said so. A node that waits, and has
    the same one, may start standbys with it."""
    renewed: int = 0
    """The running round's; standbys that were started for a lower one are started anew."""


@struct(frozen=True)
class SnapshotWatermark:
    """The newest mark that is whole among the live round's participants."""

    rdzv_id: str
    run: str
    mark: SnapshotMark
    whole_ms: int = 0
    """When the mark became whole; nodes use this time so that all write the same marks to disk."""
    given_up: SnapshotMark | None = None
    """Marks after `mark`, up to and including this one, can no longer become whole, so nodes may
    overwrite their snapshots of them. None if there are no such marks."""


@struct(frozen=True)
class KeepCopies:
    """The copies of other nodes' snapshots that a node is to keep."""

    rdzv_id: str
    run: str
    mark: SnapshotMark
    sources: tuple[CopySource, ...]


@struct(frozen=True)
class RoundOver:
    """Announces that the round is over; the node stops its workers or makes them park."""

    rdzv_id: str
    run: str
    round: int
    end: Annotated[RoundEnd, Flat]
    culprits: tuple[int, ...] = ()
    """The LOCAL_RANKs of the node's workers that are not kept."""


@struct(frozen=True)
class Closed:
    """Announces that the run is over and forms no more rounds."""

    rdzv_id: str
    run: str
    ended: Annotated[Ended, Flat]


@struct(frozen=True)
class Refused:
    """Announces that the node's request was refused and has changed nothing."""

    rdzv_id: str
    code: str
    message: str


@struct(frozen=True)
class Waiting:
    """The reason why the node has no workers to run."""

    rdzv_id: str
    reason: str


@struct(frozen=True)
class ReadLog:
    """A request for the next piece of the node's workers' output. None means any or the last."""

    request: int
    rdzv_id: str
    round: int | None
    rank: int | None
    stdout: bool
    stderr: bool
    follow: bool
    tail_bytes: int
    tail_lines: int
    max_bytes: int
    wait_ms: int = 0
    positions: tuple[LogPosition, ...] = ()
    runs: tuple[str, ...] = ()
    """The runs whose output may be read, newest first."""


@struct(frozen=True)
class StopLog:
    """Says that no more is read for a request."""

    request: int


@struct(frozen=True)
class ReadMetrics:
    """A request for the node's metrics."""

    request: int


@struct(frozen=True)
class Placed:
    """Announces that the server has placed a submitted job on the node."""

    rdzv_id: str
    run: str
    spec: JobSpec

    @property
    def key(self) -> Key:
        return self.rdzv_id, self.run


@struct(frozen=True)
class Withdrawn:
    """Announces that the server has withdrawn a submitted job from the node."""

    rdzv_id: str
    run: str
    reason: str


@struct(frozen=True)
class LookAgain:
    """Tells the node to rerun its health checks because an operator has lifted its restrictions."""


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
    """Tells the node to leave all its jobs.

    The message is repeated with the remaining time when the node reconnects.
    """

    left_ms: int
    reason: str
    number: int


@struct(frozen=True)
class UndrainNode:
    """Tells the node that it may stay."""


Announcement = (
    Welcome
    | Servers
    | Lease
    | Heard
    | Joined
    | Assignment
    | SnapshotWatermark
    | KeepCopies
    | RoundOver
    | Closed
    | Refused
    | Waiting
    | ReadLog
    | StopLog
    | ReadMetrics
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
    """A selection of a job's logs. None means all RANKs, or the last round."""

    rank: int | None = None
    round: int | None = None
    stdout: bool = True
    stderr: bool = True
    follow: bool = False
    tail_bytes: int = 0
    tail_lines: int = 0
    run: AnyUid = ""
    positions: Annotated[tuple[LogPosition, ...], UpTo(LOG_POSITIONS)] = ()


# ------------------------------------------------------------------ answers to operators

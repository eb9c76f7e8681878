"""The value types of the agent core, which handles one job on one node."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from rdzv.core.model import (
    UNMOVED,
    LeaveCause,
    Moved,
    Result,
    Settings,
    Snapshot,
    SnapshotMark,
)
from rdzv.core.snapshot_copies import CopyCarrier, MissingCopies
from rdzv.core.spent import Tally
from rdzv.structs import struct


@struct(frozen=True)
class Job:
    """The launch settings that decisions about a job depend on."""

    rdzv_id: str
    node_id: str
    settings: Settings
    local_world_size: int
    shutdown_timeout_ms: int = 30_000
    """Time between the stop signal and SIGKILL, for workers that can still save."""
    failure_stop_timeout_ms: int = 5_000
    """The same after a worker failure or the loss of a node: no handler runs inside a broken
    collective.
    """
    server_timeout_ms: int = 600_000
    """How long a node without workers waits for an absent server."""
    store_host_timeout_ms: int = 60_000
    """How long the store host may take to become ready."""
    fence_after_ms: int = 0
    """How long workers may run without proof that the server receives this node's messages before
    they are killed; 0: there is no limit.
    """
    notice_signum: int = 15
    """The signal that notifies workers that their node is about to leave, in addition to the notice
    file; 0: none.
    """
    keep_timeout_ms: int = 0
    """How long workers may take to park when a round ends; 0: no worker is kept."""
    park_timeout_ms: int = 600_000
    """How long workers stay parked while their node has no place in a round."""


class Phase(StrEnum):
    """The phase of a job on this node."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    LEAVING = "leaving"
    ENDED = "ended"


@struct(frozen=True)
class Assignment:
    """This node's part of a complete round: everything needed to start its workers."""

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
    max_restarts: int
    tally: Tally | None = field(default=None, compare=False)
    """What the run had spent when the round was formed; kept in case the server loses its state."""
    heard_at_ms: int = field(default=0, compare=False)
    kept: tuple[int, ...] = ()
    """LOCAL_RANKs of the parked workers that take part; the others are new processes."""
    source: int | None = None
    """RANK of the worker whose state the others take over; None if there is no such worker."""
    resume_step: int | None = None
    """The last sealed step of the source."""
    charged_suspects: tuple[int, ...] = ()
    """LOCAL_RANKs of the suspects charged with the failure; each raises its exception and exits."""
    snapshot: SnapshotMark | None = None
    """The newest snapshots that were whole when the round was formed."""
    snapshot_loads: int = 0
    """How many consecutive rounds, including this one, have loaded them; 0: this one does not."""
    origin: int = 0
    lineage: int = 0
    """As in the server's `Round`; kept in case the server loses its state."""

    @property
    def hosts_store(self) -> bool:
        """Whether this node serves the round's c10d store."""
        return self.use_agent_store and self.group_rank == 0


@struct(frozen=True)
class WorkerFailure:
    """A failed worker of this node; times are measured by the agent's clock."""

    local_rank: int
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    message: str
    traceback: str
    at_ms: int
    suspect: bool = False
    """Whether it only reported a broken collective, which a peer may have caused."""


@struct(frozen=True)
class KeptWorker:
    """A parked worker: it takes part in no round, and may enter the next one."""

    local_rank: int
    pid: int
    step: int | None = None
    """The last step that it has sealed; None if it has sealed none."""
    torn: bool = False
    """Whether an unsealed step has changed its parameters."""
    shard: int = 0
    shards: int = 1
    """Its state is part `shard` of this many; 1 if the state is not sharded."""
    oldest_step: int | None = None
    """The oldest sealed step that it can go back to; None if it can only go back to `step`."""


@struct(frozen=True)
class StartedWorker:
    """How one worker entered its round: kept, warm or cold."""

    local_rank: int
    how: str
    why: str = ""
    """Why it is not kept, or not warm; empty if this node does not know."""


@struct(frozen=True)
class StartReport:
    """How each worker of this node entered a round."""

    run: str
    round: int
    workers: tuple[StartedWorker, ...]


@struct(frozen=True)
class NodeFailure:
    """A failed worker of any node, as the server reports it."""

    node_id: str
    address: str
    local_rank: int
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    message: str
    traceback: str


@struct(frozen=True)
class Leaving:
    """Why the node leaves the job, and its agent's exit code."""

    cause: LeaveCause
    reason: str
    exit_code: int
    exited_zero: bool = False
    """Whether all workers exited with 0 after the notice, either because of it or because they had
    finished.
    """


@struct(frozen=True)
class Notice:
    """The notice to workers that their node is about to leave."""

    reason: str
    since_ms: int
    due_ms: int | None
    """When the workers are ended; None if the notice was lifted."""
    forget_ms: int = 0
    """When a lifted notice no longer counts as a reason to exit."""
    exited_ms: int | None = None
    """When the last worker exited, if all exited with 0."""


@struct(frozen=True)
class Outcome:
    """How the job ended for this node: the exit code, and the message for the user."""

    exit_code: int
    text: str
    failures: tuple[NodeFailure, ...] = ()
    result: Result | None = None
    """The job's result, if known."""


@struct(frozen=True)
class AgentState:
    """The state of one job on one node."""

    job: Job
    phase: Phase = Phase.JOINING
    run: str = ""
    assignment: Assignment | None = None
    """The last round that this node took part in."""
    left_round: int | None = None
    """The last round whose workers are all gone from this node."""
    alive: frozenset[int] = frozenset()
    """LOCAL_RANKs of the workers that have not exited."""
    workers_gone: bool = True
    """Whether the runner has confirmed that no process still takes part in the round."""
    kept: tuple[KeptWorker, ...] = ()
    """The parked workers on this node."""
    resuming: tuple[KeptWorker, ...] = ()
    """The kept workers of the current round that have not continued yet: they may be waiting for
    other workers.
    """
    resume_due_ms: int = 0
    """The deadline by which they must continue."""
    snapshots: tuple[Snapshot, ...] = ()
    """The snapshots of the run that the runner holds in memory."""
    carrier: CopyCarrier | None = None
    """The carrier from which other nodes fetch copies of them."""
    missing_copies: MissingCopies | None = None
    """The copies that this node was last asked to keep, but could not get."""
    watermark: SnapshotMark | None = None
    """The newest snapshots that the server has announced as whole, with the round or since."""
    ending_kept: bool = False
    """Whether the runner was told to end the parked workers and has not confirmed that yet."""
    failures: tuple[WorkerFailure, ...] = ()
    """Failures of the last round on this node."""
    moved: Moved = UNMOVED
    """How far the last round's workers had got by the time they were gone."""
    stopping_since_ms: int | None = None
    """When the workers of the last round were first asked to stop; None if they were not."""
    stuck_pids: tuple[int, ...] = ()
    """Processes of the last round that survived SIGKILL."""
    fenced: bool = False
    """Whether the last round ended here because the server was unreachable."""
    store_host_due_ms: int | None = None
    """When the store host must be ready; None if it is, or none is needed."""
    store_host_failed: str = ""
    disconnected_since_ms: int | None = 0
    """When the connection to the server was lost, or the job began; None while connected."""
    disconnected_reason: str = "none was tried"
    """Why there is no server, or why the last one was lost."""
    idle_since_ms: int = 0
    """When a worker on this node last took part in a round, or the job began."""
    notice: Notice | None = None
    """Set while the node is about to leave, or workers may still act on a lifted notice."""
    leaving: Leaving | None = None
    outcome: Outcome | None = None
    """Set once the job has ended for this node; the node exits when its workers are gone."""

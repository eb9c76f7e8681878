"""The values of the agent core: one job on one node."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from rdzv.core.model import UNMOVED, LeaveCause, Moved, Result, Settings, Tally
from rdzv.structs import struct


@struct(frozen=True)
class Job:
    """What the decisions about a job need to know of its launch."""

    rdzv_id: str
    node_id: str
    settings: Settings
    local_world_size: int
    shutdown_timeout_ms: int = 30_000
    """Between the signal to end and SIGKILL, for workers that can still save."""
    failure_stop_timeout_ms: int = 5_000
    """The same after a failure or loss: no handler does its work inside a broken collective."""
    server_timeout_ms: int = 600_000
    """How long a node without workers waits for a server that is away."""
    store_host_timeout_ms: int = 60_000
    """How long the store host may take to get ready."""
    fence_after_ms: int = 0
    """After how long without proof that the server hears this node its workers are killed; 0: they
    are not, and train on."""
    notice_signum: int = 15
    """What tells workers that their node is about to leave, beside the notice file; 0: nothing."""


class Phase(StrEnum):
    """What the node is doing for the job."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    LEAVING = "leaving"
    ENDED = "ended"


@struct(frozen=True)
class Assignment:
    """This node's line of a complete round: all it needs to start its workers."""

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
    """What the run had spent when this was heard. Only kept, for a server that has forgotten it."""
    heard_at_ms: int = field(default=0, compare=False)

    @property
    def hosts_store(self) -> bool:
        """Whether this node serves the round's c10d store."""
        return self.use_agent_store and self.group_rank == 0


@struct(frozen=True)
class WorkerFailure:
    """One of this node's workers that failed, at the agent's own time."""

    local_rank: int
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    message: str
    traceback: str
    at_ms: int


@struct(frozen=True)
class NodeFailure:
    """A failed worker of any node, as the server tells of it."""

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
    """Why the node leaves the job, and what its agent exits with."""

    cause: LeaveCause
    reason: str
    exit_code: int
    exited_zero: bool = False
    """All workers exited 0 after they were given notice: they may have left, or have been done."""


@struct(frozen=True)
class Notice:
    """That the node is about to leave, as its workers were told."""

    reason: str
    since_ms: int
    due_ms: int | None
    """When they are ended; None: the notice was lifted, and they may run on."""
    forget_ms: int = 0
    """When a lifted notice is no reason to exit any more."""
    exited_ms: int | None = None
    """When the last of the workers exited, if all did with 0."""


@struct(frozen=True)
class Outcome:
    """How it ended for this node: what to exit with, and what to tell the user."""

    exit_code: int
    text: str
    failures: tuple[NodeFailure, ...] = ()
    result: Result | None = None
    """The job's result, where it is known."""


@struct(frozen=True)
class AgentState:
    """One job on one node."""

    job: Job
    phase: Phase = Phase.JOINING
    run: str = ""
    assignment: Assignment | None = None
    """The last round that this node took part in."""
    left_round: int | None = None
    """The round whose workers are gone from this node."""
    alive: frozenset[int] = frozenset()
    """LOCAL_RANKs of the workers that have not exited."""
    workers_gone: bool = True
    """Whether the runner has confirmed that no process of the round is left."""
    failures: tuple[WorkerFailure, ...] = ()
    """Failures of the last round on this node."""
    moved: Moved = UNMOVED
    """How far the workers of the last round had come when they were gone."""
    stopping_since_ms: int | None = None
    """When the workers of the last round were first told to end; None: they were not."""
    stuck_pids: tuple[int, ...] = ()
    """Processes of the last round that were seen to survive SIGKILL."""
    fenced: bool = False
    """Whether the last round ended here because the server was out of reach."""
    store_host_due_ms: int | None = None
    """When the store host must be ready; None: it is, or none is needed."""
    store_host_failed: str = ""
    disconnected_since_ms: int | None = 0
    """Since when there is no server; None while there is one."""
    disconnected_reason: str = "none was tried"
    """Why there is none, or was none last."""
    idle_since_ms: int = 0
    """Since when there are no workers on this node."""
    notice: Notice | None = None
    """Set while the node is about to leave, or its workers still believe so."""
    leaving: Leaving | None = None
    outcome: Outcome | None = None
    """Set once nothing but the end of the workers is waited for."""

"""Value types for the agent core, which handles one job on one node."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from rdzv.bounds import Unsent
from rdzv.core.model import (
    NO_STANDBY,
    UNMOVED,
    Assignment,
    Failure,
    KeptWorker,
    LeaveCause,
    Moved,
    Result,
    Settings,
    Snapshot,
    SnapshotMark,
    Standby,
    StandbyState,
)
from rdzv.core.snapshots import CopyCarrier, MissingCopies
from rdzv.structs import struct

EXIT_SUCCESS = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75
"""No server, a join timeout, placed elsewhere, drained, or the runner was lost."""
EXIT_DENIED = 77
"""EX_NOPERM of sysexits: the caller lacks the permission, so a retry is useless."""
EXIT_NO_PROGRESS = 93
"""The exit code if a retry is useless because the job kept failing without progress."""


@struct(frozen=True)
class JobTerms:
    """The launch settings that affect decisions about a job."""

    rdzv_id: str
    node_id: str
    settings: Settings
    local_world_size: int
    shutdown_timeout_ms: int = 30_000
    """The time between the stop signal and SIGKILL for workers that can still save their state."""
    failure_stop_timeout_ms: int = 5_000
    """The same after a failure: handlers may not run in a broken collective."""
    server_timeout_ms: int = 600_000
    """How long a node without workers waits for an absent server."""
    store_host_timeout_ms: int = 60_000
    """How long a store host may take to become ready."""
    fence_after_ms: int = 0
    """How long workers may run without proof that the server hears this node; 0: no limit."""
    notice_signum: int = 15
    """The signal that comes with the notice file; 0 means none."""
    keep_timeout_ms: int = 0
    """How long workers may take to park when a round ends; 0 means that no workers are kept."""
    park_timeout_ms: int = 600_000
    """How long workers stay parked while their node has no place in a round."""
    standby: str = "cold"
    """`hot` if a node without a place may start its workers in advance."""


class Phase(StrEnum):
    """A job's phase on this node."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    LEAVING = "leaving"
    ENDED = "ended"

    @property
    def needs_store(self) -> bool:
        return self in (Phase.RUNNING, Phase.SUCCEEDED)


@struct(frozen=True)
class Leaving:
    """Why the node is leaving the job, and its agent's exit code."""

    cause: LeaveCause
    reason: str
    exit_code: Annotated[int, Unsent]
    exited_zero: bool = False
    """Whether all workers exited with 0 after the notice, because of it or because done."""


@struct(frozen=True)
class DrainNotice:
    """The notice that tells workers that their node is about to leave."""

    reason: str
    since_ms: int
    due_ms: int | None
    """When the workers will be ended; None if the notice was lifted."""
    forget_ms: int = 0
    """When a lifted notice no longer counts as a reason to exit."""
    exited_ms: int | None = None
    """When the last worker exited, if all exited with 0."""

    @property
    def leaving(self) -> Leaving:
        return Leaving(LeaveCause.SIGNAL, self.reason, EXIT_TRY_AGAIN)


@struct(frozen=True)
class Outcome:
    """How the job ended on this node: its exit code and the message for the user."""

    exit_code: int
    text: str
    failures: tuple[Failure, ...] = ()
    result: Result | None = None
    joins_anew: bool = False
    """Whether the node joins the job again as a new one instead of exiting."""


@struct(frozen=True)
class AgentState:
    """The state of a job on this node."""

    job: JobTerms
    phase: Phase = Phase.JOINING
    run: str = ""
    placed: bool = False
    """Whether the server has placed this run here, so that the node cannot join another one."""
    assignment: Assignment | None = None
    """The last round in which this node took part."""
    left_round: int | None = None
    """The last round whose workers are all gone from this node."""
    alive: frozenset[int] = frozenset()
    """The LOCAL_RANKs of the workers that have not exited."""
    workers_gone: bool = True
    """Whether the runner has confirmed that no process still takes part in the round."""
    kept: tuple[KeptWorker, ...] = ()
    standby: Standby = NO_STANDBY
    """The workers that were started in advance. Once they are ready, these are the parked ones."""
    standby_of: tuple[str, int] = ("", 0)
    """`script` and `renewed` of the `Joined` for which they were started."""
    standby_again_ms: int | None = None
    """When they are started again, after one that had parked has ended."""
    resuming: tuple[KeptWorker, ...] = ()
    """Kept workers that have not continued in this round yet: they may wait for others."""
    resume_due_ms: int = 0
    snapshots: tuple[Snapshot, ...] = ()
    carrier: CopyCarrier | None = None
    missing_copies: MissingCopies | None = None
    watermark: SnapshotMark | None = None
    """The newest snapshots that the server has announced as whole, with the round or later."""
    given_up: SnapshotMark | None = None
    """The newest snapshots that the server has given up on in this round."""
    ending_kept: bool = False
    """Whether the runner was told to end the parked workers and has not confirmed their end yet."""
    failures: tuple[Failure, ...] = ()
    finished: tuple[Failure, ...] = ()
    """Those of the last round that exited with 0. If others fail for want of them, one is the
    cause."""
    moved: Moved = UNMOVED
    """How far the last round's workers had got by the time they were gone."""
    stopping_since_ms: int | None = None
    """When the last round's workers were first asked to stop; None if they were not."""
    stuck_pids: tuple[int, ...] = ()
    """Processes of the last round that have survived SIGKILL."""
    fenced: bool = False
    """Whether the last round ended on this node because the server was unreachable."""
    store_host_due_ms: int | None = None
    """When the store host must be ready; None if it is ready or not needed."""
    store_host_failed: str = ""
    disconnected_since_ms: int | None = 0
    """When the connection to the server was lost, or the job began; None while connected."""
    disconnected_reason: str = "none has answered yet"
    idle_since_ms: int = 0
    """When a worker on this node last took part in a round, or when the job began."""
    notice: DrainNotice | None = None
    """It remains while the node is about to leave, or workers may act on a lifted one."""
    leaving: Leaving | None = None
    outcome: Outcome | None = None
    """Set once the job has ended on this node; the node exits when its workers are gone."""

    @property
    def speaker(self) -> tuple[str, int]:
        """Who says what this node says. Only the stream knows the incarnation."""
        return self.job.node_id, 0

    @property
    def evidence(self) -> tuple[Failure, ...]:
        """What the server is told of workers that ended, so that it finds the root cause."""
        return (*self.failures, *self.finished)

    @property
    def is_ending(self) -> bool:
        return self.leaving is not None or self.outcome is not None

    @property
    def has_workers(self) -> bool:
        starts = self.standby.state is StandbyState.STARTING
        return not self.workers_gone or bool(self.kept) or self.ending_kept or starts

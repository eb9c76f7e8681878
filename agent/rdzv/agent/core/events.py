"""Events that reach the agent's core: from the server, the runner, or the agent itself."""

from __future__ import annotations

from rdzv.agent.core.model import Assignment, KeptWorker, NodeFailure
from rdzv.core.model import UNMOVED, Cause, Moved, Result, Snapshot, SnapshotMark
from rdzv.core.snapshot_copies import CopyCarrier, CopySource, MissingCopies
from rdzv.structs import struct


@struct(frozen=True)
class ServerConnected:
    """The server has accepted this node's stream and its belief."""


@struct(frozen=True)
class ServerLost:
    """The stream to the server ended, or could not be opened."""

    reason: str


@struct(frozen=True)
class Joined:
    """The server has admitted this node to a run of the job."""

    run: str
    run_number: int


@struct(frozen=True)
class RoundCompleted:
    """A round that this node takes part in is complete."""

    assignment: Assignment


@struct(frozen=True)
class RoundEnded:
    """A round is over."""

    run: str
    round: int
    cause: Cause
    reason: str
    broken: bool
    keep: bool = False
    """Whether workers may be kept for the next round."""
    culprits: tuple[int, ...] = ()
    """LOCAL_RANKs of this node's workers that caused the end and are not kept."""


@struct(frozen=True)
class Unhealthy:
    """A failure here ended the round, and the health checks then found this node unhealthy."""

    round: int
    reason: str


@struct(frozen=True)
class RunClosed:
    """The run is closed and forms no more rounds."""

    run: str
    result: Result
    reason: str
    retry_sensible: bool
    failures: tuple[NodeFailure, ...]
    no_progress: bool = False


@struct(frozen=True)
class Refused:
    """The server refuses this node's request for good."""

    code: str
    message: str


@struct(frozen=True)
class WorkerExited:
    """A worker has exited; if it failed, that was `age_ms` ago."""

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    message: str
    traceback: str
    age_ms: int
    by_itself: bool = False
    """Whether nothing sent to the worker explains its exit, although its round is ending."""


@struct(frozen=True)
class WorkerSuspected:
    """A collective failed in a worker `age_ms` ago, perhaps because of a peer; the worker parks."""

    round: int
    local_rank: int
    pid: int
    message: str
    traceback: str
    age_ms: int


@struct(frozen=True)
class WorkerResumed:
    """A kept worker continues in a round: its script's function is called again."""

    round: int
    local_rank: int


@struct(frozen=True)
class StartFailed:
    """The workers of a round could not be started."""

    round: int
    reason: str


@struct(frozen=True)
class WorkersGone:
    """No process on the node still takes part in the round, except its store host."""

    round: int
    moved: Moved = UNMOVED
    kept: tuple[KeptWorker, ...] = ()
    """The workers that are parked; all other processes of the round are gone."""


@struct(frozen=True)
class KeptExited:
    """A parked worker has exited."""

    local_rank: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None


@struct(frozen=True)
class KeptGone:
    """No parked worker is left."""


@struct(frozen=True)
class SnapshotsHeld:
    """The runner's snapshots of the run have changed; these are all that it holds now."""

    snapshots: tuple[Snapshot, ...]
    carrier: CopyCarrier | None = None
    missing: MissingCopies | None = None


@struct(frozen=True)
class CopiesWanted:
    """The server asks this node to keep copies of snapshots that other nodes hold."""

    run: str
    mark: SnapshotMark
    sources: tuple[CopySource, ...]


@struct(frozen=True)
class SnapshotWatermark:
    """Snapshots of this mark are whole on the nodes of the run; older ones may be overwritten."""

    run: str
    mark: SnapshotMark
    whole_ms: int = 0
    """When they became whole, by the server's clock; 0 if unknown."""
    given_up: SnapshotMark | None = None
    """Snapshots newer than `mark`, up to this one, never become whole, and may be overwritten."""


@struct(frozen=True)
class WorkersStuck:
    """Processes of the round survive SIGKILL."""

    round: int
    pids: tuple[int, ...]


@struct(frozen=True)
class Fenced:
    """Workers are being killed: `fence_after_ms` passed without proof of contact with the server.

    The killing began `age_ms` ago; `WorkersGone` follows.
    """

    round: int
    age_ms: int


@struct(frozen=True)
class StoreHostReady:
    """The c10d store of the round is served."""

    round: int


@struct(frozen=True)
class StoreHostExited:
    """The store host of the round has exited."""

    round: int
    reason: str


@struct(frozen=True)
class RunnerLost:
    """The runner and all its processes are gone, and this node can start no more workers."""

    reason: str


@struct(frozen=True)
class Signalled:
    """A signal told the agent to end."""

    signum: int
    name: str


@struct(frozen=True)
class Withdrawn:
    """The server has withdrawn this node from the run."""

    run: str
    reason: str


@struct(frozen=True)
class NoticeGiven:
    """The node must be empty in `left_ms`: its workers are notified, and it leaves when they exit.

    A repeated notice only changes the deadline.
    """

    left_ms: int
    reason: str


@struct(frozen=True)
class NoticeLifted:
    """The node may stay after all. Workers that were already notified cannot be told."""


@struct(frozen=True)
class Ticked:
    """Time has passed."""


Event = (
    ServerConnected
    | ServerLost
    | Joined
    | RoundCompleted
    | RoundEnded
    | RunClosed
    | Refused
    | WorkerExited
    | WorkerSuspected
    | WorkerResumed
    | StartFailed
    | WorkersGone
    | KeptExited
    | KeptGone
    | SnapshotsHeld
    | SnapshotWatermark
    | CopiesWanted
    | WorkersStuck
    | Fenced
    | Unhealthy
    | StoreHostReady
    | StoreHostExited
    | RunnerLost
    | Signalled
    | Withdrawn
    | NoticeGiven
    | NoticeLifted
    | Ticked
)

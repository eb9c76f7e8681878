"""Events of a job on this node, from the server, the runner, or the agent itself.

Those of the runner have the fields of its frames. The agent adds what only it can find out.
"""

from __future__ import annotations

from rdzv import messages
from rdzv.bounds import sentence
from rdzv.core.model import (
    UNMOVED,
    Assignment,
    Failure,
    KeptWorker,
    Moved,
    Snapshot,
    SnapshotMark,
    Standby,
)
from rdzv.core.snapshots import CopyCarrier, MissingCopies
from rdzv.structs import struct


@struct(frozen=True)
class ServerConnected:
    """The server has accepted this node's stream and its belief."""


@struct(frozen=True)
class ServerLost:
    """The stream to the server has ended or could not be opened."""

    reason: str


@struct(frozen=True)
class Unhealthy:
    """A failure on this node ended the round, and health checks then found the node unhealthy."""

    round: int
    reason: str


@struct(frozen=True)
class WorkerExited:
    """A worker has exited. If it failed, it did so `age_ms` ago."""

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    age_ms: int
    by_itself: bool = False
    """Whether the exit was not caused by anything sent to the worker, although its round is ending.
    Always False if the worker could not be kept."""
    message: str = ""
    traceback: str = ""
    """These two are from the worker's error file."""


@struct(frozen=True)
class WorkerSuspected:
    """A collective failed in a worker `age_ms` ago, perhaps because of a peer. The worker parks."""

    round: int
    local_rank: int
    pid: int
    message: str
    traceback: str
    age_ms: int


def ended_worker(
    event: WorkerExited | WorkerSuspected, assignment: Assignment | None, now_ms: int
) -> Failure:
    exited = event if isinstance(event, WorkerExited) else None
    return Failure(
        local_rank=event.local_rank,
        rank=event.local_rank + (assignment.rank_first if assignment else 0),
        pid=event.pid,
        exit_code=exited.exit_code if exited else None,
        signal=exited.signal if exited else None,
        message=sentence(event.message),  # As the server keeps it.
        traceback=event.traceback,
        at_ms=now_ms - event.age_ms,
        suspect=exited is None,
    )


@struct(frozen=True)
class WorkerResumed:
    """A worker has entered a round: its process group exists and its state is up to date."""

    round: int
    local_rank: int
    is_unwatched: bool = False
    """Whether it uses NCCL with torch's watchdog off, so nothing in it ends a hang."""
    not_loaded: str = ""
    """Why it has not loaded snapshots that it should or could have loaded, in its own words."""


@struct(frozen=True)
class StartFailed:
    """A worker could not be started, so the round is being killed; `WorkersGone` follows."""

    round: int
    reason: str


@struct(frozen=True)
class WorkersGone:
    """No process on the node, other than the store host, still takes part in the round."""

    round: int
    moved: Moved = UNMOVED
    kept: tuple[KeptWorker, ...] = ()
    """The workers that are parked. All other processes of the round are gone."""


@struct(frozen=True)
class KeptExited:
    """A parked worker has exited."""

    local_rank: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None


@struct(frozen=True)
class KeptGone:
    """No parked workers remain."""


@struct(frozen=True)
class StandbySettled:
    """The workers that were started in advance are parked, or there are none, and why."""

    standby: Standby
    kept: tuple[KeptWorker, ...] = ()


@struct(frozen=True)
class SnapshotsChanged:
    """All snapshots that the runner holds now, copies of other nodes' (`copy_of`) included."""

    snapshots: tuple[Snapshot, ...]
    carrier: CopyCarrier | None = None
    missing: MissingCopies | None = None
    """The copies that this node was last asked to fetch and could not get."""


@struct(frozen=True)
class WorkersStuck:
    """Processes have survived SIGKILL. If they exit after all, `WorkersGone` follows."""

    round: int
    pids: tuple[int, ...]


@struct(frozen=True)
class Fenced:
    """The round is being killed for want of contact. Exits, and `WorkersGone`, follow."""

    round: int
    at_ms: int
    """When the killing began, in `boottime_ms`; for the core, in its own time."""


@struct(frozen=True)
class StoreHostReady:
    """The round's c10d store is being served."""

    round: int


@struct(frozen=True)
class StoreHostExited:
    """A round's store host has exited; the exit code is 127 if it could not be started."""

    round: int
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None


@struct(frozen=True)
class RunnerLost:
    """The runner and all its processes are gone, so this node cannot start any more workers."""

    reason: str


@struct(frozen=True)
class Signalled:
    """The agent has received a signal to end."""

    signum: int
    name: str


@struct(frozen=True)
class NoticeGiven:
    """The node must be empty in `left_ms`. A repeated notice only changes the deadline."""

    left_ms: int
    reason: str


@struct(frozen=True)
class NoticeLifted:
    """The node may stay after all. Workers that were already notified cannot be informed."""


@struct(frozen=True)
class Ticked:
    """Time has passed."""


# What a runner says that changes nothing for the core.


@struct(frozen=True)
class WorkerStarted:
    """A worker of the round is running."""

    round: int
    local_rank: int
    pid: int
    how: str = ""
    """Kept (the same process as before), warm or cold; empty if the runner does not say."""


@struct(frozen=True)
class WorkerNotKept:
    """A worker that was asked to park is being killed instead."""

    round: int
    local_rank: int
    pid: int
    reason: str


@struct(frozen=True)
class WorkersStartedCold:
    """Workers that should have been forked from the zygote are being started cold."""

    round: int
    local_ranks: tuple[int, ...]
    reason: str


@struct(frozen=True)
class ZygoteReady:
    """The zygote is ready, so workers can be forked from now on."""

    pid: int
    modules: tuple[str, ...]
    threads: int
    memory_kb: int
    seconds: float


@struct(frozen=True)
class ZygoteLost:
    """There is no zygote now. Another one is started after `retry_s`, or never if that is None."""

    reason: str
    retry_s: float | None


@struct(frozen=True)
class SnapshotRefused:
    """A worker gets no memory for snapshots, and continues training without them."""

    local_rank: int
    reason: str


@struct(frozen=True)
class SnapshotsWritten:
    """This node's parts of a step have been written to disk, or `reason` says why not."""

    mark: SnapshotMark
    reason: str


@struct(frozen=True)
class ServeFailed:
    """The runner cannot outlive this process and will end with it."""

    reason: str


@struct(frozen=True)
class RunnerRefused:
    """The runner has refused a request, which has had no effect."""

    reason: str


@struct(frozen=True)
class RunnerExited:
    """The runner and its workers are gone; this is its last event. Negative codes are signals.

    An adopted runner's code is 0 if it was asked to end, else None; then descendants of its workers
    may remain, which `sweep_orphans` kills in a subreaper.
    """

    exit_code: int | None


RunnerEvent = (
    WorkerStarted
    | StartFailed
    | WorkerExited
    | WorkerSuspected
    | WorkerResumed
    | WorkersGone
    | WorkerNotKept
    | KeptExited
    | KeptGone
    | WorkersStuck
    | Fenced
    | WorkersStartedCold
    | ZygoteReady
    | ZygoteLost
    | StoreHostReady
    | StoreHostExited
    | SnapshotsChanged
    | SnapshotRefused
    | SnapshotsWritten
    | ServeFailed
    | RunnerRefused
    | RunnerExited
)


FromServer = (
    messages.Joined
    | Assignment
    | messages.RoundOver
    | messages.Closed
    | messages.Refused
    | messages.SnapshotWatermark
    | messages.KeepCopies
    | messages.Withdrawn
)
"""What the server tells a job: the core hears its messages as they are."""

Event = (
    FromServer
    | RunnerEvent
    | ServerConnected
    | ServerLost
    | Unhealthy
    | StandbySettled
    | RunnerLost
    | Signalled
    | NoticeGiven
    | NoticeLifted
    | Ticked
)

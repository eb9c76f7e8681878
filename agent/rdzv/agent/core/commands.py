"""Commands to the agent's driver. None blocks, and each may be repeated."""

from __future__ import annotations

from rdzv.agent.core.model import Assignment, KeptWorker, Leaving, Outcome, WorkerFailure
from rdzv.core.model import UNMOVED, Moved, Snapshot, SnapshotMark
from rdzv.core.snapshot_copies import CopyCarrier, CopySource, MissingCopies
from rdzv.structs import struct


@struct(frozen=True)
class SayJoin:
    """Request a place in the next round; the driver adds the offer, with a fresh store port."""

    run: str
    left_round: int | None
    failures: tuple[WorkerFailure, ...]
    fenced: bool = False
    """Whether the round ended on this node only because of its fence."""
    moved: Moved = UNMOVED
    kept: tuple[KeptWorker, ...] = ()
    """The parked workers that may enter the next round."""


@struct(frozen=True)
class SayFailed:
    """Report failed workers."""

    run: str
    round: int
    failures: tuple[WorkerFailure, ...]


@struct(frozen=True)
class SaySucceeded:
    """Report that all workers exited 0."""

    run: str
    round: int


@struct(frozen=True)
class SayLeave:
    """Announce that the node leaves; `left_round` confirms that its workers are gone."""

    run: str
    leaving: Leaving
    left_round: int | None


@struct(frozen=True)
class SayStuck:
    """Report workers that survive SIGKILL."""

    run: str
    round: int
    pids: tuple[int, ...]


@struct(frozen=True)
class SayStoreHostFailed:
    """Report that the round's store is not being served."""

    run: str
    round: int
    reason: str


@struct(frozen=True)
class SaySnapshots:
    """Report all snapshots of the run that this node holds in memory."""

    run: str
    snapshots: tuple[Snapshot, ...]
    carrier: CopyCarrier | None = None
    missing: MissingCopies | None = None


@struct(frozen=True)
class FetchCopies:
    """Fetch copies of snapshots that other nodes hold, and keep them."""

    mark: SnapshotMark
    sources: tuple[CopySource, ...]


@struct(frozen=True)
class AnnounceWatermark:
    """Tell the workers which snapshots are whole, so that they overwrite only the others."""

    mark: SnapshotMark
    whole_ms: int = 0
    """When they became whole, by the server's clock; 0 if unknown."""
    given_up: SnapshotMark | None = None
    """Snapshots newer than `mark`, up to this one, never become whole, and may be overwritten."""


@struct(frozen=True)
class StartWorkers:
    """Start the local worker group, and the round's store host if this node serves it.

    Parked workers listed in `assignment.kept` enter the round; the others are ended first.
    """

    assignment: Assignment


@struct(frozen=True)
class StopWorkers:
    """End every process of the round: send `signum`, then SIGKILL after `grace_ms`.

    Without `signum`, SIGTERM is sent. With `keep_ms`, workers that can be kept are asked to park
    instead, and are killed if they take longer; those in `not_kept` are killed at once.
    """

    round: int
    grace_ms: int
    signum: int | None = None
    keep_ms: int | None = None
    not_kept: tuple[int, ...] = ()


@struct(frozen=True)
class EndKept:
    """End all parked workers: SIGTERM, then SIGKILL after `grace_ms`; `KeptGone` follows.

    Workers in `charged` instead raise the exception that made them suspects.
    """

    grace_ms: int
    charged: tuple[int, ...] = ()


@struct(frozen=True)
class NotifyWorkers:
    """Notify the workers through the notice file that the node leaves in `left_ms`.

    With `signum`, also send that signal once to each worker.
    """

    round: int
    left_ms: int
    reason: str
    signum: int | None = None


@struct(frozen=True)
class TakeBackNotice:
    """Remove the notice file, so that workers that have not read it yet do not see it."""

    round: int


@struct(frozen=True)
class StopStoreHost:
    """End the round's store host."""

    round: int


@struct(frozen=True)
class Exit:
    """End the job on this node: inform the user, and exit."""

    outcome: Outcome


Command = (
    SayJoin
    | SayFailed
    | SaySucceeded
    | SayLeave
    | SayStuck
    | SayStoreHostFailed
    | SaySnapshots
    | FetchCopies
    | AnnounceWatermark
    | StartWorkers
    | StopWorkers
    | EndKept
    | NotifyWorkers
    | TakeBackNotice
    | StopStoreHost
    | Exit
)

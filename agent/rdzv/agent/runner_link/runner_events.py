"""Typed events of a runner, about workers, store hosts and the zygote."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rdzv.agent.core.model import KeptWorker
from rdzv.agent.runner.channel import MalformedFrameError
from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.core.snapshot_copies import CopyCarrier, MissingCopies
from rdzv.structs import struct


@struct(frozen=True)
class WorkerStarted:
    """A worker of the round is running."""

    round: int
    local_rank: int
    pid: int
    how: str = ""
    """kept (the same process as before), warm or cold; empty if the runner does not say."""


@struct(frozen=True)
class WorkersStartFailed:
    """A worker could not be started. The round's others are being killed; `WorkersGone` follows."""

    round: int
    local_rank: int
    reason: str


@struct(frozen=True)
class WorkerExited:
    """A worker has exited: with an exit code, or by a signal."""

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    age_ms: int
    by_itself: bool = False
    """Whether the runner did not cause the exit. Always False if its worker could not be kept."""


@struct(frozen=True)
class WorkerSuspected:
    """A collective has failed in a worker, which parks by itself."""

    round: int
    local_rank: int
    pid: int
    message: str
    traceback: str
    age_ms: int


@struct(frozen=True)
class WorkerResumed:
    """A worker continues in a round: its process group exists, and its state is up to date."""

    round: int
    local_rank: int
    pid: int
    step: int | None
    source: int | None
    """RANK of the worker whose state it has taken over, if there is one."""
    healed: bool
    init_ms: int
    heal_ms: int
    is_unwatched: bool = False
    """Whether it uses NCCL with torch's watchdog off, so nothing there ends a hang."""


@struct(frozen=True)
class WorkersGone:
    """After a stop or a failed start: of the round's processes, only the store host is left.

    The workers in `kept` are parked, and take part in no round.
    """

    round: int
    kept: tuple[KeptWorker, ...] = ()


@struct(frozen=True)
class WorkerNotKept:
    """A worker was asked to park, but is killed instead."""

    round: int
    local_rank: int
    pid: int
    reason: str


@struct(frozen=True)
class KeptExited:
    """A parked worker has exited."""

    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None


@struct(frozen=True)
class KeptGone:
    """No parked worker is left."""


@struct(frozen=True)
class WorkersStuck:
    """These processes survive SIGKILL. If they exit after all, `WorkersGone` follows."""

    round: int
    pids: tuple[int, ...]


@struct(frozen=True)
class WorkersFenced:
    """The fence came at `at_ms` of `boottime_ms`: the round is being killed; `WorkersGone` follows.

    Worker exits caused by it are reported after this.
    """

    round: int
    at_ms: int


@struct(frozen=True)
class WorkersStartedCold:
    """Workers that should have been forked from the zygote are started cold, for this reason."""

    round: int
    local_ranks: tuple[int, ...]
    reason: str


@struct(frozen=True)
class ZygoteReady:
    """Workers can be forked from now on."""

    pid: int
    modules: tuple[str, ...]
    threads: int
    memory_kb: int
    seconds: float


@struct(frozen=True)
class ZygoteLost:
    """There is no zygote now; another is started after `retry_s`, or never if that is None."""

    reason: str
    retry_s: float | None


@struct(frozen=True)
class StoreHostReady:
    """The round's store serves."""

    round: int


@struct(frozen=True)
class StoreHostExited:
    """The round's store host has exited, with 127 if it could not be started."""

    round: int
    exit_code: int | None
    signal: int | None


@struct(frozen=True)
class SnapshotsHeld:
    """All snapshots in the runner's memory, as workers have reported them; sent after each change.

    Copies of other nodes' snapshots are among them, with a `copy_of`.
    """

    snapshots: tuple[Snapshot, ...]
    carrier: CopyCarrier | None = None
    """The carrier from which other nodes can fetch copies of them."""
    missing: MissingCopies | None = None
    """The copies that this node was last asked to fetch, but could not get."""


@struct(frozen=True)
class SnapshotRefused:
    """A worker gets no memory for snapshots, and trains on without."""

    local_rank: int
    reason: str


@struct(frozen=True)
class SnapshotsWritten:
    """This node's parts of a step are on disk, or `reason` says why they are not."""

    lineage: int
    step: int
    series: str
    reason: str


@struct(frozen=True)
class ServeFailed:
    """The runner cannot outlive this process, and ends with it."""

    reason: str


@struct(frozen=True)
class RunnerRefused:
    """The runner cannot carry out a request, and has done nothing."""

    reason: str


@struct(frozen=True)
class RunnerExited:
    """The runner is gone, and with it its workers; the last event. Negative codes are signals.

    The exit code of an adopted runner is unknown: it is given as 0 if the runner was asked to end,
    and as None otherwise. In the latter case descendants of its workers may be left; in a
    subreaper, `sweep_orphans` kills them.
    """

    exit_code: int | None


RunnerEvent = (
    WorkerStarted
    | WorkersStartFailed
    | WorkerExited
    | WorkerSuspected
    | WorkerResumed
    | WorkersGone
    | WorkerNotKept
    | KeptExited
    | KeptGone
    | WorkersStuck
    | WorkersFenced
    | WorkersStartedCold
    | ZygoteReady
    | ZygoteLost
    | StoreHostReady
    | StoreHostExited
    | SnapshotsHeld
    | SnapshotRefused
    | SnapshotsWritten
    | ServeFailed
    | RunnerRefused
    | RunnerExited
)

OnEvent = Callable[[RunnerEvent], asyncio.Future[None] | None]
"""Handles an event, and must not raise. Returns a future that is done once the event is handled, or
None if it already is. Only then does the next event come, and may the runner forget this one.
"""

EVENTS: Mapping[str, Callable[..., RunnerEvent]] = {
    "started": WorkerStarted,
    "start_failed": WorkersStartFailed,
    "exited": WorkerExited,
    "suspect": WorkerSuspected,
    "resumed": WorkerResumed,
    "gone": lambda round, kept=(): WorkersGone(
        round, tuple(KeptWorker(**worker) for worker in kept)
    ),
    "not_kept": WorkerNotKept,
    "kept_exited": KeptExited,
    "kept_gone": KeptGone,
    "stuck": lambda round, pids: WorkersStuck(round, tuple(pids)),
    "fenced": WorkersFenced,
    "started_cold": lambda local_ranks, **fields: WorkersStartedCold(
        local_ranks=tuple(local_ranks), **fields
    ),
    "zygote_ready": lambda modules, **fields: ZygoteReady(modules=tuple(modules), **fields),
    "zygote_lost": ZygoteLost,
    "store_host_ready": StoreHostReady,
    "store_host_exited": StoreHostExited,
    "snapshots_held": lambda snapshots, carrier=None, missing=None: SnapshotsHeld(
        tuple(_snapshot(one) for one in snapshots),
        None if carrier is None else CopyCarrier(**carrier),
        None
        if missing is None
        else MissingCopies(SnapshotMark(**missing["mark"]), missing["reason"]),
    ),
    "snapshot_refused": SnapshotRefused,
    "snapshots_written": SnapshotsWritten,
    "serve_failed": ServeFailed,
    "error": RunnerRefused,
}


def _snapshot(said: Mapping[str, Any]) -> Snapshot:
    names = ("lineage", "step", "series", "shards", "world_size")
    return Snapshot(
        local_rank=said["local_rank"],
        mark=SnapshotMark(**{name: said[name] for name in names}),
        shard=said["shard"],
        bytes=said["bytes"],
        digest=said["digest"],
        copy_of=said.get("copy_of"),
    )


def number_of(message: Mapping[str, Any]) -> int:
    """Return the number of an event; 0 if it has none."""
    number = message.get("number", 0)
    if type(number) is not int:
        raise MalformedFrameError(f"the runner numbered an event {number!r:.200}")
    return number


def decode_event(message: Mapping[str, Any]) -> RunnerEvent:
    """Decode an event; `MalformedFrameError` if the message is not one."""
    fields = dict(message)
    fields.pop("number", None)
    try:
        return EVENTS[fields.pop("type")](**fields)
    except (KeyError, TypeError) as error:
        raise MalformedFrameError(f"the runner sent {message!r:.200}") from error

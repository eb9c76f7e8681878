"""A runner's typed events, about workers, store hosts and the zygote."""

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
    """Kept (the same process as before), warm or cold; empty if the runner does not say."""


@struct(frozen=True)
class WorkersStartFailed:
    """A worker could not be started, so the round is being killed; `WorkersGone` follows."""

    round: int
    local_rank: int
    reason: str


@struct(frozen=True)
class WorkerExited:
    """A worker has exited, either with an exit code or because of a signal."""

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    age_ms: int
    by_itself: bool = False
    """Whether the runner did not cause the exit. Always False if the worker could not be kept."""


@struct(frozen=True)
class WorkerSuspected:
    """A collective has failed in a worker, and the worker parks by itself."""

    round: int
    local_rank: int
    pid: int
    message: str
    traceback: str
    age_ms: int


@struct(frozen=True)
class WorkerResumed:
    """A worker has entered a round: its process group exists and its state is up to date."""

    round: int
    local_rank: int
    pid: int
    step: int | None
    source: int | None
    """The RANK of the worker whose state this worker has taken over, if any."""
    healed: bool
    init_ms: int
    heal_ms: int
    is_unwatched: bool = False
    """Whether the worker uses NCCL with torch's watchdog off, so nothing in the process ends a
    hang.
    """
    not_loaded: str = ""
    """Why it has not loaded snapshots that it should or could have loaded, in its own words."""


@struct(frozen=True)
class WorkersGone:
    """After a stop or failed start, only the store host remains of the round's processes.

    The workers in `kept` are parked, and are no longer part of any round.
    """

    round: int
    kept: tuple[KeptWorker, ...] = ()


@struct(frozen=True)
class WorkerNotKept:
    """A worker that was asked to park is being killed instead."""

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
    """No parked workers remain."""


@struct(frozen=True)
class WorkersStuck:
    """Processes have survived SIGKILL. If they exit after all, `WorkersGone` follows."""

    round: int
    pids: tuple[int, ...]


@struct(frozen=True)
class WorkersFenced:
    """The fence was reached at `at_ms` of `boottime_ms`, and the round is being killed.

    The resulting worker exits are reported after this event, followed by `WorkersGone`.
    """

    round: int
    at_ms: int


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
class StoreHostReady:
    """A round's store host is serving."""

    round: int


@struct(frozen=True)
class StoreHostExited:
    """A round's store host has exited; the exit code is 127 if it could not be started."""

    round: int
    exit_code: int | None
    signal: int | None


@struct(frozen=True)
class SnapshotsHeld:
    """All snapshots in the runner's memory, as reported by workers; sent after each change.

    They include copies of other nodes' snapshots, which have a `copy_of`.
    """

    snapshots: tuple[Snapshot, ...]
    carrier: CopyCarrier | None = None
    """The carrier from which other nodes can fetch copies of these snapshots."""
    missing: MissingCopies | None = None
    """The copies that this node was last asked to fetch and could not get."""


@struct(frozen=True)
class SnapshotRefused:
    """A worker gets no memory for snapshots, and continues training without them."""

    local_rank: int
    reason: str


@struct(frozen=True)
class SnapshotsWritten:
    """This node's parts of a step have been written to disk, or `reason` says why not."""

    lineage: int
    step: int
    series: str
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
    """The runner and its workers are gone; this is the last event. Negative codes are signals.

    An adopted runner's exit code is unknown. It is given as 0 if the runner was asked to end, and
    as None otherwise. In the latter case its workers' descendants may remain; in a subreaper,
    `sweep_orphans` kills them.
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
"""Handles an event; must not raise. Returns a future that is done once the event has been handled,
or None if it already has been. Until then, the next event is not delivered and the runner does not
forget this one.
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
    """Return an event's number, or 0 if it has none."""
    number = message.get("number", 0)
    if type(number) is not int:
        raise MalformedFrameError(f"the runner numbered an event {number!r:.200}")
    return number


def decode_event(message: Mapping[str, Any]) -> RunnerEvent:
    """Decode an event. Raises `MalformedFrameError` if the message is not an event."""
    fields = dict(message)
    fields.pop("number", None)
    try:
        return EVENTS[fields.pop("type")](**fields)
    except (KeyError, TypeError) as error:
        raise MalformedFrameError(f"the runner sent {message!r:.200}") from error

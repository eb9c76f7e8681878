"""What the agent's driver is to do. None of it blocks, all of it may be done again."""

from __future__ import annotations

from rdzv.agent.core.model import Assignment, Leaving, Outcome, WorkerFailure
from rdzv.core.model import UNMOVED, Moved
from rdzv.structs import struct


@struct(frozen=True)
class SayJoin:
    """Ask for a place in the next round; the driver adds the offer, with a fresh store port."""

    run: str
    left_round: int | None
    failures: tuple[WorkerFailure, ...]
    fenced: bool = False
    """Whether the round ended on this node by its fence, and by nothing else."""
    moved: Moved = UNMOVED


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
    """Say that the node leaves; with `left_round`, that its workers are gone."""

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
    """Report that the round's store is not served."""

    run: str
    round: int
    reason: str


@struct(frozen=True)
class StartWorkers:
    """Start the local worker group, and the round's store host if this node serves it."""

    assignment: Assignment


@struct(frozen=True)
class StopWorkers:
    """End every process of the round: the signal, then SIGKILL after `grace_ms`.

    Without `signum`, the runner's usual SIGTERM.
    """

    round: int
    grace_ms: int
    signum: int | None = None


@struct(frozen=True)
class NotifyWorkers:
    """Tell the workers of the round that the node leaves in `left_ms`, in the job's notice file.

    With `signum` also by this signal, which each worker gets once.
    """

    round: int
    left_ms: int
    reason: str
    signum: int | None = None


@struct(frozen=True)
class TakeBackNotice:
    """Have no notice file any more: whoever has not read it yet is not to."""

    round: int


@struct(frozen=True)
class StopStoreHost:
    """End the round's store host."""

    round: int


@struct(frozen=True)
class Exit:
    """It is over for this node: tell the user, and exit."""

    outcome: Outcome


Command = (
    SayJoin
    | SayFailed
    | SaySucceeded
    | SayLeave
    | SayStuck
    | SayStoreHostFailed
    | StartWorkers
    | StopWorkers
    | NotifyWorkers
    | TakeBackNotice
    | StopStoreHost
    | Exit
)

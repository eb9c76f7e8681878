"""Commands to the agent's driver. None of them blocks, and each may be repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rdzv.agent.core.model import AgentState, Outcome
from rdzv.bounds import Flat
from rdzv.core.commands import Fail, Leave, ReportStoreHost, ReportStuck, Succeed
from rdzv.core.model import NO_STANDBY, UNMOVED, Assignment, Failure, KeptWorker, Moved, Standby
from rdzv.messages import KeepCopies, SnapshotsHeld, SnapshotWatermark
from rdzv.structs import struct


@struct(frozen=True)
class SayJoin:
    """Request a place in the next round. The driver adds the offer, with a fresh store port."""

    run: str
    left_round: int | None
    failures: tuple[Failure, ...]
    fenced: bool = False
    """Whether the fence was the only reason why the round ended on this node."""
    moved: Annotated[Moved, Flat] = UNMOVED
    kept: tuple[KeptWorker, ...] = ()
    """The parked workers that may enter the next round."""
    standby: Standby = NO_STANDBY


@struct(frozen=True)
class StartWorkers:
    """Parked workers in `assignment.kept` enter the round; all others are ended first."""

    assignment: Assignment


@struct(frozen=True)
class StartStandby:
    """Start the workers of a node without a place, if it has this script."""

    script: str


@struct(frozen=True)
class StopWorkers:
    """End every process of the round with `signum`, and with SIGKILL after `grace_ms`.

    Without `signum`, SIGTERM is sent. With `keep_ms`, workers that can be kept are asked to park
    instead, and are killed if they take longer than that; those in `not_kept` are killed at once.
    """

    round: int
    grace_ms: int
    signum: int | None = None
    keep_ms: int | None = None
    not_kept: tuple[int, ...] = ()


@struct(frozen=True)
class EndKept:
    """End all parked workers with SIGTERM, and with SIGKILL after `grace_ms`.

    Workers in `charged` instead raise the exception that made them suspects. `KeptGone` follows.
    """

    grace_ms: int
    charged: tuple[int, ...] = ()


@struct(frozen=True)
class NotifyWorkers:
    """Say by the notice file that the node leaves in `left_ms`, and by `signum`, if given."""

    round: int
    left_ms: int
    reason: str
    signum: int | None = None


@struct(frozen=True)
class TakeBackNotice:
    """Remove the notice file, so that workers that have not read it yet never see it."""

    round: int


@struct(frozen=True)
class StopStoreHost:
    """End the round's store host."""

    round: int


@struct(frozen=True)
class Exit:
    """Inform the user of the job's end on this node, and exit."""

    outcome: Outcome


Command = (
    SayJoin
    | Fail
    | Succeed
    | Leave
    | ReportStuck
    | ReportStoreHost
    | SnapshotsHeld
    | KeepCopies
    | SnapshotWatermark
    | StartWorkers
    | StartStandby
    | StopWorkers
    | EndKept
    | NotifyWorkers
    | TakeBackNotice
    | StopStoreHost
    | Exit
)


@dataclass(slots=True)
class Work:
    """The state and the commands so far. Visible only within `step`."""

    state: AgentState
    now_ms: int
    commands: list[Command] = field(default_factory=list)

    def do(self, command: Command) -> None:
        self.commands.append(command)

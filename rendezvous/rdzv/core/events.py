"""Events of a rendezvous. They are past tense, and published only after they are persisted.

Logs, metrics, the event history and messages to nodes all derive from these. The history stores
most of them unchanged (`rdzv.view.history`), so never rename a field, and give new ones a default.
"""

from __future__ import annotations

from enum import StrEnum

from rdzv.core.gpu_state import GpuState
from rdzv.core.kept_ranks import NotKept
from rdzv.core.model import Cause, Ended, Failure, Round, RoundEnd
from rdzv.core.snapshots import WhyNotLoaded
from rdzv.structs import struct


@struct(frozen=True)
class RunBegan:
    """A run of the job began with its first join."""

    run: str
    run_number: int
    reason: str
    queued: bool = False
    """It waits until the server places it."""
    gpus_per_node: int | None = None
    """GPUs that each node gives to the run; None if unknown."""


@struct(frozen=True)
class NodeJoined:
    """A node was admitted; it waits for the next round."""

    node_id: str
    incarnation: int
    address: str
    local_world_size: int


@struct(frozen=True)
class NodeStopped:
    """The node's workers have all left the ended round, and the node waits for the next one."""

    node_id: str
    round: int
    parked: int = 0
    """How many of its workers it offers for the next round; the others are gone."""


@struct(frozen=True)
class NodeSucceeded:
    """All workers of the node exited 0; it waits at the exit barrier."""

    node_id: str
    round: int


@struct(frozen=True)
class NodeLeaving:
    """A node announced that it would leave; its workers are being stopped."""

    node_id: str
    reason: str


@struct(frozen=True)
class NodeLeft:
    """A node left of its own accord; its workers are gone."""

    node_id: str
    reason: str


@struct(frozen=True)
class NodeWentAway:
    """A node's stream ended; its place is kept for now."""

    node_id: str
    for_ms: int


@struct(frozen=True)
class NodeCameBack:
    """A node that was away is connected again."""

    node_id: str
    after_ms: int


@struct(frozen=True)
class NodeLost:
    """A node was given up."""

    node_id: str
    reason: str
    may_run: bool = False
    """Its workers may still run, until the node reports otherwise."""
    silent_ms: int = 0
    """How long it had been silent; 0 if it sent messages until the end."""


@struct(frozen=True)
class NodeStuck:
    """Workers of a node survive SIGKILL; its seat was given away."""

    node_id: str
    round: int
    reason: str


@struct(frozen=True)
class WorkerFailed:
    """A worker failed."""

    round: int
    failure: Failure
    age_ms: int = 0
    """How long ago it failed."""


@struct(frozen=True)
class LastCallBegan:
    """`min_nodes` are present: the round completes after last_call_timeout, or when full."""

    nodes: int
    for_ms: int


@struct(frozen=True)
class RoundCompleted:
    """A round is complete: participants, ranks, MASTER_ADDR and kept workers are fixed."""

    round: Round
    enough_ms: int | None = None
    """How long enough nodes had been ready; None in rows written by older versions."""
    not_kept: tuple[NotKept, ...] = ()
    not_loaded: WhyNotLoaded | None = None
    """Why no snapshots are loaded although nodes hold some; None if some are, or none are needed.
    """


@struct(frozen=True)
class RoundAdopted:
    """A round unknown to this server continues, as its nodes report it."""

    round: Round


@struct(frozen=True)
class NodeAdopted:
    """A node reported its place in an adopted round."""

    node_id: str
    round: int
    group_rank: int


@struct(frozen=True)
class RoundEnded:
    """A round is over; its participants stop their workers."""

    round: int
    end: RoundEnd
    dead_ms: int = 0
    """How long the workers had been dead, if the node was cut off and had killed them."""


@struct(frozen=True)
class RoundSettled:
    """Everyone has stopped; the end of the round is charged to this cause."""

    round: int
    cause: Cause
    reason: str
    restarts: int
    max_restarts: int | None
    root_cause: Failure | None = None
    """The failure taken to have caused the others; None if no worker failure was reported."""
    cause_node_id: str = ""
    """The node that the cause refers to; empty if it is unknown, or the cause refers to none or
    several."""
    step: int | None = None
    """The furthest step of the round; None if no worker has reported any."""


@struct(frozen=True)
class JobScaled:
    """An operator changed the bounds of the run."""

    min_nodes: int
    max_nodes: int
    reason: str


@struct(frozen=True)
class NodesPlaced:
    """The server has chosen these nodes for a submitted run."""

    node_ids: tuple[str, ...]
    was_queued: bool | None = None
    """The run had no nodes before, so it was queued until now; None in rows from older versions."""


@struct(frozen=True)
class NodesWithdrawn:
    """The server has withdrawn these nodes from a submitted run; none of them has a seat in it."""

    node_ids: tuple[str, ...]
    reason: str


@struct(frozen=True)
class NodeDeclined:
    """A node cannot run a submitted job, and is not chosen for it again."""

    node_id: str
    reason: str


@struct(frozen=True)
class NodeQuarantined:
    """A node was at fault too often: nothing is placed on it for a while."""

    node_id: str
    for_ms: int
    reason: str


@struct(frozen=True)
class NodeNotQuarantined:
    """A node was at fault too often, but stays in use."""

    node_id: str
    fault: str
    """How often, and within what time, it was at fault, in words."""
    reason: str


@struct(frozen=True)
class NodeDrained:
    """A node leaves all its jobs, on request or by itself; its workers have `within_ms` left."""

    node_id: str
    reason: str
    within_ms: int


@struct(frozen=True)
class NodeUndrained:
    """An operator has lifted the drain of a node."""

    node_id: str


@struct(frozen=True)
class JobQueued:
    """A submitted job waits to be placed again; spent restarts stay spent."""

    reason: str


@struct(frozen=True)
class WorkersHang:
    """A node reports that some of its workers hang; nothing is stopped yet."""

    round: int
    node_id: str
    reason: str
    silent_ms: int = 0
    """The longest silence of any of them."""


@struct(frozen=True)
class StacksTaken:
    """Stacks of all workers were taken and archived, because some hang."""

    round: int
    summary: str
    cause: str = ""
    """The kind of cause that the records of collectives show; empty if they show none."""
    ranks: tuple[int, ...] = ()
    """The workers that the others wait for, as far as those records show them."""


@struct(frozen=True)
class HangOver:
    """No worker hangs any more, and the round continues."""

    round: int


@struct(frozen=True)
class RankStraggles:
    """A worker has been slow for a while, judged by its rate or by when it enters collectives."""

    round: int
    rank: int
    node_id: str
    step_s: float | None = None
    median_s: float | None = None
    """The time that the median worker of its role takes."""
    late_ms: float | None = None
    """The median delay with which it enters collectives after the others."""
    late_p95_ms: float | None = None
    clock_error_ms: float | None = None
    wait_share: float | None = None
    """A lower bound on the share of time that the others spend waiting for it."""
    gpu: GpuState | None = None
    """The worker's GPU, if NVML on its node shows it."""


@struct(frozen=True)
class RankCaughtUp:
    """A worker no longer straggles."""

    round: int
    rank: int
    node_id: str


class WorkerStart(StrEnum):
    """How a worker was started for a round."""

    KEPT = "kept"
    """It is the same process as in the previous round."""
    WARM = "warm"
    COLD = "cold"


@struct(frozen=True)
class NewWorker:
    """A worker that started cold, or as a new process although others of its round were kept."""

    rank: int
    node_id: str
    how: str
    why: str


@struct(frozen=True)
class WorkersStarted:
    """All workers of a round have started or were kept, with the number of each kind."""

    round: int
    kept: int
    warm: int
    cold: int
    new: tuple[NewWorker, ...] = ()
    """The first few workers whose nodes reported why they are new or cold."""


@struct(frozen=True)
class FirstCollectiveMade:
    """Workers have entered the first recorded collective of a round."""

    round: int
    node_id: str
    """The node that reported it first."""
    age_ms: int
    """How long ago it was entered; 0 if the clocks do not tell."""


@struct(frozen=True)
class FirstStepMade:
    """A worker has reported the first step of a round."""

    round: int
    node_id: str
    rank: int
    step: int
    age_ms: int
    """How long ago it made the step."""


@struct(frozen=True)
class LostStepsRedone:
    """A round has reached the furthest step of the rounds before it."""

    round: int
    step: int
    """That furthest step."""
    age_ms: int
    """How long ago it was reached."""


@struct(frozen=True)
class LastStepMade:
    """The last step that a round's workers reported before it ended."""

    round: int
    step: int
    age_ms: int
    """How long ago it was made."""


@struct(frozen=True)
class RunEnded:
    """The run is closed and forms no more rounds."""

    run: str
    ended: Ended


Event = (
    RunBegan
    | NodeJoined
    | NodeStopped
    | NodeSucceeded
    | NodeLeaving
    | NodeLeft
    | NodeWentAway
    | NodeCameBack
    | NodeLost
    | NodeStuck
    | WorkerFailed
    | LastCallBegan
    | RoundCompleted
    | RoundAdopted
    | NodeAdopted
    | RoundEnded
    | RoundSettled
    | JobScaled
    | NodesPlaced
    | NodesWithdrawn
    | NodeDeclined
    | NodeQuarantined
    | NodeNotQuarantined
    | NodeDrained
    | NodeUndrained
    | JobQueued
    | WorkersHang
    | StacksTaken
    | HangOver
    | RankStraggles
    | RankCaughtUp
    | WorkersStarted
    | FirstCollectiveMade
    | FirstStepMade
    | LostStepsRedone
    | LastStepMade
    | RunEnded
)

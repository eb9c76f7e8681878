"""Events of a rendezvous. They are named in the past tense, and published only once persisted.

Log lines, metrics, the event history and messages to nodes all derive from these. The history
stores most of them unchanged (`rdzv.view.history`), so never rename a field, and give new ones a
default.
"""

from __future__ import annotations

from enum import StrEnum

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
    gpus_per_node: int | None = None


@struct(frozen=True)
class NodeJoined:
    """A node was admitted and is waiting for the next round."""

    node_id: str
    incarnation: int
    address: str
    local_world_size: int


@struct(frozen=True)
class NodeStopped:
    """All of the node's workers have left the ended round, and the node waits for the next one."""

    node_id: str
    round: int
    parked: int = 0
    """The number of its workers that it offers for the next round; the others are gone."""


@struct(frozen=True)
class NodeSucceeded:
    """All workers of the node exited with code 0, and the node is waiting at the exit barrier."""

    node_id: str
    round: int


@struct(frozen=True)
class NodeLeaving:
    """A node announced that it is leaving, and its workers are being stopped."""

    node_id: str
    reason: str


@struct(frozen=True)
class NodeLeft:
    """A node left voluntarily, and its workers are gone."""

    node_id: str
    reason: str


@struct(frozen=True)
class NodeWentAway:
    """A node's stream ended, but its place is kept for now."""

    node_id: str
    for_ms: int


@struct(frozen=True)
class NodeCameBack:
    """A node that was away has reconnected."""

    node_id: str
    after_ms: int


@struct(frozen=True)
class NodeLost:
    """A node was given up."""

    node_id: str
    reason: str
    may_run: bool = False
    """Its workers may still be running, until the node reports otherwise."""
    silent_ms: int = 0
    """The time for which it had been silent, or 0 if it sent messages until the end."""


@struct(frozen=True)
class NodeStuck:
    """Workers of a node survived SIGKILL, so its seat was given away."""

    node_id: str
    round: int
    reason: str


@struct(frozen=True)
class WorkerFailed:
    """A worker failed."""

    round: int
    failure: Failure
    age_ms: int = 0


@struct(frozen=True)
class LastCallBegan:
    """`min_nodes` are present, so the round completes after the last call or when it is full."""

    nodes: int
    for_ms: int


@struct(frozen=True)
class RoundCompleted:
    """A round is complete: participants, ranks, MASTER_ADDR and kept workers are fixed."""

    round: Round
    enough_ms: int = 0
    """The time for which enough nodes had been ready."""
    not_kept: tuple[NotKept, ...] = ()
    not_loaded: WhyNotLoaded | None = None


@struct(frozen=True)
class RoundAdopted:
    """A round unknown to this server is continued as reported by its nodes."""

    round: Round


@struct(frozen=True)
class NodeAdopted:
    """A node reported its place in an adopted round."""

    node_id: str
    round: int
    group_rank: int


@struct(frozen=True)
class RoundEnded:
    """A round has ended, and its participants are stopping their workers."""

    round: int
    end: RoundEnd
    dead_ms: int = 0
    """The time for which the workers had been dead, if the node was cut off and had killed them."""


@struct(frozen=True)
class RoundSettled:
    """All participants have stopped, and the end of the round is charged to this cause."""

    round: int
    cause: Cause
    reason: str
    restarts: int
    max_restarts: int | None
    root_cause: Failure | None = None
    cause_node_id: str = ""
    step: int | None = None


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
    was_queued: bool = False


@struct(frozen=True)
class NodesWithdrawn:
    """The server has withdrawn these nodes, none of which holds a seat, from a submitted run."""

    node_ids: tuple[str, ...]
    reason: str


@struct(frozen=True)
class NodeDeclined:
    """A node cannot run a submitted job and will not be chosen for it again."""

    node_id: str
    reason: str


@struct(frozen=True)
class NodeQuarantined:
    """A node was at fault too often, so nothing is placed on it for a while."""

    node_id: str
    for_ms: int
    reason: str


@struct(frozen=True)
class NodeNotQuarantined:
    """A node was at fault too often but remains in use."""

    node_id: str
    fault: str
    """A description of how often, and within what period, the node was at fault."""
    reason: str


@struct(frozen=True)
class NodeDrained:
    """A node is leaving all its jobs, by request or on its own.

    Its workers have `within_ms` left.
    """

    node_id: str
    reason: str
    within_ms: int


@struct(frozen=True)
class NodeUndrained:
    """An operator lifted a node's drain."""

    node_id: str


@struct(frozen=True)
class JobQueued:
    """A submitted job is waiting to be placed again; its spent restarts remain spent."""

    reason: str


@struct(frozen=True)
class WorkersHang:
    """A node reported that some of its workers are hanging; nothing has been stopped yet."""

    round: int
    node_id: str
    reason: str
    silent_ms: int = 0
    """The longest time that any of them has been silent."""


@struct(frozen=True)
class StacksTaken:
    """Stacks of all workers were captured and archived because some workers are hanging."""

    round: int
    summary: str
    cause: str = ""
    """The kind of cause shown by the records of collectives, or empty if they show none."""
    ranks: tuple[int, ...] = ()
    """The workers that the others are waiting for, as far as those records show."""


@struct(frozen=True)
class HangOver:
    """No worker hangs any longer, and the round continues."""

    round: int


@struct(frozen=True)
class RankStraggles:
    """A worker has been slow for a while, judged by its step rate or lateness in collectives."""

    round: int
    rank: int
    node_id: str
    step_s: float | None = None
    median_s: float | None = None
    late_ms: float | None = None
    late_p95_ms: float | None = None
    clock_error_ms: float | None = None
    wait_share: float | None = None


@struct(frozen=True)
class RankCaughtUp:
    """A worker no longer straggles."""

    round: int
    rank: int
    node_id: str


class WorkerStart(StrEnum):
    """The way in which a worker was started for a round."""

    KEPT = "kept"
    HOT = "hot"
    """The worker was a standby: it had run the script up to its function under @elastic."""
    WARM = "warm"
    COLD = "cold"


@struct(frozen=True)
class NewWorker:
    """A worker that started cold, or in a new process although others in its round were kept."""

    rank: int
    node_id: str
    how: str
    why: str


@struct(frozen=True)
class WorkersStarted:
    """All workers of a round have started or were kept. Gives the number of each kind."""

    round: int
    kept: int
    warm: int
    cold: int
    new: tuple[NewWorker, ...] = ()
    hot: int = 0


@struct(frozen=True)
class SnapshotsNotLoaded:
    """Workers of a node have not loaded snapshots that they should or could have loaded."""

    round: int
    node_id: str
    reason: str


@struct(frozen=True)
class FirstCollectiveMade:
    """Workers have entered the first recorded collective of a round."""

    round: int
    node_id: str
    age_ms: int
    """The time since it was entered, or 0 if the clocks cannot tell."""


@struct(frozen=True)
class FirstStepMade:
    """A worker has reported the first step of a round."""

    round: int
    node_id: str
    rank: int
    step: int
    age_ms: int


@struct(frozen=True)
class LostStepsRedone:
    """A round has reached the highest step of the rounds before it."""

    round: int
    step: int
    age_ms: int


@struct(frozen=True)
class LastStepMade:
    """The last step that a round's workers reported before it ended."""

    round: int
    step: int
    age_ms: int


@struct(frozen=True)
class SnapshotsSaved:
    """How many snapshots became whole in a round, and how long all of them stopped training."""

    round: int
    times: int
    stopped_ms: int


@struct(frozen=True)
class RunEnded:
    """The run has been closed and forms no more rounds."""

    run: str
    ended: Ended


SmallEvent = (
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
    | LastCallBegan
    | NodeAdopted
    | JobScaled
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
    | SnapshotsNotLoaded
    | FirstCollectiveMade
    | FirstStepMade
    | LostStepsRedone
    | LastStepMade
    | SnapshotsSaved
)
"""The events that history stores unchanged."""

Event = (
    SmallEvent
    | WorkerFailed
    | RoundCompleted
    | RoundAdopted
    | RoundEnded
    | RoundSettled
    | NodesPlaced
    | NodesWithdrawn
    | RunEnded
)

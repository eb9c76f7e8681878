"""The values of one job: its durable half, and the half that each server rebuilds for itself.

`Membership` is the durable half. `State` adds what a server relearns after each start. Times are
`now_ms` values of the driver's clock: milliseconds that are monotonic within one server and
anchored to Unix time at its start, so a durable time can be shown to people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import StrEnum
from operator import itemgetter
from typing import Annotated

from rdzv.bounds import (
    GPUS,
    LOCAL_WORLD_SIZE,
    NODES_PER_JOB,
    RESTARTS,
    SHARDS,
    TIMEOUT_MS,
    Address,
    Age,
    AnyAddress,
    Arguments,
    Count,
    Cut,
    Duration,
    Else,
    Environment,
    Flat,
    Label,
    Labels,
    LocalRank,
    NoNul,
    OwnPort,
    Port,
    Printable,
    Rate,
    Sentence,
    Step,
    Traceback,
    Unsent,
    Within,
    WorkerEnds,
)
from rdzv.structs import replace, struct

PRIORITY = 1_000_000
"""The largest priority. The smallest is its negative."""


class ScaleUp(StrEnum):
    """Policy for when newly joined nodes may end a running round."""

    EAGER = "eager"
    ON_RESTART = "on-restart"
    AFTER = "after"


class Cause(StrEnum):
    """The cause to which a round's end is charged."""

    WORKER_FAILURE = "worker failure"
    NODE_LOST = "node lost"
    NODE_LEFT = "node left"
    NODES_JOINED = "nodes joined"
    STORE_HOST = "store host"
    START_FAILED = "start failed"
    OPERATOR = "operator"


class LeaveCause(StrEnum):
    """The reason why a node leaves voluntarily."""

    SIGNAL = "signal"
    START_FAILED = "start failed"
    TIMEOUT = "timeout"
    """The node gave up after waiting too long or losing its runner; a retry may succeed."""
    FAILED = "failed"


class Result(StrEnum):
    """The way in which a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class JobState(StrEnum):
    """The state of a job as shown to users; derived from `State` and never stored."""

    QUEUED = "queued"
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class NodeState(StrEnum):
    """The state of a node within a job; derived from `State` and never stored."""

    SEATED = "seated"
    WAITING = "waiting"
    SPARE = "spare"
    STOPPING = "stopping"
    AWAY = "away"
    LOST = "lost"
    SUCCEEDED = "succeeded"
    LEFT = "left"


@struct(frozen=True)
class Settings:
    """Settings that all nodes of a job must agree on. Names and defaults are those of torchrun."""

    min_nodes: Annotated[int, Within(1, NODES_PER_JOB, "--nnodes")]
    max_nodes: Annotated[int, Within(1, NODES_PER_JOB, "--nnodes")]
    max_restarts: Annotated[int, Within(0, RESTARTS, "--max-restarts")] | None = 0
    """The number of restarts allowed. None if each node's own agent restarts its workers and keeps
    count, as torch's agent does; such an agent reports only the last failure."""
    join_timeout_ms: Annotated[int, Within(1, TIMEOUT_MS)] = 600_000
    last_call_timeout_ms: Duration = 30_000
    scale_up: Annotated[ScaleUp, Else(ScaleUp.EAGER)] = ScaleUp.EAGER
    restart_window_ms: Duration = 0
    """Restarts older than this no longer count against `max_restarts`. 0 means that all restarts
    count."""
    scale_up_after_ms: Duration = 0
    """The time that a round must have run before new nodes may end it, with `ScaleUp.AFTER`."""
    restart_backoff_ms: Annotated[Duration, Else(1_000)] = 1_000
    """The delay before the second consecutive restart after rounds that failed soon. It doubles
    with each further restart; 0 means no delay."""
    restart_backoff_max_ms: Annotated[Duration, Else(60_000)] = 60_000
    max_preemptions: Count | None = None
    """The number of rounds that may end because a node was lost or left, or None for no limit."""
    max_store_failures: Count | None = None
    """The number of rounds that may end because their store host failed, or None for no limit."""
    no_progress_restarts: Count = 0
    """The number of consecutive restarts without progress after which the job fails, or 0 for no
    limit."""
    restart_on: WorkerEnds = ()
    """The ends of workers that are restarted, as `root_cause.names_of_end` names them; all others
    end the job. Empty if all are restarted."""
    no_restart_on: WorkerEnds = ()
    """The ends of workers that end the job, even if `restart_on` lists them."""


RECONNECT_GRACE_MS = 250
"""How long a foreground agent's seat is kept after its stream ended, and any seat after its round's
end: agents' workers die with them, so the wait is only for a connection that was cut."""

DAEMON_RETURN_MS = 15_000
"""How long a daemon has at least to come back, after a crash on a busy machine: its workers train
on meanwhile, and a failure of any other node ends the wait."""


@struct(frozen=True)
class Tuning:
    """The server's own timings, which are the same for all its jobs."""

    takeover_grace_ms: int = 30_000
    """The time after its start for which the server does not give up silent nodes."""
    forms_from_ms: int = 0
    """The time before which a job's first round completes only with all its nodes. On a server
    without memory, nodes that run a round unknown to it have until then to report that round."""


@struct(frozen=True)
class Offer:
    """A node's contribution to a job, which may differ from node to node."""

    address: Address
    local_world_size: Annotated[int, Within(1, LOCAL_WORLD_SIZE, "--nproc-per-node")] = 1
    role: Annotated[Label, Else("default")] = "default"
    topology: Label = ""
    host_name: AnyAddress = ""
    """A name at which other machines can reach this one, or empty if there is none."""
    machine: Label = ""
    """The node's machine (network namespace)."""
    store_port: Port = 0
    can_host_store: bool = False
    shutdown_timeout_ms: Duration = 30_000


@struct(frozen=True)
class Instance:
    """One start of an agent, as described in its Hello."""

    id: str = ""
    fence_after_ms: int = 0
    """The time after its last message to the server by which the node has killed its own workers,
    or 0 if it does not kill them."""


UNKNOWN_INSTANCE = Instance()


@struct(frozen=True)
class KeptWorker:
    """A parked worker that its node offers for the next round."""

    local_rank: LocalRank
    step: Step | None = None
    """The number of steps that it has sealed."""
    torn: bool = False
    """Whether an unsealed step has already changed its parameters."""
    shard: int = 0
    shards: Annotated[int, Within(1, SHARDS), Else(1)] = 1
    """The number of parts; 1 if the worker holds the whole state."""
    oldest_step: Step | None = None
    """The oldest sealed step to which the worker can go back, or None if it can resume only at
    `step`."""
    pid: Annotated[int, Unsent] = 0
    gpu_bytes: Annotated[int, Unsent] = 0


class StandbyState(StrEnum):
    """How far the standby workers of a waiting node are."""

    COLD = "cold"
    """There are none."""
    STARTING = "starting"
    READY = "ready"
    OFF = "off"
    """There are none because the node's options say so."""


@struct(frozen=True)
class Standby:
    """The workers that a waiting node has started in advance.

    They have run the script up to its function under @elastic and are parked there: when the node
    gets a seat, they are new workers that need not be started.
    """

    state: Annotated[StandbyState, Else(StandbyState.COLD)] = StandbyState.COLD
    why: Sentence = ""
    """Why there are none; empty if the job has not shown yet that its script can have any."""
    memory_bytes: Step = 0
    """Their memory, and that in use on their GPUs; 0 until it is known."""
    gpu_bytes: Step = 0
    cpus: Rate = 0.0
    """How many CPUs they use while they wait."""


NO_STANDBY = Standby()


@struct(frozen=True)
class Spent:
    """Counts of how a run's rounds ended. Restarts are kept separately, with their times."""

    preemptions: int = 0
    """The number of rounds that ended because a node was lost or left."""
    store_failures: int = 0
    """The number of rounds that ended because their store host failed."""
    soon: int = 0
    """The number of consecutive rounds that failed soon and without progress."""
    without_progress: int = 0
    """The number of consecutive restarts without progress."""
    furthest_step: int | None = None


MAX_RESTART_AGES = 64
"""The maximum number of restart ages sent to each node. Older restarts are given the oldest of
these ages."""
LATEST = slice(-MAX_RESTART_AGES, None)


@struct(frozen=True)
class Tally:
    """The budgets, other than restarts, that a run had spent when a round was announced.

    The run's nodes keep it so that a server without memory can learn it from their recovery
    reports.
    """

    spent: Annotated[Spent, Flat] = Spent()
    restarts_ms: Annotated[tuple[int, ...], Age("restart_ages_ms"), Cut(itemgetter(LATEST))] = ()
    """Times of the spent restarts that are still within `restart_window`, oldest first, by the
    holder's clock. Empty without a window, because all restarts then count."""


@struct(frozen=True, order=True)
class SnapshotMark:
    """Identifies the state to which a snapshot belongs; snapshots with the same mark fit together.

    Of two marks of the same run, the larger is the newer.
    """

    lineage: int
    """The round in which this training began, or continued with only new workers. After another
    such round, the same step number refers to a different state."""
    step: Step
    series: Printable
    """A digest of the state's structure, how it is divided, and the round that saved it."""
    shards: Annotated[int, Within(1, SHARDS)] = 1
    """The number of its parts."""


@struct(frozen=True)
class Snapshot:
    """One shard of the state at one sealed step, in node memory that outlives the worker."""

    local_rank: LocalRank
    mark: SnapshotMark
    shard: int = 0
    bytes: Step = 0
    digest: Printable = ""
    copy_of: Annotated[int, Within(0, SHARDS - 1)] | None = None
    """The RANK on another node of which this is a copy, kept for worker `local_rank` to read. None
    for an original."""
    stopped_us: Step = 0
    """How long the worker that saved it has stopped training for that."""


@struct(frozen=True)
class Assignment:
    """A node's part in a complete round, with everything needed to start its workers.

    Nodes keep it and report it back, so that a server that does not know the round can rebuild it.
    """

    rdzv_id: str
    run: str
    round: int
    group_rank: int
    group_world_size: Annotated[int, Within(1, NODES_PER_JOB)]
    rank_first: int
    world_size: int
    role_rank_first: int
    role_world_size: int
    master_addr: Address
    master_port: OwnPort
    use_agent_store: bool
    restarts: Count
    max_restarts: int | None
    tally: Tally | None = field(default=None, compare=False)
    """What the run had spent when the round was formed, or None if nothing was."""
    kept: tuple[int, ...] = ()
    """The LOCAL_RANKs of the parked workers that take part; all other workers are new processes."""
    source: int | None = None
    resume_step: Step | None = None
    charged_suspects: tuple[int, ...] = ()
    """The LOCAL_RANKs of the suspects charged with the failure, each of which raises its exception
    and exits."""
    snapshot: SnapshotMark | None = None
    snapshot_loads: int = 0
    origin: int = 0
    lineage: int = 0
    renewed: int = 0
    """These seven are explained in `Round`."""

    @property
    def hosts_store(self) -> bool:
        """Whether this node serves the round's c10d store."""
        return self.use_agent_store and self.group_rank == 0


@struct(frozen=True)
class RecoveryReport:
    """A node's report of the last round that was announced to it.

    Together, the participants' reports are enough to rebuild a round that the server does not know
    because its memory is gone or older than the round.
    """

    assignment: Assignment
    settings: Settings
    offer: Offer


@struct(frozen=True)
class Participant:
    """A node's place in one round. Its GROUP_RANK is its index in `Round.participants`."""

    node_id: str
    incarnation: int
    offer: Offer
    rank_first: int
    role_rank_first: int
    role_world_size: int
    instance: Instance = UNKNOWN_INSTANCE
    """The instance behind the incarnation. The instance may not know that number, because the
    server may have ended before sending it."""
    kept: tuple[int, ...] = ()
    charged_suspects: tuple[int, ...] = ()

    @property
    def ranks(self) -> range:
        return range(self.rank_first, self.rank_first + self.offer.local_world_size)


def world_size(participants: Iterable[Participant]) -> int:
    return sum(p.offer.local_world_size for p in participants)


@struct(frozen=True)
class Failure:
    """One worker's failure, with its time on the holder's clock."""

    local_rank: LocalRank
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    message: Sentence
    traceback: Traceback
    at_ms: Annotated[int, Age("age_ms")]
    suspect: bool = False
    """A collective raised an exception, perhaps because another worker failed. The worker parks."""
    node_id: str = ""
    address: str = ""
    """The node, of which the server knows the name and the address; empty on the node itself."""

    @property
    def finished(self) -> bool:
        return self.exit_code == 0


@struct(frozen=True)
class RoundEnd:
    """The end of a round. Its charge is settled once every participant has stopped."""

    cause: Annotated[Cause, Else(Cause.NODE_LEFT)]
    reason: str
    at_ms: Annotated[int, Unsent] = 0
    broken: bool = False
    """Whether the collectives broke, so that a SIGTERM handler that needs them cannot finish."""
    failures: Annotated[tuple[Failure, ...], Unsent] = ()
    settled: Annotated[bool, Unsent] = False
    keep: bool = True
    """Whether workers that can park may be kept in the next round."""
    cause_node_id: Annotated[str, Unsent] = ""
    """The node that the cause refers to. Empty if it is unknown, or if the cause refers to no node
    or to several."""


@struct(frozen=True)
class Round:
    """A complete round: its participants, their ranks, and the address of their store."""

    number: int
    participants: tuple[Participant, ...]
    master_addr: str
    master_port: int
    use_agent_store: bool
    restarts: int
    at_ms: int
    gone: tuple[str, ...] = ()
    """Participants whose seat was given up because they were lost, left, or got stuck."""
    succeeded: tuple[str, ...] = ()
    """Participants whose workers all exited with code 0, even if the node or the round has since
    been lost."""
    end: RoundEnd | None = None
    adopted: bool = False
    """Whether it was rebuilt from recovery reports; a placeholder stands for each node that has not
    reported."""
    excuse: str = ""
    """The name of a node that left as if it had finished, and why it left. Failures that follow may
    be due to its departure."""
    source: int | None = None
    """The RANK of the kept worker that has the newest state."""
    resume_step: int | None = None
    """The number of steps that the source has sealed."""
    fruitless: bool = False
    """Whether kept workers have sealed no step since a round that broke."""
    snapshot: SnapshotMark | None = None
    """The newest snapshots that were whole when the round was formed."""
    snapshot_loads: int = 0
    """The number of consecutive rounds, including this one, that have loaded these snapshots. 0 if
    this one does not."""
    origin: int = 0
    """The last round that began from the script's own checkpoint or from scratch. Snapshots of
    earlier lineages are never loaded."""
    lineage: int = 0
    """The last round that had only new workers; kept workers continue its lineage."""
    renewed: int = 0
    """The last round for which an operator asked for new processes: those started before it may
    have loaded another version of the script."""

    @property
    def world_size(self) -> int:
        return world_size(self.participants)

    @property
    def live(self) -> bool:
        return self.end is None


@struct(frozen=True)
class Departure:
    """The departure of a node that was lost or left."""

    node_id: str
    state: NodeState
    reason: str
    at_ms: int
    address: str
    local_world_size: int
    role: str
    may_run: bool = False
    """Whether its workers may still be running, because nothing proves that they are gone and the
    node has been silent since."""
    ends_after_ms: int = 0
    """The time after the departure by which the runner will have killed those workers, if their
    agent is dead."""


@struct(frozen=True)
class Moved:
    """The progress of a round's workers as reported by a node, or empty if they reported none."""

    furthest_step: int | None = None
    snapshot_changed: bool = False
    """Whether the snapshot file has changed since the round began."""
    sealed: Annotated[bool, Unsent] = False
    """Whether the round has sealed a step that survives it, in kept workers or in snapshots."""


UNMOVED = Moved()
"""The progress of a round whose workers have reported nothing."""


@struct(frozen=True)
class Ended:
    """The way in which a run was closed."""

    result: Annotated[Result, Else(Result.FAILED)]
    reason: str
    at_ms: Annotated[int, Unsent] = 0
    retry_sensible: bool = False
    failures: tuple[Failure, ...] = ()
    """The root cause first, followed by the failures shown with it."""
    no_progress: bool = False
    """Whether the run kept failing without progress, so the same launch would fail again."""


@struct(frozen=True)
class EndedRun:
    """A record of an earlier run, sufficient to tell a node that joins late how that run ended."""

    run: str
    ended: Ended


@struct(frozen=True)
class JobSpec:
    """The program of a submitted job, and its requirements for each node."""

    args: Arguments
    """Arguments for rdzvrun: its flags, the script, and the script's own arguments."""
    env: Environment = ()
    chdir: NoNul = ""
    labels: Labels = ()
    """Labels that a node must have."""
    priority: Annotated[int, Within(-PRIORITY, PRIORITY)] = 0
    gpus_per_node: Annotated[int, Within(0, GPUS, "--gpus-per-node")] | None = None
    """The number of GPUs per node. None gives each worker one GPU on nodes that have GPUs, and none
    on others."""
    local_world_size: Annotated[int, Within(0, LOCAL_WORLD_SIZE, "--nproc-per-node")] = 0
    """Workers per node, or 0 if each node counts its GPUs and gives all of them to the job."""
    needs_gpu: bool = False
    """Whether nodes without a GPU are excluded."""
    submitter: str = ""
    """The submitter, as proven to the server, or empty if no proof is required."""
    account: Label = ""
    """The account to run as, or empty for the account that each node maps to the submitter."""


MAX_DECLINED = 16
"""The number of nodes that must decline a job before the job itself is considered at fault."""


@struct(frozen=True)
class DeclinedNode:
    """A node that could not run a submitted job and is not chosen for it again."""

    node_id: str
    reason: str


@struct(frozen=True)
class SubmittedRun:
    """A run whose nodes are chosen by the server. The rules are in `core/fleet/job_queue.py`."""

    spec: JobSpec
    submitted_by: str
    at_ms: int
    """Among jobs of the same priority, the earliest is served first."""
    placed: tuple[str, ...] = ()
    """The chosen nodes, joined or not, in the order in which they were chosen."""
    declined: tuple[DeclinedNode, ...] = ()
    """The nodes that declined, oldest first. Bounded, because the job is given up when there are
    too many."""
    queued_again_ms: int | None = None
    """When the job last went back to the queue, which does not cost it its place there."""

    def with_placed(self, node_ids: Iterable[str]) -> SubmittedRun:
        return replace(self, placed=tuple(dict.fromkeys((*self.placed, *node_ids))))

    def without(self, node_ids: Iterable[str]) -> SubmittedRun:
        gone = frozenset(node_ids)
        return replace(self, placed=tuple(n for n in self.placed if n not in gone))

    def with_declined(self, node_id: str, reason: str) -> SubmittedRun:
        """Record that a node cannot run the job, so it is not chosen again."""
        others = tuple(other for other in self.declined if other.node_id != node_id)
        declined = (*others, DeclinedNode(node_id, reason))[-MAX_DECLINED:]
        return replace(self.without((node_id,)), declined=declined)


@struct(frozen=True)
class Membership:
    """The durable half of a job. Nothing that follows from it is announced before it is stored."""

    rdzv_id: str
    run: str
    run_number: int
    settings: Settings
    began_at_ms: int
    round: Round | None = None
    """The latest completed round, live or ended."""
    next_round: int = 0
    """The number of the next round to complete. It never decreases, not even from one run to the
    next."""
    restarts: tuple[int, ...] = ()
    store_failures: int = 0
    """The number of consecutive store host failures."""
    last_failures: tuple[Failure, ...] = ()
    """The last worker failure of this run, with the root cause first."""
    departures: tuple[Departure, ...] = ()
    """The latest losses and leaves, oldest first; bounded."""
    ended: Ended | None = None
    earlier: tuple[EndedRun, ...] = ()
    """The latest runs before this one, oldest first; bounded."""
    resumed_at_ms: int | None = None
    """The time at which a node reported this run to a server that did not know it, or None. Other
    nodes may still be running it."""
    scaled: tuple[int, int] | None = None
    """The bounds that an operator set for this run, which override those it was launched with."""
    stopping: str = ""
    """The reason why an operator is ending this run, or empty. The run closes once no seat of its
    round is held."""
    submission: SubmittedRun | None = None
    """The submission, or None if the server does not choose this run's nodes, which then join on
    their own."""
    spent: Spent = Spent()
    owner: str = ""
    """The caller that began this job's first run. Empty if the server required no proof, or if
    nodes began the run on their own."""
    secret: str = ""
    """The hash of the secret that nodes must know to join this run, or empty if no secret is
    needed."""

    @property
    def live_round(self) -> Round | None:
        round_ = self.round
        return round_ if self.ended is None and round_ is not None and round_.live else None

    def is_live(self, run: str, number: int) -> bool:
        round_ = self.live_round
        return round_ is not None and (self.run, round_.number) == (run, number)

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and largest number of nodes that a round may currently have."""
        return self.scaled or (self.settings.min_nodes, self.settings.max_nodes)

    @property
    def min_nodes(self) -> int:
        return self.bounds[0]

    @property
    def max_nodes(self) -> int:
        return self.bounds[1]


@struct(frozen=True)
class Seat:
    """The seat of a participant whose workers may still run, or that waits at the exit barrier."""

    incarnation: int
    since_ms: int
    succeeded: bool = False
    leaving: str = ""
    """The reason why the node is leaving, once announced. It keeps its seat until its workers are
    gone."""


@struct(frozen=True)
class WaitingNode:
    """A node that wants a place in the next round and whose workers take part in none."""

    incarnation: int
    offer: Offer
    since_ms: int
    instance: Instance = UNKNOWN_INSTANCE
    left_round: int | None = None
    kept: tuple[KeptWorker, ...] = ()
    """Workers of `left_round` that are parked on the node."""
    snapshots: tuple[Snapshot, ...] = ()
    """The snapshots of this run's state that the node holds."""
    preparing: bool = False
    """Whether a running round should not end for this node yet."""
    standby: Standby = NO_STANDBY


@struct(frozen=True)
class Away:
    """A node whose stream has ended but whose place is kept for now."""

    since_ms: int
    until_ms: int
    """The time at which the nodes core will give up the node. Only shown to users."""
    firm: bool
    """Whether nothing may shorten the wait, for example because the node announced its return."""
    may_run: bool = True
    """Whether the node's workers may outlive its agent."""


@struct(frozen=True)
class StuckWorkers:
    """Workers that survive SIGKILL; their node has lost its seat and gets no new one."""

    incarnation: int
    round: int
    pids: tuple[int, ...]
    since_ms: int


@struct(frozen=True)
class Superseded:
    """Workers of a round that was replaced by a later one.

    They must stop, and they hold no seat.
    """

    incarnation: int
    round: int
    until_ms: int
    """The time by which these workers have either stopped or been given up."""


_PLACEHOLDER = "(GROUP_RANK "
"""The prefix of all placeholder names; no node's name begins with it."""


def placeholder(group_rank: int) -> str:
    """Return the name that stands for an adopted round's participant until that node reports."""
    return f"{_PLACEHOLDER}{group_rank})"


def is_placeholder(node_id: str) -> bool:
    return node_id.startswith(_PLACEHOLDER)


@struct(frozen=True)
class State:
    """One job as a server sees it: the durable membership, and the state that each server relearns.

    A present node is in exactly one of `seats`, `waiting` and `stuck`, and also in `away` if its
    stream has ended.
    """

    membership: Membership
    tuning: Tuning = field(default_factory=Tuning)
    seats: Mapping[str, Seat] = field(default_factory=dict)
    waiting: Mapping[str, WaitingNode] = field(default_factory=dict)
    stuck: Mapping[str, StuckWorkers] = field(default_factory=dict)
    away: Mapping[str, Away] = field(default_factory=dict)
    hasty: int = 0
    """The number of seated nodes that are away with a grace period that a round's end shortens.
    `Draft.put` updates this number and the next, to avoid recounting thousands of nodes."""
    unready: int = 0
    """The number of waiting nodes that are away."""
    short_since_ms: int | None = None
    """The time since which fewer than `min_nodes` have been present while no round was live."""
    enough_since_ms: int | None = None
    """The time since which at least `min_nodes` have been waiting while no round was live."""
    regained: bool = False
    """Whether `min_nodes` were regained after a round, so that waiting nodes are gathered."""
    newest_ms: int = 0
    """The time at which the most recent node joined."""
    back_ms: int | None = None
    """The time at which a participant most recently returned from being away."""
    loopback_machine: str | None = None
    """The machine that all nodes must be on, if one of them may be reachable only from there."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """The machine that last offered each address. Its node may have left, or offer another now."""
    reported_ms: int = 0
    """The time at which the last recovery report for an adopted round arrived."""
    superseded: Mapping[str, Superseded] = field(default_factory=dict)
    """Workers, by node_id, that may still be running in a round replaced by an adopted later one.
    """
    stop_deadline_ms: int | None = None
    """The time at which participants that have not stopped are given up."""
    last_leave: LeaveCause | None = None
    """The reason why the last node to depart left voluntarily, or None if it was lost."""
    moved: Moved = UNMOVED
    """Progress in the ended round, as reported by nodes that have stopped. They report it again
    when they reconnect."""
    barred: Mapping[str, str] = field(default_factory=dict)
    """The reasons, by node_id, why a submitted job may not keep a node. Each server sets them anew.
    """

    @property
    def run_is_open(self) -> bool:
        return bool(self.membership.run) and self.membership.ended is None

    @property
    def unsettled(self) -> tuple[Round, RoundEnd] | None:
        """The round that has ended but is not yet charged to a cause, and its end."""
        round_ = self.membership.round
        if not self.run_is_open or round_ is None or round_.end is None or round_.end.settled:
            return None
        return round_, round_.end

    def present(self, node_id: str) -> bool:
        """Return whether the node is currently in this job, even if it is away."""
        return node_id in self.seats or node_id in self.waiting or node_id in self.stuck

    @property
    def anybody(self) -> bool:
        return bool(self.seats or self.waiting or self.stuck)

    @property
    def placed(self) -> tuple[str, ...]:
        """The nodes that the server has chosen for this job, or empty if it was not submitted."""
        submission = self.membership.submission
        return submission.placed if submission is not None else ()

    @property
    def queued(self) -> bool:
        """Whether this is a submitted job that has no nodes yet and is waiting to be placed."""
        submission = self.membership.submission
        return submission is not None and not submission.placed and not self.anybody

    def incarnation(self, node_id: str) -> int | None:
        held = self.seats.get(node_id) or self.waiting.get(node_id) or self.stuck.get(node_id)
        return held.incarnation if held else None

    @property
    def ready(self) -> int:
        """The number of waiting nodes that are connected, and can therefore be sent a round."""
        return len(self.waiting) - self.unready

    def is_hasty(self, node_id: str) -> bool:
        """Return whether a seated node is away with a grace period that a round's end shortens."""
        away = self.away.get(node_id)
        return away is not None and not away.firm and node_id in self.seats

    def is_unready(self, node_id: str) -> bool:
        return node_id in self.away and node_id in self.waiting


def job_state(state: State) -> JobState:
    membership = state.membership
    if membership.ended is not None:
        return JobState(membership.ended.result)
    round_ = membership.round
    if round_ is not None and round_.live:
        return JobState.RUNNING
    if state.seats or membership.stopping:
        return JobState.STOPPING
    return JobState.QUEUED if state.queued else JobState.JOINING

"""What passes between the driver and the door: what nodes say, and what they are told.

Values only. `wire` makes them from protobuf and back; `told` says who is owed which.
"""

from __future__ import annotations

from dataclasses import dataclass

from rdzv.core.commands import Command
from rdzv.core.model import Ended, RoundEnd
from rdzv.core.nodes import AgentKind

# ------------------------------------------------------------------ what nodes say


@dataclass(frozen=True, slots=True)
class Hello:
    """Who opens a stream. What it believes about its jobs follows as `Belief`s."""

    node_id: str
    instance: str
    kind: AgentKind
    address: str
    pid: int
    leadership: int
    incarnation: int
    fence_after_ms: int = 0
    """After how long unheard it kills its workers; 0: it does not."""


@dataclass(frozen=True, slots=True)
class Belief:
    """What a node believes about one job, and the commands that say so to its rendezvous."""

    rdzv_id: str
    run: str
    round: int | None
    """The last round that it has heard of."""
    has_workers: bool
    """Whether workers of that round may run on the node, or have succeeded there."""
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far one worker is."""

    rank: int
    step: int
    age_ms: int
    """How long ago it has said so."""
    rate: float
    """Steps a second over the last while; 0 if it is not known."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the workers of one round on a node are; only those that have said anything."""

    rdzv_id: str
    run: str
    round: int
    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A piece of what a worker has written. Without data: what follows is of `round`."""

    request: int
    round: int = 0
    local_rank: int = 0
    rank: int = 0
    stderr: bool = False
    offset: int = 0
    data: bytes = b""
    last: bool = False
    """No more comes."""
    error: str = ""
    """Why something, or with `last` anything more, does not come."""


# ------------------------------------------------------------------ what nodes are told


@dataclass(frozen=True, slots=True)
class Welcome:
    """The stream is open."""

    incarnation: int
    heartbeat_interval_ms: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Heard:
    """The heartbeat of this number was heard."""

    number: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The node is admitted to this run of the job."""

    rdzv_id: str
    run: str
    run_number: int


@dataclass(frozen=True, slots=True)
class Line:
    """A round is complete: the node's own line of it."""

    rdzv_id: str
    run: str
    round: int
    group_rank: int
    group_world_size: int
    rank_first: int
    world_size: int
    role_rank_first: int
    role_world_size: int
    master_addr: str
    master_port: int
    use_agent_store: bool
    restarts: int
    max_restarts: int | None


@dataclass(frozen=True, slots=True)
class RoundOver:
    """The round is over: its workers are to be stopped."""

    rdzv_id: str
    run: str
    round: int
    end: RoundEnd


@dataclass(frozen=True, slots=True)
class Closed:
    """The run is over and forms no more rounds."""

    rdzv_id: str
    run: str
    ended: Ended


@dataclass(frozen=True, slots=True)
class Refused:
    """What the node asked for is refused, and nothing was changed by it."""

    rdzv_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why the node has no workers to run."""

    rdzv_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far the log of one worker has been read. To a node, its own name is not said."""

    node_id: str
    round: int
    local_rank: int
    stderr: bool
    offset: int


@dataclass(frozen=True, slots=True)
class ReadLog:
    """What the node's workers have written is wanted. None: see `rdzv.proto`."""

    request: int
    rdzv_id: str
    round: int | None
    rank: int | None
    stdout: bool
    stderr: bool
    follow: bool
    tail_bytes: int
    tail_lines: int
    credit: int
    positions: tuple[LogPosition, ...] = ()


@dataclass(frozen=True, slots=True)
class LogCredit:
    """The node may send so many more bytes for a request, or none any more."""

    request: int
    bytes: int
    cancel: bool = False


Told = (
    Welcome | Heard | Joined | Line | RoundOver | Closed | Refused | Waiting | ReadLog | LogCredit
)

# ------------------------------------------------------------------ what operators ask


@dataclass(frozen=True, slots=True)
class LogsWanted:
    """Which of a job's logs are wanted. None: all RANKs, the last round."""

    rank: int | None = None
    round: int | None = None
    stdout: bool = True
    stderr: bool = True
    follow: bool = False
    tail_bytes: int = 0
    tail_lines: int = 0
    run: str = ""
    positions: tuple[LogPosition, ...] = ()


# ------------------------------------------------------------------ what operators see


@dataclass(frozen=True, slots=True)
class LogLines:
    """A piece of what one worker has written, or a note why something does not come."""

    node_id: str
    run: str
    rank: int = 0
    local_rank: int = 0
    stderr: bool = False
    round: int = 0
    offset: int = 0
    data: bytes = b""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ServerView:
    """One rdzvd of those that share a store."""

    address: str
    leads: bool
    leadership: int
    store: str
    version: str
    state_age_ms: int

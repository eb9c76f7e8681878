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


Told = Welcome | Heard | Joined | Line | RoundOver | Closed | Refused | Waiting

# ------------------------------------------------------------------ what operators see


@dataclass(frozen=True, slots=True)
class ServerView:
    """One rdzvd of those that share a store."""

    address: str
    leads: bool
    leadership: int
    store: str
    version: str
    state_age_ms: int

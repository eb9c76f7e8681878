"""What has happened: at the server, in the runner, or to the agent itself."""

from __future__ import annotations

from dataclasses import dataclass

from rdzv.agent.core.model import Assignment, NodeFailure
from rdzv.core.model import Cause, Result


@dataclass(frozen=True, slots=True)
class ServerConnected:
    """The server has welcomed this node and heard what it believes."""


@dataclass(frozen=True, slots=True)
class ServerLost:
    """The stream to the server ended, or could not be opened."""

    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The server has admitted this node to a run of the job."""

    run: str
    run_number: int


@dataclass(frozen=True, slots=True)
class RoundCompleted:
    """A round that this node takes part in is complete."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round is over."""

    run: str
    round: int
    cause: Cause
    reason: str
    broken: bool


@dataclass(frozen=True, slots=True)
class RunClosed:
    """The run is closed and forms no more rounds."""

    run: str
    result: Result
    reason: str
    retry_sensible: bool
    failures: tuple[NodeFailure, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The server refuses what this node wants, for good."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker has exited; `age_ms` ago it failed, if it did."""

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    message: str
    traceback: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The workers of a round could not be started."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """No process of the round is left on the node, but for its store host."""

    round: int


@dataclass(frozen=True, slots=True)
class WorkersStuck:
    """Processes of the round survive SIGKILL."""

    round: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fenced:
    """The server was not proven to hear this node for `fence_after_ms`: its workers are killed.

    It happened `age_ms` ago. `WorkersGone` follows.
    """

    round: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class StoreHostReady:
    """The c10d store of the round is served."""

    round: int


@dataclass(frozen=True, slots=True)
class StoreHostExited:
    """The store host of the round has exited."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """This node can not start workers any more; those it had, and all they left, are gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """The agent was told to end by a signal."""

    signum: int
    name: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


Event = (
    ServerConnected
    | ServerLost
    | Joined
    | RoundCompleted
    | RoundEnded
    | RunClosed
    | Refused
    | WorkerExited
    | StartFailed
    | WorkersGone
    | WorkersStuck
    | Fenced
    | StoreHostReady
    | StoreHostExited
    | RunnerLost
    | Signalled
    | Ticked
)

"""The agent's requests to the runner: what `rdzv.agent.runner_link` sends, and the runner handles.

A request is a value (frames.py); its frame is its fields as JSON, with its `type`:
`StartWorkers` is `start_workers`. Some are commands of the agent's core or messages of the server,
which are sent as they are, with fields that the runner ignores. `ping` (answered with `pong`),
`adopt` and `shutdown` have no fields. A refused request changes nothing and is answered with
`error`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .frames import Number, RequestError, Small, Text
from .system import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOL_VERSION = 7
"""The version of the requests, the events and the state that runners keep for the next agent.

An agent adopts only runners of its own version.
"""

STANDBY = -1
"""The number of a round whose workers have no rank yet: it ends once all of them have parked."""

MAX_ZYGOTE_WAIT_S = 600.0
MAX_SPARE_FORKS = 1024
MAX_SLOT_BYTES = 1 << 50
MAX_SHARDS = 1 << 20
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start a worker. `env` is its complete environment.

    `stdout` and `stderr` are files to append to, and `cpus` are the CPUs that the worker may run
    on. None means the agent's own, as it does for `cwd` and `identity`. A `warm` worker is forked
    from the zygote, if that is ready by then.
    """

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    cpus: tuple[int, ...] | None = None
    warm: bool = False
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class KeepSpec:
    """Which of the parked workers take part in a round, and how. The others are ended first."""

    kept: tuple[int, ...]
    """Their local_ranks. If they come from the round `STANDBY`, they are hot, else kept."""
    source: int | None
    step: int | None
    charged: tuple[int, ...] = ()
    """The local_ranks of the workers that must raise the exception they reported."""
    grace_s: float = 0.0
    """The time between SIGTERM and SIGKILL for the workers that do not take part."""


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start a round. Without `keep`, its workers can never be kept."""

    round: int
    workers: tuple[WorkerSpec, ...]
    keep: KeepSpec | None = None


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End a round, by SIGTERM if no signal is given, and by SIGKILL after the grace period.

    With `keep_ms`, its workers have that long to park instead, except for `not_kept`, which are
    killed at once. A second stop may shorten the grace period, but not extend it. `gone` follows,
    at once if no process of the round is here.
    """

    round: int
    grace_ms: int
    signum: int | None = None
    keep_ms: int | None = None
    not_kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndKept:
    """End all parked workers, and those of `STANDBY`, with SIGTERM, and after the grace by SIGKILL.

    The local_ranks in `charged` raise the exception they reported, instead of receiving SIGTERM.
    """

    grace_ms: int
    charged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotifyWorkers:
    """Signal each of the round's workers once; ends nothing by itself."""

    round: int
    signum: int


@dataclass(frozen=True, slots=True)
class StartStoreHost:
    """Start a round's store host. Sent with a listening socket."""

    round: int
    argv: tuple[str, ...]
    """Its command line, to which a cold start appends its descriptors."""
    env: Mapping[str, str]
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class StopStoreHost:
    """End a round's store host."""

    round: int


@dataclass(frozen=True, slots=True)
class RenewFence:
    """Let no worker, of this round or a later one, live beyond this point of `boottime_ms`.

    A request moves the fence forward, never back; before the first one there is no fence. The
    runner enforces it by itself, whatever happens to the agent.
    """

    fence_at_ms: Number


@dataclass(frozen=True, slots=True)
class KeepZygote:
    """Keep a zygote: like a worker, but with `modules` imported and without its script.

    `argv` and `env` are the parts shared by all workers: the command line without the script's own
    arguments, and the environment without the variables that differ between workers. `wait_s` is
    how long workers may wait for the zygote's imports; with 0 they start cold in the meantime.
    `spare_forks` is the number of forks that are made before they are needed. With `after_import`,
    the zygote is only for restarts, and starts once workers have imported torch. Only the first
    request has an effect.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    modules: tuple[str, ...]
    cpus: tuple[int, ...] | None = None
    wait_s: float = 0.0
    identity: Identity | None = None
    spare_forks: int = 0
    after_import: bool = False


ZygoteSpec = KeepZygote


@dataclass(frozen=True, slots=True)
class BeginZygote:
    """Start a zygote in spite of `after_import`, since the script is known to suit it."""


@dataclass(frozen=True, slots=True)
class HoldSnapshots:
    """Limit the memory for snapshots, and report them now and after each change.

    With None, the limit stays, or is half of the memory that is free when a worker first requests
    some. A new limit applies only to later requests. An agent repeats this after an adoption.
    """

    limit_bytes: Number | None = None


@dataclass(frozen=True, slots=True, order=True)
class StateMark:
    """The state to which a snapshot belongs. All frames carry it in these fields."""

    lineage: Small
    step: Number
    series: Text
    shards: Small

    def __post_init__(self) -> None:
        if not 0 < self.shards <= MAX_SHARDS or len(self.series) > _MAX_NAME_CHARS:
            raise RequestError(f"there is no such state: {self!r:.200}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One part of a state, in a slot of worker `local_rank`, or a copy for that worker."""

    local_rank: Small
    mark: StateMark
    shard: Small
    bytes: Number
    digest: Text
    copy_of: Small | None = None
    stopped_us: Number = 0

    def __post_init__(self) -> None:
        if self.shard >= self.mark.shards or len(self.digest) > _MAX_NAME_CHARS:
            raise RequestError(f"there is no such snapshot: {self!r:.200}")
        if self.bytes > MAX_SLOT_BYTES:
            raise RequestError(f"bytes: expected at most {MAX_SLOT_BYTES}, got {self.bytes}")


@dataclass(frozen=True, slots=True)
class SnapshotWatermark:
    """All parts of this step are saved, so workers may overwrite older snapshots.

    They overwrite no others after the first request, except those after it and up to `given_up`,
    none of which will ever have all their parts.
    """

    mark: StateMark
    given_up: StateMark | None = None


@dataclass(frozen=True, slots=True)
class WriteSnapshots:
    """Write this node's parts of a step to disk; `snapshots_written` follows.

    The runner appends the mark and the slots' descriptors to `argv`.
    """

    mark: StateMark
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class CarryCopies:
    """Start the carrier if it is not running, and give it a token, certificate and key.

    It exchanges snapshots with other nodes. The runner appends a descriptor to `argv`. Without a
    certificate, and its SHA-256 fingerprint, the carrier does not encrypt.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    identity: Identity | None
    token: str
    fingerprint: str
    pem: str


@dataclass(frozen=True, slots=True)
class CopySource:
    """A node, by its carrier, and the snapshots to fetch from it."""

    node_id: str
    address: str
    port: int
    token: str
    snapshots: tuple[Snapshot, ...]
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class KeepCopies:
    """Fetch and keep copies of other nodes' parts of a step.

    Older copies are kept until these are complete, unless a newer step is already whole. The next
    `snapshots_held` reports the result.
    """

    mark: StateMark
    sources: tuple[CopySource, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Outlive the agent, and listen at `socket` for the next one. Only the first socket is used.

    A runner without an agent for `orphan_timeout_s` stops its workers, with `grace_s` before
    SIGKILL, and ends. Further requests change only these times, from the next loss of an agent.
    """

    socket: str
    orphan_timeout_s: float
    grace_s: float


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep a value for the next agent, from before any later request is handled."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class ForgetEvents:
    """Forget all events up to this number."""

    number: int


def type_of(kind: type) -> str:
    """Return the `type` of a request's frame.

    >>> type_of(StartWorkers)
    'start_workers'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()

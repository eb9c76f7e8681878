"""The agent's requests to the runner: what `rdzv.agent.runner_link` sends, and the runner handles.

A request is a value (frames.py); its frame is its fields as JSON, with its `type`:
`StartWorkers` is `start_workers`. `ping` (answered with `pong`), `adopt` and `shutdown` have no
fields. A refused request changes nothing and is answered with `error`. Requests about snapshots are
read by snapshot_slots.py, snapshot_copies.py and snapshot_writers.py:

    carry_copies      {argv, env, cwd, identity, token, fingerprint, pem}
                                                      start the carrier if it is not running, and
                                                      give it its token, key and certificate
    fetch_copies      {mark, sources: [{node_id, address, port, token, fingerprint,
                                        snapshots: [{local_rank, copy_of, mark, shard, bytes,
                                                     digest}]}]}
                                                      fetch copies for one mark to this node
    watermark         {mark, given_up}                all parts of this step are saved; no later
                                                      step up to `given_up` (or null) will have all
    write_snapshots   {argv, env, cwd, identity, mark}
                                                      write this node's parts of the step to disk
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .frames import Number
from .system import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOL_VERSION = 3
"""The version of the requests and events. An agent adopts only runners of its own version."""

MAX_ZYGOTE_WAIT_S = 600.0
MAX_SPARE_FORKS = 1024


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
    """The local_ranks of the workers that take part."""
    source: int | None
    """The RANK of the worker from which the others take their state."""
    step: int | None
    """The last step that the source has sealed."""
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
    """End a round. With `keep_s`, its workers have that long to park, except for `not_kept`."""

    round: int
    signal: int
    grace_s: float
    keep_s: float | None = None
    not_kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndKept:
    """End all parked workers with SIGTERM, and with SIGKILL after the grace period.

    The local_ranks in `charged` raise the exception they reported, instead of receiving SIGTERM.
    """

    grace_s: float
    charged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotifyWorkers:
    """Signal each of the round's workers once; ends nothing by itself."""

    round: int
    signal: int


@dataclass(frozen=True, slots=True)
class StartStoreHost:
    """Start a round's store host. Sent with a listening socket."""

    round: int
    argv: tuple[str, ...]
    """Its command line, to which a cold start appends its descriptors."""
    env: Mapping[str, str]
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """How to start a program that serves snapshots."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
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
class Heard:
    """Forget all events up to this number."""

    number: int


def type_of(kind: type) -> str:
    """Return the `type` of a request's frame.

    >>> type_of(StartWorkers)
    'start_workers'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()

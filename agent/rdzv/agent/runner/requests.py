"""The agent's requests to the runner, parsed from JSON and validated.

A refused request changes nothing and is answered with `error` (agent_link.py lists the events):

    start_workers     {round, workers: [{local_rank, argv, env, cwd, stdout, stderr, cpus,
                                         identity}], warm, keep}
    stop_workers      {round, signal, grace_s, keep_s, not_kept}
    end_kept          {grace_s, charged}              end all parked workers
    notify_workers    {round, signal}                 ends nothing by itself
    start_store_host  {round, argv, env, identity}    sent with a listening socket
    stop_store_host   {round}
    renew_fence       {fence_at_ms}
    keep_zygote       {argv, env, cwd, modules, cpus, wait_s, identity, spare_forks,
                       after_import}                  sent once
    begin_zygote      {}                              start it in spite of `after_import`
    hold_snapshots    {limit_bytes}                   null: half of the free memory
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
    serve             {socket, orphan_timeout_s, grace_s}         only the first socket is used
    keep              {name, value}
    heard             {number}
    ping              {}                              answered with `pong`
    adopt             {}
    shutdown          {}

`env` is a complete environment. If `cwd`, `stdout`, `stderr`, `cpus` or `identity` is null, the
process gets the agent's own.

`keep` is {kept, source, step, charged, grace_s}. `kept` lists the local_ranks of the parked workers
that take part in the round; the others are ended first and then replaced. If workers are never
kept, `keep` is null or missing. With `keep_s`, workers have that long to park, except those in
`not_kept`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from .system import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    T = TypeVar("T")

PROTOCOL_VERSION = 2
"""The version of the requests and events. An agent adopts only runners of its own version."""

MAX_GRACE_S = 7 * 24 * 3600.0
MAX_ORPHAN_TIMEOUT_S = 24 * 3600.0
MAX_FENCE_AT_MS = 1 << 53
MAX_ZYGOTE_WAIT_S = 600.0
MAX_SPARE_FORKS = 1024


class RequestError(Exception):
    """Raised if a request from the agent cannot be carried out. Nothing has been changed."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start a worker. `env` is its complete environment.

    `stdout` and `stderr` are files to append to, and `cpus` are the CPUs that the worker may run
    on. None means the agent's own, as it does for `cwd` and `identity`. A worker with a `zygote` is
    forked from it, if the zygote is ready by then.
    """

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    stdout: str | None
    stderr: str | None
    cpus: tuple[int, ...] | None = None
    zygote: ZygoteSpec | None = None
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class ZygoteSpec:
    """How to start a zygote: like a worker, but with `modules` imported and without its script.

    `argv` and `env` are the parts shared by all workers: the command line without the script's own
    arguments, and the environment without the variables that differ between workers. `wait_s` is
    how long workers may wait for the zygote's imports; with 0 they start cold in the meantime.
    `spare_forks` is the number of forks that are made before they are needed. With `after_import`,
    the zygote is only for restarts, and starts once workers have imported torch.
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


@dataclass(frozen=True, slots=True)
class StoreHostSpec:
    """How to start a round's store host. A cold start appends its descriptors to `argv`."""

    round: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    identity: Identity | None


@dataclass(frozen=True, slots=True)
class KeepSpec:
    """Which of the parked workers take part in a round, and how."""

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


def read_keep_spec(request: Mapping[str, object]) -> KeepSpec | None:
    """Parse which parked workers take part in a round. Returns None if workers are never kept."""
    if request.get("keep") is None:
        return None
    keep = read_field(request, "keep", dict)
    return KeepSpec(
        kept=read_numbers(keep, "kept"),
        source=_optional_number(keep, "source"),
        step=_optional_number(keep, "step"),
        charged=read_numbers(keep, "charged"),
        grace_s=read_seconds(keep, "grace_s", MAX_GRACE_S),
    )


def read_numbers(request: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Parse a list of numbers, which is empty if missing."""
    numbers = request.get(name) or []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise RequestError(f"{name}: expected numbers, got {numbers!r:.80}")
    return tuple(numbers)


def read_worker_specs(request: Mapping[str, object]) -> list[WorkerSpec]:
    """Parse the specifications of a round's workers."""
    specs = [_read_worker_spec(item) for item in read_field(request, "workers", list)]
    if not specs:
        raise RequestError("workers: the list is empty")
    if len({spec.local_rank for spec in specs}) < len(specs):
        raise RequestError("workers: a local_rank occurs twice")
    return specs


def _read_worker_spec(worker: object) -> WorkerSpec:
    if not isinstance(worker, dict):
        raise RequestError(f"workers: expected objects, got {worker!r:.80}")
    return WorkerSpec(
        local_rank=read_field(worker, "local_rank", int),
        argv=tuple(read_argv(worker)),
        env=read_env(worker),
        cwd=read_optional_text(worker, "cwd"),
        stdout=read_optional_text(worker, "stdout"),
        stderr=read_optional_text(worker, "stderr"),
        cpus=_read_cpus(worker),
        identity=read_identity(worker),
    )


def read_zygote_spec(request: Mapping[str, object]) -> ZygoteSpec:
    modules = read_field(request, "modules", list)
    if not all(isinstance(name, str) for name in modules):
        raise RequestError(f"modules: expected strings, got {modules!r:.80}")
    return ZygoteSpec(
        argv=tuple(read_argv(request)),
        env=read_env(request),
        cwd=read_optional_text(request, "cwd"),
        modules=tuple(modules),
        cpus=_read_cpus(request),
        wait_s=read_seconds(request, "wait_s", MAX_ZYGOTE_WAIT_S),
        identity=read_identity(request),
        spare_forks=_read_spare_forks(request),
        after_import=request.get("after_import") is True,
    )


def read_store_host_spec(request: Mapping[str, object]) -> StoreHostSpec:
    return StoreHostSpec(
        round=read_field(request, "round", int),
        argv=tuple(read_argv(request)),
        env=read_env(request),
        identity=read_identity(request),
    )


def read_seconds(request: Mapping[str, object], name: str, most: float) -> float:
    """Parse a number of seconds, which may be at most `most`."""
    seconds = request.get(name)
    # Written so that NaN, which compares as False, is refused.
    if not isinstance(seconds, int | float) or not 0 <= seconds <= most:
        raise RequestError(f"{name}: expected 0 to {most:.0f}, got {seconds!r:.80}")
    return seconds


def read_fence_at_ms(request: Mapping[str, object]) -> int:
    """Parse the fence's time."""
    at_ms = read_field(request, "fence_at_ms", int)
    if not 0 < at_ms <= MAX_FENCE_AT_MS:
        raise RequestError(f"fence_at_ms: expected 1 to {MAX_FENCE_AT_MS}, got {at_ms!r:.80}")
    return at_ms


def read_socket_path(request: Mapping[str, object]) -> Path:
    path = Path(read_field(request, "socket", str))
    if not path.is_absolute() or not path.name or "\0" in str(path):
        raise RequestError(f"socket: expected an absolute path, got {str(path)!r:.200}")
    return path


def read_signal(request: Mapping[str, object]) -> int:
    signum = read_field(request, "signal", int)
    if signum not in signal.valid_signals():
        raise RequestError(f"signal: there is no signal {signum}")
    return signum


def read_field(request: Mapping[str, object], name: str, kind: type[T]) -> T:
    """Return a required field, which must have the given type."""
    value = request.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name}: expected {kind.__name__}, got {value!r:.80}")
    return value


def read_identity(request: Mapping[str, object]) -> Identity | None:
    """Parse a process's account. Returns None for the agent's own."""
    if request.get("identity") is None:
        return None
    said = read_field(request, "identity", dict)
    groups, limits = read_field(said, "groups", list), read_field(said, "limits", list)
    try:
        return Identity(
            uid=read_field(said, "uid", int),
            gid=read_field(said, "gid", int),
            groups=tuple(int(group) for group in groups),
            umask=read_field(said, "umask", int),
            limits=tuple((str(name), int(soft), int(hard)) for name, soft, hard in limits),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"identity: {error}") from error


def _read_cpus(worker: Mapping[str, object]) -> tuple[int, ...] | None:
    cpus = worker.get("cpus")
    if cpus is None:
        return None
    if not isinstance(cpus, list) or not all(isinstance(cpu, int) for cpu in cpus):
        raise RequestError(f"cpus: expected numbers, got {cpus!r:.80}")
    return tuple(cpus)


def read_argv(request: Mapping[str, object]) -> list[str]:
    """Parse a command line."""
    argv = read_field(request, "argv", list)
    if not argv or not all(isinstance(word, str) for word in argv):
        raise RequestError("argv: expected at least one string")
    return argv


def read_env(request: Mapping[str, object]) -> dict[str, str]:
    """Parse a complete environment."""
    env = read_field(request, "env", dict)
    if not all(isinstance(value, str) for value in env.values()):
        raise RequestError("env: expected strings")
    return env


def _read_spare_forks(request: Mapping[str, object]) -> int:
    count = read_field(request, "spare_forks", int) if "spare_forks" in request else 0
    if not 0 <= count <= MAX_SPARE_FORKS:
        raise RequestError(f"spare_forks: expected 0 to {MAX_SPARE_FORKS}, got {count!r:.80}")
    return count


def _optional_number(request: Mapping[str, object], name: str) -> int | None:
    return None if request.get(name) is None else read_field(request, name, int)


def read_optional_text(request: Mapping[str, object], name: str) -> str | None:
    """Return a text field, or None if it is null or missing."""
    return None if request.get(name) is None else read_field(request, name, str)

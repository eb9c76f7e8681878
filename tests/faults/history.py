"""The observations of one lane of a run: one record per line, in JSON.

Three sources describe the same rounds, so that they can be compared: the server's announcements
(`Announced`, `Settled`, ... from its event history), what each agent received (`Told`, from its
log), and what each worker found in its environment and then did (`Started`, `Stepped`, `Parked`,
`Exited`). The harness adds its own actions. Times are CLOCK_MONOTONIC of the one machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any


class Promise(StrEnum):
    """What a fault may cost."""

    NOTHING = "nothing"
    """No worker ends or starts, and the round stays."""
    NO_RESTART = "no restart"
    """The group may form anew, but no restart is spent."""
    ONE_RESTART = "one restart"
    """A worker was killed, and exactly one restart is spent."""


@dataclass(frozen=True, slots=True)
class Place:
    """One node's place in an announced round."""

    node_id: str
    rank_first: int
    rank_last: int


@dataclass(frozen=True, slots=True)
class Announced:
    """The server announced a complete round."""

    run: str
    round: int
    places: tuple[Place, ...]
    world_size: int
    master: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The server charged the end of a round to a cause."""

    run: str
    round: int
    cause: str
    restarts: int


@dataclass(frozen=True, slots=True)
class RunBegan:
    """A run began."""

    run: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run was closed."""

    run: str
    result: str
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """An agent received its place in a round."""

    host: str
    node_id: str
    round: int
    group_rank: int
    group_world_size: int
    rank_first: int
    rank_last: int
    world_size: int
    master: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Started:
    """A worker started, or one that stays takes part in another round."""

    at_s: float
    host: str
    pid: int
    round: int
    rank: int
    node_id: str
    rdzv_id: str
    group_rank: int
    world_size: int
    group_world_size: int
    local_world_size: int
    master: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A worker was alive, and had reached this step; -1 before its first."""

    at_s: float
    host: str
    pid: int
    round: int
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker ended by itself."""

    at_s: float
    host: str
    pid: int
    round: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Parked:
    """A kept worker no longer takes part in its round; it may start in a later one."""

    at_s: float
    host: str
    pid: int
    round: int
    rank: int


@dataclass(frozen=True, slots=True)
class MetStranger:
    """RANK 0's worker met a peer that does not belong to its round."""

    at_s: float
    host: str
    pid: int
    round: int
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class FaultBegan:
    """The harness is about to do harm.

    `unseen` are hosts that the server cannot reach, or whose agent cannot act, from now until the
    fault has `Recovered`: their workers may continue for a while.
    """

    at_s: float
    number: int
    name: str
    promise: Promise
    hosts: tuple[str, ...]
    unseen: tuple[str, ...]
    pids: tuple[int, ...]
    round: int
    restarts: int


@dataclass(frozen=True, slots=True)
class FaultHealed:
    """The harm is over.

    `harmed` counts the frames that were lost or delayed; None if the network was left alone.
    """

    at_s: float
    number: int
    harmed: int | None


@dataclass(frozen=True, slots=True)
class Recovered:
    """All hosts train again in one round."""

    at_s: float
    number: int
    round: int
    restarts: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotRecovered:
    """The deadline passed before all hosts trained again; the lane ends here."""

    at_s: float
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """How the job ended once its workers were told to: the server's result, and each exit code."""

    at_s: float
    state: str
    restarts: int
    exit_codes: tuple[int, ...]


Record = (
    Announced
    | Settled
    | RunBegan
    | RunEnded
    | Told
    | Started
    | Stepped
    | Exited
    | Parked
    | MetStranger
    | FaultBegan
    | FaultHealed
    | Recovered
    | NotRecovered
    | JobEnded
)

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Announced, Settled, RunBegan, RunEnded, Told, Started, Stepped, Exited, Parked, MetStranger,
        FaultBegan, FaultHealed, Recovered, NotRecovered, JobEnded,
    )
}  # fmt: skip


def encode(record: Record) -> str:
    """Encode a record as a line."""
    return json.dumps({"kind": type(record).__name__, **asdict(record)})


def decode(line: str) -> Record:
    """Decode a line.

    >>> decode(encode(RunEnded("r1", "succeeded", "all did")))
    RunEnded(run='r1', result='succeeded', reason='all did')
    """
    values = json.loads(line)
    kind = _KINDS[values.pop("kind")]
    known = {field.name for field in fields(kind)}
    if values.keys() != known:
        raise ValueError(f"{kind.__name__} has {sorted(values)}, not {sorted(known)}")
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(Place(**v) if isinstance(v, dict) else v for v in value)
    if "promise" in values:
        values["promise"] = Promise(values["promise"])
    record: Record = kind(**values)
    return record


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a history."""
    path.write_text("".join(encode(record) + "\n" for record in records))


def read(path: Path) -> tuple[Record, ...]:
    """Read a history."""
    return tuple(decode(line) for line in path.read_text().splitlines())

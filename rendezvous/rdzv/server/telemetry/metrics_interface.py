"""The interface through which the driver reports to metrics.

`Meter` itself counts nothing; `metrics.Metrics` does. A server without /metrics therefore loads no
metrics library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import field

from rdzv.core.events import Event
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.model import State
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.stores.base import Record
from rdzv.structs import struct


@struct(frozen=True)
class Room:
    """All nodes' resources for submitted jobs, and how many of these are free."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """The number of GPUs by state: free, taken, or unusable (on a node where nothing can be placed
    now)."""
    places: Mapping[str, int] = field(default_factory=dict)
    """The number of places by the same states; a node has one for each submitted job it can run at
    once."""
    nodes_barred: Mapping[str, int] = field(default_factory=dict)
    """The number of nodes barred from submitted jobs, by cause: cordoned or quarantined."""
    drains: Mapping[str, int] = field(default_factory=dict)
    """The number of nodes that are leaving all their jobs, by progress: draining or drained."""


@struct(frozen=True)
class Figures:
    """A leading server's state at one moment."""

    now_ms: int
    leadership: int
    streams: int
    nodes_connected: int
    nodes_away: int
    watchers: int
    store_away_ms: int
    """How long the store has been unavailable, or 0 while it is available."""
    states: tuple[State, ...]
    """All jobs in memory, including every job that has not ended."""
    straggling: Callable[[State], Sequence[Straggler]] = lambda state: ()
    """Returns a job's stragglers."""
    snapshots: Callable[[State], SnapshotsKnown] = lambda state: SnapshotsKnown()
    """Returns what is known about a job's snapshots in memory."""
    progress: Callable[[State], Sequence[RankProgress]] = lambda state: ()
    """Returns the progress of a job's workers, for those that have reported any."""
    lease_ms: int = 0
    """The lease that a node would receive if it connected now."""
    silence_ms: int = 0
    """The longest current silence of any node that has a stream."""
    room: Callable[[], Room] = Room
    """Returns the nodes' resources for submitted jobs; this has to visit every job and node."""


class Meter:
    """Receives all events from the code that writes the log and the history. No method waits."""

    def loaded(self, state: State, now_ms: int) -> None:
        """Record that a job was loaded from the store."""

    def count_step(self, before: State, after: State, events: Sequence[Event], now_ms: int) -> None:
        """Record a job's step that was stored, along with its events."""

    def recorded(self, rows: Sequence[Record]) -> None:
        """Record history rows when they are logged."""

    def forget_jobs(self) -> None:
        """Record that this server no longer leads, so its jobs now belong to another server."""

    def committing(self) -> AbstractContextManager[None]:
        """Time the commit in the body, unless it raises."""
        return nullcontext()

    def store_failed(self, *, writes: bool) -> None:
        """Record a call that the store did not answer or a write that it did not accept."""

    def loop_late(self, late_ms: int) -> None:
        """Record how late the event loop was for a timer."""

    def stream_opened(self) -> None:
        """Record that a node has opened a stream."""

    def node_lost(self) -> None:
        """Record that a node was lost. This is called once per node, not once per job."""

    def received(self) -> None:
        """Record a message received from a node."""

    def sent(self) -> None:
        """Record a message that was put on a node's stream."""

    def call_refused(self, code: str) -> None:
        """Record a refused call with the error code of its refusal."""


class Meters(Meter):
    """Passes every call on to several meters."""

    def __init__(self, *meters: Meter) -> None:
        self.meters = meters

    @contextmanager
    def committing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for meter in self.meters:
                stack.enter_context(meter.committing())
            yield


def _passed_on(name: str) -> Callable[..., None]:
    def call(all_: Meters, *args: object, **more: object) -> None:
        for meter in all_.meters:
            getattr(meter, name)(*args, **more)

    return call


for _name in (name for name in vars(Meter) if not name.startswith("_")):
    if _name not in vars(Meters):
        setattr(Meters, _name, _passed_on(_name))

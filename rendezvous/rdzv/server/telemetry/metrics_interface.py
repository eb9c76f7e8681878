"""The interface through which the driver reports to metrics.

`Meter` itself counts nothing; `metrics.Metrics` does. So a server without /metrics loads no metrics
library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import field

from rdzv.core.events import Event
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.model import State
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.server.messages import RankProgress
from rdzv.stores.base import Record
from rdzv.structs import struct


@struct(frozen=True)
class Room:
    """The resources of all nodes for submitted jobs, and how many of them are free."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs by state: free, taken, or unusable (on a node where nothing can be placed now)."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Places by the same states; a node has one for each submitted job that it can run at once."""
    nodes_barred: Mapping[str, int] = field(default_factory=dict)
    """The number of nodes barred from submitted jobs, by cause: cordoned, quarantined."""
    drains: Mapping[str, int] = field(default_factory=dict)
    """The number of nodes that leave all their jobs, by progress: draining, drained."""


@struct(frozen=True)
class Figures:
    """The state of a leading server at one moment."""

    now_ms: int
    leadership: int
    streams: int
    nodes_connected: int
    nodes_away: int
    watchers: int
    store_away_ms: int
    """How long the store has been away; 0 while it is available."""
    states: tuple[State, ...]
    """All jobs in memory; every job that has not ended is among them."""
    straggling: Callable[[State], Sequence[Straggler]] = lambda state: ()
    """Returns the stragglers of a job."""
    snapshots: Callable[[State], SnapshotsKnown] = lambda state: SnapshotsKnown()
    """Returns what is known about a job's snapshots in memory."""
    progress: Callable[[State], Sequence[RankProgress]] = lambda state: ()
    """Returns the progress of a job's workers, as far as reported."""
    lease_ms: int = 0
    """The lease that a node gets if it connects now."""
    silence_ms: int = 0
    """The longest silence of any node with a stream."""
    room: Callable[[], Room] = Room
    """Returns the nodes' resources for submitted jobs; it has to look at every job and node."""


class Meter:
    """Receives all events, from the code that writes log and history. No method waits."""

    def loaded(self, state: State, now_ms: int) -> None:
        """Note a job that was loaded from the store."""

    def count_step(self, before: State, after: State, events: Sequence[Event], now_ms: int) -> None:
        """Note a step of a job that was stored, with its events."""

    def recorded(self, rows: Sequence[Record]) -> None:
        """Note history rows when they are logged."""

    def forget_jobs(self) -> None:
        """Note that this server no longer leads, so that its jobs are another server's."""

    def committing(self) -> AbstractContextManager[None]:
        """Time the commit in the body, unless it raises."""
        return nullcontext()

    def store_failed(self, *, writes: bool) -> None:
        """Note a call that the store did not answer, or a write that it did not accept."""

    def loop_late(self, late_ms: int) -> None:
        """Note by how much the event loop was late for a timer."""

    def stream_opened(self) -> None:
        """Note a stream that a node has opened."""

    def node_lost(self) -> None:
        """Note that a node was given up; this is called once for all its jobs."""

    def received(self) -> None:
        """Note a message from a node."""

    def sent(self) -> None:
        """Note a message that was put on a node's stream."""

    def call_refused(self, code: str) -> None:
        """Note a refused call, with the error code of the refusal."""


class Meters(Meter):
    """Passes every call on to several meters."""

    def __init__(self, *meters: Meter) -> None:
        self.meters = meters

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Time the commit in each meter."""
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

"""Hooks for metrics: `Meter` itself counts nothing, `metrics.Metrics` does.

So the driver needs no library for metrics, and a server without /metrics loads none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import field

from rdzv.core.events import Event
from rdzv.core.model import State
from rdzv.server.messages import RankProgress
from rdzv.stores.base import Record
from rdzv.structs import struct


@struct(frozen=True)
class Room:
    """Resources of all nodes for submitted jobs, and their free share."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """By what they are: free, taken, or unusable, on a node that nothing may be placed on now."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Jobs that the nodes take at once, likewise."""
    nodes_barred: Mapping[str, int] = field(default_factory=dict)
    """Nodes on which nothing is placed until somebody says otherwise, by what bars them."""
    drains: Mapping[str, int] = field(default_factory=dict)
    """Nodes that leave all their jobs, by how far they are: draining, drained."""


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
    """How long the store has been away; 0 while it is there."""
    states: tuple[State, ...]
    """Every job in memory, which is every job that has not ended."""
    straggling: Callable[[State], int] = lambda state: 0
    """How many workers of a job straggle."""
    progress: Callable[[State], Sequence[RankProgress]] = lambda state: ()
    """How far the workers of a job are, as far as they have said."""
    lease_ms: int = 0
    """The lease of a node that connects now."""
    silence_ms: int = 0
    """How long nothing was heard of the node with a stream that is silent for longest."""
    room: Callable[[], Room] = Room
    """Resources of all nodes for submitted jobs; computing them looks at every job and every
    node."""


class Meter:
    """Is told what happens, by the same calls that write log and history. Waits for nothing."""

    def loaded(self, state: State, now_ms: int) -> None:
        """Note a job that was read from the store."""

    def stepped(self, before: State, after: State, events: Sequence[Event], now_ms: int) -> None:
        """Note a step of a job that is stored, with what happened in it."""

    def recorded(self, rows: Sequence[Record]) -> None:
        """Note rows of history, as the log has them."""

    def forget_jobs(self) -> None:
        """Note that this server leads no more, so that its jobs are another's."""

    def committing(self) -> AbstractContextManager[None]:
        """Time the commit in the body; one that raises is none."""
        return nullcontext()

    def store_failed(self, *, writes: bool) -> None:
        """Note that the store could not be asked, or not be written to."""

    def loop_late(self, late_ms: int) -> None:
        """Note by how much the event loop was late for a timer."""

    def stream_opened(self) -> None:
        """Note that a node has opened a stream."""

    def node_lost(self) -> None:
        """Note that a node was given up, whatever jobs it is in."""

    def received(self) -> None:
        """Note a message of a node."""

    def sent(self) -> None:
        """Note a message to a node, put on its stream."""

    def call_refused(self, code: str) -> None:
        """Note a call that its caller may not make, with the code of the refusal."""


class Meters(Meter):
    """Passes every call on to several meters."""

    def __init__(self, *meters: Meter) -> None:
        self.meters = meters

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Let each time the commit."""
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

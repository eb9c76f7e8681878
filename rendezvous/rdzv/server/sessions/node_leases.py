"""Nodes and their leases: runs the nodes core and its timers.

The core works in memory and never waits, so it needs no lock. A timer here notices expired leases
(`Leases.expire`), and the core decides which nodes are lost. After a *pause* of the server itself,
every lease is renewed, and no deadline counts until the messages that arrived during the pause have
been read (`LoopWatch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rdzv.core.commands import Tick
from rdzv.core.fleet import nodes
from rdzv.runtime.clock import Clock, LoopWatch, Timer
from rdzv.structs import replace

log = logging.getLogger("rdzv.driver")


HEAR_EVERY_MS = 1_000
"""How often heartbeats enter the nodes core, in batches. The shortest lease is 2 s."""


class Leases:
    """One server's nodes and their leases."""

    def __init__(
        self,
        clock: Clock,
        watch: LoopWatch,
        rules: nodes.LeaseRules,
        on_event: Callable[[nodes.NodesEvent], None],
    ) -> None:
        """Pass the core's events to `on_event`."""
        self._clock = clock
        self._watch = watch
        self._on_event = on_event
        self._nodes = nodes.Nodes(leadership=0, rules=rules)
        self._timer = Timer(clock, self.expire)
        self._heard: set[str] = set()
        self._hear_timer = Timer(clock, lambda _: self._feed_heard())

    def start(self, leadership: int) -> None:
        """Set this server's leadership number, on which incarnations are based."""
        self._nodes = replace(self._nodes, leadership=leadership)

    def stop(self) -> None:
        self._timer.cancel()
        self._hear_timer.cancel()

    @property
    def leadership(self) -> int:
        """This server's leadership number, which every message carries."""
        return self._nodes.leadership

    @property
    def records(self) -> Mapping[str, nodes.NodeRecord]:
        return self._nodes.records

    @property
    def lease_ms(self) -> int:
        """The lease that a node would receive if it connected now."""
        return self._nodes.rules.lease_for(len(self._nodes.records))

    def heartbeat_interval_ms(self, lease_ms: int) -> int:
        return self._nodes.rules.interval_for(lease_ms)

    def hear(self, node_id: str) -> None:
        """Renew the lease of a node that has sent a message, batched with other renewals."""
        self._heard.add(node_id)
        self._hear_timer.arm_by(self._clock.now_ms() + HEAR_EVERY_MS)

    def disconnect(self, command: nodes.Disconnect) -> None:
        """Record the end of a stream, after renewing the lease for any messages received on it."""
        if command.node_id in self._heard:
            self._feed_heard()
        self.step(command)

    def step(self, command: nodes.NodesCommand) -> None:
        """Apply a command to the nodes core and pass on the resulting events."""
        transition = nodes.step(self._nodes, command, self._clock.now_ms())
        self._nodes = transition.nodes
        self._timer.arm(transition.wake_at_ms)
        for event in transition.events:
            self._on_event(event)

    def expire(self, due_ms: int) -> None:
        """Give up nodes whose leases have expired; after a pause, wait until all input is read."""
        if self._watch.late(due_ms):
            self._timer.arm_by(self._watch.settled_ms)
            return
        self._feed_heard()
        self.step(Tick())

    def _feed_heard(self) -> None:
        self._hear_timer.cancel()
        if self._heard:
            heard, self._heard = frozenset(self._heard), set()
            self.step(nodes.Hear(heard))

    def renew(self, late_ms: int) -> None:
        """Renew every lease, because silence while this server was paused proves nothing."""
        log.warning("this server was blocked for %.1f s; renewing all leases", late_ms / 1000)
        self.step(nodes.Pause())

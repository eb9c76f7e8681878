"""Opens and closes nodes' streams, renews their leases, and handles the loss of nodes.

The nodes core works in memory and never waits, so it needs no lock. A timer notices expired leases
(`Leases.expire`), and the core decides which nodes are lost. After a *pause* of the server itself,
every lease is renewed, and no deadline counts until the messages that arrived during the pause have
been read (`LoopWatch`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rdzv.core.commands import Tick
from rdzv.core.fleet import nodes
from rdzv.errors import LimitExceededError, RendezvousConnectionError
from rdzv.messages import Hello, Lease, Servers, Welcome
from rdzv.runtime.clock import Timer
from rdzv.server.security import roles
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.server.sessions.streams import Stream
from rdzv.structs import replace
from rdzv.transport.wire import convert

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.driver")

HEAR_EVERY_MS = 1_000
"""How often heartbeats enter the nodes core, in batches. The shortest lease is 2 s."""


class Leases:
    """One server's nodes and their leases."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._nodes = nodes.Nodes(leadership=0, rules=driver.config.lease)
        self._timer = Timer(driver.clock, self.expire)
        self._heard: set[str] = set()
        self._hear_timer = Timer(driver.clock, lambda _: self._feed_heard())

    def start(self, leadership: int) -> None:
        self._nodes = replace(self._nodes, leadership=leadership)

    def stop(self) -> None:
        self._timer.cancel()
        self._hear_timer.cancel()

    @property
    def leadership(self) -> int:
        return self._nodes.leadership

    @property
    def records(self) -> Mapping[str, nodes.NodeRecord]:
        return self._nodes.records

    @property
    def lease_ms(self) -> int:
        return self._nodes.rules.lease_for(len(self._nodes.records))

    def heartbeat_interval_ms(self, lease_ms: int) -> int:
        return self._nodes.rules.interval_for(lease_ms)

    def hear(self, node_id: str) -> None:
        """Renew the lease of a node that has sent a message, batched with other renewals."""
        self._heard.add(node_id)
        self._hear_timer.arm_by(self._driver.clock.now_ms() + HEAR_EVERY_MS)

    def disconnect(self, command: nodes.Disconnect) -> None:
        """Record the end of a stream, after renewing the lease for any messages received on it."""
        if command.node_id in self._heard:
            self._feed_heard()
        self.step(command)

    def step(self, command: nodes.NodesCommand) -> None:
        transition = nodes.step(self._nodes, command, self._driver.clock.now_ms())
        self._nodes = transition.nodes
        self._timer.arm(transition.wake_at_ms)
        for event in transition.events:
            self._driver.connections.note_event(event)

    def expire(self, due_ms: int) -> None:
        """Give up nodes whose leases have expired; after a pause, wait until all input is read."""
        if self._driver.loop_watch.late(due_ms):
            self._timer.arm_by(self._driver.loop_watch.settled_ms)
            return
        self._feed_heard()
        self.step(Tick())

    def _feed_heard(self) -> None:
        self._hear_timer.cancel()
        if self._heard:
            heard, self._heard = frozenset(self._heard), set()
            self.step(nodes.Hear(heard))

    def renew(self, late_ms: int) -> None:
        log.warning("this server was blocked for %.1f s; renewing all leases", late_ms / 1000)
        self.step(nodes.Pause())


class Connections:
    """Attaches nodes to one server and detaches them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._callers: dict[str, str] = {}
        """The name of the caller that speaks for each known node, by node_id."""
        self._numbers = itertools.count(1)
        self._standing_by = Servers(())

    def attach(self, hello: Hello, caller: Caller = ANYBODY) -> Stream:
        """Open a node's stream; the first message on it is `Welcome`.

        Raises:
            DeniedError: the caller may not speak for this node.
            NodeSupersededError: a newer instance has taken over this node_id.
            RendezvousConnectionError: this server is stopping or superseded, or another instance
                speaks for this node_id; retry.
            LimitExceededError: this server holds too many nodes.
            InvalidRequestError: the node would fence itself too late for its lease.

        """
        self._refuse_hello(hello)
        roles.refuse_node(
            caller,
            hello.node_id,
            foreground=hello.kind is nodes.AgentKind.FOREGROUND and hello.resources is None,
            bound_to=self._callers.get(hello.node_id),
        )
        number = next(self._numbers)
        self._driver.leases.step(convert(nodes.Connect, hello, stream=number))
        record = self._driver.leases.records[hello.node_id]
        counts = self._driver.metrics.counts
        stream = Stream(number, record.incarnation, hello, counts, caller)
        self._callers[hello.node_id] = caller.name
        counts.add("rdzv_streams_opened_total")
        self._driver.note_gone(hello.node_id)
        self._driver.streams.add(stream)
        self._driver.fleet.note_hello(hello)
        interval_ms = self._driver.leases.heartbeat_interval_ms(record.lease_ms)
        stream.send(Welcome(record.incarnation, interval_ms, record.lease_ms))
        if self._standing_by.addresses:
            stream.send(self._standing_by)
        if (owed := self._driver.fleet.owed(hello)) is not None:
            stream.send(owed)
        self._driver.logs.note_connected(hello.node_id)
        return stream

    def note_standing_by(self, addresses: tuple[str, ...]) -> None:
        if addresses != self._standing_by.addresses:
            self._standing_by = Servers(addresses)
            for stream in list(self._driver.streams.open.values()):
                stream.send(self._standing_by)

    def _refuse_hello(self, hello: Hello) -> None:
        if self._driver.streams.closed:
            raise RendezvousConnectionError("this server is stopping; connect again")
        leadership = self._driver.leases.leadership
        if hello.leadership > leadership:
            raise RendezvousConnectionError(
                f"this server (leadership {leadership}) was superseded by one with leadership "
                f"{hello.leadership}; try another endpoint"
            )
        known = self._driver.leases.records
        if hello.node_id not in known and len(known) >= self._driver.config.limits.nodes:
            raise LimitExceededError(
                f"node {hello.node_id} is over the limit: this server holds "
                f"{self._driver.config.limits.nodes} nodes; raise the limit `nodes`"
            )

    def detach(self, stream: Stream) -> None:
        """Record that a stream has ended. Its node is now away, and is lost if it stays away."""
        stream.close()
        if self._driver.streams.remove(stream):
            self._driver.note_gone(stream.node_id)
        if not self._driver.streams.closed:
            self._driver.loop_watch.listened_until_ms()
            # A node whose connection was lost while this server was paused may have been trying to
            # reach it.
            unheard = self._driver.clock.now_ms() < self._driver.loop_watch.settled_ms
            self._driver.leases.disconnect(nodes.Disconnect(stream.node_id, stream.number, unheard))

    def heard(self, stream: Stream) -> None:
        self._driver.metrics.counts.add("rdzv_messages_received_total")
        self._driver.leases.hear(stream.node_id)

    def plan_away(self, stream: Stream, deadline_ms: int) -> None:
        self._driver.leases.step(nodes.PlanAway(stream.node_id, stream.number, deadline_ms))

    def note_event(self, event: nodes.NodesEvent) -> None:
        match event:
            case nodes.NodeConnected():
                self._driver.streams.close(event.node_id, event.stale_stream, "a newer one is open")
                self._driver.node_jobs.mark_soon(event.node_id)
                self._driver.placer.wake()
            case nodes.LeaseGrown():
                interval_ms = self._driver.leases.heartbeat_interval_ms(event.lease_ms)
                self._driver.streams.send(event.node_id, Lease(interval_ms, event.lease_ms))
            case nodes.NodeAway():
                self._driver.node_jobs.mark_soon(event.node_id)
                self._driver.placer.wake()
            case nodes.NodeGivenUp():
                self._driver.metrics.counts.add("rdzv_nodes_lost_total")
                self._callers.pop(event.node_id, None)
                self._driver.fleet.note_lost(event.node_id)
                why = f"given up: {event.reason}"
                self._driver.streams.close(event.node_id, event.stream, why)
                self._driver.node_jobs.mark_soon(event.node_id, lost=event)
        self._driver.watchers.nodes_changed()

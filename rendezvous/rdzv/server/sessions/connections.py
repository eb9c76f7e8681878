"""Opens and closes nodes' streams, and handles the loss of nodes."""

from __future__ import annotations

import itertools

from rdzv.core.fleet import nodes
from rdzv.core.model import Instance
from rdzv.errors import LimitExceededError, RendezvousConnectionError
from rdzv.messages import Hello, Lease, Servers, Welcome
from rdzv.runtime.clock import Clock, LoopWatch
from rdzv.server.diagnosis.diagnosis import Diagnosis
from rdzv.server.engine.watchers import Watchers
from rdzv.server.scheduling.scheduling import Scheduling
from rdzv.server.security import roles
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.server.sessions.node_jobs import NodeJobs
from rdzv.server.sessions.node_leases import Leases
from rdzv.server.sessions.streams import Stream, Streams
from rdzv.server.settings.server_settings import Limits
from rdzv.server.telemetry.metrics_interface import Meter
from rdzv.server.telemetry.scrape_targets import ScrapeTargets

OUTBOX = 1_024
"""The number of messages that wait for one slow reader before its stream is closed."""


class Connections:
    """Attaches nodes to one server and detaches them."""

    def __init__(
        self,
        clock: Clock,
        watch: LoopWatch,
        limits: Limits,
        meter: Meter,
        *,
        streams: Streams,
        leases: Leases,
        node_jobs: NodeJobs,
        scheduling: Scheduling,
        diagnosis: Diagnosis,
        targets: ScrapeTargets,
        watchers: Watchers,
    ) -> None:
        self._clock = clock
        self._watch = watch
        self._limits = limits
        self._meter = meter
        self._streams = streams
        self._leases = leases
        self._node_jobs = node_jobs
        self._scheduling = scheduling
        self._diagnosis = diagnosis
        self._targets = targets
        self._watchers = watchers
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
        connect = nodes.Connect(
            node_id=hello.node_id,
            instance=hello.instance,
            kind=hello.kind,
            address=hello.address,
            pid=hello.pid,
            stream=number,
            incarnation=hello.incarnation,
            fence_after_ms=hello.fence_after_ms,
        )
        self._leases.step(connect)
        record = self._leases.records[hello.node_id]
        stream = Stream(
            number,
            hello.node_id,
            record.incarnation,
            OUTBOX,
            self._meter.sent,
            caller,
            Instance(hello.instance, hello.fence_after_ms),
            takes_several=hello.takes_several,
        )
        self._callers[hello.node_id] = caller.name
        self._meter.stream_opened()
        self._targets.note(hello.node_id, hello.metrics)
        self._diagnosis.note_gone(hello.node_id)
        self._streams.add(stream)
        self._scheduling.note_hello(hello)
        interval_ms = self._leases.heartbeat_interval_ms(record.lease_ms)
        stream.send(Welcome(record.incarnation, interval_ms, record.lease_ms))
        if self._standing_by.addresses:
            stream.send(self._standing_by)
        if (owed := self._scheduling.drains.owed(hello)) is not None:
            stream.send(owed)
        self._diagnosis.logs.note_connected(hello.node_id)
        return stream

    def note_standing_by(self, addresses: tuple[str, ...]) -> None:
        """Send the list of standby servers to all nodes, now and as each node connects."""
        if addresses != self._standing_by.addresses:
            self._standing_by = Servers(addresses)
            for stream in list(self._streams.open.values()):
                stream.send(self._standing_by)

    def _refuse_hello(self, hello: Hello) -> None:
        if self._streams.closed:
            raise RendezvousConnectionError("this server is stopping; connect again")
        leadership = self._leases.leadership
        if hello.leadership > leadership:
            raise RendezvousConnectionError(
                f"this server (leadership {leadership}) was superseded by one with leadership "
                f"{hello.leadership}; try another endpoint"
            )
        known = self._leases.records
        if hello.node_id not in known and len(known) >= self._limits.nodes:
            raise LimitExceededError(
                f"node {hello.node_id} is over the limit: this server holds "
                f"{self._limits.nodes} nodes; raise the limit `nodes`"
            )

    def detach(self, stream: Stream) -> None:
        """Record that a stream has ended. Its node is now away, and is lost if it stays away."""
        stream.close()
        if self._streams.remove(stream):
            self._diagnosis.note_gone(stream.node_id)
        if not self._streams.closed:
            self._watch.listened_until_ms()
            # A node whose connection was lost while this server was paused may have been trying to
            # reach it.
            unheard = self._clock.now_ms() < self._watch.settled_ms
            self._leases.disconnect(nodes.Disconnect(stream.node_id, stream.number, unheard))

    def heard(self, stream: Stream) -> None:
        """Renew a node's lease because the node has sent a message."""
        self._meter.received()
        self._leases.hear(stream.node_id)

    def plan_away(self, stream: Stream, deadline_ms: int) -> None:
        """Record that an agent is going away on purpose and will return within `deadline_ms`."""
        self._leases.step(nodes.PlanAway(stream.node_id, stream.number, deadline_ms))

    def note_event(self, event: nodes.NodesEvent) -> None:
        """Update streams, jobs, placement and diagnosis after an event from the nodes core."""
        match event:
            case nodes.NodeConnected():
                self._streams.close(event.node_id, event.stale_stream, "a newer one is open")
                self._node_jobs.mark_soon(event.node_id)
                self._scheduling.placer.wake()
            case nodes.LeaseGrown():
                interval_ms = self._leases.heartbeat_interval_ms(event.lease_ms)
                self._streams.send(event.node_id, Lease(interval_ms, event.lease_ms))
            case nodes.NodeAway():
                self._node_jobs.mark_soon(event.node_id)
                self._scheduling.placer.wake()
            case nodes.NodeGivenUp():
                self._meter.node_lost()
                self._callers.pop(event.node_id, None)
                self._targets.lose(event.node_id, self._clock.now_ms())
                self._scheduling.note_lost(event.node_id)
                why = f"given up: {event.reason}"
                self._streams.close(event.node_id, event.stream, why)
                self._node_jobs.mark_soon(event.node_id, lost=event)
        self._watchers.nodes_changed()

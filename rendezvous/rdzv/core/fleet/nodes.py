"""Nodes across all jobs: their streams, instances, incarnations, and leases.

A node is *connected* while its stream is open, *away* from the end of the stream until its return
or its deadline, and then *lost*. The rendezvous decides what this means for a job. ARCHITECTURE.md
(*The stream*, *Availability or strict exclusivity*) says how long each may be silent or absent.

After a takeover, a node counts as back once it has responded to the Welcome; a node that gave up
waiting for a busy server's Welcome is still coming back.

Each node_id belongs to one instance at a time; a new one takes over only once the old one's stream
has ended. Incarnations number the instances. The leadership is their high half, so they never
decrease, even if a server starts without its predecessor's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Annotated

from rdzv.core.commands import Tick
from rdzv.core.model import DAEMON_RETURN_MS, RECONNECT_GRACE_MS
from rdzv.core.shared_map import put, put_all
from rdzv.errors import InvalidRequestError, NodeSupersededError, RendezvousConnectionError
from rdzv.structs import Duration, replace, setting, struct

COUNTER_BITS = 32

AMPLE_MS = 10_000
"""An ample allowance for a late heartbeat; a long lease needs no more than two heartbeats."""

HEARTBEATS_PER_LEASE = 3
"""How many heartbeats a node sends within a short lease: one may be lost and the next one late."""

RETURN_MS = 5
"""The time that each node's return may take if all nodes reconnect after a takeover."""

LEASE_GROWS_BY = 1.5
"""A lease is replaced only once the suitable one is this many times as long, because every new node
changes the suitable length slightly."""

ARRIVALS_QUIET_MS = 10_000
"""The server is assumed to be slow if nodes come back less than this far apart after a takeover."""
ARRIVALS_GRACES = 4
"""The maximum time for which this is assumed, as a multiple of `takeover_grace_for`."""

FENCE_MARGIN_MS = 1_000
"""A node must fence itself this long before it is given up, because killing takes a moment."""


class AgentKind(StrEnum):
    """The kind of an agent. Only a foreground agent's workers die with it."""

    FOREGROUND = "foreground"
    DAEMON = "daemon"


def absence_for(lease_ms: int) -> int:
    """Return how long, in ms, a daemon may be absent, and its runners wait for the next one.

    >>> [absence_for(lease_ms) for lease_ms in (5_000, 30_000)]
    [15000, 30000]
    """
    return max(lease_ms, DAEMON_RETURN_MS)


# fmt: off
@struct(frozen=True)
class LeaseRules:
    """How long nodes may be silent."""

    duration_ms: Annotated[Duration, setting(ge=2_000, le=600_000, reason="""
        How long a node may be silent before its seat is given away. Raise it on a network that
        stalls; --fence-after of every node must stay 1 s below it.""")] = 5_000
    nodes: Annotated[int, setting(ge=1, unit="nodes", reason="""
        Up to this number of nodes, the lease is `duration`; with more it grows, so that heartbeats
        do not overload the server.""")] = 1_000
    longest_ms: Annotated[Duration, setting(ge=2_000, le=600_000, reason="""
        The lease with `longest_nodes` or more.""")] = 30_000
    longest_nodes: Annotated[int, setting(ge=1, unit="nodes", reason="""
        From this number of nodes on, the lease is `longest`.""")] = 10_000
    takeover_grace_ms: Annotated[Duration, setting(ge=5_000, le=3_600_000, reason="""
        For this time after its start, a takeover or a pause, the server gives up no silent node.
        Nodes try to reconnect at least every 5 s. With more than 6,000 nodes a start or a takeover
        needs longer: 5 ms for each.""")] = 30_000
    # fmt: on

    def lease_for(self, nodes: int) -> int:
        """Return the lease, in ms, for the given number of nodes.

        >>> [LeaseRules().lease_for(n) for n in (1, 1_000, 5_500, 20_000)]
        [5000, 5000, 17500, 30000]
        """
        above = min(max(nodes - self.nodes, 0), self.longest_nodes - self.nodes)
        span = max(self.longest_nodes - self.nodes, 1)
        return self.duration_ms + (self.longest_ms - self.duration_ms) * above // span

    def interval_for(self, lease_ms: int) -> int:
        """Return the heartbeat interval, in ms, of a node with the given lease.

        A heartbeat that is `AMPLE_MS` late is still in time, so the long leases of many nodes need
        few heartbeats: ten thousand nodes send no more per second than one thousand do.

        >>> [LeaseRules().interval_for(lease_ms) for lease_ms in (5_000, 15_000, 17_500, 30_000)]
        [1666, 5000, 7500, 15000]
        """
        often_ms = lease_ms // HEARTBEATS_PER_LEASE
        return max(often_ms, min(lease_ms - AMPLE_MS, lease_ms // 2))

    def takeover_grace_for(self, nodes: int) -> int:
        """Return how long, in ms, the given number of nodes may take until one is given up.

        >>> [LeaseRules().takeover_grace_for(nodes) for nodes in (1, 6_000, 10_000)]
        [30000, 30000, 50000]
        """
        return max(self.takeover_grace_ms, nodes * RETURN_MS)

    def quiet_for(self, lease_ms: int) -> int:
        """Return how long, in ms, all nodes with this lease may be silent before it is suspicious.

        This period ends before the first of them would be given up.

        >>> [LeaseRules().quiet_for(lease_ms) for lease_ms in (5_000, 15_000, 30_000)]
        [2500, 7500, 12000]
        """
        return min(lease_ms // 2, (lease_ms - self.interval_for(lease_ms)) * 4 // 5)


@struct(frozen=True)
class NodeRecord:
    """The server's record of one node."""

    node_id: str
    instance: str
    """The id of the instance, or empty while the node is only expected."""
    incarnation: int
    kind: AgentKind
    address: str
    pid: int
    stream: int | None
    """The number of the node's open stream, or None while the node is away."""
    since_ms: int
    """The time at which the node connected or went away."""
    heard_ms: int
    lease_ms: int
    excused_until_ms: int = 0
    """The time before which its lease does not end, because all nodes are silent."""
    fence_after_ms: int = 0
    """The time after its last message by which it has killed its own workers, or 0 if it does not.
    """
    until_ms: int = 0
    firm: bool = False
    """Whether nothing may shorten the wait for it, for example because its absence was announced,
    or because it fences itself."""
    expected_instance: str = ""
    """The instance behind the incarnation while the node is only expected, or empty if it was not
    stored."""
    returns_until_ms: int = 0
    """The time until which it may still be coming back after a takeover, or 0 once it has responded
    to a Welcome."""

    @property
    def expires_at_ms(self) -> int:
        """The time at which the node is lost if it stays silent."""
        if self.stream is None:
            return self.until_ms
        return max(self.heard_ms + self.lease_ms, self.excused_until_ms)


@struct(frozen=True)
class Nodes:
    """All nodes of one server."""

    leadership: int
    rules: LeaseRules = field(default_factory=LeaseRules)
    records: Mapping[str, NodeRecord] = field(default_factory=dict)
    counter: int = 0
    wake_at_ms: int | None = None
    excused: bool = False
    """Whether any node has been excused since the last message from any node."""
    arrived_ms: int | None = None
    """The last time that a node coming back after a takeover connected."""


# ------------------------------------------------------------------ commands


@struct(frozen=True)
class Connect:
    """Open a stream.

    `incarnation` is the one previously assigned to this instance, or 0 if none was.
    """

    node_id: str
    instance: str
    kind: AgentKind
    address: str
    pid: int
    stream: int
    incarnation: int = 0
    fence_after_ms: int = 0


@struct(frozen=True)
class Hear:
    """Record that these nodes have sent something since the last `Hear`."""

    node_ids: frozenset[str]


@struct(frozen=True)
class Disconnect:
    """A stream has ended. This has no effect if a newer stream is open."""

    node_id: str
    stream: int
    unheard: bool = False
    """Whether the server could not receive at that moment, so that the stream may have been only an
    attempt to reach it."""


@struct(frozen=True)
class PlanAway:
    """The agent is going away on purpose, and promises to be back within `deadline_ms`."""

    node_id: str
    stream: int
    deadline_ms: int


@struct(frozen=True)
class Expect:
    """After a takeover, an incarnation holds a seat and has not been heard from yet.

    `instance` is the id of its instance, which may not know the incarnation, because the previous
    server may have ended before sending it.
    """

    node_id: str
    incarnation: int
    instance: str = ""
    fence_after_ms: int = 0
    nodes: int = 1
    """The number of nodes that are expected together with this one, including it."""


@struct(frozen=True)
class Pause:
    """The server itself was unable to receive for a while."""


NodesCommand = Connect | Hear | Disconnect | PlanAway | Expect | Pause | Tick


# ------------------------------------------------------------------ events


@struct(frozen=True)
class NodeConnected:
    """A stream is open.

    `replaced` is another instance's incarnation that had this node_id, if any.
    """

    node_id: str
    incarnation: int
    lease_ms: int
    replaced: int | None
    stale_stream: int | None
    """An older stream with this node_id whose end was not noticed. It must be closed."""


@struct(frozen=True)
class LeaseGrown:
    """A node's lease is longer from now on."""

    node_id: str
    incarnation: int
    lease_ms: int


@struct(frozen=True)
class NodeAway:
    """A node's stream has ended, and the node will be given up at `until_ms`."""

    node_id: str
    incarnation: int
    until_ms: int
    firm: bool


@struct(frozen=True)
class NodeGivenUp:
    """A node was given up. If its stream is still open, it must be closed."""

    node_id: str
    incarnation: int
    reason: str
    stream: int | None
    silent_ms: int = 0


NodesEvent = NodeConnected | LeaseGrown | NodeAway | NodeGivenUp


@struct(frozen=True)
class NodesTransition:
    """The next state, the events, and the latest time for the next tick."""

    nodes: Nodes
    events: tuple[NodesEvent, ...] = ()

    @property
    def wake_at_ms(self) -> int | None:
        return self.nodes.wake_at_ms


def step(nodes: Nodes, command: NodesCommand, now_ms: int) -> NodesTransition:
    """Apply one command. A refused command raises an error and leaves the state unchanged.

    Raises:
        NodeSupersededError: a newer incarnation has taken over the node_id.
        RendezvousConnectionError: the node_id is in use, or may be, by an instance that has not
            been heard since this server took over, or is about to fence itself; retry.
        InvalidRequestError: the node would fence itself too late for its lease.

    """
    match command:
        case Connect():
            return _connect(nodes, command, now_ms)
        case Hear():
            return _hear(nodes, command, now_ms)
        case Disconnect():
            return _disconnect(nodes, command, now_ms)
        case PlanAway():
            return _plan_away(nodes, command, now_ms)
        case Expect():
            return _expect(nodes, command, now_ms)
        case Pause():
            return _pause(nodes, now_ms)
        case Tick():
            return _tick(nodes, now_ms)


def _connect(nodes: Nodes, command: Connect, now_ms: int) -> NodesTransition:
    old = nodes.records.get(command.node_id)
    _refuse_usurper(nodes, old, command, now_ms)
    same = old is not None and _same_instance(old, command, nodes.leadership)
    counter = nodes.counter + (0 if same else 1)
    incarnation = (nodes.leadership << COUNTER_BITS) + counter
    if old is not None and same:
        incarnation = max(old.incarnation, command.incarnation)
    lease_ms = nodes.rules.lease_for(len(nodes.records) + (0 if old else 1))
    check_fence(command.fence_after_ms, lease_ms)
    record = NodeRecord(
        node_id=command.node_id,
        instance=command.instance,
        incarnation=incarnation,
        kind=command.kind,
        address=command.address,
        pid=command.pid,
        stream=command.stream,
        since_ms=now_ms,
        heard_ms=now_ms,
        lease_ms=lease_ms,
        fence_after_ms=command.fence_after_ms,
    )
    if old is not None and same and _returns(old, now_ms):
        # Until the node responds, the Welcome itself may be what is late.
        record = replace(
            record,
            excused_until_ms=min(now_ms + nodes.rules.takeover_grace_ms, old.returns_until_ms),
            returns_until_ms=old.returns_until_ms,
        )
    connected = NodeConnected(
        node_id=command.node_id,
        incarnation=incarnation,
        lease_ms=lease_ms,
        replaced=None if same or old is None else old.incarnation,
        stale_stream=old.stream if old else None,
    )
    arrived_ms = now_ms if old is not None and _returns(old, now_ms) else nodes.arrived_ms
    others = _end_excuses(replace(nodes, counter=counter, arrived_ms=arrived_ms), now_ms)
    return NodesTransition(_put(others, record), (connected,))


def check_fence(fence_after_ms: int, lease_ms: int) -> None:
    """Refuse a fence that might act only after the node and its seats have been given up."""
    if fence_after_ms and fence_after_ms + FENCE_MARGIN_MS > lease_ms:
        most_s = (lease_ms - FENCE_MARGIN_MS) / 1000
        raise InvalidRequestError(
            f"--fence-after={fence_after_ms / 1000:g} is too long: the server gives this node up "
            f"when it has heard nothing for {lease_ms / 1000:g} s (the lease), and its workers "
            f"must be gone {FENCE_MARGIN_MS / 1000:g} s before that; give at most {most_s:g}"
        )


def _same_instance(old: NodeRecord, command: Connect, leadership: int) -> bool:
    """Return whether the sender is the instance on record, or has since replaced it.

    An instance that is only expected is identified by its id, or by the incarnation assigned to it
    by a previous server.
    """
    if command.instance == (old.instance or old.expected_instance):
        return True
    return not old.instance and old.incarnation <= command.incarnation < leadership << COUNTER_BITS


def _refuse_usurper(nodes: Nodes, old: NodeRecord | None, command: Connect, now_ms: int) -> None:
    if old is None or _same_instance(old, command, nodes.leadership):
        return
    if 0 < command.incarnation < old.incarnation:
        raise NodeSupersededError(
            f"node_id {command.node_id} was taken over by {_who(old)}; this instance is "
            "superseded and must stop its workers"
        )
    # Not `expires_at_ms`: silence is not excused while another instance asks for the node's place.
    if old.stream is not None and now_ms < old.heard_ms + old.lease_ms:
        age_s = (now_ms - old.since_ms) / 1000
        # The other one may be about to end: a restarted launch, or a pod that was replaced.
        raise RendezvousConnectionError(
            f"node_id {command.node_id} is in use by {_who(old)}, connected {age_s:.0f} s ago; "
            "this node takes the place once that one has ended; if both are meant to run, each "
            "needs its own name (--node-id, or --node-rank under static)"
        )
    if old.stream is not None:
        return
    if old.fence_after_ms:
        # The fence has acted by then, however long the seat is kept for other reasons.
        until_ms = min(old.until_ms, old.since_ms + old.fence_after_ms + FENCE_MARGIN_MS)
        fence = f"its fence kills them {old.fence_after_ms / 1000:g} s after it was last heard"
        why = f"may still have workers of {_who(old)}; {fence}"
    elif not old.instance:
        until_ms = old.until_ms
        why = "holds a seat and has not reported since this server took over"
    else:
        return
    if now_ms < until_ms:
        wait_s = (until_ms - now_ms) / 1000
        raise RendezvousConnectionError(
            f"node_id {command.node_id} {why}; another instance is admitted after {wait_s:.0f} s"
        )


def _who(record: NodeRecord) -> str:
    if not record.instance:
        return "an instance that has not reported since this server took over"
    return f"{record.address} pid {record.pid}"


def _hear(nodes: Nodes, command: Hear, now_ms: int) -> NodesTransition:
    suits_ms = nodes.rules.lease_for(len(nodes.records))
    heard: dict[str, NodeRecord] = {}
    grown: list[LeaseGrown] = []
    for node_id in command.node_ids:
        record = nodes.records.get(node_id)
        if record is None or record.stream is None:
            continue
        lease_ms = record.lease_ms
        if suits_ms >= lease_ms * LEASE_GROWS_BY:
            lease_ms = suits_ms
            grown.append(LeaseGrown(node_id, record.incarnation, lease_ms))
        if record.returns_until_ms:
            record = replace(record, excused_until_ms=0, returns_until_ms=0)
        heard[node_id] = replace(record, heard_ms=now_ms, lease_ms=lease_ms)
    if not heard:
        return NodesTransition(nodes)
    # A node that was coming back until now may expire earlier than before.
    due_ms = min(record.expires_at_ms for record in heard.values())
    heard_of = replace(nodes, records=put_all(nodes.records, heard))
    return NodesTransition(_end_excuses(_wake_by(heard_of, due_ms), now_ms), tuple(grown))


def _end_excuses(nodes: Nodes, now_ms: int) -> Nodes:
    """After a message from any node, give excused nodes one more lease, as theirs may follow."""
    if not nodes.excused:
        return nodes
    nodes = replace(nodes, excused=False)
    excused = {
        record.node_id: replace(
            record, excused_until_ms=min(record.excused_until_ms, now_ms + record.lease_ms)
        )
        for record in nodes.records.values()
        if record.excused_until_ms > now_ms
    }
    if not excused:
        return nodes
    shortened = replace(nodes, records=put_all(nodes.records, excused))
    return replace(shortened, wake_at_ms=_next_expiry(shortened))


def _disconnect(nodes: Nodes, command: Disconnect, now_ms: int) -> NodesTransition:
    old = nodes.records.get(command.node_id)
    if old is None or old.stream != command.stream:
        return NodesTransition(nodes)
    grace_ms = _grace_ms(nodes.rules, old, now_ms)
    announced = old.firm and old.until_ms > now_ms
    until_ms = old.until_ms if announced else now_ms + grace_ms
    if old.fence_after_ms:
        until_ms = max(until_ms, now_ms + old.fence_after_ms + FENCE_MARGIN_MS)
    firm = announced or old.fence_after_ms > 0
    # If no node is heard now, or none was until a moment ago, the end of a stream says nothing
    # about the node: an unanswered ping ended the stream, or an earlier end was noticed late.
    excused_until_ms = old.excused_until_ms
    if command.unheard or _returns(old, now_ms) or _coming_back(nodes, now_ms):
        excused_until_ms = max(excused_until_ms, now_ms + nodes.rules.takeover_grace_ms)
    else:
        excused_until_ms = max(excused_until_ms, _deaf_until_ms(nodes, now_ms))
    if excused_until_ms > until_ms:
        until_ms, firm = excused_until_ms, True
    record = replace(old, stream=None, since_ms=now_ms, until_ms=until_ms, firm=firm)
    return NodesTransition(_put(nodes, record), (_away(record),))


def _grace_ms(rules: LeaseRules, record: NodeRecord, now_ms: int) -> int:
    if record.kind is AgentKind.FOREGROUND:
        return RECONNECT_GRACE_MS
    # The stream of a machine that died in silence ends too, by an unanswered ping.
    silent = now_ms >= record.heard_ms + rules.quiet_for(record.lease_ms)
    return record.lease_ms if silent or record.fence_after_ms else absence_for(record.lease_ms)


def _away(record: NodeRecord) -> NodeAway:
    return NodeAway(record.node_id, record.incarnation, record.until_ms, record.firm)


def _plan_away(nodes: Nodes, command: PlanAway, now_ms: int) -> NodesTransition:
    old = nodes.records.get(command.node_id)
    if old is None or old.stream != command.stream:
        return NodesTransition(nodes)
    return NodesTransition(
        _put(nodes, replace(old, until_ms=now_ms + command.deadline_ms, firm=True))
    )


def _expect(nodes: Nodes, command: Expect, now_ms: int) -> NodesTransition:
    old = nodes.records.get(command.node_id)
    if old is not None and (old.instance or old.incarnation >= command.incarnation):
        return NodesTransition(nodes)
    grace_ms = nodes.rules.takeover_grace_for(command.nodes)
    record = NodeRecord(
        node_id=command.node_id,
        instance="",
        incarnation=command.incarnation,
        kind=AgentKind.DAEMON,
        address="",
        pid=0,
        stream=None,
        since_ms=now_ms,
        heard_ms=now_ms,
        lease_ms=nodes.rules.duration_ms,
        fence_after_ms=command.fence_after_ms,
        until_ms=now_ms + grace_ms,
        firm=True,
        expected_instance=command.instance,
        returns_until_ms=now_ms + ARRIVALS_GRACES * grace_ms,
    )
    return NodesTransition(_put(nodes, record))


def _pause(nodes: Nodes, now_ms: int) -> NodesTransition:
    grace_until_ms = now_ms + nodes.rules.takeover_grace_ms
    records: dict[str, NodeRecord] = {}
    events: list[NodeAway] = []
    for record in nodes.records.values():
        if record.stream is not None:
            records[record.node_id] = replace(record, heard_ms=now_ms)
        else:
            until_ms = max(record.until_ms, grace_until_ms)
            waited_for = replace(record, until_ms=until_ms, firm=True)
            records[record.node_id] = waited_for
            events.append(_away(waited_for))
    paused = replace(nodes, records=records)
    return NodesTransition(replace(paused, wake_at_ms=_next_expiry(paused)), tuple(events))


def _tick(nodes: Nodes, now_ms: int) -> NodesTransition:
    if nodes.wake_at_ms is None or now_ms < nodes.wake_at_ms:
        return NodesTransition(nodes)
    if excused := _excused(nodes, now_ms):
        nodes = replace(nodes, records=put_all(nodes.records, excused), excused=True)
    if late := _late(nodes, now_ms):
        nodes = replace(nodes, records=put_all(nodes.records, late))
    lost = [record for record in nodes.records.values() if record.expires_at_ms <= now_ms]
    gone = {record.node_id for record in lost}
    left = replace(
        nodes, records={n: record for n, record in nodes.records.items() if n not in gone}
    )
    events = tuple(_lost(record, now_ms) for record in lost)
    return NodesTransition(replace(left, wake_at_ms=_next_expiry(left)), events)


def _deaf_until_ms(nodes: Nodes, now_ms: int) -> int:
    """Return the time until which the silence of all nodes is excused; 0 if not all are silent."""
    rules = nodes.rules
    # Usually one of the first few nodes was heard just now, so there is no need to check all of
    # them.
    fresh_ms = now_ms - rules.quiet_for(min(rules.duration_ms, rules.longest_ms))
    if any(r.heard_ms > fresh_ms and r.stream is not None for r in nodes.records.values()):
        return 0
    connected = [record for record in nodes.records.values() if record.stream is not None]
    if len(connected) < 2:
        return 0
    newest = max(connected, key=lambda record: record.heard_ms)
    if now_ms < newest.heard_ms + rules.quiet_for(newest.lease_ms):
        return 0
    return newest.heard_ms + rules.takeover_grace_ms


def _excused(nodes: Nodes, now_ms: int) -> dict[str, NodeRecord]:
    """Excuse and return the nodes whose lease expired while all other nodes were silent too."""
    silent = [
        record
        for record in nodes.records.values()
        if record.stream is not None and record.expires_at_ms <= now_ms
    ]
    until_ms = _deaf_until_ms(nodes, now_ms) if silent else 0
    if until_ms <= now_ms:
        return {}
    return {record.node_id: replace(record, excused_until_ms=until_ms) for record in silent}


def _late(nodes: Nodes, now_ms: int) -> dict[str, NodeRecord]:
    """Return, with more time, the nodes that are due while others are still coming back."""
    if not _arriving(nodes, now_ms):
        return {}
    assert nodes.arrived_ms is not None
    quiet_ms = nodes.arrived_ms + ARRIVALS_QUIET_MS
    return {
        record.node_id: _awaited(record, min(quiet_ms, record.returns_until_ms))
        for record in nodes.records.values()
        if record.expires_at_ms <= now_ms and _returns(record, now_ms)
    }


def _awaited(record: NodeRecord, until_ms: int) -> NodeRecord:
    if record.stream is None:
        return replace(record, until_ms=until_ms)
    return replace(record, excused_until_ms=until_ms)


def _arriving(nodes: Nodes, now_ms: int) -> bool:
    return nodes.arrived_ms is not None and now_ms < nodes.arrived_ms + ARRIVALS_QUIET_MS


def _returns(record: NodeRecord, now_ms: int) -> bool:
    return now_ms < record.returns_until_ms


def _coming_back(nodes: Nodes, now_ms: int) -> bool:
    return _arriving(nodes, now_ms) and any(
        _returns(record, now_ms) for record in nodes.records.values()
    )


def _lost(record: NodeRecord, now_ms: int) -> NodeGivenUp:
    silent_ms = now_ms - (record.since_ms if record.stream is None else record.heard_ms)
    reason = f"its stream ended and it did not come back within {silent_ms / 1000:.2g} s"
    if record.stream is not None:
        reason = f"lease expired: no message for {silent_ms / 1000:.1f} s"
    elif not record.instance:
        reason = f"did not reconnect within {silent_ms / 1000:.0f} s of this server's take-over"
    return NodeGivenUp(record.node_id, record.incarnation, reason, record.stream, silent_ms)


def _put(nodes: Nodes, record: NodeRecord) -> Nodes:
    """Store one record. This may make the next tick earlier; only a tick can make it later."""
    stored = replace(nodes, records=put(nodes.records, record.node_id, record))
    return _wake_by(stored, record.expires_at_ms)


def _wake_by(nodes: Nodes, due_ms: int) -> Nodes:
    wake_at_ms = due_ms if nodes.wake_at_ms is None else min(nodes.wake_at_ms, due_ms)
    return replace(nodes, wake_at_ms=wake_at_ms)


def _next_expiry(nodes: Nodes) -> int | None:
    return min((record.expires_at_ms for record in nodes.records.values()), default=None)

"""Drains: a node leaves all its jobs by a deadline set by an operator or by the node itself.

An operator's drain is stored with the cordons and announced to its node (`Drains.tell_changes`),
which does the rest. A node's own drain (because it is being preempted, or its agent is ending) is
kept only in memory, because the node repeats it in every hello.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rdzv.core.events import NodeDrained, NodeUndrained
from rdzv.core.fleet.node_resources import Drain
from rdzv.core.fleet.node_resources import told as drain_words
from rdzv.core.model import State
from rdzv.core.words import duration
from rdzv.errors import TooFewNodesError
from rdzv.messages import Announcement, Draining, DrainNode, Hello, UndrainNode
from rdzv.runtime.clock import Clock
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.scheduling.cordons import Cordon, Cordons

log = logging.getLogger("rdzv.scheduling")


class Drains:
    """The drains of one server's nodes."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        cordons: Cordons,
        send: Callable[[str, Announcement], object],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._cordons = cordons
        self._send = send
        self._wishes: dict[str, Drain] = {}
        """The drains that nodes have announced themselves, by node_id."""

    def of(self, node_id: str) -> Drain | None:
        """Return a node's drain, or None; if it has two, the one with the earlier deadline."""
        cordon = self._cordons.of(node_id)
        both = [cordon and cordon.drain, self._wishes.get(node_id)]
        return min((one for one in both if one), key=lambda drain: drain.due_ms, default=None)

    def wishes(self, node_id: str) -> bool:
        """Return whether a node has itself announced that it is leaving."""
        return node_id in self._wishes

    def all(self) -> dict[str, Drain]:
        """Return the drains of all nodes that are leaving or have left all their jobs."""
        found = {node_id: self.of(node_id) for node_id in (*self._cordons.by_node, *self._wishes)}
        return {node_id: drain for node_id, drain in found.items() if drain is not None}

    # ---------------------------------------------------------------- by an operator

    async def drain(
        self, node_id: str, deadline_ms: int, reason: str, short: Callable[[str], str] | None = None
    ) -> None:
        """Make a node leave all its jobs by the deadline, and place no more jobs on it.

        `short` returns which jobs would be left with too few nodes; without it, no job is checked.

        Raises:
            UnknownNodeError: no such node is known.
            TooFewNodesError: one of its jobs would be left with too few nodes.
            RendezvousError: the change was not stored; retry.

        """
        self._cordons.check_known(node_id)
        now_ms = self._clock.now_ms()

        def drained(cordons: dict[str, Cordon]) -> dict[str, Cordon]:
            # The lock is held, so no job is placed and no other node is drained in between.
            if short is not None and (why := short(node_id)):
                raise TooFewNodesError(why)
            known = cordons.get(node_id)
            besides = known.alone if known is not None else None
            return {**cordons, node_id: Cordon(reason, now_ms, now_ms + deadline_ms, besides)}

        await self._cordons.store(drained)
        within = duration(deadline_ms)
        log.warning("draining node %s within %s: %s", node_id, within, reason or "no reason")
        self._record(NodeDrained(node_id, drain_words(reason), deadline_ms))

    async def lift(self, node_id: str, *, cordon: bool) -> None:
        """Lift a node's drain and, with `cordon`, its cordon, as far as it has them.

        Raises:
            RendezvousError: the change was not stored; retry.

        """
        before, after = await self._cordons.lift(node_id, cordon=cordon)
        if before is None or after == before:
            return
        if before.drain is not None:
            self._record(NodeUndrained(node_id))
        if after is None:
            log.warning("node %s is no longer cordoned", node_id)
        else:
            reason = after.reason or "no reason was given"
            log.warning("node %s is no longer drained, and still cordoned: %s", node_id, reason)

    def tell_changes(self, before: Mapping[str, Cordon]) -> None:
        """Notify each node whose drain has begun, changed or ended since `before`."""
        now = self._cordons.by_node
        for node_id in {*before, *now}:
            old, new = before.get(node_id), now.get(node_id)
            drain = new.drain if new is not None else None
            if drain != (old.drain if old is not None else None):
                self._send(node_id, self._told(drain))

    def _told(self, drain: Drain | None) -> Announcement:
        if drain is None:
            return UndrainNode()
        return DrainNode(drain.left_ms(self._clock.now_ms()), drain.told, drain.number)

    # ---------------------------------------------------------------- by the node

    def owed(self, hello: Hello) -> Announcement | None:
        """Return the announcement that a returning node needs about its drain, or None."""
        cordon = self._cordons.of(hello.node_id)
        if cordon is not None and cordon.drain is not None:
            return self._told(cordon.drain)
        lifted = hello.draining is not None and hello.draining.number != 0
        return UndrainNode() if lifted else None

    def note_hello(self, hello: Hello) -> None:
        """Record whether a node's hello says that it is leaving on its own initiative."""
        if hello.draining is not None and hello.draining.own:
            self._note_wish(hello.node_id, hello.draining)
        else:
            self._wishes.pop(hello.node_id, None)

    def note_draining(self, node_id: str, draining: Draining) -> None:
        """Record that a node is about to leave all its jobs on its own initiative."""
        self._note_wish(node_id, draining)
        log.warning("node %s is about to leave: %s", node_id, draining.reason)
        self._record(NodeDrained(node_id, draining.reason, draining.left_ms))

    def _note_wish(self, node_id: str, draining: Draining) -> None:
        now_ms, known = self._clock.now_ms(), self._wishes.get(node_id)
        at_ms = known.at_ms if known is not None else now_ms
        self._wishes[node_id] = Drain(draining.reason, now_ms + draining.left_ms, at_ms)

    def note_lost(self, node_id: str) -> None:
        """Forget the drain that a lost node had announced itself."""
        self._wishes.pop(node_id, None)

    def _record(self, event: NodeDrained | NodeUndrained) -> None:
        """Record the event in the history of every job in which the node takes part."""
        for state in self._engine.jobs.states:
            if state.membership.ended is None and takes_part(state, event.node_id):
                self._engine.history.note(state.membership.rdzv_id, (event,))


def takes_part(state: State, node_id: str) -> bool:
    """Return whether a node is in a job or chosen for it."""
    return state.present(node_id) or node_id in state.placed

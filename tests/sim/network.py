"""The network: a connection delivers messages in order each way, with random delays, until it ends.

Between connections there is no order, so a message on an old one may arrive after the Hello of the
next. A direction that is cut delivers nothing, and neither end notices; messages under way arrive
when the cut is mended, if the receiver still exists. The same holds for a connection's end.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from rdzv.errors import RendezvousError
from rdzv.structs import struct
from tests.sim.loop import Agenda

if TYPE_CHECKING:
    from tests.sim.cluster import Server

UP, DOWN = "up", "down"


@struct(frozen=True)
class End:
    """The end of a connection, with the error that explains it, if it was ended in order."""

    error: RendezvousError | None = None


class Peer(Protocol):
    """The node's end of a connection."""

    name: str

    def take(self, connection: Connection, message: Any) -> None: ...


class Network:
    """Latency, cuts, and every open connection."""

    def __init__(self, agenda: Agenda, random: Random) -> None:
        self.agenda = agenda
        self.random = random
        self.latencies_ms: tuple[int, ...] = (1, 2, 5)
        self.cuts: set[tuple[str, int, str]] = set()
        """Which node is cut off from which server, and in which direction."""
        self.connections: list[Connection] = []

    def connect(self, node: Peer, server: Server) -> Connection | None:
        """Open a connection; None if the server cannot be reached."""
        if not server.accepting or self.is_cut(node.name, server.number):
            return None
        connection = Connection(self, node, server)
        self.connections.append(connection)
        return connection

    def is_cut(self, name: str, server: int) -> bool:
        return (name, server, UP) in self.cuts or (name, server, DOWN) in self.cuts

    def cut(self, name: str, server: int, direction: str) -> None:
        self.cuts.add((name, server, direction))

    def mend(self, name: str, server: int) -> None:
        """Mend a cut; messages under way arrive."""
        self.cuts -= {(name, server, UP), (name, server, DOWN)}
        for connection in list(self.connections):
            if connection.node.name == name and connection.server.number == server:
                connection.flush()

    def latency_ms(self) -> int:
        return self.random.choice(self.latencies_ms)


class Connection:
    """One connection between a node and a server."""

    def __init__(self, network: Network, node: Peer, server: Server) -> None:
        self.network = network
        self.node = node
        self.server = server
        self.process = server.process
        """The life of the server that it leads to."""
        self.node_open = True
        self.server_open = True
        self.heard_ms = network.agenda.now_ms
        """When a message last got through to the server."""
        self._reset = False
        self._has_gap = False
        """Whether messages to the server were lost, so none that was sent after them arrives."""
        self._last_ms = {UP: 0, DOWN: 0}
        self._stalled: dict[str, deque[Any]] = {UP: deque(), DOWN: deque()}

    # -------------------------------------------------------------- sending

    def up(self, message: Any) -> None:
        """Send a message to the server."""
        if self.node_open:
            self._carry(UP, message)

    def down(self, message: Any) -> None:
        """Send a message to the node."""
        if self.server_open:
            self._carry(DOWN, message)

    def end_by_node(self, *, in_order: bool = True) -> None:
        """End it; if in order, messages under way still arrive."""
        if self.node_open:
            if not in_order:
                self._has_gap = bool(self._stalled[UP])
                self._stalled[UP].clear()
                self._last_ms[UP] = -1
            self._carry(UP, End())
            self.node_open = False
            self._forget()

    def end_by_server(self, error: RendezvousError | None = None) -> None:
        if self.server_open:
            self._carry(DOWN, End(error))
            self.server_open = False
            self._forget()

    def die_with_node(self) -> None:
        """Lose the node's machine: none of its messages ever reaches the server."""
        self.node_open = False
        self._forget()

    def die_with_server(self, *, silent: bool, reset: bool = False) -> None:
        """Lose the server's process; its kernel notifies the node, unless the machine is gone, too.

        With `reset`, messages under way to the node are lost, because the server had not read
        everything that arrived.
        """
        self._reset = reset
        if not silent:
            self.end_by_server()
        self.server_open = False
        self._forget()

    # -------------------------------------------------------------- receiving

    def _carry(self, direction: str, message: Any) -> None:
        agenda = self.network.agenda
        at_ms = max(self._last_ms[direction], agenda.now_ms + self.network.latency_ms())
        self._last_ms[direction] = at_ms
        agenda.after(at_ms - agenda.now_ms, lambda: self._arrive(direction, message))

    def _arrive(self, direction: str, message: Any) -> None:
        if direction == UP and self._has_gap and not isinstance(message, End):
            return
        stalled = self._stalled[direction]
        if stalled or (self.node.name, self.server.number, direction) in self.network.cuts:
            stalled.append(message)
        else:
            self._deliver(direction, message)

    def flush(self) -> None:
        """Deliver everything that was held up."""
        for direction, stalled in self._stalled.items():
            while stalled:
                self._deliver(direction, stalled.popleft())

    def _deliver(self, direction: str, message: Any) -> None:
        if direction == DOWN:
            if self.node_open and (isinstance(message, End) or not self._reset):
                self.node.take(self, message)
        elif self.server_open and self.server.process is self.process:
            if not isinstance(message, End):
                self.heard_ms = self.network.agenda.now_ms
            self.server.take(self, message)

    def _forget(self) -> None:
        if not self.node_open and not self.server_open:
            connections = self.network.connections
            if self in connections:
                connections.remove(self)

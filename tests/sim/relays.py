"""Relays between nodes and servers: they die, stand still, and are cut off from their server.

A node's stream may lead through one (`Connection.relay`). What the server does then is its own code
(`Connections.detach`, told that the way was cut, and `Leases.excuse`). When it does so is the model
of `rdzv.server.rpc.relayed_streams` here: at once when a relay's call ends; a silent relay is
excused from `QUIET_MS` on, and then cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rdzv.server.rpc.relayed_streams import SILENT_MOST_MS
from tests.sim.cluster import QUIET_MS
from tests.sim.network import Connection

if TYPE_CHECKING:
    from tests.sim.world import World

CUT_MS = SILENT_MOST_MS // QUIET_MS * QUIET_MS
GIVES_UP_MS = 10_000
"""When a relay notices that its server is not reached any more."""


class Relays:
    """The relays of one history."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._random = Random(f"{world.seed}, which relay")
        self._count = count

    def choose(self) -> int | None:
        """Return the relay that a node's next stream goes through; None if through none."""
        if not self._count:
            return None
        still = self._world.network.still
        return self._random.choice([None, *(n for n in range(self._count) if n not in still)])

    def dies(self, chance: Random) -> None:
        """Its process ends, or its machine; another is there at once."""
        silent = chance.random() < 0.5
        for connection in self._carried(chance.randrange(self._count)):
            connection.lost = True
            if silent:
                self._excuse_and_cut(connection)
                self._world.notice_silence_later(connection)
            else:
                self._after(self._latency_ms(), partial(connection.server.cut, connection))
                self._after(self._latency_ms(), connection.end_at_node)

    def stands_still(self, chance: Random) -> None:
        """It carries nothing for a while, and then all that has waited."""
        self._hold_up(chance, gives_up_ms=None)

    def is_split(self, chance: Random) -> None:
        """It reaches its nodes and not its server, and ends their streams once it knows."""
        self._hold_up(chance, gives_up_ms=GIVES_UP_MS)

    def heal(self) -> None:
        """Let all of them carry again."""
        for relay in sorted(self._world.network.still):
            self._go_on(relay)

    def _hold_up(self, chance: Random, gives_up_ms: int | None) -> None:
        relay = chance.randrange(self._count)
        network, carried = self._world.network, self._carried(relay)
        if relay in network.still:
            return
        network.still.add(relay)
        for connection in carried:
            self._excuse_and_cut(connection)
            if gives_up_ms is None:
                self._world.notice_silence_later(connection)
            else:
                self._after(gives_up_ms, partial(self._give_up_if_still, connection))
        self._after(chance.choice((300, 2_000, 4_000, 8_000, 40_000)), partial(self._go_on, relay))

    def _excuse_and_cut(self, connection: Connection) -> None:
        for at_ms in range(QUIET_MS, CUT_MS, QUIET_MS):
            self._after(at_ms, partial(self._if_silent, connection, connection.server.excuse))
        self._after(CUT_MS, partial(self._if_silent, connection, connection.server.cut))

    def _if_silent(self, connection: Connection, do: Callable[[Connection], None]) -> None:
        if connection.lost or connection.relay in self._world.network.still:
            do(connection)

    def _give_up_if_still(self, connection: Connection) -> None:
        if connection.relay in self._world.network.still:
            connection.lost = True
            connection.end_at_node()

    def _go_on(self, relay: int) -> None:
        self._world.network.still.discard(relay)
        for connection in self._carried(relay):
            if connection.server_open:
                connection.flush()
            else:
                # Its call has ended meanwhile, and all streams in it with it.
                connection.lost = True
                connection.end_at_node()

    def _carried(self, relay: int) -> list[Connection]:
        return [one for one in self._world.network.connections if one.relay == relay]

    def _latency_ms(self) -> int:
        return self._random.choice(self._world.network.latencies_ms)

    def _after(self, in_ms: int, do: Callable[[], None]) -> None:
        self._world.agenda.after(in_ms, do)

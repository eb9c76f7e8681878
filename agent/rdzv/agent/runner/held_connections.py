"""Holds workers' connections open until their peers have left the round as well.

gloo loses an operation if the peer's end of its connection is reset while gloo is sending, and then
waits for that operation until the group's timeout. So peers must not see a worker's connections
close before their own collectives have been interrupted. Each worker sends duplicates of its
connections to a socket that is never read: while they are in its queue, the kernel keeps them open,
even if the worker is killed. The runner never receives them, because it has no descriptors to spare
for them and should not trust a worker's descriptors.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

HELD_S = 10.0
"""How long a worker's connections outlive the worker. The server notifies its peers much sooner."""
MAX_ENDED = 256
"""The maximum number of dead workers whose connections are held."""


class ConnectionQueue:
    """Holds the connections of one worker."""

    def __init__(self) -> None:
        """Create the queue. `theirs` is the end to send to the worker. May raise `OSError`."""
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)

    def drop(self) -> None:
        """Release all connections."""
        with suppress(OSError):
            # recv() has no room for descriptors, so the kernel closes them.
            while self._ours.recv(1):
                pass

    def close(self) -> None:
        """Release all connections and accept no more."""
        self._ours.close()


class HeldConnections:
    """Holds the queues of workers that have ended, each for `HELD_S` after the worker's end."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, ConnectionQueue]] = deque()

    def take(self, queue: ConnectionQueue) -> None:
        """Hold the connections of a worker that has ended or is about to."""
        if len(self._ended) == MAX_ENDED:
            self._ended.popleft()[1].close()
        self._ended.append((time.monotonic() + HELD_S, queue))

    def wake_times(self) -> Iterator[float]:
        """Yield the time at which `do_due` has something to do, if any."""
        if self._ended:
            yield self._ended[0][0]

    def do_due(self, now: float) -> None:
        """Release the queues that have been held long enough."""
        while self._ended and self._ended[0][0] <= now:
            self._ended.popleft()[1].close()

"""Holds workers' connections open until their peers have left the round as well.

gloo loses an operation if the peer's end of its connection is reset while gloo is sending, and then
waits for that operation until the group's timeout. So peers must not see a worker's connections
close before their own collectives have been interrupted. Each worker sends duplicates of its
connections to a socket that is never read: while they are in its queue, the kernel keeps them open,
even if the worker is killed.

The queues belong to a process of their own, since whoever closes one closes a worker's descriptors,
which may take as long as the worker likes (`receive_data` says why). The runner waits for nothing
from it, and kills it if it hangs. A worker gets a queue for each round.
"""

from __future__ import annotations

import select
import socket
import time
from functools import partial

from .channel import Channel
from .child_exits import start_linked
from .spawn import own_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .channel import Link
    from .child_exits import Child
    from .runner import Runner

HELD_S = 10.0
"""How long a worker's connections outlive the worker. The server notifies its peers much sooner."""


class HeldConnections:
    """Makes the workers' queues, and closes those of ended workers `HELD_S` after their end."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._holder: tuple[Child, Link] | None = None
        self._queues = 0

    def add(self) -> tuple[int, socket.socket]:
        """Make a queue. Returns its number, and the end to send to the worker.

        Raises `OSError` if the process that holds the queues cannot be started or does not read.
        """
        if self._holder is None:
            name, program_of = "the process that holds connections", partial(own_program, "--hold")
            self._holder = start_linked(
                self._runner, name, program_of, self._end_holder, lambda _: None, self._lose
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._queues += 1
        # Sent before the worker has its end, so that nothing is ever closed here.
        self._tell({"hold": self._queues}, ours.detach())
        if self._holder is None:
            theirs.close()
            raise OSError("the process that holds connections does not answer")
        return self._queues, theirs

    def close(self, queue: int) -> None:
        self._tell({"close": queue})

    def close_later(self, queue: int) -> None:
        self._runner.loop.call_at(time.monotonic() + HELD_S, partial(self.close, queue))

    def _tell(self, message: Mapping[str, int], *fds: int) -> None:
        if self._holder is not None:
            _, link = self._holder
            link.tell(message, *fds)
            if link.has_unsent:
                self._lose()

    def _lose(self, _error: Exception | None = None) -> None:
        if self._holder is not None:
            holder, link = self._holder
            self._holder = None
            link.close()
            holder.kill()

    def _end_holder(self, child: Child, _code: int) -> None:
        if self._holder is not None and child is self._holder[0]:
            self._lose()


def hold(fd: int) -> None:
    """Run as the process that holds the queues, until the runner's end of a socket is closed."""
    channel = Channel(socket.socket(fileno=fd))
    queues: dict[int, socket.socket] = {}
    while True:
        select.select([channel], [], [])
        try:
            channel.receive()
        except EOFError:
            return
        while (message := channel.next_message()) is not None:
            match message:
                case {"hold": int(number)}:
                    if (queue := channel.take_fd()) is not None:
                        queues[number] = socket.socket(fileno=queue)
                case {"close": int(number)} if number in queues:
                    queues.pop(number).close()

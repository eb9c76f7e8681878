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
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from .channel import Channel
from .spawn import Program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .child_exits import Child
    from .runner import Runner

HELD_S = 10.0
"""How long a worker's connections outlive the worker. The server notifies its peers much sooner."""

_PROGRAM = Path(__file__).with_name("__main__.py")


class HeldConnections:
    """Makes the workers' queues, and closes those of ended workers `HELD_S` after their end."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._holder: Child | None = None
        self._channel: Channel | None = None
        """The socket to the process that holds the queues, or None if there is none."""
        self._queues = 0

    def add(self) -> tuple[int, socket.socket]:
        """Make a queue. Returns its number, and the end to send to the worker.

        Raises:
            OSError: the process that holds the queues cannot be started or does not read.
        """
        if self._channel is None:
            self._start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._queues += 1
        # Sent before the worker has its end, so that nothing is ever closed here.
        self._tell({"hold": self._queues}, ours.detach())
        if self._channel is None:
            theirs.close()
            raise OSError("the process that holds connections does not answer")
        return self._queues, theirs

    def close(self, queue: int) -> None:
        self._tell({"close": queue})

    def close_later(self, queue: int) -> None:
        """Hold the connections of a worker that has ended or is about to, for a while."""
        self._runner.loop.call_at(time.monotonic() + HELD_S, partial(self.close, queue))

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = str(theirs.fileno())
            argv = (sys.executable, "-I", "-S", str(_PROGRAM), "--hold", fd)
            program = Program(argv=argv, env={}, pass_fds=(theirs.fileno(),))
            name = "the process that holds connections"
            try:
                self._holder = self._runner.children.start(name, program, self._end, spared=True)
            except OSError:
                ours.close()
                raise
        self._channel = Channel(ours)

    def _tell(self, message: dict[str, int], *fds: int) -> None:
        channel, holder = self._channel, self._holder
        if channel is None or holder is None:
            return
        with suppress(OSError):
            channel.send(message, *fds)
        if channel.has_unsent:
            self._channel = None
            channel.close()
            holder.kill()

    def _end(self, child: Child, _code: int) -> None:
        if child is self._holder:
            self._holder = None
            if self._channel is not None:
                self._channel.close()
                self._channel = None


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

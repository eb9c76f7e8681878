"""One handler's messages to the server, from its first join to its final message.

A `Talk` holds no reference to the handler, so a handler that is dropped without `shutdown` is
garbage-collected, and its node then leaves (`abandon`). The round's store, which torch's agent
holds and calls, also refers to the `Talk`.

All methods may be called from any thread; `news` guards all state.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable

from rdzv.torchrun.participation import Part, Phase
from rdzv.torchrun.signals import watch_signals
from rdzv.torchrun.sync_stream import NodeStream
from rdzv.transport import addresses
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.torchrun")

HANG_UP_TIMEOUT_S = 5.0
"""How long to wait for the server to receive this node's final message."""


class Talk:
    """A node's part in a job, its stream to the server, and the socket for its store."""

    def __init__(self, part: Part, store_socket: addresses.StoreSocket) -> None:
        self.part = part
        self.store_socket = store_socket
        self.news = threading.Condition(threading.RLock())
        self.stream: NodeStream | None = None
        self.hung_up = False
        self.signalled: signal.Signals | None = None
        """The first signal received that ends this torchrun."""
        self._stop_watching: Callable[[], None] = lambda: None
        self._pid = os.getpid()

    def begin(self, stream: NodeStream) -> None:
        """Open the stream. From now on, a signal or the end of the process makes the node leave."""
        self.stream = stream
        stream.open()
        self._stop_watching = watch_signals(self.on_signal)
        atexit.register(self.at_exit)

    def say(self, message: pb.NodeMessage) -> None:
        """Send a message. If there is no stream yet, its Hello will include the message."""
        if self.stream is not None:
            self.stream.say(message)

    @property
    def round_is_over(self) -> bool:
        """Whether the round, or the whole job, is over for this node."""
        return bool(self.part.over) or self.part.ended or self.signalled is not None

    def why_over(self, line: pb.Assignment) -> str:
        """Return why the round in `line` is over for this node, or an empty string if it is not."""
        with self.news:
            part = self.part
            if part.closed is not None:
                return part.closed.reason
            if part.refused is not None:
                return part.refused.message
            return part.over if part.line is line else "a newer one has begun"

    def notify(self) -> None:
        with self.news:
            self.news.notify_all()

    # ------------------------------------------------------------------ the end

    def on_success(self) -> None:
        """Report success: torch's agent is in its exit barrier, so all workers have exited 0."""
        with self.news:
            if self.part.phase is Phase.RUNNING and not self.round_is_over:
                self.say(self.part.say_succeeded())

    def on_signal(self, signum: signal.Signals) -> None:
        """Leave at once, because torch's agent is stopping the workers and will not call again."""
        with self.news:
            self.signalled = self.signalled or signum
            self.leave(pb.Leave.SIGNAL, f"received {signum.name}", workers_gone=False)
            self.news.notify_all()

    def end(self, cause: pb.Leave.Cause.ValueType, reason: str) -> None:
        """Leave, with no workers left, and close the stream once the server has received this."""
        with self.news:
            self.leave(cause, reason, workers_gone=True)
        self.hang_up()

    def at_exit(self) -> None:
        """Leave because the process is ending; its workers are gone by now."""
        self.end(pb.Leave.SIGNAL, "its torchrun has exited")

    def abandon(self) -> None:
        """Leave the run without waiting, as the handler was dropped and no workers remain."""
        if os.getpid() != self._pid:
            # A fork must not act on its parent's messages.
            return
        with self.news:
            self.leave(pb.Leave.SIGNAL, "its handler was dropped", workers_gone=True)
        self.hang_up(wait=False)

    def leave(self, cause: pb.Leave.Cause.ValueType, reason: str, *, workers_gone: bool) -> None:
        """Announce that this node is leaving, if it is in the job. `news` must be held."""
        if self.part.phase is not Phase.APART and not self.part.ended and not self.hung_up:
            self.say(self.part.say_leave(cause, reason, workers_gone=workers_gone))

    def hang_up(self, *, wait: bool = True) -> None:
        """End the stream once the server has received everything. Later calls have no effect.

        With `wait`, `news` must not be held.
        """
        with self.news:
            if self.stream is None or self.hung_up:
                return
            self.hung_up = True
        atexit.unregister(self.at_exit)
        self._stop_watching()
        self.stream.close(HANG_UP_TIMEOUT_S, wait=wait)
        self.store_socket.release()

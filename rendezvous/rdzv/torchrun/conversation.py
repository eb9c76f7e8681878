"""One handler's messages to the server, from its first join to its final message.

A `Part` is the node's state in its job, without threads, clocks or torch. A `Talk` guards it, sends
its messages and acts on its state. It holds no reference to the handler, so a handler that is
dropped without `shutdown` is garbage-collected, and its node then leaves (`abandon`). The round's
store, which torch's agent holds and calls, also refers to the `Talk`.

All methods of `Talk` may be called from any thread; `news` guards all state.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from enum import Enum

from rdzv.core.model import Settings
from rdzv.torchrun.signals import watch_signals
from rdzv.torchrun.sync_stream import NodeStream
from rdzv.transport import addresses
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.torchrun")

HANG_UP_TIMEOUT_S = 5.0
"""How long to wait for the server to receive this node's final message."""


class PartPhase(Enum):
    """How far this node's part in the job has progressed."""

    APART = "it has not joined yet, or has left"
    JOINING = "it has no workers, and wants a place in the next round"
    RUNNING = "it has a place in a round, and workers of that round or none yet"
    SUCCEEDED = "its workers have all exited 0"
    LEAVING = "it has announced that it leaves, and its workers are being stopped"


_BELIEFS = {
    PartPhase.JOINING: pb.Belief.JOINING,
    PartPhase.RUNNING: pb.Belief.RUNNING,
    PartPhase.SUCCEEDED: pb.Belief.SUCCEEDED,
    PartPhase.LEAVING: pb.Belief.LEAVING,
}


class Part:
    """A node's state in a job. Each `say_*` method changes it and returns the message to send."""

    def __init__(
        self,
        rdzv_id: str,
        settings: Settings,
        offer: pb.Offer,
        *,
        refuse_reuse: bool = False,
        secret: str = "",
    ) -> None:
        self.rdzv_id = rdzv_id
        self.phase = PartPhase.APART
        self.line: pb.Assignment | None = None
        """This node's assignment in the last round in which it had a place."""
        self.over = ""
        """Why the round in `line` is over, or an empty string if it is not."""
        self.closed: pb.Closed | None = None
        self.refused: pb.Refused | None = None
        self._run = ""
        self._settings = write(pb.Settings(), settings)
        self._offer = offer
        self._refuse_reuse = refuse_reuse
        self._secret = secret
        self._leave: pb.Leave | None = None
        self._reason = ""

    @property
    def admitted(self) -> bool:
        return bool(self._run)

    @property
    def ended(self) -> bool:
        """Whether the server's answer is final, so that there is no next round for this node."""
        return self.closed is not None or self.refused is not None

    # ------------------------------------------------------------------ messages sent

    def say_join(self, store_port: int) -> pb.NodeMessage:
        """Ask for a place in the next round. No workers of the previous round may be left."""
        self.phase = PartPhase.JOINING
        self._offer.store_port = store_port
        return pb.NodeMessage(join=self._join())

    def say_succeeded(self) -> pb.NodeMessage:
        self.phase = PartPhase.SUCCEEDED
        line = self._line
        succeeded = pb.Succeeded(rdzv_id=self.rdzv_id, run=self._run, round=line.round)
        return pb.NodeMessage(succeeded=succeeded)

    def say_failed(self, failures: Sequence[pb.WorkerFailure]) -> pb.NodeMessage:
        line = self._line
        failed = pb.Failed(rdzv_id=self.rdzv_id, run=self._run, round=line.round, failures=failures)
        return pb.NodeMessage(failed=failed)

    def say_leave(
        self, cause: pb.Leave.Cause.ValueType, reason: str, *, workers_gone: bool
    ) -> pb.NodeMessage:
        """Leave the job. Call this again, with `workers_gone`, when no workers are left."""
        left_round = self.line.round if self.line is not None and workers_gone else None
        leave = pb.Leave(
            rdzv_id=self.rdzv_id,
            run=self._run,
            cause=cause,
            reason=reason,
            left_round=left_round,
        )
        if self._leave is not None:
            # The first cause and reason are kept.
            leave.cause, leave.reason = self._leave.cause, self._leave.reason
        self.phase, self._leave = PartPhase.LEAVING, leave
        return pb.NodeMessage(leave=leave)

    def say_store_failed(self, reason: str) -> pb.NodeMessage:
        """Report that the round's store, which this node hosts, is unusable."""
        failed = pb.StoreHostFailed(
            rdzv_id=self.rdzv_id, run=self._run, round=self._line.round, reason=reason
        )
        return pb.NodeMessage(store_host_failed=failed)

    def beliefs(self) -> list[pb.Belief]:
        """Return this node's full state, for a new stream."""
        if self.phase not in _BELIEFS or self.ended:
            return []
        belief = pb.Belief(phase=_BELIEFS[self.phase], join=self._join())
        if self.line is not None:
            belief.round.CopyFrom(self.line)
        if self._leave is not None:
            belief.leave.CopyFrom(self._leave)
        return [belief]

    @property
    def _line(self) -> pb.Assignment:
        assert self.line is not None, "only a participant reports on a round"
        return self.line

    def _join(self) -> pb.Join:
        joining = self.phase is PartPhase.JOINING
        return pb.Join(
            rdzv_id=self.rdzv_id,
            run=self._run,
            settings=self._settings,
            offer=self._offer,
            left_round=self.line.round if joining and self.line is not None else None,
            refuse_reuse=self._refuse_reuse,
            secret=self._secret,
        )

    # ------------------------------------------------------------------ messages received

    def hear(self, message: pb.ServerMessage) -> None:
        match message.WhichOneof("body"):
            case "joined":
                self._run = message.joined.run
            case "round_completed":
                self._hear_line(message.round_completed)
            case "round_ended":
                self._hear_end(message.round_ended)
            case "closed":
                self.closed = message.closed
            case "refused":
                self.refused = message.refused
            case "waiting" if message.waiting.reason != self._reason:
                self._reason = message.waiting.reason
                log.info("%s: %s", self.rdzv_id, self._reason)

    def _hear_line(self, line: pb.Assignment) -> None:
        """Take a place in a round if this node is joining and has not been in a later one."""
        if self.phase is not PartPhase.JOINING or (self.line and line.round <= self.line.round):
            return
        self.phase, self.line, self.over = PartPhase.RUNNING, line, ""
        self._run = line.run
        log.info(
            "round %d: GROUP_RANK %d of %d, MASTER %s:%d",
            line.round,
            line.group_rank,
            line.group_world_size,
            line.master_addr,
            line.master_port,
        )

    def _hear_end(self, end: pb.RoundOver) -> None:
        if self.line is None or end.round != self.line.round or self.over:
            return
        cause = pb.Cause.Name(end.cause).lower().replace("_", " ")
        self.over = f"{cause}: {end.reason}"
        if self.phase is not PartPhase.JOINING:
            log.warning("round %d ended (%s)", end.round, self.over)


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
            if self.part.phase is PartPhase.RUNNING and not self.round_is_over:
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
        if self.part.phase is not PartPhase.APART and not self.part.ended and not self.hung_up:
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

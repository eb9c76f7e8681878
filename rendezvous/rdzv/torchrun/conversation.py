"""One handler's messages to the server, from its first join to its final message.

A `Talk` holds no reference to the handler, so a handler that is dropped without `shutdown` is
garbage-collected, and its node then leaves (`abandon`). The round's store, which torch's agent
holds and calls, also refers to the `Talk`.

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
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousConnectionError
from rdzv.torchrun.plugin_options import PluginOptions
from rdzv.torchrun.signals import watch_signals
from rdzv.transport import addresses
from rdzv.transport.endpoints import Endpoint, is_loopback
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb

if TYPE_CHECKING:
    from rdzv.torchrun.sync_stream import NodeStream

log = logging.getLogger("rdzv.torchrun")

STOP_TIMEOUT_MS = 30_000
"""The time between SIGTERM and SIGKILL when torch's agent restarts workers. It ignores
--shutdown-timeout there (`LocalElasticAgent._stop_workers`).
"""
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


class Talk:
    """A node's state in a job, its stream to the server, and the socket for its store."""

    def __init__(self, options: PluginOptions) -> None:
        self.options = options
        self.phase = PartPhase.APART
        self.line: pb.Assignment | None = None
        """This node's assignment in the last round in which it had a place."""
        self.over = ""
        """Why the round in `line` is over, or an empty string if it is not."""
        self.closed: pb.Closed | None = None
        self.refused: pb.Refused | None = None
        self.run = ""
        """The job's run, or an empty string if this node was never admitted."""
        self.news = threading.Condition(threading.RLock())
        self.stream: NodeStream | None = None
        self.hung_up = False
        self.signalled: signal.Signals | None = None
        """The first signal received that ends this torchrun."""
        address = options.local_addr
        self._offer = pb.Offer(
            address=address,
            host_name=addresses.reachable_host_name(address),
            machine=addresses.machine_id(),
            local_world_size=options.local_world_size,
            role=options.role,
            topology=options.topology,
            can_host_store=True,
            shutdown_timeout_ms=STOP_TIMEOUT_MS,
        )
        self.store_socket = addresses.StoreSocket(loopback_only=self._loopback_only)
        self._leave: pb.Leave | None = None
        self._reason = ""
        self._stop_watching: Callable[[], None] = lambda: None
        self._pid = os.getpid()

    @property
    def ended(self) -> bool:
        """Whether the server's answer is final, so that there is no next round for this node."""
        return self.closed is not None or self.refused is not None

    @property
    def round_is_over(self) -> bool:
        """Whether the round, or the whole job, is over for this node."""
        return bool(self.over) or self.ended or self.signalled is not None

    def why_over(self, line: pb.Assignment) -> str:
        """Return why the round in `line` is over for this node, or an empty string if it is not."""
        with self.news:
            if self.closed is not None:
                return self.closed.reason
            if self.refused is not None:
                return self.refused.message
            return self.over if self.line is line else "a newer one has begun"

    def notify(self) -> None:
        with self.news:
            self.news.notify_all()

    # ------------------------------------------------------------------ messages sent

    def begin(self, stream: NodeStream) -> None:
        """Open the stream. From now on, a signal or the end of the process makes the node leave."""
        self.stream = stream
        stream.open()
        self._stop_watching = watch_signals(self.on_signal)
        atexit.register(self.at_exit)

    def join(self) -> None:
        """Ask for a place in the next round. No workers of the previous round may be left."""
        self._offer.store_port = self.store_socket.port
        self.phase = PartPhase.JOINING
        self._say(pb.NodeMessage(join=self._join()))

    def place(self, server: Endpoint) -> str:
        """Offer this node's end of the open connection to a server, unless an address is given.

        Returns the address that is offered.
        """
        if self.options.local_addr:
            return self.options.local_addr
        address = addresses.own_address(server)
        host_name = addresses.reachable_host_name(address)
        with self.news:
            # While a round runs, it goes on with what was offered for it.
            if self.phase is PartPhase.JOINING:
                self._offer.address, self._offer.host_name = address, host_name
                self.store_socket.confine(loopback_only=self._loopback_only)
                try:
                    self._offer.store_port = self.store_socket.port
                except OSError as error:
                    reason = f"no port can be bound for the round's store: {error}"
                    raise RendezvousConnectionError(reason) from error
        return address

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

    def report_failures(self, failures: Sequence[pb.WorkerFailure]) -> None:
        """Report the failures that end this torchrun. `news` must be held."""
        failed = pb.Failed(
            rdzv_id=self.options.rdzv_id,
            run=self.run,
            round=self._round,
            failures=failures,
        )
        self._say(pb.NodeMessage(failed=failed))

    def report_store(self, reason: str) -> None:
        """Report that this node's store for the round is unusable. `news` must be held."""
        failed = pb.StoreHostFailed(
            rdzv_id=self.options.rdzv_id, run=self.run, round=self._round, reason=reason
        )
        self._say(pb.NodeMessage(store_host_failed=failed))

    def _say(self, message: pb.NodeMessage) -> None:
        """Send a message. If there is no stream yet, its Hello will include the message."""
        if self.stream is not None:
            self.stream.say(message)

    def _join(self) -> pb.Join:
        joining = self.phase is PartPhase.JOINING
        return pb.Join(
            rdzv_id=self.options.rdzv_id,
            run=self.run,
            settings=write(pb.Settings(), self.options.settings),
            offer=self._offer,
            left_round=self._round if joining and self.line is not None else None,
            refuse_reuse=self.options.refuse_reuse,
            secret=self.options.secret,
        )

    @property
    def _round(self) -> int:
        assert self.line is not None, "only a participant reports on a round"
        return self.line.round

    @property
    def _loopback_only(self) -> bool:
        return is_loopback(self._offer.address) and not self._offer.host_name

    # ------------------------------------------------------------------ messages received

    def hear(self, message: pb.ServerMessage) -> None:
        match message.WhichOneof("body"):
            case "joined":
                self.run = message.joined.run
            case "round_completed":
                self._receive_line(message.round_completed)
            case "round_ended":
                self._hear_end(message.round_ended)
            case "closed":
                self.closed = message.closed
            case "refused":
                self.refused = message.refused
            case "waiting" if message.waiting.reason != self._reason:
                self._reason = message.waiting.reason
                log.info("%s: %s", self.options.rdzv_id, self._reason)

    def _receive_line(self, line: pb.Assignment) -> None:
        if self.phase is not PartPhase.JOINING or (self.line and line.round <= self.line.round):
            return
        self.phase, self.line, self.over = PartPhase.RUNNING, line, ""
        self.run = line.run
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

    # ------------------------------------------------------------------ the end

    def on_success(self) -> None:
        """Report success: torch's agent is in its exit barrier, so all workers have exited 0."""
        with self.news:
            if self.phase is PartPhase.RUNNING and not self.round_is_over:
                self.phase = PartPhase.SUCCEEDED
                succeeded = pb.Succeeded(
                    rdzv_id=self.options.rdzv_id, run=self.run, round=self._round
                )
                self._say(pb.NodeMessage(succeeded=succeeded))

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
        """Announce that this node is leaving, if it is in the job. `news` must be held.

        Call this again, with `workers_gone`, when no workers are left.
        """
        if self.phase is PartPhase.APART or self.ended or self.hung_up:
            return
        if self._leave is not None:
            # The first cause and reason are kept.
            cause, reason = self._leave.cause, self._leave.reason
        self.phase = PartPhase.LEAVING
        self._leave = pb.Leave(
            rdzv_id=self.options.rdzv_id,
            run=self.run,
            cause=cause,
            reason=reason,
            left_round=self._round if workers_gone and self.line is not None else None,
        )
        self._say(pb.NodeMessage(leave=self._leave))

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

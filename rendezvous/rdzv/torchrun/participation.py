"""One node's part in a job: the messages it sends and receives.

It uses no threads, clocks or torch. The owner of a `Part` guards it, sends its messages, and acts
on its state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum

from rdzv.core.model import Settings
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.torchrun")


class Phase(Enum):
    """How far this node's part in the job has progressed."""

    APART = "it has not joined yet, or has left"
    JOINING = "it has no workers, and wants a place in the next round"
    RUNNING = "it has a place in a round, and workers of that round or none yet"
    SUCCEEDED = "its workers have all exited 0"
    LEAVING = "it has announced that it leaves, and its workers are being stopped"


_BELIEFS = {
    Phase.JOINING: pb.Belief.JOINING,
    Phase.RUNNING: pb.Belief.RUNNING,
    Phase.SUCCEEDED: pb.Belief.SUCCEEDED,
    Phase.LEAVING: pb.Belief.LEAVING,
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
        self.phase = Phase.APART
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
        self.phase = Phase.JOINING
        self._offer.store_port = store_port
        return pb.NodeMessage(join=self._join())

    def say_succeeded(self) -> pb.NodeMessage:
        self.phase = Phase.SUCCEEDED
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
        self.phase, self._leave = Phase.LEAVING, leave
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
        joining = self.phase is Phase.JOINING
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
        if self.phase is not Phase.JOINING or (self.line and line.round <= self.line.round):
            return
        self.phase, self.line, self.over = Phase.RUNNING, line, ""
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
        if self.phase is not Phase.JOINING:
            log.warning("round %d ended (%s)", end.round, self.over)

"""What this node says to the server and is told, as messages of the wire.

`rdzv.transport.wire` converts by the names of fields. No other part of the agent handles protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from rdzv.agent.core import commands
from rdzv.agent.core.model import AgentState, Phase
from rdzv.agent.core.server_contact import snapshots_held
from rdzv.agent.core.stopping import rejoin
from rdzv.agent.server_link.node_drain import NodeDrain
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.fleet.node_resources import FailingCheck
from rdzv.core.model import Assignment, Offer
from rdzv.core.root_cause import earliest_failures
from rdzv.messages import (
    Announcement,
    Arrivals,
    Holding,
    Hung,
    LogPiece,
    Progress,
    SnapshotsHeld,
    WorkersStarted,
)
from rdzv.structs import replace
from rdzv.transport.wire import bodies, read, sendable, write
from rdzv.v1 import rdzv_pb2 as pb


def belief(state: AgentState, joining: pb.Join, now_ms: int) -> pb.Belief:
    """Encode everything that this node believes about its job, with the join that it would send."""
    believed = pb.Belief(phase=pb.Belief.Phase.Value(state.phase.name), join=joining)
    if state.failures and state.phase is not Phase.JOINING:
        # A node that is waiting for a round has already included its failures in its join.
        said = commands.SayFailed(state.run, 0, earliest_failures(state.evidence))
        believed.failures.extend(write(pb.Failed(), said, now_ms).failures)
    if state.assignment is not None:
        write(believed.round, state.assignment, now_ms)
        believed.store_host_failed = sendable(state.store_host_failed)
    if state.leaving is not None:
        left_round = state.left_round if state.workers_gone else None
        believed.leave.rdzv_id = state.job.rdzv_id
        write(believed.leave, commands.SayLeave(state.run, state.leaving, left_round))
    return believed


def join(
    say: commands.SayJoin | None,
    state: AgentState,
    offer: Offer,
    now_ms: int,
    *,
    refuse_reuse: bool,
    secret: str = "",
    preparing: bool = False,
) -> pb.Join:
    """Encode a request for a place, including this node's offer.

    Without a request it is the one for a belief, of which a node with workers says no more than
    the run.
    """
    if say is None:
        joining = state.phase is Phase.JOINING
        say = rejoin(state) if joining else commands.SayJoin(state.run, None, ())
    message = pb.Join(
        rdzv_id=state.job.rdzv_id,
        refuse_reuse=refuse_reuse,
        fenced_age_ms=now_ms - (state.stopping_since_ms or now_ms) if say.fenced else 0,
        secret=secret,
        # A node that has left a round is awaited by the others already.
        preparing=preparing and say.left_round is None,
    )
    write(message.settings, state.job.settings)
    write(message.offer, offer)
    message.snapshots.extend(write(pb.SnapshotsHeld(), snapshots_held(state)).snapshots)
    return write(message, replace(say, failures=earliest_failures(say.failures)), now_ms)


_BODIES: dict[type, str] = {
    commands.SayFailed: "failed",
    commands.SaySucceeded: "succeeded",
    commands.SayLeave: "leave",
    commands.SayStuck: "stuck",
    commands.SayStoreHostFailed: "store_host_failed",
    SnapshotsHeld: "snapshots_held",
    Progress: "progress",
    WorkersStarted: "workers_started",
    Arrivals: "arrivals",
    Hung: "hung",
}

Statement: TypeAlias = (
    commands.SayFailed
    | commands.SaySucceeded
    | commands.SayLeave
    | commands.SayStuck
    | commands.SayStoreHostFailed
    | SnapshotsHeld
    | Progress
    | WorkersStarted
    | Arrivals
    | Hung
)
"""What a job's driver reports about its workers."""


def report(say: Statement, rdzv_id: str, now_ms: int) -> pb.NodeMessage:
    """Encode a report about a job's workers."""
    if isinstance(say, commands.SayFailed):
        say = replace(say, failures=earliest_failures(say.failures))
    message = pb.NodeMessage()
    body = getattr(message, _BODIES[type(say)])
    body.rdzv_id = rdzv_id
    write(body, say, now_ms)
    return message


def log_piece(piece: LogPiece) -> pb.NodeMessage:
    return pb.NodeMessage(log_piece=write(pb.LogPiece(), piece))


def stacks(
    request: int, workers: Iterable[WorkerStack], *, last: bool, error: str
) -> pb.NodeMessage:
    message = pb.Stacks(request=request, last=last, error=sendable(error))
    for stack in workers:
        write(message.workers.add(), stack)
    return pb.NodeMessage(stacks=message)


def holdings(held: Iterable[Holding]) -> pb.Holdings:
    """Encode the submitted jobs that may still have processes on this node."""
    return pb.Holdings(holdings=[write(pb.Holding(), one) for one in held])


def health(failing: Iterable[FailingCheck]) -> pb.Health:
    """Encode this node's failing health checks."""
    return pb.Health(failing=[write(pb.FailingCheck(), one) for one in failing])


def declined(rdzv_id: str, run: str, reason: str, *, passing: bool = False) -> pb.NodeMessage:
    """Encode that this node declines a job. `passing` means that it may accept the job later."""
    return pb.NodeMessage(
        declined=pb.Declined(rdzv_id=rdzv_id, run=run, reason=sendable(reason), passing=passing)
    )


def draining(drain: NodeDrain) -> pb.Draining | None:
    """Encode this node's drain and its own wish. Returns None if there is neither."""
    if drain.present is None:
        return None
    said = pb.Draining(number=drain.told.number if drain.told is not None else 0)
    if (wished := drain.wished) is not None:
        said.own, said.reason = True, sendable(wished.reason)
        said.left_ms = drain.left_ms(wished)
    return said


def gone(completed: Assignment) -> pb.NodeMessage:
    """Encode a leave that gives back the seat in a job that this node has left."""
    return pb.NodeMessage(
        leave=pb.Leave(
            rdzv_id=completed.rdzv_id,
            run=completed.run,
            cause=pb.Leave.SIGNAL,
            reason="it left before it received the round",
            left_round=completed.round,
        )
    )


_ANNOUNCED: dict[str, Any] = {
    body: kind for kind, body in bodies(pb.ServerMessage, Announcement).items()
}


def announcement(message: pb.ServerMessage, now_ms: int) -> Announcement | None:
    """Decode what the server says, or return None for what only later agents know."""
    body = str(message.WhichOneof("body"))
    kind = _ANNOUNCED.get(body)
    if kind is None:
        return None
    told: Announcement = read(kind, getattr(message, body), now_ms=now_ms)
    return told

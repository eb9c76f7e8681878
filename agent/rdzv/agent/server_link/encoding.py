"""What this node says to the server and is told, as messages of the wire.

`rdzv.transport.wire` converts by the names of fields. No other part of the agent handles protobuf.
"""

from __future__ import annotations

from typing import Any

from rdzv.agent.core import commands
from rdzv.agent.core.model import AgentState, Phase
from rdzv.agent.core.server_contact import snapshots_held
from rdzv.agent.core.stopping import rejoin, said_leave
from rdzv.core.commands import Fail
from rdzv.core.model import Offer, StandbyState
from rdzv.core.root_cause import earliest_failures
from rdzv.messages import (
    SAID,
    Announcement,
    Report,
    Said,
)
from rdzv.structs import replace
from rdzv.transport.wire import bodies, read, sendable, write
from rdzv.v1 import rdzv_pb2 as pb


def belief(state: AgentState, joining: pb.Join, now_ms: int) -> pb.Belief:
    """Encode everything that this node believes about its job, with the join that it would send."""
    believed = pb.Belief(phase=pb.Belief.Phase.Value(state.phase.name), join=joining)
    if state.failures and state.phase is not Phase.JOINING:
        # A node that is waiting for a round has already included its failures in its join.
        failed = Fail(*state.speaker, state.run, 0, state.evidence)
        believed.failures.extend(report(failed, now_ms=now_ms).failed.failures)
    if state.assignment is not None:
        write(believed.round, state.assignment, now_ms)
        believed.store_host_failed = sendable(state.store_host_failed)
    if state.leaving is not None:
        left_round = state.left_round if state.workers_gone else None
        leave = said_leave(state, state.leaving, left_round)
        believed.leave.CopyFrom(report(leave, state.job.rdzv_id).leave)
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
    """Without a request it is for a belief, of which a node with workers says only the run."""
    if say is None:
        joining = state.phase is Phase.JOINING
        say = rejoin(state) if joining else commands.SayJoin(state.run, None, ())
    message = pb.Join(
        rdzv_id=state.job.rdzv_id,
        refuse_reuse=refuse_reuse,
        fenced_age_ms=now_ms - (state.stopping_since_ms or now_ms) if say.fenced else 0,
        secret=secret,
        # A node that has left a round is awaited by the others already.
        preparing=(preparing and say.left_round is None)
        or say.standby.state is StandbyState.STARTING,
    )
    write(message.settings, state.job.settings)
    write(message.offer, offer)
    message.snapshots.extend(write(pb.SnapshotsHeld(), snapshots_held(state)).snapshots)
    return write(message, replace(say, failures=earliest_failures(say.failures)), now_ms)


_BODIES = bodies(pb.NodeMessage, Report) | {kind: body for body, kind in SAID.items()}


def report(say: Said | Report, rdzv_id: str = "", now_ms: int = 0) -> pb.NodeMessage:
    if isinstance(say, Fail):
        say = replace(say, failures=earliest_failures(say.failures))
    message = pb.NodeMessage()
    body = getattr(message, _BODIES[type(say)])
    body.SetInParent()
    if rdzv_id:
        body.rdzv_id = rdzv_id
    write(body, say, now_ms)
    return message


_ANNOUNCED: dict[str, Any] = {
    body: kind for kind, body in bodies(pb.ServerMessage, Announcement).items()
}


def announcement(message: pb.ServerMessage, now_ms: int) -> Announcement | None:
    """Decode what the server says, or return None for what only later agents know."""
    body = str(message.WhichOneof("body"))
    kind = _ANNOUNCED.get(body)
    if kind is None:
        return None
    received: Announcement = read(kind, getattr(message, body), now_ms=now_ms)
    return received

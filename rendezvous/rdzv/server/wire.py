"""Converts messages to checked values, and values to messages, where fields alone do not do.

`rdzv.transport.wire` converts by the names of fields, within their bounds. Here are the bounds that
several fields have together, and what a belief means. An invalid message raises
`InvalidRequestError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from rdzv import bounds
from rdzv.bounds import LABEL_CHARS, LOCAL_WORLD_SIZE, refusal
from rdzv.core.commands import Command, Fail, Join, Leave, ReportStoreHost, Resume, Succeed
from rdzv.core.model import Assignment, KeptWorker, RecoveryReport, Snapshot
from rdzv.errors import InvalidRequestError
from rdzv.messages import (
    SAID,
    SNAPSHOTS_PER_WORKER,
    Announcement,
    Arrivals,
    Belief,
    GroupArrivals,
    Hello,
    Progress,
    Report,
    SnapshotsHeld,
    Welcome,
)
from rdzv.structs import replace, struct
from rdzv.transport.wire import bodies, read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.version import PROTOCOL_VERSION

T = TypeVar("T")

# ------------------------------------------------------------------------------------ from nodes


@struct(frozen=True)
class Speaker:
    """The node that sent a message, and the incarnation of its stream."""

    node_id: str
    incarnation: int


def hello_of(message: pb.Hello) -> Hello:
    """Read a hello without its beliefs, which `belief_of` reads one at a time."""
    check_protocol(message.protocol_version)
    if len(message.beliefs) > bounds.JOBS_PER_NODE:
        given, most = f"has {len(message.beliefs)} jobs", f"at most {bounds.JOBS_PER_NODE}"
        raise refusal("hello", message.node_id, given, most)
    return read(Hello, message, checked=True)


def check_protocol(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise InvalidRequestError(
            f"the node speaks protocol {version}, this server speaks {PROTOCOL_VERSION}; upgrade "
            f"the {'agent' if version < PROTOCOL_VERSION else 'server'}"
        )


def command_of(message: pb.NodeMessage, speaker: Speaker, now_ms: int) -> tuple[str, Command]:
    body = message.WhichOneof("body")
    if body == "join":
        return bounds.rdzv_id_of(message.join.rdzv_id), _join(message.join, speaker, now_ms)
    kind = SAID.get(str(body))
    if kind is None:
        remedy = "send Hello only once; upgrade the server"
        raise refusal("message", body, "has no place here", remedy)
    content = getattr(message, str(body))
    command: Command = _spoken(kind, content, speaker, now_ms)
    return bounds.rdzv_id_of(content.rdzv_id), command


def _spoken(kind: type[T], message: Message, speaker: Speaker, now_ms: int, **given: Any) -> T:
    given |= {"node_id": speaker.node_id, "incarnation": speaker.incarnation}
    return read(kind, message, checked=True, now_ms=now_ms, **given)


def job_named_in(message: pb.NodeMessage | pb.Belief) -> str:
    """Return the rdzv_id in a possibly invalid message, for the refusal; "" if there is none."""
    if isinstance(message, pb.Belief):
        return message.join.rdzv_id
    body = message.WhichOneof("body")
    return str(getattr(getattr(message, body), "rdzv_id", "")) if body else ""


def _join(message: pb.Join, speaker: Speaker, now_ms: int, least_port: int = 1) -> Join:
    given = {"secret": _secret(message), "snapshots": _readable_snapshots(message)}
    join = _spoken(Join, message, speaker, now_ms, **given)
    bounds.nnodes(join.settings.min_nodes, join.settings.max_nodes, "--nnodes: ")
    bounds.within("offer.store_port", join.offer.store_port, least_port, 65_535)
    if not join.kept:
        return join
    return replace(join, kept=_by_local_rank(join.kept, join.offer.local_world_size))


_SECRET_CHARS_LEAST = 16


def _secret(message: pb.Join) -> str:
    """Read a job's secret, and return a hash valid for this job only, or "" for no secret.

    Anyone who can read the hash can try to guess the secret, so short secrets are refused.
    """
    if not message.secret:
        return ""
    if not _SECRET_CHARS_LEAST <= len(message.secret) <= LABEL_CHARS:
        raise InvalidRequestError(
            f"the job secret has {len(message.secret)} characters; give {_SECRET_CHARS_LEAST} to "
            f"{LABEL_CHARS}, as `openssl rand -hex 32` makes"
        )
    return hashlib.sha256(f"{message.rdzv_id}\0{message.secret}".encode()).hexdigest()


def _by_local_rank(kept: tuple[KeptWorker, ...], local_world_size: int) -> tuple[KeptWorker, ...]:
    if len(kept) > local_world_size:
        reason = "are more parked workers than the node has"
        most = f"offer at most {local_world_size}, its local_world_size"
        raise refusal("kept", len(kept), reason, most)
    by_rank = {one.local_rank: one for one in kept}
    for one in kept:
        bounds.within("kept.local_rank", one.local_rank, 0, local_world_size - 1)
        bounds.within("kept.shard", one.shard, 0, one.shards - 1)
    if len(by_rank) < len(kept):
        reason = f"workers have {len(by_rank)} local_ranks"
        raise refusal("kept", len(kept), reason, "offer each once")
    return tuple(by_rank[local_rank] for local_rank in sorted(by_rank))


def _readable_snapshots(message: pb.Join) -> tuple[Snapshot, ...]:
    """Read a joining node's snapshots, or return () if any is invalid, as a join needs none."""
    try:
        most = SNAPSHOTS_PER_WORKER * message.offer.local_world_size
        messages = bounds.up_to("snapshots", message.snapshots, most)
        return _checked_shards(tuple([read(Snapshot, one, checked=True) for one in messages]))
    except InvalidRequestError:
        return ()


def _checked_shards(snapshots: tuple[Snapshot, ...]) -> tuple[Snapshot, ...]:
    for one in snapshots:
        bounds.within("snapshots.shard", one.shard, 0, one.mark.shards - 1)
    return snapshots


def belief_of(message: pb.Belief, speaker: Speaker, now_ms: int) -> Belief:
    phase = message.phase
    # Only a node that is waiting for a round reserves a port for its store.
    least_port = 1 if phase == pb.Belief.JOINING else 0
    join = _join(message.join, speaker, now_ms, least_port)
    rdzv_id = bounds.rdzv_id_of(message.join.rdzv_id)
    round_ = message.round.round if message.HasField("round") else None
    if message.HasField("round") and message.round.rdzv_id != rdzv_id:
        raise refusal("rdzv_id", message.round.rdzv_id, f"is not {rdzv_id}", "name one job")
    if run := message.round.run or join.run:
        bounds.uid("run", run)
    known = message.HasField("round") and run
    recovery = _recovery_report(message.round, join, now_ms) if known else None
    resume: tuple[Command, ...] = ()
    if round_ is not None:
        again = Resume(speaker.node_id, speaker.incarnation, run, round_, recovery)
        resume = (replace(again, secret=join.secret),)
    store_host: tuple[Command, ...] = ()
    if round_ is not None and message.store_host_failed:
        reason = bounds.sentence(message.store_host_failed)
        failed = ReportStoreHost(speaker.node_id, speaker.incarnation, run, round_, reason)
        # A new incarnation must take its seat before it reports.
        store_host = (*resume, failed)
    if phase == pb.Belief.JOINING:
        join = replace(join, recovery=recovery)
        return Belief(rdzv_id, run, round_, has_workers=False, commands=(*store_host, join))
    if phase == pb.Belief.LEAVING:
        leave = _spoken(Leave, message.leave, speaker, now_ms)
        gone = round_ is None or leave.left_round == round_
        return Belief(rdzv_id, run, round_, not gone, (*(store_host or resume), leave))
    if phase not in _WITH_WORKERS:
        raise refusal("phase", phase, "is not known to this server", "upgrade the server")
    if round_ is None or not run:
        raise refusal("phase", phase, "needs a round and its run", "name both")
    commands = [*(store_host or resume)]
    if phase == pb.Belief.SUCCEEDED:
        commands.append(Succeed(speaker.node_id, speaker.incarnation, run, round_))
    elif message.failures:
        reported = pb.Failed(run=run, round=round_, failures=message.failures)
        commands.append(_spoken(Fail, reported, speaker, now_ms))
    return Belief(rdzv_id, run, round_, has_workers=True, commands=tuple(commands))


_WITH_WORKERS = (pb.Belief.RUNNING, pb.Belief.STOPPING, pb.Belief.SUCCEEDED)


def _recovery_report(message: pb.Assignment, join: Join, now_ms: int) -> RecoveryReport | None:
    """Read a node's assignment, or return None if no round can be rebuilt from it.

    An unusable assignment does not invalidate the rest of the hello, because it may not be needed.
    """
    kept = tuple(sorted(set(message.kept)))
    try:
        assignment = read(Assignment, message, checked=True, now_ms=now_ms, kept=kept)
    except InvalidRequestError:
        return None
    nodes, workers = assignment.group_world_size, join.offer.local_world_size
    most = nodes * LOCAL_WORLD_SIZE
    fits = (
        assignment.group_rank < nodes <= assignment.world_size <= most
        and max(assignment.rank_first, assignment.role_rank_first, assignment.role_world_size)
        <= most
        and (assignment.source or 0) < assignment.world_size
        and assignment.snapshot_loads <= assignment.round + 1
        and max(assignment.origin, assignment.lineage) <= assignment.round
        and max(assignment.kept, default=0) < workers
    )
    return RecoveryReport(assignment, join.settings, join.offer) if fits else None


def away_ms_of(message: pb.Away) -> int:
    return bounds.within("deadline_ms", message.deadline_ms, 1, bounds.AWAY_MS)


_REPORTS = {body: kind for kind, body in bodies(pb.NodeMessage, Report).items()}


def report_of(message: pb.NodeMessage) -> Report | None:
    body = message.WhichOneof("body")
    kind: Any = _REPORTS.get(str(body))
    if kind is None:
        return None
    content = getattr(message, str(body))
    report: Report = read(kind, content, checked=True)
    if isinstance(report, SnapshotsHeld):
        _checked_shards(report.snapshots)
    elif isinstance(report, Arrivals):
        _check_arrivals(report.groups)
    elif isinstance(report, Progress):
        ranks = [one.rank for one in report.ranks]
        if len(set(ranks)) < len(ranks):
            raise refusal("ranks", len(ranks), "workers have fewer RANKs", "name each once")
    return report


_ARRIVALS = 1 << 17
"""The number of collective entry times in one report from a node."""


def _check_arrivals(groups: Sequence[GroupArrivals]) -> None:
    entered = sum(len(rank.entered_us) for group in groups for rank in group.ranks)
    bounds.within("entered_us", entered, 0, _ARRIVALS)
    for group in groups:
        for rank in group.ranks:
            if len(rank.entered_us) != len(group.sequences):
                most = f"send one time for each of the {len(group.sequences)} sequences"
                raise refusal("entered_us", len(rank.entered_us), "do not fit", most)


# ------------------------------------------------------------------------------------ to nodes

_BODIES = bodies(pb.ServerMessage, Announcement)


def server_message(
    announcements: Sequence[Announcement], leadership: int, server_version: str, now_ms: int
) -> pb.ServerMessage:
    message = pb.ServerMessage(leadership=leadership)
    _tell(message, announcements[0], server_version, now_ms)
    for other in announcements[1:]:
        _tell(message.more.add(), other, server_version, now_ms)
    return message


def _tell(
    message: pb.ServerMessage, announcement: Announcement, server_version: str, now_ms: int
) -> None:
    body = getattr(message, _BODIES[type(announcement)])
    body.SetInParent()
    write(body, announcement, now_ms)
    if isinstance(announcement, Welcome):
        body.protocol_version, body.server_version = PROTOCOL_VERSION, server_version

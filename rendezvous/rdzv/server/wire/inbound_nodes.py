"""Converts nodes' messages to bounded and validated values."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from rdzv.core.commands import (
    Command,
    Decline,
    Fail,
    FailureReport,
    Join,
    Leave,
    ReportStoreHost,
    ReportStuck,
    Resume,
    Succeed,
)
from rdzv.core.evidence.collectives import Collective, GroupRecord
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.evidence.stacks import Frame, Thread, WorkerStack
from rdzv.core.fleet.node_resources import FailingCheck, Gpu, Resources
from rdzv.core.fleet.nodes import AgentKind
from rdzv.core.model import KeptWorker, LeaveCause, Moved, Offer, RecoveryReport
from rdzv.errors import InvalidRequestError
from rdzv.server.messages import (
    Belief,
    Draining,
    Hello,
    Holding,
    Hung,
    LogPiece,
    Stacks,
)
from rdzv.server.settings import bounds
from rdzv.server.settings.config import PROTOCOL_VERSION
from rdzv.server.wire.inbound_settings import labels_of, settings_of
from rdzv.server.wire.inbound_snapshots import mark_of, readable_snapshots
from rdzv.structs import replace, struct
from rdzv.transport.endpoints import Listen
from rdzv.transport.tallies import tally_of
from rdzv.v1 import rdzv_pb2 as pb

_KINDS: Mapping[int, AgentKind] = {
    pb.AGENT_KIND_FOREGROUND: AgentKind.FOREGROUND,
    pb.AGENT_KIND_DAEMON: AgentKind.DAEMON,
}
_LEAVE_CAUSES: Mapping[int, LeaveCause] = {
    pb.Leave.SIGNAL: LeaveCause.SIGNAL,
    pb.Leave.START_FAILED: LeaveCause.START_FAILED,
    pb.Leave.TIMEOUT: LeaveCause.TIMEOUT,
    pb.Leave.FAILED: LeaveCause.FAILED,
}


@struct(frozen=True)
class Speaker:
    """The node that sent a message, and the incarnation of its stream."""

    node_id: str
    incarnation: int


def _offer(message: pb.Offer, least_port: int) -> Offer:
    return Offer(
        address=bounds.address("address", message.address),
        local_world_size=bounds.within(
            "--nproc-per-node: local_world_size",
            message.local_world_size,
            1,
            bounds.LOCAL_WORLD_SIZE,
        ),
        role=bounds.label("role", message.role) or "default",
        topology=bounds.label("topology", message.topology),
        host_name=bounds.address("host_name", message.host_name, needed=False),
        machine=bounds.label("machine", message.machine),
        store_port=bounds.within("store_port", message.store_port, least_port, 65_535),
        can_host_store=message.can_host_store,
        shutdown_timeout_ms=bounds.within(
            "shutdown_timeout_ms", message.shutdown_timeout_ms, 0, bounds.TIMEOUT_MS
        ),
    )


def _failures(messages: Iterable[pb.WorkerFailure]) -> tuple[FailureReport, ...]:
    """Read reports of workers that ended.

    Above the limit, drop those that exited with 0 first, then suspects, then the latest.
    """
    reports = [_failure(message) for message in messages]
    earliest = sorted(reports, key=lambda one: (one.exit_code == 0, one.suspect, -one.age_ms))
    return tuple(earliest[: bounds.FAILURES])


def _failure(message: pb.WorkerFailure) -> FailureReport:
    return FailureReport(
        local_rank=bounds.within("local_rank", message.local_rank, 0, bounds.LOCAL_WORLD_SIZE - 1),
        rank=message.rank,
        pid=message.pid,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
        signal=message.signal if message.HasField("signal") else None,
        message=bounds.sentence(message.message),
        traceback=bounds.traceback(message.traceback),
        age_ms=min(message.age_ms, bounds.TIMEOUT_MS),
        suspect=message.suspect,
    )


def _kept(messages: Collection[pb.KeptWorker], local_world_size: int) -> tuple[KeptWorker, ...]:
    """Read the parked workers that a node offers, and return them in LOCAL_RANK order."""
    if len(messages) > local_world_size:
        raise bounds.refusal(
            "kept",
            len(messages),
            "are more parked workers than the node has",
            f"offer at most {local_world_size}, its local_world_size",
        )
    by_rank = {
        bounds.within("kept: local_rank", one.local_rank, 0, local_world_size - 1): KeptWorker(
            local_rank=one.local_rank,
            step=bounds.within("kept: step", one.step, 0, bounds.STEPS)
            if one.HasField("step")
            else None,
            torn=one.torn,
            shard=bounds.within("kept: shard", one.shard, 0, max(one.shards, 1) - 1),
            shards=bounds.within("kept: shards", max(one.shards, 1), 1, bounds.SHARDS),
            oldest_step=bounds.within("kept: oldest_step", one.oldest_step, 0, bounds.STEPS)
            if one.HasField("oldest_step")
            else None,
        )
        for one in messages
    }
    if len(by_rank) < len(messages):
        raise bounds.refusal(
            "kept", len(messages), f"workers have {len(by_rank)} local_ranks", "offer each once"
        )
    return tuple(by_rank[local_rank] for local_rank in sorted(by_rank))


def hello_of(message: pb.Hello) -> Hello:
    """Read a hello without its beliefs, which `belief_of` reads one at a time."""
    check_protocol(message.protocol_version)
    if len(message.beliefs) > bounds.JOBS_PER_NODE:
        raise bounds.refusal(
            "hello",
            message.node_id,
            f"has {len(message.beliefs)} jobs",
            f"at most {bounds.JOBS_PER_NODE}",
        )
    return Hello(
        node_id=bounds.name("node_id", message.node_id),
        instance=bounds.uid("instance", message.instance),
        kind=bounds.one_of("kind", message.kind, _KINDS),
        address=bounds.address("address", message.address, needed=False),
        pid=message.pid,
        leadership=message.leadership,
        incarnation=message.incarnation,
        fence_after_ms=bounds.within(
            "fence_after_ms", message.fence_after_ms, 0, bounds.TIMEOUT_MS
        ),
        version=bounds.label("agent_version", message.agent_version),
        resources=_resources(message.resources) if message.HasField("resources") else None,
        holdings=holdings_of(message.holdings),
        failing=failing_of(message.health),
        metrics=_endpoint("metrics", message.metrics),
        draining=draining_of(message.draining) if message.HasField("draining") else None,
        takes_several=message.takes_several,
    )


def draining_of(message: pb.Draining) -> Draining:
    """Read a node's announcement that it is draining."""
    left_ms = min(message.deadline_ms, bounds.TIMEOUT_MS)
    return Draining(left_ms, bounds.sentence(message.reason), message.number, message.own)


def _resources(message: pb.Resources) -> Resources:
    if len(message.gpus) > bounds.GPUS:
        raise bounds.refusal(
            "gpus", len(message.gpus), "are too many", f"give at most {bounds.GPUS}"
        )
    return Resources(
        cpus=message.cpus,
        memory_bytes=message.memory_bytes,
        gpus=tuple(
            Gpu(
                bounds.label("uuid", gpu.uuid),
                bounds.label("name", gpu.name),
                gpu.memory_bytes,
            )
            for gpu in message.gpus
        ),
        labels=labels_of(message.labels),
        capacity=bounds.within("capacity", message.capacity, 0, bounds.CAPACITY),
        topology=bounds.label("topology", message.topology),
    )


def holdings_of(message: pb.Holdings) -> tuple[Holding, ...]:
    if len(message.holdings) > bounds.JOBS_PER_NODE:
        most = f"at most {bounds.JOBS_PER_NODE}"
        raise bounds.refusal(
            "holdings", len(message.holdings), "are too many jobs of one node", most
        )
    return tuple(
        Holding(
            rdzv_id=bounds.rdzv_id_of(holding.rdzv_id),
            run=bounds.uid("run", holding.run),
            gpus=bounds.within("gpus", holding.gpus, 0, bounds.GPUS),
        )
        for holding in message.holdings
    )


def _endpoint(what: str, text: str) -> str:
    """Read a HOST:PORT to which other machines can connect, or return "" if none is given."""
    if not text:
        return ""
    try:
        listen = Listen.parse(text)
    except InvalidRequestError:
        raise bounds.refusal(what, text, "is not HOST:PORT", "leave it out, or give one") from None
    if not listen.port:
        raise bounds.refusal(what, text, "has no port", "give 1 to 65535")
    bounds.address(what, listen.host)
    return str(listen)


def failing_of(message: pb.Health) -> tuple[FailingCheck, ...]:
    """Read a node's failing health checks. If there are too many, keep only the first ones."""
    return tuple(
        FailingCheck(bounds.sentence(one.name), bounds.sentence(one.reason))
        for one in message.failing[: bounds.FAILING_CHECKS]
    )


def check_protocol(version: int) -> None:
    """Raise an error for a node whose protocol version this server does not support."""
    if version != PROTOCOL_VERSION:
        raise InvalidRequestError(
            f"the node speaks protocol {version}, this server speaks {PROTOCOL_VERSION}; upgrade "
            f"the {'agent' if version < PROTOCOL_VERSION else 'server'}"
        )


def belief_of(message: pb.Belief, speaker: Speaker) -> Belief:
    """Read a node's belief about a job, and the commands that follow from it."""
    phase = message.phase
    # Only a node that is waiting for a round reserves a port for its store.
    least_port = 1 if phase == pb.Belief.JOINING else 0
    join = _join(message.join, speaker, least_port)
    rdzv_id = bounds.rdzv_id_of(message.join.rdzv_id)
    round_ = message.round.round if message.HasField("round") else None
    if message.HasField("round") and message.round.rdzv_id != rdzv_id:
        raise bounds.refusal("rdzv_id", message.round.rdzv_id, f"is not {rdzv_id}", "name one job")
    run = bounds.uid("run", message.round.run or join.run, needed=False)
    recovery = _recovery_report(message.round, join) if message.HasField("round") and run else None
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
        leave = _leave(message.leave, speaker)
        gone = round_ is None or leave.left_round == round_
        return Belief(rdzv_id, run, round_, not gone, (*(store_host or resume), leave))
    if phase not in _WITH_WORKERS:
        raise bounds.refusal("phase", phase, "is not known to this server", "upgrade the server")
    if round_ is None or not run:
        raise bounds.refusal("phase", phase, "needs a round and its run", "name both")
    failures = _failures(message.failures)
    commands = [*(store_host or resume)]
    if phase == pb.Belief.SUCCEEDED:
        commands.append(Succeed(speaker.node_id, speaker.incarnation, run, round_))
    elif failures:
        commands.append(Fail(speaker.node_id, speaker.incarnation, run, round_, failures))
    return Belief(rdzv_id, run, round_, has_workers=True, commands=tuple(commands))


_WITH_WORKERS = (pb.Belief.RUNNING, pb.Belief.STOPPING, pb.Belief.SUCCEEDED)


def _recovery_report(assignment: pb.RoundCompleted, join: Join) -> RecoveryReport | None:
    """Read a node's assignment, or return None if no round can be rebuilt from it.

    An unusable assignment does not invalidate the rest of the hello, because it may not be needed.
    """
    try:
        return _checked_report(assignment, join)
    except InvalidRequestError:
        return None


def _checked_report(assignment: pb.RoundCompleted, join: Join) -> RecoveryReport:
    nodes = bounds.within("group_world_size", assignment.group_world_size, 1, bounds.NODES_PER_JOB)
    most = nodes * bounds.LOCAL_WORLD_SIZE
    return RecoveryReport(
        round=assignment.round,
        group_rank=bounds.within("group_rank", assignment.group_rank, 0, nodes - 1),
        group_world_size=nodes,
        rank_first=bounds.within("rank_first", assignment.rank_first, 0, most),
        world_size=bounds.within("world_size", assignment.world_size, nodes, most),
        role_rank_first=bounds.within("role_rank_first", assignment.role_rank_first, 0, most),
        role_world_size=bounds.within("role_world_size", assignment.role_world_size, 0, most),
        master_addr=bounds.address("master_addr", assignment.master_addr),
        master_port=bounds.within("master_port", assignment.master_port, 1, 65_535),
        use_agent_store=assignment.use_agent_store,
        restarts=bounds.within("restarts", assignment.restarts, 0, bounds.RESTARTS),
        settings=join.settings,
        offer=join.offer,
        tally=tally_of(assignment.tally) if assignment.HasField("tally") else None,
        kept=tuple(
            sorted(
                bounds.within("kept", local_rank, 0, join.offer.local_world_size - 1)
                for local_rank in set(assignment.kept)
            )
        ),
        source=bounds.within("source", assignment.source, 0, assignment.world_size - 1)
        if assignment.HasField("source")
        else None,
        resume_step=bounds.within("resume_step", assignment.resume_step, 0, bounds.STEPS)
        if assignment.HasField("resume_step")
        else None,
        snapshot=mark_of(assignment.snapshot) if assignment.HasField("snapshot") else None,
        snapshot_loads=bounds.within(
            "snapshot_loads", assignment.snapshot_loads, 0, assignment.round + 1
        ),
        origin=bounds.within("origin", assignment.origin, 0, assignment.round),
        lineage=bounds.within("lineage", assignment.lineage, 0, assignment.round),
    )


def command_of(message: pb.NodeMessage, speaker: Speaker) -> tuple[str, Command]:
    """Read a node's command to a job, and return it with the job's rdzv_id."""
    body = message.WhichOneof("body")
    match body:
        case "join":
            return _job(message.join), _join(message.join, speaker)
        case "failed":
            return _job(message.failed), _fail(message.failed, speaker)
        case "succeeded":
            return _job(message.succeeded), _succeed(message.succeeded, speaker)
        case "leave":
            return _job(message.leave), _leave(message.leave, speaker)
        case "stuck":
            return _job(message.stuck), _stuck(message.stuck, speaker)
        case "store_host_failed":
            failed = message.store_host_failed
            return _job(failed), _store_host(failed, speaker)
        case "declined":
            return _job(message.declined), _decline(message.declined, speaker)
    raise bounds.refusal(
        "message", body, "has no place here", "send Hello only once; upgrade the server"
    )


_AboutJob = (
    pb.Join | pb.Failed | pb.Succeeded | pb.Leave | pb.Stuck | pb.StoreHostFailed | pb.Declined
)


def _job(message: _AboutJob) -> str:
    return bounds.rdzv_id_of(message.rdzv_id)


def job_named_in(message: pb.NodeMessage | pb.Belief) -> str:
    """Return the rdzv_id in a possibly invalid message, for the refusal; "" if there is none."""
    if isinstance(message, pb.Belief):
        return message.join.rdzv_id
    body = message.WhichOneof("body")
    return str(getattr(getattr(message, body), "rdzv_id", "")) if body else ""


def _join(message: pb.Join, speaker: Speaker, least_port: int = 1) -> Join:
    settings = settings_of(message.settings)
    offer = _offer(message.offer, least_port)
    return Join(
        node_id=speaker.node_id,
        incarnation=speaker.incarnation,
        run=bounds.uid("run", message.run, needed=False),
        settings=settings,
        offer=offer,
        left_round=message.left_round if message.HasField("left_round") else None,
        failures=_failures(message.failures),
        refuse_reuse=message.refuse_reuse,
        fenced=message.fenced,
        fenced_age_ms=min(message.fenced_age_ms, bounds.TIMEOUT_MS),
        moved=Moved(
            message.furthest_step if message.HasField("furthest_step") else None,
            message.snapshot_changed,
        ),
        secret=_secret(message),
        kept=_kept(message.kept, offer.local_world_size),
        snapshots=readable_snapshots(message.snapshots, offer.local_world_size),
        preparing=message.preparing,
    )


def _secret(message: pb.Join) -> str:
    """Read a job's secret, and return a hash valid for this job only, or "" for no secret.

    Anyone who can read the hash can try to guess the secret, so short secrets are refused.
    """
    if not message.secret:
        return ""
    if not bounds.SECRET_CHARS_LEAST <= len(message.secret) <= bounds.LABEL_CHARS:
        least = bounds.SECRET_CHARS_LEAST
        raise InvalidRequestError(
            f"the job secret has {len(message.secret)} characters; give {least} to "
            f"{bounds.LABEL_CHARS}, as `openssl rand -hex 32` makes"
        )
    return hashlib.sha256(f"{message.rdzv_id}\0{message.secret}".encode()).hexdigest()


def _fail(message: pb.Failed, speaker: Speaker) -> Fail:
    failures = _failures(message.failures)
    run = bounds.uid("run", message.run)
    return Fail(speaker.node_id, speaker.incarnation, run, message.round, failures)


def _succeed(message: pb.Succeeded, speaker: Speaker) -> Succeed:
    run = bounds.uid("run", message.run)
    return Succeed(speaker.node_id, speaker.incarnation, run, message.round)


def _leave(message: pb.Leave, speaker: Speaker) -> Leave:
    return Leave(
        node_id=speaker.node_id,
        incarnation=speaker.incarnation,
        # A node may leave before it has received the run.
        run=bounds.uid("run", message.run, needed=False),
        cause=bounds.one_of("cause", message.cause, _LEAVE_CAUSES),
        reason=bounds.sentence(message.reason),
        left_round=message.left_round if message.HasField("left_round") else None,
        exited_zero=message.exited_zero,
    )


def _stuck(message: pb.Stuck, speaker: Speaker) -> ReportStuck:
    run, pids = bounds.uid("run", message.run), tuple(message.pids[: bounds.PIDS])
    return ReportStuck(speaker.node_id, speaker.incarnation, run, message.round, pids)


def _store_host(message: pb.StoreHostFailed, speaker: Speaker) -> ReportStoreHost:
    run, reason = bounds.uid("run", message.run), bounds.sentence(message.reason)
    return ReportStoreHost(speaker.node_id, speaker.incarnation, run, message.round, reason)


def _decline(message: pb.Declined, speaker: Speaker) -> Decline:
    run, reason = bounds.uid("run", message.run), bounds.sentence(message.reason)
    return Decline(speaker.node_id, run, reason, message.passing)


def away_ms_of(message: pb.Away) -> int:
    """Read how long, in ms, an agent plans to be away."""
    return bounds.within("deadline_ms", message.deadline_ms, 1, bounds.AWAY_MS)


def log_piece_of(message: pb.LogPiece) -> LogPiece:
    if len(message.data) > bounds.LOG_PIECE_BYTES:
        raise bounds.refusal(
            "log_piece",
            message.request,
            f"has {len(message.data)} bytes",
            f"send at most {bounds.LOG_PIECE_BYTES}",
        )
    return LogPiece(
        request=message.request,
        round=message.round,
        local_rank=message.local_rank,
        rank=message.rank,
        stderr=message.stderr,
        offset=message.offset,
        data=message.data,
        last=message.last,
        error=bounds.sentence(message.error),
    )


def hung_of(message: pb.Hung) -> Hung:
    """Parse a report of hanging workers. Whether the node has these workers is checked later."""
    if len(message.workers) > bounds.LOCAL_WORLD_SIZE:
        most = f"at most {bounds.LOCAL_WORLD_SIZE}"
        raise bounds.refusal("hung", len(message.workers), "are too many workers of one node", most)
    return Hung(
        rdzv_id=bounds.rdzv_id_of(message.rdzv_id),
        run=bounds.uid("run", message.run),
        round=message.round,
        workers=tuple(
            HungWorker(
                rank=one.rank,
                local_rank=bounds.within(
                    "local_rank", one.local_rank, 0, bounds.LOCAL_WORLD_SIZE - 1
                ),
                pid=one.pid,
                silent_ms=min(one.silent_ms, bounds.TIMEOUT_MS),
                reason=bounds.sentence(one.reason),
                timed_out=one.timed_out,
            )
            for one in message.workers
        ),
    )


def stacks_of(message: pb.Stacks) -> Stacks:
    """Read the stacks of some workers. Long texts and lists are truncated."""
    if len(message.workers) > bounds.STACK_WORKERS:
        most = f"send at most {bounds.STACK_WORKERS} at once"
        raise bounds.refusal("stacks", len(message.workers), "are too many workers", most)
    return Stacks(
        request=message.request,
        workers=tuple(_worker_stack(one) for one in message.workers),
        last=message.last,
        error=bounds.sentence(message.error),
    )


def _worker_stack(message: pb.WorkerStack) -> WorkerStack:
    return WorkerStack(
        rank=message.rank,
        local_rank=message.local_rank,
        pid=message.pid,
        state=message.state[:1],
        threads=tuple(
            Thread(
                _cut(thread.name),
                thread.main,
                tuple(
                    Frame(_cut(frame.name), _cut(frame.file), frame.line)
                    for frame in thread.frames[: bounds.STACK_FRAMES]
                ),
                thread.holds_gil,
            )
            for thread in message.threads[: bounds.STACK_THREADS]
        ),
        note=bounds.sentence(message.note),
        kernel=tuple(_cut(place) for place in message.kernel[: bounds.STACK_FRAMES]),
        collectives=tuple(
            _group_record(record) for record in message.collectives[: bounds.RECORD_GROUPS]
        ),
        no_record=bounds.sentence(message.no_record),
        exited_ms=(
            min(message.exited_ms, bounds.TIMEOUT_MS) if message.HasField("exited_ms") else None
        ),
    )


def _group_record(message: pb.GroupRecord) -> GroupRecord:
    return GroupRecord(
        _cut(message.group),
        _cut(message.description),
        message.entered,
        tuple(
            Collective(
                one.sequence,
                _cut(one.operation),
                _cut(one.sizes),
                one.done,
                min(one.age_ms, bounds.TIMEOUT_MS),
            )
            for one in message.latest[: bounds.RECORD_ENTRIES]
        ),
        tuple(message.members[: bounds.RECORD_MEMBERS]),
    )


def _cut(text: str) -> str:
    return text[: bounds.LABEL_CHARS]

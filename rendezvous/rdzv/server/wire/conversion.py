"""Protobuf to core values and back. All that comes in is bounded and validated here.

Every refusal names the value, the reason and the remedy. What is merely too long for people to
read (a reason, a traceback) is cut instead: a node's report must not be lost for its length.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, get_args

from google.protobuf.message import Message

from rdzv.core.commands import (
    Command,
    Decline,
    Fail,
    FailureReport,
    Join,
    Leave,
    ReportStoreHost,
    ReportStuck,
    Restart,
    Resume,
    Scale,
    Stop,
    Submit,
    Succeed,
)
from rdzv.core.explain import BudgetsView, JobView, NodeView
from rdzv.core.hangs import HungWorker
from rdzv.core.model import (
    Claim,
    Failure,
    JobSpec,
    LeaveCause,
    Moved,
    NodeState,
    Offer,
    Result,
    ScaleUp,
    Settings,
    Submission,
)
from rdzv.core.nodes import AgentKind
from rdzv.core.placement import FailingCheck, Gpu, Resources
from rdzv.core.stacks import Frame, Report, SilentNode, Thread, WorkerStack
from rdzv.core.stragglers import Straggler
from rdzv.errors import InvalidRequestError
from rdzv.server.messages import (
    Belief,
    Closed,
    Draining,
    DrainNode,
    Heard,
    Hello,
    Holding,
    Hung,
    Joined,
    Lease,
    Line,
    LogCredit,
    LogLines,
    LogPiece,
    LogPosition,
    LogsWanted,
    LookAgain,
    NodeSummary,
    Placed,
    Progress,
    RankProgress,
    ReadLog,
    Refused,
    RoundOver,
    ServerView,
    Stacks,
    TakeStacks,
    Told,
    UndrainNode,
    Waiting,
    Welcome,
    Withdrawn,
)
from rdzv.server.security.tokens import Token
from rdzv.server.settings.config import DAY_MS, OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, Limits
from rdzv.stores.base import Record
from rdzv.structs import field_names, replace, struct
from rdzv.transport.endpoints import Listen
from rdzv.transport.tallies import tally_message, tally_of
from rdzv.v1 import rdzv_pb2 as pb

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9.:%_-]+")
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_KINDS: Mapping[int, AgentKind] = {
    pb.AGENT_KIND_FOREGROUND: AgentKind.FOREGROUND,
    pb.AGENT_KIND_DAEMON: AgentKind.DAEMON,
}
_SCALE_UPS: Mapping[int, ScaleUp] = {
    pb.SCALE_UP_UNSPECIFIED: ScaleUp.EAGER,
    pb.SCALE_UP_EAGER: ScaleUp.EAGER,
    pb.SCALE_UP_ON_RESTART: ScaleUp.ON_RESTART,
    pb.SCALE_UP_AFTER: ScaleUp.AFTER,
}
_LEAVE_CAUSES: Mapping[int, LeaveCause] = {
    pb.Leave.SIGNAL: LeaveCause.SIGNAL,
    pb.Leave.START_FAILED: LeaveCause.START_FAILED,
    pb.Leave.TIMEOUT: LeaveCause.TIMEOUT,
    pb.Leave.FAILED: LeaveCause.FAILED,
}
_RESULTS = {
    Result.SUCCEEDED: pb.RESULT_SUCCEEDED,
    Result.FAILED: pb.RESULT_FAILED,
    Result.STOPPED: pb.RESULT_STOPPED,
}

_DEFAULT = Settings(min_nodes=1, max_nodes=1)

T = TypeVar("T")


@struct(frozen=True)
class Speaker:
    """Who says something on a stream."""

    node_id: str
    incarnation: int


# ------------------------------------------------------------------ the pieces of a message


def _refuse(what: str, value: object, reason: str, remedy: str) -> InvalidRequestError:
    shown = repr(value) if len(str(value)) <= 80 else repr(str(value)[:77] + "...")
    return InvalidRequestError(f"{what} {shown} {reason}; {remedy}")


def _spelled(what: str, text: str, alphabet: re.Pattern[str], chars: int, allowed: str) -> str:
    if not text:
        raise _refuse(what, text, "is empty", f"give {allowed}")
    if len(text) > chars:
        raise _refuse(what, text, f"has {len(text)} characters", f"give at most {chars}")
    if not alphabet.fullmatch(text):
        raise _refuse(what, text, "has characters that are not allowed", f"use {allowed}")
    return text


def _name(what: str, text: str, limits: Limits) -> str:
    """Check a name that people give, and that becomes the name of a folder."""
    allowed = "letters, digits and . _ : @ -, beginning with a letter, a digit or _"
    return _spelled(what, text, _NAME, limits.name_chars, allowed)


def rdzv_id_of(text: str, limits: Limits) -> str:
    """Check the name of a job."""
    return _name("rdzv_id", text, limits)


def _uid(what: str, text: str, limits: Limits, *, needed: bool = True) -> str:
    if not text and not needed:
        return ""
    return _spelled(what, text, _UID, limits.uid_chars, "letters, digits, _ and -")


def _address(what: str, text: str, limits: Limits, *, needed: bool = True) -> str:
    if not text and not needed:
        return ""
    return _spelled(what, text, _ADDRESS, limits.address_chars, "a host name or an IP address")


def _endpoint(what: str, text: str, limits: Limits) -> str:
    """Read HOST:PORT as another machine can connect to it; empty if there is none."""
    if not text:
        return ""
    try:
        listen = Listen.parse(text)
    except InvalidRequestError:
        raise _refuse(what, text, "is no HOST:PORT", "leave it out, or give one") from None
    if not listen.port:
        raise _refuse(what, text, "has no port", "give 1 to 65535")
    _address(what, listen.host, limits)
    return str(listen)


def _label(what: str, text: str, limits: Limits) -> str:
    if len(text) > limits.label_chars:
        raise _refuse(
            what, text, f"has {len(text)} characters", f"give at most {limits.label_chars}"
        )
    if not text.isprintable():
        raise _refuse(what, text, "has characters that can not be printed", "leave them out")
    return text


def _within(what: str, value: int, lowest: int, highest: int) -> int:
    """Check a number; one of milliseconds is shown as people give it, in seconds."""
    if lowest <= value <= highest:
        return value
    if not what.endswith("_ms"):
        raise _refuse(what, value, "is out of bounds", f"give {lowest} to {highest}")
    remedy = f"give {lowest / 1000:.15g} to {highest / 1000:.15g} s"
    raise _refuse(what.removesuffix("_ms"), f"{value / 1000:.15g} s", "is out of bounds", remedy)


def _one_of(what: str, value: int, known: Mapping[int, T]) -> T:
    if value not in known:
        allowed = ", ".join(str(number) for number in known)
        raise _refuse(what, value, "is not known to this server", f"give one of {allowed}")
    return known[value]


def sentence(text: str, limits: Limits) -> str:
    """Cut what people read to one line of bounded length."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    return line if len(line) <= limits.reason_chars else line[: limits.reason_chars - 3] + "..."


def _traceback(text: str, limits: Limits) -> str:
    """Keep the end of a traceback, which says what went wrong."""
    cut = len(text) - limits.traceback_chars
    return text if cut <= 0 else "..." + text[cut + 3 :]


def _bounds(
    message: pb.Settings | pb.ScaleJobRequest, limits: Limits, flag: str = ""
) -> tuple[int, int]:
    most = limits.nodes_per_job
    min_nodes = _within(f"{flag}min_nodes", message.min_nodes, 1, most)
    max_nodes = _within(f"{flag}max_nodes", message.max_nodes, 1, most)
    if min_nodes > max_nodes:
        reason = f"is above max_nodes {max_nodes}"
        raise _refuse(f"{flag}min_nodes", min_nodes, reason, "give MIN:MAX")
    return min_nodes, max_nodes


def _settings(message: pb.Settings, limits: Limits) -> Settings:
    min_nodes, max_nodes = _bounds(message, limits, "--nnodes: ")
    return Settings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=_within(
            "--max-restarts: max_restarts", message.max_restarts, 0, limits.restarts
        )
        if message.HasField("max_restarts")
        else None,
        join_timeout_ms=_within("join_timeout_ms", message.join_timeout_ms, 1, limits.timeout_ms),
        last_call_timeout_ms=_within(
            "last_call_timeout_ms", message.last_call_timeout_ms, 0, limits.timeout_ms
        ),
        scale_up=_one_of("scale_up", message.scale_up, _SCALE_UPS),
        restart_window_ms=_within(
            "restart_window_ms", message.restart_window_ms, 0, limits.timeout_ms
        ),
        scale_up_after_ms=_within(
            "scale_up_after_ms", message.scale_up_after_ms, 0, limits.timeout_ms
        ),
        restart_backoff_ms=_backoff_ms(message, "restart_backoff_ms", limits),
        restart_backoff_max_ms=_backoff_ms(message, "restart_backoff_max_ms", limits),
        max_preemptions=_budget(message, "max_preemptions", limits),
        max_store_failures=_budget(message, "max_store_failures", limits),
        no_progress_restarts=_within(
            "no_progress_restarts", message.no_progress_restarts, 0, limits.restarts
        ),
    )


def _backoff_ms(message: pb.Settings, name: str, limits: Limits) -> int:
    """Read a wait that who does not name it leaves to this server."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return int(getattr(_DEFAULT, name))
    return _within(name, getattr(message, name), 0, limits.timeout_ms)


def _budget(message: pb.Settings, name: str, limits: Limits) -> int | None:
    """Read how often something may happen; unset: as often as it does."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    return _within(name, getattr(message, name), 0, limits.restarts)


def _offer(message: pb.Offer, limits: Limits, least_port: int) -> Offer:
    return Offer(
        address=_address("address", message.address, limits),
        local_world_size=_within(
            "--nproc-per-node: local_world_size",
            message.local_world_size,
            1,
            limits.local_world_size,
        ),
        role=_label("role", message.role, limits) or "default",
        topology=_label("topology", message.topology, limits),
        host_name=_address("host_name", message.host_name, limits, needed=False),
        machine=_label("machine", message.machine, limits),
        store_port=_within("store_port", message.store_port, least_port, 65_535),
        can_host_store=message.can_host_store,
        shutdown_timeout_ms=_within(
            "shutdown_timeout_ms", message.shutdown_timeout_ms, 0, limits.timeout_ms
        ),
    )


def _failures(messages: Iterable[pb.WorkerFailure], limits: Limits) -> tuple[FailureReport, ...]:
    """Read reports of failed workers; of too many, the earliest are the ones that matter."""
    reports = [_failure(message, limits) for message in messages]
    return tuple(sorted(reports, key=lambda report: -report.age_ms)[: limits.failures])


def _failure(message: pb.WorkerFailure, limits: Limits) -> FailureReport:
    return FailureReport(
        local_rank=_within("local_rank", message.local_rank, 0, limits.local_world_size - 1),
        rank=message.rank,
        pid=message.pid,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
        signal=message.signal if message.HasField("signal") else None,
        message=sentence(message.message, limits),
        traceback=_traceback(message.traceback, limits),
        age_ms=min(message.age_ms, limits.timeout_ms),
    )


# ------------------------------------------------------------------ what nodes say


def hello_of(message: pb.Hello, limits: Limits) -> Hello:
    """Read who opens a stream; the beliefs are read one by one, with `belief_of`."""
    check_protocol(message.protocol_version)
    if len(message.beliefs) > limits.beliefs:
        raise _refuse(
            "hello",
            message.node_id,
            f"has {len(message.beliefs)} jobs",
            f"at most {limits.beliefs}",
        )
    return Hello(
        node_id=_name("node_id", message.node_id, limits),
        instance=_uid("instance", message.instance, limits),
        kind=_one_of("kind", message.kind, _KINDS),
        address=_address("address", message.address, limits, needed=False),
        pid=message.pid,
        leadership=message.leadership,
        incarnation=message.incarnation,
        fence_after_ms=_within("fence_after_ms", message.fence_after_ms, 0, limits.timeout_ms),
        version=_label("agent_version", message.agent_version, limits),
        resources=_resources(message.resources, limits) if message.HasField("resources") else None,
        holdings=holdings_of(message.holdings, limits),
        failing=failing_of(message.health, limits),
        metrics=_endpoint("metrics", message.metrics, limits),
        draining=draining_of(message.draining, limits) if message.HasField("draining") else None,
    )


def draining_of(message: pb.Draining, limits: Limits) -> Draining:
    """Read that a node is about to leave all its jobs."""
    left_ms = min(message.deadline_ms, limits.timeout_ms)
    return Draining(left_ms, sentence(message.reason, limits), message.number, message.own)


def _resources(message: pb.Resources, limits: Limits) -> Resources:
    if len(message.gpus) > limits.gpus:
        raise _refuse("gpus", len(message.gpus), "are too many", f"give at most {limits.gpus}")
    return Resources(
        cpus=message.cpus,
        memory_bytes=message.memory_bytes,
        gpus=tuple(
            Gpu(
                _label("uuid", gpu.uuid, limits), _label("name", gpu.name, limits), gpu.memory_bytes
            )
            for gpu in message.gpus
        ),
        labels=_labels(message.labels, limits),
        capacity=_within("capacity", message.capacity, 0, limits.capacity),
        topology=_label("topology", message.topology, limits),
    )


def _labels(messages: Sequence[pb.Label], limits: Limits) -> tuple[tuple[str, str], ...]:
    """Read labels, by name."""
    if len(messages) > limits.labels:
        raise _refuse("labels", len(messages), "are too many", f"give at most {limits.labels}")
    allowed = "letters, digits and . _ / -"
    labels = {}
    for label in messages:
        name = _spelled("label", label.name, _LABEL_NAME, limits.name_chars, allowed)
        if name in labels:
            raise _refuse("label", name, "is given twice", "give it once")
        labels[name] = _label(f"label {name}", label.value, limits)
    return tuple(sorted(labels.items()))


def holdings_of(message: pb.Holdings, limits: Limits) -> tuple[Holding, ...]:
    """Read of which submitted jobs something may be left on a node."""
    if len(message.holdings) > limits.beliefs:
        most = f"at most {limits.beliefs}"
        raise _refuse("holdings", len(message.holdings), "are too many jobs of one node", most)
    return tuple(
        Holding(
            rdzv_id=rdzv_id_of(holding.rdzv_id, limits),
            run=_uid("run", holding.run, limits),
            gpus=_within("gpus", holding.gpus, 0, limits.gpus),
        )
        for holding in message.holdings
    )


def failing_of(message: pb.Health, limits: Limits) -> tuple[FailingCheck, ...]:
    """Read what is wrong with a node; the first of too many are reason enough."""
    return tuple(
        FailingCheck(sentence(one.name, limits), sentence(one.reason, limits))
        for one in message.failing[: limits.failing_checks]
    )


def check_protocol(version: int) -> None:
    """Refuse a node that speaks another protocol than this server understands."""
    if OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        return
    older = version < OLDEST_PROTOCOL_VERSION
    accepted = f"{PROTOCOL_VERSION}"
    if OLDEST_PROTOCOL_VERSION != PROTOCOL_VERSION:
        accepted = f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
    raise InvalidRequestError(
        f"the node speaks protocol {version}, this server speaks {accepted}; upgrade the "
        f"{'agent' if older else 'server'}"
    )


def belief_of(message: pb.Belief, speaker: Speaker, limits: Limits) -> Belief:
    """Read what a node believes about one job, and the commands that say so."""
    phase = message.phase
    # Only who waits for a round holds a port ready for its store.
    least_port = 1 if phase == pb.Belief.JOINING else 0
    join = _join(message.join, speaker, limits, least_port)
    rdzv_id = rdzv_id_of(message.join.rdzv_id, limits)
    round_ = message.round.round if message.HasField("round") else None
    if message.HasField("round") and message.round.rdzv_id != rdzv_id:
        raise _refuse("rdzv_id", message.round.rdzv_id, f"is not {rdzv_id}", "name one job")
    run = _uid("run", message.round.run or join.run, limits, needed=False)
    claim = _claim(message.round, join, limits) if message.HasField("round") and run else None
    resume: tuple[Command, ...] = ()
    if round_ is not None:
        again = Resume(speaker.node_id, speaker.incarnation, run, round_, claim)
        resume = (replace(again, secret=join.secret),)
    store_host: tuple[Command, ...] = ()
    if round_ is not None and message.store_host_failed:
        reason = sentence(message.store_host_failed, limits)
        failed = ReportStoreHost(speaker.node_id, speaker.incarnation, run, round_, reason)
        # Who has moved to another incarnation is heard of its seat after it has taken it.
        store_host = (*resume, failed)
    if phase == pb.Belief.JOINING:
        join = replace(join, claim=claim)
        return Belief(rdzv_id, run, round_, has_workers=False, commands=(*store_host, join))
    if phase == pb.Belief.LEAVING:
        leave = _leave(message.leave, speaker, limits)
        gone = round_ is None or leave.left_round == round_
        return Belief(rdzv_id, run, round_, not gone, (*(store_host or resume), leave))
    if phase not in _WITH_WORKERS:
        raise _refuse("phase", phase, "is not known to this server", "upgrade the server")
    if round_ is None or not run:
        raise _refuse("phase", phase, "needs a round and its run", "name both")
    failures = _failures(message.failures, limits)
    commands = [*(store_host or resume)]
    if phase == pb.Belief.SUCCEEDED:
        commands.append(Succeed(speaker.node_id, speaker.incarnation, run, round_))
    elif failures:
        commands.append(Fail(speaker.node_id, speaker.incarnation, run, round_, failures))
    return Belief(rdzv_id, run, round_, has_workers=True, commands=tuple(commands))


_WITH_WORKERS = (pb.Belief.RUNNING, pb.Belief.STOPPING, pb.Belief.SUCCEEDED)


def _claim(line: pb.RoundCompleted, join: Join, limits: Limits) -> Claim | None:
    """Read what was announced to the node; None if no round can be rebuilt from it.

    That is no reason to refuse what else the node says: it may be needed by nobody.
    """
    try:
        return _checked_claim(line, join, limits)
    except InvalidRequestError:
        return None


def _checked_claim(line: pb.RoundCompleted, join: Join, limits: Limits) -> Claim:
    nodes = _within("group_world_size", line.group_world_size, 1, limits.nodes_per_job)
    most = nodes * limits.local_world_size
    return Claim(
        round=line.round,
        group_rank=_within("group_rank", line.group_rank, 0, nodes - 1),
        group_world_size=nodes,
        rank_first=_within("rank_first", line.rank_first, 0, most),
        world_size=_within("world_size", line.world_size, nodes, most),
        role_rank_first=_within("role_rank_first", line.role_rank_first, 0, most),
        role_world_size=_within("role_world_size", line.role_world_size, 0, most),
        master_addr=_address("master_addr", line.master_addr, limits),
        master_port=_within("master_port", line.master_port, 1, 65_535),
        use_agent_store=line.use_agent_store,
        restarts=_within("restarts", line.restarts, 0, limits.restarts),
        settings=join.settings,
        offer=join.offer,
        tally=tally_of(line.tally) if line.HasField("tally") else None,
    )


def command_of(message: pb.NodeMessage, speaker: Speaker, limits: Limits) -> tuple[str, Command]:
    """Read a message about a job: its rdzv_id, and what the node asks of its rendezvous."""
    body = message.WhichOneof("body")
    match body:
        case "join":
            return _job(message.join, limits), _join(message.join, speaker, limits)
        case "failed":
            return _job(message.failed, limits), _fail(message.failed, speaker, limits)
        case "succeeded":
            return _job(message.succeeded, limits), _succeed(message.succeeded, speaker, limits)
        case "leave":
            return _job(message.leave, limits), _leave(message.leave, speaker, limits)
        case "stuck":
            return _job(message.stuck, limits), _stuck(message.stuck, speaker, limits)
        case "store_host_failed":
            failed = message.store_host_failed
            return _job(failed, limits), _store_host(failed, speaker, limits)
        case "declined":
            return _job(message.declined, limits), _decline(message.declined, speaker, limits)
    raise _refuse("message", body, "has no place here", "say hello once; upgrade the server")


_AboutJob = (
    pb.Join | pb.Failed | pb.Succeeded | pb.Leave | pb.Stuck | pb.StoreHostFailed | pb.Declined
)


def _job(message: _AboutJob, limits: Limits) -> str:
    return rdzv_id_of(message.rdzv_id, limits)


def job_named_in(message: pb.NodeMessage | pb.Belief) -> str:
    """Return the rdzv_id of a message that may be invalid, to name it in the refusal."""
    if isinstance(message, pb.Belief):
        return message.join.rdzv_id
    body = message.WhichOneof("body")
    return str(getattr(getattr(message, body), "rdzv_id", "")) if body else ""


def _join(message: pb.Join, speaker: Speaker, limits: Limits, least_port: int = 1) -> Join:
    return Join(
        node_id=speaker.node_id,
        incarnation=speaker.incarnation,
        run=_uid("run", message.run, limits, needed=False),
        settings=_settings(message.settings, limits),
        offer=_offer(message.offer, limits, least_port),
        left_round=message.left_round if message.HasField("left_round") else None,
        failures=_failures(message.failures, limits),
        refuse_reuse=message.refuse_reuse,
        fenced=message.fenced,
        fenced_age_ms=min(message.fenced_age_ms, limits.timeout_ms),
        moved=Moved(
            message.furthest_step if message.HasField("furthest_step") else None,
            message.snapshot_changed,
        ),
        secret=_secret(message, limits),
    )


def _secret(message: pb.Join, limits: Limits) -> str:
    """Read a job's secret, and keep what does not tell it: a hash that is good for this job alone.

    Whoever reads it can try secrets, so one of few characters is refused.
    """
    if not message.secret:
        return ""
    if not limits.secret_chars_least <= len(message.secret) <= limits.label_chars:
        least = limits.secret_chars_least
        raise InvalidRequestError(
            f"the job secret has {len(message.secret)} characters; give {least} to "
            f"{limits.label_chars}, as `openssl rand -hex 32` makes"
        )
    return hashlib.sha256(f"{message.rdzv_id}\0{message.secret}".encode()).hexdigest()


def _fail(message: pb.Failed, speaker: Speaker, limits: Limits) -> Fail:
    failures = _failures(message.failures, limits)
    run = _uid("run", message.run, limits)
    return Fail(speaker.node_id, speaker.incarnation, run, message.round, failures)


def _succeed(message: pb.Succeeded, speaker: Speaker, limits: Limits) -> Succeed:
    run = _uid("run", message.run, limits)
    return Succeed(speaker.node_id, speaker.incarnation, run, message.round)


def _leave(message: pb.Leave, speaker: Speaker, limits: Limits) -> Leave:
    return Leave(
        node_id=speaker.node_id,
        incarnation=speaker.incarnation,
        # Unknown to a node that leaves before it has heard which run it is in.
        run=_uid("run", message.run, limits, needed=False),
        cause=_one_of("cause", message.cause, _LEAVE_CAUSES),
        reason=sentence(message.reason, limits),
        left_round=message.left_round if message.HasField("left_round") else None,
        exited_zero=message.exited_zero,
    )


def _stuck(message: pb.Stuck, speaker: Speaker, limits: Limits) -> ReportStuck:
    run, pids = _uid("run", message.run, limits), tuple(message.pids[: limits.pids])
    return ReportStuck(speaker.node_id, speaker.incarnation, run, message.round, pids)


def _store_host(message: pb.StoreHostFailed, speaker: Speaker, limits: Limits) -> ReportStoreHost:
    run, reason = _uid("run", message.run, limits), sentence(message.reason, limits)
    return ReportStoreHost(speaker.node_id, speaker.incarnation, run, message.round, reason)


def _decline(message: pb.Declined, speaker: Speaker, limits: Limits) -> Decline:
    run, reason = _uid("run", message.run, limits), sentence(message.reason, limits)
    return Decline(speaker.node_id, run, reason, message.passing)


def away_ms_of(message: pb.Away, limits: Limits) -> int:
    """Read for how long an agent will be away."""
    return _within("deadline_ms", message.deadline_ms, 1, limits.away_ms)


def progress_of(message: pb.Progress, limits: Limits) -> Progress:
    """Read how far the workers of a node are. Which of them it has is for the job to say."""
    ranks = tuple(_rank_progress(one, limits) for one in message.ranks)
    if len(ranks) > limits.local_world_size:
        most = f"at most {limits.local_world_size}"
        raise _refuse("progress", len(ranks), "are too many workers of one node", most)
    if len({one.rank for one in ranks}) < len(ranks):
        raise _refuse("progress", len(ranks), "workers have less RANKs", "name each once")
    return Progress(
        rdzv_id=rdzv_id_of(message.rdzv_id, limits),
        run=_uid("run", message.run, limits),
        round=message.round,
        ranks=ranks,
    )


def _rank_progress(message: pb.RankProgress, limits: Limits) -> RankProgress:
    if not 0 <= message.rate < math.inf:
        raise _refuse("rate", message.rate, "is no rate", "give steps a second, from 0 on")
    age_ms = min(message.age_ms, limits.timeout_ms)
    return RankProgress(message.rank, message.step, age_ms, message.rate)


def log_piece_of(message: pb.LogPiece, limits: Limits) -> LogPiece:
    """Read a piece of a log."""
    if len(message.data) > limits.log_piece_bytes:
        raise _refuse(
            "log_piece",
            message.request,
            f"has {len(message.data)} bytes",
            f"send at most {limits.log_piece_bytes}",
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
        error=sentence(message.error, limits),
    )


def hung_of(message: pb.Hung, limits: Limits) -> Hung:
    """Read who hangs on a node. Which workers it has is for the job to say."""
    if len(message.workers) > limits.local_world_size:
        most = f"at most {limits.local_world_size}"
        raise _refuse("hung", len(message.workers), "are too many workers of one node", most)
    return Hung(
        rdzv_id=rdzv_id_of(message.rdzv_id, limits),
        run=_uid("run", message.run, limits),
        round=message.round,
        workers=tuple(
            HungWorker(
                rank=one.rank,
                local_rank=_within("local_rank", one.local_rank, 0, limits.local_world_size - 1),
                pid=one.pid,
                silent_ms=min(one.silent_ms, limits.timeout_ms),
                reason=sentence(one.reason, limits),
            )
            for one in message.workers
        ),
    )


def stacks_of(message: pb.Stacks, limits: Limits) -> Stacks:
    """Read what some workers are doing; what is too long is cut."""
    if len(message.workers) > limits.stack_workers:
        most = f"send at most {limits.stack_workers} at once"
        raise _refuse("stacks", len(message.workers), "are too many workers", most)
    return Stacks(
        request=message.request,
        workers=tuple(_worker_stack(one, limits) for one in message.workers),
        last=message.last,
        error=sentence(message.error, limits),
    )


def _worker_stack(message: pb.WorkerStack, limits: Limits) -> WorkerStack:
    return WorkerStack(
        rank=message.rank,
        local_rank=message.local_rank,
        pid=message.pid,
        state=message.state[:1],
        threads=tuple(
            Thread(
                _cut(thread.name, limits),
                thread.main,
                tuple(
                    Frame(_cut(frame.name, limits), _cut(frame.file, limits), frame.line)
                    for frame in thread.frames[: limits.stack_frames]
                ),
            )
            for thread in message.threads[: limits.stack_threads]
        ),
        note=sentence(message.note, limits),
        kernel=tuple(_cut(place, limits) for place in message.kernel[: limits.stack_frames]),
    )


def _cut(text: str, limits: Limits) -> str:
    return text[: limits.label_chars]


# ------------------------------------------------------------------ what operators ask


def stacks_wanted_of(message: pb.TakeStacksRequest, limits: Limits) -> tuple[str, int | None]:
    """Read of which run and round stacks are wanted; None: the last."""
    run = _uid("run", message.run, limits, needed=False)
    return run, message.round if message.HasField("round") else None


def logs_wanted_of(message: pb.ReadLogsRequest, limits: Limits) -> LogsWanted:
    """Read which logs are wanted."""
    if len(message.positions) > limits.log_positions:
        raise _refuse(
            "positions",
            len(message.positions),
            "are too many",
            f"give at most {limits.log_positions}",
        )
    both = not message.stdout and not message.stderr
    return LogsWanted(
        rank=message.rank if message.HasField("rank") else None,
        round=message.round if message.HasField("round") else None,
        stdout=message.stdout or both,
        stderr=message.stderr or both,
        follow=message.follow,
        tail_bytes=message.tail_bytes,
        tail_lines=message.tail_lines,
        run=_uid("run", message.run, limits, needed=False),
        positions=tuple(
            LogPosition(
                _name("node_id", at.node_id, limits), at.round, at.local_rank, at.stderr, at.offset
            )
            for at in message.positions
        ),
    )


def submit_of(message: pb.SubmitJobRequest, limits: Limits) -> Submit:
    """Read what is submitted."""
    settings = _settings(message.settings, limits)
    if settings.max_restarts is None:
        raise _refuse("max_restarts", None, "is not set", "give a number of restarts, from 0 on")
    return Submit(
        run=_uid("run", message.run, limits),
        settings=settings,
        spec=_spec(message.spec, limits),
        submitted_by=sentence(_label("submitted_by", message.submitted_by, limits), limits)
        or "somebody",
    )


def _spec(message: pb.JobSpec, limits: Limits) -> JobSpec:
    if not message.args:
        raise _refuse("args", [], "are empty", "name a script")
    _sized("args", message.args, limits.args_bytes)
    if "\0" in message.chdir or any("\0" in arg for arg in message.args):
        raise _refuse("args", list(message.args), "have a NUL character", "leave it out")
    gpus = message.gpus_per_node if message.HasField("gpus_per_node") else None
    return JobSpec(
        args=tuple(message.args),
        env=_env(message.env, limits),
        chdir=message.chdir,
        labels=_labels(message.labels, limits),
        priority=_within("priority", message.priority, -limits.priority, limits.priority),
        gpus_per_node=None
        if gpus is None
        else _within("--gpus-per-node: gpus_per_node", gpus, 0, limits.gpus),
        local_world_size=_within(
            "--nproc-per-node: local_world_size",
            message.local_world_size,
            0,
            limits.local_world_size,
        ),
        needs_gpu=message.needs_gpu,
        account=_label("--user: account", message.account, limits),
    )


def _env(messages: Sequence[pb.EnvironmentVariable], limits: Limits) -> tuple[tuple[str, str], ...]:
    """Read an environment. No value of it is ever shown, also where it is refused."""
    if len(messages) > limits.env_variables:
        most = f"give at most {limits.env_variables}"
        raise _refuse("env", len(messages), "are too many variables", most)
    _sized("env", [text for one in messages for text in (one.name, one.value)], limits.env_bytes)
    allowed = "letters, digits and _, not beginning with a digit"
    env = {}
    for variable in messages:
        name = _spelled("variable", variable.name, _VARIABLE, limits.label_chars, allowed)
        if "\0" in variable.value:
            raise _refuse("variable", name, "has a value with a NUL character", "leave it out")
        env[name] = variable.value
    return tuple(env.items())


def _sized(what: str, texts: Iterable[str], most: int) -> None:
    size = sum(len(text.encode()) for text in texts)
    if size > most:
        remedy = f"give at most {most}; what is larger belongs into a file"
        raise _refuse(what, f"of {size} bytes", "is too large", remedy)


def cordon_of(message: pb.CordonNodeRequest, limits: Limits) -> tuple[str, str]:
    """Read on which node nothing more is to be placed, and why."""
    return node_id_of(message.node_id, limits), sentence(message.reason, limits)


def node_id_of(text: str, limits: Limits) -> str:
    """Check the name of a node."""
    return _name("node_id", text, limits)


def drain_of(message: pb.DrainNodeRequest, limits: Limits) -> tuple[str, int, str]:
    """Read which node is to be empty, in how many milliseconds, and why."""
    deadline_ms = _within("deadline_ms", message.deadline_ms, 0, limits.timeout_ms)
    reason = sentence(message.reason, limits) or "an operator asked for it"
    return node_id_of(message.node_id, limits), deadline_ms, reason


def stop_of(message: pb.StopJobRequest, limits: Limits) -> Stop:
    """Read which run is to end."""
    return Stop(_uid("run", message.run, limits), _wish(message.reason, limits))


def restart_of(message: pb.RestartJobRequest, limits: Limits) -> Restart:
    """Read which round is to end."""
    run = _uid("run", message.run, limits)
    return Restart(run, message.round, _wish(message.reason, limits))


def scale_of(message: pb.ScaleJobRequest, limits: Limits) -> Scale:
    """Read a run's new bounds."""
    run = _uid("run", message.run, limits)
    return Scale(run, *_bounds(message, limits), _wish(message.reason, limits))


def _wish(reason: str, limits: Limits) -> str:
    return sentence(reason, limits) or "an operator asked for it"


# ------------------------------------------------------------------ what nodes are told


def server_message(
    told: Told, leadership: int, server_version: str, now_ms: int
) -> pb.ServerMessage:
    """Write one message to a node."""
    message = pb.ServerMessage(leadership=leadership)
    match told:
        case Welcome():
            message.welcome.protocol_version = PROTOCOL_VERSION
            message.welcome.incarnation = told.incarnation
            message.welcome.heartbeat_interval_ms = told.heartbeat_interval_ms
            message.welcome.lease_ms = told.lease_ms
            message.welcome.server_version = server_version
        case Lease():
            message.lease.heartbeat_interval_ms = told.heartbeat_interval_ms
            message.lease.lease_ms = told.lease_ms
        case Heard():
            message.heard.number = told.number
        case Joined():
            message.joined.CopyFrom(_copied(pb.Joined(), told))
        case Line():
            message.round_completed.CopyFrom(_line(told))
        case RoundOver():
            message.round_ended.CopyFrom(_round_ended(told))
        case Closed():
            message.closed.CopyFrom(_closed(told, now_ms))
        case Refused():
            message.refused.CopyFrom(_copied(pb.Refused(), told))
        case Waiting():
            message.waiting.CopyFrom(_copied(pb.Waiting(), told))
        case ReadLog():
            message.read_log.CopyFrom(_read_log(told))
        case LogCredit():
            message.log_credit.CopyFrom(_copied(pb.LogCredit(), told))
        case Placed():
            placed = pb.Placed(rdzv_id=told.rdzv_id, run=told.run, spec=_job_spec(told.spec))
            message.placed.CopyFrom(placed)
        case Withdrawn():
            message.withdrawn.CopyFrom(_copied(pb.Withdrawn(), told))
        case LookAgain():
            message.look_again.SetInParent()
        case TakeStacks():
            message.take_stacks.CopyFrom(_copied(pb.TakeStacks(), told))
        case DrainNode():
            message.drain.deadline_ms = told.left_ms
            message.drain.reason, message.drain.number = told.reason, told.number
        case UndrainNode():
            message.undrain.SetInParent()
    return message


def _job_spec(spec: JobSpec) -> pb.JobSpec:
    return pb.JobSpec(
        args=spec.args,
        env=[pb.EnvironmentVariable(name=name, value=value) for name, value in spec.env],
        chdir=spec.chdir,
        labels=_label_messages(spec.labels),
        priority=spec.priority,
        gpus_per_node=spec.gpus_per_node,
        local_world_size=spec.local_world_size,
        needs_gpu=spec.needs_gpu,
        submitter=spec.submitter,
        account=spec.account,
    )


def _label_messages(labels: Iterable[tuple[str, str]]) -> list[pb.Label]:
    return [pb.Label(name=name, value=value) for name, value in labels]


M = TypeVar("M", bound=Message)


_Flat = (
    Joined
    | Line
    | Refused
    | Waiting
    | NodeView
    | BudgetsView
    | RankProgress
    | LogCredit
    | LogLines
    | Withdrawn
    | TakeStacks
    | SilentNode
    | Frame
)

_FIELDS = {
    kind: tuple(name for name in field_names(kind) if name != "tally")
    for kind in (*get_args(_Flat), LogPosition)
}
"""Looked up once for each kind, not for each message: a round is told to thousands of nodes. What
is no plain field is written apart."""


def _copied(message: M, value: _Flat | LogPosition) -> M:
    """Fill a message from a value whose fields have its names; None stays unset."""
    for name in _FIELDS[type(value)]:
        content = getattr(value, name)
        if content is not None:
            setattr(message, name, content)
    return message


def _line(told: Line) -> pb.RoundCompleted:
    tally, message = told.tally, _copied(pb.RoundCompleted(), told)
    if tally is not None:
        message.tally.CopyFrom(tally_message(tally))
    return message


def _read_log(told: ReadLog) -> pb.ReadLog:
    return pb.ReadLog(
        request=told.request,
        rdzv_id=told.rdzv_id,
        round=told.round,
        rank=told.rank,
        stdout=told.stdout,
        stderr=told.stderr,
        follow=told.follow,
        tail_bytes=told.tail_bytes,
        tail_lines=told.tail_lines,
        credit=told.credit,
        positions=[_copied(pb.LogPosition(), at) for at in told.positions],
    )


def _round_ended(told: RoundOver) -> pb.RoundEnded:
    return pb.RoundEnded(
        rdzv_id=told.rdzv_id,
        run=told.run,
        round=told.round,
        cause=pb.Cause.Value(told.end.cause.name),
        reason=told.end.reason,
        broken=told.end.broken,
    )


def _closed(told: Closed, now_ms: int) -> pb.Closed:
    return pb.Closed(
        rdzv_id=told.rdzv_id,
        run=told.run,
        result=_RESULTS[told.ended.result],
        reason=told.ended.reason,
        retry_sensible=told.ended.retry_sensible,
        root_cause=_root_cause(told.ended.failures, now_ms),
        no_progress=told.ended.no_progress,
    )


def _root_cause(failures: Iterable[Failure], now_ms: int) -> pb.RootCause | None:
    written = [
        pb.NodeFailure(
            node_id=failure.node_id, address=failure.address, failure=_worker(failure, now_ms)
        )
        for failure in failures
    ]
    return pb.RootCause(failures=written) if written else None


def _worker(failure: Failure, now_ms: int) -> pb.WorkerFailure:
    return pb.WorkerFailure(
        local_rank=failure.local_rank,
        rank=failure.rank,
        pid=failure.pid,
        exit_code=failure.exit_code,
        signal=failure.signal,
        message=failure.message,
        traceback=failure.traceback,
        age_ms=max(now_ms - failure.at_ms, 0),
    )


# ------------------------------------------------------------------ what operators are told


def job_status(
    view: JobView,
    now_ms: int,
    progress: Iterable[RankProgress] = (),
    stragglers: Iterable[Straggler] = (),
) -> pb.JobStatus:
    """Write everything that `status` shows of a job, and how far its workers are."""
    status = pb.JobStatus()
    status.progress.extend(_copied(pb.RankProgress(), one) for one in progress)
    status.stragglers.extend(
        pb.Straggler(
            rank=one.rank,
            step_s=one.step_s,
            median_s=one.median_s,
            age_ms=max(now_ms - one.since_ms, 0),
        )
        for one in stragglers
    )
    for name in field_names(type(view)):
        content = getattr(view, name)
        if name == "nodes":
            status.nodes.extend(_copied(pb.NodeStatus(), node) for node in content)
        elif name == "last_failure":
            if content:
                status.last_failure.CopyFrom(_root_cause(content, now_ms) or pb.RootCause())
        elif name == "submission":
            if content is not None:
                status.submission.CopyFrom(_submission(content, view.jobs_before, now_ms))
        elif name == "jobs_before":
            pass
        elif name == "budgets":
            if content is not None:
                status.budgets.CopyFrom(_copied(pb.Budgets(), content))
        elif content is not None:
            setattr(status, name, content)
    return status


def _submission(submission: Submission, jobs_before: int | None, now_ms: int) -> pb.Submission:
    spec = submission.spec
    return pb.Submission(
        submitted_by=submission.submitted_by,
        age_ms=max(now_ms - submission.at_ms, 0),
        args=spec.args,
        env_names=[name for name, _ in spec.env],
        chdir=spec.chdir,
        labels=_label_messages(spec.labels),
        priority=spec.priority,
        gpus_per_node=spec.gpus_per_node,
        placed=submission.placed,
        jobs_before=jobs_before,
        declined=[
            pb.DeclinedNode(node_id=one.node_id, reason=one.reason) for one in submission.declined
        ],
        submitter=spec.submitter,
        account=spec.account,
    )


def node_summary(summary: NodeSummary) -> pb.Node:
    """Write the line that `nodes` shows of a node."""
    resources = None
    if (has := summary.resources) is not None:
        resources = pb.Resources(
            cpus=has.cpus,
            memory_bytes=has.memory_bytes,
            gpus=[
                pb.Gpu(uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_bytes)
                for gpu in has.gpus
            ],
            labels=_label_messages(has.labels),
            capacity=has.capacity,
            topology=has.topology,
        )
    return pb.Node(
        node_id=summary.node_id,
        state=summary.state,
        state_age_ms=summary.state_age_ms,
        program=summary.program,
        address=summary.address,
        agent_version=summary.version,
        resources=resources,
        jobs=[
            pb.NodeJob(rdzv_id=job.rdzv_id, gpus=job.gpus, state=job.state) for job in summary.jobs
        ],
        gpus_free=summary.gpus_free,
        cordoned=summary.cordoned,
        cordon_reason=summary.cordon_reason,
        cordon_age_ms=summary.cordon_age_ms,
        quarantine=summary.quarantine,
        quarantine_age_ms=summary.quarantine_age_ms,
        quarantine_left_ms=summary.quarantine_left_ms,
        unhealthy=summary.unhealthy,
        unhealthy_age_ms=summary.unhealthy_age_ms,
        metrics=summary.metrics,
        drain=summary.drain,
        drain_reason=summary.drain_reason,
        drain_left_ms=summary.drain_left_ms,
        drained_by_operator=summary.drained_by_operator,
    )


def job_summary(view: JobView, hangs: str) -> pb.JobSummary:
    """Write the line that `list` shows of a job; `hangs` says who hangs, or is empty."""
    here = (NodeState.SEATED, NodeState.SUCCEEDED, NodeState.AWAY, NodeState.STOPPING)
    return pb.JobSummary(
        rdzv_id=view.rdzv_id,
        run=view.run,
        state=view.state,
        reason=view.reason,
        round=view.round,
        nodes=sum(1 for n in view.nodes if n.group_rank is not None and n.state in here),
        min_nodes=view.min_nodes,
        max_nodes=view.max_nodes,
        world_size=view.world_size,
        restarts=view.restarts,
        max_restarts=view.max_restarts,
        state_age_ms=view.state_age_ms,
        backend=view.backend,
        hangs=hangs,
    )


def log_lines(lines: LogLines) -> pb.LogLines:
    """Write a piece of a log, or a note."""
    return _copied(pb.LogLines(), lines)


def stack_report(report: Report, now_ms: int) -> pb.StackReport:
    """Write what the workers of a round were doing."""
    return pb.StackReport(
        rdzv_id=report.rdzv_id,
        run=report.run,
        round=report.round,
        age_ms=max(now_ms - report.at_ms, 0),
        reason=report.reason,
        summary=report.summary,
        groups=[pb.StackGroup(ranks=one.ranks, where=one.where) for one in report.groups],
        stacks=[
            pb.WorkerStack(
                rank=stack.rank,
                local_rank=stack.local_rank,
                pid=stack.pid,
                state=stack.state,
                threads=[
                    pb.ThreadStack(
                        name=thread.name,
                        main=thread.main,
                        frames=[_copied(pb.StackFrame(), frame) for frame in thread.frames],
                    )
                    for thread in stack.threads
                ],
                note=stack.note,
                kernel=stack.kernel,
                node_id=stack.node_id,
            )
            for stack in report.stacks
        ],
        left_out=report.left_out,
        silent=[_copied(pb.SilentNode(), node) for node in report.silent],
    )


def event_row(record: Record) -> pb.Event:
    """Write one row of a job's history."""
    return pb.Event(
        unix_ms=record.unix_ms,
        rdzv_id=record.rdzv_id,
        run=record.run,
        name=record.name,
        text=record.text,
    )


def history_limit(asked: int, limits: Limits) -> int:
    """Read how many rows of history are wanted."""
    return _within("limit", asked or limits.history_default, 1, limits.history_rows)


def server(view: ServerView) -> pb.Server:
    """Show one rdzvd."""
    return pb.Server(
        address=view.address,
        leads=view.leads,
        leadership=view.leadership,
        store=view.store,
        server_version=view.version,
        state_age_ms=view.state_age_ms,
        insecure=view.insecure,
        store_away=view.store_away,
    )


TOKEN_LIFE_MOST_MS = 3_650 * DAY_MS
"""Ten years: who wants more, wants a token that does not expire."""


def token_life_of(message: pb.CreateTokenRequest, limits: Limits) -> int:
    """Read for how long a token is to be good; 0: for ever."""
    return _within("expires_in_ms", message.expires_in_ms, 0, TOKEN_LIFE_MOST_MS)


def token(token: Token, now_ms: int) -> pb.Token:
    """Write what may be known of a token."""
    message = pb.Token(
        id=token.id, name=token.name, roles=token.roles, age_ms=max(now_ms - token.created_ms, 0)
    )
    if token.expires_ms is not None:
        message.expires_in_ms = max(token.expires_ms - now_ms, 0)
    if token.used_ms is not None:
        message.used_age_ms = max(now_ms - token.used_ms, 0)
    return message

"""The client's door to rdzvd: endpoints, calls with a deadline, and statuses turned into errors.

`ControlClient` asks the `Control` service and answers with plain values in which None means "not
known". Only here are protobuf messages seen on the client's side of that service, and no gRPC
exception leaves: every failure is an error of the table in `rdzv.errors`.

`parse_endpoint`, `error_from_status` and what a node's stream needs (`STREAM_OPTIONS`,
`FINAL_REFUSALS`) are shared with the agent and the plug-in for torchrun.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote

import grpc

from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import (
    ERROR_CODE_METADATA_KEY,
    ERRORS,
    InvalidRequestError,
    LimitExceededError,
    NodeSupersededError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    SettingsMismatchError,
)
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1.rdzv_pb2_grpc import ControlStub

DEFAULT_PORT = 29400
"""Where rdzvd listens; torchrun's port for a rendezvous endpoint."""

PROTOCOL_VERSION = 1
"""The protocol that the nodes of this version speak."""

DEFAULT_TIMEOUT_S = 5.0
"""How long one call may take before the server counts as not answering."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # The server is inside the cluster; a proxy for the Internet would answer in its place.
    ("grpc.enable_http_proxy", 0),
    # A status of ten thousand nodes that all wait is beyond gRPC's own limit of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
)
"""What every channel to rdzvd is opened with."""

STREAM_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    # A stopped peer or a dropped path is noticed by unanswered pings; the keepalive timeout alone
    # does not notice them.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Each attempt has a channel of its own, and its own backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
"""What the channel of a node's stream is opened with."""

FINAL_REFUSALS = frozenset(
    error.code
    for error in (
        InvalidRequestError,
        NodeSupersededError,
        RendezvousClosedError,
        SettingsMismatchError,
    )
)
"""What no repetition will change. After any other refusal a node says everything again, later."""

_UINT32_MAX = 2**32 - 1

_SCALE_UPS = {ScaleUp.EAGER: pb.SCALE_UP_EAGER, ScaleUp.ON_RESTART: pb.SCALE_UP_ON_RESTART}


def settings_message(settings: Settings) -> pb.Settings:
    """Say how a job was launched; every node of it, of whichever agent, says the same."""
    return pb.Settings(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        max_restarts=settings.max_restarts,
        join_timeout_ms=settings.join_timeout_ms,
        last_call_timeout_ms=settings.last_call_timeout_ms,
        scale_up=_SCALE_UPS[settings.scale_up],
        restart_window_ms=settings.restart_window_ms,
    )


# ------------------------------------------------------------------------------------ endpoints

_BRACKETED = re.compile(r"\[(?P<host>[^\[\]]*)\](?::(?P<port>.*))?", re.DOTALL)
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens; `host` has no brackets, `str()` puts them where they belong."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The endpoint as gRPC wants it, safe against host names that look like URI schemes."""
        return f"dns:///{quote(str(self), safe='[]:')}"


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Read `host`, `host:port`, `[v6]` or `[v6]:port`.

    Anything else is refused with `InvalidRequestError`, which names value, reason and remedy.

    >>> str(parse_endpoint("head-1")), str(parse_endpoint("[::1]:7"))
    ('head-1:29400', '[::1]:7')
    """
    value = text.strip()
    if bracketed := _BRACKETED.fullmatch(value):
        host, port = bracketed["host"], bracketed["port"]
        _check_v6(text, host)
    else:
        host, colon, rest = value.partition(":")
        port = rest if colon else None
        _check_host(text, host, rest)
    return Endpoint(host, default_port if port is None else _parse_port(text, port))


def _check_v6(text: str, host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise _bad_endpoint(
            text, f"{host!r} is no IPv6 address", "only IPv6 addresses stand in brackets"
        ) from None


def _check_host(text: str, host: str, rest: str) -> None:
    """Refuse a host that no server can have, with a remedy for the usual slips."""
    if rest.startswith("//"):
        raise _bad_endpoint(text, "it is a URL", "leave out everything but HOST:PORT")
    if ":" in rest:
        raise _bad_endpoint(text, "it has more than one colon", "write IPv6 as [ADDRESS]:PORT")
    if not host:
        raise _bad_endpoint(text, "it names no host", "write HOST or HOST:PORT")
    if not _HOST_NAME.fullmatch(host):
        raise _bad_endpoint(
            text, f"{host!r} is no host name or address", "write HOST, HOST:PORT or [IPv6]:PORT"
        )


def _parse_port(text: str, port: str) -> int:
    if port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65535:
        return int(port)
    raise _bad_endpoint(text, f"{port!r} is no port", "a port is a number from 1 to 65535")


def _bad_endpoint(text: str, reason: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"endpoint {text!r} can not be used: {reason}; {remedy}")


# ------------------------------------------------------------------------------------ the values


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """One worker that failed. Exactly one of `exit_code` and `signal` is known if it has exited."""

    node_id: str
    address: str | None
    rank: int
    local_rank: int
    pid: int | None
    exit_code: int | None
    signal: int | None
    message: str | None
    traceback: str | None


@dataclass(frozen=True, slots=True)
class LastFailure:
    """The last worker failure of a run: its root cause, and what failed right beside it."""

    age_ms: int | None
    root_cause: WorkerFailure
    others: tuple[WorkerFailure, ...]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of a job. `reason` says why it is not seated; None if it is."""

    node_id: str
    state: str
    group_rank: int | None
    rank_first: int | None
    local_world_size: int | None
    address: str | None
    role: str | None
    state_age_ms: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a job is doing, and why. `round` and `world_size` are those of the last complete one."""

    rdzv_id: str
    run: str | None
    run_number: int | None
    state: str
    state_age_ms: int
    reason: str | None
    run_age_ms: int
    round: int | None
    min_nodes: int
    max_nodes: int
    world_size: int | None
    restarts: int | None
    max_restarts: int | None
    master_addr: str | None
    master_port: int | None
    nodes: tuple[NodeStatus, ...]
    last_end: str | None
    last_failure: LastFailure | None


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One job in a list. `nodes` counts those that are seated now."""

    rdzv_id: str
    run: str | None
    state: str
    state_age_ms: int
    reason: str | None
    round: int | None
    nodes: int
    min_nodes: int
    max_nodes: int
    world_size: int | None
    restarts: int | None
    max_restarts: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a job's history; `unix_ms` is the server's clock, for people."""

    unix_ms: int
    run: str | None
    name: str
    text: str


# ------------------------------------------------------------------------------------ the client

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class ControlClient:
    """Asks one rdzvd what its jobs do. Every call ends within `timeout_s`.

    Calls raise `UnknownJobError` for a job that the server does not know, and
    `RendezvousConnectionError` if there is no server, no answer, or no rdzvd behind the endpoint.
    """

    def __init__(self, server: Endpoint, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not 0 < timeout_s < math.inf:
            raise InvalidRequestError(f"timeout {timeout_s} s can not be used: it must be above 0")
        self.server = server
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(server.target, options=CHANNEL_OPTIONS)
        self._stub = ControlStub(self._channel)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back; the client answers no more calls."""
        self._channel.close()

    def status(self, rdzv_id: str) -> JobStatus:
        """Return what a job is doing; of a job that has ended, its last run."""
        request = pb.GetStatusRequest(rdzv_id=_checked_name(rdzv_id))
        return _job_status(self._call(self._stub.GetStatus, request))

    def jobs(self) -> tuple[JobSummary, ...]:
        """Return every job that the server knows, by name."""
        response = self._call(self._stub.ListJobs, pb.ListJobsRequest())
        return tuple(sorted(map(_job_summary, response.jobs), key=lambda job: job.rdzv_id))

    def events(self, rdzv_id: str, limit: int = 0) -> tuple[Event, ...]:
        """Return the newest `limit` events of a job, oldest first; 0: as many as it sees fit."""
        if not 0 <= limit <= _UINT32_MAX:
            raise InvalidRequestError(f"limit {limit} can not be used: it must be 0 or above")
        request = pb.ListEventsRequest(rdzv_id=_checked_name(rdzv_id), limit=limit)
        return tuple(map(_event, self._call(self._stub.ListEvents, request).events))

    def _call(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request
    ) -> _Response:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            # What a blocking call raises is always a call as well; the base class does not say so.
            assert isinstance(error, grpc.Call)
            raise error_from_status(
                error.code(),
                error.details(),
                error.trailing_metadata(),
                self.server,
                self._timeout_s,
            ) from error


def _checked_name(rdzv_id: str) -> str:
    """Refuse a name that can not travel: bytes from a shell that are no UTF-8."""
    try:
        rdzv_id.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"job name {rdzv_id!r} can not be used: no UTF-8") from None
    return rdzv_id


# ------------------------------------------------------------------------------------ the errors

_NOT_RDZV = "what listens there is not an rdzv server"
_CHECK = "check the address, and that rdzvd runs there"

# gRPC tells why a connection failed in its details only. A text that is not here is shown as it is.
_CONNECTION_REASONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), reason)
    for pattern, reason in (
        ("connection refused", "connection refused"),
        ("no route to host", "no route to host"),
        ("network is unreachable", "network is unreachable"),
        ("timed out|timeout occurred", "connection timed out"),
        ("lookup failed|name not found|dns resolution|errors resolving", "no such host name"),
        ("http1|HTTP/2|http2|ssl|handshake", _NOT_RDZV),
        ("reset by peer|socket closed|broken pipe", "the other side closed the connection"),
    )
)


def error_from_status(
    status: grpc.StatusCode,
    details: str | None,
    trailing: Iterable[tuple[str, str | bytes]] | None,
    server: Endpoint,
    timeout_s: float,
) -> RendezvousError:
    """Turn the status of a failed call into the error that it stands for.

    A code in the trailing metadata decides. Without one, the server has not said anything:
    it could not be reached, did not answer in time, or is something else.
    """
    text = details or "no details given"
    if code := _error_code(trailing):
        return ERRORS.get(code, RendezvousError)(text)
    match status:
        case grpc.StatusCode.UNAVAILABLE:
            return _unreachable(server, _connection_reason(text), _CHECK)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            remedy = f"it may be stopped or overloaded, or a firewall drops packets; {_CHECK}"
            return _unreachable(server, f"no answer within {timeout_s:g} s", remedy)
        case grpc.StatusCode.UNIMPLEMENTED:
            return _unreachable(server, f"{_NOT_RDZV}, or an older one", _CHECK)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LimitExceededError(
                f"a limit stands in the way of the server at {server}: {text}"
            )
        case _:
            return RendezvousError(f"the server at {server} answered {status.name}: {text}")


def _error_code(trailing: Iterable[tuple[str, str | bytes]] | None) -> str:
    for key, value in trailing or ():
        if key == ERROR_CODE_METADATA_KEY:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _connection_reason(details: str) -> str:
    for pattern, reason in _CONNECTION_REASONS:
        if pattern.search(details):
            return reason
    return details


def _unreachable(server: Endpoint, reason: str, remedy: str) -> RendezvousConnectionError:
    return RendezvousConnectionError(f"can not reach rdzvd at {server}: {reason}; {remedy}")


# ------------------------------------------------------------------------------------ the wire

_Message = pb.JobStatus | pb.JobSummary | pb.NodeStatus | pb.WorkerFailure


def _optional(message: _Message, field: str) -> int | None:
    """Return a number that is optional on the wire; None if it is not set."""
    return int(getattr(message, field)) if message.HasField(field) else None  # type: ignore[arg-type]


def _job_status(status: pb.JobStatus) -> JobStatus:
    return JobStatus(
        rdzv_id=status.rdzv_id,
        run=status.run or None,
        run_number=status.run_number or None,
        state=status.state,
        state_age_ms=status.state_age_ms,
        reason=status.reason or None,
        run_age_ms=status.run_age_ms,
        round=_optional(status, "round"),
        min_nodes=status.min_nodes,
        max_nodes=status.max_nodes,
        world_size=status.world_size or None,
        restarts=_optional(status, "restarts"),
        max_restarts=_optional(status, "max_restarts"),
        master_addr=status.master_addr or None,
        master_port=status.master_port or None,
        nodes=tuple(map(_node_status, status.nodes)),
        last_end=status.last_end or None,
        last_failure=_last_failure(status),
    )


def _node_status(node: pb.NodeStatus) -> NodeStatus:
    return NodeStatus(
        node_id=node.node_id,
        state=node.state,
        group_rank=_optional(node, "group_rank"),
        rank_first=_optional(node, "rank_first"),
        local_world_size=node.local_world_size or None,
        address=node.address or None,
        role=node.role or None,
        state_age_ms=node.state_age_ms,
        reason=node.reason or None,
    )


def _last_failure(status: pb.JobStatus) -> LastFailure | None:
    failures = tuple(map(_worker_failure, status.last_failure.failures))
    if not failures:
        return None
    return LastFailure(_optional(status, "last_failure_age_ms"), failures[0], failures[1:])


def _worker_failure(failed: pb.NodeFailure) -> WorkerFailure:
    failure = failed.failure
    return WorkerFailure(
        node_id=failed.node_id,
        address=failed.address or None,
        rank=failure.rank,
        local_rank=failure.local_rank,
        pid=failure.pid or None,
        exit_code=_optional(failure, "exit_code"),
        signal=_optional(failure, "signal"),
        message=failure.message or None,
        traceback=failure.traceback or None,
    )


def _job_summary(job: pb.JobSummary) -> JobSummary:
    return JobSummary(
        rdzv_id=job.rdzv_id,
        run=job.run or None,
        state=job.state,
        state_age_ms=job.state_age_ms,
        reason=job.reason or None,
        round=_optional(job, "round"),
        nodes=job.nodes,
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        world_size=job.world_size or None,
        restarts=_optional(job, "restarts"),
        max_restarts=_optional(job, "max_restarts"),
    )


def _event(event: pb.Event) -> Event:
    return Event(event.unix_ms, event.run or None, event.name, event.text)

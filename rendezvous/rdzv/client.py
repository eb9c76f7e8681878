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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, TypeVar
from urllib.parse import quote

import grpc

from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import (
    ERROR_CODE_METADATA_KEY,
    ERRORS,
    LEADER_METADATA_KEY,
    InvalidRequestError,
    LimitExceededError,
    NodeSupersededError,
    NotLeaderError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    SettingsMismatchError,
)
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1.rdzv_pb2_grpc import ControlStub

if TYPE_CHECKING:
    from rdzv.stores.backup import Summary

DEFAULT_PORT = 29400
"""Where rdzvd listens; torchrun's port for a rendezvous endpoint."""

OWN_BACKEND = "rdzv"
"""Who forms the group of a job unless something else is said; an older server does not say."""

PROTOCOL_VERSION = 1
"""The protocol that the nodes of this version speak."""

WATCH_TIMEOUT_S = 60.0
"""For how long a watcher looks for a server that answers, when it has lost the one that did."""
WATCH_RETRY_S = 0.5

LOG_POSITIONS = 65_536
"""In how many files a reader of logs can go on after its stream was cut."""

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


def parse_endpoints(text: str, default_port: int = DEFAULT_PORT) -> tuple[Endpoint, ...]:
    """Read one or several endpoints, with commas between them.

    Raises:
        InvalidRequestError: one of them can not be used, or there is none.

    """
    found = tuple(parse_endpoint(part, default_port) for part in text.split(",") if part.strip())
    if not found:
        raise _bad_endpoint(text, "it names no host", "write HOST:PORT, or several with commas")
    return found


class Rota:
    """Which of several servers is asked next: the one that leads, as far as was said, or in turn.

    A server that stands by names the one that leads, which need not be among those that were
    given. It is tried once; if it can not be reached, the others have their turn.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._turn = 0
        self._leader: Endpoint | None = None
        self._led = False
        """The last one asked was named by another, so a redirection from it may lead in circles."""

    @property
    def present(self) -> Endpoint:
        """Whom to ask now."""
        return self._leader or self._endpoints[self._turn % len(self._endpoints)]

    def failed(self, error: RendezvousError) -> bool:
        """Note why the present one is of no use; say whether another may be asked at once."""
        circles, self._led = self._led, False
        leader = _leader_named(error)
        if leader is not None and leader != self.present and not circles:
            self._leader, self._led = leader, True
            return True
        self._turn, self._leader = self._turn + 1, None
        return False


def _leader_named(error: RendezvousError) -> Endpoint | None:
    if not isinstance(error, NotLeaderError) or not error.leader:
        return None
    try:
        return parse_endpoint(error.leader)
    except InvalidRequestError:
        return None


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
class RankProgress:
    """How far one worker is, as it has said itself so long ago. `rate` is in steps a second."""

    rank: int
    step: int
    age_ms: int
    rate: float | None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a job is doing, and why. `round` and `world_size` are those of the last complete one.

    `backend` is who forms its group: `rdzv`, or `c10d`, which the server only watches. `progress`
    has those workers of the round that runs which have said how far they are, by RANK.
    """

    rdzv_id: str
    run: str | None
    run_number: int | None
    state: str
    state_age_ms: int
    reason: str | None
    run_age_ms: int
    round: int | None
    min_nodes: int | None
    max_nodes: int | None
    world_size: int | None
    restarts: int | None
    max_restarts: int | None
    master_addr: str | None
    master_port: int | None
    nodes: tuple[NodeStatus, ...]
    last_end: str | None
    last_failure: LastFailure | None
    backend: str
    progress: tuple[RankProgress, ...]


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
    min_nodes: int | None
    max_nodes: int | None
    world_size: int | None
    restarts: int | None
    max_restarts: int | None
    backend: str


@dataclass(frozen=True, slots=True)
class Server:
    """One rdzvd. `leadership` is the number of the one that leads."""

    address: str
    leads: bool
    leadership: int | None
    store: str
    version: str
    state_age_ms: int


@dataclass(frozen=True, slots=True)
class LogLines:
    """A piece of what one worker has written, or a `note` why something of its node is missing.

    A piece may end anywhere in a line; those of one worker, round and stream are in order.
    """

    node_id: str
    rank: int
    local_rank: int
    stderr: bool
    round: int
    data: bytes
    note: str | None


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
    """Asks one rdzvd, or whichever of several leads, what its jobs do.

    Every call ends within `timeout_s` for each server that is asked. Calls raise `UnknownJobError`
    for a job that the server does not know, and `RendezvousConnectionError` if there is no server,
    no answer, or no rdzvd behind the endpoint.
    """

    def __init__(
        self, server: Endpoint | Sequence[Endpoint], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise InvalidRequestError(f"timeout {timeout_s} s can not be used: it must be above 0")
        servers = (server,) if isinstance(server, Endpoint) else tuple(server)
        self._timeout_s = timeout_s
        self._rota = Rota(servers)
        self._turns = len(servers)
        self._channels: dict[Endpoint, grpc.Channel] = {}

    @property
    def server(self) -> Endpoint:
        """The server that was asked last, or will be asked first."""
        return self._rota.present

    def _stub(self) -> ControlStub:
        if self.server not in self._channels:
            target = self.server.target
            self._channels[self.server] = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        return ControlStub(self._channels[self.server])

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
        for channel in self._channels.values():
            channel.close()

    def status(self, rdzv_id: str) -> JobStatus:
        """Return what a job is doing; of a job that has ended, its last run."""
        request = pb.GetStatusRequest(rdzv_id=_checked_name(rdzv_id))
        return _job_status(self._call(lambda stub: stub.GetStatus, request))

    def watch(self, rdzv_id: str) -> Iterator[JobStatus]:
        """Yield what a job is doing, at once and then whenever it changes; this never ends.

        While no server answers it asks those that it knows in turn, and raises only when none of
        them has for a while.
        """
        request = pb.GetStatusRequest(rdzv_id=_checked_name(rdzv_id))
        silent_since_s = time.monotonic()
        while True:
            call = self._stub().WatchJob(request)
            try:
                for status in call:
                    yield _job_status(status)
                    silent_since_s = time.monotonic()
            except grpc.RpcError as failure:
                error = self._error(failure)
                silent_s = time.monotonic() - silent_since_s
                lasting = not isinstance(error, RendezvousConnectionError | LimitExceededError)
                if lasting or silent_s > WATCH_TIMEOUT_S:
                    raise error from failure
                if not self._rota.failed(error):
                    time.sleep(WATCH_RETRY_S)
            finally:
                call.cancel()

    def jobs(self) -> tuple[JobSummary, ...]:
        """Return every job that the server knows, by name."""
        response = self._call(lambda stub: stub.ListJobs, pb.ListJobsRequest())
        return tuple(sorted(map(_job_summary, response.jobs), key=lambda job: job.rdzv_id))

    def events(self, rdzv_id: str, limit: int = 0) -> tuple[Event, ...]:
        """Return the newest `limit` events of a job, oldest first; 0: as many as it sees fit."""
        if not 0 <= limit <= _UINT32_MAX:
            raise InvalidRequestError(f"limit {limit} can not be used: it must be 0 or above")
        request = pb.ListEventsRequest(rdzv_id=_checked_name(rdzv_id), limit=limit)
        return tuple(map(_event, self._call(lambda stub: stub.ListEvents, request).events))

    def forget(self, rdzv_id: str) -> None:
        """Delete a job that has ended, with its history."""
        request = pb.ForgetJobRequest(rdzv_id=_checked_name(rdzv_id))
        self._call(lambda stub: stub.ForgetJob, request)

    def logs(
        self,
        rdzv_id: str,
        *,
        rank: int | None = None,
        number: int | None = None,
        stdout: bool = True,
        stderr: bool = True,
        follow: bool = False,
        tail_bytes: int = 0,
        tail_lines: int = 0,
    ) -> Iterator[LogLines]:
        """Yield what a job's workers have written: of one RANK or all, in a round or the last.

        With `follow` it goes on into later rounds, until the run ends. Of each file of the first
        round only the tail is read, if one is given. If the stream is cut it goes on where it was,
        at whichever server leads; it raises when none has answered for a while.
        """
        request = pb.ReadLogsRequest(
            rdzv_id=_checked_name(rdzv_id),
            rank=rank,
            round=number,
            stdout=stdout,
            stderr=stderr,
            follow=follow,
            tail_bytes=tail_bytes,
            tail_lines=tail_lines,
        )
        # With a deadline, which the stream has not: is there a server, and does it know the job?
        self.status(rdzv_id)
        places, cut_at_s = _Places(), math.inf
        while True:
            # As a node's: a server that is stopped, or cut off, is noticed by unanswered pings.
            with grpc.insecure_channel(self.server.target, options=STREAM_OPTIONS) as channel:
                call = ControlStub(channel).ReadLogs(request)
                try:
                    for lines in call:
                        cut_at_s = math.inf
                        places.note(lines, request)
                        if lines.data or lines.note:
                            yield _log_lines(lines)
                    return
                except grpc.RpcError as failure:
                    error = self._error(failure)
                    older = call.code() is grpc.StatusCode.UNIMPLEMENTED
                    if older or not isinstance(error, RendezvousConnectionError):
                        raise error from failure
                    cut_at_s = min(cut_at_s, time.monotonic())
                    if time.monotonic() - cut_at_s > WATCH_TIMEOUT_S:
                        raise error from failure
                finally:
                    call.cancel()
            if not self._rota.failed(error):
                time.sleep(WATCH_RETRY_S)
            del request.positions[:]
            request.positions.extend(places.positions())

    def backup(self, file: BinaryIO) -> Summary:
        """Write all that the server's store holds into a file; return what has come.

        Ends when nothing has come for `timeout_s`. What was written is worth nothing unless this
        returns: then `rdzvd --restore` takes it.
        """
        turns = self._turns
        while True:
            try:
                return self._backup(file)
            except RendezvousConnectionError as error:
                turns -= 0 if self._rota.failed(error) else 1
                if not turns:
                    raise
                file.seek(0)
                file.truncate()

    def _backup(self, file: BinaryIO) -> Summary:
        from rdzv.stores.backup import verify

        call = self._stub().Backup(pb.BackupRequest())
        # One thread takes in what comes, so that the wait for it can end.
        with ThreadPoolExecutor(max_workers=1) as thread:
            try:
                while chunk := thread.submit(next, call, None).result(self._timeout_s):
                    file.write(chunk.data)
            except TimeoutError as error:
                status = grpc.StatusCode.DEADLINE_EXCEEDED
                raise error_from_status(status, "", (), self.server, self._timeout_s) from error
            except grpc.RpcError as error:
                raise self._error(error) from error
            finally:
                call.cancel()
        file.seek(0)
        return verify(file, f"what {self.server} has sent")

    def stop(self, rdzv_id: str, run: str, reason: str) -> JobStatus:
        """End a run: its nodes stop their workers and leave. Return the job as it then is."""
        request = pb.StopJobRequest(rdzv_id=_checked_name(rdzv_id), run=run, reason=reason)
        return _job_status(self._call(lambda stub: stub.StopJob, request))

    def restart(self, rdzv_id: str, run: str, number: int, reason: str) -> JobStatus:
        """End a round and have another form; no restart is spent. One that has ended stays so."""
        request = pb.RestartJobRequest(
            rdzv_id=_checked_name(rdzv_id), run=run, round=number, reason=reason
        )
        return _job_status(self._call(lambda stub: stub.RestartJob, request))

    def scale(
        self, rdzv_id: str, run: str, min_nodes: int, max_nodes: int, reason: str
    ) -> JobStatus:
        """Give a run other bounds than it was launched with."""
        request = pb.ScaleJobRequest(
            rdzv_id=_checked_name(rdzv_id),
            run=run,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            reason=reason,
        )
        return _job_status(self._call(lambda stub: stub.ScaleJob, request))

    def servers(self) -> tuple[Server, ...]:
        """Return the servers that share a store, the one that leads among them."""
        response = self._call(lambda stub: stub.ListServers, pb.ListServersRequest())
        return tuple(map(_server, response.servers))

    def _call(
        self,
        method: Callable[[ControlStub], grpc.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
    ) -> _Response:
        turns = self._turns
        while True:
            try:
                return method(self._stub())(request, timeout=self._timeout_s)
            except grpc.RpcError as failure:
                error = self._error(failure)
                if not isinstance(error, RendezvousConnectionError):
                    raise error from failure
                turns -= 0 if self._rota.failed(error) else 1
                if not turns:
                    raise error from failure

    def _error(self, error: grpc.RpcError) -> RendezvousError:
        # What a blocking call raises is always a call as well; the base class does not say so.
        assert isinstance(error, grpc.Call)
        return error_from_status(
            error.code(),
            error.details(),
            error.trailing_metadata(),
            self.server,
            self._timeout_s,
        )


class _Places:
    """How far each node's logs have been read, so that a reader can go on there."""

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        self._offsets: dict[str, dict[tuple[int, bool], int]] = {}

    def note(self, lines: pb.LogLines, request: pb.ReadLogsRequest) -> None:
        """Note what has come, and from now on ask for the run and the round that it is of."""
        request.run = lines.run
        if lines.note:
            return
        if not request.HasField("round"):
            request.round = lines.round
        if self._rounds.get(lines.node_id) != lines.round:
            self._rounds[lines.node_id] = lines.round
            self._offsets[lines.node_id] = {}
        if lines.data:
            at = lines.offset + len(lines.data)
            self._offsets[lines.node_id][lines.local_rank, lines.stderr] = at

    def positions(self) -> list[pb.LogPosition]:
        """Return where to go on; what is beyond `LOG_POSITIONS` is read from the beginning."""
        found = []
        for node_id, number in self._rounds.items():
            # A node of which nothing has come yet is in its round all the same.
            offsets = self._offsets[node_id] or {(0, False): 0}
            found += [
                pb.LogPosition(
                    node_id=node_id,
                    round=number,
                    local_rank=local_rank,
                    stderr=stderr,
                    offset=offset,
                )
                for (local_rank, stderr), offset in offsets.items()
            ]
        return found[:LOG_POSITIONS]


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
    if code := _metadata(trailing, ERROR_CODE_METADATA_KEY):
        if code == NotLeaderError.code:
            return NotLeaderError(text, _metadata(trailing, LEADER_METADATA_KEY))
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


def _metadata(trailing: Iterable[tuple[str, str | bytes]] | None, wanted: str) -> str:
    for key, value in trailing or ():
        if key == wanted:
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


def _server(server: pb.Server) -> Server:
    return Server(
        address=server.address,
        leads=server.leads,
        leadership=server.leadership or None,
        store=server.store,
        version=server.server_version,
        state_age_ms=server.state_age_ms,
    )


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
        min_nodes=status.min_nodes or None,
        max_nodes=status.max_nodes or None,
        world_size=status.world_size or None,
        restarts=_optional(status, "restarts"),
        max_restarts=_optional(status, "max_restarts"),
        master_addr=status.master_addr or None,
        master_port=status.master_port or None,
        nodes=tuple(map(_node_status, status.nodes)),
        last_end=status.last_end or None,
        last_failure=_last_failure(status),
        backend=status.backend or OWN_BACKEND,
        progress=tuple(
            RankProgress(one.rank, one.step, one.age_ms, one.rate or None)
            for one in status.progress
        ),
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
        min_nodes=job.min_nodes or None,
        max_nodes=job.max_nodes or None,
        world_size=job.world_size or None,
        restarts=_optional(job, "restarts"),
        max_restarts=_optional(job, "max_restarts"),
        backend=job.backend or OWN_BACKEND,
    )


def _log_lines(lines: pb.LogLines) -> LogLines:
    return LogLines(
        node_id=lines.node_id,
        rank=lines.rank,
        local_rank=lines.local_rank,
        stderr=lines.stderr,
        round=lines.round,
        data=lines.data,
        note=lines.note or None,
    )


def _event(event: pb.Event) -> Event:
    return Event(event.unix_ms, event.run or None, event.name, event.text)

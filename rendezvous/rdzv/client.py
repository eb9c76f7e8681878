"""The client for rdzvd's `Control` service, with deadlines for calls and responses as values.

`ControlClient` returns the values of `rdzv.view.answers`. No message and no gRPC exception leaves
this module: every failure is an error from the table in `rdzv.errors`. The code that converts gRPC
statuses to errors is in `rdzv.transport.node_stream`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

# isort: off
from rdzv.transport import grpc_forks  # noqa: F401  # before anything imports gRPC

# isort: on
import grpc
from google.protobuf.message import Message

from rdzv.bounds import LOG_POSITIONS
from rdzv.core.model import JobSpec, Settings
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    NotLeaderError,
    RendezvousConnectionError,
    RendezvousError,
)
from rdzv.transport.certificates import Stamp
from rdzv.transport.channels import PLAIN, Credentials, Metadata
from rdzv.transport.endpoints import Endpoint, parse_endpoint, parse_endpoints
from rdzv.transport.node_stream import (
    STREAM_OPTIONS,
    Options,
    Rota,
    call_options,
    error_from_status,
)
from rdzv.transport.wire import CONTROL, read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1.rdzv_pb2_grpc import ControlStub
from rdzv.view import answers
from rdzv.view.answers import Event, JobStatus, JobSummary, LogLines, Node, StackReport, Token

if TYPE_CHECKING:
    from rdzv.stores.backup import Summary

__all__ = ["ControlClient", "Endpoint", "parse_endpoint", "parse_endpoints"]

WATCH_TIMEOUT_S = 60.0
"""The time for which a watch that has lost its server looks for another before raising an error."""
WATCH_RETRY_S = 0.5

SUBMIT_RETRY_S = 0.5

STACKS_S = 15.0
"""The additional time for a call that asks nodes for stacks; the server gives nodes 10 s."""

DEFAULT_TIMEOUT_S = 5.0
"""The time that one call may take before the server is considered unreachable."""

TAKEOVER_S = 15.0
"""The time to wait for a leader while servers stand by. It covers a dead leader's lease and etcd's
own election."""
TAKEOVER_RETRY_S = 0.25


# ------------------------------------------------------------------------------------ the client

T = TypeVar("T")


class ControlClient:
    """A client for one rdzvd, or for the leader among several.

    Each server has `timeout_s` to respond to a call. While servers stand by and none leads, the
    call waits up to `takeover_s` for a leader. Calls raise `UnknownJobError` for a job that the
    server does not know, and `RendezvousConnectionError` if there is no server, no response, or no
    rdzvd at the endpoint.
    """

    def __init__(
        self,
        server: Endpoint | Sequence[Endpoint],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: Credentials = PLAIN,
        takeover_s: float = TAKEOVER_S,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise InvalidRequestError(f"timeout {timeout_s} s cannot be used: it must be above 0")
        servers = (server,) if isinstance(server, Endpoint) else tuple(server)
        self._timeout_s = timeout_s
        self._options = call_options(timeout_s)
        self._takeover_s = takeover_s
        self._rota = Rota(servers)
        self._turns = len(servers)
        self._credentials = credentials
        self._channels: dict[tuple[Endpoint, Options], tuple[Stamp, grpc.Channel]] = {}
        self.store_away: str | None = None
        """The reason why the server could not write to its store when it last listed jobs or nodes,
        or None if it could."""

    @property
    def server(self) -> Endpoint:
        """The server that was asked last, or the first one to be asked."""
        return self._rota.present

    def _stub(self, options: Options | None = None) -> ControlStub:
        options = options or self._options
        stamp, key = self._credentials.stamp(), (self.server, options)
        held, channel = self._channels.get(key, (None, None))
        if channel is None or held != stamp:
            if channel is not None:
                channel.close()
            channel = self._credentials.channel(self.server, options)
            self._channels[key] = stamp, channel
        return ControlStub(channel)

    def _metadata(self) -> Metadata:
        return self._credentials.metadata(self.server)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Later calls fail."""
        for _, channel in self._channels.values():
            channel.close()

    def status(self, rdzv_id: str) -> JobStatus:
        """Return the status of a job's current or last run."""
        return self._ask(JobStatus, "GetStatus", rdzv_id=rdzv_id)

    def watch(
        self, rdzv_id: str, silent: Callable[[RendezvousError], None] | None = None
    ) -> Iterator[JobStatus]:
        """Yield the status of a job immediately and then whenever it changes, without end.

        While no server responds, try the known servers in turn, and raise an error once none has
        responded for a while. `silent` is called with the reason once for each such outage.
        """
        has_warned = False

        def lost(error: RendezvousError, waits: bool) -> None:
            nonlocal has_warned
            if waits and silent is not None and not has_warned:
                silent(error)
            has_warned = has_warned or waits

        retried = (RendezvousConnectionError, LimitExceededError)
        request = _request("WatchJob", rdzv_id=rdzv_id)
        with closing(self._stream("WatchJob", request, retried, lost)) as statuses:
            for status in statuses:
                has_warned = False
                yield read(JobStatus, status)

    def _stream(
        self,
        rpc: str,
        request: Message,
        retried: type[RendezvousError] | tuple[type[RendezvousError], ...],
        lost: Callable[[RendezvousError, bool], None],
    ) -> Generator[Any, None, None]:
        """Yield the messages of a stream, which is opened again, at another server, when it is cut.

        Before that, `lost` is called with the reason and whether all servers have been tried.
        """
        cut_at_s = math.inf
        while True:
            # As for a node's stream, unanswered pings reveal a server that is stopped or cut off.
            call = getattr(self._stub(STREAM_OPTIONS), rpc)(request, metadata=self._metadata())
            try:
                for message in call:
                    cut_at_s = math.inf
                    yield message
                return
            except grpc.RpcError as failure:
                error = self._error(failure)
                now_s = time.monotonic()
                cut_at_s = min(cut_at_s, now_s)
                unknown = call.code() is grpc.StatusCode.UNIMPLEMENTED
                lasting = now_s - cut_at_s > WATCH_TIMEOUT_S
                if unknown or lasting or not isinstance(error, retried):
                    raise error from failure
            finally:
                call.cancel()
            waits = not self._rota.failed(error)
            lost(error, waits)
            if waits:
                time.sleep(WATCH_RETRY_S)

    def jobs(self) -> tuple[JobSummary, ...]:
        """Return all jobs known to the server, sorted by name."""
        found = self._ask(answers.JobList, "ListJobs")
        self.store_away = found.store_away
        return found.jobs

    def events(self, rdzv_id: str, limit: int = 0) -> tuple[Event, ...]:
        """Return a job's newest `limit` events, oldest first. With 0, the server sets the limit."""
        if not 0 <= limit < 2**32:
            raise InvalidRequestError(f"limit {limit} cannot be used: it must be 0 or above")
        return self._ask(answers.EventList, "ListEvents", rdzv_id=rdzv_id, limit=limit).events

    def forget(self, rdzv_id: str, reason: str) -> None:
        """Delete a job that has ended, along with its history."""
        self._call("ForgetJob", _request("ForgetJob", rdzv_id=rdzv_id, reason=reason))

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
        run: str = "",
    ) -> Iterator[LogLines]:
        """Yield the output of a job's workers: of one RANK or all, in round `number` or the last.

        With `follow`, continue into later rounds until the run ends. If a tail is given, only the
        tail of each file of the first round is read. A stream that is interrupted resumes where it
        was, on whichever server leads; an error is raised once none has responded for a while.
        `run` names a run other than the current or last one.
        """
        request: Any = _request(
            "ReadLogs",
            rdzv_id=rdzv_id,
            run=run,
            rank=rank,
            round=number,
            stdout=stdout,
            stderr=stderr,
            follow=follow,
            tail_bytes=tail_bytes,
            tail_lines=tail_lines,
        )
        # Unlike the stream, this call has a deadline, and it fails if the job is unknown.
        self.status(rdzv_id)
        places = _Places()

        def resume(error: RendezvousError, waits: bool) -> None:
            del request.positions[:]
            request.positions.extend(places.positions())

        retried = RendezvousConnectionError
        with closing(self._stream("ReadLogs", request, retried, resume)) as found:
            for lines in found:
                places.note(lines, request)
                if lines.data or lines.note:
                    yield read(LogLines, lines)

    def stacks(self, rdzv_id: str, number: int | None = None) -> StackReport:
        """Return the current stacks of a job's workers, or those recorded when round `number` hung.

        If no workers are running, return the stacks of the last round that hung. The call may take
        `STACKS_S` longer than others.
        """
        request = _request("TakeStacks", rdzv_id=rdzv_id, round=number)
        return read(StackReport, self._call("TakeStacks", request, self._timeout_s + STACKS_S))

    def backup(self, file: BinaryIO) -> Summary:
        """Write a backup of the server's store to a file, and return its summary.

        Fail if nothing arrives for `timeout_s`. The file is complete, so that `rdzvd --restore` can
        restore it, only if this returns.
        """
        asking = self._asking()
        while True:
            try:
                return self._backup(file)
            except RendezvousConnectionError as error:
                if not asking.goes_on(error):
                    raise
                file.seek(0)
                file.truncate()

    def _backup(self, file: BinaryIO) -> Summary:
        from rdzv.stores.backup import verify

        call = self._stub().Backup(pb.BackupRequest(), metadata=self._metadata())
        # A thread reads the stream, so that waiting for the next part can time out.
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
        return verify(file, f"the data from {self.server}")

    def stop(self, rdzv_id: str, run: str, reason: str) -> JobStatus:
        """End a run, making its nodes stop their workers and leave; return the job's status."""
        return self._ask(JobStatus, "StopJob", rdzv_id=rdzv_id, run=run, reason=reason)

    def restart(self, rdzv_id: str, run: str, number: int, reason: str) -> JobStatus:
        """End a round so that another forms, without counting a restart; return the job's status.

        A round that has already ended is not affected.
        """
        return self._ask(
            JobStatus, "RestartJob", rdzv_id=rdzv_id, run=run, round=number, reason=reason
        )

    def scale(
        self, rdzv_id: str, run: str, min_nodes: int, max_nodes: int, reason: str
    ) -> JobStatus:
        """Change the node bounds of a run, and return the job's status."""
        to = {"min_nodes": min_nodes, "max_nodes": max_nodes}
        return self._ask(JobStatus, "ScaleJob", rdzv_id=rdzv_id, run=run, **to, reason=reason)

    def create_token(
        self, name: str, roles: Sequence[str], expires_in_ms: int
    ) -> tuple[Token, str]:
        """Create a token, and return it with its secret text, which cannot be shown again.

        If the response is lost, raise an error without a retry: the token may exist, and a retry
        would create a second one.
        """

        def stop_in_doubt(error: RendezvousConnectionError) -> None:
            if _perhaps_done(error):
                raise RendezvousConnectionError(
                    f"{error}; it is unknown whether the token was created: if so, "
                    "`rdzvctl tokens list` shows it, and `tokens revoke` ends it"
                ) from error

        request = _request("CreateToken", name=name, roles=roles, expires_in_ms=expires_in_ms)
        made = read(answers.NewToken, self._call("CreateToken", request, failed=stop_in_doubt))
        return made.token, made.text

    def tokens(self) -> tuple[Token, ...]:
        """Return all tokens."""
        return self._ask(answers.TokenList, "ListTokens").tokens

    def revoke_tokens(self, id_or_name: str) -> tuple[Token, ...]:
        """Revoke the token with this id, or all tokens with this name, and return those revoked."""
        return self._ask(answers.TokenList, "RevokeTokens", id_or_name=id_or_name).tokens

    def audit(self, limit: int = 0) -> tuple[Event, ...]:
        """Return the newest `limit` audit events, oldest first.

        With 0, the server sets the limit.
        """
        return self._ask(answers.EventList, "ListAudit", limit=limit).events

    def submit(
        self, rdzv_id: str, run: str, settings: Settings, spec: JobSpec, submitted_by: str
    ) -> JobStatus:
        """Start a run whose nodes are chosen by the server, and return the job's status.

        `run` is a uid chosen by the caller. If the connection is lost, the same request is repeated
        for `timeout_s`, and the job is submitted only once.

        Raises:
            JobExistsError: a run of this job has not ended.
            InvalidRequestError: no node could ever run the job, or a limit is exceeded.

        """
        request = _request(
            "SubmitJob",
            rdzv_id=rdzv_id,
            run=run,
            settings=write(pb.Settings(), settings),
            spec=write(pb.JobSpec(), spec),
            submitted_by=submitted_by,
        )
        until_s = time.monotonic() + self._timeout_s
        within_s, tries = self._timeout_s, list[RendezvousConnectionError]()
        while True:
            try:
                return read(JobStatus, self._call("SubmitJob", request, within_s, tries.append))
            except RendezvousConnectionError as error:
                within_s = until_s - time.monotonic() - SUBMIT_RETRY_S
                if not any(map(_perhaps_done, tries)):
                    raise RendezvousConnectionError(f"{error}; nothing was submitted") from error
                if within_s <= 0:
                    raise RendezvousConnectionError(
                        f"{error}; it is unknown whether {rdzv_id} was submitted"
                    ) from error
                time.sleep(SUBMIT_RETRY_S)

    def nodes(self, *node_ids: str) -> tuple[Node, ...]:
        """Return all connected, away, cordoned or quarantined nodes, or only `node_ids`."""
        found = self._ask(answers.NodeList, "ListNodes", node_ids=node_ids)
        self.store_away = found.store_away
        return found.nodes

    def cordon(self, node_id: str, reason: str) -> Node:
        """Stop placing submitted jobs on a node; jobs already there continue."""
        return self._ask(Node, "CordonNode", node_id=node_id, reason=reason)

    def uncordon(self, node_id: str, reason: str) -> Node:
        """Allow submitted jobs on a node again."""
        return self._ask(Node, "UncordonNode", node_id=node_id, reason=reason)

    def drain(self, node_id: str, deadline_ms: int, reason: str, *, force: bool = False) -> Node:
        """Drain a node: notify its workers, and stop them at the deadline; return the node.

        Raises:
            TooFewNodesError: without `force`, one of its jobs would be left with too few nodes.

        """
        return self._ask(
            Node, "DrainNode", node_id=node_id, deadline_ms=deadline_ms, reason=reason, force=force
        )

    def undrain(self, node_id: str, reason: str, *, cordon: bool = False) -> Node:
        """Lift a node's drain and, with `cordon`, its cordon; return the node."""
        return self._ask(Node, "UndrainNode", node_id=node_id, cordon=cordon, reason=reason)

    def servers(self) -> tuple[answers.Server, ...]:
        """Return the servers that share a store, including the leader."""
        return self._ask(answers.ServerList, "ListServers").servers

    def _ask(self, kind: type[T], rpc: str, **fields: Any) -> T:
        return read(kind, self._call(rpc, _request(rpc, **fields)))

    def _call(
        self,
        rpc: str,
        request: Message,
        within_s: float | None = None,
        failed: Callable[[RendezvousConnectionError], None] | None = None,
    ) -> Message:
        """Ask the servers in turn, calling `failed` for each attempt that gets no response."""
        asking = self._asking()
        while True:
            try:
                ask: Callable[..., Message] = getattr(self._stub(), rpc)
                return ask(request, timeout=within_s or self._timeout_s, metadata=self._metadata())
            except grpc.RpcError as failure:
                error = self._error(failure)
                if not isinstance(error, RendezvousConnectionError):
                    raise error from failure
                if failed is not None:
                    failed(error)
                if not asking.goes_on(error):
                    raise error from failure

    def _asking(self) -> _Asking:
        return _Asking(self._rota, self._turns, self._takeover_s)

    def _error(self, error: grpc.RpcError) -> RendezvousError:
        # A blocking call always raises an error that is also a `grpc.Call`.
        assert isinstance(error, grpc.Call)
        found = error_from_status(
            error.code(),
            error.details(),
            error.trailing_metadata(),
            self.server,
            self._timeout_s,
            self._credentials,
        )
        found.__cause__ = error
        return found


class _Asking:
    """The state of one request to several servers: which to ask next, and when to give up."""

    def __init__(self, rota: Rota, servers: int, takeover_s: float) -> None:
        self._rota = rota
        self._servers = servers
        self._left = servers
        self._standing_by = False
        """Whether one of the servers is standing by, so that there is or will be a leader."""
        self._until_s = time.monotonic() + takeover_s

    def goes_on(self, error: RendezvousError) -> bool:
        """Record why a server failed; return whether to ask another, perhaps after a wait."""
        self._standing_by |= isinstance(error, NotLeaderError)
        if self._rota.failed(error):
            return True
        self._left -= 1
        if self._left:
            return True
        if not self._standing_by or time.monotonic() >= self._until_s:
            return False
        self._left, self._standing_by = self._servers, False
        time.sleep(TAKEOVER_RETRY_S)
        return True


class _Places:
    """The positions up to which each node's logs have been read, from which a reader can resume."""

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        self._offsets: dict[str, dict[tuple[int, bool], int]] = {}

    def note(self, lines: pb.LogLines, request: pb.ReadLogsRequest) -> None:
        """Record how far `lines` go, setting the run of `request` and, if unset, its round."""
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
        """Return where to resume. Files beyond `LOG_POSITIONS` are read again from the start."""
        found = []
        for node_id, number in self._rounds.items():
            # A node without output so far still needs a position, which names its round.
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


_NAMES = {"rdzv_id": "job name", "node_id": "node name", "node_ids": "node name"}


def _request(rpc: str, **fields: Any) -> Message:
    """Return the request of a call, refusing text that cannot be sent, such as raw shell bytes."""
    try:
        return CONTROL[rpc][0](**fields)
    except UnicodeEncodeError as error:
        what = next((name for key, name in _NAMES.items() if key in fields), "text")
        reason = f"{what} {error.object!r} cannot be used: it is not UTF-8"
        raise InvalidRequestError(reason) from None


_NO_CONNECTION = re.compile(
    "failed to connect to all addresses|errors resolving|dns resolution failed", re.IGNORECASE
)
"""Matches gRPC's details for a call that never had a connection."""


def _perhaps_done(error: RendezvousConnectionError) -> bool:
    """Return whether a request may have reached a server that did not respond."""
    failure = error.__cause__
    if error.definite or not isinstance(failure, grpc.Call):
        return False
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return True
    # Only a connection that was open and then lost may have carried the request.
    never = _NO_CONNECTION.search(failure.details() or "")
    return failure.code() is grpc.StatusCode.UNAVAILABLE and not never

"""The client's door to rdzvd: calls with a deadline, and what is answered as values.

`ControlClient` asks the `Control` service and answers with plain values in which None means "not
known". Only here are protobuf messages seen on the client's side of that service, and no gRPC
exception leaves: every failure is an error of the table in `rdzv.errors`.

What a node's stream needs, and statuses turned into errors, is in `rdzv.stream`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import grpc

from rdzv import endpoints
from rdzv.certificates import Stamp
from rdzv.core.model import JobSpec, Settings
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
)
from rdzv.stream import CHANNEL_OPTIONS, STREAM_OPTIONS, Rota, error_from_status, settings_message
from rdzv.structs import struct
from rdzv.transport import PLAIN, Credentials, Metadata
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1.rdzv_pb2_grpc import ControlStub

if TYPE_CHECKING:
    from rdzv.stores.backup import Summary

Endpoint = endpoints.Endpoint
parse_endpoint = endpoints.parse_endpoint
parse_endpoints = endpoints.parse_endpoints

_UINT32_MAX = 2**32 - 1

OWN_BACKEND = "rdzv"
"""Who forms the group of a job unless something else is said; an older server does not say."""

WATCH_TIMEOUT_S = 60.0
"""For how long a watcher looks for a server that answers, when it has lost the one that did."""
WATCH_RETRY_S = 0.5

SUBMIT_RETRY_S = 0.5

STACKS_S = 15.0
"""What an answer may take longer than another in which nodes are asked for stacks: a server gives
them 10 s."""

LOG_POSITIONS = 65_536
"""In how many files a reader of logs can go on after its stream was cut."""

DEFAULT_TIMEOUT_S = 5.0
"""How long one call may take before the server counts as not answering."""


# ------------------------------------------------------------------------------------ the values


@struct(frozen=True)
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


@struct(frozen=True)
class LastFailure:
    """The last worker failure of a run: its root cause, and what failed right beside it."""

    age_ms: int | None
    root_cause: WorkerFailure
    others: tuple[WorkerFailure, ...]


@struct(frozen=True)
class NodeStatus:
    """One node of a job. `reason` says why it is not seated; None if it is, and stays.

    `drain_left_ms` is how much longer its workers have, if it is about to leave.
    """

    node_id: str
    state: str
    group_rank: int | None
    rank_first: int | None
    local_world_size: int | None
    address: str | None
    role: str | None
    state_age_ms: int
    reason: str | None
    drain_left_ms: int | None = None


@struct(frozen=True)
class RankProgress:
    """How far one worker is, as it has said itself so long ago. `rate` is in steps a second."""

    rank: int
    step: int
    age_ms: int
    rate: float | None


@struct(frozen=True)
class Straggler:
    """A worker that takes far longer for a step than the worker in the middle of its role."""

    rank: int
    step_s: float
    median_s: float
    age_ms: int


@struct(frozen=True)
class Token:
    """A token, but for its text. `expires_in_ms` is None if it never expires, 0 if it has.

    When it was last used is known give or take an hour; None: never.
    """

    id: str
    name: str
    roles: tuple[str, ...]
    age_ms: int
    expires_in_ms: int | None
    used_age_ms: int | None


@struct(frozen=True)
class DeclinedNode:
    """A node that could not run a submitted job, and is not chosen for it again."""

    node_id: str
    reason: str


@struct(frozen=True)
class Submission:
    """How a job was submitted, and how far it is placed. `placed` are the nodes that are chosen.

    `jobs_before` are served before it; None for one that does not wait. Of its environment only
    names are told. `gpus_per_node` is None if each worker has one where there are any.
    """

    submitted_by: str | None
    age_ms: int
    args: tuple[str, ...]
    env_names: tuple[str, ...]
    chdir: str | None
    labels: dict[str, str]
    priority: int
    gpus_per_node: int | None
    placed: tuple[str, ...]
    jobs_before: int | None
    declined: tuple[DeclinedNode, ...]
    submitter: str | None = None
    """Who has proven to the server to have submitted it; None where nobody has to."""
    account: str | None = None
    """The account that it asks to run as; None: the one that each node has for its submitter."""


@struct(frozen=True)
class Budgets:
    """What the rounds of a run have ended by, and how often they may; None: any number.

    `restarts_in_vain` are those in a row that did not move the job on, beyond `furthest_step` or to
    another snapshot; after `no_progress_restarts` of them it has failed, unless that is 0.
    """

    preemptions: int
    max_preemptions: int | None
    store_failures: int
    max_store_failures: int | None
    restarts_in_vain: int
    no_progress_restarts: int
    furthest_step: int | None
    restart_window_ms: int


@struct(frozen=True)
class JobStatus:
    """What a job is doing, and why. `round` and `world_size` are those of the last complete one.

    `backend` is who forms its group: `rdzv`, or `c10d`, which the server only watches. `progress`
    has those workers of the round that runs which have said how far they are, by RANK.
    `submission` is None if its nodes were not chosen by the server.
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
    submission: Submission | None = None
    budgets: Budgets | None = None
    no_progress: bool = False
    """It has failed for it did not move on: the same launch would do no better."""
    stragglers: tuple[Straggler, ...] = ()
    """Workers that have straggled for a while, by RANK."""
    owner: str | None = None
    """Who alone, beside an admin, may stop it, and so on; None: an admin."""
    has_secret: bool = False
    """Whether those who join must know a secret."""


@struct(frozen=True)
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
    hangs: str | None = None
    """Who hangs now, in words; None: nobody."""


@struct(frozen=True)
class Gpu:
    """One GPU of a node."""

    uuid: str
    name: str | None
    memory_bytes: int | None


@struct(frozen=True)
class Resources:
    """What a node has for submitted jobs; it takes at most `capacity` of them at once."""

    cpus: int | None
    memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    labels: dict[str, str]
    capacity: int | None
    topology: str | None


@struct(frozen=True)
class NodeJob:
    """A job that a node is in, holds, or was chosen for."""

    rdzv_id: str
    gpus: int
    state: str


@struct(frozen=True)
class Node:
    """One node, across its jobs. `resources` is None if it takes no submitted jobs.

    `gpus_free` is None where the number of its GPUs is not known. A cordoned node takes no more,
    nor does one that is quarantined, or unhealthy; `quarantine` and `unhealthy` say why.
    """

    node_id: str
    state: str
    state_age_ms: int
    program: str | None
    address: str | None
    agent_version: str | None
    resources: Resources | None
    gpus_free: int | None
    jobs: tuple[NodeJob, ...]
    cordoned: bool
    cordon_reason: str | None
    cordon_age_ms: int | None
    metrics: str | None = None
    quarantine: str | None = None
    quarantine_age_ms: int | None = None
    quarantine_left_ms: int | None = None
    unhealthy: str | None = None
    unhealthy_age_ms: int | None = None
    drain: str | None = None
    """`draining` while something of a job is left there, then `drained`; None: it stays."""
    drain_reason: str | None = None
    drain_left_ms: int | None = None
    """How much longer its workers have; 0: their time is over."""
    drained_by_operator: bool = False


@struct(frozen=True)
class Server:
    """One rdzvd. `leadership` is the number of the one that leads."""

    address: str
    leads: bool
    leadership: int | None
    store: str
    version: str
    state_age_ms: int
    insecure: str | None = None
    """Why everyone who reaches it may do everything; of the one that answers."""


@struct(frozen=True)
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


@struct(frozen=True)
class StackFrame:
    """One call; `line` is None if it is not known."""

    name: str
    file: str
    line: int | None


@struct(frozen=True)
class ThreadStack:
    """One thread of a worker: its frames, innermost first."""

    name: str
    main: bool
    frames: tuple[StackFrame, ...]


@struct(frozen=True)
class WorkerStack:
    """What one worker was doing. `state` is that of its process, as in /proc."""

    rank: int
    node_id: str
    local_rank: int
    pid: int
    state: str | None
    threads: tuple[ThreadStack, ...]
    kernel: tuple[str, ...]
    note: str | None


@struct(frozen=True)
class StackGroup:
    """Workers that were at the same place."""

    ranks: tuple[int, ...]
    where: str


@struct(frozen=True)
class SilentNode:
    """A node of which nothing is known."""

    node_id: str
    rank_first: int
    local_world_size: int
    reason: str


@struct(frozen=True)
class StackReport:
    """What the workers of one round were doing at one moment."""

    rdzv_id: str
    run: str
    round: int
    age_ms: int
    reason: str
    summary: str
    groups: tuple[StackGroup, ...]
    stacks: tuple[WorkerStack, ...]
    left_out: int
    silent: tuple[SilentNode, ...]


@struct(frozen=True)
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
        self,
        server: Endpoint | Sequence[Endpoint],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: Credentials = PLAIN,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise InvalidRequestError(f"timeout {timeout_s} s can not be used: it must be above 0")
        servers = (server,) if isinstance(server, Endpoint) else tuple(server)
        self._timeout_s = timeout_s
        self._rota = Rota(servers)
        self._turns = len(servers)
        self._credentials = credentials
        self._channels: dict[Endpoint, tuple[Stamp, grpc.Channel]] = {}

    @property
    def server(self) -> Endpoint:
        """The server that was asked last, or will be asked first."""
        return self._rota.present

    def _stub(self) -> ControlStub:
        stamp = self._credentials.stamp()
        held, channel = self._channels.get(self.server, (None, None))
        if channel is None or held != stamp:
            if channel is not None:
                channel.close()
            channel = self._credentials.channel(self.server, CHANNEL_OPTIONS)
            self._channels[self.server] = stamp, channel
        return ControlStub(channel)

    def _metadata(self) -> Metadata:
        return self._credentials.metadata(self.server)

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
        for _, channel in self._channels.values():
            channel.close()

    def status(self, rdzv_id: str) -> JobStatus:
        """Return what a job is doing; of a job that has ended, its last run."""
        request = pb.GetStatusRequest(rdzv_id=_checked_name(rdzv_id))
        return _job_status(self._call(lambda stub: stub.GetStatus, request))

    def watch(
        self, rdzv_id: str, silent: Callable[[RendezvousError], None] | None = None
    ) -> Iterator[JobStatus]:
        """Yield what a job is doing, at once and then whenever it changes; this never ends.

        While no server answers it asks those that it knows in turn, and raises only when none of
        them has for a while; `silent` is told once, each time that this begins, and why.
        """
        request = pb.GetStatusRequest(rdzv_id=_checked_name(rdzv_id))
        silent_since_s, told = time.monotonic(), False
        while True:
            call = self._stub().WatchJob(request, metadata=self._metadata())
            try:
                for status in call:
                    yield _job_status(status)
                    silent_since_s, told = time.monotonic(), False
            except grpc.RpcError as failure:
                error = self._error(failure)
                silent_s = time.monotonic() - silent_since_s
                lasting = not isinstance(error, RendezvousConnectionError | LimitExceededError)
                if lasting or silent_s > WATCH_TIMEOUT_S:
                    raise error from failure
                if not self._rota.failed(error):
                    if silent is not None and not told:
                        silent(error)
                    told = True
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
        run: str = "",
    ) -> Iterator[LogLines]:
        """Yield what a job's workers have written: of one RANK or all, in a round or the last.

        With `follow` it goes on into later rounds, until the run ends. Of each file of the first
        round only the tail is read, if one is given. If the stream is cut it goes on where it was,
        at whichever server leads; it raises when none has answered for a while. `run` is the run
        that is meant, if not the present or last one.
        """
        request = pb.ReadLogsRequest(
            rdzv_id=_checked_name(rdzv_id),
            run=run,
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
            with self._credentials.channel(self.server, STREAM_OPTIONS) as channel:
                call = ControlStub(channel).ReadLogs(request, metadata=self._metadata())
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

    def stacks(self, rdzv_id: str, number: int | None = None) -> StackReport:
        """Return what the workers of a job do, or did in a round that hung and is over.

        If none run, those of the last round that hung are returned. It may take `STACKS_S` longer
        than other answers.
        """
        request = pb.TakeStacksRequest(rdzv_id=_checked_name(rdzv_id), round=number)
        within_s = self._timeout_s + STACKS_S
        return _stack_report(self._call(lambda stub: stub.TakeStacks, request, within_s))

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

        call = self._stub().Backup(pb.BackupRequest(), metadata=self._metadata())
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

    def create_token(
        self, name: str, roles: Sequence[str], expires_in_ms: int
    ) -> tuple[Token, str]:
        """Make a token, and return it with its text, which nobody shows again."""
        request = pb.CreateTokenRequest(name=name, roles=roles, expires_in_ms=expires_in_ms)
        answer = self._call(lambda stub: stub.CreateToken, request)
        return _token(answer.token), answer.text

    def tokens(self) -> list[Token]:
        """Show every token."""
        answer = self._call(lambda stub: stub.ListTokens, pb.ListTokensRequest())
        return [_token(token) for token in answer.tokens]

    def revoke_tokens(self, id_or_name: str) -> list[Token]:
        """Revoke a token by its id, or all of one name; return them."""
        request = pb.RevokeTokensRequest(id_or_name=id_or_name)
        answer = self._call(lambda stub: stub.RevokeTokens, request)
        return [_token(token) for token in answer.tokens]

    def audit(self, limit: int = 0) -> list[Event]:
        """Show who has changed what, oldest first; 0: as many as the server sees fit."""
        answer = self._call(lambda stub: stub.ListAudit, pb.ListAuditRequest(limit=limit))
        return [_event(event) for event in answer.events]

    def submit(
        self, rdzv_id: str, run: str, settings: Settings, spec: JobSpec, submitted_by: str
    ) -> JobStatus:
        """Begin a run whose nodes the server chooses; return the job as it then is.

        `run` is a uid that the caller makes: while the connection is lost on the way the same
        request is repeated, for `timeout_s`, and submits nothing twice.

        Raises:
            JobExistsError: a run of this name has not ended.
            InvalidRequestError: no node could ever take it, or a limit is exceeded.

        """
        request = pb.SubmitJobRequest(
            rdzv_id=_checked_name(rdzv_id),
            run=run,
            settings=settings_message(settings),
            spec=_spec_message(spec),
            submitted_by=submitted_by,
        )
        until_s = time.monotonic() + self._timeout_s
        within_s, tries = self._timeout_s, list[RendezvousConnectionError]()
        while True:
            try:
                return _job_status(
                    self._call(lambda stub: stub.SubmitJob, request, within_s, tries.append)
                )
            except RendezvousConnectionError as error:
                within_s = until_s - time.monotonic() - SUBMIT_RETRY_S
                if not any(map(_perhaps_done, tries)):
                    raise RendezvousConnectionError(f"{error}; nothing was submitted") from error
                if within_s <= 0:
                    raise RendezvousConnectionError(
                        f"{error}; whether {rdzv_id} was submitted is not known"
                    ) from error
                time.sleep(SUBMIT_RETRY_S)

    def nodes(self, *node_ids: str) -> tuple[Node, ...]:
        """Return every node that is connected, away, cordoned or quarantined; of these, if any."""
        request = pb.ListNodesRequest(node_ids=[_checked_name(n, "node") for n in node_ids])
        response = self._call(lambda stub: stub.ListNodes, request)
        return tuple(map(_node, response.nodes))

    def cordon(self, node_id: str, reason: str) -> Node:
        """Have nothing more placed on a node; what is there goes on."""
        request = pb.CordonNodeRequest(node_id=_checked_name(node_id, "node"), reason=reason)
        return _node(self._call(lambda stub: stub.CordonNode, request))

    def uncordon(self, node_id: str) -> Node:
        """Let submitted jobs be placed on a node again."""
        request = pb.UncordonNodeRequest(node_id=_checked_name(node_id, "node"))
        return _node(self._call(lambda stub: stub.UncordonNode, request))

    def drain(self, node_id: str, deadline_ms: int, reason: str, *, keep_min: bool = False) -> Node:
        """Empty a node: its workers are told, and are ended at the deadline.

        Raises:
            TooFewNodesError: with `keep_min`, a job of it would be left with too few nodes.

        """
        name = _checked_name(node_id, "node")
        request = pb.DrainNodeRequest(
            node_id=name, deadline_ms=deadline_ms, reason=reason, keep_min=keep_min
        )
        return _node(self._call(lambda stub: stub.DrainNode, request))

    def undrain(self, node_id: str) -> Node:
        """Lift the drain of a node, and let submitted jobs be placed on it again."""
        request = pb.UndrainNodeRequest(node_id=_checked_name(node_id, "node"))
        return _node(self._call(lambda stub: stub.UndrainNode, request))

    def servers(self) -> tuple[Server, ...]:
        """Return the servers that share a store, the one that leads among them."""
        response = self._call(lambda stub: stub.ListServers, pb.ListServersRequest())
        return tuple(map(_server, response.servers))

    def _call(
        self,
        method: Callable[[ControlStub], grpc.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        within_s: float | None = None,
        failed: Callable[[RendezvousConnectionError], None] | None = None,
    ) -> _Response:
        """Ask the servers in turn; `failed` is told of each that did not answer."""
        turns = self._turns
        while True:
            try:
                ask = method(self._stub())
                return ask(request, timeout=within_s or self._timeout_s, metadata=self._metadata())
            except grpc.RpcError as failure:
                error = self._error(failure)
                if not isinstance(error, RendezvousConnectionError):
                    raise error from failure
                if failed is not None:
                    failed(error)
                turns -= 0 if self._rota.failed(error) else 1
                if not turns:
                    raise error from failure

    def _error(self, error: grpc.RpcError) -> RendezvousError:
        # What a blocking call raises is always a call as well; the base class does not say so.
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


def _checked_name(name: str, kind: str = "job") -> str:
    """Refuse a name that can not travel: bytes from a shell that are no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{kind} name {name!r} can not be used: no UTF-8") from None
    return name


_NO_CONNECTION = re.compile(
    "failed to connect to all addresses|errors resolving|dns resolution failed", re.IGNORECASE
)
"""What gRPC says of a call for which there was no connection at any time."""


def _perhaps_done(error: RendezvousConnectionError) -> bool:
    """Say whether a request may have reached a server that did not answer."""
    failure = error.__cause__
    if error.definite or not isinstance(failure, grpc.Call):
        return False
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return True
    # Otherwise there was no connection that it could have gone over.
    never = _NO_CONNECTION.search(failure.details() or "")
    return failure.code() is grpc.StatusCode.UNAVAILABLE and not never


# ------------------------------------------------------------------------------------ the wire

_Message = (
    pb.JobStatus
    | pb.JobSummary
    | pb.NodeStatus
    | pb.WorkerFailure
    | pb.Submission
    | pb.Budgets
    | pb.Token
)


def _optional(message: _Message, field: str) -> int | None:
    """Return a number that is optional on the wire; None if it is not set."""
    return int(getattr(message, field)) if message.HasField(field) else None  # type: ignore[arg-type]


def _token(token: pb.Token) -> Token:
    return Token(
        id=token.id,
        name=token.name,
        roles=tuple(token.roles),
        age_ms=token.age_ms,
        expires_in_ms=_optional(token, "expires_in_ms"),
        used_age_ms=_optional(token, "used_age_ms"),
    )


def _server(server: pb.Server) -> Server:
    return Server(
        address=server.address,
        leads=server.leads,
        leadership=server.leadership or None,
        store=server.store,
        version=server.server_version,
        state_age_ms=server.state_age_ms,
        insecure=server.insecure or None,
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
        stragglers=tuple(
            Straggler(one.rank, one.step_s, one.median_s, one.age_ms) for one in status.stragglers
        ),
        submission=_submission(status.submission) if status.HasField("submission") else None,
        budgets=_budgets(status.budgets) if status.HasField("budgets") else None,
        no_progress=status.no_progress,
        owner=status.owner or None,
        has_secret=status.has_secret,
    )


def _budgets(budgets: pb.Budgets) -> Budgets:
    return Budgets(
        preemptions=budgets.preemptions,
        max_preemptions=_optional(budgets, "max_preemptions"),
        store_failures=budgets.store_failures,
        max_store_failures=_optional(budgets, "max_store_failures"),
        restarts_in_vain=budgets.restarts_in_vain,
        no_progress_restarts=budgets.no_progress_restarts,
        furthest_step=_optional(budgets, "furthest_step"),
        restart_window_ms=budgets.restart_window_ms,
    )


def _submission(submission: pb.Submission) -> Submission:
    return Submission(
        submitted_by=submission.submitted_by or None,
        age_ms=submission.age_ms,
        args=tuple(submission.args),
        env_names=tuple(submission.env_names),
        chdir=submission.chdir or None,
        labels=_labels(submission.labels),
        priority=submission.priority,
        gpus_per_node=_optional(submission, "gpus_per_node"),
        placed=tuple(submission.placed),
        jobs_before=_optional(submission, "jobs_before"),
        declined=tuple(DeclinedNode(one.node_id, one.reason) for one in submission.declined),
        submitter=submission.submitter or None,
        account=submission.account or None,
    )


def _labels(labels: Iterable[pb.Label]) -> dict[str, str]:
    return {label.name: label.value for label in labels}


def _spec_message(spec: JobSpec) -> pb.JobSpec:
    return pb.JobSpec(
        args=spec.args,
        env=[pb.EnvironmentVariable(name=name, value=value) for name, value in spec.env],
        chdir=spec.chdir,
        labels=[pb.Label(name=name, value=value) for name, value in spec.labels],
        priority=spec.priority,
        gpus_per_node=spec.gpus_per_node,
        local_world_size=spec.local_world_size,
        needs_gpu=spec.needs_gpu,
        account=spec.account,
    )


def _node(node: pb.Node) -> Node:
    return Node(
        node_id=node.node_id,
        state=node.state,
        state_age_ms=node.state_age_ms,
        program=node.program or None,
        address=node.address or None,
        agent_version=node.agent_version or None,
        resources=_resources(node.resources) if node.HasField("resources") else None,
        gpus_free=node.gpus_free if node.HasField("resources") else None,
        jobs=tuple(NodeJob(job.rdzv_id, job.gpus, job.state) for job in node.jobs),
        cordoned=node.cordoned,
        cordon_reason=node.cordon_reason or None,
        cordon_age_ms=node.cordon_age_ms if node.cordoned else None,
        metrics=node.metrics or None,
        quarantine=node.quarantine or None,
        quarantine_age_ms=node.quarantine_age_ms if node.quarantine else None,
        quarantine_left_ms=node.quarantine_left_ms if node.quarantine else None,
        unhealthy=node.unhealthy or None,
        unhealthy_age_ms=node.unhealthy_age_ms if node.unhealthy else None,
        drain=node.drain or None,
        drain_reason=node.drain_reason or None,
        drain_left_ms=node.drain_left_ms if node.drain else None,
        drained_by_operator=node.drained_by_operator,
    )


def _resources(resources: pb.Resources) -> Resources:
    return Resources(
        cpus=resources.cpus or None,
        memory_bytes=resources.memory_bytes or None,
        gpus=tuple(
            Gpu(gpu.uuid, gpu.name or None, gpu.memory_bytes or None) for gpu in resources.gpus
        ),
        labels=_labels(resources.labels),
        capacity=resources.capacity or None,
        topology=resources.topology or None,
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
        drain_left_ms=_optional(node, "drain_left_ms"),
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
        hangs=job.hangs or None,
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


def _stack_report(report: pb.StackReport) -> StackReport:
    return StackReport(
        rdzv_id=report.rdzv_id,
        run=report.run,
        round=report.round,
        age_ms=report.age_ms,
        reason=report.reason,
        summary=report.summary,
        groups=tuple(StackGroup(tuple(one.ranks), one.where) for one in report.groups),
        stacks=tuple(map(_worker_stack, report.stacks)),
        left_out=report.left_out,
        silent=tuple(
            SilentNode(one.node_id, one.rank_first, one.local_world_size, one.reason)
            for one in report.silent
        ),
    )


def _worker_stack(stack: pb.WorkerStack) -> WorkerStack:
    threads = tuple(
        ThreadStack(
            thread.name,
            thread.main,
            tuple(StackFrame(f.name, f.file, f.line or None) for f in thread.frames),
        )
        for thread in stack.threads
    )
    return WorkerStack(
        rank=stack.rank,
        node_id=stack.node_id,
        local_rank=stack.local_rank,
        pid=stack.pid,
        state=stack.state or None,
        threads=threads,
        kernel=tuple(stack.kernel),
        note=stack.note or None,
    )


def _event(event: pb.Event) -> Event:
    return Event(event.unix_ms, event.run or None, event.name, event.text)


# ------------------------------------------------------------------ for who has the message already


def job_status_of(message: pb.JobStatus) -> JobStatus:
    """Return what a message says of a job; `ControlClient.status` answers with the same."""
    return _job_status(message)


def job_summary_of(message: pb.JobSummary) -> JobSummary:
    """Return what a message says of a job in a list."""
    return _job_summary(message)


def node_of(message: pb.Node) -> Node:
    """Return what a message says of a node."""
    return _node(message)


def stack_report_of(message: pb.StackReport) -> StackReport:
    """Return what a message says of what workers were doing."""
    return _stack_report(message)


def server_of(message: pb.Server) -> Server:
    """Return what a message says of an rdzvd."""
    return _server(message)


def event_of(message: pb.Event) -> Event:
    """Return what a message says of something that has happened to a job."""
    return _event(message)


def log_lines_of(message: pb.LogLines) -> LogLines:
    """Return what a message carries of a log."""
    return _log_lines(message)

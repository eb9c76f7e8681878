"""The node's stream to the server, reopened whenever it ends until the agent closes it.

One `ServerLink` serves all of an agent's jobs without interpreting their messages, which the
drivers send and receive. Each stream begins with a Hello that contains everything that the node
believes, so losing a message along with the previous stream does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import cast

import grpc

from rdzv import messages
from rdzv.agent.agent_counts import NodeCounts
from rdzv.agent.core import events
from rdzv.agent.launch.launch import local_address, reachable_host_name
from rdzv.agent.observers.server_clock import ServerClock
from rdzv.agent.output.worker_log_reader import WorkerLogReader
from rdzv.agent.server_link import encoding, inbox
from rdzv.agent.server_link.connection_log import ConnectionLog
from rdzv.agent.server_link.inbox import JobPort, PlacementPort
from rdzv.agent.server_link.next_server import NextServer
from rdzv.agent.server_link.node_drain import NodeDrain
from rdzv.agent.server_link.outbox import HEARTBEATS_PER_FENCE, Call, FenceProofs, Outbox
from rdzv.core.commands import Decline
from rdzv.core.fleet.nodes import AgentKind, LeaseRules, absence_for, check_fence
from rdzv.errors import (
    InvalidRequestError,
    NodeSupersededError,
    RendezvousConnectionError,
    RendezvousError,
    UnauthenticatedError,
)
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import struct
from rdzv.transport import node_stream
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.transport.endpoints import Endpoint
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc
from rdzv.version import PROTOCOL_VERSION

log = logging.getLogger("rdzv.agent")

WELCOME_TIMEOUT_S = 10.0
"""How long to wait for the Welcome on a first stream, with up to a thousand nodes."""
WELCOME_TIMEOUT_MOST_S = 80.0
"""The longest wait for a Welcome; see `welcome_timeout_s`."""
SILENT_S = 5.0
"""How long to wait for a Welcome before logging that the server is not responding."""
RENEWAL_MS = 5_000
"""How long the server waits for the next stream after this node has ended one to renew it."""
DECLINED_KEPT = 64
"""The maximum number of declined jobs that are remembered."""


@struct(frozen=True)
class NodeIdentity:
    """The node and the agent at this end of the stream."""

    node_id: str
    instance: str
    kind: AgentKind
    address: str
    """This node's address, or empty to use its end of the connection that carries each Hello."""
    pid: int
    version: str
    incarnation: int = 0
    """This instance's incarnation, if a previous agent began it; otherwise 0."""
    leadership: int = 0
    lease_ms: int | None = None


class ServerLink:
    """Keeps a stream to one of the servers open until the link is closed."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        identity: NodeIdentity,
        backoff: node_stream.Backoff = node_stream.BACKOFF,
        credentials: Credentials = PLAIN,
        options: Sequence[tuple[str, int]] = node_stream.STREAM_OPTIONS,
    ) -> None:
        self._attempts = node_stream.Attempts(endpoints, backoff)
        self._credentials = credentials
        self._options = options
        self.next_server = NextServer(credentials, options)
        """The connection kept open to the server that would take over next."""
        self.identity = identity
        self.address = identity.address
        """This node's address for others, which is known once there has been a connection."""
        self.host_name = ""
        """A name under which other machines reach this node, if its address is loopback."""
        self.jobs: dict[str, JobPort] = {}
        self.placements: PlacementPort | None = None
        self.lease_ms: int | None = None
        """The open stream's lease, or None if no stream is open."""
        self._last_lease_ms = identity.lease_ms
        """The lease of the last stream, whether or not it is open, or None if there was none."""
        self.declined: dict[tuple[str, str], str] = {}
        """What this node cannot run, by rdzv_id and run, with the reasons. No Hello contains it."""
        self._renewing = False
        """Whether the stream is ending because another, with a new Hello, will follow at once."""
        self._proofs = FenceProofs(self.jobs)
        self.outbox = Outbox(self._proofs, WELCOME_TIMEOUT_S)
        self._leadership = identity.leadership
        self._incarnation = identity.incarnation
        self.on_welcome: Callable[[int, int, int], None] = lambda *given: None
        """Called with incarnation, leadership and lease, before they are used anywhere else."""
        self.superseded: NodeSupersededError | None = None
        """The refusal by which this agent was superseded; set along with `is_superseded`."""
        self.is_superseded = asyncio.Event()
        self._refused = False
        self._log = ConnectionLog()
        self._closing = asyncio.Event()
        self._unanswered = 0
        """How many streams had no Welcome since the last that had one."""
        self.log_reader = WorkerLogReader(self._say_piece)
        self.drain = NodeDrain(monotonic_ms, self._tell_notice)
        self.counts = NodeCounts()
        self.metrics: Callable[[], bytes] = bytes
        """Returns this node's metrics, if it has any, as Prometheus reads them."""

    @property
    def encrypts(self) -> bool:
        return self._credentials.tls

    def certificate_expires(self) -> datetime | None:
        return self._credentials.expires()

    def add(self, job: JobPort) -> None:
        """Serve a job. If a stream is open already, the job has to join by itself."""
        if self._last_lease_ms is not None and not self._check_fence(job, self._last_lease_ms):
            # The server would refuse the whole node because of this one job.
            return
        self.jobs[job.rdzv_id] = job
        if (notice := self.drain.event()) is not None:
            job.post(notice)
        if self.lease_ms is not None:
            job.post(events.ServerConnected())
        if job.fence_after_ms:
            # The Hello informs the server of the fence; its response is the first proof of contact.
            self.say_hello_again()

    def remove(self, job: JobPort) -> None:
        if self.jobs.get(job.rdzv_id) is job:
            del self.jobs[job.rdzv_id]

    def say_hello_again(self) -> None:
        """The node keeps its seats, because it first tells the server that it will be back."""
        if self.outbox.waiting is not None:
            self.say(pb.NodeMessage(away=pb.Away(deadline_ms=RENEWAL_MS)))
        if self.outbox.waiting is not None:
            self._renewing = True
            self.outbox.finish()
            self.outbox.forget()
            # An overloaded server may fail to end the stream in time.
            hang_up = self.outbox.hang_up
            asyncio.get_running_loop().call_later(RENEWAL_MS / 2000, hang_up)

    def drain_node(self, left_ms: int, reason: str) -> None:
        if self.drain.note_wish(left_ms, reason):
            draining = self.drain.said()
            assert draining is not None
            self.say(encoding.report(draining))

    def _tell_notice(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        if self.placements is not None:
            self.placements.noticed(event)
        for job in list(self.jobs.values()):
            job.post(event)

    @property
    def tolerated_ms(self) -> int:
        return self._last_lease_ms or LeaseRules().duration_ms

    @property
    def orphan_timeout_ms(self) -> int:
        """How long this node's runners wait for the next agent: as long as the server does."""
        return absence_for(self.tolerated_ms)

    def say_away(self, deadline_ms: int) -> None:
        self.say(pb.NodeMessage(away=pb.Away(deadline_ms=deadline_ms)))

    def say_holdings(self) -> None:
        if self.placements is not None:
            self.say(encoding.report(messages.Holdings(self.placements.holdings())))

    def say_health(self) -> None:
        if self.placements is not None:
            self.say(encoding.report(messages.Health(self.placements.failing)))

    def decline_for_now(self, rdzv_id: str, run: str, reason: str) -> None:
        """If this is lost, the server places the job here again, and it is said again."""
        declined = Decline(self.identity.node_id, run, reason, passing=True)
        self.say(encoding.report(declined, rdzv_id))

    def decline(self, rdzv_id: str, run: str, reason: str) -> None:
        self.declined.pop((rdzv_id, run), None)
        self.declined[rdzv_id, run] = reason
        if len(self.declined) > DECLINED_KEPT:
            del self.declined[next(iter(self.declined))]
        self._say_declined(rdzv_id, run, reason)

    def _say_declined(self, rdzv_id: str, run: str, reason: str) -> None:
        self.say(encoding.report(Decline(self.identity.node_id, run, reason), rdzv_id))

    @property
    def server_clock(self) -> ServerClock:
        return self._proofs.server_clock

    def ask_clock(self) -> None:
        """Request the server's clock, using a heartbeat that requires a response."""
        self.say(pb.NodeMessage(heartbeat=pb.Heartbeat(number=1)))

    def say(self, message: pb.NodeMessage) -> None:
        """Without a stream, the next Hello covers it."""
        self.outbox.say(message)

    async def _say_piece(self, piece: messages.LogPiece) -> None:
        await self.say_after_all(encoding.report(piece))

    async def say_after_all(self, message: pb.NodeMessage) -> None:
        await self.outbox.say_after_all(message)

    async def run(self) -> None:
        try:
            await self._keep_stream()
        finally:
            await self.next_server.close()

    async def _keep_stream(self) -> None:
        while not self._closing.is_set():
            endpoint = self._attempts.rota.present
            error = await self._converse(endpoint)
            if self._closing.is_set():
                return
            most_s = self._proofs.shortest_fence_s / HEARTBEATS_PER_FENCE or math.inf
            wait_s = self._attempts.failed(error, asyncio.get_running_loop().time(), most_s)
            if wait_s is None:
                log.debug("%s", error)
                continue
            self._tell_lost(str(error))
            again, most_ms = wait_s > 0, self._waits_ms()
            self._log.lost(
                endpoint, str(error), again=again, refused=self._refused, most_ms=most_ms
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()

    def _tell_lost(self, reason: str) -> None:
        for job in list(self.jobs.values()):
            job.post(events.ServerLost(reason))

    def _tell_silent(self, endpoint: Endpoint) -> None:
        """Report an attempt without a response, for a job may give up before the attempt ends."""
        self._tell_lost(f"no answer from {endpoint} within {SILENT_S:g} s")
        self._log.silent(endpoint, SILENT_S, self._waits_ms())

    def close(self) -> None:
        self._closing.set()
        if not self.outbox.finish():
            self.outbox.hang_up()

    def _waits_ms(self) -> int | None:
        """None if no job gives up."""
        waits = [job.waits_ms() for job in self.jobs.values()]
        return min((wait_ms for wait_ms in waits if wait_ms is not None), default=None)

    # ------------------------------------------------------------------ one stream

    async def _converse(self, endpoint: Endpoint) -> RendezvousError:
        """Keep a stream open, renewing it on request. Returns why the last one ended."""
        try:
            opened = await self.next_server.take(endpoint)
            opened = opened or self._credentials.aio_channel(endpoint, self._options)
        except InvalidRequestError as unusable:
            # The certificate may be about to be renewed.
            return RendezvousConnectionError(f"cannot connect to {endpoint}: {unusable}")
        async with opened as channel:
            stub = cast("rdzv_pb2_grpc.RendezvousAsyncStub", rdzv_pb2_grpc.RendezvousStub(channel))
            while True:
                self._renewing = False
                error = await self._hold_stream(stub, endpoint)
                if not self._renewing or self._closing.is_set():
                    return error
                # The next one uses the same connection, so the node is away only briefly.

    async def _hold_stream(
        self, stub: rdzv_pb2_grpc.RendezvousAsyncStub, endpoint: Endpoint
    ) -> RendezvousError:
        self._proofs.begin_stream()
        self._refused = False
        fence_s = self._proofs.shortest_fence_s
        patience_s = welcome_timeout_s(self.tolerated_ms, self._unanswered)
        timeout_s = min(patience_s, fence_s or WELCOME_TIMEOUT_MOST_S)
        try:
            metadata = self._credentials.metadata(endpoint)
        except InvalidRequestError as error:
            return RendezvousConnectionError(f"cannot connect to {endpoint}: {error}")
        attach = partial(stub.Attach, metadata=metadata)
        call = self.outbox.begin(attach)
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await self._first_answer(call, endpoint)
            return RendezvousConnectionError(await self._listen(call, endpoint, welcome))
        except grpc.aio.AioRpcError as error:
            return self._judge(endpoint, error)
        except RendezvousConnectionError as error:
            return error
        except TimeoutError:
            self._unanswered += 1
            return RendezvousConnectionError(f"no answer from {endpoint} within {timeout_s:g} s")
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            return RendezvousConnectionError("the stream was closed by this agent")
        finally:
            on_purpose = self._renewing or self._closing.is_set()
            self.counts.stream_ended(welcomed=self.lease_ms is not None, on_purpose=on_purpose)
            self.lease_ms = None
            self.outbox.forget()
            self.log_reader.stop_all()
            call.cancel()

    async def _first_answer(self, call: Call, endpoint: Endpoint) -> pb.ServerMessage | None:
        """Send the Hello once connected, and return the first response. Logs if it takes long."""
        silent = asyncio.get_running_loop().call_later(SILENT_S, self._tell_silent, endpoint)
        try:
            await call.wait_for_connection()
            if not self.identity.address:
                # The network may have come up, or changed, since the last connection.
                address = await local_address(endpoint)
                host_name = await reachable_host_name(address)
                self.address, self.host_name = address, host_name
            self.outbox.let_through(self.hello())
            return await _read(call)
        finally:
            silent.cancel()

    async def _listen(
        self, call: Call, endpoint: Endpoint, welcome: pb.ServerMessage | None
    ) -> str:
        message = welcome
        while message is not None:
            if message.leadership < self._leadership:
                return f"{endpoint} no longer leads the servers (leadership {message.leadership})"
            self._leadership = message.leadership
            for one in (message, *message.more):
                match encoding.announcement(one, monotonic_ms()):
                    case messages.Servers(addresses):
                        await self._learn(addresses)
                    case messages.Refused(code=code, message=why) if (
                        code not in node_stream.FINAL_REFUSALS
                    ):
                        self._refused = True
                        return f"the server refused for now: {why}"
                    case told:
                        self._hear(endpoint, told)
            message = await _read(call)
        return "the server ended the stream"

    def _hear(self, endpoint: Endpoint, announcement: messages.Announcement | None) -> None:
        match announcement:
            case messages.Welcome():
                self._greet(endpoint, announcement)
            case messages.Lease():
                self._take_lease(announcement.lease_ms, announcement.heartbeat_interval_ms)
                for job in list(self.jobs.values()):
                    job.post(events.Ticked())  # The job's runner must receive the new lease.
            case messages.Heard():
                self._proofs.note_heard(announcement.number, announcement.clock_us)
            case _:
                inbox.deliver(self, announcement)

    def _greet(self, endpoint: Endpoint, welcome: messages.Welcome) -> None:
        self._incarnation = welcome.incarnation
        self.on_welcome(self._incarnation, self._leadership, welcome.lease_ms)
        self._take_lease(welcome.lease_ms, welcome.heartbeat_interval_ms)
        self.counts.stream_opened()
        self._attempts.welcomed(asyncio.get_running_loop().time())
        self._unanswered = 0
        self._log.connected(endpoint)
        # The sender is still waiting for the old interval to pass; this message ends the wait.
        self.say(pb.NodeMessage(heartbeat=pb.Heartbeat()))
        self._proofs.note_welcomed()
        for job in list(self.jobs.values()):
            job.post(events.ServerConnected())
            self._check_fence(job, welcome.lease_ms)
        for (rdzv_id, run), reason in self.declined.items():
            self._say_declined(rdzv_id, run, reason)

    async def _learn(self, servers: Sequence[str]) -> None:
        """Connect in advance to the server that would take over from the current one."""
        self._attempts.rota.learn(servers)
        if servers:
            # Thousands of nodes receive this at the same time. The lease, which grows with their
            # number, spreads their connections over time.
            await self.next_server.keep(self._attempts.rota.next, self.tolerated_ms / 1000)

    def _take_lease(self, lease_ms: int, heartbeat_interval_ms: int) -> None:
        self.lease_ms = self._last_lease_ms = lease_ms
        interval_s = max(heartbeat_interval_ms, 100) / 1000
        if fence_s := self._proofs.shortest_fence_s:
            interval_s = min(interval_s, fence_s / HEARTBEATS_PER_FENCE)
        self.outbox.heartbeat_interval_s = interval_s

    def _check_fence(self, job: JobPort, lease_ms: int) -> bool:
        try:
            check_fence(job.fence_after_ms, lease_ms)
        except InvalidRequestError as error:
            job.post(messages.Refused(job.rdzv_id, error.code, str(error)))
            return False
        return True

    def _judge(self, endpoint: Endpoint, error: grpc.aio.AioRpcError) -> RendezvousError:
        trailing = error.trailing_metadata()
        failure = node_stream.error_from_status(
            error.code(),
            error.details(),
            trailing,
            endpoint,
            WELCOME_TIMEOUT_S,
            self._credentials,
        )
        # A node that was accepted before may be accepted again with a new token or certificate.
        stranger = isinstance(failure, UnauthenticatedError) and not self._incarnation
        if stranger or failure.code in node_stream.FINAL_REFUSALS:
            for job in list(self.jobs.values()):
                job.post(messages.Refused(job.rdzv_id, failure.code, str(failure)))
        # If there was no Welcome before, the refusal may only mean that the previous agent's
        # stream has not ended yet.
        if isinstance(failure, NodeSupersededError) and self._incarnation:
            self.superseded = failure
            self.is_superseded.set()
        return failure

    def hello(self) -> pb.Hello:
        """Return the next stream's Hello, with this node's beliefs about all its jobs."""
        beliefs = [belief for job in self.jobs.values() if (belief := job.belief()) is not None]
        placements = self.placements
        hello = messages.Hello(
            node_id=self.identity.node_id,
            instance=self.identity.instance,
            kind=self.identity.kind,
            address=self.address,
            pid=self.identity.pid,
            leadership=self._leadership,
            incarnation=self._incarnation,
            agent_version=self.identity.version,
            fence_after_ms=max((job.fence_after_ms for job in self.jobs.values()), default=0),
            resources=None if placements is None else placements.resources,
            holdings=messages.Holdings(() if placements is None else placements.holdings()),
            health=messages.Health(() if placements is None else placements.failing),
            draining=self.drain.said(),
            takes_several=True,
        )
        return write(pb.Hello(protocol_version=PROTOCOL_VERSION, beliefs=beliefs), hello)


async def _read(call: Call) -> pb.ServerMessage | None:
    message = await call.read()
    if isinstance(message, pb.ServerMessage):
        return message
    status = await call.code()
    if status is grpc.StatusCode.OK:
        return None
    details, trailing = await call.details(), await call.trailing_metadata()
    raise grpc.aio.AioRpcError(status, await call.initial_metadata(), trailing, details)


def _this_task_is_cancelled() -> bool:
    """Return whether this task was cancelled, rather than the call; both look alike to a reader."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def welcome_timeout_s(tolerated_ms: int, unanswered: int) -> float:
    """Return how long to wait for the next Welcome, after `unanswered` streams without one.

    The time increases with the tolerated silence, the lease, and thus with the number of nodes that
    may reconnect at once. It doubles after each stream without a Welcome, because a busy server
    would otherwise serve only nodes that have already given up on it. Pings detect a server that is
    gone.
    """
    over_s = max(tolerated_ms - LeaseRules().duration_ms, 0) / 1000
    first_s = WELCOME_TIMEOUT_S + 2 * over_s
    return min(first_s * 2.0 ** min(unanswered, 10), WELCOME_TIMEOUT_MOST_S)

"""The Rendezvous service: one stream per node for all its jobs, either direct or through a relay.

An error about one job is sent to the node on its stream, which stays open. An error that ends the
stream is raised, and becomes the status of the call (see `gate_interceptor`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import grpc.aio

from rdzv.core.commands import Command
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
)
from rdzv.runtime.clock import Clock
from rdzv.server.driver import Driver
from rdzv.server.messages import (
    Announcement,
    Belief,
    Heard,
    Holdings,
    Hung,
    Progress,
    Refused,
    Servers,
    SnapshotsHeld,
    WorkersStarted,
)
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc.gate_interceptor import end_stream_unheard
from rdzv.server.rpc.node_calls import DirectCall, NodeCall, no_hello
from rdzv.server.rpc.rate_limit import RateLimit
from rdzv.server.rpc.relayed_streams import RelayedStreams
from rdzv.server.security import callers
from rdzv.server.security.callers import Caller
from rdzv.server.security.gate import Gate
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings.config import Config
from rdzv.server.wire import inbound_nodes, inbound_reports, inbound_snapshots, outbound
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from rdzv.version import VERSION

Said = tuple[str, Command] | Holdings
Inbox = asyncio.Queue[Said | None]

LAST_WRITE_S = 1.0
"""How long a write in progress may take once its stream has ended."""

_SHOWN = 3
"""The number of kinds of reports that are kept for a job until the node's beliefs are handled."""

log = logging.getLogger("rdzv.service")


class RendezvousService(pb_grpc.RendezvousServicer):
    """Serves one stream per node, for all the node's jobs."""

    def __init__(self, replica: Replica, clock: Clock, config: Config, gate: Gate) -> None:
        self._replica = replica
        self._clock = clock
        self._config = config
        self._gate = gate
        self._version = VERSION

    # The generated base class expects handlers that yield; these read and write concurrently.
    async def Attach(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: object,
        context: grpc.aio.ServicerContext[pb.NodeMessage, pb.ServerMessage],
    ) -> None:
        """Serve one node until either side ends the stream."""
        driver = await self._settled_driver(context)
        await self._converse(driver, DirectCall(context), callers.present.get())

    async def Relay(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: object,
        context: grpc.aio.ServicerContext[pb.FromRelay, pb.ToRelay],
    ) -> None:
        """Serve the nodes behind a relay until either side ends the call."""
        driver = await self._settled_driver(context)
        converse = partial(self._converse, driver)
        relay = RelayedStreams(driver, self._gate, converse, self._clock, self._config)
        await relay.hold(context)

    async def _settled_driver(self, context: Any) -> Driver:
        try:
            return await self._replica.settled_driver(
                self._config.timings.leaderless_hold_ms / 1000
            )
        except RendezvousError as error:
            await end_stream_unheard(context, error)
            raise

    async def _converse(self, driver: Driver, call: NodeCall, caller: Caller) -> None:
        conversation = Conversation(driver, self._replica, self._clock, self._config, self._version)
        await conversation.hold(call, caller)


class Conversation:
    """One node's stream, served with the driver that led when the stream was opened."""

    def __init__(
        self, driver: Driver, replica: Replica, clock: Clock, config: Config, version: str
    ) -> None:
        self._driver = driver
        self._replica = replica
        self._clock = clock
        self._limits = config.limits
        self._timings = config.timings
        self._version = version
        self._early: dict[tuple[type, str], Callable[[], None]] = {}
        """By kind and rdzv_id: reports that arrived before the node's beliefs were handled. They
        are noted after that."""
        self._early_hung: dict[str, Hung] = {}
        """By rdzv_id: early reports of hung workers."""
        self._warned = False
        self._allowance = RateLimit(self._limits.commands_at_once, self._limits.commands_per_second)

    async def hold(self, call: NodeCall, caller: Caller) -> None:
        """Serve the node until either side ends the stream.

        Raises:
            RendezvousError: the reason why this server has ended the stream.

        """
        message = await self._first_message(call)
        hello = inbound_nodes.hello_of(message, self._limits)
        stream = self._driver.connections.attach(hello, caller)
        try:
            end = await self._serve(stream, message.beliefs, call)
        except grpc.aio.BaseError:
            end = None
        finally:
            # This runs even if the node has died, because gRPC then cancels the call.
            self._driver.connections.detach(stream, cut=call.cut)
        if end is not None:
            log.info("the stream of %s is closed: %s", stream.node_id, end)
            raise end

    async def _first_message(self, call: NodeCall) -> pb.Hello:
        timeout_s = self._timings.hello_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                message = await call.receive()
        except TimeoutError:
            raise no_hello(timeout_s) from None
        if message is None or message.WhichOneof("body") != "hello":
            raise InvalidRequestError("the first message of a stream must be a hello")
        return message.hello

    async def _serve(
        self, stream: Stream, beliefs: Iterable[pb.Belief], call: NodeCall
    ) -> RendezvousError | None:
        inbox = Inbox(self._limits.inbox)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._read(stream, inbox, call)),
                tasks.create_task(self._obey(stream, beliefs, inbox)),
            ]
            await self._write(stream, call)
            for task in running:
                task.cancel()
        return await stream.ended()

    async def _read(self, stream: Stream, inbox: Inbox, call: NodeCall) -> None:
        """Read the node's messages; each renews the lease at once, even while the store is away."""
        try:
            while (message := await call.receive()) is not None:
                self._driver.connections.heard(stream)
                self._take(message, stream, inbox)
        except InvalidRequestError as error:
            stream.close(error)
        # The end of a stream is not a leave. None ends the inbox, after the earlier messages.
        await inbox.put(None)

    def _take(self, message: pb.NodeMessage, stream: Stream, inbox: Inbox) -> None:
        try:
            match message.WhichOneof("body"):
                case "heartbeat":
                    if message.heartbeat.number:
                        now_us = self._clock.now_ms() * 1_000
                        stream.send(Heard(message.heartbeat.number, now_us))
                case "away":
                    deadline_ms = inbound_nodes.away_ms_of(message.away, self._limits)
                    self._driver.connections.plan_away(stream, deadline_ms)
                case "log_piece":
                    self._driver.reports.take_log(
                        stream, inbound_nodes.log_piece_of(message.log_piece, self._limits)
                    )
                case "progress" | "workers_started" | "snapshots_held" | "arrivals" | "worker_gpus":
                    self._take_shown(message, stream)
                case "hung":
                    self._take_hung(inbound_nodes.hung_of(message.hung, self._limits), stream)
                case "stacks":
                    said = inbound_nodes.stacks_of(message.stacks, self._limits)
                    self._driver.reports.take_stacks_in(stream, said)
                case "health":
                    self._driver.reports.note_health(
                        stream, inbound_nodes.failing_of(message.health, self._limits)
                    )
                case "holdings":
                    holdings = Holdings(inbound_nodes.holdings_of(message.holdings, self._limits))
                    self._queue(holdings, stream, inbox)
                case "draining":
                    draining = inbound_nodes.draining_of(message.draining, self._limits)
                    self._driver.reports.note_draining(stream, draining)
                case _:
                    speaker = inbound_nodes.Speaker(stream.node_id, stream.incarnation)
                    self._queue(
                        inbound_nodes.command_of(message, speaker, self._limits), stream, inbox
                    )
        except (InvalidRequestError, LimitExceededError) as error:
            stream.send(Refused(inbound_nodes.job_named_in(message), error.code, str(error)))

    def _take_shown(self, message: pb.NodeMessage, stream: Stream) -> None:
        """Handle a report that is not a command; an invalid one is logged, not refused."""
        reports, limits = self._driver.reports, self._limits
        try:
            match message.WhichOneof("body"):
                case "progress":
                    progress = inbound_reports.progress_of(message.progress, limits)
                    self._show(progress, reports.note_progress, stream)
                case "workers_started":
                    started = inbound_reports.started_of(message.workers_started, limits)
                    self._show(started, reports.note_started, stream)
                case "snapshots_held":
                    held = inbound_snapshots.snapshots_held_of(message.snapshots_held, limits)
                    self._show(held, reports.note_snapshots, stream)
                case "worker_gpus":
                    gpus = inbound_reports.gpus_of(message.worker_gpus, limits)
                    if stream.greeted:  # An early report is dropped: agents repeat it.
                        reports.note_gpus(stream, gpus)
                case _:
                    arrivals = inbound_reports.arrivals_of(message.arrivals, limits)
                    if stream.greeted:  # Early arrivals are dropped: more follow in seconds.
                        reports.note_arrivals(stream, arrivals)
        except InvalidRequestError as error:
            self._warn(stream, error)

    def _show(
        self,
        said: Progress | WorkersStarted | SnapshotsHeld,
        note: Callable[[Stream, Any], None],
        stream: Stream,
    ) -> None:
        """Note a report at once, so that it does not wait in the inbox while the store is away.

        A report that arrives before the node's beliefs are handled is noted after them.
        """
        key = type(said), said.rdzv_id
        if stream.greeted:
            note(stream, said)
        elif key in self._early or len(self._early) < _SHOWN * self._limits.beliefs:
            self._early[key] = partial(note, stream, said)

    def _take_hung(self, said: Hung, stream: Stream) -> None:
        """Note hung workers at once or, if the node's beliefs are not handled yet, after them."""
        if stream.greeted:
            self._driver.reports.note_hung(stream, said)
        elif said.rdzv_id in self._early_hung or len(self._early_hung) < self._limits.beliefs:
            self._early_hung[said.rdzv_id] = said

    def _release_hung(self, stream: Stream) -> None:
        early, self._early_hung = self._early_hung, {}
        for said in early.values():
            try:
                self._driver.reports.note_hung(stream, said)
            except InvalidRequestError as error:
                stream.send(Refused(said.rdzv_id, error.code, str(error)))

    def _release_shown(self, stream: Stream) -> None:
        early, self._early = self._early, {}
        for note in early.values():
            try:
                note()
            except InvalidRequestError as error:
                self._warn(stream, error)

    def _warn(self, stream: Stream, error: InvalidRequestError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: ignoring its report: %s", stream.node_id, error)

    def _queue(self, said: Said, stream: Stream, inbox: Inbox) -> None:
        if not isinstance(said, Holdings) and not self._allowance.take(self._clock.now_ms()):
            raise LimitExceededError(
                f"{stream.node_id} sends more than {self._limits.commands_per_second} commands a "
                "second; send fewer"
            )
        try:
            inbox.put_nowait(said)
        except asyncio.QueueFull:
            stream.close(
                LimitExceededError(
                    f"{inbox.maxsize} messages of {stream.node_id} wait to be decided; the stream "
                    "is closed: send Hello again with the node's beliefs"
                )
            )

    async def _obey(self, stream: Stream, beliefs: Iterable[pb.Belief], inbox: Inbox) -> None:
        """Handle the node's beliefs, and then its queued messages in order."""
        named = [inbound_nodes.job_named_in(message) for message in beliefs]
        await self._driver.recovery.greet(stream, self._beliefs(stream, beliefs), named)
        self._release_shown(stream)
        self._release_hung(stream)
        while (said := await inbox.get()) is not None:
            if isinstance(said, Holdings):
                await self._driver.reports.note_holdings(stream, said.held)
            else:
                await self._driver.commands.hear(stream, *said)
        stream.close()

    def _beliefs(self, stream: Stream, messages: Iterable[pb.Belief]) -> Iterable[Belief]:
        speaker = inbound_nodes.Speaker(stream.node_id, stream.incarnation)
        for message in messages:
            try:
                yield inbound_nodes.belief_of(message, speaker, self._limits)
            except InvalidRequestError as error:
                # An error about one job must not block the node's other jobs.
                stream.send(Refused(inbound_nodes.job_named_in(message), error.code, str(error)))

    async def _write(self, stream: Stream, call: NodeCall) -> None:
        """Write messages to a node until its stream ends.

        A write in progress at the end gets `LAST_WRITE_S` to finish. If the first write were cut
        short, the node would not learn why the stream ended: gRPC would not know whether that write
        had sent the initial metadata, and would fail to send them again before the final status.
        """
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                with stream.calling_on_end(lambda: limit.reschedule(loop.time() + LAST_WRITE_S)):
                    while told := await stream.outbox.take():
                        await self._write_all(told, stream, call)

    async def _write_all(
        self, told: Sequence[Announcement], stream: Stream, call: NodeCall
    ) -> None:
        if not await self._replica.regain_word():
            # Another server may lead by now, and may have sent a different state.
            unproven = "this server cannot prove that it leads"
            stream.close(RendezvousConnectionError(unproven))
        if call.by_relay:
            # A relayed node reaches another server through its relay, so it needs no list.
            told = [one for one in told if not isinstance(one, Servers)]
        for together in [told] if stream.takes_several else [[one] for one in told]:
            if together and stream.open:
                message = outbound.server_message(
                    together, self._driver.leadership, self._version, self._clock.now_ms()
                )
                if not await call.send(message):
                    stream.close()

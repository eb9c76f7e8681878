"""The gRPC services: Rendezvous for nodes, Control for operators, health and reflection.

An error leaves here as its status from the error table, with its code in the trailing metadata;
what goes wrong about one job of a node is told to it in the stream, which stays open.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rdzv.core.commands import Command, Restart, Scale, Stop
from rdzv.core.explain import job_state
from rdzv.core.words import duration, listed
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    UnknownJobError,
)
from rdzv.runtime.clock import Clock
from rdzv.runtime.concurrency import beside
from rdzv.server.driver import Driver
from rdzv.server.messages import Belief, Heard, Holdings, Hung, NodeSummary, Progress, Refused
from rdzv.server.operations import answer_values
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc.grpc_log import quiet_grpc
from rdzv.server.rpc.grpc_server import grpc_server
from rdzv.server.rpc.queries import Answers
from rdzv.server.rpc.rate_limit import Allowance
from rdzv.server.rpc.role_interceptor import Interceptor, end_call, end_stream_unheard
from rdzv.server.security import callers
from rdzv.server.security.access import AUDIT, Gate, note_change, signed
from rdzv.server.security.tokens import Token
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings import bounds
from rdzv.server.settings.config import Config, Limits, Timings
from rdzv.server.wire import inbound_nodes, inbound_operators, outbound
from rdzv.structs import replace
from rdzv.transport.endpoints import Listen
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from rdzv.version import VERSION

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade
    from rdzv.core.explain import JobView
    from rdzv.server.security.tls import Tls

Context = grpc.aio.ServicerContext[pb.NodeMessage, pb.ServerMessage]
AnyContext = grpc.aio.ServicerContext[Any, Any]
Said = tuple[str, Command] | Holdings
Inbox = asyncio.Queue[Said | None]

Obeyed = Stop | Restart | Scale
Wish = TypeVar("Wish", pb.StopJobRequest, pb.RestartJobRequest, pb.ScaleJobRequest)

log = logging.getLogger("rdzv.service")

CHUNK_BYTES = 256 * 1024
OTHER_FILES = 512
"""Open files that are kept back from connections: the store's, the HTTP port's, and some more."""
"""What one message of a backup carries; far below the largest message that gRPC lets pass."""

SERVICES = ("rdzv.v1.Rendezvous", "rdzv.v1.Control")


def server_version() -> str:
    """Return the version of the installed program."""
    return VERSION


async def _abort(context: AnyContext, error: RendezvousError) -> NoReturn:
    """End a call with an error of the table."""
    await end_call(context, error)
    raise AssertionError("a call that was ended does not go on")


async def _receive(context: Context) -> pb.NodeMessage | None:
    """Return the next message of a node; None if its stream has ended, in whatever way.

    Raises:
        InvalidRequestError: what came is no message.

    """
    try:
        message = await context.read()
    except DecodeError as error:
        raise InvalidRequestError(
            f"a message can not be read: {error}; the sender speaks another protocol"
        ) from error
    except grpc.aio.BaseError:
        return None
    return message if isinstance(message, pb.NodeMessage) else None


class RendezvousService(pb_grpc.RendezvousServicer):
    """The stream of each node, for all its jobs."""

    def __init__(self, replica: Replica, clock: Clock, config: Config) -> None:
        self._replica = replica
        self._clock = clock
        self._config = config
        self._version = server_version()

    # The generated stub knows handlers that yield; this one reads and writes at once.
    async def Attach(  # type: ignore[override]  # noqa: N802
        self, request_iterator: object, context: Context
    ) -> None:
        """Serve one node until either side ends the stream."""
        try:
            driver = await self._replica.settled_driver(
                self._config.timings.leaderless_hold_ms / 1000
            )
        except RendezvousError as error:
            await end_stream_unheard(context, error)
            raise
        conversation = Conversation(driver, self._replica, self._clock, self._config, self._version)
        await conversation.hold(context)


class Conversation:
    """One node's stream, with the driver that led when it was opened."""

    def __init__(
        self, driver: Driver, replica: Replica, clock: Clock, config: Config, version: str
    ) -> None:
        self._driver = driver
        self._replica = replica
        self._clock = clock
        self._limits = config.limits
        self._timings = config.timings
        self._version = version
        self._early: dict[str, Progress] = {}
        """By rdzv_id: what the node has said of its workers before its beliefs were decided."""
        self._early_hung: dict[str, Hung] = {}
        """Likewise: which of its workers hang."""
        self._warned = False
        self._allowance = Allowance(self._limits.commands_at_once, self._limits.commands_per_second)

    async def hold(self, context: Context) -> None:
        """Serve the node until either side ends the stream."""
        try:
            message = await self._first_message(context)
            hello = inbound_nodes.hello_of(message, self._limits)
            stream = self._driver.connections.attach(hello, callers.present.get())
        except RendezvousError as error:
            await _abort(context, error)
        try:
            # Now, for a first write that is cut short would not know that it has sent them, and
            # the status that follows would fail to send them again: the node would hear nothing.
            await context.send_initial_metadata(())
            end = await self._serve(stream, message.beliefs, context)
        except grpc.aio.BaseError:
            end = None
        finally:
            # Also when the node died, for then this call is cancelled.
            self._driver.connections.detach(stream)
        if end is not None:
            log.info("the stream of %s is closed: %s", stream.node_id, end)
            await _abort(context, end)

    async def _first_message(self, context: Context) -> pb.Hello:
        timeout_s = self._timings.hello_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                message = await _receive(context)
        except TimeoutError:
            raise InvalidRequestError(
                f"no hello within {timeout_s:g} s; send it as the first message of the stream"
            ) from None
        if message is None or message.WhichOneof("body") != "hello":
            raise InvalidRequestError("the first message of a stream must be a hello")
        return message.hello

    async def _serve(
        self, stream: Stream, beliefs: Iterable[pb.Belief], context: Context
    ) -> RendezvousError | None:
        inbox = Inbox(self._limits.inbox)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._read(stream, inbox, context)),
                tasks.create_task(self._obey(stream, beliefs, inbox)),
                tasks.create_task(self._write(stream, context)),
            ]
            end = await stream.ended()
            for task in running:
                task.cancel()
        return end

    async def _read(self, stream: Stream, inbox: Inbox, context: Context) -> None:
        """Take in what the node says; it is heard at once, even while the store is away."""
        try:
            while (message := await _receive(context)) is not None:
                self._driver.connections.heard(stream)
                self._take(message, stream, inbox)
        except InvalidRequestError as error:
            stream.close(error)
        # The stream's end is no goodbye: see the contract. What was said before it is heard first.
        await inbox.put(None)

    def _take(self, message: pb.NodeMessage, stream: Stream, inbox: Inbox) -> None:
        try:
            match message.WhichOneof("body"):
                case "heartbeat":
                    if message.heartbeat.number:
                        stream.send(Heard(message.heartbeat.number))
                case "away":
                    deadline_ms = inbound_nodes.away_ms_of(message.away, self._limits)
                    self._driver.connections.plan_away(stream, deadline_ms)
                case "log_piece":
                    self._driver.reports.take_log(
                        stream, inbound_nodes.log_piece_of(message.log_piece, self._limits)
                    )
                case "progress":
                    self._take_progress(message.progress, stream)
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

    def _take_progress(self, message: pb.Progress, stream: Stream) -> None:
        """Take note of progress at once: it must not wait in the inbox while the store is away.

        It is for people: what is wrong with it is no reason to refuse the node anything.
        """
        try:
            said = inbound_nodes.progress_of(message, self._limits)
            if stream.greeted:
                self._driver.reports.note_progress(stream, said)
            elif said.rdzv_id in self._early or len(self._early) < self._limits.beliefs:
                self._early[said.rdzv_id] = said
        except InvalidRequestError as error:
            self._warn(stream, error)

    def _take_hung(self, said: Hung, stream: Stream) -> None:
        """Take note of workers that hang at once; a job that is not adopted yet has none."""
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

    def _release_progress(self, stream: Stream) -> None:
        early, self._early = self._early, {}
        for said in early.values():
            try:
                self._driver.reports.note_progress(stream, said)
            except InvalidRequestError as error:
                self._warn(stream, error)

    def _warn(self, stream: Stream, error: InvalidRequestError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: its progress is passed over: %s", stream.node_id, error)

    def _queue(self, said: Said, stream: Stream, inbox: Inbox) -> None:
        if not isinstance(said, Holdings) and not self._allowance.take(self._clock.now_ms()):
            raise LimitExceededError(
                f"{stream.node_id} asks for more than {self._limits.commands_per_second} things a "
                "second; ask less often"
            )
        try:
            inbox.put_nowait(said)
        except asyncio.QueueFull:
            stream.close(
                LimitExceededError(
                    f"{inbox.maxsize} messages of {stream.node_id} wait to be decided; the stream "
                    "is closed: say hello again with what you believe"
                )
            )

    async def _obey(self, stream: Stream, beliefs: Iterable[pb.Belief], inbox: Inbox) -> None:
        """Decide what the node says, in its order, beginning with what it believes."""
        named = [inbound_nodes.job_named_in(message) for message in beliefs]
        await self._driver.recovery.greet(stream, self._beliefs(stream, beliefs), named)
        self._release_progress(stream)
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
                # One bad job must not keep the others of this node from being heard.
                stream.send(Refused(inbound_nodes.job_named_in(message), error.code, str(error)))

    async def _write(self, stream: Stream, context: Context) -> None:
        while True:
            told = await stream.next()
            if not self._replica.proven:
                # Another server may have said something else by now.
                stream.close(RendezvousConnectionError("this server can not prove that it leads"))
                return
            message = outbound.server_message(
                told, self._driver.leadership, self._version, self._clock.now_ms()
            )
            try:
                await context.write(message)
            except grpc.aio.BaseError:
                stream.close()
                return


class ControlService(pb_grpc.ControlServicer):
    """Answers operators. A job that is only watched gives way to one of its name, but in lists."""

    def __init__(
        self, replica: Replica, clock: Clock, limits: Limits, facade: Facade | None = None
    ) -> None:
        self._replica = replica
        self._clock = clock
        self._limits = limits
        self._answers = Answers(replica, clock, limits, facade)

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: AnyContext
    ) -> pb.JobStatus:
        """Show one job."""
        try:
            return self._status(await self._answers.view(request.rdzv_id))
        except RendezvousError as error:
            await _abort(context, error)

    async def WatchJob(  # noqa: N802
        self, request: pb.GetStatusRequest, context: AnyContext
    ) -> AsyncIterator[pb.JobStatus]:
        """Show one job whenever it changes."""
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id, self._limits)
            async with aclosing(self._replica.driver.views.watch(rdzv_id)) as views:
                async for view in views:
                    yield self._status(view)
        except RendezvousError as error:
            await _abort(context, error)

    async def ListJobs(  # noqa: N802
        self, request: pb.ListJobsRequest, context: AnyContext
    ) -> pb.ListJobsResponse:
        """Show every job."""
        try:
            driver = self._replica.driver
            views = [view async for view in self._answers.views()]
        except RendezvousError as error:
            await _abort(context, error)
        jobs = [outbound.job_summary(self._answers.summary_of(view)) for view in views]
        return pb.ListJobsResponse(jobs=jobs, store_away=driver.trouble)

    async def ListEvents(  # noqa: N802
        self, request: pb.ListEventsRequest, context: AnyContext
    ) -> pb.ListEventsResponse:
        """Show a job's history."""
        try:
            limit = inbound_operators.history_limit(request.limit, self._limits)
            rows = await self._answers.history(request.rdzv_id, limit)
        except RendezvousError as error:
            await _abort(context, error)
        return pb.ListEventsResponse(events=[outbound.event_row(row) for row in rows])

    async def StopJob(  # noqa: N802
        self, request: pb.StopJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        """End a run."""
        return await self._obey(request, inbound_operators.stop_of, context)

    async def RestartJob(  # noqa: N802
        self, request: pb.RestartJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        """End a round, and have another form."""
        return await self._obey(request, inbound_operators.restart_of, context)

    async def ScaleJob(  # noqa: N802
        self, request: pb.ScaleJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        """Give a run other bounds."""
        return await self._obey(request, inbound_operators.scale_of, context)

    async def SubmitJob(  # noqa: N802
        self, request: pb.SubmitJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        """Begin a run whose nodes the server chooses."""
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id, self._limits)
            command = inbound_operators.submit_of(request, self._limits)
            caller = callers.present.get()
            before = await self._doing(rdzv_id)
            view = await self._replica.driver.operations.submit_job(rdzv_id, command, caller)
            note_change(before, view.state)
            return self._status(view)
        except RendezvousError as error:
            await _abort(context, error)

    async def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: AnyContext
    ) -> pb.ListNodesResponse:
        """Show every node."""
        try:
            named = [bounds.node_id_of(node_id, self._limits) for node_id in request.node_ids]
            driver = self._replica.driver
            nodes = list(map(_node, driver.node_views.summaries(named)))
        except RendezvousError as error:
            await _abort(context, error)
        return pb.ListNodesResponse(nodes=nodes, store_away=driver.trouble)

    async def CordonNode(  # noqa: N802
        self, request: pb.CordonNodeRequest, context: AnyContext
    ) -> pb.Node:
        """Place nothing more on a node."""
        try:
            node_id, reason = inbound_operators.cordon_of(request, self._limits)
            reason = signed(reason, callers.present.get())
            before = self._use(node_id)
            found = await self._replica.driver.nodes.cordon(node_id, reason)
            note_change(before, _use_of(found))
            return _node(found)
        except RendezvousError as error:
            await _abort(context, error)

    async def UncordonNode(  # noqa: N802
        self, request: pb.UncordonNodeRequest, context: AnyContext
    ) -> pb.Node:
        """Let a node be placed on again."""
        try:
            node_id = bounds.node_id_of(request.node_id, self._limits)
            before = self._use(node_id)
            found = await self._replica.driver.nodes.uncordon(node_id)
            note_change(before, _use_of(found))
            return _node(found)
        except RendezvousError as error:
            await _abort(context, error)

    async def DrainNode(  # noqa: N802
        self, request: pb.DrainNodeRequest, context: AnyContext
    ) -> pb.Node:
        """Empty a node."""
        try:
            driver = self._replica.driver
            node_id, deadline_ms, reason = inbound_operators.drain_of(request, self._limits)
            reason = signed(reason, callers.present.get())
            before = self._use(node_id)
            found = await driver.nodes.drain(
                node_id, deadline_ms, reason, keep_min=request.keep_min
            )
            note_change(before, f"{_use_of(found)} (within {duration(deadline_ms)})")
            return _node(found)
        except RendezvousError as error:
            await _abort(context, error)

    async def UndrainNode(  # noqa: N802
        self, request: pb.UndrainNodeRequest, context: AnyContext
    ) -> pb.Node:
        """Lift a drain."""
        try:
            node_id = bounds.node_id_of(request.node_id, self._limits)
            before = self._use(node_id)
            found = await self._replica.driver.nodes.undrain(node_id)
            note_change(before, _use_of(found))
            return _node(found)
        except RendezvousError as error:
            await _abort(context, error)

    async def _obey(
        self, request: Wish, read: Callable[[Wish, Limits], Obeyed], context: AnyContext
    ) -> pb.JobStatus:
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id, self._limits)
            command = read(request, self._limits)
            command = replace(command, reason=signed(command.reason, callers.present.get()))
            scales = isinstance(command, Scale)
            before = await self._doing(rdzv_id, scales=scales)
            view = await self._replica.driver.operations.obey(rdzv_id, command)
            after = _bounds(view.min_nodes, view.max_nodes) if scales else view.state
            note_change(before, after)
            return self._status(view)
        except RendezvousError as error:
            await _abort(context, error)

    async def ForgetJob(  # noqa: N802
        self, request: pb.ForgetJobRequest, context: AnyContext
    ) -> pb.ForgetJobResponse:
        """Forget a job that has ended."""
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id, self._limits)
            before = await self._doing(rdzv_id)
            await self._replica.driver.operations.forget(rdzv_id)
            note_change(before, "forgotten")
        except RendezvousError as error:
            await _abort(context, error)
        return pb.ForgetJobResponse()

    async def ReadLogs(  # noqa: N802
        self, request: pb.ReadLogsRequest, context: AnyContext
    ) -> AsyncIterator[pb.LogLines]:
        """Send what workers have written, as fast as it is taken."""
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id, self._limits)
            wanted = inbound_operators.logs_wanted_of(request, self._limits)
            async with aclosing(self._replica.driver.workers.read_logs(rdzv_id, wanted)) as found:
                async for lines in found:
                    yield outbound.log_lines(lines)
        except UnknownJobError as error:
            await _abort(context, self._answers.why_no_logs(request.rdzv_id, error))
        except RendezvousError as error:
            await _abort(context, error)

    async def TakeStacks(  # noqa: N802
        self, request: pb.TakeStacksRequest, context: AnyContext
    ) -> pb.StackReport:
        """Show what the workers of a round do, or did when it hung."""
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id, self._limits)
            run, number = inbound_operators.stacks_wanted_of(request, self._limits)
            why = "an operator asked for them"
            report = await self._replica.driver.workers.stacks(rdzv_id, run, number, why)
            shown = answer_values.stack_report(report, self._clock.now_ms())
            return outbound.stack_report(shown)
        except UnknownJobError as error:
            if self._answers.watched(request.rdzv_id) is not None:
                await _abort(context, _without_agents(request.rdzv_id))
            await _abort(context, error)
        except RendezvousError as error:
            await _abort(context, error)

    async def Backup(  # noqa: N802
        self, request: pb.BackupRequest, context: AnyContext
    ) -> AsyncIterator[pb.BackupChunk]:
        """Send all that the store holds, piece by piece, as fast as it is taken."""
        try:
            driver = self._replica.driver
            async for data in _in_chunks(driver.store.backup(driver.leadership)):
                yield pb.BackupChunk(data=data)
        except RendezvousError as error:
            await _abort(context, error)

    async def ListServers(  # noqa: N802
        self, request: pb.ListServersRequest, context: AnyContext
    ) -> pb.ListServersResponse:
        """Show every rdzvd that shares this one's store; also one that stands by answers."""
        try:
            servers = await self._replica.servers()
        except RendezvousError as error:
            await _abort(context, error)
        shown = map(answer_values.server, servers)
        return pb.ListServersResponse(servers=map(outbound.server, shown))

    async def CreateToken(  # noqa: N802
        self, request: pb.CreateTokenRequest, context: AnyContext
    ) -> pb.CreateTokenResponse:
        """Make a token, and show its text once."""
        try:
            name, roles = callers.name_of(request.name), callers.roles_of(request.roles)
            expires_in_ms = inbound_operators.token_life_of(request, self._limits)
            driver = self._replica.driver
            token, text = await driver.tokens.create(name, roles, expires_in_ms)
            note_change("nothing", f"token {token.id} with {' and '.join(roles)}")
        except RendezvousError as error:
            await _abort(context, error)
        shown = answer_values.token(token, self._clock.now_ms())
        return pb.CreateTokenResponse(token=outbound.token(shown), text=text)

    async def ListTokens(  # noqa: N802
        self, request: pb.ListTokensRequest, context: AnyContext
    ) -> pb.ListTokensResponse:
        """Show every token."""
        try:
            tokens = self._replica.driver.tokens.listed()
        except RendezvousError as error:
            await _abort(context, error)
        return self._tokens(tokens)

    async def RevokeTokens(  # noqa: N802
        self, request: pb.RevokeTokensRequest, context: AnyContext
    ) -> pb.ListTokensResponse:
        """Revoke a token, or all of one name."""
        try:
            revoked = await self._replica.driver.tokens.revoke(request.id_or_name)
            note_change(listed(f"token {token.id}" for token in revoked), "revoked")
        except RendezvousError as error:
            await _abort(context, error)
        return self._tokens(revoked)

    def _tokens(self, tokens: Iterable[Token]) -> pb.ListTokensResponse:
        now_ms = self._clock.now_ms()
        shown = [answer_values.token(token, now_ms) for token in tokens]
        return pb.ListTokensResponse(tokens=list(map(outbound.token, shown)))

    async def ListAudit(  # noqa: N802
        self, request: pb.ListAuditRequest, context: AnyContext
    ) -> pb.ListEventsResponse:
        """Show who has changed what."""
        try:
            limit = inbound_operators.history_limit(request.limit, self._limits)
            rows = await self._replica.driver.history.of(AUDIT, limit)
        except RendezvousError as error:
            await _abort(context, error)
        return pb.ListEventsResponse(events=[outbound.event_row(row) for row in rows])

    async def _doing(self, rdzv_id: str, *, scales: bool = False) -> str:
        """Say what a job does, or with `scales` which bounds it has, before a call changes it."""
        state = await self._replica.driver.jobs.look(rdzv_id)
        if not state.membership.run:
            return "unknown"
        return _bounds(*state.membership.bounds) if scales else job_state(state)

    def _use(self, node_id: str) -> str:
        """Say whether jobs are placed on a node, before a call changes it."""
        return next(map(_use_of, self._replica.driver.node_views.summaries([node_id])), "unknown")

    def _status(self, view: JobView) -> pb.JobStatus:
        return outbound.job_status(self._answers.status_of(view))


def _bounds(min_nodes: int, max_nodes: int) -> str:
    return f"{min_nodes}:{max_nodes} nodes"


def _node(summary: NodeSummary) -> pb.Node:
    return outbound.node(answer_values.node(summary))


def _use_of(node: NodeSummary) -> str:
    if node.drain:
        return node.drain
    return "cordoned" if node.cordoned else "quarantined" if node.quarantine else "in service"


def _without_agents(rdzv_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{rdzv_id} forms its group with torchrun's own c10d rendezvous, which is only watched "
        "here: its nodes have no agent that takes stacks; run `py-spy dump --pid PID` there"
    )


async def _in_chunks(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Put short lines together, and divide long ones: a chunk is no more than one message."""
    waiting = bytearray()
    async for line in lines:
        waiting += line
        while len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting[:CHUNK_BYTES])
            del waiting[:CHUNK_BYTES]
    if waiting:
        yield bytes(waiting)


@asynccontextmanager
async def serving(
    replica: Replica,
    clock: Clock,
    config: Config,
    facade: Facade | None = None,
    tls: Tls | None = None,
    gate: Gate | None = None,
    *,
    reflection: bool = True,
) -> AsyncIterator[Listen]:
    """Serve until the body ends; yield the address, with the port that was given for port 0.

    At the end every stream is told to connect again, and open calls get a moment to end.
    Without `reflection` nobody can ask what there is to call.

    Raises:
        InvalidRequestError: the address can not be listened on.
        RendezvousStateError: gRPC's server has ended by itself; the body is cancelled.

    """
    gate = gate or Gate(replica, clock, config)
    quiet_grpc()
    server = grpc_server([Interceptor(gate)], _options(config.limits, config.timings))
    pb_grpc.add_RendezvousServicer_to_server(RendezvousService(replica, clock, config), server)
    control = ControlService(replica, clock, config.limits, facade)
    pb_grpc.add_ControlServicer_to_server(control, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if reflection:
        _enable_reflection(server)
    asks = config.tls is not None and config.tls.client_ca is not None
    bound = replace(config.listen, port=_bind(server, config.listen, tls, asks=asks))
    if config.tls is not None and (listen := config.tls.token_listen) is not None:
        at_port = replace(listen, port=_bind(server, listen, tls, asks=False))
        log.info("who has no certificate connects to %s, and shows a token", at_port)
    await server.start()
    try:
        at = str(config.advertise or bound)
        async with (
            _insisting_on(server, at),
            _telling_health(replica, health_servicer, at, config.exposed),
        ):
            yield bound
    finally:
        replica.stand_by(
            RendezvousConnectionError("this server is stopping; workers run on, connect again")
        )
        await server.stop(config.timings.stop_grace_ms / 1000)


def _options(limits: Limits, timings: Timings) -> list[tuple[str, int]]:
    return [
        # Without this, two servers would share a port and take turns.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        # gRPC refuses at random between the two.
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.calls_per_connection),
        ("grpc.max_allowed_incoming_connections", _connections(limits)),
        ("grpc.server_handshake_timeout_ms", timings.handshake_ms),
        ("grpc.max_connection_idle_ms", timings.idle_connection_ms),
        ("grpc.keepalive_time_ms", timings.ping_interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # This, not keepalive_timeout_ms, is what ends a connection to a stopped peer.
        ("grpc.http2.ping_timeout_ms", timings.ping_timeout_ms),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", timings.min_ping_interval_ms),
        # A server that was held up reads several pings at once, and would end good streams for it.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _connections(limits: Limits) -> int:
    """Leave files for the store and for all else that a server opens, whoever connects."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, max(files - OTHER_FILES, files // 2))


@asynccontextmanager
async def _insisting_on(server: grpc.aio.Server, address: str) -> AsyncIterator[None]:
    """End the body if gRPC's server ends: nobody could reach this process, and it lived on."""
    # It ends when the server has stopped: cancelled, it would cancel the stop as well.
    ended = asyncio.create_task(server.wait_for_termination())

    async def wait() -> None:
        await asyncio.shield(ended)
        raise RendezvousStateError(
            f"gRPC's server at {address} has ended by itself (the log says why, if gRPC did); "
            "start this one again"
        )

    async with beside(wait()):
        yield


def _enable_reflection(server: grpc.aio.Server) -> None:
    # Its import is worth the time only where somebody may ask.
    from grpc_reflection.v1alpha import reflection

    names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


@asynccontextmanager
async def _telling_health(
    replica: Replica, servicer: health.aio.HealthServicer, address: str, exposed: str
) -> AsyncIterator[None]:
    """Let the health service say whether nodes are served here; a server that stands by lives."""
    changed = asyncio.Event()
    leading = False

    def tell(leads: bool) -> None:
        nonlocal leading
        leading = leads
        changed.set()

    async def follow() -> None:
        while True:
            changed.clear()
            for name in SERVICES:
                await servicer.set(name, _SERVING if leading else _NOT_SERVING)
            await changed.wait()

    await servicer.set("", _SERVING)
    replica.serve_as(address, tell, exposed)
    async with beside(follow()):
        yield


_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _bind(server: grpc.aio.Server, listen: Listen, tls: Tls | None, *, asks: bool) -> int:
    """Bind an address; `asks`: who connects has to show a certificate."""
    try:
        if tls is None:
            return server.add_insecure_port(str(listen))
        return server.add_secure_port(str(listen), tls.grpc_credentials(asks=asks))
    except RuntimeError as error:
        raise InvalidRequestError(_why_not(listen)) from error


def _why_not(listen: Listen) -> str:
    """Find out why an address can not be listened on, for gRPC does not say."""
    advice = "give another address with --listen"
    try:
        infos = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return f"can not listen on {listen}: host {listen.host}: {error.strerror}; {advice}"
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return (
                        f"can not listen on {listen}: another program does already; end that one "
                        f"(`ss -ltnp sport = :{listen.port}` names it), or {advice}"
                    )
                reason = os.strerror(error.errno) if error.errno else str(error)
                return f"can not listen on {listen}: {reason}; {advice}"
    return f"can not listen on {listen}: gRPC refused it; {advice}"

"""The Control service: converts operators' requests to values, and the answers to messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rdzv import bounds
from rdzv.core.commands import Restart, Scale, Stop
from rdzv.core.model import job_state
from rdzv.core.words import duration, listed
from rdzv.errors import InvalidRequestError, UnknownJobError
from rdzv.runtime.clock import Clock
from rdzv.server import wire
from rdzv.server.operations import answer_values
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc.queries import Queries
from rdzv.server.security import callers
from rdzv.server.security.role_gate import AUDIT, note_change, signed
from rdzv.server.security.tokens import Token
from rdzv.structs import replace
from rdzv.transport.wire import read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from rdzv.view.answers import Node

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade
    from rdzv.view.answers import JobStatus

AnyContext = grpc.aio.ServicerContext[Any, Any]

TOKEN_LIFE_MOST_MS = 3_650 * bounds.DAY_MS
"""Ten years. A token needed for longer should not expire at all."""
CHUNK_BYTES = 256 * 1024
"""The maximum size of one message in a backup, far below gRPC's message limit."""


class ControlService(pb_grpc.ControlServicer):
    """Answers operators' calls.

    A job hides an observed c10d job with the same name, except in lists. If a call raises an error
    from `rdzv.errors`, the interceptor ends the call with that error's status.
    """

    def __init__(self, replica: Replica, clock: Clock, facade: Facade | None = None) -> None:
        self._replica = replica
        self._clock = clock
        self._queries = Queries(replica, clock, facade)

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: AnyContext
    ) -> pb.JobStatus:
        return self._status(await self._queries.view(request.rdzv_id))

    async def WatchJob(  # noqa: N802
        self, request: pb.GetStatusRequest, context: AnyContext
    ) -> AsyncIterator[pb.JobStatus]:
        """Send the status of a job immediately and after each change."""
        rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
        async with aclosing(self._replica.driver.views.watch(rdzv_id)) as views:
            async for view in views:
                yield self._status(view)

    async def ListJobs(  # noqa: N802
        self, request: pb.ListJobsRequest, context: AnyContext
    ) -> pb.ListJobsResponse:
        driver = self._replica.driver
        views = [view async for view in self._queries.views()]
        jobs = [write(pb.JobSummary(), self._queries.summary_of(view)) for view in views]
        return pb.ListJobsResponse(jobs=jobs, store_away=driver.trouble)

    async def ListEvents(  # noqa: N802
        self, request: pb.ListEventsRequest, context: AnyContext
    ) -> pb.ListEventsResponse:
        """Return the newest events of a job's history, oldest first."""
        limit = wire.history_limit(request.limit)
        rows = await self._queries.history(request.rdzv_id, limit)
        return pb.ListEventsResponse(events=[wire.event_row(row) for row in rows])

    async def StopJob(  # noqa: N802
        self, request: pb.StopJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        return await self._obey(request.rdzv_id, read(Stop, request, checked=True))

    async def RestartJob(  # noqa: N802
        self, request: pb.RestartJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        """End a round, so that the next one forms."""
        return await self._obey(request.rdzv_id, read(Restart, request, checked=True))

    async def ScaleJob(  # noqa: N802
        self, request: pb.ScaleJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        """Change how many nodes a run may have."""
        return await self._obey(request.rdzv_id, wire.scale_of(request))

    async def SubmitJob(  # noqa: N802
        self, request: pb.SubmitJobRequest, context: AnyContext
    ) -> pb.JobStatus:
        """Begin a run whose nodes are chosen by the server."""
        rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
        command = wire.submit_of(request)
        caller = callers.present.get()
        before = await self._doing(rdzv_id)
        view = await self._replica.driver.operations.submit_job(rdzv_id, command, caller)
        note_change(before, view.state)
        return self._status(view)

    async def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: AnyContext
    ) -> pb.ListNodesResponse:
        """Return the named nodes, or all nodes if none are named."""
        named = [bounds.node_id_of(node_id) for node_id in request.node_ids]
        driver = self._replica.driver
        nodes = [write(pb.Node(), node) for node in driver.node_views.summaries(named)]
        return pb.ListNodesResponse(nodes=nodes, store_away=driver.trouble)

    async def CordonNode(  # noqa: N802
        self, request: pb.CordonNodeRequest, context: AnyContext
    ) -> pb.Node:
        """Stop scheduling submitted jobs onto a node."""
        node_id = bounds.node_id_of(request.node_id)
        reason = signed(bounds.sentence(request.reason), callers.present.get())
        before = self._use(node_id)
        found = await self._replica.driver.nodes.cordon(node_id, reason)
        note_change(before, _use_of(found))
        return write(pb.Node(), found)

    async def UncordonNode(  # noqa: N802
        self, request: pb.UncordonNodeRequest, context: AnyContext
    ) -> pb.Node:
        """Schedule submitted jobs onto a node again."""
        node_id = bounds.node_id_of(request.node_id)
        before = self._use(node_id)
        found = await self._replica.driver.nodes.uncordon(node_id)
        note_change(before, _use_of(found))
        return write(pb.Node(), found)

    async def DrainNode(  # noqa: N802
        self, request: pb.DrainNodeRequest, context: AnyContext
    ) -> pb.Node:
        driver = self._replica.driver
        node_id, deadline_ms, reason = wire.drain_of(request)
        reason = signed(reason, callers.present.get())
        before = self._use(node_id)
        found = await driver.nodes.drain(node_id, deadline_ms, reason, force=request.force)
        note_change(before, f"{_use_of(found)} (within {duration(deadline_ms)})")
        return write(pb.Node(), found)

    async def UndrainNode(  # noqa: N802
        self, request: pb.UndrainNodeRequest, context: AnyContext
    ) -> pb.Node:
        """End a node's drain."""
        node_id = bounds.node_id_of(request.node_id)
        before = self._use(node_id)
        found = await self._replica.driver.nodes.undrain(node_id, cordon=request.cordon)
        note_change(before, _use_of(found))
        return write(pb.Node(), found)

    async def _obey(self, asked: str, command: Stop | Restart | Scale) -> pb.JobStatus:
        rdzv_id = bounds.rdzv_id_of(asked)
        command = replace(command, reason=signed(command.reason, callers.present.get()))
        scales = isinstance(command, Scale)
        before = await self._doing(rdzv_id, scales=scales)
        view = await self._replica.driver.operations.obey(rdzv_id, command)
        after = _nnodes(view.min_nodes, view.max_nodes) if scales else view.state
        note_change(before, after)
        return self._status(view)

    async def ForgetJob(  # noqa: N802
        self, request: pb.ForgetJobRequest, context: AnyContext
    ) -> pb.ForgetJobResponse:
        rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
        before = await self._doing(rdzv_id)
        await self._replica.driver.operations.forget(rdzv_id)
        note_change(before, "forgotten")
        return pb.ForgetJobResponse()

    async def ReadLogs(  # noqa: N802
        self, request: pb.ReadLogsRequest, context: AnyContext
    ) -> AsyncIterator[pb.LogLines]:
        """Send workers' output as fast as the caller reads it."""
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
            wanted = wire.logs_wanted_of(request)
            async with aclosing(self._replica.driver.workers.read_logs(rdzv_id, wanted)) as found:
                async for lines in found:
                    yield write(pb.LogLines(), lines)
        except UnknownJobError as error:
            raise self._queries.why_no_logs(request.rdzv_id, error) from error

    async def TakeStacks(  # noqa: N802
        self, request: pb.TakeStacksRequest, context: AnyContext
    ) -> pb.StackReport:
        """Return the stacks of a round's workers, captured now or kept from when the round hung."""
        try:
            rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
            run = request.run and bounds.uid("run", request.run)
            number = request.round if request.HasField("round") else None
            why = "an operator asked for them"
            report = await self._replica.driver.workers.stacks(rdzv_id, run, number, why)
            shown = answer_values.stack_report(report, self._clock.now_ms())
            return write(pb.StackReport(), shown)
        except UnknownJobError as error:
            if self._queries.watched(request.rdzv_id) is not None:
                raise _without_agents(request.rdzv_id) from error
            raise

    async def Backup(  # noqa: N802
        self, request: pb.BackupRequest, context: AnyContext
    ) -> AsyncIterator[pb.BackupChunk]:
        """Send the contents of the store, chunk by chunk, as fast as the caller reads them."""
        driver = self._replica.driver
        async for data in in_chunks(driver.store.backup(driver.leadership)):
            yield pb.BackupChunk(data=data)

    async def ListServers(  # noqa: N802
        self, request: pb.ListServersRequest, context: AnyContext
    ) -> pb.ListServersResponse:
        """Return every rdzvd that shares this server's store. Standby servers also respond."""
        servers = await self._replica.servers()
        return pb.ListServersResponse(servers=[write(pb.Server(), server) for server in servers])

    async def CreateToken(  # noqa: N802
        self, request: pb.CreateTokenRequest, context: AnyContext
    ) -> pb.CreateTokenResponse:
        """Create a token. No later response contains the token's text."""
        name, roles = callers.name_of(request.name), callers.roles_of(request.roles)
        expires_in_ms = bounds.within("expires_in_ms", request.expires_in_ms, 0, TOKEN_LIFE_MOST_MS)
        driver = self._replica.driver
        token, text = await driver.tokens.create(name, roles, expires_in_ms)
        note_change("nothing", f"token {token.id} with {' and '.join(roles)}")
        shown = answer_values.token(token, self._clock.now_ms())
        return pb.CreateTokenResponse(token=write(pb.Token(), shown), text=text)

    async def ListTokens(  # noqa: N802
        self, request: pb.ListTokensRequest, context: AnyContext
    ) -> pb.ListTokensResponse:
        tokens = self._replica.driver.tokens.listed()
        return self._tokens(tokens)

    async def RevokeTokens(  # noqa: N802
        self, request: pb.RevokeTokensRequest, context: AnyContext
    ) -> pb.ListTokensResponse:
        revoked = await self._replica.driver.tokens.revoke(request.id_or_name)
        note_change(listed(f"token {token.id}" for token in revoked), "revoked")
        return self._tokens(revoked)

    def _tokens(self, tokens: Iterable[Token]) -> pb.ListTokensResponse:
        now_ms = self._clock.now_ms()
        shown = [write(pb.Token(), answer_values.token(token, now_ms)) for token in tokens]
        return pb.ListTokensResponse(tokens=shown)

    async def ListAudit(  # noqa: N802
        self, request: pb.ListAuditRequest, context: AnyContext
    ) -> pb.ListEventsResponse:
        """Return the newest rows of the audit history, which shows which caller changed what."""
        limit = wire.history_limit(request.limit)
        rows = await self._replica.driver.history.of(AUDIT, limit)
        return pb.ListEventsResponse(events=[wire.event_row(row) for row in rows])

    async def _doing(self, rdzv_id: str, *, scales: bool = False) -> str:
        """Describe a job before a call changes it: its state or, if `scales` is set, its bounds."""
        state = await self._replica.driver.jobs.look(rdzv_id)
        if not state.membership.run:
            return "unknown"
        return _nnodes(*state.membership.bounds) if scales else job_state(state)

    def _use(self, node_id: str) -> str:
        """Describe whether a node is in service, before a call changes this."""
        return next(map(_use_of, self._replica.driver.node_views.summaries([node_id])), "unknown")

    def _status(self, view: JobStatus) -> pb.JobStatus:
        return write(pb.JobStatus(), self._queries.status_of(view))


def _nnodes(min_nodes: int | None, max_nodes: int | None) -> str:
    return f"{min_nodes}:{max_nodes} nodes"


def _use_of(node: Node) -> str:
    if node.drain:
        return node.drain
    return "cordoned" if node.cordoned else "quarantined" if node.quarantine else "in service"


def _without_agents(rdzv_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{rdzv_id} forms its group with torchrun's own c10d rendezvous, which is only watched "
        "here: its nodes have no agent that takes stacks; run `py-spy dump --pid PID` there"
    )


async def in_chunks(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines joined together and split into chunks of at most `CHUNK_BYTES`."""
    waiting = bytearray()
    async for line in lines:
        waiting += line
        while len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting[:CHUNK_BYTES])
            del waiting[:CHUNK_BYTES]
    if waiting:
        yield bytes(waiting)

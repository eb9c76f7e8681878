"""What operators ask, answered once for gRPC and HTTP: a function for each row of `table`.

Each takes the server and a request, which is the message of the gRPC call; where there is only an
HTTP request, it has the names in the path and the query parameters. Each returns a value of `view`,
or yields several. Errors from `rdzv.errors` become the status of the call.

An *observed* job uses torchrun's own rendezvous, at `--c10d`. A job hides an observed job with the
same name, except in lists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv import bounds
from rdzv.bounds import refusal
from rdzv.core.commands import Restart, Scale, Stop, Submit
from rdzv.core.evidence.stacks import CollectedStacks
from rdzv.core.model import job_state
from rdzv.core.words import duration, listed
from rdzv.errors import InvalidRequestError, UnknownJobError, UnknownNodeError
from rdzv.messages import LogsWanted
from rdzv.runtime.clock import Clock
from rdzv.server.operations.job_operations import summary_of
from rdzv.server.operations.node_operations import known_nodes, shown_nodes
from rdzv.server.security import callers
from rdzv.server.security.roles import AUDIT, Gate, note_change, signed
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.stores.base import HISTORY_ROWS, Record
from rdzv.structs import replace, struct
from rdzv.transport.wire import convert, read
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import answers, reports, restart_picture
from rdzv.view.ledger import Ledger, chosen, ledgers_of, run_numbers

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade
    from rdzv.server.driver import Driver
    from rdzv.server.replication.replica import Replica
    from rdzv.server.security.tls import Tls

SLICE = 50
"""The number of jobs or nodes to convert before other tasks run, which takes a few milliseconds."""
HISTORY_DEFAULT = 200
TOKEN_LIFE_MOST_MS = 3_650 * bounds.DAY_MS
"""Ten years. A token needed for longer should not expire at all."""
CHUNK_BYTES = 256 * 1024
"""The maximum size of one message in a backup, far below gRPC's message limit."""


class Server:
    """One server as its ports show it: its jobs and nodes, observed jobs included."""

    def __init__(
        self,
        replica: Replica,
        clock: Clock,
        config: RdzvdSettings,
        facade: Facade | None = None,
        tls: Tls | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.replica, self.clock, self.config = replica, clock, config
        self.facade, self.tls = facade, tls
        self.gate = gate or Gate(replica, clock, config)

    @property
    def driver(self) -> Driver:
        """The driver; raises `NotLeaderError` unless this server leads."""
        return self.replica.driver

    async def status(self, asked: str) -> answers.JobStatus:
        try:
            return await self.driver.operations.status(bounds.rdzv_id_of(asked))
        except (UnknownJobError, InvalidRequestError):
            # Even a name that no job can have may be valid in torchrun's own rendezvous.
            if (watched := self.watched(asked)) is None:
                raise
            return watched

    async def summary(self, rdzv_id: str) -> answers.JobSummary:
        operations = self.driver.operations
        return operations.summary(await operations.state(rdzv_id))

    async def summaries(self) -> AsyncGenerator[answers.JobSummary, None]:
        """Yield each job's line for lists, observed jobs last; other tasks run in between."""
        operations, number = self.driver.operations, 0
        async with aclosing(self.driver.jobs.each()) as states:
            async for state in states:
                # A job that was forgotten in the meantime is left out.
                if state.membership.run:
                    yield operations.summary(state)
                number += 1
                if number % SLICE == 0:
                    await asyncio.sleep(0)
        for watched in self.all_watched():
            yield watched

    async def history(self, asked: str, limit: int) -> tuple[Record, ...]:
        try:
            return await self.driver.operations.history(bounds.rdzv_id_of(asked), limit)
        except (UnknownJobError, InvalidRequestError):
            if self.watched(asked) is None:
                raise
            return ()

    def watched(self, asked: str) -> answers.JobStatus | None:
        return self.facade.view(asked) if self.facade is not None else None

    def all_watched(self) -> list[answers.JobSummary]:
        return list(map(summary_of, self.facade.views())) if self.facade is not None else []

    async def check_known(self, asked: str) -> None:
        """Raise the errors that `status` raises, without computing the status."""
        await self.history(asked, 1)

    def nodes(self, node_ids: Iterable[str] = ()) -> answers.NodeList:
        """Return what is shown of all nodes, or of those of `node_ids` that are known."""
        known, asked = known_nodes(self.driver), {*node_ids}
        found = shown_nodes(self.driver, sorted(known & asked if asked else known))
        if len(asked) == 1:
            short = self.driver.placer.short_without
            words = (short(node.node_id) or "every job goes on" for node in found)
            found = [replace(n, without_it=w) for n, w in zip(found, words, strict=True)]
        return answers.NodeList(tuple(found), self.driver.trouble or None)


# ------------------------------------------------------------------------------------ jobs, shown


async def get_status(server: Server, request: pb.GetStatusRequest) -> answers.JobStatus:
    return await server.status(request.rdzv_id)


def watch_job(server: Server, request: pb.GetStatusRequest) -> AsyncIterator[answers.JobStatus]:
    return server.driver.operations.watch(bounds.rdzv_id_of(request.rdzv_id))


async def list_jobs(server: Server, request: pb.ListJobsRequest) -> answers.JobList:
    async with aclosing(server.summaries()) as found:
        jobs = sorted([job async for job in found], key=lambda job: job.rdzv_id)
    return answers.JobList(tuple(jobs), server.driver.trouble or None)


async def list_events(server: Server, request: pb.ListEventsRequest) -> answers.EventList:
    rows = await server.history(request.rdzv_id, _history_limit(request))
    return answers.EventList(request.rdzv_id, tuple(map(answers.event_in, rows)))


@struct(frozen=True)
class LedgerOfRun:
    """The ledger of one of a job's runs, and the numbers of all runs that have one."""

    rdzv_id: str
    run_numbers: tuple[int, ...]
    ledger: Ledger


async def get_ledger(server: Server, request: Any) -> LedgerOfRun:
    status = await server.status(request.rdzv_id)
    rows = await server.history(request.rdzv_id, HISTORY_ROWS)
    # A history may have ten thousand rows, and nodes must not wait for their conversion.
    past, now_ms = map(answers.event_in, rows), server.clock.now_ms()
    runs = await asyncio.to_thread(ledgers_of, past, now_ms, status.state)
    found = chosen(status.rdzv_id, runs, request.run)
    return LedgerOfRun(request.rdzv_id, tuple(run_numbers(runs)), found)


async def get_restarts(server: Server, request: Any) -> str:
    """Return a picture of the last restarts of a job's latest run, as an SVG."""
    status = await server.status(request.rdzv_id)
    rows = await server.history(request.rdzv_id, HISTORY_ROWS)
    past, now_ms = map(answers.event_in, rows), server.clock.now_ms()
    return await asyncio.to_thread(restart_picture.of_run, past, status.run or "", status, now_ms)


async def get_report(server: Server, request: Any) -> reports.Report:
    """Return a summary of how all jobs have spent the last `hours`.

    Histories are read one at a time; jobs that are forgotten in the meantime are left out.
    """
    since_ms, now_ms = request.hours * 3_600_000, server.clock.now_ms()
    from_ms, spent = now_ms - since_ms, list[reports.JobShare | None]()
    for job in (await list_jobs(server, request)).jobs:
        if reports.ended_before(job, since_ms):
            continue
        with contextlib.suppress(UnknownJobError):
            rows = await server.history(job.rdzv_id, HISTORY_ROWS)
            past = map(answers.event_in, rows)
            spent.append(await asyncio.to_thread(reports.spent, job, past, from_ms, now_ms))
    return reports.report(spent, from_ms, now_ms)


# ------------------------------------------------------------------------------------ workers


async def read_logs(
    server: Server, request: pb.ReadLogsRequest
) -> AsyncGenerator[answers.LogLines, None]:
    """Send workers' output as fast as the caller reads it; if neither stream is named, both."""
    both = not request.stdout and not request.stderr
    given = {"stdout": request.stdout or both, "stderr": request.stderr or both}
    try:
        rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
        wanted = read(LogsWanted, request, checked=True, **given)
        async with aclosing(server.driver.operations.read_logs(rdzv_id, wanted)) as found:
            async for lines in found:
                yield lines
    except (UnknownJobError, InvalidRequestError) as error:
        remedy = "its nodes have no agent that sends logs; read them on the nodes, in --log-dir"
        raise _why_not(server, request.rdzv_id, error, remedy) from error


async def take_stacks(server: Server, request: pb.TakeStacksRequest) -> answers.StackReport:
    """Return the stacks of a round's workers, captured now or kept from when the round hung."""
    run = request.run and bounds.uid("run", request.run)
    number = request.round if request.HasField("round") else None
    try:
        rdzv_id, why = bounds.rdzv_id_of(request.rdzv_id), "an operator asked for them"
        report = await server.driver.operations.stacks(rdzv_id, run, number, why=why)
    except (UnknownJobError, InvalidRequestError) as error:
        remedy = "its nodes have no agent that takes stacks; run `py-spy dump --pid PID` there"
        raise _why_not(server, request.rdzv_id, error, remedy) from error
    return await _shown(report, server.clock)


async def read_stacks(server: Server, request: Any) -> answers.StackReport:
    rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
    report = await server.driver.operations.stacks(rdzv_id, number=request.round, why="")
    return await _shown(report, server.clock)


async def _shown(report: CollectedStacks, clock: Clock) -> answers.StackReport:
    age_ms = max(clock.now_ms() - report.at_ms, 0)
    # The report may be as large as a megabyte, and nodes must not wait for its conversion.
    return await asyncio.to_thread(convert, answers.StackReport, report, age_ms=age_ms)


def _why_not(
    server: Server, asked: str, error: UnknownJobError | InvalidRequestError, remedy: str
) -> UnknownJobError | InvalidRequestError:
    """Return `error` or, if the job is only observed, an error that explains this."""
    if server.watched(asked) is None:
        return error
    return InvalidRequestError(
        f"{asked} forms its group with torchrun's own c10d rendezvous, which is only watched "
        f"here: {remedy}"
    )


# ------------------------------------------------------------------------------------ jobs, changed


async def submit_job(server: Server, request: pb.SubmitJobRequest) -> answers.JobStatus:
    rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
    submit = submit_of(request)
    before = await _doing(server, rdzv_id)
    caller = callers.present.get()
    status = await server.driver.operations.submit_job(rdzv_id, submit, caller)
    note_change(before, status.state)
    return status


def submit_of(request: pb.SubmitJobRequest) -> Submit:
    submit = read(Submit, request, checked=True)
    bounds.nnodes(submit.settings.min_nodes, submit.settings.max_nodes, "--nnodes: ")
    if submit.settings.max_restarts is None:
        raise refusal("max_restarts", None, "is not set", "give a number of restarts, from 0 on")
    return submit


async def stop_job(server: Server, request: pb.StopJobRequest) -> answers.JobStatus:
    return await _obeyed(server, request.rdzv_id, read(Stop, request, checked=True))


async def restart_job(server: Server, request: pb.RestartJobRequest) -> answers.JobStatus:
    return await _obeyed(server, request.rdzv_id, read(Restart, request, checked=True))


async def scale_job(server: Server, request: pb.ScaleJobRequest) -> answers.JobStatus:
    scale = read(Scale, request, checked=True)
    bounds.nnodes(scale.min_nodes, scale.max_nodes)
    return await _obeyed(server, request.rdzv_id, scale)


async def _obeyed(server: Server, asked: str, command: Stop | Restart | Scale) -> answers.JobStatus:
    rdzv_id, scales = bounds.rdzv_id_of(asked), isinstance(command, Scale)
    command = replace(command, reason=signed(command.reason, callers.present.get()))
    before = await _doing(server, rdzv_id, scales=scales)
    status = await server.driver.operations.obey(rdzv_id, command)
    note_change(before, _nnodes(status.min_nodes, status.max_nodes) if scales else status.state)
    return status


async def forget_job(server: Server, request: pb.ForgetJobRequest) -> None:
    rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
    before = await _doing(server, rdzv_id)
    await server.driver.operations.forget(rdzv_id)
    note_change(before, "forgotten")


async def _doing(server: Server, rdzv_id: str, *, scales: bool = False) -> str:
    """Describe a job before a call changes it: its state or, if `scales` is set, its bounds."""
    state = await server.driver.jobs.look(rdzv_id)
    if not state.membership.run:
        return "unknown"
    return _nnodes(*state.membership.bounds) if scales else job_state(state)


def _nnodes(min_nodes: int | None, max_nodes: int | None) -> str:
    return f"{min_nodes}:{max_nodes} nodes"


# ------------------------------------------------------------------------------------ nodes


async def list_nodes(server: Server, request: pb.ListNodesRequest) -> answers.NodeList:
    return server.nodes(map(bounds.node_id_of, request.node_ids))


async def get_node(server: Server, request: Any) -> answers.Node:
    node_id = bounds.node_id_of(request.node_id)
    for node in server.nodes([node_id]).nodes:
        return node
    raise UnknownNodeError(f"no node {node_id} is known here; `rdzvctl nodes` shows those that are")


@struct(frozen=True)
class NodeEvents:
    """The newest events about a node from all jobs' histories, oldest first."""

    node_id: str
    events: tuple[answers.NodeEvent, ...]


async def list_node_events(server: Server, request: Any) -> NodeEvents:
    node_id = bounds.node_id_of(request.node_id)
    found = list[answers.NodeEvent]()
    for job in (await list_jobs(server, request)).jobs:
        with contextlib.suppress(UnknownJobError):
            rows = await server.history(job.rdzv_id, HISTORY_ROWS)
            found += await asyncio.to_thread(_about, rows, node_id)
    newest = sorted(found, key=lambda event: event.unix_ms)[-request.limit :]
    return NodeEvents(node_id, tuple(newest))


def _about(rows: Iterable[Record], node_id: str) -> list[answers.NodeEvent]:
    found = (answers.node_event_in(row, node_id) for row in rows)
    return [event for event in found if event is not None]


async def cordon_node(server: Server, request: pb.CordonNodeRequest) -> answers.Node:
    reason = signed(bounds.sentence(request.reason), callers.present.get())
    return await _changed(server, request, partial(server.driver.fleet.cordon, reason=reason))


async def uncordon_node(server: Server, request: pb.UncordonNodeRequest) -> answers.Node:
    return await _changed(server, request, server.driver.fleet.uncordon)


async def drain_node(server: Server, request: pb.DrainNodeRequest) -> answers.Node:
    deadline_ms = bounds.within("deadline_ms", request.deadline_ms, 0, bounds.TIMEOUT_MS)
    reason = bounds.sentence(request.reason) or "an operator asked for it"
    reason = signed(reason, callers.present.get())
    given: Any = {"deadline_ms": deadline_ms, "reason": reason, "force": request.force}
    drain = partial(server.driver.fleet.drain, **given)
    return await _changed(server, request, drain, f", within {duration(deadline_ms)}")


async def undrain_node(server: Server, request: pb.UndrainNodeRequest) -> answers.Node:
    undrain = partial(server.driver.fleet.undrain, cordon=request.cordon)
    return await _changed(server, request, undrain)


async def _changed(
    server: Server, request: Any, change: Callable[[str], Awaitable[None]], how: str = ""
) -> answers.Node:
    node_id = bounds.node_id_of(request.node_id)
    before = next(map(_use_of, server.nodes([node_id]).nodes), "unknown")
    await change(node_id)
    (node,) = shown_nodes(server.driver, [node_id])
    note_change(before, f"{_use_of(node)}{how}")
    return node


def _use_of(node: answers.Node) -> str:
    if node.drain:
        return node.drain
    return "cordoned" if node.cordoned else "quarantined" if node.quarantine else "in service"


# ------------------------------------------------------------------------------------ the server


async def list_servers(server: Server, request: pb.ListServersRequest) -> answers.ServerList:
    """Return every rdzvd that shares this server's store. Standby servers also respond."""
    return answers.ServerList(await server.replica.servers())


@struct(frozen=True)
class BackupChunk:
    """A part of a backup."""

    data: bytes


async def backup(server: Server, request: pb.BackupRequest) -> AsyncIterator[BackupChunk]:
    """Send the contents of the store, chunk by chunk, as fast as the caller reads them."""
    driver = server.driver
    async for data in in_chunks(driver.store.backup(driver.leadership)):
        yield BackupChunk(data)


async def in_chunks(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    waiting = bytearray()
    async for line in lines:
        waiting += line
        while len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting[:CHUNK_BYTES])
            del waiting[:CHUNK_BYTES]
    if waiting:
        yield bytes(waiting)


async def create_token(server: Server, request: pb.CreateTokenRequest) -> answers.NewToken:
    """Create a token. No later answer contains its text."""
    name, roles = callers.name_of(request.name), callers.roles_of(request.roles)
    expires_in_ms = bounds.within("expires_in_ms", request.expires_in_ms, 0, TOKEN_LIFE_MOST_MS)
    token, text = await server.driver.tokens.create(name, roles, expires_in_ms)
    note_change("nothing", f"token {token.id} with {' and '.join(roles)}")
    return answers.NewToken(token.shown(server.clock.now_ms()), text)


async def list_tokens(server: Server, request: pb.ListTokensRequest) -> answers.TokenList:
    now_ms = server.clock.now_ms()
    return answers.TokenList(tuple(token.shown(now_ms) for token in server.driver.tokens.listed()))


async def revoke_tokens(server: Server, request: pb.RevokeTokensRequest) -> answers.TokenList:
    revoked, now_ms = await server.driver.tokens.revoke(request.id_or_name), server.clock.now_ms()
    note_change(listed(f"token {token.id}" for token in revoked), "revoked")
    return answers.TokenList(tuple(token.shown(now_ms) for token in revoked))


async def list_audit(server: Server, request: pb.ListAuditRequest) -> answers.EventList:
    rows = await server.driver.history.of(AUDIT, _history_limit(request))
    return answers.EventList(AUDIT, tuple(map(answers.event_in, rows)))


def _history_limit(request: pb.ListEventsRequest | pb.ListAuditRequest) -> int:
    return bounds.within("limit", request.limit or HISTORY_DEFAULT, 1, HISTORY_ROWS)

"""The node's stream, against a server that does what each story tells it to.

Nothing here asserts how long something takes: a story waits for the expected message.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import pytest
from tcp_proxy import proxy_to

from rdzv.agent.core import events
from rdzv.agent.launch.launch import NO_FILES
from rdzv.agent.output.run_files import RoundOutput, WorkerOutput, Written
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.server_link import link as server_link
from rdzv.agent.server_link import outbox
from rdzv.agent.server_link.link import NodeIdentity, ServerLink
from rdzv.agent.server_link.outbox import FenceProofs
from rdzv.client import Endpoint, parse_endpoint
from rdzv.core.fleet.node_resources import FailingCheck, NodeResources
from rdzv.core.fleet.nodes import AgentKind, LeaseRules
from rdzv.core.model import Assignment, Ended, JobSpec, Result
from rdzv.errors import (
    ERROR_CODE_METADATA_KEY,
    ERRORS,
    LEADER_METADATA_KEY,
    RendezvousConnectionError,
)
from rdzv.messages import Closed, Holding, Joined, Placed, Refused, TakeStacks, Withdrawn
from rdzv.runtime.tasks import beside
from rdzv.server.rpc.rendezvous_service import HELLO_TIMEOUT_S
from rdzv.structs import replace
from rdzv.transport.node_stream import FINAL_REFUSALS, Backoff
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc
from tests.support.agent_jobs import PATIENCE_S, until

pytestmark = pytest.mark.slow

IDENTITY = NodeIdentity("n1", "instance-1", AgentKind.FOREGROUND, "127.0.0.1", 4711, "1.2.3")
NOBODY = Endpoint("127.0.0.1", 9)
"""A port that no server listens on."""

HASTY = Backoff(first_s=0.001, max_s=0.01, steady_s=0.0)
"""A link retries at once, unless a story says otherwise."""


E = TypeVar("E", bound=events.Event)


class Talk:
    """One stream, as the server sees it."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._heard: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue()
        self._end: asyncio.Future[tuple[grpc.StatusCode, str, str, str] | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._began = asyncio.Event()
        self.over = asyncio.Event()

    async def serve(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            end = await self._end
            # Otherwise gRPC reports an INTERNAL error to a node that is still sending its hello.
            await self._began.wait()
        finally:
            self.over.set()
            reader.cancel()
        if end is not None:
            status, code, text, leader = end
            trailing = ((ERROR_CODE_METADATA_KEY, code),) if code else ()
            trailing += ((LEADER_METADATA_KEY, leader),) if leader else ()
            await self._context.abort(status, text, trailing_metadata=trailing)

    async def _read(self) -> None:
        while isinstance(message := await self._context.read(), pb.NodeMessage):
            self._heard.put_nowait(message)
            self._began.set()
        self._heard.put_nowait(None)

    async def hear(self) -> pb.NodeMessage | None:
        """Return the next message; None if the node has ended the stream."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._heard.get()

    async def hear_all(self) -> list[str]:
        """Return all messages until the node ended the stream, except heartbeats."""
        found = []
        while (message := await self.hear()) is not None:
            if not message.HasField("heartbeat"):
                found.append(said(message))
        return found

    async def hello(self) -> pb.Hello:
        message = await self.hear()
        assert message is not None
        assert message.WhichOneof("body") == "hello"
        return message.hello

    async def say(self, leadership: int = 1, **body: object) -> None:
        await self._context.write(pb.ServerMessage(leadership=leadership, **body))  # type: ignore[arg-type]

    async def of_kind(self, kind: str) -> Any:
        """Skip messages until this kind, and return what it says."""
        while (message := await self.hear()) is not None:
            if message.WhichOneof("body") == kind:
                return getattr(message, kind)
        raise AssertionError("the node has ended the stream")

    async def heartbeat(self) -> int:
        """Skip messages until the next heartbeat; return its number."""
        number: int = (await self.of_kind("heartbeat")).number
        return number

    async def welcome(
        self,
        leadership: int = 1,
        incarnation: int = 7,
        interval_ms: int = 0,
        lease_ms: int = 3_600_000,
    ) -> None:
        welcome = pb.Welcome(
            incarnation=incarnation,
            heartbeat_interval_ms=interval_ms or 60_000,
            lease_ms=lease_ms,
        )
        await self.say(leadership, welcome=welcome)

    def end(
        self,
        status: grpc.StatusCode = grpc.StatusCode.OK,
        code: str = "",
        text: str = "",
        leader: str = "",
    ) -> None:
        self._end.set_result(None if status is grpc.StatusCode.OK else (status, code, text, leader))


def said(message: pb.NodeMessage) -> str:
    """Name a message by the fields that matter here."""
    body = message.WhichOneof("body")
    return f"{body} {message.succeeded.round}" if body == "succeeded" else str(body)


class Server(rdzv_pb2_grpc.RendezvousServicer):
    """Passes every stream to the story."""

    def __init__(self) -> None:
        self.talks: asyncio.Queue[Talk] = asyncio.Queue()
        self.server = grpc.aio.server()
        rdzv_pb2_grpc.add_RendezvousServicer_to_server(self, self.server)
        self.endpoint = Endpoint("127.0.0.1", self.server.add_insecure_port("127.0.0.1:0"))

    async def Attach(  # noqa: N802
        self, request_iterator: object, context: grpc.aio.ServicerContext
    ) -> None:
        talk = Talk(context)
        self.talks.put_nowait(talk)
        await talk.serve()

    async def talk(self) -> Talk:
        """Return the next stream that was opened."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.talks.get()

    async def greet(self, *jobs: "Job", **welcome: int) -> tuple[Talk, pb.Hello]:
        """Welcome the next stream, and wait until these jobs have heard of it."""
        talk = await self.talk()
        hello = await talk.hello()
        await talk.welcome(**welcome)
        for job in jobs:
            await job.hear(events.ServerConnected)
        return talk, hello


async def serve() -> AsyncIterator[Server]:
    served = Server()
    await served.server.start()
    yield served
    await served.server.stop(None)


server = pytest.fixture(serve)
standby = pytest.fixture(serve)


class Job:
    """Records its driver's events, and reports the story's belief."""

    def __init__(self, rdzv_id: str = "job-7", fence_after_ms: int = 0) -> None:
        self.rdzv_id = rdzv_id
        self.fence_after_ms = fence_after_ms
        self.renewals: asyncio.Queue[int] = asyncio.Queue()
        self.run: str | None = ""
        self.notes: list[str] = []
        self.asked: asyncio.Queue[TakeStacks] = asyncio.Queue()
        self.everything: list[events.Event] = []
        self._heard: asyncio.Queue[events.Event] = asyncio.Queue()

    def belief(self) -> pb.Belief | None:
        if self.run is None:
            return None
        return pb.Belief(join=pb.Join(rdzv_id=self.rdzv_id, run=self.run))

    def post(self, event: events.Event) -> None:
        self.everything.append(event)
        self._heard.put_nowait(event)

    def waits_ms(self) -> int | None:
        return 90_000

    def note(self, reason: str) -> None:
        self.notes.append(reason)

    def take_stacks(self, asked: TakeStacks) -> None:
        self.asked.put_nowait(asked)

    def renew_fence(self, heard_at_ms: int) -> None:
        self.renewals.put_nowait(heard_at_ms)

    async def renewed(self) -> int:
        """Return when the server was next proven to have received something from this node."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.renewals.get()

    async def hear(self, kind: type[E]) -> E:
        """Return the next event of a kind, skipping others."""
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(event := await self._heard.get(), kind):
                pass
        return event

    async def lost(self, why: str) -> None:
        while why not in (await self.hear(events.ServerLost)).reason:
            pass

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.everything if isinstance(event, kind)]


@pytest.fixture
def job() -> Job:
    return Job()


def link_to(
    *endpoints: Endpoint, jobs: tuple[Job, ...] = (), backoff: Backoff = HASTY
) -> ServerLink:
    link = ServerLink(endpoints, IDENTITY, backoff)
    for job in jobs:
        link.add(job)
    return link


@contextlib.asynccontextmanager
async def running(link: ServerLink) -> AsyncIterator["asyncio.Task[None]"]:
    """Run a link, and check that it leaves nothing behind."""
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(PATIENCE_S):
                await task


@contextlib.asynccontextmanager
async def connected(
    server: Server, *jobs: Job, **welcome: int
) -> AsyncIterator[tuple[ServerLink, Talk]]:
    """Run a link for jobs that know that it is connected."""
    link = link_to(server.endpoint, jobs=jobs)
    async with running(link):
        talk, _ = await server.greet(*jobs, **welcome)
        yield link, talk


def deadlines_of_link(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """Return the deadlines that links set from now on, for the story to let them pass."""
    made: list[asyncio.Timeout] = []

    def timeout(delay_s: float | None) -> asyncio.Timeout:
        made.append(asyncio.timeout(delay_s))
        return made[-1]

    changed = SimpleNamespace(**{**vars(asyncio), "timeout": timeout})
    monkeypatch.setattr(server_link, "asyncio", changed)
    monkeypatch.setattr(server_link, "WELCOME_TIMEOUT_S", 60.0)
    return made


def success(round_: int) -> pb.NodeMessage:
    return pb.NodeMessage(succeeded=pb.Succeeded(rdzv_id="job-7", run="r1", round=round_))


# ------------------------------------------------------------------ servers that stand by


async def test_a_node_goes_to_a_standby_it_is_told(
    server: Server, standby: Server, job: Job
) -> None:
    async with connected(server, job, lease_ms=1) as (link, talk):
        await talk.say(servers=pb.Servers(addresses=[str(standby.endpoint)]))
        await until(lambda: link.next_server.connected)
        # Only a connection: that server has no call.
        assert standby.talks.empty()
        talk.end(grpc.StatusCode.UNAVAILABLE)
        await standby.greet(leadership=2)
        assert not link.next_server.connected


async def test_a_standby_that_points_wrong_does_no_harm(server: Server, standby: Server) -> None:
    """It tells late, or wrong: the node asks the others, and comes to the one that leads."""
    gone, itself = "127.0.0.1:1", str(standby.endpoint)

    async def misled() -> None:
        for named in itertools.cycle((gone, itself, "no address:x", "")):
            talk = await standby.talk()
            talk.end(grpc.StatusCode.FAILED_PRECONDITION, "NotLeaderError", leader=named)

    async with running(link_to(server.endpoint, jobs=(Job(),))), beside(misled()):
        talk, _ = await server.greet(lease_ms=1)
        await talk.say(servers=pb.Servers(addresses=[itself, gone, "no address:x"]))
        talk.end(grpc.StatusCode.UNAVAILABLE)
        await server.greet(leadership=2)


# ------------------------------------------------------------------ what the server asks for


async def test_stacks_are_asked_of_the_right_job_and_refused_for_others(server: Server) -> None:
    job, other = Job(), Job("job-8")
    async with connected(server, job, other) as (_, talk):
        wanted = pb.TakeStacks(request=5, rdzv_id="job-7", run="r1", round=2, timeout_ms=900)
        await talk.say(take_stacks=wanted)
        async with asyncio.timeout(PATIENCE_S):
            assert await job.asked.get() == TakeStacks(5, "job-7", "r1", 2, 900)
        await talk.say(take_stacks=pb.TakeStacks(request=6, rdzv_id="job-9"))
        stacks = await talk.of_kind("stacks")
        assert (stacks.request, stacks.last) == (6, True)
        assert stacks.error == "it no longer takes part in this job"
        assert other.asked.empty()


# ------------------------------------------------------------------ the hello


async def test_the_hello_comes_first_and_says_who_speaks_and_believes(server: Server) -> None:
    job, ended = Job(), Job("job-8")
    ended.run = None
    link = link_to(server.endpoint, jobs=(job, ended))
    link.say(success(0))  # Nobody receives it; the hello includes it.
    async with running(link):
        talk = await server.talk()
        hello = await talk.hello()
        assert (hello.node_id, hello.instance) == ("n1", "instance-1")
        assert hello.kind == pb.AGENT_KIND_FOREGROUND
        assert (hello.pid, hello.agent_version, hello.protocol_version) == (4711, "1.2.3", 1)
        assert (hello.leadership, hello.incarnation) == (0, 0)
        assert [belief.join.rdzv_id for belief in hello.beliefs] == ["job-7"]
        assert job.everything == []
        await talk.welcome()
        assert await job.hear(events.ServerConnected)
        link.say(success(1))
        link.close()
        assert await talk.hear_all() == ["succeeded 1"]


async def test_the_next_hello_says_what_is_believed_then(server: Server, job: Job) -> None:
    async with connected(server, job, leadership=3, incarnation=9) as (link, talk):
        talk.end()
        await job.hear(events.ServerLost)
        job.run = "r1"
        link.say(success(5))
        again, hello = await server.greet(leadership=3)
        assert hello.beliefs[0].join.run == "r1"
        assert (hello.leadership, hello.incarnation) == (3, 9)
        await job.hear(events.ServerConnected)
        link.say(success(6))
        link.close()
        assert await again.hear_all() == ["succeeded 6"]


async def test_the_address_is_that_of_the_connection_that_carries_the_hello(
    server: Server, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    """It was chosen once, before the network was there, and stayed wrong."""
    unknown = RendezvousConnectionError("cannot tell this node's address: no such host name")
    answers: list[str | Exception] = ["127.0.0.1", unknown, "10.0.0.2"]

    async def local_address(endpoint: Endpoint) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def own_name(address: str) -> str:
        return "box1" if address == "127.0.0.1" else ""

    monkeypatch.setattr(server_link, "local_address", local_address)
    monkeypatch.setattr(server_link, "reachable_host_name", own_name)
    link = ServerLink([server.endpoint], replace(IDENTITY, address=""), HASTY)
    link.add(job)
    async with running(link):
        talk, hello = await server.greet()
        assert (hello.address, link.address, link.host_name) == ("127.0.0.1", "127.0.0.1", "box1")
        talk.end()
        await job.lost(str(unknown))
        silent = await server.talk()
        _, hello = await server.greet()
        assert (hello.address, link.address, link.host_name) == ("10.0.0.2", "10.0.0.2", "")
        assert silent is not talk


async def test_a_link_that_is_closed_while_it_opens_says_hello_and_ends(server: Server) -> None:
    link = link_to(server.endpoint, jobs=(Job(),))
    talks = link.outbox.let_through

    def close_first(hello: pb.Hello) -> None:
        link.close()
        talks(hello)

    link.outbox.let_through = close_first  # type: ignore[method-assign]
    async with running(link):
        talk = await server.talk()
        await talk.hello()
        assert await talk.hear_all() == []


async def test_all_that_is_said_follows_the_hello_and_is_sent_before_the_end(
    server: Server,
) -> None:
    link = link_to(server.endpoint, jobs=(Job(),))
    async with running(link) as task:
        talk = await server.talk()
        await talk.hello()
        for round_ in range(500):
            link.say(success(round_))
        await talk.welcome()
        link.close()
        assert await talk.hear_all() == [f"succeeded {round_}" for round_ in range(500)]
        talk.end()
        async with asyncio.timeout(PATIENCE_S):
            await task


# ------------------------------------------------------------------ heartbeats


async def test_heartbeats_come_at_an_interval(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first one, whose wait began before the interval was known."""
    monkeypatch.setattr(server_link, "WELCOME_TIMEOUT_S", 3_600.0)
    async with connected(server, Job(), interval_ms=100) as (_, talk):
        for _ in range(3):
            message = await talk.hear()
            assert message is not None
            assert message.HasField("heartbeat")


async def test_a_lease_that_has_changed_changes_the_interval(
    server: Server, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    """Also for a stream that is already open and gets no Welcome."""
    monkeypatch.setattr(server_link, "WELCOME_TIMEOUT_S", 3_600.0)
    async with connected(server, job, interval_ms=100) as (link, talk):
        await talk.say(1, lease=pb.Lease(lease_ms=3_600_000, heartbeat_interval_ms=200))
        await job.hear(events.Ticked)
        while link.outbox.heartbeat_interval_s != 0.2:
            await talk.heartbeat()


# ------------------------------------------------------------------ the fence

FENCED_MS = 600_000
"""A fence time that no story reaches."""


async def test_without_a_fence_no_answer_is_asked_for(server: Server) -> None:
    async with running(link_to(server.endpoint, jobs=(Job(),))):
        talk, hello = await server.greet(interval_ms=100)
        assert hello.fence_after_ms == 0
        assert [await talk.heartbeat() for _ in range(2)] == [0, 0]


def test_without_a_fence_no_silence_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are also asked for to learn the server's clock."""
    monkeypatch.setattr(outbox, "boottime_ms", itertools.count(0, 60_000).__next__)
    proofs = FenceProofs({"job-7": Job()})
    asking = pb.NodeMessage(heartbeat=pb.Heartbeat(number=1))
    assert [proofs.note_sent(asking) for _ in range(3)] == [False] * 3


async def test_the_hello_names_the_latest_fence_and_the_earliest_sets_the_pace(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "WELCOME_TIMEOUT_S", 3_600.0)
    jobs = (Job("job-1", FENCED_MS), Job("job-2", 3_000), Job("job-3"))
    async with running(link_to(server.endpoint, jobs=jobs)):
        talk, hello = await server.greet()
        assert hello.fence_after_ms == FENCED_MS
        for expected in (1, 2):  # The second comes after a third of three seconds, not of an hour.
            assert await talk.heartbeat() == expected
            await talk.say(heard=pb.Heard(number=expected))


async def test_a_welcome_proves_that_the_hello_was_heard(server: Server) -> None:
    job = Job(fence_after_ms=FENCED_MS)
    before_ms = boottime_ms()
    async with running(link_to(server.endpoint, jobs=(job,))):
        talk = await server.talk()
        await talk.hello()
        sent_by_ms = boottime_ms()
        await asyncio.sleep(0.05)
        assert job.renewals.empty()
        await talk.welcome()
        assert before_ms <= await job.renewed() <= sent_by_ms


async def test_the_time_that_a_connection_takes_is_none_of_the_fences(server: Server) -> None:
    """A server that is slow to accept leaves a new node as much time as any other."""
    job = Job(fence_after_ms=FENCED_MS)
    with proxy_to(server.endpoint.host, server.endpoint.port) as way:
        way.black_hole()
        async with running(link_to(parse_endpoint(way.endpoint), jobs=(job,))):
            await until(lambda: way.connections)
            connected_ms = boottime_ms()
            way.restore()
            await server.greet()
            assert await job.renewed() >= connected_ms


async def test_an_answer_proves_that_its_heartbeat_was_heard_when_it_was_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a real clock, two heartbeats that a busy machine sends at once may have the same time.
    reads = itertools.count(1)
    monkeypatch.setattr(outbox, "boottime_ms", lambda: next(reads))
    job = Job(fence_after_ms=FENCED_MS)
    async with connected(server, job, interval_ms=100) as (_, talk):
        assert await job.renewed() == 1
        first, last = await talk.heartbeat(), await talk.heartbeat()
        await talk.say(heard=pb.Heard(number=first))
        assert await job.renewed() == 2
        await talk.say(heard=pb.Heard(number=first))  # Repeated, so it is no news.
        await talk.say(heard=pb.Heard(number=last))
        assert await job.renewed() == 4  # The clock is read twice for each.


async def test_the_servers_clock_is_known_from_an_answer_that_was_asked_for(server: Server) -> None:
    job = Job("job-1")
    async with connected(server, job) as (link, talk):
        link.ask_clock()
        while not (number := await talk.heartbeat()):
            pass
        assert link.server_clock.read(time.monotonic_ns()) is None
        before_us = time.monotonic_ns() // 1_000
        await talk.say(heard=pb.Heard(number=number, clock_us=before_us + 7_000_000))
        await talk.say(joined=pb.Joined(rdzv_id="job-1", run="r1"))
        await job.hear(Joined)  # It comes after the answer.
        known = link.server_clock.read(time.monotonic_ns())
        assert known is not None
        assert abs(known.offset_us - 7_000_000) <= known.error_us


async def test_nothing_else_proves_that_the_node_is_heard(server: Server) -> None:
    """A message that the server sends unasked may have been on its way for long."""
    job = Job(fence_after_ms=FENCED_MS)
    async with connected(server, job, leadership=5) as (_, talk):
        await job.renewed()
        number = await talk.heartbeat()
        await talk.say(leadership=5, heard=pb.Heard(number=number + 1))
        await talk.say(leadership=5, heard=pb.Heard(number=0))
        await talk.say(leadership=5, joined=pb.Joined(rdzv_id="job-7", run="r1"))
        await job.hear(Joined)
        await talk.say(leadership=4, heard=pb.Heard(number=number))
        await job.hear(events.ServerLost)
        assert job.renewals.empty()


async def test_heartbeats_go_out_whatever_else_is_said(server: Server) -> None:
    job = Job(fence_after_ms=FENCED_MS)
    async with connected(server, job, interval_ms=100) as (link, talk):
        await talk.heartbeat()

        async def chat() -> None:
            while True:
                link.say(success(0))
                await asyncio.sleep(0.02)

        chatting = asyncio.create_task(chat())
        assert [await talk.heartbeat() for _ in range(2)] == [2, 3]
        chatting.cancel()


async def test_a_server_that_answers_no_more_is_tried_anew(server: Server) -> None:
    """Long before a ping would notice, to leave a chance before the fence."""
    job = Job(fence_after_ms=1_500)
    async with connected(server, job) as (_, talk):
        await job.renewed()
        await talk.heartbeat()
        again, _ = await server.greet()
        await again.heartbeat()


async def test_a_fence_too_close_to_the_lease_is_refused_for_its_job(server: Server) -> None:
    late, other = Job("job-1", 4_001), Job("job-2", 4_000)
    async with running(link_to(server.endpoint, jobs=(late, other))):
        await server.greet(lease_ms=5_000)
        refused = await late.hear(Refused)
        assert refused.code == "InvalidRequestError"
        assert "--fence-after=4.001 is too long" in refused.message
        await other.hear(events.ServerConnected)
        assert other.everything == [events.ServerConnected()]


# ------------------------------------------------------------------ what the server says


async def test_each_job_hears_what_is_about_it(server: Server) -> None:
    first, second = Job("job-1"), Job("job-2")
    async with connected(server, first, second) as (_, talk):
        await talk.say(joined=pb.Joined(rdzv_id="job-3", run="r3"))
        await talk.say(joined=pb.Joined(rdzv_id="job-1", run="r1", run_number=1))
        await talk.say(waiting=pb.Waiting(rdzv_id="job-2", reason="waiting for 1 more node"))
        await talk.say()
        await talk.say(refused=pb.Refused(rdzv_id="job-2", code="InvalidRequestError", message="m"))
        assert await second.hear(Refused) == Refused("job-2", "InvalidRequestError", "m")
        assert first.everything == [events.ServerConnected(), Joined("job-1", "r1", 1)]
        assert (first.notes, second.notes) == ([], ["waiting for 1 more node"])


async def test_a_deposed_server_changes_nothing(server: Server, job: Job) -> None:
    async with connected(server, job, leadership=5) as (_, talk):
        await talk.say(
            leadership=4, closed=pb.Closed(rdzv_id="job-7", run="r1", result=pb.RESULT_FAILED)
        )
        await job.hear(events.ServerLost)
        older = await server.talk()
        assert (await older.hello()).leadership == 5
        await older.welcome(leadership=4)
        await job.hear(events.ServerLost)
        newer, hello = await server.greet(leadership=6)
        assert hello.leadership == 5
        await job.hear(events.ServerConnected)
        await newer.say(leadership=6, closed=pb.Closed(rdzv_id="job-7", run="r1"))
        closed = await job.hear(Closed)
        assert closed == Closed("job-7", "r1", Ended(Result.FAILED, ""))
    assert (len(job.all(Closed)), len(job.all(events.ServerConnected))) == (1, 2)


# ------------------------------------------------------------------ refusals


STRANGER = "UnauthenticatedError"
"""Final for a node that was never admitted."""


@pytest.mark.parametrize("code", sorted({*FINAL_REFUSALS, STRANGER}))
async def test_a_refused_hello_is_refused_for_every_job(server: Server, code: str) -> None:
    jobs = (Job("job-1"), Job("job-2"))
    async with running(link_to(server.endpoint, jobs=jobs)):
        talk = await server.talk()
        await talk.hello()
        status = grpc.StatusCode[ERRORS[code].grpc_status]
        talk.end(status, code, "node_id n1 is in use")
        for job in jobs:
            assert await job.hear(Refused) == Refused(job.rdzv_id, code, "node_id n1 is in use")


@pytest.mark.parametrize(
    "code", [*sorted(ERRORS.keys() - FINAL_REFUSALS - {STRANGER}), "", "UnheardOfError"]
)
async def test_anything_else_is_tried_again(server: Server, code: str, job: Job) -> None:
    error = ERRORS.get(code)
    status = grpc.StatusCode[error.grpc_status] if error else grpc.StatusCode.UNAVAILABLE
    async with running(link_to(server.endpoint, jobs=(job,))):
        for _ in range(2):
            (await server.talk()).end(status, code, "not now")
        await server.greet(job)
    assert {type(event) for event in job.everything} == {events.ServerLost, events.ServerConnected}


async def test_who_was_let_in_waits_for_a_new_token(server: Server, job: Job) -> None:
    async with connected(server, job) as (_, talk):
        talk.end(grpc.StatusCode.UNAUTHENTICATED, STRANGER, "token 1a2b has expired")
        (await server.talk()).end(grpc.StatusCode.UNAUTHENTICATED, STRANGER, "it has expired")
        await server.greet(job)
    assert {type(event) for event in job.everything} == {events.ServerLost, events.ServerConnected}


async def test_what_is_refused_for_now_is_said_again_later(server: Server, job: Job) -> None:
    async with connected(server, job) as (_, talk):
        await talk.say(
            refused=pb.Refused(rdzv_id="job-7", code="LimitExceededError", message="too many")
        )
        lost = await job.hear(events.ServerLost)
        assert lost == events.ServerLost("the server refused for now: too many")
        await server.greet(job)
    assert Refused not in {type(event) for event in job.everything}


async def test_a_refusal_that_is_repeated_after_each_welcome_is_said_once(
    server: Server, caplog: pytest.LogCaptureFixture, job: Job
) -> None:
    caplog.set_level(logging.INFO, "rdzv.agent")

    backoff = replace(HASTY, steady_s=60)
    async with running(link_to(server.endpoint, jobs=(job,), backoff=backoff)):
        for _ in range(4):
            talk, _ = await server.greet()
            refused = pb.Refused(rdzv_id="job-7", code="UnreachableNodeError", message="twice")
            await talk.say(refused=refused)
            await job.lost("twice")
        talk, _ = await server.greet(job)
        for _ in range(2):
            talk.end()
            talk = await server.talk()
            await talk.hello()
        talk.end()
        await job.lost("ended the stream")
        await server.greet(job)
    first, second, found = (one.message for one in caplog.records if one.name == "rdzv.agent")
    assert first.startswith("the server refused for now: twice; retrying until a server admits")
    assert second.startswith("the server ended the stream; retrying until a server admits")
    assert found == f"connected to the server at {server.endpoint} again"


async def test_a_server_that_welcomes_and_hangs_up_is_given_a_pause(server: Server) -> None:
    pauses = []

    def pause(_: float, longest_s: float) -> float:
        pauses.append(longest_s)
        return 0.0

    backoff = Backoff(first_s=0.1, max_s=1.0, steady_s=3_600.0, spread=pause)
    async with running(link_to(server.endpoint, jobs=(Job(),), backoff=backoff)):
        for _ in range(7):
            talk, _ = await server.greet()
            talk.end()
    assert pauses[:5] == [0.2, 0.4, 0.8, 1.0, 1.0]


async def test_a_stream_that_stood_long_is_reopened_at_once(server: Server, job: Job) -> None:
    def fail(*_: float) -> float:
        raise AssertionError("it waits")

    backoff = Backoff(steady_s=0.0, spread=fail)
    async with running(link_to(server.endpoint, jobs=(job,), backoff=backoff)):
        for _ in range(4):
            talk, _ = await server.greet(job)
            talk.end()


# ------------------------------------------------------------------ servers that are not there


async def test_servers_are_tried_in_turn(server: Server, job: Job) -> None:
    async with running(link_to(NOBODY, NOBODY, server.endpoint, jobs=(job,))):
        await server.greet(job)
    lost = job.all(events.ServerLost)
    assert len(lost) == 2
    assert "127.0.0.1:9" in lost[0].reason


async def test_a_server_that_dies_is_lost_and_found(server: Server, job: Job) -> None:
    async with connected(server, job) as (_, talk):
        await server.server.stop(None)
        await job.hear(events.ServerLost)
        assert talk.over.is_set()
        another = grpc.aio.server()
        rdzv_pb2_grpc.add_RendezvousServicer_to_server(server, another)
        assert another.add_insecure_port(str(server.endpoint)) == server.endpoint.port
        await another.start()
        await server.greet(job)
        await another.stop(None)


async def test_a_server_that_accepts_and_never_answers_is_left_for_another(
    server: Server, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    deadlines = deadlines_of_link(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = Endpoint("127.0.0.1", mute.getsockname()[1])
        async with running(link_to(endpoint, server.endpoint, jobs=(job,))):
            await until(lambda: deadlines)
            deadlines[0].reschedule(asyncio.get_running_loop().time())
            await server.greet(job)
    assert job.everything[0] == events.ServerLost(f"no answer from {endpoint} within 60 s")


async def test_a_large_server_may_answer_later(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    """Nodes that gave up too soon would make a busy server busier. Their lease says how many."""
    monkeypatch.setattr(server_link, "WELCOME_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = Endpoint("127.0.0.1", mute.getsockname()[1])
        link = ServerLink((endpoint,), replace(IDENTITY, lease_ms=5_100), HASTY)
        link.add(job)
        async with running(link):
            await job.hear(events.ServerLost)
            await job.hear(events.ServerLost)
    lost = job.all(events.ServerLost)
    assert lost[:2] == [
        events.ServerLost(f"no answer from {endpoint} within {timeout_s} s")
        for timeout_s in ("0.3", "0.6")
    ]


def test_a_server_waits_for_a_hello_as_long_as_ten_thousand_nodes_wait_for_its_answer() -> None:
    """It closed streams after 10 s whose hello it had not read yet, and their nodes began again."""
    waits_s = server_link.welcome_timeout_s(LeaseRules().longest_ms, unanswered=0)
    assert waits_s <= HELLO_TIMEOUT_S


async def test_the_user_hears_that_a_server_is_silent_before_it_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, job: Job
) -> None:
    """It was a silent prompt for 20 s, and then gRPC's own words."""
    monkeypatch.setattr(server_link, "SILENT_S", 0.0)
    caplog.set_level(logging.INFO, "rdzv.agent")
    async with connected(server, job):
        pass
    # gRPC may log that it lost an earlier test's event loop.
    silent, found = (one.message for one in caplog.records if one.name == "rdzv.agent")
    assert silent.startswith(f"no answer from {server.endpoint} within 0 s: the server may be")
    assert silent.endswith("retrying until a server admits this node, for at most 1 min 30 s")
    assert found == f"connected to the server at {server.endpoint}"
    # And the job, which may give up before this attempt does.
    lost = job.all(events.ServerLost)
    assert lost == [events.ServerLost(f"no answer from {server.endpoint} within 0 s")]


async def test_a_stream_without_a_welcome_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    deadlines = deadlines_of_link(monkeypatch)
    async with running(link_to(server.endpoint, jobs=(job,))):
        silent = await server.talk()
        deadlines[0].reschedule(asyncio.get_running_loop().time())
        await job.hear(events.ServerLost)
        async with asyncio.timeout(PATIENCE_S):
            await silent.over.wait()
        await server.greet(job)


async def test_a_server_that_ends_before_the_welcome_is_retried(server: Server, job: Job) -> None:
    async with running(link_to(server.endpoint, jobs=(job,))):
        talk = await server.talk()
        await talk.hello()
        talk.end()
        assert await job.hear(events.ServerLost) == events.ServerLost("the server ended the stream")
        await server.greet(job)


async def test_the_user_hears_once_that_it_is_lost_and_once_that_it_is_back(
    server: Server, caplog: pytest.LogCaptureFixture, job: Job
) -> None:
    caplog.set_level(logging.INFO, "rdzv.agent")
    async with connected(server, job) as (_, talk):
        assert caplog.messages == []
        talk.end()
        for _ in range(4):
            (await server.talk()).end(grpc.StatusCode.UNAVAILABLE, "", "it is gone")
        await server.greet(job)
    lost, found = caplog.messages
    assert "retrying" in lost
    assert found == f"connected to the server at {server.endpoint} again"


async def test_each_cause_of_a_missing_stream_is_in_the_log_once(
    server: Server, caplog: pytest.LogCaptureFixture, job: Job
) -> None:
    caplog.set_level(logging.INFO, "rdzv.agent")
    async with connected(server, job) as (_, talk):
        talk.end()
        for why in (
            "admitted after 4 s",
            "admitted after 3 s",
            "not heard, after 30 s",
            "after 29 s",
        ):
            (await server.talk()).end(grpc.StatusCode.UNAVAILABLE, "", why)
        (await server.talk()).end(grpc.StatusCode.UNAVAILABLE, "", "not heard, after 28 s")
        await server.greet(job)
    *lost, _ = caplog.messages
    causes = [message.partition(";")[0] for message in lost]
    assert len(causes) == 3
    assert "admitted after 4 s" in causes[0]
    assert "not heard, after 30 s" in causes[1]


# ------------------------------------------------------------------ the end


async def test_a_link_that_is_closed_between_two_attempts_ends(job: Job) -> None:
    link = link_to(NOBODY, jobs=(job,), backoff=Backoff(first_s=3_600.0, max_s=3_600.0))
    async with running(link) as task:
        await job.hear(events.ServerLost)
        await job.hear(events.ServerLost)
        link.close()
        link.close()
        async with asyncio.timeout(PATIENCE_S):
            await task
    await link.run()  # It was closed before.


async def test_a_link_can_be_cancelled_while_a_server_keeps_silent(server: Server) -> None:
    link = link_to(server.endpoint, jobs=(Job(),))
    async with running(link) as task:
        talk = await server.talk()
        await talk.hello()
        link.close()
        assert await talk.hear() is None
        task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(asyncio.CancelledError):
                await task
            await talk.over.wait()


async def test_a_job_that_fails_is_not_swallowed(server: Server) -> None:
    class Broken(Job):
        def post(self, event: events.Event) -> None:
            raise RuntimeError("a bug")

    task = asyncio.create_task(link_to(server.endpoint, jobs=(Broken(),)).run())
    talk, _ = await server.greet()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="a bug"):
            await task
        await talk.over.wait()


async def test_a_stream_that_is_too_slow_is_opened_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    monkeypatch.setattr(outbox, "OUTBOX_MESSAGES", 5)
    async with connected(server, job) as (link, talk):
        for round_ in range(7):
            link.say(success(round_))
        await job.hear(events.ServerLost)
        async with asyncio.timeout(PATIENCE_S):
            await talk.over.wait()
        await server.greet(job)


async def test_a_stream_that_is_too_slow_is_given_up_at_the_end(
    server: Server, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    monkeypatch.setattr(outbox, "OUTBOX_MESSAGES", 5)
    link = link_to(server.endpoint, jobs=(job,))
    async with running(link) as task:
        talk, _ = await server.greet(job)
        heartbeat = await talk.hear()
        assert heartbeat is not None
        for round_ in range(5):
            link.say(success(round_))
        link.close()
        async with asyncio.timeout(PATIENCE_S):
            await task


# ------------------------------------------------------------------ logs


def written(folder: Path, text: str) -> Written:
    """Output of a worker of RANK 4 in round 2, which goes on."""
    path = folder / "stdout.log"
    path.write_text(text)
    found = Written()
    output = WorkerOutput(path, None, error=NO_FILES)
    line = pb.Assignment(rdzv_id="job-7", run="feed", round=2, rank_first=4)
    completed = read(Assignment, line)
    found.begin(completed, RoundOutput((output,), {}))
    return found


async def pieces(talk: Talk, request: int, **wanted: Any) -> AsyncIterator[pb.LogPiece]:
    """Ask for pieces up to the last one, and yield them, skipping all else."""
    asked = pb.ReadLog(request=request, stdout=True, max_bytes=1 << 16, **wanted)
    await talk.say(read_log=asked)
    while (message := await talk.hear()) is not None:
        piece = message.log_piece
        if message.HasField("log_piece") and piece.request == request:
            yield piece
            if piece.last:
                return
            asked = pb.ReadLog(
                round=piece.round,
                positions=piece.positions,
                request=request,
                stdout=True,
                max_bytes=1 << 16,
                wait_ms=60_000,
                **wanted,
            )
            await talk.say(read_log=asked)


async def test_logs_are_sent_on_the_stream_piece_by_piece(server: Server, tmp_path: Path) -> None:
    link = link_to(server.endpoint)
    link.log_reader.serve("job-7", written(tmp_path, "x" * 100_000))
    async with running(link):
        talk, _ = await server.greet()
        size = 0
        async for piece in pieces(talk, 5, rdzv_id="job-7"):
            assert piece.rank == 4 or not piece.data
            size += len(piece.data)
        assert size == 100_000
        (refusal,) = [piece async for piece in pieces(talk, 6, rdzv_id="job-8")]
        assert refusal.error == "this node takes no part in job-8"
        link.log_reader.stop_all()


def waiting(request: int) -> pb.ReadLog:
    """Ask for what is not there yet."""
    at_end = pb.LogPosition(round=2, offset=1)
    return pb.ReadLog(
        request=request,
        rdzv_id="job-7",
        round=2,
        stdout=True,
        follow=True,
        wait_ms=60_000,
        positions=[at_end],
    )


async def test_a_request_ends_with_its_stream_or_cancelled(server: Server, tmp_path: Path) -> None:
    log = written(tmp_path, "x")
    link = link_to(server.endpoint)
    link.log_reader.serve("job-7", log)
    async with running(link):
        talk, _ = await server.greet()
        for number in (5, 6):
            following = pieces(talk, number, rdzv_id="job-7", follow=True)
            assert [(await anext(following)).data for _ in range(2)] == [b"", b"x"]
            await talk.say(read_log=waiting(number))
        await talk.say(stop_log=pb.StopLog(request=5))
        found = [piece.data async for piece in pieces(talk, 7, rdzv_id="job-7")]
        assert found == [b"", b"x", b""]
        assert len(log.listeners) == 1
        talk.end()
        await server.greet()
        assert not log.listeners
        link.log_reader.stop_all()


async def test_heartbeats_go_out_while_logs_are_sent(server: Server, tmp_path: Path) -> None:
    """And they are answered, so that reading a log never leads to a fenced worker."""
    job = Job(fence_after_ms=FENCED_MS)
    link = link_to(server.endpoint, jobs=(job,))
    link.log_reader.serve("job-7", written(tmp_path, ""))
    # A sparse file: it takes no room, and no slow heartbeat could reach its end.
    os.truncate(tmp_path / "stdout.log", 16 << 30)
    async with running(link):
        talk, _ = await server.greet(interval_ms=100)
        await talk.heartbeat()
        wanted = pb.ReadLog(request=5, rdzv_id="job-7", stdout=True, max_bytes=1 << 16)
        await talk.say(read_log=wanted)
        between = 0
        heartbeats = 0
        while heartbeats < 2:
            message = await talk.hear()
            assert message is not None
            assert not message.log_piece.last, "no heartbeat while 16 GiB were sent"
            heartbeats += message.HasField("heartbeat")
            if message.HasField("log_piece"):
                between += 1
                wanted.ClearField("positions")
                wanted.positions.extend(message.log_piece.positions)
                await talk.say(read_log=wanted)
        assert between
        link.log_reader.stop_all()


async def test_heartbeats_go_out_though_something_always_waits_to_be_sent(server: Server) -> None:
    job = Job(fence_after_ms=FENCED_MS)
    async with connected(server, job, interval_ms=100) as (link, talk):
        await talk.heartbeat()

        async def chat() -> None:
            while (waiting := link.outbox.waiting) is not None:
                for _ in range(waiting, 100):
                    link.say(success(0))
                await asyncio.sleep(0)

        chatting = asyncio.create_task(chat())
        try:
            await talk.heartbeat()
        finally:
            chatting.cancel()


# ------------------------------------------------------------------ submitted jobs

PLACED = pb.Placed(rdzv_id="job-7", run="r1", spec=pb.JobSpec(args=["train.py"]))


class Placements:
    """Holds what the story says, and records what it receives."""

    def __init__(self) -> None:
        self.resources = NodeResources(cpus=8, capacity=2)
        self.held: tuple[Holding, ...] = (Holding("job-1", "r0", 1),)
        self.failing: tuple[FailingCheck, ...] = ()
        self.heard: asyncio.Queue[object] = asyncio.Queue()

    def holdings(self) -> tuple[Holding, ...]:
        return self.held

    def placed(self, placed: Placed) -> None:
        self.heard.put_nowait(placed)

    def look_again(self) -> None:
        self.heard.put_nowait("look again")

    def withdrawn(self, withdrawn: Withdrawn) -> None:
        self.heard.put_nowait((withdrawn.rdzv_id, withdrawn.run, withdrawn.reason))

    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        self.heard.put_nowait(event)

    async def hear(self) -> object:
        async with asyncio.timeout(PATIENCE_S):
            return await self.heard.get()


@contextlib.asynccontextmanager
async def taking_jobs(
    server: Server,
) -> AsyncIterator[tuple[ServerLink, Placements, Talk, pb.Hello]]:
    """Run the link of a node that takes submitted jobs."""
    link, placements = link_to(server.endpoint), Placements()
    link.placements = placements
    async with running(link):
        yield link, placements, *await server.greet()


async def test_who_takes_no_submitted_jobs_says_nothing_of_resources(server: Server) -> None:
    async with running(link_to(server.endpoint)):
        talk, hello = await server.greet()
        assert not hello.HasField("resources")
        assert not hello.holdings.holdings
        # A server that is wrong about that changes nothing.
        await talk.say(placed=PLACED)
        await talk.say(heard=pb.Heard(number=1))
        assert await talk.heartbeat() == 0


async def test_the_hello_says_what_a_node_has_and_holds(server: Server) -> None:
    async with taking_jobs(server) as (link, placements, talk, hello):
        assert (hello.resources.cpus, hello.resources.capacity) == (8, 2)
        assert [(held.rdzv_id, held.gpus) for held in hello.holdings.holdings] == [("job-1", 1)]
        placements.held = ()
        link.say_holdings()
        assert not (await talk.of_kind("holdings")).holdings
        link.decline("job-7", "r1", "no such folder")
        declined = await talk.of_kind("declined")
        assert declined == pb.Declined(rdzv_id="job-7", run="r1", reason="no such folder")


async def test_what_is_wrong_with_a_node_is_told_at_once_and_in_each_hello(server: Server) -> None:
    async with taking_jobs(server) as (link, placements, talk, hello):
        assert not hello.health.failing
        placements.failing = (FailingCheck("disk /", "is full"),)
        link.say_health()
        (told,) = (await talk.of_kind("health")).failing
        assert (told.name, told.reason) == ("disk /", "is full")
        link.decline_for_now("job-7", "r1", "it is full")
        declined = await talk.of_kind("declined")
        assert (declined.reason, declined.passing) == ("it is full", True)
        await talk.say(look_again=pb.LookAgain())
        assert await placements.hear() == "look again"
        talk.end()
        again, then = await server.greet()
        assert [check.name for check in then.health.failing] == ["disk /"]
        placements.failing = ()
        link.say_health()
        assert not (await again.of_kind("health")).failing


async def test_placements_and_withdrawals_go_to_who_takes_up_jobs(server: Server) -> None:
    async with taking_jobs(server) as (_, placements, talk, _):
        await talk.say(placed=PLACED)
        assert await placements.hear() == Placed("job-7", "r1", JobSpec(args=("train.py",)))
        await talk.say(withdrawn=pb.Withdrawn(rdzv_id="job-7", run="r1", reason="scaled down"))
        assert await placements.hear() == ("job-7", "r1", "scaled down")


async def test_a_job_that_comes_late_learns_that_there_is_a_server(server: Server) -> None:
    link, job = link_to(server.endpoint), Job()
    async with running(link):
        talk, _ = await server.greet()
        await talk.heartbeat()
        link.add(job)
        assert await job.hear(events.ServerConnected)
        talk.end()
        _, hello = await server.greet()
        assert [belief.join.rdzv_id for belief in hello.beliefs] == ["job-7"]


async def test_a_jobs_new_fence_is_announced(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "RENEWAL_MS", 200)
    link, job = link_to(server.endpoint), Job(fence_after_ms=FENCED_MS)
    async with running(link):
        talk, hello = await server.greet()
        await talk.heartbeat()
        assert hello.fence_after_ms == 0
        link.add(job)
        _, hello = await server.greet()
        assert hello.fence_after_ms == FENCED_MS
        assert await job.renewed()


async def test_a_job_whose_fence_is_too_late_is_refused_as_it_comes(server: Server) -> None:
    link, job = link_to(server.endpoint), Job(fence_after_ms=FENCED_MS)
    async with running(link):
        talk, _ = await server.greet(lease_ms=FENCED_MS)
        await talk.heartbeat()
        link.add(job)
        assert await job.hear(Refused)
        # This node's other jobs are not affected: no new stream, no refused Hello.
        link.say(pb.NodeMessage(declined=pb.Declined(rdzv_id="marker")))
        while (message := await talk.hear()) and message.declined.rdzv_id != "marker":
            assert not message.HasField("away")
        assert message
        assert link.hello().fence_after_ms == 0


async def test_what_was_declined_without_a_stream_is_sent_with_one(server: Server) -> None:
    link = link_to(server.endpoint)
    link.placements = Placements()
    link.decline("job-7", "r1", "no such folder: /data")
    link.say_hello_again()
    link.say_holdings()
    async with running(link):
        talk, hello = await server.greet()
        assert hello.resources.capacity == 2
        declined = await talk.of_kind("declined")
        assert (declined.run, declined.reason) == ("r1", "no such folder: /data")
        await talk.say(withdrawn=pb.Withdrawn(rdzv_id="job-7", run="r1"))
        await talk.say(round_completed=pb.Assignment(rdzv_id="gone", run="r2", round=5))
        leave = await talk.of_kind("leave")
        assert (leave.rdzv_id, leave.run, leave.left_round) == ("gone", "r2", 5)
        talk.end(grpc.StatusCode.UNAVAILABLE)
        talk, _ = await server.greet()
        await talk.say(round_completed=pb.Assignment(rdzv_id="gone", run="r3", round=6))
        while (message := await talk.hear()) is not None and not message.HasField("leave"):
            assert not message.HasField("declined")
        assert message is not None


async def test_a_job_that_has_left_is_not_believed_in_any_more(server: Server) -> None:
    link, job, other = link_to(server.endpoint), Job(), Job("job-8")
    link.add(job)
    link.add(other)
    link.remove(job)
    again = Job()
    link.add(again)
    link.remove(job)
    async with running(link):
        _, hello = await server.greet()
        assert sorted(belief.join.rdzv_id for belief in hello.beliefs) == ["job-7", "job-8"]
        assert await again.hear(events.ServerConnected)
        assert job.everything == []


async def test_a_hello_is_said_again_at_once_and_no_job_takes_it_for_a_loss(
    server: Server, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    monkeypatch.setattr(server_link, "RENEWAL_MS", 200)
    link = link_to(server.endpoint, jobs=(job,))
    link.placements = Placements()
    async with running(link):
        talk, _ = await server.greet(job)
        link.placements.resources = NodeResources(cpus=8, capacity=3)
        link.say_hello_again()
        link.say_hello_again()
        await talk.of_kind("away")  # Otherwise its seats would be lost.
        _, hello = await server.greet()
        assert hello.resources.capacity == 3
        await job.hear(events.ServerConnected)
        async with asyncio.timeout(PATIENCE_S):
            await talk.over.wait()
        assert not job.all(events.ServerLost)


# ------------------------------------------------------------------ a node that is about to leave


async def test_a_drain_goes_to_every_job_and_to_those_that_come_after(server: Server) -> None:
    link, job = link_to(server.endpoint), Job()
    link.placements = placements = Placements()
    link.add(job)
    async with running(link):
        talk, hello = await server.greet()
        assert not hello.HasField("draining")
        await talk.say(drain=pb.DrainNode(left_ms=3_600_000, reason="drained by ada", number=7))
        given = await job.hear(events.NoticeGiven)
        assert given == await placements.hear()
        assert given.reason == "drained by ada"
        later = Job("job-8")
        link.add(later)
        await later.hear(events.NoticeGiven)
        # The next server knows it, and can report that it was lifted meanwhile.
        talk.end()
        talk, hello = await server.greet()
        assert (hello.draining.number, hello.draining.own) == (7, False)
        await talk.say(undrain=pb.UndrainNode())
        await job.hear(events.NoticeLifted)
        assert await placements.hear() == events.NoticeLifted()
        talk.end()
        _, hello = await server.greet()
        assert not hello.HasField("draining")


async def test_the_nodes_own_wish_is_told_and_is_in_every_hello(server: Server) -> None:
    link, job = link_to(server.endpoint), Job()
    link.add(job)
    async with running(link):
        talk, _ = await server.greet()
        link.drain_node(3_600_000, "preempted")
        draining = await talk.of_kind("draining")
        assert (draining.reason, draining.number, draining.own) == ("preempted", 0, True)
        assert 0 < draining.left_ms <= 3_600_000
        await job.hear(events.NoticeGiven)
        # No server can take it back.
        await talk.say(undrain=pb.UndrainNode())
        talk.end()
        _, hello = await server.greet()
        assert (hello.draining.reason, hello.draining.own) == ("preempted", True)

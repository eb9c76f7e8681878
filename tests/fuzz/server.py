"""A whole server in this process, and a bystander whom no input may disturb.

The server is open to everyone, or requires tokens, or has TLS and requests certificates.

It has its gRPC and HTTP ports, keeps its state in memory, and runs in the event loop of a separate
thread. The bystander is a node whose job runs: after each input its heartbeat is heard, its job is
unchanged, and calls on the same server are answered.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc.aio

from rdzv.client import Endpoint
from rdzv.core.fleet.nodes import LeaseRules
from rdzv.ctl.authority import Authority
from rdzv.runtime.clock import Clock
from rdzv.server.diagnosis import reported_hangs, stack_collection, worker_logs
from rdzv.server.driver import Driver
from rdzv.server.http import api
from rdzv.server.http.listener import serving_http
from rdzv.server.operations.handlers import Server
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc import grpc_listener, rendezvous_service
from rdzv.server.rpc.grpc_listener import serving
from rdzv.server.security.roles import Gate
from rdzv.server.security.tls import Tls
from rdzv.server.settings.server_settings import Limits, TlsSettings
from rdzv.server.telemetry.metrics_page import MetricsPage
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.memory import MemoryStore
from rdzv.transport.channels import Credentials, Metadata
from rdzv.transport.endpoints import Listen
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from tests.fuzz.surface import HANG_S, PATIENCE_S, FoundError, Input, Take, alarmed
from tests.support.settings import rdzvd_settings

NODE = "bystander"
JOB = "bystanders-job"
"""No surface generates these names, so no input may affect them."""

LIMITS = Limits(jobs=200)
SHORT = (
    (rendezvous_service, "HELLO_TIMEOUT_S", 0.2),
    (worker_logs, "ANSWER_MS", 100),
    (api, "LOG_ANSWER_MOST_S", 0.2),
    (stack_collection, "ANSWER_MS", 100),
    (reported_hangs, "GATHER_MS", 50),
    (grpc_listener, "STOP_GRACE_MS", 100),
)
"""What the server waits for, while inputs are tried."""


LONG_MS = 600_000
"""The bystander's lease: a busy machine must not take it for lost."""

TASKS_OF_AN_INPUT = 3.0
"""How long the effects of an input may last after it, on a busy machine."""


@dataclass
class Served:
    """The server under test, in its own loop."""

    grpc: int
    http: int
    channel: grpc.aio.Channel
    driver: Driver
    token: str = ""
    """An admin's token, if callers need one."""
    for_tokens: int = 0
    """The TLS port of gRPC that requests no certificate."""


class Guard(StrEnum):
    """How the server authenticates callers."""

    NOTHING = "nothing"
    TOKENS = "tokens"
    CERTIFICATES = "certificates"


Talk = Callable[[Served, Input], Awaitable[None]]


@contextmanager
def talking(talk: Talk, guard: Guard = Guard.NOTHING, folder: Path = Path()) -> Iterator[Take]:
    """Run until the body ends; each input is passed to `talk`, in the loop of the server.

    `folder` is for tokens and certificates.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server under test")
    thread.start()

    def do(work: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, loop)
        return future.result(HANG_S + PATIENCE_S)

    troubles: list[str] = []
    loop.set_exception_handler(lambda _, about: troubles.append(f"{about}"[:2_000]))
    made = _serving(guard, folder)
    with alarmed() as alarm:
        try:
            served, bystander = do(made.__aenter__())
            tasks = _tasks(loop)

            async def one(steps: Input) -> None:
                try:
                    async with asyncio.timeout(HANG_S):
                        await talk(served, steps)
                except TimeoutError:
                    raise FoundError(f"hang: no answer within {HANG_S:g} s") from None
                await bystander.is_served()
                await _ends(lambda: _tasks(loop) <= tasks + 1, "tasks of the input do not end")

            def take(steps: Input) -> None:
                try:
                    do(one(steps))
                except BaseException:
                    alarm.heard.clear()
                    troubles.clear()
                    raise
                alarm.check()
                if troubles:
                    raise FoundError(troubles.pop())

            try:
                yield take
            finally:
                do(made.__aexit__(None, None, None))
                do(_ends(lambda: _tasks(loop) <= 1, "tasks are left of a server that has ended"))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def _tasks(loop: asyncio.AbstractEventLoop) -> int:
    return len(asyncio.all_tasks(loop))


async def _ends(over: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not over():
        if time.monotonic() > until:
            raise FoundError(f"leak: {what}: {[t.get_coro() for t in asyncio.all_tasks()]}")
        await asyncio.sleep(0.001)


@asynccontextmanager
async def _serving(guard: Guard, folder: Path) -> AsyncIterator[tuple[Served, _Bystander]]:
    config = rdzvd_settings(
        store="memory",
        auth="none" if guard is Guard.NOTHING else "required",
        init_admin_token=folder / "token" if guard is Guard.TOKENS else None,
        tls=_made_files(folder) if guard is Guard.CERTIFICATES else TlsSettings(),
        limits=LIMITS,
        lease=LeaseRules(duration_ms=LONG_MS, longest_ms=LONG_MS),
    )
    clock = Clock()
    replica = Replica(clock, "memory", "1.2.3")
    page = MetricsPage(Metrics(), lambda: None, "memory", "1.2.3")
    tls = Tls(config.tls) if config.tls.pair is not None else None
    gate = Gate(replica, clock, config, page.metrics)
    server = Server(replica, clock, config, tls=tls, gate=gate)
    with ExitStack() as shortened:
        for module, name, value in SHORT:
            shortened.enter_context(patch.object(module, name, value))
        async with Driver.running(MemoryStore(), clock, config, metrics=page.metrics) as driver:
            replica.lead(driver)
            shown = _credentials(guard, folder)
            async with (
                serving(server) as bound,
                serving_http(server, page, config.listen) as http,
                _channel(shown, bound, "grpc.enable_retries", 0) as channel,
                _channel(shown, bound, "grpc.use_local_subchannel_pool", 1) as another,
            ):
                bystander = _Bystander(another, shown.metadata(_endpoint(bound)))
                await bystander.join()
                for_tokens = config.tls.token_listen
                served = Served(
                    bound.port,
                    http.bound.port,
                    channel,
                    driver,
                    (folder / "token").read_text().strip() if guard is Guard.TOKENS else "",
                    for_tokens.port if for_tokens is not None else 0,
                )
                yield served, bystander
                bystander.leave()


def _endpoint(bound: Listen) -> Endpoint:
    return Endpoint(bound.host, bound.port)


def _channel(shown: Credentials, bound: Listen, option: str, value: int) -> grpc.aio.Channel:
    return shown.aio_channel(_endpoint(bound), [(option, value)])


def _made_files(folder: Path) -> TlsSettings:
    """Make certificates of the server and of the bystander, once per folder."""
    if not (folder / "ca.crt").exists():
        authority = Authority.make(folder, 30, replace=False)
        authority.server(("127.0.0.1",), 20, replace=False)
        authority.caller("client", NODE, ("admin",), 20, replace=False)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return TlsSettings(
        folder / "server.crt",
        folder / "server.key",
        folder / "ca.crt",
        http_client_auth="accept",
        token_listen=Listen("127.0.0.1", port),
    )


def _credentials(guard: Guard, folder: Path) -> Credentials:
    """Return the state that the bystander sees."""
    match guard:
        case Guard.NOTHING:
            return Credentials()
        case Guard.TOKENS:
            return Credentials(token_file=folder / "token")
        case Guard.CERTIFICATES:
            pair = (folder / f"client-{NODE}.crt", folder / f"client-{NODE}.key")
            return Credentials(folder / "ca.crt", *pair)


class _Bystander:
    """A node that runs a job by itself."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._rendezvous: Any = pb_grpc.RendezvousStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = metadata
        self._call: Any = self._rendezvous.Attach(metadata=metadata)
        self._control: Any = pb_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        self._beats = 0

    async def join(self) -> None:
        hello = pb.Hello(
            protocol_version=1,
            node_id=NODE,
            instance="one",
            kind=pb.AGENT_KIND_DAEMON,
            address="127.0.0.1",
            pid=1,
        )
        async with asyncio.timeout(PATIENCE_S):
            while not await self._is_welcome(hello):
                self._call = self._rendezvous.Attach(metadata=self._metadata)
        settings = pb.Settings(min_nodes=1, max_nodes=1, join_timeout_ms=LONG_MS, max_restarts=0)
        offer = pb.Offer(address="127.0.0.1", machine="m", local_world_size=1, store_port=4711)
        await self._call.write(
            pb.NodeMessage(join=pb.Join(rdzv_id=JOB, settings=settings, offer=offer))
        )
        await self._hear("round_completed")

    async def _is_welcome(self, hello: pb.Hello) -> bool:
        """Send the hello; False if the server reads it too late, after which a node tries again."""
        try:
            await self._call.write(pb.NodeMessage(hello=hello))
            await self._hear("welcome")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and "no hello" in str(error.details()):
                return False
            raise
        return True

    async def is_served(self) -> None:
        """Send a heartbeat and wait for its answer; ask for the job, which must run.

        Raises:
            FoundError: one of these failed.
        """
        self._beats += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                beat = pb.Heartbeat(number=self._beats)
                await self._call.write(pb.NodeMessage(heartbeat=beat))
                await self._hear("heard")
                status = await self._control.GetStatus(
                    pb.GetStatusRequest(rdzv_id=JOB), metadata=self._metadata
                )
        except (TimeoutError, grpc.aio.BaseError) as error:
            raise FoundError(f"another caller is not served: {error!r}") from error
        if status.state != "running":
            raise FoundError(f"another's job is {status.state}: {status.reason}")

    async def _hear(self, kind: str) -> None:
        while True:
            message = await self._call.read()
            if not isinstance(message, pb.ServerMessage):
                raise FoundError(f"another's stream has ended: {await self._call.details()}")
            if message.WhichOneof("body") in ("round_ended", "closed"):
                raise FoundError(f"another's round is over: {message}")
            if message.WhichOneof("body") == kind:
                return

    def leave(self) -> None:
        self._call.cancel()

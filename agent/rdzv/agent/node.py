"""One node: its one stream to the server, and all the jobs that it takes part in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from rdzv.agent.core import events
from rdzv.agent.core.model import Outcome
from rdzv.agent.driver import JobDriver
from rdzv.agent.launch import Launch, local_address
from rdzv.agent.server_link import Identity, ServerLink
from rdzv.client import Endpoint
from rdzv.errors import InvalidRequestError
from rdzv.meeting import is_loopback
from rdzv.server.clock import MonotonicClock
from rdzv.server.config import Config, Listen
from rdzv.server.driver import Driver
from rdzv.server.service import serving
from rdzv.stores.memory import MemoryStore
from rdzv.v1 import rdzv_pb2 as pb

LINK_CLOSE_TIMEOUT_S = 2.0
"""How long the end of the stream may take, once everything was said."""

OTHERS_TIMEOUT_S = 5.0
"""How long a node that serves the others waits for them to go, once it could go itself."""

log = logging.getLogger("rdzv.agent")


async def take_part(
    node_id: str,
    endpoints: Sequence[Endpoint],
    launches: Sequence[Launch],
    host_at: Endpoint | None = None,
) -> list[Outcome]:
    """Take part in these jobs until each has ended for this node; nothing of them is left then.

    The launches' signals make the node leave all of them, in order. With `host_at` the node serves
    the others there, unless another process of this machine does; without an endpoint it serves
    itself.
    """
    drivers: list[JobDriver] = []
    async with contextlib.AsyncExitStack() as stack:
        signals = {signum for launch in launches for signum in launch.signals}
        early = stack.enter_context(_signals_to(drivers, signals))
        if host_at is not None:
            await stack.enter_async_context(_serving_others(host_at))
        elif not endpoints:
            endpoints = [await stack.enter_async_context(_serving_itself())]
        link = ServerLink(endpoints, await _identity(node_id, endpoints[0]))
        drivers += [JobDriver(launch, link) for launch in launches]
        for signum in early:
            _post(signum, drivers)
        try:
            for driver in drivers:
                await driver.prepare(endpoints[0])
            return await _talk(link, drivers)
        finally:
            for driver in drivers:
                await driver.close()


async def _identity(node_id: str, endpoint: Endpoint) -> Identity:
    return Identity(
        node_id=node_id,
        instance=uuid.uuid4().hex,
        # Workers end with their agent, whichever kind it is, until runners outlive it.
        kind=pb.AGENT_KIND_FOREGROUND,
        address=await local_address(endpoint),
        pid=os.getpid(),
        version=metadata.version("rdzv"),
    )


async def _talk(link: ServerLink, drivers: Sequence[JobDriver]) -> list[Outcome]:
    """Keep the stream open until the last job has ended and the server has heard of it."""
    async with asyncio.TaskGroup() as tasks:
        talk = tasks.create_task(link.run())
        outcomes = [await driver.wait() for driver in drivers]
        link.close()
        _, late = await asyncio.wait([talk], timeout=LINK_CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
    return outcomes


@contextlib.contextmanager
def _signals_to(
    drivers: Sequence[JobDriver], signals: Collection[signal.Signals]
) -> Iterator[Sequence[signal.Signals]]:
    """Turn the signals that ask this process to end into events; hand over those before a driver.

    The end of an embedded server, too, is not to be cut in two by Ctrl-C.
    """
    early: list[signal.Signals] = []

    def take(signum: signal.Signals) -> None:
        if not drivers:
            early.append(signum)
        _post(signum, drivers)

    loop = asyncio.get_running_loop()
    for signum in signals:
        loop.add_signal_handler(signum, take, signum)
    try:
        yield early
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


def _post(signum: signal.Signals, drivers: Sequence[JobDriver]) -> None:
    for driver in drivers:
        driver.post(events.Signalled(signum, signum.name))


@contextlib.asynccontextmanager
async def _serving_itself() -> AsyncIterator[Endpoint]:
    """Serve this node alone, on a loopback port of the system's choice."""
    async with _embedded_server(Listen("127.0.0.1", 0)) as (_, listen):
        yield Endpoint(listen.host, listen.port)


@contextlib.asynccontextmanager
async def _serving_others(host_at: Endpoint) -> AsyncIterator[None]:
    """Serve all nodes of the job, and let them hear how it ended before this one goes."""
    # As torchrun's store does: the host's name may lead to loopback on the host itself.
    listen = Listen(host_at.host if is_loopback(host_at.host) else "::", host_at.port)
    async with contextlib.AsyncExitStack() as stack:
        server = await _try_to_serve(stack, listen)
        if server is None:
            log.info("another process of this machine serves %s", host_at)
        elif not listen.loopback:
            log.warning("insecure: everyone who reaches %s may run and end jobs there", host_at)
        yield
        if server is not None:
            await server.wait_alone(OTHERS_TIMEOUT_S)


async def _try_to_serve(stack: contextlib.AsyncExitStack, listen: Listen) -> Driver | None:
    """Serve until the stack is left; None if the port is taken, even if only just now."""
    if _is_taken(listen):
        # gRPC would say the same, but on the user's console as well.
        return None
    try:
        server, _ = await stack.enter_async_context(_embedded_server(listen))
    except InvalidRequestError:
        return None
    return server


def _is_taken(listen: Listen) -> bool:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        socket.create_server((listen.host, listen.port), family=family).close()
    except OSError:
        return True
    return False


@contextlib.asynccontextmanager
async def _embedded_server(listen: Listen) -> AsyncIterator[tuple[Driver, Listen]]:
    """Serve from memory for as long as this node lives."""
    config = Config(listen=listen, data_dir=Path(os.devnull), store="memory", insecure=True)
    clock = MonotonicClock()
    store = MemoryStore(config.limits.history_rows)
    async with Driver.running(store, clock, config) as driver, serving(driver, clock, config) as at:
        yield driver, at

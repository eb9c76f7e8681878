"""One node: its one stream to the server, and all the jobs that it takes part in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from rdzv.agent.core import events
from rdzv.agent.core.model import Outcome
from rdzv.agent.driver import JobDriver
from rdzv.agent.launch import Launch, local_address
from rdzv.agent.server_link import Identity, ServerLink
from rdzv.client import Endpoint
from rdzv.v1 import rdzv_pb2 as pb

LINK_CLOSE_TIMEOUT_S = 2.0
"""How long the end of the stream may take, once everything was said."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


async def take_part(
    node_id: str, endpoints: Sequence[Endpoint], launches: Sequence[Launch]
) -> list[Outcome]:
    """Take part in these jobs until each has ended for this node; nothing of them is left then.

    SIGTERM, SIGINT, SIGHUP and SIGQUIT make the node leave all of them, in order. Without an
    endpoint the node serves itself.
    """
    async with contextlib.AsyncExitStack() as stack:
        if not endpoints:
            endpoints = [await stack.enter_async_context(_embedded_server())]
        link = ServerLink(endpoints, await _identity(node_id, endpoints[0]))
        drivers = [JobDriver(launch, link) for launch in launches]
        with _signals_to(drivers):
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
def _signals_to(drivers: Sequence[JobDriver]) -> Iterator[None]:
    """Turn the signals that ask this process to end into events."""

    def post(signum: signal.Signals) -> None:
        for driver in drivers:
            driver.post(events.Signalled(signum, signum.name))

    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, post, signum)
    try:
        yield
    finally:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)


@contextlib.asynccontextmanager
async def _embedded_server() -> AsyncIterator[Endpoint]:
    """Serve this node alone from memory, on a loopback port of the system's choice."""
    from rdzv.server.clock import MonotonicClock
    from rdzv.server.config import Config, Listen
    from rdzv.server.driver import Driver
    from rdzv.server.service import serving
    from rdzv.stores.memory import MemoryStore

    config = Config(listen=Listen("127.0.0.1", 0), data_dir=Path(os.devnull), store="memory")
    clock = MonotonicClock()
    store = MemoryStore(config.limits.history_rows)
    async with Driver.running(store, clock, config) as driver, serving(driver, clock, config) as at:
        yield Endpoint(at.host, at.port)

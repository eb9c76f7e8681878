"""The server that a node brings along: for itself, for all nodes of a job, or if it is elected.

Where there is no standing rdzvd, one of the job's own agents serves it. Which one is fixed by the
command line (`static`, `c10d`), and it serves from memory for the life of its agent; or the agents
elect it (`etcd`), the state is in etcd, and another takes over when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.agent.launch import local_address
from rdzv.core.model import Tuning
from rdzv.core.nodes import NodesTuning
from rdzv.endpoints import Endpoint
from rdzv.errors import InvalidRequestError
from rdzv.meeting import is_loopback
from rdzv.server.clock import MonotonicClock
from rdzv.server.config import DAY_MS, Config, Listen, Timings
from rdzv.server.driver import Driver
from rdzv.server.replica import Replica
from rdzv.server.service import server_version, serving
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.stores.etcd_client import EtcdConfig

OTHERS_TIMEOUT_S = 5.0
"""How long a node that serves the others waits for them to go, once it could go itself."""

UNWATCHED_MS = DAY_MS
"""The lease, and the time between two looks or pings, where server and node are one process."""

TAKEOVER_GRACE_MS = 10_000
"""How long a newly elected node waits for the others, each of which hears of it at once. The one
before it is likely gone with its whole node, and holds up the job for so long."""

log = logging.getLogger("rdzv.agent")


@contextlib.asynccontextmanager
async def serving_itself() -> AsyncIterator[Endpoint]:
    """Serve this node alone, on a loopback port of the system's choice.

    They are one process, and end or stand still together: neither waits for a sign of the other.
    """
    never_ms = UNWATCHED_MS
    config = replace(
        _from_memory(Listen("127.0.0.1", 0)),
        nodes_tuning=NodesTuning(lease_ms=never_ms, lease_max_ms=never_ms),
        timings=Timings(watch_every_ms=never_ms, ping_interval_ms=never_ms),
    )
    async with _serving(config) as (_, listen):
        yield Endpoint(listen.host, listen.port)


@contextlib.asynccontextmanager
async def serving_others(host_at: Endpoint) -> AsyncIterator[None]:
    """Serve all nodes of the job, and let them hear how it ended before this one goes."""
    # As torchrun's store does: the host's name may lead to loopback on the host itself.
    listen = Listen(host_at.host if is_loopback(host_at.host) else "::", host_at.port)
    async with contextlib.AsyncExitStack() as stack:
        server = await _try_to_serve(stack, listen)
        if server is None:
            log.info("another process of this machine serves %s", host_at)
        elif not listen.loopback:
            _warn(host_at)
        yield
        if server is not None:
            await server.wait_alone(OTHERS_TIMEOUT_S)


@contextlib.asynccontextmanager
async def serving_if_elected(etcd: EtcdConfig, local_addr: str) -> AsyncIterator[Endpoint]:
    """Serve all nodes of the job while this one is elected; yield where to ask who is.

    A node whose turn is over lets the others hear how the job ended before it goes.

    Raises:
        InvalidRequestError: etcd refuses this node.

    """
    from rdzv.stores.election import Election
    from rdzv.stores.etcd_client import EtcdClient

    address = local_addr or await local_address(etcd.endpoints[0])
    listen = Listen("127.0.0.1" if is_loopback(address) else "::", 0)
    config = Config(
        listen,
        Path(os.devnull),
        store="etcd",
        etcd=etcd,
        insecure=True,
        tuning=Tuning(takeover_grace_ms=TAKEOVER_GRACE_MS),
        nodes_tuning=NodesTuning(takeover_grace_ms=TAKEOVER_GRACE_MS),
    )
    clock = MonotonicClock()
    replica = Replica(clock, etcd.place, server_version())
    async with EtcdClient.connected(etcd) as client, serving(replica, clock, config) as bound:
        at = Endpoint(address, bound.port)
        if not listen.loopback:
            _warn(at)
        async with (
            Election.running(client, str(at), server_version()) as election,
            asyncio.TaskGroup() as tasks,
        ):
            campaign = tasks.create_task(replica.campaign(client, election, config))
            try:
                yield Endpoint("127.0.0.1", bound.port)
                await replica.wait_alone(OTHERS_TIMEOUT_S)
            finally:
                campaign.cancel()


def _warn(endpoint: Endpoint) -> None:
    log.warning("insecure: everyone who reaches %s may run and end jobs there", endpoint)


async def _try_to_serve(stack: contextlib.AsyncExitStack, listen: Listen) -> Driver | None:
    """Serve until the stack is left; None if the port is taken, even if only just now."""
    if _is_taken(listen):
        # gRPC would say the same, but on the user's console as well.
        return None
    try:
        server, _ = await stack.enter_async_context(_serving(_from_memory(listen)))
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


def _from_memory(listen: Listen) -> Config:
    return Config(listen=listen, data_dir=Path(os.devnull), store="memory", insecure=True)


@contextlib.asynccontextmanager
async def _serving(config: Config) -> AsyncIterator[tuple[Driver, Listen]]:
    """Serve from memory, for as long as this node lives; whoever calls knows what there is."""
    clock = MonotonicClock()
    store = MemoryStore(config.limits.history_rows)
    replica = Replica(clock, store.place, server_version())
    async with Driver.running(store, clock, config) as driver:
        replica.lead(driver)
        async with serving(replica, clock, config, reflection=False) as bound:
            yield driver, bound

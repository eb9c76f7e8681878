"""The server that a node hosts: for itself, for all of a job's nodes, or after an election.

With `static` and `c10d`, the command line names the agent that serves, from memory, as long as it
lives. With `etcd`, the agents elect the server, and another one takes over when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from rdzv.agent.launch.launch import local_address
from rdzv.agent.node.shared_port import shared
from rdzv.core.fleet.nodes import LeaseRules
from rdzv.errors import InvalidRequestError, RendezvousConnectionError
from rdzv.runtime.clock import DAY_MS, Clock
from rdzv.server.driver import Driver
from rdzv.server.operations.handlers import Server
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc.grpc_listener import serving
from rdzv.server.settings.server_settings import RdzvdSettings, Timings
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.transport.addresses import listen_at
from rdzv.transport.endpoints import Endpoint, Listen, is_loopback
from rdzv.version import VERSION

if TYPE_CHECKING:
    from rdzv.stores.etcd_config import EtcdConfig

OTHERS_TIMEOUT_S = 5.0
"""How long a node that serves the others waits for them to leave before it exits."""

UNWATCHED_MS = DAY_MS
"""The lease, and the interval of checks and pings, if server and node are one process."""

TAKEOVER_GRACE_MS = 10_000
"""How long an elected server waits for the others. If the former one's node is gone, all wait."""

log = logging.getLogger("rdzv.agent")


@contextlib.asynccontextmanager
async def serving_itself(
    store_at: Endpoint | None = None, rdzv_id: str = ""
) -> AsyncIterator[Endpoint]:
    """Serve only this node, on a loopback port, and the round's store at `store_at`.

    Server and node are one process and stop together, so neither watches the other.
    """
    never_ms = UNWATCHED_MS
    config = replace(
        _from_memory(Listen("127.0.0.1", 0)),
        lease=LeaseRules(duration_ms=never_ms, longest_ms=never_ms),
        timings=Timings(ping_interval_ms=never_ms),
    )
    async with contextlib.AsyncExitStack() as stack:
        listening = None if store_at is None else _listen_at(store_at)
        if store_at is not None and listening is None:
            other = f"--rdzv-backend=c10d --rdzv-endpoint={replace(store_at, port=0)}"
            raise _taken(store_at, f"give this job its own port, or let the system choose: {other}")
        server, bound = await stack.enter_async_context(_serving(config))
        if listening is not None:
            find_store = partial(_find_store, server, rdzv_id)
            await stack.enter_async_context(shared(listening, None, find_store))
        yield Endpoint(bound.host, bound.port)


@contextlib.asynccontextmanager
async def serving_others(
    host_at: Endpoint, rdzv_id: str, *, alone: bool = False
) -> AsyncIterator[None]:
    """Serve all of the job's nodes until the body ends, then wait for them to learn its result.

    The store for its round is reachable at the same port. If another process on this machine is
    listening there, this one serves nothing, or with `alone` raises an error.
    """
    listening = _listen_at(host_at)
    if listening is None and alone:
        raise _taken(host_at, "give this job its own --master-port")
    if listening is None:
        log.info("another process on this machine is already serving %s", host_at)
        yield
        return
    if not is_loopback(host_at.host):
        _warn(host_at)
    config = replace(
        _from_memory(Listen("127.0.0.1", 0)),
        lease=LeaseRules(takeover_grace_ms=TAKEOVER_GRACE_MS),
    )
    async with _serving(config) as (server, bound):
        find_store = partial(_find_store, server, rdzv_id)
        async with shared(listening, Endpoint(bound.host, bound.port), find_store):
            yield
            await server.streams.wait_empty(OTHERS_TIMEOUT_S)


async def _find_store(server: Driver, rdzv_id: str) -> Endpoint | None:
    now = (await server.jobs.look(rdzv_id)).membership.round
    return Endpoint(now.master_addr, now.master_port) if now and now.live else None


@contextlib.asynccontextmanager
async def serving_if_elected(etcd: EtcdConfig, local_addr: str) -> AsyncIterator[Endpoint]:
    """Serve while elected; yield where to ask. At the end, others may still hear the result."""
    from rdzv.stores.election import Election
    from rdzv.stores.etcd_client import EtcdClient

    address = local_addr or await local_address(etcd.endpoints[0])
    listen = Listen("127.0.0.1" if is_loopback(address) else "::", 0)
    config = RdzvdSettings(
        listen=listen,
        store="etcd",
        insecure=True,
        lease=LeaseRules(takeover_grace_ms=TAKEOVER_GRACE_MS),
    )
    clock = Clock()
    replica = Replica(clock, etcd.place, VERSION)
    async with (
        EtcdClient.connected(etcd) as client,
        serving(Server(replica, clock, config)) as bound,
    ):
        at = Endpoint(address, bound.port)
        if not listen.loopback:
            _warn(at)
        async with (
            Election.running(client, str(at), VERSION) as election,
            asyncio.TaskGroup() as tasks,
        ):
            campaign = tasks.create_task(replica.campaign(client, election, config))
            try:
                yield Endpoint("127.0.0.1", bound.port)
                await replica.wait_alone(OTHERS_TIMEOUT_S)
            finally:
                campaign.cancel()


def _warn(endpoint: Endpoint) -> None:
    log.warning("insecure: anyone who can reach %s can run and end jobs there", endpoint)


def _listen_at(endpoint: Endpoint) -> socket.socket | None:
    """Return None if another process is already listening there."""
    try:
        return listen_at(endpoint.host, endpoint.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise InvalidRequestError(
            f"cannot listen at {endpoint}: {error.strerror}; give another port"
        ) from error


def _taken(at: Endpoint, remedy: str) -> RendezvousConnectionError:
    return RendezvousConnectionError(
        f"{at} is in use by another process of this machine; if that is an rdzvd, what is missing "
        f"is --rdzv-backend=rdzv --rdzv-endpoint={at} --rdzv-id=NAME; if it is an earlier launch, "
        f"start this one again once it has ended; otherwise {remedy}"
    )


def _from_memory(listen: Listen) -> RdzvdSettings:
    return RdzvdSettings(listen=listen, store="memory", insecure=True)


@contextlib.asynccontextmanager
async def _serving(config: RdzvdSettings) -> AsyncIterator[tuple[Driver, Listen]]:
    clock = Clock()
    store = MemoryStore()
    replica = Replica(clock, store.place, VERSION)
    async with Driver.running(store, clock, config) as driver:
        replica.lead(driver)
        async with serving(Server(replica, clock, config), reflection=False) as bound:
            yield driver, bound

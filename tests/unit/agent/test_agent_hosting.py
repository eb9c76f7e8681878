"""The server that a node starts for itself."""

import asyncio

import pytest

from rdzv.agent.node.server_hosting import serving_itself
from rdzv.agent.server_link.link import NodeIdentity, ServerLink
from rdzv.core.fleet.nodes import AgentKind

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


async def test_a_server_of_ones_own_waits_for_no_sign_of_life() -> None:
    who = NodeIdentity("n1", "i1", AgentKind.FOREGROUND, "127.0.0.1", 1, "0")
    leases_ms: asyncio.Queue[int] = asyncio.Queue()
    async with serving_itself() as endpoint, asyncio.timeout(PATIENCE_S):
        link = ServerLink([endpoint], who)
        link.on_welcome = lambda incarnation, leadership, lease_ms: leases_ms.put_nowait(lease_ms)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.run())
            assert await leases_ms.get() > 3_600_000
            link.close()

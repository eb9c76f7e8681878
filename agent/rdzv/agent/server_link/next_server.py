"""A connection to the server that this node would try next, opened before it is needed.

It costs that server a connection and a handshake, but no calls. Without it, all nodes that lose
their server at the same time would have to wait for thousands of handshakes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc

from rdzv.errors import InvalidRequestError
from rdzv.transport.channels import Credentials
from rdzv.transport.endpoints import Endpoint


class NextServer:
    """Keeps at most one channel open. Nothing is sent on the channel until it is taken."""

    def __init__(self, credentials: Credentials, options: Sequence[tuple[str, int]]) -> None:
        self._credentials = credentials
        self._options = options
        self._wanted: Endpoint | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stamp = credentials.stamp()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        channel = self._channel
        return channel is not None and channel.get_state() is grpc.ChannelConnectivity.READY

    async def keep(self, endpoint: Endpoint, within_s: float) -> None:
        """Connect to an endpoint at a random time within `within_s`, and stay connected."""
        if self._wanted == endpoint:
            return
        await self.close()
        self._wanted = endpoint
        self._task = asyncio.create_task(self._hold(endpoint, random.uniform(0, within_s)))

    async def take(self, endpoint: Endpoint) -> grpc.aio.Channel | None:
        channel = self._channel
        if channel is None or self._wanted != endpoint or self._stamp != self._credentials.stamp():
            return None
        self._channel = None
        await self.close()
        return channel

    async def close(self) -> None:
        task, self._task, self._wanted = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _hold(self, endpoint: Endpoint, in_s: float) -> None:
        """Connect after `in_s`, and again whenever the connection ends."""
        await asyncio.sleep(in_s)
        try:
            self._stamp = self._credentials.stamp()
            channel = self._channel = self._credentials.aio_channel(endpoint, self._options)
        except InvalidRequestError:
            # The certificate may be about to be renewed; the link connects if it needs the server.
            return
        while True:
            # While the server is unreachable, the channel's own backoff spaces out the attempts.
            await channel.wait_for_state_change(channel.get_state(try_to_connect=True))

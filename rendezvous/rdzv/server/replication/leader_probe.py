"""Watches the leader's process over a connection, so that its death is noticed immediately.

The connection carries no data. The end of the connection proves nothing by itself, so the probe
connects again. If a leader that was reached in this term now refuses connections, no process is
listening, and the leader is deposed; this is safe even if the conclusion is wrong. If a leader's
machine falls silent, nothing refuses connections, and the leader's lease decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rdzv.errors import InvalidRequestError, RendezvousConnectionError
from rdzv.runtime.tasks import beside
from rdzv.transport.endpoints import parse_endpoint

if TYPE_CHECKING:
    from rdzv.stores.election import Election
    from rdzv.stores.election_session import Leader

log = logging.getLogger("rdzv.replica")

CONNECT_S = 1.0
RETRY_S = 0.25
"""The pause before the next attempt to connect or to depose the leader."""
READ_BYTES = 4096


class LeaderProbe:
    """Watches the leader while another server leads."""

    def __init__(self, election: Election, on_change: Callable[[], None]) -> None:
        self._election = election
        self._on_change = on_change
        self.suspect: Leader | None = None
        """The leader, if its connection has ended and it has not yet accepted another; otherwise
        None."""

    async def run(self) -> None:
        first = await self._election.changed(None)
        if first is not None and first.address == self._election.address:
            # This process now has the leader's address, so the process that was leading there is
            # gone.
            await self._depose(first)
        while True:
            leader = self._election.leader
            if leader is None or leader.address == self._election.address or not leader.word_ms:
                await self._election.changed(leader)
                continue
            async with beside(self._watch(leader)):
                now: Leader | None = leader
                while now is not None and now.since_unix_ms == leader.since_unix_ms:
                    now = await self._election.changed(now)
            self._suspect(None)

    async def _watch(self, leader: Leader) -> None:
        try:
            endpoint = parse_endpoint(leader.address)
        except InvalidRequestError:
            return
        reached = False
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            except ConnectionRefusedError:
                if reached:
                    await self._depose(leader)
                    return
            except (OSError, TimeoutError):
                self._suspect(None)
            else:
                reached = True
                self._suspect(None)
                await _until_end(reader, writer)
                self._suspect(leader)
                continue
            await asyncio.sleep(RETRY_S)

    async def _depose(self, leader: Leader) -> None:
        """Depose a leader unless its term is over; retry while etcd is unavailable."""
        while (now := self._election.leader) and now.since_unix_ms == leader.since_unix_ms:
            try:
                done = await self._election.depose(now)
            except RendezvousConnectionError as error:
                log.info("cannot depose the leader at %s yet: %s", now.address, error)
                await asyncio.sleep(RETRY_S)
                continue
            if done:
                log.warning("the former leader at %s is gone", now.address)
            if done or self._election.leader == now:
                return

    def _suspect(self, leader: Leader | None) -> None:
        if self.suspect != leader:
            self.suspect = leader
            self._on_change()


async def _until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.read(READ_BYTES):
            pass
    except OSError:
        pass
    finally:
        writer.transport.abort()

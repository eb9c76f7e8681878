"""This node's offer for a job's next round: its address, and a port for the c10d store."""

from __future__ import annotations

import socket

from rdzv.agent.launch.launch import Launch, has_torch, reachable_host_name
from rdzv.core.model import Offer
from rdzv.structs import replace
from rdzv.transport.addresses import StoreSocket, is_loopback, machine_id


class StoreOffer:
    """This node's offer for one job, and the socket reserved for a round's store."""

    def __init__(self, fixed: Offer) -> None:
        self.fixed = fixed
        """The part of the offer that stays the same between rounds, which is all but the port."""
        self._socket = StoreSocket(
            loopback_only=_loopback_only(fixed), listens=fixed.can_host_store
        )

    @classmethod
    async def make(cls, launch: Launch) -> StoreOffer:
        """Make this node's offer. Without --local-addr, its address follows by `move_to`."""
        address = launch.local_addr
        return cls(
            Offer(
                address=address,
                local_world_size=launch.job.local_world_size,
                role=launch.role,
                topology=launch.topology,
                host_name=await reachable_host_name() if is_loopback(address) else "",
                machine=machine_id(),
                can_host_store=await has_torch(launch.python, launch.environ, launch.account),
                shutdown_timeout_ms=max(launch.job.shutdown_timeout_ms, launch.job.keep_timeout_ms),
            )
        )

    def move_to(self, address: str, host_name: str) -> None:
        self.fixed = replace(self.fixed, address=address, host_name=host_name)
        self._socket.confine(loopback_only=_loopback_only(self.fixed))

    def with_port(self) -> Offer:
        """Return the offer with the reserved port, binding a new port if none is reserved.

        Raises:
            OSError: no port can be bound.
        """
        return replace(self.fixed, store_port=self._socket.port)

    def take_socket(self) -> socket.socket | None:
        """Return the reserved socket, which the caller must close, or None if there is none."""
        return self._socket.take()

    def release(self) -> None:
        """Free the port, which is not offered again."""
        self._socket.release()


def _loopback_only(offer: Offer) -> bool:
    return is_loopback(offer.address) and not offer.host_name

"""Interrupts the collectives of a round, for each of torch's backends."""

from __future__ import annotations

import socket
import threading
import weakref
from typing import Any, Protocol

from .errors import RoundOver
from .gloo_addresses import Published
from .tcp import Address, drop_in_child, knock, let_go, stop_reading


class Backend(Protocol):
    """A backend whose collectives can be interrupted from another thread."""

    def cut(self) -> None:
        """Make every collective in progress fail. May be called repeatedly."""

    def release(self) -> None:
        """Release what `cut` has kept, because no collective is in progress any more."""


class Cut:
    """The cut of a round's collectives: a state, not an event.

    From the first `cut` until the worker has parked, no new group can be made, and `cut` is called
    repeatedly, to catch late connections.
    """

    def __init__(self, backends: list[Backend]) -> None:
        self._backends = backends
        self._lock = threading.Lock()
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        """Whether `cut` was called."""
        return self._is_cut

    def add(self, backend: Backend) -> None:
        """Add a backend to cut; it is cut at once if the others already are."""
        with self._lock:
            self._backends.append(backend)
            if self._is_cut:
                backend.cut()

    def cut(self) -> None:
        """Interrupt all collectives in progress; may be called from any thread."""
        with self._lock:
            self._is_cut = True
            for backend in self._backends:
                backend.cut()

    def release(self) -> None:
        """End the cut: the round's groups are destroyed."""
        with self._lock:
            for backend in self._backends:
                backend.release()
            self._backends = []

    def refuse(self) -> None:
        """Raise `RoundOver` if the round is cut."""
        if self._is_cut:
            raise RoundOver


class GlooCut:
    """Shuts down gloo's connections, because gloo has no abort that unblocks waiters.

    The connections are found by the addresses that the round's groups have published in its store.
    The store's own connection is among them, because a rank may be waiting for others in the store.

    When a write fails because the peer has closed, gloo loses the operation, and waits for it until
    its timeout; when a read finds the end of the stream, gloo fails all operations. So connections
    are shut down for reading only, and kept open until this rank has left its collectives: a peer
    that is cut a little later does not see them close before that.
    """

    def __init__(self, published: Published, store: set[Address]) -> None:
        self._published = published
        self._store = store
        self._held: dict[int, socket.socket] = {}
        self._knocked = 0

    @property
    def addresses(self) -> set[Address]:
        """All addresses of the round: those of its ranks and of its store."""
        return self._store | set(self._published.addresses)

    def cut(self) -> None:
        """Shut down the round's connections that are open now."""
        stop_reading(self.addresses, self._held)
        # A rank may also wait for a peer to connect, when there is nothing to shut down yet. It
        # gets a connection that is reset at once. Ids that it does not wait for have no effect.
        own = list(self._published.own)
        for address, ids in own[self._knocked :]:
            for peer in ids:
                knock(address, peer)
        self._knocked = len(own)

    def release(self) -> None:
        """Close the connections, which peers then notice."""
        let_go(self._held)

    def drop_in_child(self) -> None:
        """Close a forked child's copies of the round's connections."""
        drop_in_child(self.addresses)


class NcclCut:
    """Makes torch abort all NCCL groups together: aborting them one by one deadlocks."""

    def __init__(self) -> None:
        self.aborted: list[weakref.ref[Any]] = []
        """The groups that were aborted, which torch no longer knows."""

    def cut(self) -> None:
        """Abort all groups, once, if one of them uses NCCL."""
        import torch.distributed.distributed_c10d as c10d

        used = any("nccl" in str(one) for one in list(c10d._world.pg_backend_config.values()))
        if used and not self.aborted:
            self.aborted = [weakref.ref(group) for group in list(c10d._world.pg_map)]
            c10d._abort_process_group()

    def release(self) -> None:
        """Do nothing: there is nothing to release."""

"""A round's c10d store, where all its nodes' torch agents and workers meet.

Behavior of torch 2.13 that determines this design:

* `master_listen_fd` takes over a socket that was already listening. So the port can be announced
  first, and a client that connects before the server is up is served later.
* Such a client ignores its own timeout until the connection is accepted, and cannot be woken. So a
  store is opened in a thread that may be left behind.
* In `_assign_worker_ranks` (`torch/distributed/elastic/agent/server/api.py`), torch's agents wait
  for one another in the store, and an agent whose wait times out exits. So `meet` returns only when
  all of them are there; until then, giving up does not end any agent.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from rdzv.v1 import rdzv_pb2 as pb

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""`_TERMINAL_STATE_SYNC_ID` in `torch/distributed/elastic/agent/server/api.py`: an agent adds to a
key with this prefix when all its workers have exited 0, and then waits for the other nodes.
"""

_ATTENTION_S = 0.2
"""How often a wait in the store checks whether the round is over."""


def shares_store() -> bool:
    """Return whether workers are clients of the agents' store, based on torchrun's own switch."""
    return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


class AgentStore(PrefixStore):
    """The round's store as torch's agent sees it.

    Its keys are separate from the workers' keys. It calls `on_success` when the agent enters the
    exit barrier, and ends every wait once `why_over` returns a reason.
    """

    def __init__(
        self, store: Store, on_success: Callable[[], None], why_over: Callable[[], str]
    ) -> None:
        super().__init__("torchelastic/agents", store)
        self._on_success = on_success
        self._why_over = why_over

    def add(self, key: str, amount: int) -> int:
        if key.startswith(EXIT_BARRIER):
            self._on_success()
        return int(super().add(key, amount))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(super().get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return list(super().multi_get(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; see the base class.

        Raises:
            DistStoreError: the keys were not set within the timeout.
            RuntimeError: the round is over.
        """
        left: timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        attention = timedelta(seconds=_ATTENTION_S)
        while not (why := self._why_over()):
            try:
                super().wait(keys, min(left, attention))
                return
            except DistStoreError:
                left -= attention
                if left <= timedelta(0):
                    raise
        raise RuntimeError(f"the round is over ({why}); there is no one left to wait for")


def meet(
    line: pb.Assignment,
    listening: socket.socket | None,
    wrap: Callable[[Store], AgentStore],
    timeout_s: float,
) -> RendezvousInfo:
    """Open a round's store and wait until all its nodes are connected.

    GROUP_RANK 0 passes the listening socket whose port it offered, and serves the store as long as
    the result is in use.
    """
    timeout = timedelta(seconds=timeout_s)
    store = _open(line, listening, timeout)
    agents = wrap(store)
    _roll_call(agents, line.group_world_size, timeout)
    where = RendezvousStoreInfo(line.master_addr, line.master_port)
    if not shares_store():
        # The worker with RANK 0 serves another store, on a port that GROUP_RANK 0 picks.
        where = RendezvousStoreInfo.build(line.group_rank, agents, line.master_addr)
    return RendezvousInfo(agents, line.group_rank, line.group_world_size, where)


def _open(line: pb.Assignment, listening: socket.socket | None, timeout: timedelta) -> Store:
    if listening is None:
        return TCPStore(
            line.master_addr,
            line.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
    return TCPStore(
        "127.0.0.1",  # For the store's own client; the socket determines where it listens.
        line.master_port,
        is_master=True,
        wait_for_workers=False,
        # If this were True, all of a process's stores on one port would share a server, and a
        # second store opened by mistake would go unnoticed.
        multi_tenant=False,
        master_listen_fd=listening.detach(),
        timeout=timeout,
    )


def _roll_call(store: Store, nodes: int, timeout: timedelta) -> None:
    if store.add("here", 1) == nodes:
        store.set("all_here", "")
    store.wait(["all_here"], timeout)


def in_thread(
    work: Callable[[], RendezvousInfo], done: Callable[[], None]
) -> Future[RendezvousInfo]:
    """Run work that may never end in a thread, and return its future; call `done` if it ends."""
    future: Future[RendezvousInfo] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        done()

    threading.Thread(target=do, name="rdzv-store", daemon=True).start()
    return future

"""The peer of the scale benchmark: torch's own c10d rendezvous, with nodes that are threads.

Run by path as a child process, since it imports torch. Several of them hold the nodes of one job:
`c10d_crowd.py PORT NODES TOTAL NUMBER`, where process 0 serves the store, on a port of its own if
PORT is 0. It takes one command per line on stdin, and answers with a JSON line; it ends with stdin:

* `{"act": "port"}`: return the store's port;
* `{"act": "gather"}`: all nodes of this process join, except the last of process 0; process 0
  answers when all others of the job are participants, the other processes at once;
* `{"act": "form"}`: in process 0, the last node joins; every process answers when all its nodes
  have received the round.

Handler, back-end, keep-alives and timeouts are those of a torchrun with its defaults.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import sys
import threading
import time
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

HOST = "127.0.0.1"
RUN = "crowd"
TIMEOUT = datetime.timedelta(seconds=300)
LOOK_S = 0.05


class Node(threading.Thread):
    """One torchrun's rendezvous, on its own connection."""

    def __init__(self, port: int, total: int, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._port = port
        self._total = total
        self.told_s: float | None = None

    def run(self) -> None:
        """Join, and note when the round is complete for this node."""
        store = TCPStore(HOST, self._port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        handler = DynamicRendezvousHandler.from_backend(
            RUN,
            store,
            C10dRendezvousBackend(store, RUN),
            min_nodes=self._total,
            max_nodes=self._total,
            local_addr=HOST,
            timeout=RendezvousTimeout(join=TIMEOUT),
        )
        handler.next_rendezvous()
        self.told_s = time.monotonic()


def await_participants(store: TCPStore, count: int) -> None:
    """Wait until the job's state has this many participants."""
    backend = C10dRendezvousBackend(store, RUN)
    while True:
        held: Any = backend.get_state()
        if held is not None and len(pickle.loads(held[0]).participants) >= count:
            return
        time.sleep(LOOK_S)


def main() -> None:
    """Carry out commands until stdin ends."""
    port, nodes, total, number = map(int, sys.argv[1:])
    server = None
    if number == 0:
        server = TCPStore(HOST, port, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        port = server.port
    crowd = [Node(port, total, f"{number}-{each}") for each in range(nodes)]
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        began_s = time.monotonic()
        match json.loads(line)["act"]:
            case "port":
                answer = {"port": port}
            case "gather":
                for node in crowd[:-1] if number == 0 else crowd:
                    node.start()
                if server is not None:
                    look = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
                    await_participants(look, total - 1)
            case "form":
                if number == 0:
                    crowd[-1].start()
                for node in crowd:
                    node.join()
                if any(node.told_s is None for node in crowd):
                    answer = {"failed": "a node has failed; why, it wrote to stderr"}
                else:
                    answer = {"told_s": max(node.told_s or 0.0 for node in crowd)}
        print(json.dumps({**answer, "began_s": began_s}), flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:
        # Its threads never end, and TCPStore's clients would complain at exit.
        os._exit(0)

"""The peer of the store benchmark: the store of torchrun's own rendezvous, torch's TCPStore.

Run by path as a child process, since it imports torch. It hosts one store, in memory and so gone
with its process, and reads one case per line on stdin, each answered by a JSON line of samples:

* `{"case": "state", "nodes": N, "writers": W, "seconds": S}`: W threads, each with its own
connection, like W torchruns of different jobs, replace the pickled state of an N-node rendezvous by
  `compare_set`, through torch's own back-end;
* `{"case": "raw", "seconds": S}`: one connection replaces 100 bytes by `compare_set`;
* `{"case": "formation", "nodes": N}`: N nodes join one after the other, without contention.
"""

from __future__ import annotations

import datetime
import json
import pickle
import sys
import threading
import time
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

HOST = "127.0.0.1"
TIMEOUT = datetime.timedelta(seconds=60)


def connect(server: TCPStore) -> TCPStore:
    """Open another connection, as each torchrun has."""
    return TCPStore(HOST, server.port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)


def state_of(nodes: int) -> Any:
    """Return the state of a complete rendezvous."""
    state: Any = _RendezvousState()
    state.complete = True
    for number in range(nodes):
        add(state, number)
    return state


def add(state: Any, number: int) -> None:
    """Seat a node."""
    node = _NodeDesc(f"node-{number:05d}.cluster.local", 4711, number)
    state.participants[node] = number
    state.last_heartbeats[node] = datetime.datetime.now(datetime.UTC)


class Writer(threading.Thread):
    """One torchrun that keeps changing the state of its job."""

    def __init__(
        self, store: TCPStore, job: str, nodes: int, together: threading.Barrier, seconds: float
    ) -> None:
        super().__init__(name=job)
        self._backend = C10dRendezvousBackend(store, job)
        self._state = state_of(nodes)
        self._together = together
        self._seconds = seconds
        self.latencies: list[float] = []
        self.state_bytes = 0

    def run(self) -> None:
        """Commit until the time is over; the first commit creates the job, and does not count."""
        token = self._commit(None)
        self._together.wait()
        end = time.perf_counter() + self._seconds
        while True:
            began = time.perf_counter()
            token = self._commit(token)
            self.latencies.append(time.perf_counter() - began)
            if time.perf_counter() >= end:
                return

    def _commit(self, token: Any) -> Any:
        """Encode the state as torchrun does, and replace the one identified by `token`."""
        self._state.round += 1
        bits = pickle.dumps(self._state)
        written = self._backend.set_state(bits, token)
        if written is None or not written[2]:
            raise RuntimeError(f"{self.name}: nobody else writes, and yet a compare_set was lost")
        self.state_bytes = len(written[1])
        return written[1]


def states(server: TCPStore, case: int, nodes: int, writers: int, seconds: float) -> dict[str, Any]:
    """Measure `writers` jobs at once."""
    together = threading.Barrier(writers + 1)
    threads = [
        Writer(connect(server), f"case-{case}-{number}", nodes, together, seconds)
        for number in range(writers)
    ]
    for thread in threads:
        thread.start()
    together.wait()
    began, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    return {
        "latencies": [latency for thread in threads for latency in thread.latencies],
        "elapsed_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "bytes": threads[0].state_bytes,
    }


def raw(server: TCPStore, seconds: float) -> dict[str, Any]:
    """Measure the bare round trip."""
    store = connect(server)
    held = "0" * 100
    store.set("raw", held)
    latencies: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        wanted = f"{len(latencies):0100d}"
        at = time.perf_counter()
        store.compare_set("raw", held, wanted)
        latencies.append(time.perf_counter() - at)
        held = wanted
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {"latencies": latencies, "elapsed_s": elapsed_s, "cpu_s": cpu_s, "bytes": 100}


def formation(server: TCPStore, case: int, nodes: int) -> dict[str, Any]:
    """Count the minimum that torchrun's joins write: each writes the whole state."""
    backend = C10dRendezvousBackend(connect(server), f"case-{case}")
    state, token, written_bytes = state_of(0), None, 0
    began, cpu = time.perf_counter(), time.process_time()
    for number in range(nodes):
        add(state, number)
        written = backend.set_state(pickle.dumps(state), token)
        assert written is not None
        token = written[1]
        written_bytes += len(written[1])
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {"commits": nodes, "bytes": written_bytes, "elapsed_s": elapsed_s, "cpu_s": cpu_s}


def main() -> None:
    """Answer cases until stdin ends."""
    server = TCPStore(HOST, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        match asked["case"]:
            case "state":
                nodes, writers, seconds = asked["nodes"], asked["writers"], asked["seconds"]
                answer = states(server, number, nodes, writers, seconds)
            case "raw":
                answer = raw(server, asked["seconds"])
            case _:
                answer = formation(server, number, asked["nodes"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

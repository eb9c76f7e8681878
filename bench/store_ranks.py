"""How long `init_process_group` takes with the round's store, against the number of ranks.

The store is served by the store host, as in a job (rdzv), and beside it by torch as its own agent
does (torch): for each client that connects, torch's server asks the machine's name services for its
name, and waits for the answer. What that is worth depends on DNS, so there is also torch's store
with /etc/hosts alone (torch-hosts). Each listens on all addresses, as on a cluster. The ranks are
simulated: sockets that say what torch 2.13 says, byte for byte, in the same order, with
one request under way for each rank. They live in four processes, since a TCPStore client a rank
would need a thread each. All connect at the same moment.

* nccl: connect, check in, RANK 0 sets the unique id and the others get it, then torch's barrier
  (TORCH_DIST_INIT_BARRIER=1; without it there is less). NCCL's own start comes after that.
* gloo: connect, check in, set an address, wait for and get the address of each rank: three requests
  for each, so 3 N^2 in all. gloo then connects each rank to each, which is not measured.
* lazy: gloo with TORCH_GLOO_LAZY_INIT=1: only its own address is set.

`ready` is the time until all ranks are through, `store` the CPU time of the process that serves,
`ranks` that of the simulated ranks, which share the machine with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measure import Spread, emit, emitting_to, end_on_sigterm, load, say_conditions
from processes import Asked, cpu_s, guard, readline, resident_bytes

from rdzv.agent.job_programs import store_host
from rdzv.transport.addresses import listen_at

RANKS = (100, 300, 1_000, 3_000, 10_000)
GLOO_RANKS = (100, 300, 1_000)
"""Each rank asks for each: 1,000 are three million requests."""
CROWDS = 4
REPEATED_UP_TO = 1_000
"""Except gloo, once: it takes many seconds, which hardly vary."""
READY_S = 60.0
TIMEOUT_S = 300.0
ID_BYTES, ADDRESS_BYTES = 128, 178
MOST_RANKS = {"rdzv": 10_000, "torch-hosts": 10_000, "torch": 300}
"""By server: a server that waits for DNS takes minutes."""

HERE = Path(__file__).parent

# ------------------------------------------------------------------------------- what a rank says

VALIDATE, SET, GET, ADD, WAIT, PING = 0, 1, 3, 4, 6, 13
MAGIC = 0x3C85F7CE
VALUE = -1
"""The answer begins with its length."""

Rank = Generator[tuple[bytes, int], bytes, None]
"""A rank's message, and how many bytes it waits for; it is sent the answer."""


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _set(key: bytes, value: bytes) -> bytes:
    return bytes((SET,)) + _text(key) + _text(value)


def _add(key: bytes, number: int) -> tuple[bytes, int]:
    return bytes((ADD,)) + _text(key) + struct.pack("<q", number), 8


def _wait(key: bytes) -> tuple[bytes, int]:
    return bytes((WAIT,)) + struct.pack("<Q", 1) + _text(key), 1


def _get(key: bytes) -> tuple[bytes, int]:
    return bytes((GET,)) + _text(key), VALUE


def _check_in() -> Rank:
    """Do what the constructor of a TCPStore does."""
    yield struct.pack("<BIBI", VALIDATE, MAGIC, PING, os.getpid()), 4
    yield _add(b"init/", 1)


def _barrier(ranks: int) -> Rank:
    key = b"/default_pg/store_based_barrier_key:0"
    yield _add(key, 1)
    there = yield _add(key, 0)
    last = _set(key + b":last_worker", b"1") if _number(there) == ranks else b""
    request, size = _wait(key + b":last_worker")
    yield last + request, size


def _number(answer: bytes) -> int:
    return int(struct.unpack("<q", answer)[0])


def nccl(rank: int, ranks: int) -> Rank:
    """Get the unique id of rank 0."""
    yield from _check_in()
    key = b"/default_pg/0//cuda//0"
    if rank == 0:
        yield _set(key, b"i" * ID_BYTES), 0
    else:
        yield _wait(key)
        answer = yield _get(key)
        assert len(answer) == ID_BYTES
    yield from _barrier(ranks)


def gloo(rank: int, ranks: int) -> Rank:
    """Get the address of each rank."""
    yield from _check_in()
    prefix = b"/default_pg/0//cpu//0/%d"
    yield _set(prefix % rank, b"a" * ADDRESS_BYTES), 0
    for other in range(ranks):
        key = prefix % other
        yield _wait(key)
        yield _wait(key)
        answer = yield _get(key)
        assert len(answer) == ADDRESS_BYTES
    yield from _barrier(ranks)


def lazy(rank: int, ranks: int) -> Rank:
    """Only publish the rank's own address."""
    yield from _check_in()
    yield _set(b"/default_pg/0//cpu//0/%d" % rank, b"a" * ADDRESS_BYTES), 0
    yield from _barrier(ranks)


KINDS = {"nccl": nccl, "gloo": gloo, "lazy": lazy}

# ------------------------------------------------------------------------------- the ranks


class Peer:
    """One rank on its connection."""

    def __init__(self, rank: Rank, port: int) -> None:
        self.done = False
        self._rank = rank
        self._wanted = 0
        self._received = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(("127.0.0.1", port))

    def begin(self) -> None:
        """Send the first message; the connection is made, or has failed.

        Raises:
            OSError: it has failed.
        """
        failed = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(True)
        self._say(next(self._rank))

    def hear(self) -> None:
        """Read the data that has come, and send the next message if it was complete."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the store has ended a connection")
        self._received += data
        size = self._wanted
        if size == VALUE:
            if len(self._received) < 8:
                return
            size = 8 + _number(self._received[:8])
        if len(self._received) < size:
            return
        answer = self._received[8:size] if self._wanted == VALUE else self._received
        self._received = b""
        try:
            self._say(self._rank.send(answer))
        except StopIteration:
            self.done = True

    def _say(self, said: tuple[bytes, int]) -> None:
        request, self._wanted = said
        while not self._wanted:
            after, self._wanted = self._rank.send(b"")
            request += after
        self.socket.sendall(request)

    def close(self) -> None:
        """End the connection, without a trace in the kernel that would occupy its port."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def play(asked: dict[str, Any]) -> dict[str, Any]:
    """Play some of the ranks until all are through."""
    kind = KINDS[asked["kind"]]
    end = time.monotonic() + TIMEOUT_S
    peers: dict[int, Peer] = {}
    poller = select.epoll()
    began = time.process_time()
    for number in range(asked["first"], asked["end"]):
        peer = Peer(kind(number, asked["ranks"]), asked["port"])
        peers[peer.socket.fileno()] = peer
        poller.register(peer.socket, select.EPOLLOUT)
    left = len(peers)
    failed = ""
    while left and not failed:
        for fd, event in poller.poll(1.0):
            try:
                if event & select.EPOLLOUT:
                    peers[fd].begin()
                    poller.modify(fd, select.EPOLLIN)
                    continue
                peers[fd].hear()
            except OSError as error:
                failed = f"{left} of {len(peers)} ranks are not through: {error}"
                break
            if peers[fd].done:
                poller.unregister(fd)
                left -= 1
        if time.monotonic() > end:
            failed = f"{left} of {len(peers)} ranks are not through after {TIMEOUT_S:g} s"
    ended = {"cpu_s": time.process_time() - began, "failed": failed}
    # The others' connections are counted before they are closed.
    print(json.dumps(ended), flush=True)
    sys.stdin.readline()
    for peer in peers.values():
        peer.close()
    poller.close()
    return {}


def play_all() -> None:
    """Carry out lines of stdin."""
    for line in iter(sys.stdin.readline, ""):
        print(json.dumps(play(json.loads(line))), flush=True)


# ------------------------------------------------------------------------------- the stores


class Store(NamedTuple):
    """A running store."""

    pid: int
    port: int


@contextlib.contextmanager
def served_by(server: str) -> Iterator[Store]:
    """Run a store until the body ends."""
    fds: tuple[int, ...] = ()
    with contextlib.ExitStack() as stack:
        if server == "rdzv":
            listening = stack.enter_context(listen_at("", 0))
            ready, write_end = os.pipe()
            fds = (listening.fileno(), write_end)
            command = [store_host.__file__, f"--fd={fds[0]}", f"--ready-fd={fds[1]}"]
        else:
            command = [str(Path(__file__)), "serve", server]
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=fds,
                preexec_fn=guard(),  # noqa: PLW1509
            )
        )
        stack.callback(process.kill)
        if server == "rdzv":
            os.close(write_end)
            port = listening.getsockname()[1]
            listening.close()
            with os.fdopen(ready) as file:
                said = file.readline()
        else:
            said = readline(process, READY_S) or ""
            port = int(said or 0)
        if not said:
            raise RuntimeError(f"the store of {server} was not served")
        yield Store(process.pid, port)


def serve_as_torch(server: str) -> None:
    """Serve a store as torch's agent does, until killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if server == "torch-hosts":
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")

    store = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()


class Measured(NamedTuple):
    """The times of one start."""

    ready_s: float
    store_s: float
    ranks_s: float
    connections: int
    threads: int
    bytes_a_rank: float


def start(kind: str, server: str, ranks: int, crowds: list[Asked]) -> Measured:
    """Let all ranks start on a new store; each crowd must be new, or have ended a start.

    Raises:
        TimeoutError: not all were done; the message says how many.
    """
    with served_by(server) as store:
        cpu_before_s, before = cpu_s(store.pid), resident_bytes(store.pid)
        bounds = [ranks * n // len(crowds) for n in range(len(crowds) + 1)]
        began = time.monotonic()
        for crowd, first, end in zip(crowds, bounds, bounds[1:], strict=False):
            crowd.tell(kind=kind, port=store.port, first=first, end=end, ranks=ranks)
        answers = [crowd.answer(TIMEOUT_S + READY_S) for crowd in crowds]
        ready_s = time.monotonic() - began
        measured = Measured(
            ready_s=ready_s,
            store_s=cpu_s(store.pid) - cpu_before_s,
            ranks_s=sum(answer["cpu_s"] for answer in answers),
            connections=_connections(store.pid),
            threads=len(list(Path(f"/proc/{store.pid}/task").iterdir())),
            bytes_a_rank=(resident_bytes(store.pid) - before) / ranks,
        )
        for crowd in crowds:
            crowd.ask(READY_S, end=True)
        return measured


def _connections(pid: int) -> int:
    fds = Path(f"/proc/{pid}/fd").iterdir()
    own = 3  # It listens, and is also a client of its own.
    return sum(str(fd.readlink()).startswith("socket:") for fd in fds) - own


def measure(kind: str, ranks: int, crowds: list[Asked]) -> None:
    """Measure a size with each server, by turns; a failure is printed as one line."""
    found: dict[str, list[Measured]] = {}
    for _ in range(3 if ranks <= REPEATED_UP_TO and kind != "gloo" else 1):
        for server, most in MOST_RANKS.items():
            if ranks <= most:
                try:
                    found.setdefault(server, []).append(start(kind, server, ranks, crowds))
                except TimeoutError as error:
                    emit(f"store-ranks {kind:4}  ranks={ranks:<6} {server:11}  failed: {error}")
                    return
    ready = {server: Spread.of(one.ready_s for one in all_) for server, all_ in found.items()}
    for server, all_ in found.items():
        store_s = Spread.of(one.store_s for one in all_)
        last = all_[-1]
        ratio = ready["rdzv"].median / ready[server].median
        emit(
            f"store-ranks {kind:4}  ranks={ranks:<6} {server:11}"
            f"  ready {ready[server].median:7.3f} s  store {store_s.median:7.3f} s CPU"
            f"  ranks {last.ranks_s:7.3f} s CPU"
            f"  connections {last.connections}  threads {last.threads}"
            f"  {last.bytes_a_rank / 1000:.1f} kB a rank  rdzv / this x{ratio:.2f}",
            bench="store-ranks",
            kind=kind,
            ranks=ranks,
            server=server,
            ratio=ratio,
            load=load(),
            **last._asdict() | {"ready_s": ready[server].as_json(), "store_s": store_s.as_json()},
        )


def main() -> None:
    """Serve, play, or measure."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if sys.argv[1:2] == ["serve"]:
        serve_as_torch(sys.argv[2])
        return
    if sys.argv[1:] == ["play"]:
        play_all()
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="nccl,lazy,gloo", help="what the ranks do, with commas")
    parser.add_argument("--ranks", help="numbers of ranks, with commas; some take minutes of gloo")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    chosen = parser.parse_args()
    end_on_sigterm()
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-bench-"))
        say_conditions("store-ranks", Path(temporary))
        stack.enter_context(emitting_to(chosen.out))
        for kind in chosen.kinds.split(","):
            sizes = GLOO_RANKS if kind == "gloo" else RANKS
            for ranks in map(int, chosen.ranks.split(",")) if chosen.ranks else sizes:
                with contextlib.ExitStack() as playing:
                    asked = [Asked.running(Path(__file__), "play") for _ in range(CROWDS)]
                    measure(kind, ranks, [playing.enter_context(crowd) for crowd in asked])


if __name__ == "__main__":
    main()

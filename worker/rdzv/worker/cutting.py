"""Interrupts a round's collectives, for each of torch's backends; detects those that gloo lost.

The addresses of gloo's ranks are recorded as they pass through the round's store.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rounds import RoundOver

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


Address = tuple[str, int]


class RoundCut:
    """The cut of a round's collectives. It is a state, not an event.

    From the first `cut` until the worker has parked, no new group can be created, and `cut` is
    called repeatedly to catch late connections.
    """

    def __init__(self) -> None:
        self._backends: list[GlooCut | NcclCut] = []
        self._lock = threading.Lock()
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def add(self, backend: GlooCut | NcclCut) -> None:
        with self._lock:
            self._backends.append(backend)
            if self._is_cut:
                backend.cut()

    def is_done(self) -> bool:
        """Return whether all backends are cut, after a cut in progress."""
        with self._lock:
            return self._is_cut

    def cut(self) -> None:
        """Interrupt all collectives in progress. May be called from any thread."""
        with self._lock:
            self._is_cut = True
            for backend in self._backends:
                backend.cut()

    def release(self, *, over: bool) -> None:
        """End the cut, once the round's groups are destroyed.

        If the round is not `over`, peers must see their connections close.
        """
        with self._lock:
            for backend in self._backends:
                if isinstance(backend, GlooCut):
                    backend.release(over=over)
            self._backends = []

    def refuse(self) -> None:
        if self._is_cut:
            raise RoundOver


class GlooCut:
    """Shuts down gloo's connections, because gloo has no abort that unblocks waiters.

    The connections are found by the addresses that the round's groups have published in its store.
    The connection to the store itself is also shut down, because a rank may be waiting there for
    others.

    When a connection fails, gloo loses track of the operation that it has begun to send or receive,
    waits for it until its timeout, and fails all others. A write fails as soon as the peer's end is
    closed. So no end is closed before all ranks are cut: connections are shut down for reading
    only, and the runner holds duplicates of them, even a dead rank's, until the next round.
    Connections that the runner does not hold are kept open here until this rank has left its
    collectives.
    """

    def __init__(self, store: set[Address]) -> None:
        self._store = store
        self.published: set[Address] = set()
        """The addresses of all ranks in the round's gloo groups."""
        self.own: list[tuple[Address, list[bytes]]] = []
        """The addresses at which this rank listens, each with the ids that its peers send."""
        self._held: dict[int, socket.socket] = {}
        self._knocked = 0
        self._handed_over: set[int] = set()
        """The inodes of the connections that the runner holds."""
        self._known = 0
        """The number of addresses that had been published at the last `hand_over`."""
        self._succeeded: dict[str, int] = {}
        """The last collective of each group that is known to have succeeded."""
        self._is_cut = False
        self._groups: set[str] | None = None
        self._connections: dict[int, int] = {}
        """The connections of these groups: the inodes, by descriptor."""

    @property
    def addresses(self) -> set[Address]:
        return self._store | set(self.published)

    def note(self, value: Any, *, own: bool = False) -> None:
        """Record a value that has passed through the store, if it is an address of gloo's."""
        found = parse(value.encode() if isinstance(value, str) else bytes(value))
        if found is not None:
            self.published.add(found[0])
            if own:
                self.own.append(found)

    def cut(self) -> None:
        if not self._is_cut:
            self._is_cut = True
            if not (_groups() == self._groups and any_ended(self._connections)):
                self._note_succeeded("last_completed_collective")
        stop_reading(self.addresses, self._held)
        # A rank may also be waiting for a peer to connect, when there is nothing to shut down yet.
        # It is sent a connection that is reset at once. Ids that it is not waiting for have no
        # effect.
        own = list(self.own)
        for address, ids in own[self._knocked :]:
            for peer in ids:
                knock(address, peer)
        self._knocked = len(own)

    def is_broken(self) -> bool:
        """Return whether a connection has ended, so that collectives of its group fail.

        Only one thread may call it.
        """
        groups = _groups()
        if groups != self._groups:
            # A destroyed group has closed its connections itself.
            self._groups = groups
            self._connections = inodes(set(self.published))
        return self._is_cut or any_ended(self._connections)

    def begin(self) -> None:
        """Note the round's groups, all connected by now, and torch's record of earlier ones."""
        # A listener that is kept would keep the connection of a knock that it does not wait for.
        self._knocked = len(self.own)
        self.is_broken()  # From here on, it sees which connections end.
        self._succeeded = _collectives("last_enqueued_collective")

    def note_success(self) -> None:
        """Note that all earlier collectives have succeeded, as no connection has ended."""
        self._note_succeeded("last_enqueued_collective")

    def has_begun_another(self) -> bool:
        begun = _collectives("last_enqueued_collective")
        return any(number > self._succeeded.get(group, 0) for group, number in begun.items())

    def _note_succeeded(self, which: str) -> None:
        for group, number in _collectives(which).items():
            self._succeeded[group] = max(number, self._succeeded.get(group, 0))

    def hand_over(self, hold_open: Callable[[list[int]], bool]) -> None:
        """Have the runner hold the connections made since the last call, unless there are too many.

        A rank has about as many connections as there are published addresses.
        """
        known = len(self.published)
        if known == self._known:
            return
        self._known = known
        if known > most_held():
            return
        found = duplicates(set(self.published), self._handed_over)
        if hold_open([connection.fileno() for connection in found.values()]):
            self._handed_over |= found.keys()
        for connection in found.values():
            connection.close()

    def release(self, *, over: bool) -> None:
        let_go(self._held, self._handed_over if over else ())


def most_held() -> int:
    """Return the maximum number of one worker's connections that the runner may hold.

    The kernel counts the descriptors in transit through the sockets of all of a user's processes.
    Above RLIMIT_NOFILE, no process without CAP_SYS_RESOURCE can pass another descriptor: a data
    loader cannot pass its tensors, nor the runner its log files. All workers on a node together
    take at most a quarter of the limit, because the connections of dead workers are held along with
    those of their successors.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft // 4 // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _groups() -> set[str]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return set() if c10d is None else {str(one) for one in list(c10d._world.pg_names.values())}


def _collectives(which: str) -> dict[str, int]:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    status = {} if dump is None else json.loads(dump(includeCollectives=False)).get("pg_status", {})
    return {group: int(one[which]) for group, one in status.items()}


class NcclCut:
    """Has torch abort all NCCL groups together, because aborting them one by one deadlocks."""

    def __init__(self) -> None:
        self.aborted: list[weakref.ref[Any]] = []
        """The groups that were aborted and that torch no longer tracks."""

    def cut(self) -> None:
        import torch.distributed.distributed_c10d as c10d

        used = any("nccl" in str(one) for one in list(c10d._world.pg_backend_config.values()))
        if used and not self.aborted:
            self.aborted = [weakref.ref(group) for group in list(c10d._world.pg_map)]
            c10d._abort_process_group()


_SOCKADDR_BYTES = 128
"""Size of `struct sockaddr_storage`, with which an address begins."""


def parse(value: bytes) -> tuple[Address, list[bytes]] | None:
    """Parse a value that a rank has published: its address, and an 8-byte id for each peer.

    The host's name and a `sockaddr_storage` with a number, each preceded by its 8-byte length, and
    then the ids. Returns None for any other value.
    """
    try:
        (name_bytes,) = struct.unpack_from("<Q", value)
        (address_bytes,) = struct.unpack_from("<Q", value, 8 + name_bytes)
        if address_bytes != _SOCKADDR_BYTES + 8:
            return None
        start = 16 + name_bytes
        (family,) = struct.unpack_from("<H", value, start)
        (port,) = struct.unpack_from(">H", value, start + 2)
    except (struct.error, OverflowError):
        return None
    rest = value[start + address_bytes :]
    if port == 0 or len(rest) % 8:
        return None
    if family == socket.AF_INET:
        host = socket.inet_ntop(family, value[start + 4 : start + 8])
    elif family == socket.AF_INET6:
        host = socket.inet_ntop(family, value[start + 8 : start + 24])
    else:
        return None
    return plain((host, port)), [rest[i : i + 8] for i in range(0, len(rest), 8)]


def recording_store(inner: Store, gloo: GlooCut, refuse: Callable[[], None]) -> Store:
    """Return a store that shows to `gloo` what passes through it to `inner`.

    `refuse` raises once the round is cut, so that no new group can be created. The store must live
    as long as the groups that use it.
    """
    store: Store = _store_class()()
    store.enter(inner, gloo, refuse)  # type: ignore[attr-defined]
    return store


@functools.cache
def _store_class() -> Any:
    # The base class is torch's, and this module must be importable without torch.
    from torch._C._distributed_c10d import Store

    class RecordingStore(Store):
        def enter(self, inner: Any, gloo: GlooCut, refuse: Callable[[], None]) -> None:
            """Go on with a round's store. A group that is kept has one store for all its rounds."""
            self._inner, self._gloo, self._refuse = inner, gloo, refuse

        def set(self, key: str, value: Any) -> None:
            self._refuse()
            self._gloo.note(value, own=True)
            self._inner.set(key, value)

        def get(self, key: str) -> bytes:
            return self.multi_get([key])[0]

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self._refuse()
            values: list[bytes] = self._inner.multi_get(keys)
            for value in values:
                self._gloo.note(value)
            return values

        def multi_set(self, keys: list[str], values: Any) -> None:
            self._refuse()
            for value in values:
                self._gloo.note(value, own=True)
            self._inner.multi_set(keys, values)

        def has_extended_api(self) -> bool:
            return True

        def clone(self) -> Any:
            return recording_store(self._inner.clone(), self._gloo, self._refuse)

    for name in (
        *("add", "append", "check", "compare_set", "delete_key", "num_keys", "wait"),
        *("queue_push", "queue_pop", "queue_len", "list_keys", "set_timeout"),
    ):
        if hasattr(Store, name):
            setattr(RecordingStore, name, _forwarded(name))
    return RecordingStore


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self._refuse()
        return getattr(self._inner, name)(*args)

    method.__name__ = name
    return method


LOST_AFTER_S = 1.0
"""How long the main thread must have been idle. A collective that is cut ends within 0.1 s."""

_WAITS_IN = (
    *("/torch/autograd/", "/torch/distributed/", "/torch/nn/parallel/"),
    *("/rdzv/worker/groups.py", "/rdzv/worker/healing.py"),
)
"""Path fragments that identify the innermost frame when the main thread is waiting for gloo."""


class LostWait:
    """Checks the main thread repeatedly, from another thread, after a round has been cut."""

    def __init__(self) -> None:
        self._used: tuple[str, str] | None = None
        self._since_s = 0.0

    def place(self) -> str:
        """Return where the main thread waits in vain, as FILE:LINE, or "" if it does not.

        With CUDA it is always empty, because waiting for a backward pass uses no CPU time, either.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return ""
        used, now_s = cpu_ticks(), time.monotonic()
        if used != self._used:
            self._used, self._since_s = used, now_s
        if now_s - self._since_s < LOST_AFTER_S:
            return ""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return ""
        file = frame.f_code.co_filename
        return f"{file}:{frame.f_lineno}" if any(part in file for part in _WAITS_IN) else ""


def cpu_ticks() -> tuple[str, str]:
    pid = os.getpid()
    stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return fields[11], fields[12]


# ------------------------------------------------------------------ this process's connections


def stop_reading(addresses: Collection[Address], held: dict[int, socket.socket]) -> None:
    """Shut down for reading each connection with one of these addresses at either end.

    A duplicate of each is kept in `held`, by inode, so that the peer notices nothing before
    `let_go`. Without descriptors for these, the connections are shut down all the same.
    """
    for _, inode, connection in _connections(addresses):
        if inode in held:
            continue
        with contextlib.suppress(OSError):
            held[inode] = duplicate(connection)
        with contextlib.suppress(OSError):  # It has ended on its own.
            connection.shutdown(socket.SHUT_RD)


def let_go(held: dict[int, socket.socket], but: Collection[int] = ()) -> None:
    """Close the held connections; shut down all but `but` (inodes) for every holder."""
    for inode, connection in held.items():
        if inode not in but:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    held.clear()


def duplicates(
    addresses: Collection[Address], but: Collection[int] = ()
) -> dict[int, socket.socket]:
    """Return duplicates of these connections by inode, as far as there are descriptors for them."""
    found = {}
    for _, inode, connection in _connections(addresses):
        if inode not in but and inode not in found:
            with contextlib.suppress(OSError):
                found[inode] = duplicate(connection)
    return found


def inodes(addresses: Collection[Address]) -> dict[int, int]:
    return {fd: inode for fd, inode, _ in _connections(addresses)}


def any_ended(connections: Mapping[int, int]) -> bool:
    """Return whether either end has closed one of these connections (`inodes`)."""
    ends = select.poll()
    try:
        for fd, inode in connections.items():
            if os.fstat(fd).st_ino != inode:
                return True  # It was closed, and its descriptor's number is used again.
            ends.register(fd, select.POLLRDHUP)
    except OSError:
        return True
    return bool(ends.poll(0))


def drop_in_child(addresses: Collection[Address]) -> None:
    """Close these connections in a forked child without their peers noticing.

    If a child kept them open, a dead worker's peers would keep waiting for the end of the stream.
    Each descriptor is replaced with /dev/null, so that its number is not reused for another file,
    which torch's objects in the child might then close.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in inodes(addresses):
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def knock(address: Address, greeting: bytes, timeout_s: float = 0.2) -> None:
    """Connect, send a greeting and reset the connection."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout_s) as caller:
        caller.sendall(greeting)
        # The other side then reads an error, not the end of the stream.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def resolve(host: str, port: int) -> set[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {plain(entry[4]) for entry in found}


def plain(address: tuple[object, ...]) -> Address:
    """Return the host and port of a socket address, with IPv4-mapped addresses as IPv4.

    >>> plain(("::ffff:10.0.0.5", 29500, 0, 0))
    ('10.0.0.5', 29500)
    """
    host = str(address[0])
    if host.startswith("::ffff:") and "." in host:
        host = host[len("::ffff:") :]
    return host.partition("%")[0], int(str(address[1]))


def duplicate(connection: socket.socket) -> socket.socket:
    """Duplicate without socket.dup(), which would make both sockets blocking."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _connections(addresses: Collection[Address]) -> Iterator[tuple[int, int, socket.socket]]:
    """Yield descriptor, inode and a duplicate of each, which is closed before the next."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # Another thread has closed it.
        with connection:
            is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not is_ip or connection.type != socket.SOCK_STREAM:
                continue
            try:
                ends = {plain(connection.getsockname()), plain(connection.getpeername())}
            except OSError:
                continue  # It is listening, or no longer connected.
            if not ends.isdisjoint(addresses):
                yield int(name), os.fstat(connection.fileno()).st_ino, connection

"""How collectives are cut: the connections of a process, gloo's addresses, and lost waits."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.worker import cutting
from rdzv.worker.cutting import (
    LOST_AFTER_S,
    Address,
    GlooCut,
    LostWait,
    RoundCut,
    any_ended,
    drop_in_child,
    duplicates,
    inodes,
    knock,
    let_go,
    parse,
    stop_reading,
)
from rdzv.worker.groups import RoundGroups
from rdzv.worker.session import Session
from rdzv.worker.session import drop_in_child as drop_in_child_of


def gloo_cut(*published: Address) -> GlooCut:
    cut = GlooCut(set())
    cut.published.update(published)
    return cut


class Connection:
    """Both ends of a connection."""

    def __init__(self, listener: socket.socket) -> None:
        self.ours = socket.create_connection(listener.getsockname())
        self.theirs, _ = listener.accept()
        for end in (self.ours, self.theirs):
            end.settimeout(60)

    @property
    def address(self) -> Address:
        host, port = self.ours.getsockname()
        return host, port

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(60)
        yield made


@pytest.fixture
def connections(listener: socket.socket) -> Iterator[list[Connection]]:
    made = [Connection(listener), Connection(listener)]
    yield made
    for one in made:
        one.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_the_end_of_a_connection_is_seen_whoever_closes_it(connections: list[Connection]) -> None:
    one, other = connections
    by_peer, by_us = inodes({one.address}), inodes({other.address})
    assert len(by_peer) == 2 and not any_ended(by_peer | by_us)
    one.theirs.sendall(b"x")  # Data that nobody has read yet is no end.
    assert not any_ended(by_peer)
    one.theirs.close()
    assert any_ended({one.ours.fileno(): by_peer[one.ours.fileno()]})
    ours = other.ours.fileno()
    of_ours = {ours: by_us[ours]}
    other.ours.close()
    assert any_ended(of_ours)
    # Gloo's thread may open something else in its place.
    null = os.open(os.devnull, os.O_RDWR)
    if null != ours:
        os.dup2(null, ours)
        os.close(null)
    assert any_ended(of_ours)
    os.close(ours)


class Backend:
    def __init__(self) -> None:
        self.cuts = 0

    def cut(self) -> None:
        self.cuts += 1

    def release(self, *, over: bool) -> None:
        pass


def test_what_is_added_to_a_cut_round_is_cut_at_once() -> None:
    cut = RoundCut()
    before, after = Backend(), Backend()
    cut.add(before)
    assert (before.cuts, cut.is_done()) == (0, False)
    cut.cut()
    assert (before.cuts, cut.is_done()) == (1, True)
    cut.add(after)
    assert (before.cuts, after.cuts) == (1, 1)
    cut.cut()
    assert (before.cuts, after.cuts) == (2, 2)


@pytest.mark.parametrize("ends_before_the_cut", [False, True])
def test_a_collective_has_succeeded_if_it_ended_before_its_connections(
    connections: list[Connection], monkeypatch: pytest.MonkeyPatch, ends_before_the_cut: bool
) -> None:
    record = {"0": (5, 6)}  # A group of an earlier round, which timed out.

    def dump(includeCollectives: bool) -> bytes:  # noqa: N803
        names = "last_completed_collective", "last_enqueued_collective"
        status = {
            group: dict(zip(names, map(str, one), strict=True)) for group, one in record.items()
        }
        return json.dumps({"pg_status": status}).encode()

    c10d = SimpleNamespace(_dump_fr_trace_json=dump)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", c10d)
    cut = gloo_cut(connections[0].address)
    cut.begin()
    assert not cut.has_begun_another()
    record["1"] = (2, 2)
    assert not cut.is_broken()
    assert cut.has_begun_another()
    cut.note_success()
    assert not cut.has_begun_another()
    record["1"] = (2, 3)
    assert cut.has_begun_another()
    record["1"] = (3, 3)
    if ends_before_the_cut:
        connections[0].theirs.close()
        assert cut.is_broken()
    cut.cut()
    assert cut.is_broken()
    assert cut.has_begun_another() == ends_before_the_cut
    # It ends because it is cut.
    record["1"] = (4, 4)
    cut.cut()
    assert cut.has_begun_another()
    cut.release(over=True)


def test_a_connection_that_is_stopped_reads_its_end_and_its_peer_hears_nothing_yet(
    connections: list[Connection],
) -> None:
    one, other = connections
    held: dict[int, socket.socket] = {}
    before = open_files()
    one.ours.setblocking(False)
    # Both ends belong to this process, and each has the address; a held connection is held once.
    stop_reading({one.address}, held)
    stop_reading({one.address}, held)
    assert len(held) == 2
    assert open_files() == before + 2
    assert not os.get_blocking(one.ours.fileno())
    assert one.ours.recv(1) == b""
    one.ours.sendall(b"still heard")
    other.ours.sendall(b"x")
    assert other.theirs.recv(1) == b"x"
    let_go(held)
    assert not held
    assert open_files() == before
    with pytest.raises(BrokenPipeError):
        one.ours.sendall(b"x")


def test_connections_end_though_no_descriptors_are_left_to_hold_them(
    connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hundreds of ranks, duplicates of all connections may exceed the limit."""

    def duplicate(connection: socket.socket) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cutting, "duplicate", duplicate)
    one, _ = connections
    held: dict[int, socket.socket] = {}
    assert not duplicates({one.address})
    stop_reading({one.address}, held)
    assert not held
    assert one.ours.recv(1) == b""


@pytest.mark.parametrize("over", [True, False])
def test_connections_that_the_runner_holds_end_for_peers_when_it_lets_go(
    connections: list[Connection], over: bool
) -> None:
    """Unless this rank alone leaves the round: then its peers have to see it."""
    one, other = connections
    held = list[int]()

    def hold_open(fds: list[int]) -> bool:
        held.extend(map(os.dup, fds))
        return True

    cut = gloo_cut(one.address)
    cut.hand_over(hold_open)
    cut.hand_over(hold_open)
    assert len(held) == 2
    # A group that the script has made since.
    cut.published.add(other.address)
    cut.hand_over(hold_open)
    assert len(held) == 4
    before = open_files()
    cut.cut()
    assert one.theirs.recv(1) == b""
    one.theirs.close()
    cut.release(over=over)
    assert open_files() == before - 1
    if over:
        one.ours.sendall(b"still accepted")
    else:
        with pytest.raises(BrokenPipeError):
            one.ours.sendall(b"x")
    for fd in held:
        os.close(fd)


def test_connections_are_held_here_if_the_runner_has_no_place(
    connections: list[Connection],
) -> None:
    one, _ = connections
    cut = gloo_cut(one.address)
    before = open_files()
    cut.hand_over(lambda fds: False)
    assert open_files() == before
    cut.cut()
    cut.release(over=True)
    with pytest.raises(BrokenPipeError):
        one.ours.sendall(b"x")


@pytest.mark.parametrize(("addresses", "is_held"), [(32, True), (33, False)])
def test_all_workers_of_a_node_have_at_most_a_quarter_of_their_users_descriptors_held(
    monkeypatch: pytest.MonkeyPatch, addresses: int, is_held: bool
) -> None:
    """More in the queues of a user's sockets than its limit, and no loader can pass a tensor."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    asked: list[list[int]] = []
    published = [("127.0.0.1", port) for port in range(1, addresses + 1)]
    gloo_cut(*published).hand_over(lambda fds: not asked.append(fds))
    assert bool(asked) is is_held


def test_a_child_keeps_the_numbers_and_not_the_connections(connections: list[Connection]) -> None:
    one, other = connections
    number, before = one.ours.fileno(), open_files()
    drop_in_child({one.address})
    assert open_files() == before
    assert os.readlink(f"/proc/self/fd/{number}") == "/dev/null"  # noqa: PTH115
    assert not os.get_inheritable(number)
    other.ours.sendall(b"x")
    assert other.theirs.recv(1) == b"x"


def test_a_fork_of_a_worker_lets_go_of_its_rounds_connections(
    connections: list[Connection],
) -> None:
    """Otherwise the peers of a dead worker would wait for as long as its fork lives."""
    one, other = connections
    number = one.ours.fileno()
    groups = RoundGroups.__new__(RoundGroups)
    session = Session.__new__(Session)
    session.groups = groups
    groups.gloo = None
    drop_in_child_of(weakref.ref(session))
    groups.gloo = GlooCut({one.address})
    drop_in_child_of(weakref.ref(session))
    assert os.readlink(f"/proc/self/fd/{number}") == "/dev/null"  # noqa: PTH115
    other.ours.sendall(b"x")
    assert other.theirs.recv(1) == b"x"


def test_whoever_waits_for_a_caller_gets_a_greeting_and_an_error(listener: socket.socket) -> None:
    knock(listener.getsockname(), b"hello")
    caller, _ = listener.accept()
    with caller:
        caller.settimeout(60)
        assert caller.recv(5) == b"hello"
        with pytest.raises(ConnectionResetError):
            caller.recv(1)


# ------------------------------------------------------------------ gloo's addresses

V4 = struct.pack("<H", socket.AF_INET) + struct.pack(">H", 29500) + bytes([10, 0, 0, 5])
V6 = struct.pack("<H", socket.AF_INET6) + struct.pack(">HI", 29500, 0) + bytes(15) + b"\x01"
IDS = [b"peer-one", b"peer-two"]


def published(address: bytes, ids: list[bytes], host: bytes = b"node-1") -> bytes:
    storage = address.ljust(128, b"\0") + struct.pack("<Q", 7)
    parts = struct.pack("<Q", len(host)), host, struct.pack("<Q", len(storage)), storage, *ids
    return b"".join(parts)


@pytest.mark.parametrize(("address", "host"), [(V4, "10.0.0.5"), (V6, "::1")], ids=["4", "6"])
@pytest.mark.parametrize("ids", [[], IDS[:1], IDS], ids=len)
@pytest.mark.parametrize("name", [b"", b"node-1.example.org"])
def test_address_and_ids_are_read(address: bytes, host: str, ids: list[bytes], name: bytes) -> None:
    assert parse(published(address, ids, name)) == ((host, 29500), ids)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"all returned",
        published(V4, IDS)[:-1],
        published(V4[:2] + b"\0\0" + V4[4:], IDS),
        published(b"\x01\0" + V4[2:], IDS),
        struct.pack("<Q", 1 << 63) + published(V4, IDS),
        struct.pack("<QQ", 0, 64) + V4.ljust(64, b"\0"),
    ],
    ids=["nothing", "a word", "cut off", "no port", "a socket of Unix", "too long", "too short"],
)
def test_everything_else_is_left_alone(value: bytes) -> None:
    assert parse(value) is None
    cut = gloo_cut()
    cut.note(value, own=True)
    assert not cut.published and not cut.own


def test_ids_are_kept_of_the_own_address_alone() -> None:
    noted = gloo_cut()
    noted.note(published(V4, IDS), own=True)
    noted.note(published(V6, IDS))
    assert noted.published == {("10.0.0.5", 29500), ("::1", 29500)}
    assert noted.own == [(("10.0.0.5", 29500), IDS)]


# ------------------------------------------------------------------ lost waits

BACKWARD = "/venv/torch/autograd/graph.py"
BUFFERS = "/venv/torch/nn/parallel/distributed.py"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The main thread: in `file`, having used `ticks`, at `now_s`."""
    at = SimpleNamespace(file=BACKWARD, ticks=5, now_s=100.0, cuda=False)
    code = SimpleNamespace(f_lineno=979)

    def frames() -> dict[int | None, Any]:
        code.f_code = SimpleNamespace(co_filename=at.file)
        return {threading.main_thread().ident: code}

    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: at.cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cutting.sys, "_current_frames", frames)
    monkeypatch.setattr(cutting, "cpu_ticks", lambda: (str(at.ticks), "0"))
    monkeypatch.setattr(cutting.time, "monotonic", lambda: at.now_s)
    return at


@pytest.mark.parametrize("file", [BACKWARD, BUFFERS])
def test_a_thread_that_does_nothing_in_a_collective_of_ddp_waits_in_vain(
    main: SimpleNamespace, file: str
) -> None:
    main.file = file
    wait = LostWait()
    assert wait.place() == ""
    main.now_s += LOST_AFTER_S / 2
    assert wait.place() == ""
    main.now_s += LOST_AFTER_S / 2
    assert wait.place() == f"{file}:979"


def test_a_thread_that_computes_does_not(main: SimpleNamespace) -> None:
    wait = LostWait()
    for _ in range(5):
        main.now_s += LOST_AFTER_S * 0.9
        main.ticks += 1
        assert wait.place() == ""


@pytest.mark.parametrize("file", ["/home/ada/train.py", "/venv/torch/utils/data/dataloader.py"])
def test_nor_does_one_that_waits_for_anything_else(main: SimpleNamespace, file: str) -> None:
    wait = LostWait()
    main.file = file
    for _ in range(5):
        assert wait.place() == ""
        main.now_s += LOST_AFTER_S


def test_nor_one_that_may_wait_for_a_gpu(main: SimpleNamespace) -> None:
    wait = LostWait()
    main.cuda = True
    for _ in range(5):
        assert wait.place() == ""
        main.now_s += LOST_AFTER_S


def test_the_kernel_tells_the_cpu_time_of_this_process() -> None:
    user, system = cutting.cpu_ticks()
    assert int(user) + int(system) >= 0

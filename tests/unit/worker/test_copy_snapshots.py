"""Copies of snapshots: two real processes, and peers that lie, stall or know no token."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ports import ports_of

from rdzv.agent.job.snapshots import certified
from rdzv.worker import copy_snapshots as carrier
from rdzv.worker.slot_format import SEAL_BYTES, digest_of_seal

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
CONTENT_AT = 64 << 10
SIZE = CONTENT_AT + 3 * carrier.PIECE_BYTES + 12_345


def snapshot(step: int = 40, size: int = SIZE) -> bytearray:
    """A slot with a snapshot; the carrier does not look into it."""
    return bytearray(random.Random(step).randbytes(size))


def asked(step: int = 40, size: int = SIZE) -> dict[str, Any]:
    """What a fetch of it names."""
    digest = digest_of_seal(snapshot(step, size)[:SEAL_BYTES])
    mark = {"lineage": 2, "step": step, "series": "a", "shards": 2}
    return {"mark": mark, "shard": 1, "digest": digest, "bytes": size}


def has_seal(content: bytes | bytearray) -> bool:
    return any(content[:SEAL_BYTES])


def memory(content: bytes | int) -> int:
    """A memfd with this content, or of this size."""
    fd = os.memfd_create("test")
    if isinstance(content, int):
        os.ftruncate(fd, content)
    else:
        os.write(fd, content)
    return fd


def held_in(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


class Program:
    """A carrier, and the runner's end of its socket."""

    def __init__(self, *options: str) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(PATIENCE_S)
        command = [
            sys.executable,
            "-m",
            "rdzv.worker.copy_snapshots",
            "--fd",
            str(theirs.fileno()),
            *options,
        ]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._numbers = itertools.count(1)

    def trust(self, token: str = "secret", pem: str = "") -> Program:
        """Give it credentials, and wait until it uses them."""
        self.send({"type": "credentials", "token": token, "pem": pem})
        listening = self.hear()
        self.port = listening.pop("port")
        assert listening == {"type": "listening", "token": token}
        return self

    def send(self, message: dict[str, Any], *fds: int) -> None:
        payload = json.dumps({**message, "fds": len(fds)}).encode()
        socket.send_fds(self.control, [struct.pack(">I", len(payload)) + payload], fds)

    def hear(self) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self.control.recv(4, socket.MSG_WAITALL))
        heard: dict[str, Any] = json.loads(self.control.recv(length, socket.MSG_WAITALL))
        return heard

    def hold(self, *slots: bytes) -> list[int]:
        fds = [memory(slot) for slot in slots]
        self.send({"type": "slots", "local_rank": 0, "bytes": len(slots[0])}, *fds)
        return fds

    def fetch(
        self, port: int, *wanted: dict[str, Any], token: str = "secret", fingerprint: str = ""
    ) -> list[int]:
        """Begin to fetch; return the memory for it."""
        fds = [memory(one["bytes"] + 100) for one in wanted]
        source = {"node_id": "n1", "address": "127.0.0.1", "port": port, "token": token}
        source["fingerprint"] = fingerprint
        sources = [{**source, "snapshots": list(wanted)}]
        self.send({"type": "fetch", "id": next(self._numbers), "sources": sources}, *fds)
        return fds

    def ends_with(self) -> str:
        """Return why nothing more is fetched; empty if all is there."""
        while (heard := self.hear())["type"] != "done":
            pass
        return str(heard["reason"])

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pair() -> Iterator[tuple[Program, Program]]:
    one, two = Program().trust(), Program().trust()
    yield one, two
    one.close()
    two.close()


def seal_of(fd: int) -> bytes:
    return os.pread(fd, SEAL_BYTES, 0)


def test_what_is_held_there_is_here_bit_for_bit(pair: tuple[Program, Program]) -> None:
    one, two = pair
    slots = snapshot(40), snapshot(50)
    one.hold(*slots)
    fds = two.fetch(one.port, asked(50), asked(40))
    assert [two.hear() for _ in range(3)] == [
        {"type": "fetched", "id": 1, "number": 0},
        {"type": "fetched", "id": 1, "number": 1},
        {"type": "done", "id": 1, "reason": ""},
    ]
    assert [held_in(fd)[:SIZE] for fd in fds] == [slots[1], slots[0]]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (asked(41), "n1: it does not hold part 1 of step 41 any more"),
        ({"digest": "another"}, "n1: it does not hold part 1 of step 40 any more"),
        ({"bytes": 2 * SIZE}, "n1: it does not hold part 1 of step 40 any more"),
    ],
)
def test_only_what_was_reported_is_sent(
    pair: tuple[Program, Program], other: dict[str, Any], reason: str
) -> None:
    one, two = pair
    one.hold(snapshot(40), snapshot(50))
    (fd,) = two.fetch(one.port, {**asked(40), **other})
    assert two.ends_with() == reason
    assert seal_of(fd) == bytes(SEAL_BYTES)


def test_who_does_not_know_the_token_gets_nothing(pair: tuple[Program, Program]) -> None:
    one, two = pair
    one.hold(snapshot(40), snapshot(50))
    (fd,) = two.fetch(one.port, asked(40), token="another")
    assert two.ends_with() == "n1: the other side closed the connection"
    assert held_in(fd) == bytes(SIZE + 100)
    # That of an earlier round is worth nothing, either.
    one.trust("of the next round")
    two.fetch(one.port, asked(40))
    assert two.ends_with() == "n1: the other side closed the connection"
    two.fetch(one.port, asked(40), token="of the next round")
    assert two.ends_with() == ""


def test_a_peer_that_comes_before_the_credentials_is_served_once_these_are_there() -> None:
    """It may know them already, and expect TLS."""
    one = Program()
    try:
        end = time.monotonic() + PATIENCE_S
        while not (ports := ports_of(one.process.pid)):
            assert time.monotonic() < end
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", ports[0]), PATIENCE_S) as peer:
            assert select.select([peer], [], [], 0.2)[0] == []
            fingerprint, pem = certified()
            one.trust("secret", pem)
            with carrier.encrypt(peer, fingerprint) as encrypted:
                assert carrier.greet_sender(encrypted, "secret")
    finally:
        one.close()


def test_a_carrier_ends_with_its_runner_whoever_is_connected() -> None:
    one = Program().trust()
    try:
        with socket.create_connection(("127.0.0.1", one.port)) as peer:
            assert peer.recv(1)  # It is being served.
            one.control.close()
            assert one.process.wait(carrier.STALL_TIMEOUT_S / 2) == 0
    finally:
        one.close()


def test_a_killed_sender_is_given_up(pair: tuple[Program, Program]) -> None:
    one, two = pair
    port = one.port
    one.close()
    two.fetch(port, asked(40))
    assert two.ends_with() == "n1: Connection refused"


def test_a_newer_fetch_ends_the_one_before() -> None:
    slow, two = Program("--rate=100000").trust(), Program().trust()
    try:
        slow.hold(snapshot(40), snapshot(50))
        two.fetch(slow.port, asked(40))
        time.sleep(0.2)
        two.fetch(slow.port, asked(51))
        ends = [two.hear(), two.hear()]
        assert [(end["type"], end["id"]) for end in ends] == [("done", 1), ("done", 2)]
    finally:
        slow.close()
        two.close()


# ---------------------------------------------------------------- peers that lie


class Peer:
    """A sender in this process whose bytes go through a function."""

    def __init__(self, slot: bytes, change: Any = None) -> None:
        sender = carrier.Sender(carrier.TokenBucket(0))
        sender.token = "secret"
        self.slot = memory(slot)
        sender.slots[0] = [carrier.mapped(os.dup(self.slot), len(slot))]
        ours, self.socket = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self.socket.settimeout(PATIENCE_S)
        wrapped = ours if change is None else Changed(ours, change)
        self.thread = threading.Thread(target=self.send, args=(sender, wrapped), daemon=True)
        self.thread.start()

    def send(self, sender: carrier.Sender, sock: Any) -> None:
        try:
            sender.serve(sock)
        except (carrier.CopyError, OSError, ValueError):
            pass
        finally:
            sock.close()

    def fetched(self, wanted: dict[str, Any], within_s: float = PATIENCE_S) -> bytes:
        into = bytearray(wanted["bytes"] + 7)
        into[:SEAL_BYTES] = snapshot(30)[:SEAL_BYTES]  # Of the copy before.
        try:
            key = carrier.greet_sender(self.socket, "secret")
            until = time.monotonic() + within_s
            carrier.fetch(self.socket, wanted, memoryview(into), key, until)
        finally:
            self.socket.close()
            self.thread.join(PATIENCE_S)
            self.left = bytes(into)
        return self.left


class Changed:
    """A socket whose sent bytes are changed by a function of their place in the stream."""

    def __init__(self, sock: socket.socket, change: Any) -> None:
        self._socket, self._change, self._at = sock, change, 0

    def sendall(self, data: bytes) -> None:
        changed = self._change(self._at, bytearray(data))
        self._at += len(data)
        self._socket.sendall(changed)

    def recv_into(self, into: memoryview) -> int:
        return self._socket.recv_into(into)

    def close(self) -> None:
        self._socket.close()


BEFORE_CONTENT = carrier.GREETING.size + 32 + carrier.LENGTH.size
SMALL = CONTENT_AT + 5_000


def flipped(at: int) -> Any:
    """Flip one bit of the stream."""

    def change(begin: int, data: bytearray) -> bytearray:
        if begin <= at // 8 < begin + len(data):
            data[at // 8 - begin] ^= 1 << at % 8
        return data

    return change


def test_every_flipped_bit_is_found() -> None:
    stream_bits = 8 * (BEFORE_CONTENT + SMALL + 32)
    slot, chance = bytes(snapshot(size=SMALL)), random.Random(0)
    for _ in range(100):
        at = chance.randrange(8 * carrier.GREETING.size, stream_bits)
        peer = Peer(slot, flipped(at))
        with pytest.raises(carrier.CopyError):
            peer.fetched(asked(size=SMALL))
        assert not has_seal(peer.left) or at < 8 * BEFORE_CONTENT


@pytest.mark.parametrize("cut", [0, 10, carrier.GREETING.size, BEFORE_CONTENT, SMALL // 2, SMALL])
def test_a_stream_that_is_cut_off_leaves_nothing(cut: int) -> None:
    def change(begin: int, data: bytearray) -> bytearray:
        if begin + len(data) > cut:
            raise OSError("cut")
        return data

    peer = Peer(bytes(snapshot(size=SMALL)), change)
    with pytest.raises((carrier.CopyError, OSError)):
        peer.fetched(asked(size=SMALL))


def test_a_slot_that_is_overwritten_on_the_way_is_not_taken() -> None:
    def change(begin: int, data: bytearray) -> bytearray:
        if begin > BEFORE_CONTENT - 1:
            os.pwrite(peer.slot, bytes(SEAL_BYTES), 0)
        return data

    peer = Peer(bytes(snapshot(size=SMALL)), change)
    with pytest.raises(carrier.CopyError, match="was overwritten while it was being sent"):
        peer.fetched(asked(size=SMALL))
    assert not has_seal(peer.left)


def test_a_peer_that_sends_too_slowly_is_given_up() -> None:
    peer = Peer(bytes(snapshot(size=SMALL)))
    with pytest.raises(carrier.CopyError, match="it takes too long"):
        peer.fetched(asked(size=SMALL), within_s=-1.0)


@pytest.mark.quick
@pytest.mark.parametrize("size", [SMALL - 1, SMALL + 1])
def test_a_peer_that_sends_another_size_is_refused(size: int) -> None:
    ours, theirs = socket.socketpair()
    until = time.monotonic() + PATIENCE_S
    with ours, theirs:
        ours.sendall(carrier.LENGTH.pack(size))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(carrier.CopyError, match=f"has {size} bytes, not {SMALL} as reported"):
            carrier.fetch(theirs, asked(size=SMALL), memoryview(bytearray(SMALL)), b"k", until)


@pytest.mark.quick
def test_a_stranger_at_the_address_is_told_from_a_carrier() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40))
        with pytest.raises(carrier.CopyError, match="is not a snapshot carrier"):
            carrier.greet_sender(theirs, "secret")


@pytest.mark.quick
def test_a_sender_that_does_not_know_the_token_gets_no_request() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(carrier.GREETING.pack(carrier.PROTOCOL, bytes(32)) + bytes(32))
        with pytest.raises(carrier.CopyError, match="it does not know the token"):
            carrier.greet_sender(theirs, "secret")


# ---------------------------------------------------------------- the rate


@pytest.mark.quick
def test_no_more_is_sent_than_the_rate_allows() -> None:
    now = [0.0]
    rate = 100 * carrier.PIECE_BYTES

    def sleep(seconds: float) -> None:
        now[0] += seconds

    bucket = carrier.TokenBucket(rate, lambda: now[0], sleep)
    for _ in range(1_000):
        bucket.take(carrier.PIECE_BYTES)
    # All but what may be sent at once.
    assert now[0] == pytest.approx((1_000 - 5) / 100)
    now[0] += 100
    begun = now[0]
    for _ in range(105):
        bucket.take(carrier.PIECE_BYTES)
    assert now[0] - begun == pytest.approx(1.0)


@pytest.mark.quick
def test_without_a_rate_nothing_waits() -> None:
    bucket = carrier.TokenBucket(0, lambda: 0.0, lambda _: pytest.fail("it waits"))
    bucket.take(1 << 40)

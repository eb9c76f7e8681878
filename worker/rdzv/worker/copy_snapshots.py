"""Program that sends this node's snapshots of a job to other nodes, and fetches theirs.

    python -m rdzv.worker.copy_snapshots [--rate BYTES] --fd N

The runner starts it with the job's interpreter, under the job's account. N is a socket to the
runner, with frames as in link.py. From the runner:

    credentials {token, pem}              a peer that knows the token may fetch; with a key and a
                                          certificate, over TLS. Replaces earlier credentials
    slots   {local_rank, bytes}           and two memfds, to which this node's worker saves
    fetch   {id, sources: [{node_id, address, port, token, fingerprint, snapshots: [...]}]}
                                          and a memfd for each snapshot, in order; ends an earlier
                                          fetch that is still running

To the runner:

    listening {port, token}               peers that know this token are served from now on
    fetched   {id, number}                the copy in the memfd of this number is complete
    done      {id, reason}                the fetch has ended; reason is empty if it succeeded

Peers use TCP, or TLS with the certificate whose digest was sent to the server. Each side proves
that it knows the sending node's token; the fetching side then requests one snapshot after another.
For each, the sender sends the contents, then the seal, and then a digest of both, keyed with a key
that both sides derive from the token. If the slot has been overwritten in the meantime, the seal is
replaced by zeros. The fetching side compares the seal's digest with the one reported to the server,
and writes the seal last, so a copy with a seal is exactly the snapshot that the other node
reported. The worker that loads the copy verifies its contents once more.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import mmap
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .link import BrokenLinkError, Received, encode
from .slot_format import SEAL_BYTES, digest_of_seal

GREETING = struct.Struct(">8s32s")
PROTOCOL = b"rdzvcpy1"
REQUEST = struct.Struct(">64sQ")
"""The digest of a snapshot's seal, in hexadecimal, and its size."""
LENGTH = struct.Struct(">Q")
PIECE_BYTES = 1 << 20
MAX_CONNECTIONS = 32
STALL_TIMEOUT_S = 15.0
"""How long a connection may transfer no bytes before it is closed."""
LEAST_RATE = 10_000_000
"""The transfer rate, in bytes per second, below which a transfer fails if no rate is set."""


class CopyError(Exception):
    """Raised if a snapshot cannot be copied; the message gives the reason."""


def mapped(fd: int, size: int, *, writable: bool = False) -> memoryview:
    try:
        if writable:
            # Allocate all pages now, because running out of memory later would raise SIGBUS.
            os.posix_fallocate(fd, 0, size)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return memoryview(mmap.mmap(fd, size, access=access))
    finally:
        os.close(fd)


# ---------------------------------------------------------------- rate


class TokenBucket:
    """Limits how many bytes per second all threads together may send."""

    def __init__(
        self,
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = rate
        self._most = max(rate / 20, PIECE_BYTES)
        self._clock, self._sleep = clock, sleep
        self._left, self._at = float(self._most), clock()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = self._clock()
            self._left = min(self._left + (now - self._at) * self._rate, self._most) - count
            self._at = now
            wait_s = -self._left / self._rate
        if wait_s > 0:
            self._sleep(wait_s)


# ---------------------------------------------------------------- both sides


def proof(token: str, role: str, *nonces: bytes) -> bytes:
    text = b"".join((role.encode(), *nonces))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def receive(sock: socket.socket, into: memoryview, until: float) -> None:
    while into:
        if time.monotonic() > until:
            raise CopyError("it takes too long")
        count = sock.recv_into(into)
        if not count:
            raise CopyError("the other side closed the connection")
        into = into[count:]


def received(sock: socket.socket, count: int, until: float) -> bytes:
    buffer = bytearray(count)
    receive(sock, memoryview(buffer), until)
    return bytes(buffer)


def keyed(key: bytes) -> Any:
    return hashlib.blake2b(key=key, digest_size=32)


# ---------------------------------------------------------------- the sending side


class Sender:
    """Serves the snapshots of this node's workers."""

    def __init__(self, rate: TokenBucket) -> None:
        self._rate = rate
        self.context: ssl.SSLContext | None = None
        self.token = ""
        self.slots: dict[int, Sequence[memoryview]] = {}
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def accept(self, listening: socket.socket) -> None:
        while True:
            sock, _ = listening.accept()
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(STALL_TIMEOUT_S)
            if self.context is not None:
                sock = self.context.wrap_socket(sock, server_side=True)
            self.serve(sock)
        except (OSError, ValueError, CopyError):
            pass  # The fetching side reports the failure.
        finally:
            sock.close()
            self._places.release()

    def serve(self, sock: socket.socket) -> None:
        token, nonce = self.token, os.urandom(32)
        sock.sendall(GREETING.pack(PROTOCOL, nonce))
        until = time.monotonic() + STALL_TIMEOUT_S
        theirs, said = received(sock, 32, until), received(sock, 32, until)
        if not token or not hmac.compare_digest(said, proof(token, "fetch", nonce, theirs)):
            raise CopyError("it does not know the token")
        sock.sendall(proof(token, "send", theirs, nonce))
        key = proof(token, "key", nonce, theirs)
        while True:
            until = time.monotonic() + STALL_TIMEOUT_S
            digest, size = REQUEST.unpack(received(sock, REQUEST.size, until))
            slot = self._find(digest, size)
            sock.sendall(LENGTH.pack(0 if slot is None else size))
            if slot is not None:
                self._send(sock, slot, size, key)

    def _send(self, sock: socket.socket, slot: memoryview, size: int, key: bytes) -> None:
        seal = bytes(slot[:SEAL_BYTES])
        digest = keyed(key)
        for begin in range(SEAL_BYTES, size, PIECE_BYTES):
            piece = slot[begin : min(begin + PIECE_BYTES, size)]
            self._rate.take(len(piece))
            sock.sendall(piece)
            digest.update(piece)
        if bytes(slot[:SEAL_BYTES]) != seal:
            seal = bytes(SEAL_BYTES)  # The worker has begun to overwrite it.
        digest.update(seal)
        sock.sendall(seal + digest.digest())

    def _find(self, digest: bytes, size: int) -> memoryview | None:
        for slots in tuple(self.slots.values()):
            for slot in slots:
                if digest_of_seal(slot[:SEAL_BYTES]).encode() == digest and size <= len(slot):
                    return slot
        return None


# ---------------------------------------------------------------- the fetching side


class Fetch(threading.Thread):
    """A fetch from several nodes in parallel, requesting one snapshot at a time from each node."""

    def __init__(
        self,
        asked: Mapping[str, Any],
        fds: list[int],
        say: Callable[[dict[str, Any]], object],
        rate: int,
        *,
        encrypted: bool,
    ) -> None:
        super().__init__(daemon=True)
        self._id, self._say = asked["id"], say
        self._rate = rate
        self._encrypted = encrypted
        self._sockets: list[socket.socket] = []
        self._ended = False
        self._reasons: list[str] = []
        self._threads = []
        numbered = enumerate(fds)
        for source in asked["sources"]:
            todo = [(one, *next(numbered)) for one in source["snapshots"]]
            thread = threading.Thread(target=self._fetch_from, args=(source, todo), daemon=True)
            self._threads.append(thread)

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        self._say({"type": "done", "id": self._id, "reason": "; ".join(self._reasons)[:500]})

    def end(self) -> None:
        self._ended = True
        for sock in tuple(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _fetch_from(
        self, source: dict[str, Any], todo: list[tuple[dict[str, Any], int, int]]
    ) -> None:
        try:
            if self._encrypted and not source["fingerprint"]:
                raise CopyError("it does not encrypt, and this node does")
            address = (source["address"], source["port"])
            with socket.create_connection(address, timeout=STALL_TIMEOUT_S) as sock:
                self._fetch(sock, source, todo)
        except (OSError, ValueError, CopyError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._reasons.append(f"{source['node_id']}: {reason}")
        finally:
            for _, _, fd in todo:
                os.close(fd)

    def _fetch(
        self,
        sock: socket.socket,
        source: dict[str, Any],
        todo: list[tuple[dict[str, Any], int, int]],
    ) -> None:
        if source["fingerprint"]:
            sock = encrypt(sock, source["fingerprint"])
        self._sockets.append(sock)
        with sock:
            key = greet_sender(sock, source["token"])
            for asked, number, fd in todo:
                if self._ended:
                    raise CopyError("a newer fetch has replaced this one")
                memory = mapped(os.dup(fd), os.fstat(fd).st_size, writable=True)
                seconds = 60 + asked["bytes"] / LEAST_RATE
                if self._rate:
                    # The other side may have the same limit while sending to several nodes.
                    seconds += 8 * asked["bytes"] / self._rate
                fetch(sock, asked, memory, key, time.monotonic() + seconds)
                self._say({"type": "fetched", "id": self._id, "number": number})


def encrypt(sock: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate is self-signed and identified by its digest.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    encrypted = context.wrap_socket(sock)
    found = encrypted.getpeercert(binary_form=True)
    if found is None or hashlib.sha256(found).hexdigest() != fingerprint:
        encrypted.close()
        raise CopyError("its certificate is not the one that it reported to the server")
    return encrypted


def greet_sender(sock: socket.socket, token: str) -> bytes:
    until = time.monotonic() + STALL_TIMEOUT_S
    protocol, theirs = GREETING.unpack(received(sock, GREETING.size, until))
    if protocol != PROTOCOL:
        raise CopyError("the program at this address is not a snapshot carrier")
    nonce = os.urandom(32)
    sock.sendall(nonce + proof(token, "fetch", theirs, nonce))
    if not hmac.compare_digest(received(sock, 32, until), proof(token, "send", nonce, theirs)):
        raise CopyError("it does not know the token")
    return proof(token, "key", theirs, nonce)


def fetch(
    sock: socket.socket, asked: dict[str, Any], memory: memoryview, key: bytes, until: float
) -> None:
    """Fetch one snapshot, writing its seal to memory only after everything has been verified."""
    what = f"part {asked['shard']} of step {asked['mark']['step']}"
    memory[:SEAL_BYTES] = bytes(SEAL_BYTES)
    sock.sendall(REQUEST.pack(asked["digest"].encode(), asked["bytes"]))
    (size,) = LENGTH.unpack(received(sock, LENGTH.size, until))
    if size == 0:
        raise CopyError(f"it does not hold {what} any more")
    if size != asked["bytes"] or size > len(memory) or size < SEAL_BYTES:
        raise CopyError(f"{what} has {size} bytes, not {asked['bytes']} as reported")
    digest = keyed(key)
    for begin in range(SEAL_BYTES, size, PIECE_BYTES):
        piece = memory[begin : min(begin + PIECE_BYTES, size)]
        receive(sock, piece, until)
        digest.update(piece)
    seal, theirs = received(sock, SEAL_BYTES, until), received(sock, 32, until)
    digest.update(seal)
    if not hmac.compare_digest(digest.digest(), theirs):
        raise CopyError(f"{what} was damaged on the way")
    if seal == bytes(SEAL_BYTES):
        raise CopyError(f"{what} was overwritten while it was being sent")
    if digest_of_seal(seal) != asked["digest"]:
        raise CopyError(f"{what} is not the one that the node reported to the server")
    memory[:SEAL_BYTES] = seal


# ---------------------------------------------------------------- the program


class Carrier:
    """Carries out the runner's requests."""

    def __init__(self, control: socket.socket, rate: int) -> None:
        self._control = control
        self._rate = rate
        self._fetch: Fetch | None = None
        self._sender = Sender(TokenBucket(rate))
        self._listening = listen()
        self._accepting = threading.Thread(
            target=self._sender.accept, args=(self._listening,), daemon=True
        )
        self._sending = threading.Lock()

    def run(self) -> None:
        received = Received()
        while True:
            try:
                received.read(self._control)
            except BrokenLinkError:
                return
            while (found := received.next_message()) is not None:
                self._obey(*found)

    def _obey(self, message: Mapping[str, Any], fds: list[int]) -> None:
        kind = message["type"]
        if kind == "credentials":
            self._sender.context = server_context(message["pem"]) if message["pem"] else None
            self._sender.token = message["token"]
            if not self._accepting.ident:
                self._accepting.start()  # Earlier peers would be served without TLS.
            port = self._listening.getsockname()[1]
            self._say({"type": "listening", "port": port, "token": message["token"]})
        elif kind == "slots":
            slots = [mapped(fd, message["bytes"]) for fd in fds]
            self._sender.slots[message["local_rank"]] = slots
        elif kind == "fetch":
            if self._fetch is not None:
                self._fetch.end()
                self._fetch.join()  # Two fetches must never write to the same memory.
            encrypted = self._sender.context is not None
            self._fetch = Fetch(message, fds, self._say, self._rate, encrypted=encrypted)
            self._fetch.start()

    def _say(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._control.sendall(encode(message))


def listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def server_context(pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The ssl module loads these only from a file, so the file is in memory.
    fd = os.memfd_create("rdzv certificate")
    try:
        os.write(fd, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy snapshots from node to node.")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the runner")
    parser.add_argument("--rate", type=int, default=0, help="the most bytes to send per second")
    options = parser.parse_args()
    os.nice(10)  # Training goes first.
    try:
        Carrier(socket.socket(fileno=options.fd), options.rate).run()
    except OSError as error:
        sys.exit(f"rdzv: cannot copy snapshots: {error}")


if __name__ == "__main__":
    main()

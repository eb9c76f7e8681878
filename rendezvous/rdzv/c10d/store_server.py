"""The process that serves torch's store for the c10d facade and reports its contents.

    python store_server.py --fd N --control-fd M

It is run by path, and needs torch but no other part of rdzv. It serves a TCPStore on the listening
socket N and sends `{"ready": true}` on the socket M. Then, each time it is asked, it reports which
jobs' states have changed, without interpreting them.

Messages are JSON, preceded by their length in four bytes (big-endian). A request names the jobs
that should not be read again: `{"closed": [...]}`. The answer contains

        states    {rdzv_id: base64 as stored}, or null if it is too long or not text
        gone      jobs whose key was removed
        left_out  the number of jobs above the limit

or `error`, if the store cannot be listed. An answer is at most a few megabytes long; the rest
follows in the next one.

The process lives as long as its parent: it ends when the socket closes, and is killed when the
parent dies. It ignores the signals that a terminal or systemd sends to all processes of a service,
because the parent decides. Exit code 3 means that torch is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib
import json
import os
import re
import resource
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

PR_SET_PDEATHSIG = 1
NO_TORCH = 3
TIMEOUT = timedelta(seconds=10)

PREFIX = "torch.rendezvous."
ROUNDS_OWN = re.compile(r"\.\d+/")
"""Matches the keys that the agents in one round share, which do not hold a job's state."""

MOST_JOBS = 10_000
MOST_ID_CHARS = 1_024
MOST_STATE_BYTES = 2 * 1024 * 1024
MOST_ANSWER_BYTES = 8 * 1024 * 1024
MOST_QUESTION_BYTES = 32 * 1024 * 1024
BATCH = 100
LIST_ANYWAY_AFTER = 30
"""Keys are listed when their number has changed, and at least once in this many polls."""


def main() -> None:
    """Serve until the parent is gone; if serving fails, exit with a one-line explanation."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    options = parse_options()
    control = socket.socket(fileno=options.control_fd)
    try:
        looks = Looks(serve(options.fd))
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(NO_TORCH)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    try:
        say(control, {"ready": True})
        while (question := hear(control)) is not None:
            say(control, looks.answer(question["closed"]))
    except (BrokenPipeError, ConnectionResetError):
        pass
    # Skip torch's destructors, which wait for clients.
    os._exit(0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve a c10d TCPStore, and report its contents.")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--control-fd", type=int, required=True, help="the socket for requests")
    return parser.parse_args()


def serve(fd: int) -> Any:
    """Start the store on the socket `fd` and return it; it serves until it is deleted."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        OMP_NUM_THREADS="1",
    )
    # Python puts a script's directory first, but torch must not import modules from it.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]  # noqa: PTH100

    prepare_for_many()
    host, port = reachable_at(fd)
    make = functools.partial(
        importlib.import_module("torch.distributed").TCPStore,
        host,  # The store's own client connects here; the socket decides where the store listens.
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=fd,
        timeout=TIMEOUT,
    )
    try:
        return make()
    except NotImplementedError:
        # torch 2.4's default store, which uses libuv, does not accept a listening socket.
        return make(use_libuv=False)


def prepare_for_many() -> None:
    """Allow this process to hold a connection from each agent without looking up names in DNS.

    The agent's store_host.py explains why.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", b"files")


def reachable_at(fd: int) -> tuple[str, int]:
    """Return an address and the port at which this machine can reach a listening socket."""
    sock = socket.socket(fileno=fd)
    try:
        host, port = sock.getsockname()[:2]
    finally:
        sock.detach()
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host, port


class Looks:
    """Reads the jobs' states, and remembers those already sent, so that only changes are sent."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.told: dict[str, bytes] = {}
        """A digest of each job's last reported state."""
        self.closed: set[str] = set()
        self.jobs: list[str] = []
        self.left_out = 0
        self.keys = -1
        self.since_listed = 0

    def answer(self, closed: list[str]) -> dict[str, Any]:
        """Read the states and return the changes; jobs in `closed` are not read again."""
        self.closed.update(closed)
        try:
            gone = self.list_jobs()
            states = self.look()
        except (RuntimeError, ValueError, AttributeError) as error:
            # Possible causes: a key that is not UTF-8, a key that was just deleted, a torch without
            # list_keys.
            return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        return {"states": states, "gone": gone, "left_out": self.left_out}

    def list_jobs(self) -> list[str]:
        self.since_listed += 1
        keys = self.store.num_keys()
        if keys == self.keys and self.since_listed < LIST_ANYWAY_AFTER:
            return []
        found = {
            key[len(PREFIX) :]
            for key in self.store.list_keys()
            if key.startswith(PREFIX) and not ROUNDS_OWN.search(key)
        }
        found = {name for name in found if 0 < len(name) <= MOST_ID_CHARS}
        gone = [name for name in self.told if name not in found]
        for name in gone:
            del self.told[name]
        self.closed &= found
        known = [name for name in self.jobs if name in found and name not in self.closed]
        new = sorted(found.difference(known, self.closed))
        self.jobs = (known + new)[:MOST_JOBS]
        self.left_out = len(known) + len(new) - len(self.jobs)
        self.keys, self.since_listed = keys, 0
        return gone

    def look(self) -> dict[str, str | None]:
        """Return the changed states, or as many of them as fit into one answer."""
        changed: dict[str, str | None] = {}
        room = MOST_ANSWER_BYTES
        names = [name for name in self.jobs if name not in self.closed]
        for first in range(0, len(names), BATCH):
            batch = names[first : first + BATCH]
            for name, value in zip(batch, self.values(batch)):  # noqa: B905 (Python 3.10 has strict)
                digest = hashlib.blake2b(value, digest_size=16).digest() if value else None
                if value is None or digest is None or self.told.get(name) == digest:
                    continue
                if len(value) > room:
                    # This job comes first in the next answer.
                    self.jobs.remove(name)
                    self.jobs.insert(0, name)
                    return changed
                self.told[name] = digest
                changed[name] = text(value)
                room -= len(value) if changed[name] is not None else 0
        return changed

    def values(self, names: list[str]) -> list[bytes | None]:
        """Return the stored values of jobs, with None for each job deleted in the meantime."""
        keys = [PREFIX + name for name in names]
        # Getting a missing key would block until it exists.
        if self.store.check(keys):
            return list(self.store.multi_get(keys))
        return [self.store.get(key) if self.store.check([key]) else None for key in keys]


def text(value: bytes) -> str | None:
    """Return a state as text, or None if it is too long or not ASCII, as base64 would be."""
    if len(value) > MOST_STATE_BYTES:
        return None
    try:
        return value.decode("ascii")
    except UnicodeDecodeError:
        return None


def say(control: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    control.sendall(len(body).to_bytes(4, "big") + body)


def hear(control: socket.socket) -> dict[str, Any] | None:
    """Receive one message, or return None if the parent is gone or its message is invalid."""
    header = receive(control, 4)
    if header is None or int.from_bytes(header, "big") > MOST_QUESTION_BYTES:
        return None
    body = receive(control, int.from_bytes(header, "big"))
    return None if body is None else json.loads(body)


def receive(control: socket.socket, count: int) -> bytes | None:
    """Receive `count` bytes, or return None if the stream ends earlier."""
    parts = []
    while count:
        part = control.recv(min(count, 65_536))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; exit if it is already dead."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("its parent is gone")


if __name__ == "__main__":
    main()

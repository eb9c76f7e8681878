"""The process that serves torch's store for the c10d facade and reports its contents.

    python store_server.py FD

It is run by path, and needs torch but no other part of rdzv. It serves a TCPStore on the listening
socket FD and writes a line on stdout. Then, for each line that it reads from stdin, it reports
which jobs' states have changed, as one line of JSON with

        states      {rdzv_id: the state, see `as_json`}, or null before any node has written one
        unreadable  {rdzv_id: why its state cannot be read}
        gone        jobs whose key was removed
        left_out    the number of jobs above the limit

or `error`, if the store cannot be listed. A line is at most a few megabytes long; the rest follows
in the next one. rdzvd checks the types in a state.

A state is base64 of a pickle, which anyone who can reach the store may have written. It is read
here, where it can harm nothing but this process, which its author can end anyway by filling the
store's memory: with five admitted names, a limited address space, and a limit on CPU time.

The process lives as long as its parent: it ends when stdin closes, and is killed when the parent
dies. It ignores the signals that a terminal or systemd sends to all processes of a service,
because the parent decides. Exit code 3 means that torch is missing.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import datetime
import functools
import hashlib
import importlib
import io
import json
import os
import pickle
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

PR_SET_PDEATHSIG = 1
NO_TORCH = 3
TIMEOUT = datetime.timedelta(seconds=10)

PREFIX = "torch.rendezvous."
ROUNDS_OWN = re.compile(r"\.\d+/")
"""Matches the keys that the agents in one round share, which do not hold a job's state."""

MOST_JOBS = 10_000
MOST_ID_CHARS = 1_024
MOST_STATE_BYTES = 2 * 1024 * 1024
"""The size of the largest state, as stored and as JSON. That of 4,096 nodes takes 508 KB."""
MOST_READING_BYTES = 256 * 1024 * 1024
"""How much the process's address space may grow while it reads one state."""
MOST_READING_S = 5.0
"""The CPU time for reading one state. That of 4,096 nodes takes 0.03 s. SIGPROF ends the process
that takes longer, because nothing else interrupts the C code that unpickles."""
MOST_ANSWER_BYTES = 4 * 1024 * 1024
BATCH = 100
LIST_ANYWAY_AFTER = 30
"""Keys are listed when their number has changed, and at least once in this many polls."""


def main() -> None:
    """Serve until the parent is gone; if serving fails, exit with a one-line explanation."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Whatever torch prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        looks = Looks(serve(int(sys.argv[1])))
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(NO_TORCH)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    try:
        print("ready", file=answers, flush=True)
        while sys.stdin.readline():
            print(json.dumps(looks.answer()), file=answers, flush=True)
    except BrokenPipeError:
        pass
    # Skip torch's destructors, which wait for clients.
    os._exit(0)


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
    with socket.socket(fileno=os.dup(fd)) as listening:
        host, port = listening.getsockname()[:2]
    make = functools.partial(
        importlib.import_module("torch.distributed").TCPStore,
        # The store's own client connects here; the socket decides where the store listens.
        "127.0.0.1" if host in ("0.0.0.0", "::") else host,
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


class Looks:
    """Reads the jobs' states, and remembers those already sent, so that only changes are sent."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.told: dict[str, bytes] = {}
        """A digest of each job's last reported state."""
        self.closed: set[str] = set()
        """The jobs whose state is not read again."""
        self.jobs: list[str] = []
        self.left_out = 0
        self.keys = -1
        self.since_listed = 0

    def answer(self) -> dict[str, Any]:
        """Read the states and return the changes. A closed job's never changes again."""
        try:
            gone = self.list_jobs()
            states, unreadable = self.look()
        except (RuntimeError, ValueError, AttributeError) as error:
            # Possible causes: a key that is not UTF-8, a key that was just deleted, a torch without
            # list_keys.
            return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        return {
            "states": states,
            "unreadable": unreadable,
            "gone": gone,
            "left_out": self.left_out,
        }

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

    def look(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Read the changed states, or as many of them as fit into one answer.

        Returns the states, and why the others cannot be read.
        """
        states: dict[str, Any] = {}
        unreadable: dict[str, str] = {}
        room = MOST_ANSWER_BYTES
        names = [name for name in self.jobs if name not in self.closed]
        for first in range(0, len(names), BATCH):
            batch = names[first : first + BATCH]
            for name, value in zip(batch, self.values(batch)):  # noqa: B905 (Python 3.10 has strict)
                digest = hashlib.blake2b(value, digest_size=16).digest() if value else None
                if value is None or digest is None or self.told.get(name) == digest:
                    continue
                try:
                    state, size = read_state(value)
                except UnreadableError as error:
                    unreadable[name] = str(error)
                    self.told[name] = digest
                    continue
                if size > room:
                    # This job comes first in the next answer.
                    self.jobs.remove(name)
                    self.jobs.insert(0, name)
                    return states, unreadable
                states[name] = state
                self.told[name] = digest
                if state and state["closed"]:
                    self.closed.add(name)
                room -= size
        return states, unreadable

    def values(self, names: list[str]) -> list[bytes | None]:
        """Return the stored values of jobs, with None for each job deleted in the meantime."""
        keys = [PREFIX + name for name in names]
        # Getting a missing key would block until it exists.
        if self.store.check(keys):
            return list(self.store.multi_get(keys))
        return [self.store.get(key) if self.store.check([key]) else None for key in keys]


# ------------------------------------------------------------------------------------ one state

NO_STATE = b"Y2FuaW1hZGFt"
"""Written by torch before the first state, because reading a missing key would block."""


class UnreadableError(Exception):
    """A value is not the state of a rendezvous, or exceeds a limit."""


class _Attributes:
    """An instance of one of torch's two classes: the attributes that its pickle gives it.

    `__setstate__` also keeps a pickle from setting attributes of the class: called on that instead
    of an instance, it lacks an argument. Instances are equal only to themselves, so none is hashed
    by content that a pickle has chosen.
    """

    def __setstate__(self, attributes: Any) -> None:
        if type(attributes) is not dict or attributes.keys() != self.__annotations__.keys():
            raise UnreadableError("an object does not have the attributes that torch gives it")
        self.__dict__.update(attributes)


class _Node(_Attributes):
    addr: Any
    pid: Any
    local_id: Any


class _State(_Attributes):
    round: Any
    complete: Any
    deadline: Any
    closed: Any
    participants: Any
    wait_list: Any
    redundancy_list: Any
    last_heartbeats: Any


_DYNAMIC = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
ADMITTED = {
    (_DYNAMIC, "_RendezvousState"): _State,
    (_DYNAMIC, "_NodeDesc"): _Node,
    ("datetime", "datetime"): datetime.datetime,
    ("datetime", "timezone"): datetime.timezone,
    ("datetime", "timedelta"): datetime.timedelta,
}


class _Unpickler(pickle.Unpickler):
    """Admits only the classes that torch's states contain; the first two are replaced by ours."""

    def find_class(self, module: str, name: str) -> Any:
        found = ADMITTED.get((module, name))
        if found is None:
            raise UnreadableError(f"{module}.{name} has no place in it")
        return found


def read_state(value: bytes) -> tuple[Any, int]:
    """Read the stored value of a job's key: as JSON values, see `as_json`, and their size.

    Returns None and 0 if no node has written a state yet. A value that takes more CPU time than
    allowed ends this process.

    Raises:
        UnreadableError: the value is not such a state, or exceeds a limit.

    """
    if value == NO_STATE:
        return None, 0
    if len(value) > MOST_STATE_BYTES:
        raise UnreadableError(f"it has {len(value)} bytes; {MOST_STATE_BYTES} are the most")
    try:
        with _limits():
            pickled = io.BytesIO(base64.b64decode(value, validate=True))
            state = as_json(_Unpickler(pickled).load())
            if pickled.read(1):
                raise UnreadableError("it does not end where it should")
            size = len(json.dumps(state))
    except UnreadableError as error:
        raise UnreadableError(_one_line(str(error))) from None
    except Exception as error:
        # Nearly every exception of Python's can come from a pickle.
        raise UnreadableError(_one_line(f"{type(error).__name__}: {error}")) from None
    if size > MOST_STATE_BYTES:
        raise UnreadableError(f"it takes {size} bytes as JSON; {MOST_STATE_BYTES} are the most")
    return state, size


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Limit the growth of this process's address space, and its CPU time until the limits end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        most = int(statm.read().split()[0]) * resource.getpagesize() + MOST_READING_BYTES
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.setitimer(signal.ITIMER_PROF, MOST_READING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _one_line(text: str) -> str:
    """Escape control characters for the log, and cut off what is too long for a line of it."""
    return ascii(text[:200])[1:-1]


def as_json(state: Any) -> dict[str, Any]:
    """Return a state's attributes as JSON, nodes as ADDR_PID_ID; heartbeats are kept as text."""
    if type(state) is not _State:
        raise UnreadableError("_RendezvousState is expected")
    return {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "last_call": state.deadline is not None,
        "participants": {_node(node): rank for node, rank in state.participants.items()},
        "waiting": sorted(map(_node, state.wait_list)),
        "spare": sorted(map(_node, state.redundancy_list)),
        "heartbeats": {_node(node): str(at) for node, at in state.last_heartbeats.items()},
    }


def _node(value: Any) -> str:
    if type(value) is not _Node:
        raise UnreadableError("_NodeDesc is expected")
    # Lone surrogates cannot be sent.
    name = f"{value.addr}_{value.pid}_{value.local_id}".encode(errors="replace").decode()
    if len(name) > MOST_ID_CHARS:
        raise UnreadableError("a node's name is too long")
    return name


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; exit if it is already dead."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("its parent is gone")


if __name__ == "__main__":
    main()

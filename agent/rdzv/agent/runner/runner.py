"""The runner: always the parent of one job's workers on one node, and of the job's store hosts.

Run by path with the standard library alone (`python -I -S runner.py FD`), so that it starts in
milliseconds, has one thread, and nothing in the job's or the agent's surroundings can break it. FD
is its end of a Unix stream socket to the agent, both directions of which carry `Channel` frames.

What the agent may ask (a request that is refused changes nothing, and is answered by `error`):

    start_workers     {round, workers: [{local_rank, argv, env, cwd, stdout, stderr, cpus,
                                         identity}], warm}
    stop_workers      {round, signal, grace_s}
    notify_workers    {round, signal}                 ends nothing by itself
    start_store_host  {round, argv, env, identity}, and with it a listening socket
    stop_store_host   {round}
    renew_fence       {fence_at_ms}
    keep_zygote       {argv, env, cwd, modules, cpus, wait_s, identity, parked}     once
    serve             {socket, orphan_timeout_s, grace_s}         the path counts once
    keep              {name, value}
    heard             {number}
    adopt             {}
    shutdown          {}

What it hears:

    started           {round, local_rank, pid}
    start_failed      {round, local_rank, reason}     the round is then killed; `gone` follows
    exited            {round, local_rank, pid, exit_code, signal, age_ms}
    gone              {round}                         no process of it is left but its store host
    stuck             {round, pids}                   these survive SIGKILL; `gone` may yet follow
    fenced            {round, at_ms}                  the fence has come; the round is then killed
    store_host_ready  {round}
    store_host_exited {round, exit_code, signal}
    zygote_ready      {pid, modules, threads, memory_kb, seconds}
    zygote_lost       {reason, retry_s}               null: no other is tried
    started_cold      {round, local_ranks, reason}    these were to be warm
    serve_failed      {reason}                        it ends with its agent, as without `serve`
    error             {reason}

A round is held from `start_workers` until `gone`, and only one at a time. Workers that exit by
themselves leave their descendants alone; only a stop ends a round. It has two phases: the signal
and its grace while a worker runs, then SIGKILL for every descendant until none is left. Being a
child subreaper, the runner inherits whoever daemonizes, so nobody escapes that.

When the agent's end of the socket closes, everything is killed at once, unless the agent has
asked it to *serve*. Then it outlives its agent: it listens on a socket, and whoever connects there
as the same user may *adopt* it:

    next agent  ── connects ──▶  hello {version, pid, round, last_round, workers, store_hosts,
                                        zygote, kept}
                ── adopt ──▶     every event that nobody has *heard* yet, and then what is new

Events are numbered from `serve` on, and remembered until they are heard: that is said by number, of
all up to it. What an agent needs to go on where the one before it died is *kept* by name, and
handed on; the runner does not look into it. So it is there exactly as long as the workers are, and
what is kept before a request is sent is known whenever the request is. An exit's `age_ms` grows
while it waits. Only one agent is heard at a time; another is told `refused` {reason}. When nobody
adopts it within `orphan_timeout_s`, it stops its workers, with `grace_s`, and ends. The clock runs
until `adopt`: an agent that knows this runner too little just goes away again.

A worker whose local_rank is among the *warm* is forked from the job's *zygote* (zygote.py), and is
then a child like any other. Whatever goes wrong with that, it is started cold instead: while the
zygote imports, once it has died, and when it does not fork in time. A zygote that has died is
replaced, after a while. A store host is forked from it as well, if it has imported torch, and is
started cold in just the same cases. Forking takes a while, so some forks are *parked*: made ahead,
they wait to be told what to be.

With an *identity* a process runs as another account than the runner, which has to be root for
that, and stays it: so no worker can end its runner, or escape it.

The runner opens no path of a job's and waits for no exec: a file system that hangs would hang it,
and with it the fence and every stop. A child is forked, becomes its account, opens its own files
and runs its program; a pipe that the exec closes says when it runs, or why it does not.

A lack of descriptors or memory ends neither the runner nor the job. What cannot be started is
told like any other failure to start. Processes that cannot be looked at count as being there, so
`gone` waits until they can. The list of its own children is held open, and is enough for that: what
descends from a child is a child itself as soon as its parents are dead.

A *fence* is a point in time by `boottime_ms` which no round outlives, whatever the agent does: it
may be stopped, or hang. The agent renews it while there is proof that the server hears this node.
A round that is to start when the fence has come starts no worker. Without a fence there is none.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

MAX_FRAME_BYTES = 16 << 20
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
"""A peer that leaves this much unread is taken for dead."""

PROTOCOL_VERSION = 1
"""Of what is said over the socket; an agent adopts runners of its own version and of older ones."""

MAX_GRACE_S = 7 * 24 * 3600.0
MAX_ORPHAN_TIMEOUT_S = 24 * 3600.0
MAX_FENCE_AT_MS = 1 << 53
STUCK_AFTER_S = 5.0
_LOOK_AGAIN_S = 0.02
SWEEP_INTERVAL_S = 0.25
"""How often a kill is repeated until nothing is left. Not how exits are noticed: those wake up."""

FORK_TIMEOUT_S = 5.0
"""How long the zygote may take to fork, and a fork to get ready; then it is taken for hung."""

PRELOAD_TIMEOUT_S = 600.0
MAX_ZYGOTE_WAIT_S = 600.0
MAX_ZYGOTE_RETRY_S = 60.0
MAX_PARKED = 1024
PARK_AFTER_S = 1.0
"""How long what has just been started has the CPUs to itself before others are forked ahead."""

MAX_ANSWER_BYTES = 64 << 10
"""What a fork may answer when it is told what to be."""

MAX_FORKS_AT_ONCE = 64
"""As many descriptors must fit into one message, and pids into a pipe."""

START_SLOW_S = 10.0
"""When a child that does not run its program yet is spoken of, and what it waits for."""

PAUSE_S = 0.25
"""How long to wait before what lacked descriptors or memory is tried again."""

NOT_STARTED = 127
"""The exit code that a shell gives for a program that it can not start."""

_RECEIVE_BYTES = 256 << 10
_MAX_FDS = 16

_ZYGOTE_HOOK = Path(__file__).with_name("zygote_hook")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Sent to a whole job step, by schedulers for instance, these are meant for the workers: without
# their parent all of them would die. The faults (SIGSEGV and the like) stay fatal.
_IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)

_FLEETING = (
    errno.EINTR,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ETOOMANYREFS,
)
"""Errors of a socket which do not say that its peer is gone: what failed can be repeated."""

_TFD_TIMER_ABSTIME = 1

_libc = ctypes.CDLL(None, use_errno=True)

_T = TypeVar("_T")


# ---------------------------------------------------------------------- frames


class MalformedFrameError(ValueError):
    """A frame is too large or does not hold a JSON object; the frames after it can be read."""


class Channel:
    """JSON objects, and file descriptors with them, over a Unix stream socket; never blocks.

    A frame is its length in 4 bytes, big endian, and that many bytes of JSON. A descriptor travels
    with the first bytes of the frame that it belongs to.
    """

    def __init__(
        self, sock: socket.socket, *, takes_fds: bool = True, max_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        """Take over a socket. Without `takes_fds` the kernel drops descriptors that come with it.

        A frame of more than `max_bytes` is malformed. All that comes is held until a frame is
        complete, so a peer that is not trusted may send no descriptors, and only short frames.
        """
        sock.setblocking(False)
        self._socket = sock
        self._max_fds = _MAX_FDS if takes_fds else 0
        self._max_bytes = max_bytes
        self._received = bytearray()
        self._skip_bytes = 0
        self._fds: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self.lost_fds = False
        """Whether descriptors were lost that came with what is read: one may have no more."""

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` should be called once the socket takes more."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, object], *fds: int) -> None:
        """Send a message as far as the socket takes it now, and keep the rest for `flush`.

        The channel owns `fds` from here on, also when this raises: `ValueError` if the message is
        too large for a frame, `BufferError` if the peer leaves too much unread, `OSError` if it
        is gone.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        if len(payload) > MAX_FRAME_BYTES:
            close_fds(fds)
            raise ValueError(f"a message of {len(payload)} bytes is too large")
        frame = memoryview(struct.pack(">I", len(payload)) + payload)
        self._unsent.append((frame, fds))
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise BufferError(f"the peer leaves {self._unsent_bytes} bytes unread")
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the socket takes it; `OSError` if the peer is gone."""
        while self._unsent:
            frame, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [frame], fds)
            except OSError as error:
                if error.errno in (errno.EAGAIN, *_FLEETING):
                    return
                raise
            close_fds(fds)
            self._unsent_bytes -= sent
            if sent < len(frame):
                self._unsent[0] = (frame[sent:], ())
            else:
                self._unsent.popleft()

    def receive(self) -> bool:
        """Read what has come, for `next_message`; False if nothing, `EOFError` at the end."""
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._socket, _RECEIVE_BYTES, self._max_fds, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _FLEETING:
                return False  # Nothing is lost.
            raise EOFError(str(error)) from error
        self.lost_fds |= bool(flags & socket.MSG_CTRUNC)
        self._fds.extend(fds)
        if not data:
            raise EOFError("the peer has closed the channel")
        self._received += data
        self._skip()
        return True

    def next_message(self) -> Mapping[str, object] | None:
        """Return the next message that is complete, if any; `MalformedFrameError` may be raised.

        A descriptor that nobody took by the time that everything has been read is closed.
        """
        if not self._received:
            self._close_fds()
            self.lost_fds = False
        if len(self._received) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._received)
        if length > self._max_bytes:
            self._skip_bytes = 4 + length
            self._skip()
            raise self._malformed(f"a frame of {length} bytes is too large")
        if len(self._received) < 4 + length:
            return None
        payload = bytes(self._received[4 : 4 + length])
        del self._received[: 4 + length]
        return self._decode(payload)

    def take_fd(self) -> int | None:
        """Return the descriptor that came with the message just returned; the caller owns it."""
        return self._fds.popleft() if self._fds else None

    def close(self) -> None:
        """Close the socket, and every descriptor that was to be sent or taken."""
        self._socket.close()
        self._close_fds()
        while self._unsent:
            close_fds(self._unsent.popleft()[1])

    def _decode(self, payload: bytes) -> Mapping[str, object]:
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"a frame is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise self._malformed("a frame is not a JSON object")
        return message

    def _malformed(self, reason: str) -> MalformedFrameError:
        # Nobody knows how many descriptors came with it, and a later request must not get them.
        self._close_fds()
        return MalformedFrameError(reason)

    def _skip(self) -> None:
        skipped = min(self._skip_bytes, len(self._received))
        del self._received[:skipped]
        self._skip_bytes -= skipped

    def _close_fds(self) -> None:
        while self._fds:
            close_fd(self._fds.popleft())


_PEER = struct.Struct("3i")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of who is at the other end of a Unix socket.

    For who has connected, that is the process that listened.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(found)
    return pid, uid


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Spell a path, whose folder is there, such that it fits a socket's address: 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen_at(path: Path) -> socket.socket:
    """Listen on a Unix socket that only this user may connect to; `OSError` if it can not be."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with short_path(path) as short:
            listener.bind(short)
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def close_fd(fd: int | None) -> None:
    """Close a descriptor, if it is one."""
    if fd is not None:
        os.close(fd)


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


@contextmanager
def closed_if_failing(sock: socket.socket) -> Iterator[None]:
    """Close a socket if what follows does not succeed."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


def dup_fds(*fds: int) -> tuple[int, ...]:
    """Duplicate descriptors, all of them or none; `OSError` if it can not be done."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError:
        close_fds(made)
        raise
    return tuple(made)


# ---------------------------------------------------------------------- processes


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def sweep_descendants(except_pids: Collection[int] = (), timeout_s: float = 2.0) -> list[int]:
    """Kill every descendant of this process, and wait until all are gone; blocks for milliseconds.

    Spares the children `except_pids` and what descends from them. Reaps every child that it
    kills, so their statuses are lost to whoever else waits for them. Returns the processes that
    are still there at the timeout: none can outrun this, but one may be in the kernel. Only in a
    subreaper does it find those whose parents are dead.

    Raises:
        OSError: at the timeout the children cannot be listed, so some may be there.

    """
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline
        try:
            left = kill_descendants(except_pids)
            if left and not late:
                _wait_for_exit(left[0], SWEEP_INTERVAL_S)
            reap(pid for pid in children_of(os.getpid()) if pid not in except_pids)
        except OSError:
            if late:
                raise
            time.sleep(_LOOK_AGAIN_S)
        else:
            if late or not left:
                return left


def kill_descendants(except_pids: Collection[int] = ()) -> list[int]:
    """Send SIGKILL to every descendant of this process, parents first; return their pids.

    Processes that fork meanwhile may be missed, and so may those whose parents cannot be looked
    at. Whoever asks again at each exit of a child of this process finds them: their parents are
    among the killed, so they move up to be children.

    Raises:
        OSError: the children cannot be listed, so some may be there.

    """
    found = descendants_of(children_of(os.getpid()), except_pids)
    family = {os.getpid(), *found}
    for pid in found:
        signal_relative(pid, signal.SIGKILL, family)
    return found


def descendants_of(children: Iterable[int], except_pids: Collection[int] = ()) -> list[int]:
    """List these processes and what descends from them, parents before children; zombies count.

    Leaves out those in `except_pids` with all that descends from them, and what descends from a
    process that cannot be looked at.
    """
    found = [pid for pid in children if pid not in except_pids]
    for pid in found:
        with suppress(OSError):
            found += children_of(pid)  # Read on by this very loop.
    return found


def children_of(pid: int) -> list[int]:
    """List the children of a process, zombies included; none if it is gone.

    Exact for the calling process, if it has one thread: nobody else reaps its children. Of other
    processes some may be missing while their siblings exit.

    Raises:
        OSError: it cannot be looked at, so it may have any number.

    """
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    return children


class _OwnChildren:
    """The list of the children of this process, which has one thread; it needs no descriptor."""

    def __init__(self) -> None:
        path = f"/proc/self/task/{os.getpid()}/children"
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pids(self) -> list[int]:
        """List them, zombies included; `OSError` if that cannot be done now."""
        listed = b""
        while part := os.pread(self._fd, 1 << 16, len(listed)):
            listed += part
        return [int(pid) for pid in listed.split()]

    def close(self) -> None:
        os.close(self._fd)


def signal_group(leader: int, signum: int) -> None:
    """Signal the process group of a child, which was forked to lead one, and is not reaped.

    Until it does, it is alone, and nobody is in the group of that number.
    """
    with suppress(OSError):
        try:
            os.killpg(leader, signum)
        except ProcessLookupError:
            os.kill(leader, signum)


def signal_relative(pid: int, signum: int, family: Collection[int]) -> None:
    """Signal a process if its parent is in `family`; do nothing if it is gone.

    The pid may have passed to a stranger since it was read. The pidfd pins one process, and only
    then is its parent looked up: a stranger's is not in the family.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _parent_of(pid) in family:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


def reap(pids: Iterable[int]) -> None:
    """Take note of those of these children that have exited, so that they are no zombies."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _parent_of(pid: int) -> int:
    # The command stands in parentheses and may itself hold any character.
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def _wait_for_exit(pid: int, timeout_s: float) -> None:
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(timeout_s * 1000)
        finally:
            os.close(pidfd)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


# ---------------------------------------------------------------------- accounts


@dataclass(frozen=True, slots=True)
class Identity:
    """An account by its numbers, and what its processes are bound to."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    umask: int = 0o022
    limits: tuple[tuple[str, int, int], ...] = ()
    """Limits by their names in `resource`, without RLIMIT_: soft and hard, -1 for none."""


_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}


@contextmanager
def acting_as(identity: Identity | None) -> Iterator[None]:
    """Open, make and remove files with an account's rights, and no others; None: with the present.

    Holds for the calling thread alone, and for files alone: no process of that account may signal
    or trace this one meanwhile. Never wait for anything inside that lets other code run. It nests:
    leaving the inner one restores the account of the outer one.

    Raises:
        PermissionError: this process is not root, and so can not.

    """
    if identity is None:
        yield
        return
    groups, (uid, gid) = os.getgroups(), _file_ids()
    _set_thread_groups(identity.groups)
    try:
        _set_file_ids(identity.uid, identity.gid)
        yield
    finally:
        _set_file_ids(uid, gid)
        _set_thread_groups(groups)


def _file_ids() -> tuple[int, int]:
    """Return the user and the group that this thread handles files as."""
    # No account has this number: nothing is set, and the present one is returned.
    nobody = ctypes.c_uint32(0xFFFFFFFF)
    return _libc.setfsuid(nobody) & 0xFFFFFFFF, _libc.setfsgid(nobody) & 0xFFFFFFFF


def _set_file_ids(uid: int, gid: int) -> None:
    _libc.setfsgid(ctypes.c_uint32(gid))
    _libc.setfsuid(ctypes.c_uint32(uid))
    # They do not say whether they have done it.
    if _file_ids() != (uid, gid):
        raise PermissionError(f"only root may act as user {uid} with group {gid}")


def _set_thread_groups(groups: Sequence[int]) -> None:
    """Set the groups of this thread; libc's own function sets those of the whole process."""
    call = _SYS_SETGROUPS.get(platform.machine())
    if call is None:
        raise PermissionError(f"not known how to act as another user on {platform.machine()}")
    listed = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(call), ctypes.c_long(len(groups)), listed) != 0:
        code = ctypes.get_errno()
        raise PermissionError(code, f"only root may act as another user ({os.strerror(code)})")


def become(identity: Identity) -> None:
    """Be another account, for good; `OSError` or `ValueError` if that can not be."""
    for name, soft, hard in identity.limits:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))
    os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    os.umask(identity.umask)


# ---------------------------------------------------------------------- time


def boottime_ms() -> int:
    """Return the time since this machine's start, in which it slept or not.

    The others' clocks went on while it was suspended, so this is what a fence is measured by.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class _TimerSpec(ctypes.Structure):
    """The kernel's `struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class _Alarm:
    """A descriptor that is readable from a point of `boottime_ms` on.

    No timeout of `select` would do: those stand still while the machine is suspended, and this is
    readable as soon as it wakes up.
    """

    def __init__(self) -> None:
        """Make one that is not set; `OSError` if the kernel has none."""
        self._fd: int = _libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def fileno(self) -> int:
        return self._fd

    def set(self, at_ms: int | None) -> None:
        """Let it be readable from then on, at once if that has passed; with None, never."""
        seconds, ms = divmod(at_ms or 0, 1000)
        spec = _TimerSpec(0, 0, seconds, ms * 1_000_000)  # All zero: never.
        if _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        os.close(self._fd)


# ---------------------------------------------------------------------- requests


class RequestError(Exception):
    """The agent has asked for what can not be done; nothing has changed."""


class StartError(Exception):
    """A worker can not be started; says which value is to blame, and why."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start one worker; `env` is its whole environment.

    `stdout` and `stderr` are files to append to, None for the agent's own; `cwd` None is the
    agent's own too. `cpus` are those that it may run on, None for all that the agent may use. With
    a `zygote` it is forked from that, if that is ready by then. `identity` None is the agent's own
    account.
    """

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    stdout: str | None
    stderr: str | None
    cpus: tuple[int, ...] | None = None
    zygote: ZygoteSpec | None = None
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class ZygoteSpec:
    """How to start a zygote: as a worker whose script never runs, with `modules` imported.

    `argv` and `env` are what all workers have in common: their command line, but for the script's
    own arguments, and their environment, but for what each has of its own. `wait_s` is how long
    workers may wait while it imports; with 0 they start cold meanwhile. `parked` is how many forks
    are to be there before they are needed.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    modules: tuple[str, ...]
    cpus: tuple[int, ...] | None = None
    wait_s: float = 0.0
    identity: Identity | None = None
    parked: int = 0


def zygote_environ(env: Mapping[str, str], order: Mapping[str, object]) -> dict[str, str]:
    """Return an environment in which an interpreter does what zygote.py says of such an order."""
    path = env.get("PYTHONPATH")
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([str(_ZYGOTE_HOOK), *([path] if path else [])]),
        "RDZV_ZYGOTE": json.dumps({**order, "path": path}),
    }


def _read_worker_specs(request: Mapping[str, object]) -> list[WorkerSpec]:
    specs = [_read_worker_spec(item) for item in _field(request, "workers", list)]
    if not specs:
        raise RequestError("workers: there are none")
    if len({spec.local_rank for spec in specs}) < len(specs):
        raise RequestError("workers: a local_rank occurs twice")
    return specs


def _read_worker_spec(worker: object) -> WorkerSpec:
    if not isinstance(worker, dict):
        raise RequestError(f"workers: expected objects, got {worker!r:.80}")
    return WorkerSpec(
        local_rank=_field(worker, "local_rank", int),
        argv=tuple(_read_argv(worker)),
        env=_read_env(worker),
        cwd=_optional_text(worker, "cwd"),
        stdout=_optional_text(worker, "stdout"),
        stderr=_optional_text(worker, "stderr"),
        cpus=_read_cpus(worker),
        identity=_read_identity(worker),
    )


def _read_zygote_spec(request: Mapping[str, object]) -> ZygoteSpec:
    modules = _field(request, "modules", list)
    if not all(isinstance(name, str) for name in modules):
        raise RequestError(f"modules: expected strings, got {modules!r:.80}")
    return ZygoteSpec(
        argv=tuple(_read_argv(request)),
        env=_read_env(request),
        cwd=_optional_text(request, "cwd"),
        modules=tuple(modules),
        cpus=_read_cpus(request),
        wait_s=_read_seconds(request, "wait_s", MAX_ZYGOTE_WAIT_S),
        identity=_read_identity(request),
        parked=_read_parked(request),
    )


def _read_identity(request: Mapping[str, object]) -> Identity | None:
    if request.get("identity") is None:
        return None
    said = _field(request, "identity", dict)
    groups, limits = _field(said, "groups", list), _field(said, "limits", list)
    try:
        return Identity(
            uid=_field(said, "uid", int),
            gid=_field(said, "gid", int),
            groups=tuple(int(group) for group in groups),
            umask=_field(said, "umask", int),
            limits=tuple((str(name), int(soft), int(hard)) for name, soft, hard in limits),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"identity: {error}") from error


def _read_cpus(worker: Mapping[str, object]) -> tuple[int, ...] | None:
    cpus = worker.get("cpus")
    if cpus is None:
        return None
    if not isinstance(cpus, list) or not all(isinstance(cpu, int) for cpu in cpus):
        raise RequestError(f"cpus: expected numbers, got {cpus!r:.80}")
    return tuple(cpus)


def _read_argv(request: Mapping[str, object]) -> list[str]:
    argv = _field(request, "argv", list)
    if not argv or not all(isinstance(word, str) for word in argv):
        raise RequestError("argv: expected one string or more")
    return argv


def _read_env(request: Mapping[str, object]) -> dict[str, str]:
    env = _field(request, "env", dict)
    if not all(isinstance(value, str) for value in env.values()):
        raise RequestError("env: expected strings")
    return env


def _read_seconds(request: Mapping[str, object], name: str, most: float) -> float:
    seconds = request.get(name)
    # Written so that NaN, which compares as False, is refused.
    if not isinstance(seconds, int | float) or not 0 <= seconds <= most:
        raise RequestError(f"{name}: expected 0 to {most:.0f}, got {seconds!r:.80}")
    return seconds


def _read_parked(request: Mapping[str, object]) -> int:
    parked = _field(request, "parked", int) if "parked" in request else 0
    if not 0 <= parked <= MAX_PARKED:
        raise RequestError(f"parked: expected 0 to {MAX_PARKED}, got {parked!r:.80}")
    return parked


def _read_fence_at_ms(request: Mapping[str, object]) -> int:
    at_ms = _field(request, "fence_at_ms", int)
    if not 0 < at_ms <= MAX_FENCE_AT_MS:
        raise RequestError(f"fence_at_ms: expected 1 to {MAX_FENCE_AT_MS}, got {at_ms!r:.80}")
    return at_ms


def _read_socket_path(request: Mapping[str, object]) -> Path:
    path = Path(_field(request, "socket", str))
    if not path.is_absolute() or not path.name or "\0" in str(path):
        raise RequestError(f"socket: expected an absolute path, got {str(path)!r:.200}")
    return path


def _read_signal(request: Mapping[str, object]) -> int:
    signum = _field(request, "signal", int)
    if signum not in signal.valid_signals():
        raise RequestError(f"signal: there is no signal {signum}")
    return signum


def _optional_text(request: Mapping[str, object], name: str) -> str | None:
    return None if request.get(name) is None else _field(request, name, str)


def _field(request: Mapping[str, object], name: str, kind: type[_T]) -> _T:
    value = request.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name}: expected {kind.__name__}, got {value!r:.80}")
    return value


# ---------------------------------------------------------------------- starting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """What a child is to become.

    A stream is a descriptor of the runner's, or a path to append to; None is the runner's own, but
    stdin is then empty where it is not `shares_stdin`. `pass_fds` are its others.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    shares_stdin: bool = False
    stdout: str | int | None = None
    stderr: str | int | None = None
    pass_fds: Collection[int] = ()
    cpus: Collection[int] | None = None
    blocked: Collection[int] = ()
    identity: Identity | None = None


def _program_of(spec: WorkerSpec) -> _Program:
    return _Program(
        argv=spec.argv,
        env=spec.env,
        cwd=spec.cwd,
        shares_stdin=True,
        stdout=spec.stdout,
        stderr=spec.stderr,
        cpus=spec.cpus,
        identity=spec.identity,
    )


def _program_of_zygote(spec: ZygoteSpec, control_fd: int) -> _Program:
    order = {"argv": spec.argv, "fd": control_fd, "modules": spec.modules}
    return _Program(
        argv=spec.argv,
        env=zygote_environ(spec.env, order),
        cwd=spec.cwd,
        stdout=2,  # What is printed on import is for the log.
        pass_fds=(control_fd,),
        cpus=spec.cpus,
        # Workers are to find all dispositions as a fresh interpreter has them.
        blocked=_IGNORED_SIGNALS,
        identity=spec.identity,
    )


def _program_of_store_host(spec: _StoreHostSpec, listen_fd: int, ready_fd: int) -> _Program:
    return _Program(
        argv=(*spec.argv, "--fd", str(listen_fd), "--ready-fd", str(ready_fd)),
        env=spec.env,
        pass_fds=(listen_fd, ready_fd),
        identity=spec.identity,
    )


def _fork_into(program: _Program, says: int) -> int:
    """Fork a child that is to become a program, as leader of its own session; return its pid.

    It dies with this process, has no descriptors but those of the program, no signal ignored, and
    only those blocked that it is to have. What it is about to do it writes to `says`, each step
    with a NUL; the exec closes that. Without a NUL at the end it is why the program does not run.
    Raises `OSError` if it cannot be forked.
    """
    parent = os.getpid()
    # This process ignores what is meant for its workers, and a signal to one that is ignored there
    # would be lost: it waits until the child takes it as a worker does.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become_program(program, parent, says)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _become_program(program: _Program, parent: int, says: int) -> NoReturn:
    try:
        _prepare_child(program, parent, says)
        _open_streams(program, says)
        if program.cwd is not None:
            with _step(f"cwd {program.cwd!r}", says):
                os.chdir(program.cwd)
        for fd in program.pass_fds:
            os.set_inheritable(fd, True)
        with _step(f"argv[0] {program.argv[0]!r}", says):
            _execute(program)
    except StartError as error:
        _write_all(says, str(error))
    except BaseException as error:
        _write_all(says, f"{type(error).__name__}: {error}")
    finally:
        os._exit(NOT_STARTED)


def _prepare_child(program: _Program, parent: int, says: int) -> None:
    """Give a child the session, descriptors, signals, CPUs, leash and account of its program."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    keep = {0, 1, 2, says, *program.pass_fds}
    with suppress(OSError):  # The exec closes them, too; but until then it may hang.
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - keep:  # noqa: PTH208
            with suppress(OSError):
                os.close(fd)
    for signum in signal.valid_signals():
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _put_on_leash(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    if program.cpus is not None:
        with _step(f"cpus {program.cpus!r:.80}", says):
            os.sched_setaffinity(0, program.cpus)
    be_spared_no_more()
    if program.identity is not None:
        with _step(f"user {program.identity.uid}, with its groups and limits", says):
            become(program.identity)
        # Who becomes another user has lost it.
        _put_on_leash(parent)


def _open_streams(program: _Program, says: int) -> None:
    """Have the streams of the program for 0 to 2, opened with the rights of its account."""
    if not program.shares_stdin:
        stdin = os.open(os.devnull, os.O_RDONLY)
        os.dup2(stdin, 0)
        os.close(stdin)
    for fd, name, stream in ((1, "stdout", program.stdout), (2, "stderr", program.stderr)):
        if isinstance(stream, str):
            with _step(f"{name} {stream!r}", says, path=stream):
                log = _open_log(stream)
            os.dup2(log, fd)
            os.close(log)
        elif stream is not None:
            os.dup2(stream, fd)


def _open_log(path: str) -> int:
    """Open a log file to append to."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # O_NONBLOCK, because opening a FIFO that nobody reads would otherwise take for ever.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK
    fd = os.open(path, flags, 0o666)
    os.set_blocking(fd, True)
    return fd


def _execute(program: _Program) -> None:
    try:
        os.execvpe(program.argv[0], program.argv, program.env)
    except FileNotFoundError as error:
        text = os.strerror(errno.ENOENT)
        if Path(program.argv[0]).exists():
            text += (
                "; the file is there, so it is the interpreter named in its first line that is not"
            )
        raise OSError(errno.ENOENT, text) from error


@contextmanager
def _step(what: str, says: int, *, path: str | None = None) -> Iterator[None]:
    """Say what a child is about to do; `StartError` says what of it cannot be done."""
    _write_all(says, f"{what}\0")
    try:
        yield
    except (OSError, ValueError) as error:
        folder = getattr(error, "filename", None)
        where = what if path is None or folder in (None, path) else f"{what}: its folder {folder!r}"
        raise StartError(f"{where}: {_reason(error)}") from error


def _write_all(fd: int, text: str) -> None:
    left = text.encode(errors="replace")
    while left:
        left = left[os.write(fd, left) :]


def _put_on_leash(parent: int) -> None:
    """Have this process die with its parent."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the leash was on.
        os.kill(os.getpid(), signal.SIGKILL)


def be_spared_no_more(score: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Take back what spares the agent when memory runs out: it is not meant for the workers."""
    with suppress(OSError, ValueError):
        if int(score.read_bytes()) < 0:
            score.write_bytes(b"0")


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def write_line(text: str) -> None:
    """Write a line to stderr, unless nobody takes it: that must not hold up or end anything."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0) == [(2, select.POLLOUT)]:
            line = f"rdzv: {text}".encode(errors="backslashreplace")
            os.write(2, line[: select.PIPE_BUF - 1] + b"\n")


# ---------------------------------------------------------------------- the loop


class _Process:
    """A child of this process, which it has forked itself or has had forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Reap it if it has exited; return its exit code then, or less than 0 for a signal."""
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def kill(self) -> None:
        if self._returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@dataclass(eq=False, slots=True)
class _Launch:
    """A child from its fork until it runs its program, or exits without."""

    name: str
    """What it is to be, as a user knows it."""
    fd: int
    """Where it says what it does, to the end once it runs or is gone."""
    on_run: Callable[[], None]
    slow_at: float | None
    pid: int = 0
    said: bytearray = field(default_factory=bytearray)

    @property
    def doing(self) -> str:
        """What it was about to do last."""
        return self.said.rpartition(b"\0")[0].rpartition(b"\0")[2].decode(errors="replace")

    @property
    def failure(self) -> str:
        """Why its program does not run, "" as long as nothing speaks against it."""
        return self.said.rpartition(b"\0")[2].decode(errors="replace")


@dataclass(eq=False, slots=True)
class _Child:
    """A process that the runner has started, until it is reaped."""

    process: _Process
    on_exit: Callable[[int], None]
    """Called with its exit code, which is less than 0 for a signal."""
    launch: _Launch | None = None
    pidfd: int | None = None
    """None where SIGCHLD has to tell of its exit."""


@dataclass(eq=False, slots=True)
class _Round:
    """The round whose processes are here, from its start until they are gone."""

    number: int
    pids: dict[int, int] = field(default_factory=dict)
    """The workers that have been started, by local_rank."""
    running: set[int] = field(default_factory=set)
    """The workers, by pid, that have not exited."""
    leaderless: set[int] = field(default_factory=set)
    """The workers, by pid, that have; others may still be in their process groups."""
    failed: bool = False
    """Whether one of its workers could not be started."""
    signals_sent: set[int] = field(default_factory=set)
    notified_by: int | None = None
    """The signal that told its workers that the node is about to leave."""
    kill_at: float | None = None
    """When the grace of the stop is over; None while no stop has been asked for."""
    fenced: bool = False
    """Whether it has reached the fence."""


@dataclass(eq=False, slots=True)
class _Zygote:
    """A zygote, until it is reaped."""

    process: _Process
    control: socket.socket
    spec: ZygoteSpec
    ready_until: float | None
    """When it is given up; None once it is ready, or has been."""
    ready: bool = False
    lost_because: str = ""
    """Why it ends, where its exit status does not say it."""
    final: bool = False
    """Whether another one would do no better."""
    asked: dict[int, list[_Fork]] = field(default_factory=dict)
    """What it is to fork, by the number of the request."""
    park_at: float | None = None
    """When it is to be asked for what is to be parked, if anything is."""

    def can_host(self, host: _StoreHostSpec) -> bool:
        """Whether this store host would be the same, forked from it."""
        same = (self.spec.argv[0], self.spec.identity) == (host.argv[0], host.identity)
        return self.ready and same and "torch" in self.spec.modules


@dataclass(frozen=True, slots=True)
class _StoreHostSpec:
    """How to start a round's store host; cold, `argv` goes on with its descriptors."""

    round: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    identity: Identity | None


@dataclass(eq=False, slots=True)
class _Fork:
    """What the zygote was asked to fork, until it is reaped or never comes."""

    link: Channel
    """To it, also before it is there. Without, it exits."""
    birth: _Birth | None = None
    """What it is to become; None: it is to be parked."""
    child: _Child | None = None
    told: bool = False
    """Whether it knows what to be, and its link is watched."""
    ahead: bool = False
    """Whether it was asked for to be parked, whatever it has become since."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Birth:
    """What a fork of the zygote is to become, until it runs or is given up."""

    give_up_at: float
    fork: _Fork | None = None
    """None while it waits for a zygote that imports."""
    runs: bool = False

    @property
    def child(self) -> _Child | None:
        """The fork, once it is there."""
        return None if self.fork is None else self.fork.child


@dataclass(eq=False, slots=True, kw_only=True)
class _WorkerBirth(_Birth):
    """A warm worker; it runs from when it is about to run its script."""

    of: _Round
    spec: WorkerSpec


@dataclass(eq=False, slots=True, kw_only=True)
class _HostBirth(_Birth):
    """A warm store host; it runs once it serves."""

    spec: _StoreHostSpec
    listen_fd: int
    """Its socket, kept in case that another has to serve."""
    given_up: str = ""
    """Why a cold one takes its place, as soon as this one is gone."""


@dataclass(eq=False, slots=True)
class _Killing:
    """A kill that goes on until nothing is left."""

    since: float
    told_stuck: bool = False


@dataclass(eq=False, slots=True)
class _Served:
    """How this runner outlives its agent."""

    path: Path
    listener: socket.socket
    orphan_timeout_s: float
    grace_s: float


class Runner:
    """Does what the agent asks, and tells it what becomes of that, until shut down or orphaned."""

    def __init__(self, agent: Channel) -> None:
        self._agent: Channel | None = agent
        self._adopted = True
        """Whether the agent that is connected is in charge, and hears what happens."""
        self._served: _Served | None = None
        self._orphaned_until: float | None = None
        """Without an agent in charge: when that ends everything."""
        self._accept_again_at: float | None = None
        """When it listens for agents again: it could not take one."""
        self._ending = False
        """Whether no agent came in time: everything ends with the round."""
        self._kept: dict[str, str] = {}
        self._events = 0
        # What may happen without an agent has an end, so this has a bound.
        self._unheard: deque[tuple[float, dict[str, object]]] = deque()
        self._last_round: int | None = None
        self._shutting_down = False
        self._finished = False
        self._told_error = False
        self._round: _Round | None = None
        self._killing: _Killing | None = None
        self._own_children = _OwnChildren()
        self._children: dict[int, _Child] = {}
        self._launches: list[_Launch] = []
        self._reap_again_at: float | None = None
        self._store_hosts: dict[int, _Child] = {}
        self._fence_at_ms = 0
        # Made now, so that no fence fails for want of a descriptor.
        self._alarm = _Alarm()
        self._zygote_spec: ZygoteSpec | None = None
        self._zygote: _Zygote | None = None
        self._zygotes_lost = 0
        self._zygote_retry_at: float | None = None
        self._no_zygote_because = ""
        self._births: list[_Birth] = []
        self._parked: deque[_Fork] = deque()
        self._forks_asked = 0
        self._selector = selectors.DefaultSelector()
        self._requests: dict[str, Callable[[Mapping[str, object]], None]] = {
            "start_workers": self._start_workers,
            "stop_workers": self._stop_workers,
            "notify_workers": self._notify_workers,
            "start_store_host": self._start_store_host,
            "stop_store_host": self._stop_store_host,
            "renew_fence": self._renew_fence,
            "keep_zygote": self._keep_zygote,
            "serve": self._serve,
            "keep": self._keep,
            "heard": self._forget_heard,
            "shutdown": self._shutdown,
        }

    def run(self) -> None:
        """Serve until everything is shut down, or the agent is lost and everything killed."""
        doorbell = _sigchld_doorbell()
        self._watch(doorbell.fileno(), partial(self._answer_doorbell, doorbell))
        assert self._agent is not None
        self._watch(self._agent.fileno(), self._serve_agent)
        self._watch(self._alarm.fileno(), self._keep_fence)
        while not self._finished:
            for key, _ in self._selector.select(self._timeout_s()):
                # What came earlier in this batch may have ended the watch over this one.
                if self._selector.get_map().get(key.fd) is key:
                    self._attempt(key.data)
            self._attempt(self._do_what_is_due)
            # Here, so that what was asked for together is forked together.
            self._attempt(self._ask_zygote)
            self._attempt(self._advance)
        self.close()

    def close(self) -> None:
        """Close what a runner has open from the start, and its agents' sockets."""
        self._listen_no_more()
        self._lose_agent()
        self._selector.close()
        self._alarm.close()
        self._own_children.close()

    def _attempt(self, call: Callable[[], object]) -> None:
        """Call; what fails that is not provided for is told once, for the agent to decide."""
        try:
            call()
        except OSError as error:
            # It may have been an exit, which nothing else would tell of again.
            self._reap_again_at = time.monotonic() + PAUSE_S
            if not self._told_error:
                self._told_error = True
                self._emit("error", reason=f"the runner fails: {error}")

    def _watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call when a descriptor can be read; `OSError` if that is one too many."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def _unwatch(self, fd: int) -> None:
        """Watch a descriptor no more, before it is closed; nothing if it is not watched."""
        with suppress(KeyError):
            self._selector.unregister(fd)

    def _close_watched(self, fd: int) -> None:
        self._unwatch(fd)
        os.close(fd)

    def _timeout_s(self) -> float | None:
        if self._killing is not None:
            return SWEEP_INTERVAL_S
        times = [birth.give_up_at for birth in self._births]
        times += [launch.slow_at for launch in self._launches if launch.slow_at is not None]
        if self._round is not None and self._round.kill_at is not None:
            times.append(self._round.kill_at)
        if self._zygote is not None:
            times += [t for t in (self._zygote.ready_until, self._zygote.park_at) if t is not None]
        at_last = self._zygote_retry_at, self._orphaned_until
        again = self._reap_again_at, self._accept_again_at
        times += [t for t in (*at_last, *again) if t is not None]
        return max(min(times) - time.monotonic(), 0.0) if times else None

    # ------------------------------------------------------------------ the agent

    def _serve_agent(self) -> None:
        agent = self._agent
        if agent is None:
            return
        try:
            if agent.has_unsent:
                agent.flush()
                self._await_agent(agent)
            agent.receive()
        except (EOFError, OSError):
            self._lose_agent()
        while self._agent is agent:
            try:
                request = agent.next_message()
                if request is None:
                    return
                self._obey(request)
            except (MalformedFrameError, RequestError) as error:
                self._send({"type": "error", "reason": str(error)})

    def _obey(self, request: Mapping[str, object]) -> None:
        name = _field(request, "type", str)
        if name == "adopt" and not self._adopted:
            self._adopt_by_agent()
            return
        obey = self._requests.get(name)
        if obey is None:
            raise RequestError(f"type: there is no request {name!r:.80}")
        if not self._adopted:
            raise RequestError(f"{name}: this runner was not adopted")
        if self._shutting_down:
            raise RequestError("the runner is shutting down")
        obey(request)

    def _emit(self, event: str, **fields: object) -> None:
        message = {"type": event, **fields}
        if self._served is not None:
            self._events += 1
            message["number"] = self._events
            self._unheard.append((time.monotonic(), message))
        if self._adopted:
            self._send(message)

    def _send(self, message: Mapping[str, object]) -> None:
        agent = self._agent
        if agent is None:
            return
        try:
            agent.send(message)
            self._await_agent(agent)
        except (OSError, BufferError):
            # An agent that does not read is as good as dead.
            self._lose_agent()

    def _await_agent(self, agent: Channel) -> None:
        """Wake up when the agent can be written to, if there is something to write."""
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.has_unsent else 0)
        if self._selector.get_key(agent.fileno()).events != mask:
            self._selector.modify(agent.fileno(), mask, self._serve_agent)

    def _lose_agent(self) -> None:
        if self._agent is None:
            return
        self._unwatch(self._agent.fileno())
        self._agent.close()
        self._agent = None
        was_in_charge, self._adopted = self._adopted, False
        if self._served is None:
            self._shutting_down = True
        elif was_in_charge and not self._ending:
            self._orphaned_until = time.monotonic() + self._served.orphan_timeout_s

    def _shutdown(self, _request: Mapping[str, object]) -> None:
        self._shutting_down = True

    # ------------------------------------------------------------------ the next agent

    def _serve(self, request: Mapping[str, object]) -> None:
        """Outlive the agent from now on; once more, for another time only."""
        path = _read_socket_path(request)
        orphan_timeout_s = _read_seconds(request, "orphan_timeout_s", MAX_ORPHAN_TIMEOUT_S)
        grace_s = _read_seconds(request, "grace_s", MAX_GRACE_S)
        if self._served is None:
            try:
                listener = listen_at(path)
                with closed_if_failing(listener):
                    self._watch(listener.fileno(), self._meet_agent)
            except OSError as error:
                self._emit("serve_failed", reason=f"{path}: {_reason(error)}")
                return
            self._served = _Served(path, listener, orphan_timeout_s, grace_s)
        self._served.orphan_timeout_s, self._served.grace_s = orphan_timeout_s, grace_s

    def _keep(self, request: Mapping[str, object]) -> None:
        self._kept[_field(request, "name", str)] = _field(request, "value", str)

    def _forget_heard(self, request: Mapping[str, object]) -> None:
        number = _field(request, "number", int)
        while self._unheard and _field(self._unheard[0][1], "number", int) <= number:
            self._unheard.popleft()

    def _meet_agent(self) -> None:
        """Say hello to who connects, unless there is an agent, or it is somebody else's."""
        assert self._served is not None
        listener = self._served.listener
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):  # It has gone again.
                self._unwatch(listener.fileno())  # It would be readable all the while.
                self._accept_again_at = time.monotonic() + PAUSE_S
            return
        pid, uid = peer_of(connection)
        if uid not in (0, os.geteuid()):
            connection.close()
            return
        self._serve_agent()  # Its end may stand to be read, too.
        channel = Channel(connection)
        if self._agent is not None:
            reason = f"this runner, pid {os.getpid()}, has an agent; pid {pid} is one too many"
            with suppress(OSError):
                channel.send({"type": "refused", "reason": reason})
            channel.close()
            return
        try:
            self._watch(channel.fileno(), self._serve_agent)
        except OSError:
            channel.close()  # It may try again.
            return
        self._agent = channel
        self._send(self._hello())

    def _listen_again(self, now: float) -> None:
        assert self._served is not None
        try:
            self._watch(self._served.listener.fileno(), self._meet_agent)
            self._accept_again_at = None
        except OSError:
            self._accept_again_at = now + PAUSE_S

    def _hello(self) -> Mapping[str, object]:
        held = self._round
        return {
            "type": "hello",
            "version": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "round": None if held is None else held.number,
            "last_round": self._last_round,
            "workers": [] if held is None else sorted(held.pids.items()),
            "store_hosts": sorted({*self._store_hosts, *self._host_births()}),
            "zygote": self._zygote_spec is not None,
            "kept": self._kept,
        }

    def _adopt_by_agent(self) -> None:
        """Tell the agent all that nobody has heard, and take orders from it."""
        self._adopted, self._orphaned_until = True, None
        now = time.monotonic()
        for at, message in tuple(self._unheard):
            if "age_ms" in message:
                self._send({**message, "age_ms": round((now - at) * 1000)})
            else:
                self._send(message)

    def _end_orphaned(self) -> None:
        """Stop the workers, and then everything: no agent has come."""
        assert self._served is not None
        write_line(
            f"runner pid {os.getpid()}: no agent within "
            f"{self._served.orphan_timeout_s:g} s; its workers are stopped"
        )
        self._orphaned_until, self._ending = None, True
        self._listen_no_more()
        self._lose_agent()
        if self._round is None:
            self._shutting_down = True
        else:
            self._begin_stop(self._round, signal.SIGTERM, self._served.grace_s)

    def _listen_no_more(self) -> None:
        if self._served is not None and self._served.listener.fileno() >= 0:
            self._accept_again_at = None
            self._unwatch(self._served.listener.fileno())
            self._served.listener.close()
            with suppress(OSError):
                self._served.path.unlink()

    # ------------------------------------------------------------------ children

    def _launch(
        self, name: str, program: _Program, on_run: Callable[[], None] = lambda: None
    ) -> _Launch:
        """Fork a child that is to become a program, to be looked after; never wait for it.

        `on_run` is called once it runs, and also if it was killed before. Raises `OSError` if it
        cannot be forked.
        """
        fd, says = os.pipe2(os.O_CLOEXEC)
        launch = _Launch(name, fd, on_run, time.monotonic() + START_SLOW_S)
        try:
            os.set_blocking(fd, False)
            self._watch(fd, partial(self._hear_launch, launch))
            launch.pid = _fork_into(program, says)
        except OSError:
            self._close_watched(fd)
            raise
        finally:
            os.close(says)
        self._launches.append(launch)
        return launch

    def _hear_launch(self, launch: _Launch) -> None:
        try:
            while said := os.read(launch.fd, _RECEIVE_BYTES):
                launch.said += said
        except BlockingIOError:
            return
        self._launches.remove(launch)
        self._close_watched(launch.fd)
        if not launch.failure:
            launch.on_run()

    def _tell_of_slow_launches(self, now: float) -> None:
        for launch in self._launches:
            if launch.slow_at is not None and now >= launch.slow_at:
                launch.slow_at = None
                write_line(
                    f"{launch.name}, pid {launch.pid}, is not started after {START_SLOW_S:g} s, "
                    f"and waits for this: {launch.doing or 'to run'}"
                )

    def _look_after(
        self, process: _Process, on_exit: Callable[[int], None], launch: _Launch | None = None
    ) -> _Child:
        child = self._children[process.pid] = _Child(process, on_exit, launch)
        # By pidfds, because epoll returns them in the order of the exits: who failed first? Where
        # there is none to be had, only that is lost.
        with suppress(OSError):
            child.pidfd = os.pidfd_open(process.pid)
            try:
                self._watch(child.pidfd, partial(self._notice_exit, child))
            except OSError:
                close_fd(child.pidfd)
                child.pidfd = None
        return child

    def _notice_exit(self, child: _Child) -> None:
        assert child.pidfd is not None
        self._close_watched(child.pidfd)  # It would stay readable.
        child.pidfd = None
        self._reap_child(child)

    def _reap_child(self, child: _Child) -> None:
        code = child.process.poll()
        if code is None:
            return  # A debugger sees it first; SIGCHLD comes when that lets go.
        if child.launch in self._launches:
            self._hear_launch(child.launch)
        del self._children[child.process.pid]
        child.on_exit(code)

    def _answer_doorbell(self, doorbell: socket.socket) -> None:
        with suppress(BlockingIOError):
            doorbell.recv(4096)
        self._reap_unwatched()

    def _reap_unwatched(self) -> None:
        """Reap the children that have exited and have no pidfd: only SIGCHLD tells of those."""
        self._reap_again_at = None
        for child in [child for child in self._children.values() if child.pidfd is None]:
            self._reap_child(child)
        try:
            reap(pid for pid in self._own_children.pids() if pid not in self._children)
        except OSError:
            self._reap_again_at = time.monotonic() + PAUSE_S

    def _kill_what_is_left(self) -> list[int]:
        """Send SIGKILL to all that the end of a round does not leave alone; return their pids.

        The children alone decide whether anything is left. Raises `OSError` if they cannot be
        listed, and so may be there.
        """
        exempt = self._exempt()
        left = [pid for pid in self._own_children.pids() if pid not in exempt]
        for pid in left:
            # Not reaped, so the number is its own.
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        below = descendants_of(left)[len(left) :]
        family = {*left, *below}
        for pid in below:
            signal_relative(pid, signal.SIGKILL, family)
        return left + below

    # ------------------------------------------------------------------ workers

    def _start_workers(self, request: Mapping[str, object]) -> None:
        number = _field(request, "round", int)
        specs = _read_worker_specs(request)
        ranks = _field(request, "warm", list) if "warm" in request else []
        if self._round is not None:
            raise RequestError(f"round {number} can not start: {self._round.number} is not gone")
        self._round = started = _Round(number)
        self._last_round = number
        self._keep_fence()
        if started.fenced:
            return
        self._start_cold(started, [spec for spec in specs if spec.local_rank not in ranks])
        self._start_warm(started, [spec for spec in specs if spec.local_rank in ranks])

    def _start_cold(self, started: _Round, specs: Iterable[WorkerSpec]) -> None:
        for spec in specs:
            if started.kill_at is not None:
                return  # It ends already: one before has failed to start, for instance.
            self._start_worker(started, spec)

    def _start_worker(self, started: _Round, spec: WorkerSpec) -> None:
        name = f"round {started.number}: the worker of local_rank {spec.local_rank}"
        try:
            launch = self._launch(
                name, _program_of(spec), lambda: self._emit_started(started, spec, launch.pid)
            )
        except OSError as error:
            self._fail_start(started, spec, f"{name} cannot be forked: {_reason(error)}")
            return
        started.running.add(launch.pid)
        on_exit = partial(self._end_worker, started, spec, launch)
        self._look_after(_Process(launch.pid), on_exit, launch)

    def _end_worker(self, of: _Round, spec: WorkerSpec, launch: _Launch, code: int) -> None:
        if launch.failure:
            of.running.discard(launch.pid)
            self._fail_start(of, spec, launch.failure)
        else:
            self._report_exit(of, spec.local_rank, launch.pid, code)

    def _emit_started(self, started: _Round, spec: WorkerSpec, pid: int) -> None:
        started.pids[spec.local_rank] = pid
        self._emit("started", round=started.number, local_rank=spec.local_rank, pid=pid)
        if started.notified_by is not None:
            signal_group(pid, started.notified_by)

    def _fail_start(self, failed: _Round, spec: WorkerSpec, reason: str) -> None:
        """Have the round killed; the first reason is told, for the others may follow from it."""
        failed.kill_at = time.monotonic()
        self._drop_births(self._worker_births())
        if not failed.failed:
            failed.failed = True
            number, local_rank = failed.number, spec.local_rank
            self._emit("start_failed", round=number, local_rank=local_rank, reason=reason)

    def _report_exit(self, of: _Round, local_rank: int, pid: int, code: int) -> None:
        of.running.discard(pid)
        of.leaderless.add(pid)
        self._emit(
            "exited",
            round=of.number,
            local_rank=local_rank,
            pid=pid,
            **_exit_fields(code),
            age_ms=0,
        )

    def _stop_workers(self, request: Mapping[str, object]) -> None:
        """Begin to end a round. A second stop may shorten the grace, never lengthen it.

        A signal is sent once, so that a handler that is at work is not entered twice.
        """
        number = _field(request, "round", int)
        signum, grace_s = _read_signal(request), _read_seconds(request, "grace_s", MAX_GRACE_S)
        stopping = self._round
        if stopping is None or number < stopping.number:
            self._emit("gone", round=number)
            return
        if number > stopping.number:
            raise RequestError(f"round {number} can not stop: it is round {stopping.number} here")
        self._begin_stop(stopping, signum, grace_s)

    def _begin_stop(self, stopping: _Round, signum: int, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        if stopping.kill_at is None or kill_at < stopping.kill_at:
            stopping.kill_at = kill_at
        # Those that are not forked yet never run. The others are signalled, as if they did.
        self._drop_births([birth for birth in self._worker_births() if birth.child is None])
        if signum not in stopping.signals_sent:
            stopping.signals_sent.add(signum)
            self._signal_groups(stopping, signum)

    def _notify_workers(self, request: Mapping[str, object]) -> None:
        """Signal the round's workers, each once; those that are on their way when they run.

        A stop with the same signal does not repeat it.
        """
        number, signum = _field(request, "round", int), _read_signal(request)
        told = self._round
        if told is None or number != told.number or signum in told.signals_sent:
            return
        told.signals_sent.add(signum)
        told.notified_by = signum
        births = self._worker_births()
        waiting = {birth.child.process.pid for birth in births if birth.child is not None}
        waiting |= {launch.pid for launch in self._launches}
        self._signal_groups(told, signum, but=waiting)

    def _signal_groups(self, stopping: _Round, signum: int, but: Collection[int] = ()) -> None:
        """Signal the process groups of a round's workers, also of those that have exited."""
        for pid in stopping.running.difference(but):
            signal_group(pid, signum)
        if not stopping.leaderless:
            return
        with suppress(OSError):  # They are killed after the grace all the same.
            found = descendants_of(self._own_children.pids(), self._exempt())
            family = {os.getpid(), *found}
            for pid in found:
                with suppress(ProcessLookupError):
                    if os.getpgid(pid) in stopping.leaderless:
                        signal_relative(pid, signum, family)

    # ------------------------------------------------------------------ warm workers

    def _start_warm(self, started: _Round, specs: Sequence[WorkerSpec]) -> None:
        """Have workers forked: now, or once the zygote is ready, or start them cold."""
        zygote, kept = self._zygote, self._zygote_spec
        if not specs or started.kill_at is not None:
            return
        if zygote is not None and (zygote.ready or (kept is not None and kept.wait_s > 0)):
            within_s = FORK_TIMEOUT_S if zygote.ready or kept is None else kept.wait_s
            at = time.monotonic() + within_s
            self._births += [_WorkerBirth(of=started, spec=spec, give_up_at=at) for spec in specs]
        else:
            why = self._no_zygote_because
            if zygote is not None:
                why = zygote.lost_because or "the zygote still imports"
            self._start_cold_instead(started, specs, why)

    def _worker_births(self) -> list[_WorkerBirth]:
        return [birth for birth in self._births if isinstance(birth, _WorkerBirth)]

    def _host_births(self) -> dict[int, _HostBirth]:
        """Return the store hosts that are on their way, by round."""
        births = [birth for birth in self._births if isinstance(birth, _HostBirth)]
        return {birth.spec.round: birth for birth in births}

    def _start_cold_instead(
        self, started: _Round, specs: Sequence[WorkerSpec], reason: str
    ) -> None:
        if started.kill_at is None and not self._shutting_down and specs:
            ranks = [spec.local_rank for spec in specs]
            self._emit("started_cold", round=started.number, local_ranks=ranks, reason=reason)
            self._start_cold(started, specs)

    def _give_up(self, births: Sequence[_Birth], reason: str) -> None:
        """Start others in place of these, which have not run anything of the user's."""
        births = [birth for birth in births if birth in self._births]
        workers = [birth for birth in births if isinstance(birth, _WorkerBirth)]
        self._drop_births(workers)
        if workers:
            self._start_cold_instead(workers[0].of, [birth.spec for birth in workers], reason)
        for birth in births:
            if isinstance(birth, _HostBirth):
                self._give_up_host(birth, reason)

    def _give_up_host(self, birth: _HostBirth, reason: str) -> None:
        """Start a store host cold in place of this one, once that holds the socket no more."""
        if birth.child is not None:
            birth.given_up, birth.give_up_at = reason, time.monotonic() + FORK_TIMEOUT_S
            self._close_link(birth.fork)
            birth.child.process.kill()
            return
        self._births.remove(birth)
        self._close_link(birth.fork)
        self._start_host_instead(birth, reason)

    def _start_host_instead(self, birth: _HostBirth, reason: str) -> None:
        write_line(f"round {birth.spec.round}: its store host starts cold: {reason}")
        try:
            if not self._shutting_down:
                self._spawn_store_host(birth.spec, birth.listen_fd)
        finally:
            os.close(birth.listen_fd)

    def _drop_births(self, births: Sequence[_Birth]) -> None:
        """Have these never run: without a link a fork exits."""
        for birth in births:
            self._births.remove(birth)
            self._close_link(birth.fork)
            if birth.child is not None:
                birth.child.process.kill()
            if isinstance(birth, _HostBirth):
                os.close(birth.listen_fd)

    def _close_link(self, fork: _Fork | None) -> None:
        if fork is not None and fork.link.fileno() >= 0:
            self._unwatch(fork.link.fileno())
            fork.link.close()

    def _do_what_is_due(self) -> None:
        """Start a zygote, give up one, or births, or the wait for an agent: where it is time."""
        now = time.monotonic()
        if self._orphaned_until is not None and now >= self._orphaned_until:
            self._end_orphaned()
        if self._accept_again_at is not None and now >= self._accept_again_at:
            self._listen_again(now)
        if self._reap_again_at is not None and now >= self._reap_again_at:
            self._reap_unwatched()
        self._tell_of_slow_launches(now)
        if self._zygote_retry_at is not None and now >= self._zygote_retry_at:
            self._zygote_retry_at = None
            if not self._shutting_down:
                self._start_zygote()
        zygote = self._zygote
        if zygote is not None and zygote.ready_until is not None and now >= zygote.ready_until:
            self._give_up_zygote(zygote, f"it has not imported within {PRELOAD_TIMEOUT_S:.0f} s")
        if zygote is not None and zygote.park_at is not None and now >= zygote.park_at:
            self._park(zygote)
        late = [birth for birth in self._births if now >= birth.give_up_at]
        unforked = [birth for birth in late if birth.fork is not None and birth.child is None]
        if unforked and zygote is not None:
            # Nothing else may be asked of such a zygote.
            self._give_up_zygote(zygote, f"it has not forked within {FORK_TIMEOUT_S:g} s")
        waits = [birth for birth in late if birth.fork is None]
        self._give_up(waits, "the zygote still imports")
        self._give_up(late, f"its fork was not ready within {FORK_TIMEOUT_S:g} s")

    # ------------------------------------------------------------------ the zygote

    def _keep_zygote(self, request: Mapping[str, object]) -> None:
        spec = _read_zygote_spec(request)
        if self._zygote_spec is not None:
            raise RequestError("there is a zygote for this job")
        self._zygote_spec = spec
        self._start_zygote()

    def _start_zygote(self) -> None:
        spec = self._zygote_spec
        assert spec is not None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, closed_if_failing(ours):
                ours.setblocking(False)
                launch = self._launch("the zygote", _program_of_zygote(spec, theirs.fileno()))
                process = _Process(launch.pid)
                zygote = _Zygote(process, ours, spec, time.monotonic() + PRELOAD_TIMEOUT_S)
                self._watch(ours.fileno(), partial(self._read_zygote, zygote))
        except OSError as error:
            reason = f"can not start {spec.argv[0]!r}: {_reason(error)}"
            self._tell_zygote_lost(reason, final=False)
            return
        self._zygote = zygote
        self._look_after(process, partial(self._lose_zygote, zygote, launch), launch)

    def _read_zygote(self, zygote: _Zygote) -> bool:
        """Read a message of the zygote's; False if there is none, now or any more."""
        try:
            data = zygote.control.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_control(zygote)
            return False
        try:
            self._hear_zygote(zygote, json.loads(data))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            self._give_up_zygote(zygote, f"it says {data!r:.200}: {error!r}")
        return True

    def _hear_zygote(self, zygote: _Zygote, message: Mapping[str, Any]) -> None:
        if not isinstance(message, dict):
            raise TypeError("it is no JSON object")
        if "ready" in message:
            told = _read_readiness(message["ready"])
            zygote.ready, zygote.ready_until = True, None
            self._park(zygote)
            self._emit("zygote_ready", pid=zygote.process.pid, **told)
        elif "refused" in message:
            zygote.lost_because, zygote.final = str(message["refused"]), True
        else:
            # It is the user's own process, and may say anything.
            pids = [pid for pid in message["pids"] if type(pid) is int]
            forks = zygote.asked.pop(message["forked"])
            self._adopt(forks, pids, str(message["reason"]))

    def _close_control(self, zygote: _Zygote) -> None:
        if zygote.control.fileno() >= 0:
            self._unwatch(zygote.control.fileno())
            zygote.control.close()

    def _give_up_zygote(self, zygote: _Zygote, reason: str) -> None:
        """Kill a zygote that can not be worked with."""
        zygote.ready, zygote.ready_until = False, None
        self._drop_parked(zygote)
        zygote.lost_because = zygote.lost_because or reason
        self._close_control(zygote)
        zygote.process.kill()
        self._give_up([birth for birth in self._births if birth.child is None], reason)

    def _lose_zygote(self, zygote: _Zygote, launch: _Launch, code: int) -> None:
        while zygote.control.fileno() >= 0 and self._read_zygote(zygote):
            pass
        self._close_control(zygote)
        self._drop_parked(zygote)
        self._zygote = None
        if self._shutting_down:
            return
        ended = f"it was killed by signal {-code}" if code < 0 else f"it exited with {code}"
        if launch.failure:
            ended = f"can not start {zygote.spec.argv[0]!r}: {launch.failure}"
        self._tell_zygote_lost(zygote.lost_because or ended, final=zygote.final)
        waiting = [birth for birth in self._births if birth.child is None]
        self._give_up(waiting, self._no_zygote_because)

    def _tell_zygote_lost(self, reason: str, *, final: bool) -> None:
        self._no_zygote_because = f"there is no zygote: {reason}"
        retry_s = None
        if not final:
            retry_s = min(2.0**self._zygotes_lost, MAX_ZYGOTE_RETRY_S)
            self._zygote_retry_at = time.monotonic() + retry_s
            self._zygotes_lost += 1
        self._emit("zygote_lost", reason=reason, retry_s=retry_s)

    def _ask_zygote(self) -> None:
        """Give a fork to all that wait for one, once there is a zygote: a parked or a new one."""
        zygote = self._zygote
        if zygote is None or not zygote.ready:
            return
        births = deque(birth for birth in self._births if birth.fork is None)
        coming = self._coming(zygote)
        while births and (self._parked or coming):
            birth = births.popleft()
            fork = self._parked.popleft() if self._parked else coming.popleft()
            birth.fork, birth.give_up_at = fork, time.monotonic() + FORK_TIMEOUT_S
            fork.birth = birth
            if fork.child is not None:
                self._tell_what_to_be(birth)
        if births:
            try:
                self._ask_for(zygote, births)
            except OSError as error:
                self._give_up(births, f"the zygote can not be asked: {error}")

    def _ask_for(self, zygote: _Zygote, births: Sequence[_Birth | None]) -> None:
        """Ask for one fork for each of these, None for one that is parked."""
        waiting = deque(births)
        while waiting:
            forks: list[_Fork] = []
            with ExitStack() as stack:
                fds = []
                while waiting and len(forks) < MAX_FORKS_AT_ONCE:
                    ours, theirs = socket.socketpair()
                    stack.enter_context(theirs)
                    fds.append(theirs.fileno())
                    birth = waiting.popleft()
                    # A fork is the job's own process, and answers with a few words.
                    link = Channel(ours, takes_fds=False, max_bytes=MAX_ANSWER_BYTES)
                    forks.append(_Fork(link, birth, ahead=birth is None))
                    if birth is not None:
                        birth.fork, birth.give_up_at = forks[-1], time.monotonic() + FORK_TIMEOUT_S
                self._forks_asked += 1
                request = json.dumps({"fork": self._forks_asked, "forks": len(forks)})
                socket.send_fds(zygote.control, [request.encode()], fds)
            zygote.asked[self._forks_asked] = forks

    def _coming(self, zygote: _Zygote) -> deque[_Fork]:
        """Return what was asked for to be parked, and is not there yet."""
        return deque(fork for asked in zygote.asked.values() for fork in asked if not fork.birth)

    def _park_soon(self, zygote: _Zygote) -> None:
        if zygote.spec.parked:
            zygote.park_at = time.monotonic() + PARK_AFTER_S

    def _park(self, zygote: _Zygote) -> None:
        """Have as many forks ready as are wanted."""
        zygote.park_at = None
        lacking = zygote.spec.parked - len(self._parked) - len(self._coming(zygote))
        if zygote.ready and not self._shutting_down:
            # Where it does not work now, it is tried when workers were forked without.
            with suppress(OSError):
                self._ask_for(zygote, [None] * lacking)

    def _drop_parked(self, zygote: _Zygote) -> None:
        zygote.park_at = None
        for fork in self._parked:
            self._close_link(fork)
        self._parked.clear()

    def _adopt(self, forks: Sequence[_Fork], pids: Sequence[int], reason: str) -> None:
        """Take on what the zygote has forked; all of it waits to be told what to be."""
        for fork, pid in zip(forks, pids, strict=False):
            if fork.birth is None or fork.birth in self._births:  # Else it was given up, and exits.
                try:
                    self._adopt_one(fork, pid)
                except OSError as error:
                    reason = reason or str(error)
        if not reason:
            self._zygotes_lost = 0
        for fork in forks:
            if fork.child is None:
                self._close_link(fork)
        births = [fork.birth for fork in forks if fork.birth is not None and fork.child is None]
        self._replace_forks(births, reason)

    def _replace_forks(self, births: Sequence[_Birth], reason: str) -> None:
        """Have these forked anew whose fork was made ahead, and died; give up the others.

        The end of a round kills every process that is not known, as a fork is before the zygote
        has said its pid; and what waits for long may be killed by anybody.
        """
        given_up = []
        for birth in births:
            ended = isinstance(birth, _WorkerBirth) and birth.of.kill_at is not None
            may_ask = self._zygote is not None and self._zygote.ready and not ended
            if may_ask and birth in self._births and birth.fork is not None and birth.fork.ahead:
                birth.fork, birth.give_up_at = None, time.monotonic() + FORK_TIMEOUT_S
            else:
                given_up.append(birth)
        self._give_up(given_up, reason)

    def _adopt_one(self, fork: _Fork, pid: int) -> None:
        if pid in self._children or pid not in self._own_children.pids():
            raise ProcessLookupError("it died before it ran anything")
        fork.child = self._look_after(_Process(pid), partial(self._end_fork, fork, pid))
        if fork.birth is None:
            self._parked.append(fork)
        else:
            self._tell_what_to_be(fork.birth)

    def _tell_what_to_be(self, birth: _Birth) -> None:
        assert birth.child is not None
        try:
            if isinstance(birth, _WorkerBirth):
                birth.of.running.add(birth.child.process.pid)
                self._tell_worker(birth)
            elif isinstance(birth, _HostBirth):
                self._tell_host(birth)
        except (OSError, ValueError, BufferError) as error:
            self._give_up([birth], str(error))

    def _tell_worker(self, birth: _WorkerBirth) -> None:
        names = ("argv", "env", "cwd", "cpus", "stdout", "stderr")
        told = {name: getattr(birth.spec, name) for name in names}
        assert self._zygote_spec is not None
        told |= {"given": self._zygote_spec.env, "parent": os.getpid()}
        self._tell(birth, told, 0, 1, 2)

    def _tell_host(self, birth: _HostBirth) -> None:
        told = {name: getattr(birth.spec, name) for name in ("argv", "env")}
        told |= {"cpus": sorted(os.sched_getaffinity(0)), "parent": os.getpid()}
        stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._tell(birth, {"store_host": told}, stdin, 1, 2, birth.listen_fd)
        finally:
            os.close(stdin)

    def _tell(self, birth: _Birth, what: Mapping[str, object], *fds: int) -> None:
        """Tell a fork what it is to be; that it is gone tells its exit."""
        fork = birth.fork
        assert fork is not None
        fork.told = True
        self._watch(fork.link.fileno(), partial(self._serve_link, fork))
        with suppress(ConnectionError):
            fork.link.send(what, *dup_fds(*fds))
            self._await_link(fork)

    def _serve_link(self, fork: _Fork) -> None:
        """Hear from a fork whether it runs."""
        try:
            fork.link.flush()
            self._await_link(fork)
            fork.link.receive()
            answer = fork.link.next_message()
        except (EOFError, OSError, MalformedFrameError):
            self._close_link(fork)  # Its exit tells.
            return
        if answer is not None:
            self._conclude(fork, answer)

    def _await_link(self, fork: _Fork) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if fork.link.has_unsent else 0)
        self._selector.modify(fork.link.fileno(), mask, partial(self._serve_link, fork))

    def _conclude(self, fork: _Fork, answer: Mapping[str, object]) -> None:
        birth = fork.birth
        assert birth is not None
        assert fork.child is not None
        if "ready" in answer:
            self._births.remove(birth)
            self._close_link(fork)
            birth.runs = True
            if self._zygote is not None:
                self._park_soon(self._zygote)
            if isinstance(birth, _WorkerBirth):
                self._emit_started(birth.of, birth.spec, fork.child.process.pid)
            elif isinstance(birth, _HostBirth):
                os.close(birth.listen_fd)
                self._store_hosts[birth.spec.round] = fork.child
                self._emit("store_host_ready", round=birth.spec.round)
        elif "failed" in answer and isinstance(birth, _WorkerBirth):
            self._fail_start(birth.of, birth.spec, str(answer["failed"]))
        else:
            self._give_up([birth], str(answer.get("refused")))

    def _end_fork(self, fork: _Fork, pid: int, code: int) -> None:
        """Take note that a fork has exited, at whatever point."""
        birth = fork.birth
        if birth in self._births and fork.told and fork.link.fileno() >= 0:
            self._serve_link(fork)  # It may have been ready, and its script short.
        self._close_link(fork)
        reason = "its fork died before it ran anything"
        if isinstance(birth, _HostBirth):
            if birth.runs:
                self._report_store_host_exit(birth.spec.round, code)
            elif birth.given_up and birth in self._births:
                self._births.remove(birth)
                self._start_host_instead(birth, birth.given_up)
            else:
                fork.child = None
                self._replace_forks([birth], reason)
        elif isinstance(birth, _WorkerBirth):
            if birth.runs:
                self._report_exit(birth.of, birth.spec.local_rank, pid, code)
                return
            birth.of.running.discard(pid)
            self._replace_forks([birth], reason)
        elif fork in self._parked:
            self._parked.remove(fork)

    # ------------------------------------------------------------------ the fence

    def _renew_fence(self, request: Mapping[str, object]) -> None:
        """Move the fence on; never back."""
        at_ms = _read_fence_at_ms(request)
        self._fence_at_ms = max(at_ms, self._fence_at_ms)
        self._keep_fence()

    def _keep_fence(self) -> None:
        """Have a round killed that has reached the fence; wake up when it does."""
        held = self._round
        if held is None or held.fenced or not self._fence_at_ms:
            self._alarm.set(None)
        elif boottime_ms() < self._fence_at_ms:
            self._alarm.set(self._fence_at_ms)
        else:
            self._alarm.set(None)
            held.fenced = True
            held.kill_at = time.monotonic()
            # Before any worker's exit, so that nobody takes that for a failure.
            self._emit("fenced", round=held.number, at_ms=boottime_ms())

    # ------------------------------------------------------------------ the end

    def _advance(self) -> None:
        """Take the end of the round, or of everything, as far as it can be taken now."""
        if self._killing is None:
            if not self._is_kill_due():
                return
            self._killing = _Killing(time.monotonic())
            self._drop_births([*self._births] if self._shutting_down else self._worker_births())
        try:
            left = self._kill_what_is_left()
        except OSError:  # It is asked again, as after any other kill.
            self._tell_if_stuck(self._killing, sorted(self._children.keys() - self._exempt()))
            return
        if left:
            self._tell_if_stuck(self._killing, left)
            return
        self._killing = None
        if self._round is not None:
            number, self._round = self._round.number, None
            self._keep_fence()
            self._emit("gone", round=number)
        if self._ending and not self._shutting_down:
            self._shutting_down = True
            self._advance()
            return
        self._finished = self._shutting_down

    def _is_kill_due(self) -> bool:
        if self._shutting_down:
            return True
        if self._round is None or self._round.kill_at is None:
            return False
        return not self._round.running or time.monotonic() >= self._round.kill_at

    def _exempt(self) -> set[int]:
        """Name the children that the end of a round leaves alone."""
        if self._shutting_down:
            return set()
        exempt = {host.process.pid for host in self._store_hosts.values()}
        births = self._host_births().values()
        exempt |= {birth.child.process.pid for birth in births if birth.child is not None}
        exempt |= {fork.child.process.pid for fork in self._parked if fork.child is not None}
        if self._zygote is not None:
            exempt.add(self._zygote.process.pid)
        return exempt

    def _tell_if_stuck(self, killing: _Killing, left: list[int]) -> None:
        if killing.told_stuck or time.monotonic() < killing.since + STUCK_AFTER_S:
            return
        killing.told_stuck = True
        if self._round is not None:
            self._emit("stuck", round=self._round.number, pids=left)

    # ------------------------------------------------------------------ store hosts

    def _start_store_host(self, request: Mapping[str, object]) -> None:
        listen_fd = None if self._agent is None else self._agent.take_fd()
        if listen_fd is None and self._agent is not None and self._agent.lost_fds:
            number = _field(request, "round", int)
            self._fail_store_host(number, f"its socket was lost: {os.strerror(errno.EMFILE)}")
            return
        if listen_fd is None:
            raise RequestError("start_store_host came without a listening socket")
        try:
            spec = _StoreHostSpec(
                round=_field(request, "round", int),
                argv=tuple(_read_argv(request)),
                env=_read_env(request),
                identity=_read_identity(request),
            )
            if spec.round in self._store_hosts or spec.round in self._host_births():
                raise RequestError(f"round {spec.round} has a store host")
            if self._zygote is not None and self._zygote.can_host(spec):
                [copy] = dup_fds(listen_fd)
                give_up_at = time.monotonic() + FORK_TIMEOUT_S
                self._births.append(_HostBirth(spec=spec, listen_fd=copy, give_up_at=give_up_at))
            else:
                self._spawn_store_host(spec, listen_fd)
        except OSError as error:
            self._fail_store_host(_field(request, "round", int), _reason(error))
        finally:
            # The host alone may hold it: when it dies, its clients must hear of it.
            os.close(listen_fd)

    def _spawn_store_host(self, spec: _StoreHostSpec, listen_fd: int) -> None:
        try:
            ready_fd, ready_end = os.pipe2(os.O_CLOEXEC)
            try:
                program = _program_of_store_host(spec, listen_fd, ready_end)
                self._watch(ready_fd, partial(self._read_ready, spec.round, ready_fd))
                launch = self._launch(f"the store host of round {spec.round}", program)
            except OSError:
                self._close_watched(ready_fd)
                raise
            finally:
                os.close(ready_end)
        except OSError as error:
            self._fail_store_host(spec.round, _reason(error))
            return
        on_exit = partial(self._end_store_host, spec, launch)
        child = self._look_after(_Process(launch.pid), on_exit, launch)
        self._store_hosts[spec.round] = child

    def _fail_store_host(self, number: int, reason: str) -> None:
        write_line(f"cannot start the store host of round {number}: {reason}")
        self._emit("store_host_exited", round=number, exit_code=NOT_STARTED, signal=None)

    def _read_ready(self, number: int, ready_fd: int) -> None:
        said = os.read(ready_fd, 64)
        self._close_watched(ready_fd)
        if said == b"ready\n" and number in self._store_hosts:
            self._emit("store_host_ready", round=number)

    def _end_store_host(self, spec: _StoreHostSpec, launch: _Launch, code: int) -> None:
        if launch.failure:
            write_line(f"cannot start the store host {spec.argv[0]!r}: {launch.failure}")
        self._report_store_host_exit(spec.round, code)

    def _report_store_host_exit(self, number: int, code: int) -> None:
        del self._store_hosts[number]
        self._emit("store_host_exited", round=number, **_exit_fields(code))

    def _stop_store_host(self, request: Mapping[str, object]) -> None:
        number = _field(request, "round", int)
        host = self._store_hosts.get(number)
        if host is not None:
            host.process.kill()
        elif (birth := self._host_births().get(number)) is not None:
            self._drop_births([birth])
            killed = _exit_fields(-signal.SIGKILL)
            self._emit("store_host_exited", round=number, **killed)


def _read_readiness(said: Mapping[str, Any]) -> dict[str, object]:
    """Return what a zygote says of itself, and nothing else that it may say."""
    return {
        "modules": [str(name) for name in said["modules"]],
        "threads": int(said["threads"]),
        "memory_kb": int(said["memory_kb"]),
        "seconds": float(said["seconds"]),
    }


def _exit_fields(code: int) -> dict[str, int | None]:
    """Split a return code of Popen's into what was exited with and what it was killed by."""
    if code < 0:
        return {"exit_code": None, "signal": -code}
    return {"exit_code": code, "signal": None}


def _sigchld_doorbell() -> socket.socket:
    """Return a socket that is readable after a child of this process has exited."""
    doorbell, ringer = socket.socketpair()
    doorbell.setblocking(False)
    ringer.setblocking(False)
    signal.set_wakeup_fd(ringer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return doorbell


def main() -> None:
    """Be the runner of the agent whose socket is named on the command line."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        sys.exit("rdzv: /proc has no lists of children; the kernel needs CONFIG_PROC_CHILDREN")
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    for signum in _IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    become_subreaper()
    try:
        Runner(Channel(socket.socket(fileno=fd))).run()
    except BaseException:
        # Else nothing is left here.
        sweep_descendants()
        raise


if __name__ == "__main__":
    main()

"""The runner: always the parent of one job's workers on one node, and of the job's store hosts.

Run by path with the standard library alone (`python -I -S runner.py FD`), so that it starts in
milliseconds, has one thread, and nothing in the job's or the agent's surroundings can break it. FD
is its end of a Unix stream socket to the agent, both directions of which carry `Channel` frames.

What the agent may ask (a request that is refused changes nothing, and is answered by `error`):

    start_workers     {round, workers: [{local_rank, argv, env, cwd, stdout, stderr}]}
    stop_workers      {round, signal, grace_s}
    start_store_host  {round, argv, env}, and with it a listening socket
    stop_store_host   {round}
    renew_fence       {fence_at_ms}
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
    error             {reason}

A round is held from `start_workers` until `gone`, and only one at a time. Workers that exit by
themselves leave their descendants alone; only a stop ends a round. It has two phases: the signal
and its grace while a worker runs, then SIGKILL for every descendant until none is left. Being a
child subreaper, the runner inherits whoever daemonizes, so nobody escapes that.

When the agent's end of the socket closes, everything is killed at once.

A *fence* is a point in time by `boottime_ms` which no round outlives, whatever the agent does: it
may be stopped, or hang. The agent renews it while there is proof that the server hears this node.
A round that is to start when the fence has come starts no worker. Without a fence there is none.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

MAX_FRAME_BYTES = 16 << 20
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
"""A peer that leaves this much unread is taken for dead."""

MAX_GRACE_S = 7 * 24 * 3600.0
MAX_FENCE_AT_MS = 1 << 53
STUCK_AFTER_S = 5.0
SWEEP_INTERVAL_S = 0.25
"""How often a kill is repeated until nothing is left. Not how exits are noticed: those wake up."""

NOT_STARTED = 127
"""The exit code that a shell gives for a program that it can not start."""

_RECEIVE_BYTES = 256 << 10
_MAX_FDS = 16

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

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._skip_bytes = 0
        self._fds: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._unsent_bytes = 0

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` should be called once the socket takes more."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, object], fd: int | None = None) -> None:
        """Send a message as far as the socket takes it now, and keep the rest for `flush`.

        The channel owns `fd` from here on, also when this raises: `ValueError` if the message is
        too large for a frame, `BufferError` if the peer leaves too much unread, `OSError` if it
        is gone.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        if len(payload) > MAX_FRAME_BYTES:
            close_fd(fd)
            raise ValueError(f"a message of {len(payload)} bytes is too large")
        frame = memoryview(struct.pack(">I", len(payload)) + payload)
        self._unsent.append((frame, fd))
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise BufferError(f"the peer leaves {self._unsent_bytes} bytes unread")
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the socket takes it; `OSError` if the peer is gone."""
        while self._unsent:
            frame, fd = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [frame], [] if fd is None else [fd])
            except BlockingIOError:
                return
            close_fd(fd)
            self._unsent_bytes -= sent
            if sent < len(frame):
                self._unsent[0] = (frame[sent:], None)
            else:
                self._unsent.popleft()

    def receive(self) -> bool:
        """Read what has come, for `next_message`; False if nothing, `EOFError` at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self._socket, _RECEIVE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise EOFError(str(error)) from error
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
        if len(self._received) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._received)
        if length > MAX_FRAME_BYTES:
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
            close_fd(self._unsent.popleft()[1])

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


def close_fd(fd: int | None) -> None:
    """Close a descriptor, if it is one."""
    if fd is not None:
        os.close(fd)


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
    """
    deadline = time.monotonic() + timeout_s
    while left := kill_descendants(except_pids):
        if time.monotonic() > deadline:
            break
        _wait_for_exit(left[0], SWEEP_INTERVAL_S)
        reap(pid for pid in children_of(os.getpid()) if pid not in except_pids)
    return left


def kill_descendants(except_pids: Collection[int] = ()) -> list[int]:
    """Send SIGKILL to every descendant of this process, parents first; return their pids.

    Processes that fork meanwhile may be missed. Whoever asks again at each exit of a child of
    this process finds them: their parents are among the killed, so they move up to be children.
    """
    found = descendants_of(os.getpid(), except_pids)
    family = {os.getpid(), *found}
    for pid in found:
        signal_relative(pid, signal.SIGKILL, family)
    return found


def descendants_of(root: int, except_pids: Collection[int] = ()) -> list[int]:
    """List the processes that descend from `root`, parents before children; zombies count.

    Leaves out the children of `root` in `except_pids` with all that descend from them.
    """
    found = [pid for pid in children_of(root) if pid not in except_pids]
    for pid in found:
        found += children_of(pid)  # Read on by this very loop.
    return found


def children_of(pid: int) -> list[int]:
    """List the children of a process, zombies included.

    Exact for the calling process, if it has one thread: nobody else reaps its children. Of other
    processes some may be missing while their siblings exit.
    """
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_bytes().split())
    return children


def signal_relative(pid: int, signum: int, family: Collection[int]) -> None:
    """Signal a process if its parent is in `family`; do nothing if it is gone.

    The pid may have passed to a stranger since it was read. The pidfd pins one process, and only
    then is its parent looked up: a stranger's is not in the family.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _parent_and_group(pid)[0] in family:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


def reap(pids: Iterable[int]) -> None:
    """Take note of those of these children that have exited, so that they are no zombies."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _parent_and_group(pid: int) -> tuple[int, int]:
    # The command stands in parentheses and may itself hold any character.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[2])


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


# ---------------------------------------------------------------------- requests


class RequestError(Exception):
    """The agent has asked for what can not be done; nothing has changed."""


class StartError(Exception):
    """A worker can not be started; says which value is to blame, and why."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start one worker; `env` is its whole environment.

    `stdout` and `stderr` are files to append to, None for the agent's own; `cwd` None is the
    agent's own too. `cpus` are those that it may run on, None for all that the agent may use.
    """

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    stdout: str | None
    stderr: str | None
    cpus: tuple[int, ...] | None = None


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
    )


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


def _read_grace_s(request: Mapping[str, object]) -> float:
    grace_s = request.get("grace_s")
    # Written so that NaN, which compares as False, is refused.
    if not isinstance(grace_s, int | float) or not 0 <= grace_s <= MAX_GRACE_S:
        raise RequestError(f"grace_s: expected 0 to {MAX_GRACE_S:.0f}, got {grace_s!r:.80}")
    return grace_s


def _read_fence_at_ms(request: Mapping[str, object]) -> int:
    at_ms = _field(request, "fence_at_ms", int)
    if not 0 < at_ms <= MAX_FENCE_AT_MS:
        raise RequestError(f"fence_at_ms: expected 1 to {MAX_FENCE_AT_MS}, got {at_ms!r:.80}")
    return at_ms


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


def spawn_worker(spec: WorkerSpec) -> subprocess.Popen[bytes]:
    """Start a worker as leader of its own session; it dies with this process.

    It has no descriptors but 0 to 2, no signal ignored and none blocked. Raises `StartError`.
    """
    logs: list[int | None] = []
    try:
        for name, path in (("stdout", spec.stdout), ("stderr", spec.stderr)):
            logs.append(_open_log(name, path))
        return _spawn(
            spec.argv, spec.env, cwd=spec.cwd, stdout=logs[0], stderr=logs[1], cpus=spec.cpus
        )
    except OSError as error:
        raise StartError(_describe(error, spec)) from error
    except (ValueError, subprocess.SubprocessError) as error:
        raise StartError(f"{list(spec.argv)!r:.200}: {error}") from error
    finally:
        for fd in logs:
            close_fd(fd)


def _spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Collection[int] = (),
    cpus: Collection[int] | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=partial(_prepare_child, os.getpid(), cpus),  # noqa: PLW1509  # There is one thread.
    )


def _prepare_child(parent: int, cpus: Collection[int] | None) -> None:
    """Give the child, between fork and exec, signals of a fresh process, its CPUs and its leash."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    for signum in signal.valid_signals():
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the leash was on.
        os.kill(os.getpid(), signal.SIGKILL)


def _open_log(name: str, path: str | None) -> int | None:
    """Open a worker's log file to append to, if it has one."""
    if path is None:
        return None
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK, because opening a FIFO that nobody reads would otherwise take for ever.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK
        fd = os.open(path, flags, 0o666)
    except (OSError, ValueError) as error:
        folder = getattr(error, "filename", path)
        where = f"{name} {path!r}" if folder == path else f"{name} {path!r}: its folder {folder!r}"
        raise StartError(f"{where}: {_reason(error)}") from error
    os.set_blocking(fd, True)
    return fd


def _describe(error: OSError, spec: WorkerSpec) -> str:
    if spec.cwd is not None and error.filename == spec.cwd:
        return f"cwd {spec.cwd!r}: {_reason(error)}"
    text = f"argv[0] {spec.argv[0]!r}: {_reason(error)}"
    if isinstance(error, FileNotFoundError) and Path(spec.cwd or ".", spec.argv[0]).exists():
        text += "; the file is there, so it is the interpreter named in its first line that is not"
    return text


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


# ---------------------------------------------------------------------- the loop


@dataclass(eq=False, slots=True)
class _Child:
    """A process that the runner has started, until it is reaped."""

    process: subprocess.Popen[bytes]
    pidfd: int | None
    on_exit: Callable[[int], None]
    """Called with its return code, in Popen's sense."""


@dataclass(eq=False, slots=True)
class _Round:
    """The round whose processes are here, from its start until they are gone."""

    number: int
    running: set[int] = field(default_factory=set)
    """The workers, by pid, that have not exited."""
    leaderless: set[int] = field(default_factory=set)
    """The workers, by pid, that have; others may still be in their process groups."""
    signals_sent: set[int] = field(default_factory=set)
    kill_at: float | None = None
    """When the grace of the stop is over; None while no stop has been asked for."""
    fenced: bool = False
    """Whether it has reached the fence."""


@dataclass(eq=False, slots=True)
class _Killing:
    """A kill that goes on until nothing is left."""

    since: float
    told_stuck: bool = False


class Runner:
    """Does what the agent asks, and tells it what becomes of that, until shut down or orphaned."""

    def __init__(self, agent: Channel) -> None:
        self._agent = agent
        self._agent_lost = False
        self._shutting_down = False
        self._finished = False
        self._round: _Round | None = None
        self._killing: _Killing | None = None
        self._children: dict[int, _Child] = {}
        self._store_hosts: dict[int, _Child] = {}
        self._fence_at_ms = 0
        self._alarm: _Alarm | None = None
        self._selector = selectors.DefaultSelector()
        self._requests: dict[str, Callable[[Mapping[str, object]], None]] = {
            "start_workers": self._start_workers,
            "stop_workers": self._stop_workers,
            "start_store_host": self._start_store_host,
            "stop_store_host": self._stop_store_host,
            "renew_fence": self._renew_fence,
            "shutdown": self._shutdown,
        }

    def run(self) -> None:
        """Serve until everything is shut down, or the agent is lost and everything killed."""
        doorbell = _sigchld_doorbell()
        self._watch(doorbell.fileno(), partial(self._reap_adopted, doorbell))
        self._watch(self._agent.fileno(), self._serve_agent)
        while not self._finished:
            for key, _ in self._selector.select(self._timeout_s()):
                # What came earlier in this batch may have ended the watch over this one.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._advance()

    def _watch(self, fd: int, call: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, call)

    def _close_watched(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _timeout_s(self) -> float | None:
        if self._killing is not None:
            return SWEEP_INTERVAL_S
        if self._round is not None and self._round.kill_at is not None:
            return max(self._round.kill_at - time.monotonic(), 0.0)
        return None

    # ------------------------------------------------------------------ the agent

    def _serve_agent(self) -> None:
        try:
            if self._agent.has_unsent:
                self._agent.flush()
                self._await_agent()
            self._agent.receive()
        except (EOFError, OSError):
            self._lose_agent()
        while not self._agent_lost:
            try:
                request = self._agent.next_message()
                if request is None:
                    return
                self._obey(request)
            except (MalformedFrameError, RequestError) as error:
                self._emit("error", reason=str(error))

    def _obey(self, request: Mapping[str, object]) -> None:
        obey = self._requests.get(_field(request, "type", str))
        if obey is None:
            raise RequestError(f"type: there is no request {request['type']!r:.80}")
        if self._shutting_down:
            raise RequestError("the runner is shutting down")
        obey(request)

    def _emit(self, event: str, **fields: object) -> None:
        if self._agent_lost:
            return
        try:
            self._agent.send({"type": event, **fields})
            self._await_agent()
        except (OSError, BufferError):
            # An agent that does not read is as good as dead.
            self._lose_agent()

    def _await_agent(self) -> None:
        """Wake up when the agent can be written to, if there is something to write."""
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._agent.has_unsent else 0)
        if self._selector.get_key(self._agent.fileno()).events != mask:
            self._selector.modify(self._agent.fileno(), mask, self._serve_agent)

    def _lose_agent(self) -> None:
        if not self._agent_lost:
            self._selector.unregister(self._agent.fileno())
            self._agent.close()
            self._agent_lost = True
            self._shutting_down = True

    def _shutdown(self, _request: Mapping[str, object]) -> None:
        self._shutting_down = True

    # ------------------------------------------------------------------ children

    def _look_after(
        self, process: subprocess.Popen[bytes], on_exit: Callable[[int], None]
    ) -> _Child:
        # By pidfds, because epoll returns them in the order of the exits: who failed first?
        child = _Child(process, os.pidfd_open(process.pid), on_exit)
        assert child.pidfd is not None
        self._children[process.pid] = child
        self._watch(child.pidfd, partial(self._notice_exit, child))
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
        del self._children[child.process.pid]
        child.on_exit(code)

    def _reap_adopted(self, doorbell: socket.socket) -> None:
        """Reap the orphans that have exited: only SIGCHLD tells of those."""
        with suppress(BlockingIOError):
            doorbell.recv(4096)
        for pid in children_of(os.getpid()):
            child = self._children.get(pid)
            if child is None:
                reap([pid])
            elif child.pidfd is None:
                self._reap_child(child)

    # ------------------------------------------------------------------ workers

    def _start_workers(self, request: Mapping[str, object]) -> None:
        number = _field(request, "round", int)
        specs = _read_worker_specs(request)
        if self._round is not None:
            raise RequestError(f"round {number} can not start: {self._round.number} is not gone")
        self._round = started = _Round(number)
        self._keep_fence()
        for spec in () if started.fenced else specs:
            try:
                self._start_worker(started, spec)
            except StartError as error:
                self._fail_start(started, spec, str(error))
                return

    def _start_worker(self, started: _Round, spec: WorkerSpec) -> None:
        process = spawn_worker(spec)
        started.running.add(process.pid)
        self._look_after(process, partial(self._report_exit, started, spec.local_rank, process.pid))
        self._emit("started", round=started.number, local_rank=spec.local_rank, pid=process.pid)

    def _fail_start(self, failed: _Round, spec: WorkerSpec, reason: str) -> None:
        failed.kill_at = time.monotonic()
        kill_descendants(self._exempt())
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
        signum, grace_s = _read_signal(request), _read_grace_s(request)
        stopping = self._round
        if stopping is None or number < stopping.number:
            self._emit("gone", round=number)
            return
        if number > stopping.number:
            raise RequestError(f"round {number} can not stop: it is round {stopping.number} here")
        kill_at = time.monotonic() + grace_s
        if stopping.kill_at is None or kill_at < stopping.kill_at:
            stopping.kill_at = kill_at
        if signum not in stopping.signals_sent:
            stopping.signals_sent.add(signum)
            self._signal_groups(stopping, signum)

    def _signal_groups(self, stopping: _Round, signum: int) -> None:
        """Signal the process groups of a round's workers, also of those that have exited."""
        for pid in stopping.running:
            # Not reaped yet, so the number is still its own.
            with suppress(OSError):
                os.killpg(pid, signum)
        if not stopping.leaderless:
            return
        found = descendants_of(os.getpid(), self._exempt())
        family = {os.getpid(), *found}
        for pid in found:
            with suppress(OSError):
                if _parent_and_group(pid)[1] in stopping.leaderless:
                    signal_relative(pid, signum, family)

    # ------------------------------------------------------------------ the fence

    def _renew_fence(self, request: Mapping[str, object]) -> None:
        """Move the fence on; never back."""
        at_ms = _read_fence_at_ms(request)
        if self._alarm is None:
            try:
                self._alarm = _Alarm()
            except OSError as error:
                raise RequestError(f"no fence can be kept: {error}") from error
            self._watch(self._alarm.fileno(), self._keep_fence)
        self._fence_at_ms = max(at_ms, self._fence_at_ms)
        self._keep_fence()

    def _keep_fence(self) -> None:
        """Have a round killed that has reached the fence; wake up when it does."""
        if self._alarm is None:
            return
        held = self._round
        if held is None or held.fenced:
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
        left = kill_descendants(self._exempt())
        if left:
            self._tell_if_stuck(self._killing, left)
            return
        self._killing = None
        if self._round is not None:
            number, self._round = self._round.number, None
            self._keep_fence()
            self._emit("gone", round=number)
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
        return {host.process.pid for host in self._store_hosts.values()}

    def _tell_if_stuck(self, killing: _Killing, left: list[int]) -> None:
        if killing.told_stuck or time.monotonic() < killing.since + STUCK_AFTER_S:
            return
        killing.told_stuck = True
        if self._round is not None:
            self._emit("stuck", round=self._round.number, pids=left)

    # ------------------------------------------------------------------ store hosts

    def _start_store_host(self, request: Mapping[str, object]) -> None:
        listen_fd = self._agent.take_fd()
        if listen_fd is None:
            raise RequestError("start_store_host came without a listening socket")
        try:
            number = _field(request, "round", int)
            argv, env = _read_argv(request), _read_env(request)
            if number in self._store_hosts:
                raise RequestError(f"round {number} has a store host")
            self._spawn_store_host(number, argv, env, listen_fd)
        finally:
            # The host alone may hold it: when it dies, its clients must hear of it.
            os.close(listen_fd)

    def _spawn_store_host(
        self, number: int, argv: list[str], env: Mapping[str, str], listen_fd: int
    ) -> None:
        ready_fd, ready_end = os.pipe2(os.O_CLOEXEC)
        command = [*argv, "--fd", str(listen_fd), "--ready-fd", str(ready_end)]
        fds = (listen_fd, ready_end)
        try:
            process = _spawn(command, env, stdin=subprocess.DEVNULL, pass_fds=fds)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            os.close(ready_fd)
            sys.stderr.write(f"rdzv: can not start the store host {argv[0]!r}: {error}\n")
            self._emit("store_host_exited", round=number, exit_code=NOT_STARTED, signal=None)
            return
        finally:
            os.close(ready_end)
        on_exit = partial(self._report_store_host_exit, number)
        self._store_hosts[number] = self._look_after(process, on_exit)
        self._watch(ready_fd, partial(self._read_ready, number, ready_fd))

    def _read_ready(self, number: int, ready_fd: int) -> None:
        said = os.read(ready_fd, 64)
        self._close_watched(ready_fd)
        if said == b"ready\n" and number in self._store_hosts:
            self._emit("store_host_ready", round=number)

    def _report_store_host_exit(self, number: int, code: int) -> None:
        del self._store_hosts[number]
        self._emit("store_host_exited", round=number, **_exit_fields(code))

    def _stop_store_host(self, request: Mapping[str, object]) -> None:
        host = self._store_hosts.get(_field(request, "round", int))
        if host is not None:
            host.process.kill()


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
    finally:
        # Nothing is left here unless the runner itself has failed.
        sweep_descendants()


if __name__ == "__main__":
    main()

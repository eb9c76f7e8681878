"""The agent's hold on a runner: requests to it are calls, what it says are typed events."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdzv.agent import runner
from rdzv.agent.runner import (
    Channel,
    MalformedFrameError,
    WorkerSpec,
    become_subreaper,
    boottime_ms,
    sweep_descendants,
)

__all__ = [
    "RunnerEvent",
    "RunnerExited",
    "RunnerLink",
    "RunnerRefused",
    "StoreHostExited",
    "StoreHostReady",
    "WorkerExited",
    "WorkerSpec",
    "WorkerStarted",
    "WorkersFenced",
    "WorkersGone",
    "WorkersStartFailed",
    "WorkersStuck",
    "become_subreaper",
    "boottime_ms",
    "spare",
    "spare_no_more",
    "sweep_orphans",
]

log = logging.getLogger("rdzv.agent.runner")

_STORE_HOST = Path(__file__).with_name("store_host.py")
_KILL_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker of the round runs."""

    round: int
    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkersStartFailed:
    """A worker could not be started. The round's others are being killed; `WorkersGone` follows."""

    round: int
    local_rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker has exited: with an exit code, or by a signal."""

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    age_ms: int


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """After a stop or a failed start: no process of the round is left but its store host."""

    round: int


@dataclass(frozen=True, slots=True)
class WorkersStuck:
    """These have been sent SIGKILL and are still there. If they go, `WorkersGone` follows."""

    round: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkersFenced:
    """The fence came at `at_ms` of `boottime_ms`: the round is being killed; `WorkersGone` follows.

    No worker's exit that it leads to is told before this.
    """

    round: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class StoreHostReady:
    """The round's store serves."""

    round: int


@dataclass(frozen=True, slots=True)
class StoreHostExited:
    """The round's store host has exited; with 127 if it could not be started."""

    round: int
    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class RunnerRefused:
    """The runner was asked for what it can not do, and has done nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunnerExited:
    """The runner is gone, and with it its workers; the last event. Negative: killed by a signal.

    Unless it was asked to end, descendants of its workers may still be there: in a subreaper,
    `sweep_descendants` kills them.
    """

    exit_code: int


RunnerEvent = (
    WorkerStarted
    | WorkersStartFailed
    | WorkerExited
    | WorkersGone
    | WorkersStuck
    | WorkersFenced
    | StoreHostReady
    | StoreHostExited
    | RunnerRefused
    | RunnerExited
)

_EVENTS: Mapping[str, Callable[..., RunnerEvent]] = {
    "started": WorkerStarted,
    "start_failed": WorkersStartFailed,
    "exited": WorkerExited,
    "gone": WorkersGone,
    "stuck": lambda round, pids: WorkersStuck(round, tuple(pids)),
    "fenced": WorkersFenced,
    "store_host_ready": StoreHostReady,
    "store_host_exited": StoreHostExited,
    "error": RunnerRefused,
}


class RunnerLink:
    """One runner, and through it the processes of one job on this node.

    Requests return at once and are carried out in order; what becomes of them are events. Events
    are handed over one after another from the event loop, never from within a request, and
    handling them must not raise. Requests to a runner that has exited do nothing.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel,
        on_event: Callable[[RunnerEvent], None],
    ) -> None:
        """Take over a runner that was just started. Use `spawn`."""
        self._process = process
        self._channel = channel
        self._on_event = on_event
        self._exited = asyncio.Event()
        _runner_pids.add(process.pid)
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._notice_exit)
        self._loop.add_reader(channel.fileno(), self._read)

    @classmethod
    async def spawn(cls, on_event: Callable[[RunnerEvent], None]) -> RunnerLink:
        """Start a runner. When this process dies, it kills everything that it has started."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _start_runner(theirs.fileno())
            except OSError:
                ours.close()
                raise
        return cls(process, Channel(ours), on_event)

    @property
    def pid(self) -> int:
        """The runner's process id."""
        return self._process.pid

    def start_workers(self, round: int, workers: Sequence[WorkerSpec]) -> None:
        """Start all workers of a round; refused until those of the round before are gone."""
        specs = [
            _portable({name: getattr(worker, name) for name in WorkerSpec.__slots__})
            for worker in workers
        ]
        try:
            self._send({"type": "start_workers", "round": round, "workers": specs})
        except ValueError as error:
            self._loop.call_soon(self._fail_start, round, workers[0].local_rank, str(error))

    def start_store_host(
        self, round: int, listen_socket: socket.socket, python: str, env: Mapping[str, str]
    ) -> None:
        """Serve the round's store on a bound, listening socket, with the job's interpreter.

        The caller should close its copy afterwards: clients of a dead store must hear of it.
        """
        command = _portable({"argv": [python, str(_STORE_HOST)], "env": env})
        fd = os.dup(listen_socket.fileno())
        try:
            self._send({"type": "start_store_host", "round": round, **command}, fd)
        except ValueError as error:
            log.error("can not start the store host of round %d: %s", round, error)
            not_started = StoreHostExited(round, runner.NOT_STARTED, None)
            self._loop.call_soon(self._on_event, not_started)

    def stop_workers(self, round: int, signum: int, grace_ms: int) -> None:
        """Signal the round's workers, kill them after the grace, and all their descendants.

        A second call may shorten the grace, never lengthen it. `WorkersGone` follows, at once if
        nothing of the round is here.
        """
        grace_s = min(max(grace_ms / 1000, 0.0), runner.MAX_GRACE_S)
        message = {"round": round, "signal": int(signum), "grace_s": grace_s}
        self._send({"type": "stop_workers", **message})

    def renew_fence(self, at_ms: int) -> None:
        """Let no worker, of this round or a later one, live on beyond this point of `boottime_ms`.

        Each call moves the fence on, never back; before the first there is none. The runner keeps
        it by itself, whatever becomes of this process.
        """
        self._send({"type": "renew_fence", "fence_at_ms": at_ms})

    def stop_store_host(self, round: int) -> None:
        """Kill the round's store host, if there is one."""
        self._send({"type": "stop_store_host", "round": round})

    def kill(self) -> None:
        """Kill everything now, the runner too; `RunnerExited` follows."""
        self._send({"type": "shutdown"})

    async def close(self, timeout_s: float) -> None:
        """Kill everything, and wait for the runner's end; at the timeout kill the runner itself."""
        self.kill()
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            self._give_up(f"it has not ended everything within {timeout_s:g} s")
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self._exited.wait()

    # ------------------------------------------------------------------ to the runner

    def _send(self, message: Mapping[str, object], fd: int | None = None) -> None:
        if self._exited.is_set():
            runner.close_fd(fd)
            return
        try:
            self._channel.send(message, fd)
            self._await_writable()
        except BufferError as error:
            self._give_up(str(error))
        except OSError:
            pass  # It has exited, and its pidfd is about to say so.

    def _await_writable(self) -> None:
        if self._channel.has_unsent:
            self._loop.add_writer(self._channel.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._channel.fileno())

    def _flush(self) -> None:
        try:
            self._channel.flush()
            self._await_writable()
        except OSError:
            self._loop.remove_writer(self._channel.fileno())

    def _fail_start(self, round: int, local_rank: int, reason: str) -> None:
        self._on_event(WorkersStartFailed(round, local_rank, reason))
        self._on_event(WorkersGone(round))

    # ------------------------------------------------------------------ from the runner

    def _read(self) -> None:
        try:
            self._channel.receive()
        except EOFError:
            self._loop.remove_reader(self._channel.fileno())
        self._deliver()

    def _deliver(self) -> None:
        try:
            while (message := self._channel.next_message()) is not None:
                event = _decode(message)
                if isinstance(event, RunnerRefused):
                    log.error("the runner refuses a request: %s", event.reason)
                self._on_event(event)
        except MalformedFrameError as error:
            self._give_up(str(error))

    def _notice_exit(self) -> None:
        """Hand over what the runner has still said, then say that it is gone."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()  # Does not block: the pidfd says that it is dead.
        try:
            self._drain()
        finally:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
            self._exited.set()
            _runner_pids.discard(self.pid)
            self._on_event(RunnerExited(code))

    def _drain(self) -> None:
        try:
            while self._channel.receive():
                self._deliver()
        except EOFError:
            pass

    def _give_up(self, reason: str) -> None:
        """Kill a runner that can not be worked with; `RunnerExited` follows."""
        log.error("killing the runner, pid %d: %s", self.pid, reason)
        self._process.kill()


_runner_pids: set[int] = set()
"""The runners of this process that have not exited."""

_spared_pids: set[int] = set()
"""Other children of this process, which have nothing to do with runners."""


def sweep_orphans() -> None:
    """Kill what dead runners have left behind, in a subreaper; the other runners go on."""
    sweep_descendants(_runner_pids | _spared_pids)


def spare(pid: int) -> None:
    """Have `sweep_orphans` leave a child alone that is no runner's, until `spare_no_more`."""
    _spared_pids.add(pid)


def spare_no_more(pid: int) -> None:
    """Take back `spare`."""
    _spared_pids.discard(pid)


def _start_runner(fd: int) -> subprocess.Popen[bytes]:
    # In UTF-8 mode, its strings stand for the same bytes as those that `_portable` makes.
    command = [sys.executable, "-I", "-S", "-X", "utf8", runner.__file__, str(fd)]
    return subprocess.Popen(command, pass_fds=[fd], start_new_session=True)


def _decode(message: Mapping[str, Any]) -> RunnerEvent:
    fields = dict(message)
    try:
        return _EVENTS[fields.pop("type")](**fields)
    except (KeyError, TypeError) as error:
        raise MalformedFrameError(f"the runner says {message!r:.200}") from error


def _portable(value: Any) -> Any:
    """Make strings of any bytes such that UTF-8 mode makes the same bytes of them."""
    if isinstance(value, str):
        return os.fsencode(value).decode("utf-8", "surrogateescape")
    if isinstance(value, Mapping):
        return {_portable(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    return value

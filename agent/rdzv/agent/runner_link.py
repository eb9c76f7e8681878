"""The agent's hold on a runner: requests to it are calls, what it says are typed events."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rdzv.agent.runner import runner
from rdzv.agent.runner.runner import (
    Channel,
    Identity,
    MalformedFrameError,
    WorkerSpec,
    ZygoteSpec,
    become_subreaper,
    boottime_ms,
)
from rdzv.structs import struct

__all__ = [
    "FoundRunner",
    "NotAdoptableError",
    "RunnerEvent",
    "RunnerExited",
    "RunnerLink",
    "RunnerRefused",
    "ServeFailed",
    "StartedRunner",
    "StoreHostExited",
    "StoreHostReady",
    "WorkerExited",
    "WorkerSpec",
    "WorkerStarted",
    "WorkersFenced",
    "WorkersGone",
    "WorkersStartFailed",
    "WorkersStartedCold",
    "WorkersStuck",
    "ZygoteLost",
    "ZygoteReady",
    "ZygoteSpec",
    "aside",
    "become_subreaper",
    "boottime_ms",
    "end_spared",
    "spare",
    "spare_no_more",
    "start_spared",
    "sweep_orphans",
]

log = logging.getLogger("rdzv.agent.runner.runner")

_STORE_HOST = Path(runner.__file__).with_name("store_host.py")
_KILL_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 10.0
"""How long a runner that has started nothing may take to end."""
_MAX_TOLD = 100

MEET_TIMEOUT_S = 3.0
"""How long a runner may take to say hello; one that is stopped, or hangs, says nothing."""
_BUSY_RETRY_S = 0.05

SWEEP_TIMEOUT_S = 2.0
"""How long what a dead runner has left may take to be gone."""


class NotAdoptableError(Exception):
    """A runner can not be taken over; it is left to its end. Says why."""


@struct(frozen=True)
class Hello:
    """What a runner says to the agent that would adopt it."""

    pid: int
    round: int | None
    """The round whose processes are there."""
    last_round: int | None
    """The round whose workers were to be started last."""
    workers: Mapping[int, int]
    """The workers of the round that were started, exited or not: pids by LOCAL_RANK."""
    store_hosts: frozenset[int]
    """The rounds whose store host is there."""
    zygote: bool
    """Whether a zygote is kept."""
    kept: Mapping[str, str]
    """What an agent before this one had it keep."""


class FoundRunner:
    """A runner whose agent is gone. It is not adopted yet: use `adopt`, or `leave` it."""

    def __init__(self, path: Path, channel: Channel, hello: Hello) -> None:
        """Meet it by `meet`."""
        self.path = path
        self.hello = hello
        self._channel = channel

    @classmethod
    async def meet(cls, path: Path, timeout_s: float = MEET_TIMEOUT_S) -> FoundRunner | None:
        """Connect with the runner that listens at a path; None if there is none.

        Raises:
            NotAdoptableError: it has another agent, is of a newer version, or does not answer.

        """
        refused = f"it does not answer within {timeout_s:g} s"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if (channel := await _connect(path)) is None:
                        return None
                    try:
                        if (said := await _first_message(channel)) is not None:
                            if said.get("type") != "refused":
                                return cls(path, channel, _read_hello(said))
                            # Its agent may have died just now.
                            refused = str(said.get("reason"))
                    except BaseException:
                        channel.close()
                        raise
                    channel.close()
                    await asyncio.sleep(_BUSY_RETRY_S)
        except TimeoutError:
            raise NotAdoptableError(refused) from None
        except OSError as error:
            raise NotAdoptableError(str(error)) from error

    def adopt(self) -> None:
        """Take charge. What it has to say waits until there is a `RunnerLink` to hear it."""
        with suppress(OSError):  # It has ended, and the link is going to notice.
            self._channel.send({"type": "adopt"})

    def link(self, on_event: OnEvent) -> RunnerLink:
        """Return the hold on a runner that was adopted."""
        return RunnerLink(None, self._channel, on_event, self.hello)

    def leave(self) -> None:
        """Let go of it: it goes on waiting for an agent, for what is left of its time."""
        self._channel.close()

    def end(self) -> None:
        """Have it kill everything now, and let go of it."""
        for request in ("adopt", "shutdown"):
            try:
                self._channel.send({"type": request})
            except OSError:
                break
        self._channel.close()


async def _connect(path: Path) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        try:
            with runner.short_path(path) as short:
                await asyncio.get_running_loop().sock_connect(connection, short)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        if runner.peer_of(connection)[1] not in (0, os.geteuid()):
            raise NotAdoptableError(f"who listens at {path} is another user")
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


async def _first_message(channel: Channel) -> Mapping[str, object] | None:
    """Wait for the first message of a channel; None if it ends before."""
    loop, fd = asyncio.get_running_loop(), channel.fileno()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        while True:
            try:
                if (message := channel.next_message()) is not None:
                    return message
                await readable.wait()
                readable.clear()
                channel.receive()
            except EOFError:
                return channel.next_message()
            except MalformedFrameError as error:
                raise NotAdoptableError(str(error)) from error
    finally:
        loop.remove_reader(fd)


def _read_hello(said: Mapping[str, Any]) -> Hello:
    try:
        version, pid = int(said["version"]), int(said["pid"])
        if not 1 <= version <= runner.PROTOCOL_VERSION:
            raise NotAdoptableError(
                f"pid {pid} speaks version {version} of what runners say, and this agent speaks "
                f"{runner.PROTOCOL_VERSION}"
            )
        return Hello(
            pid=pid,
            round=said["round"],
            last_round=said["last_round"],
            workers={int(local_rank): int(pid) for local_rank, pid in said["workers"]},
            store_hosts=frozenset(said["store_hosts"]),
            zygote=bool(said["zygote"]),
            kept={str(name): str(value) for name, value in said["kept"].items()},
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NotAdoptableError(f"it says {said!r:.200}: {error!r}") from error


@struct(frozen=True)
class WorkerStarted:
    """A worker of the round runs."""

    round: int
    local_rank: int
    pid: int


@struct(frozen=True)
class WorkersStartFailed:
    """A worker could not be started. The round's others are being killed; `WorkersGone` follows."""

    round: int
    local_rank: int
    reason: str


@struct(frozen=True)
class WorkerExited:
    """A worker has exited: with an exit code, or by a signal."""

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    age_ms: int


@struct(frozen=True)
class WorkersGone:
    """After a stop or a failed start: no process of the round is left but its store host."""

    round: int


@struct(frozen=True)
class WorkersStuck:
    """These have been sent SIGKILL and are still there. If they go, `WorkersGone` follows."""

    round: int
    pids: tuple[int, ...]


@struct(frozen=True)
class WorkersFenced:
    """The fence came at `at_ms` of `boottime_ms`: the round is being killed; `WorkersGone` follows.

    No worker's exit that it leads to is told before this.
    """

    round: int
    at_ms: int


@struct(frozen=True)
class WorkersStartedCold:
    """These were to be forked from the zygote, and are started without it, for this reason."""

    round: int
    local_ranks: tuple[int, ...]
    reason: str


@struct(frozen=True)
class ZygoteReady:
    """Workers can be forked from now on."""

    pid: int
    modules: tuple[str, ...]
    threads: int
    memory_kb: int
    seconds: float


@struct(frozen=True)
class ZygoteLost:
    """There is no zygote now; another is tried after `retry_s`, or none if that is None."""

    reason: str
    retry_s: float | None


@struct(frozen=True)
class StoreHostReady:
    """The round's store serves."""

    round: int


@struct(frozen=True)
class StoreHostExited:
    """The round's store host has exited; with 127 if it could not be started."""

    round: int
    exit_code: int | None
    signal: int | None


@struct(frozen=True)
class ServeFailed:
    """The runner can not outlive this process, and ends with it."""

    reason: str


@struct(frozen=True)
class RunnerRefused:
    """The runner was asked for what it can not do, and has done nothing."""

    reason: str


@struct(frozen=True)
class RunnerExited:
    """The runner is gone, and with it its workers; the last event. Negative: killed by a signal.

    Of one that was adopted nobody knows how it ended: 0 if it was asked to, else None. Unless it
    was asked to, descendants of its workers may still be there: in a subreaper,
    `sweep_orphans` kills them.
    """

    exit_code: int | None


RunnerEvent = (
    WorkerStarted
    | WorkersStartFailed
    | WorkerExited
    | WorkersGone
    | WorkersStuck
    | WorkersFenced
    | WorkersStartedCold
    | ZygoteReady
    | ZygoteLost
    | StoreHostReady
    | StoreHostExited
    | ServeFailed
    | RunnerRefused
    | RunnerExited
)

OnEvent = Callable[[RunnerEvent], asyncio.Future[None] | None]
"""Handles an event, and must not raise. It returns what is done once the event was handled; None:
it was. The next event comes only then, and only then may the runner forget this one."""

_EVENTS: Mapping[str, Callable[..., RunnerEvent]] = {
    "started": WorkerStarted,
    "start_failed": WorkersStartFailed,
    "exited": WorkerExited,
    "gone": WorkersGone,
    "stuck": lambda round, pids: WorkersStuck(round, tuple(pids)),
    "fenced": WorkersFenced,
    "started_cold": lambda local_ranks, **fields: WorkersStartedCold(
        local_ranks=tuple(local_ranks), **fields
    ),
    "zygote_ready": lambda modules, **fields: ZygoteReady(modules=tuple(modules), **fields),
    "zygote_lost": ZygoteLost,
    "store_host_ready": StoreHostReady,
    "store_host_exited": StoreHostExited,
    "serve_failed": ServeFailed,
    "error": RunnerRefused,
}


class StartedRunner:
    """A runner that was started, and that nothing was asked of yet; it gets ready by itself.

    It ends when this process does, or is closed.
    """

    def __init__(self) -> None:
        """Start it.

        Raises:
            OSError: it can not be started.

        """
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start_runner(theirs.fileno())
            except OSError:
                self._socket.close()
                raise
        self._linked = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def link(self, on_event: OnEvent) -> RunnerLink:
        """Return the hold on it; from now on that is to be closed."""
        self._linked = True
        return RunnerLink(self._process, Channel(self._socket), on_event)

    def close(self) -> None:
        """End it, unless somebody has taken hold of it."""
        if not self._linked:
            self._linked = True
            self._socket.close()
            self._process.wait(CLOSE_TIMEOUT_S)


class RunnerLink:
    """One runner, and through it the processes of one job on this node.

    Requests return at once and are carried out in order; what becomes of them are events. Events
    are handed over one after another from the event loop, never from within a request; see
    `OnEvent`. Requests to a runner that has exited do nothing.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | None,
        channel: Channel,
        on_event: OnEvent,
        adopted: Hello | None = None,
    ) -> None:
        """Take over a runner: one that was just started, by `spawn`, or that was adopted."""
        if process is None:
            assert adopted is not None
            self._pid = adopted.pid
        else:
            self._pid = process.pid
            _runner_pids.add(process.pid)
        self._process = process
        self._channel = channel
        self._on_event = on_event
        self._exited = asyncio.Event()
        self._exit: RunnerExited | None = None
        """How it has ended, once it has."""
        self._handling: asyncio.Future[None] | None = None
        """The event that is being handled; the others wait."""
        self._keeps_zygote = adopted is not None and adopted.zygote
        self._told: set[str] = set()
        self._asked_to_end = False
        self._last_event = self._heard = 0
        """The numbers of the last event that was handled, and of the last that the runner may
        forget."""
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._loop = asyncio.get_running_loop()
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except OSError:
            self._loop.call_soon(self._notice_exit)
        else:
            self._loop.add_reader(self._pidfd, self._notice_exit)
        self._loop.add_reader(channel.fileno(), self._read)

    @classmethod
    async def spawn(cls, on_event: OnEvent) -> RunnerLink:
        """Start a runner. When this process dies, it kills everything that it has started."""
        return StartedRunner().link(on_event)

    @property
    def pid(self) -> int:
        """The runner's process id."""
        return self._pid

    def serve(self, path: Path, orphan_timeout_s: float, grace_s: float) -> None:
        """Have it outlive this process, and listen at `path` for the agent that adopts it.

        Without one for `orphan_timeout_s` it stops its workers, with `grace_s` before SIGKILL, and
        ends. Called again, only the times count, from the next loss of an agent on.
        """
        orphan_timeout_s = min(max(orphan_timeout_s, 0.0), runner.MAX_ORPHAN_TIMEOUT_S)
        grace_s = min(max(grace_s, 0.0), runner.MAX_GRACE_S)
        where = {"socket": str(path), "orphan_timeout_s": orphan_timeout_s, "grace_s": grace_s}
        self._send({"type": "serve", **where})

    def keep(self, name: str, value: str) -> None:
        """Have it keep something for the agent that adopts it; before every later request."""
        self._send({"type": "keep", "name": name, "value": value})

    async def let_go(self, timeout_s: float) -> None:
        """Leave it to the next agent: say what is unsaid, and hear nothing any more."""
        self._loop.remove_reader(self._channel.fileno())
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_sent.wait()
        except TimeoutError:
            log.warning("the runner, pid %d, has not read all that it is to keep", self.pid)
        if not self._exited.is_set():
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
            self._exited.set()

    def keep_zygote(self, zygote: ZygoteSpec) -> None:
        """Start the zygote that the workers of this job will be forked from, ahead of them.

        Only the first call counts. Workers that find no zygote ready start cold; so they do not
        wait for it, unless it says so itself. What becomes of it is logged.
        """
        if not self._keeps_zygote:
            self._keeps_zygote = True
            fields = _portable(_fields(zygote))
            self._send({"type": "keep_zygote", **fields})

    def start_workers(self, round: int, workers: Sequence[WorkerSpec]) -> None:
        """Start all workers of a round; refused until those of the round before are gone."""
        specs = [_portable(_fields(worker)) for worker in workers]
        warm = []
        for worker in workers:
            if worker.zygote is not None:
                self.keep_zygote(worker.zygote)
                warm.append(worker.local_rank)
        try:
            message = {"round": round, "workers": specs, "warm": warm}
            self._send({"type": "start_workers", **message})
        except ValueError as error:
            self._loop.call_soon(self._fail_start, round, workers[0].local_rank, str(error))

    def start_store_host(
        self,
        round: int,
        listen_socket: socket.socket,
        python: str,
        env: Mapping[str, str],
        identity: Identity | None = None,
    ) -> None:
        """Serve the round's store on a bound, listening socket, with the job's interpreter.

        The caller should close its copy afterwards: clients of a dead store must hear of it.
        """
        whose = None if identity is None else asdict(identity)
        command = _portable({"argv": [python, str(_STORE_HOST)], "env": env, "identity": whose})
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

    def notify_workers(self, round: int, signum: int) -> None:
        """Signal the round's workers, each once, and end nothing by that."""
        self._send({"type": "notify_workers", "round": round, "signal": int(signum)})

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
        self._asked_to_end = True
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

    def _send(self, message: Mapping[str, object], *fds: int) -> None:
        if self._exited.is_set():
            runner.close_fds(fds)
            return
        try:
            self._channel.send(message, *fds)
            self._await_writable()
        except BufferError as error:
            self._give_up(str(error))
        except OSError:
            pass  # It has exited, and its pidfd is about to say so.

    def _await_writable(self) -> None:
        if self._channel.has_unsent:
            self._all_sent.clear()
            self._loop.add_writer(self._channel.fileno(), self._flush)
        else:
            self._all_sent.set()
            self._loop.remove_writer(self._channel.fileno())

    def _flush(self) -> None:
        try:
            self._channel.flush()
            self._await_writable()
        except OSError:
            self._all_sent.set()
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
            # Whoever handles an event may let go of this runner.
            while not self._exited.is_set() and self._handling is None:
                if (message := self._channel.next_message()) is None:
                    break
                event, number = _decode(message), _number_of(message)
                self._tell(event)
                handling = self._on_event(event)
                if handling is None or handling.done():
                    self._last_event = number or self._last_event
                else:
                    self._handling = handling
                    handling.add_done_callback(partial(self._go_on, number))
        except MalformedFrameError as error:
            self._give_up(str(error))
        if self._last_event > self._heard:
            # Not before it was handled: what an agent dies of is told to the next one again.
            self._heard = self._last_event
            self._send({"type": "heard", "number": self._heard})

    def _go_on(self, number: int, _: asyncio.Future[None]) -> None:
        """Hand over what has waited until an event was handled."""
        self._handling = None
        self._last_event = number or self._last_event
        self._deliver()
        if self._exit is not None:
            self._end(self._exit)

    def _tell(self, event: RunnerEvent) -> None:
        """Write what nobody but the runner knows of; the same once, however often it comes."""
        match event:
            case RunnerRefused():
                log.error("the runner refuses a request: %s", event.reason)
            case ServeFailed():
                text = "the runner, pid %d, can not outlive this agent: %s"
                log.warning(text, self.pid, event.reason)
            case ZygoteReady():
                log.info(
                    "workers can be warm: %s imported in %.1f s, %d MiB, pid %d",
                    ", ".join(event.modules),
                    event.seconds,
                    event.memory_kb >> 10,
                    event.pid,
                )
            case ZygoteLost():
                retry = "" if event.retry_s is None else "; another is tried"
                text = "the zygote is lost: %s; workers start cold%s"
                log.log(self._level(event.reason, logging.WARNING), text, event.reason, retry)
            case WorkersStartedCold():
                ranks = ", ".join(map(str, event.local_ranks))
                text = "round %d: workers start cold (local_rank %s): %s"
                level = self._level(f"cold: {event.reason}", logging.INFO)
                log.log(level, text, event.round, ranks, event.reason)

    def _level(self, what: str, first: int) -> int:
        """Return the level of what is new, or DEBUG for what has been told."""
        if what in self._told or len(self._told) >= _MAX_TOLD:
            return logging.DEBUG
        self._told.add(what)
        return first

    def _notice_exit(self) -> None:
        """Hand over what the runner has still said, then say that it is gone."""
        if self._exited.is_set():
            return
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        code = 0 if self._asked_to_end else None
        if self._process is not None:
            code = self._process.wait()  # Does not block: the pidfd says that it is dead.
        self._exit = RunnerExited(code)
        try:
            self._drain()
        finally:
            self._end(self._exit)

    def _end(self, how: RunnerExited) -> None:
        """Say that the runner is gone, unless what it has said before is still being handled."""
        if self._handling is not None or self._exited.is_set():
            return
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._exited.set()
        _runner_pids.discard(self.pid)
        self._on_event(how)

    def _drain(self) -> None:
        try:
            while self._channel.receive():
                self._deliver()
        except EOFError:
            pass

    def _give_up(self, reason: str) -> None:
        """Kill a runner that can not be worked with; `RunnerExited` follows."""
        log.error("killing the runner, pid %d: %s", self.pid, reason)
        if self._process is not None:
            self._process.kill()
        elif self._pidfd is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


_runner_pids: set[int] = set()
"""The runners of this process that have not exited."""

_spared_pids: set[int] = set()
"""Other children of this process, which have nothing to do with runners."""

_starting: set[object] = set()
"""Other children that are being started, whose pids are not known yet."""


async def sweep_orphans(timeout_s: float = SWEEP_TIMEOUT_S) -> None:
    """Kill what dead runners have left behind, in a subreaper; the other runners go on.

    Waits until all are gone, for so long at most: one may be in the kernel.

    Raises:
        OSError: the children can not be listed, so some may be there.

    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline_s
        others = _runner_pids | _spared_pids
        try:
            # A child that is just being started is nobody's yet.
            left = [] if _starting else runner.kill_descendants(others)
            runner.reap(pid for pid in left if pid in runner.children_of(os.getpid()))
        except OSError:
            if late:
                raise
            left = []
        else:
            if not left and not _starting:
                return
        if late and left:
            pids = ", ".join(map(str, left))
            log.error("SIGKILL does not end what a dead runner has left: pid %s", pids)
            return
        await (_exited(left[0], runner.SWEEP_INTERVAL_S) if left else asyncio.sleep(_BUSY_RETRY_S))


async def _exited(pid: int, within_s: float) -> None:
    """Wait for the end of a process, for so long at most."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        async with asyncio.timeout(within_s):
            await exited.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def start_spared(
    *args: str, chdir: Path | None = None, **how: Any
) -> asyncio.subprocess.Process:
    """Start a program in a process that is no runner's; to be ended by `end_spared`.

    Neither the program nor the folder `chdir` that it starts in need be on a file system that
    answers: the process waits for that, and not the event loop. So what can not be started says so
    on its stderr, and exits with 125 (the folder), 126 or 127.
    """
    this = object()
    _starting.add(this)
    try:
        process = await asyncio.create_subprocess_exec(*aside(args, chdir), **how)
        spare(process.pid)
    finally:
        _starting.remove(this)
    return process


async def end_spared(process: asyncio.subprocess.Process) -> None:
    """Kill a process, unless it has ended; one that hangs in the kernel is not waited for."""
    if process.returncode is None:
        process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.wait()
    spare_no_more(process.pid)


def aside(command: Sequence[str], chdir: Path | None = None) -> list[str]:
    """Return a command line that becomes this one by itself, in a folder.

    A process is only there for whoever starts it once its program was opened, which takes until a
    file server answers; env(1) is on this machine.
    """
    if "=" in command[0]:
        # env(1) would take it for a variable.
        command = ["/bin/sh", "-c", 'exec "$0" "$@"', *command]
    return ["/usr/bin/env", *([] if chdir is None else ["-C", str(chdir)]), *command]


def spare(pid: int) -> None:
    """Have `sweep_orphans` leave a child alone that is no runner's, until `spare_no_more`."""
    _spared_pids.add(pid)


def spare_no_more(pid: int) -> None:
    """Take back `spare`."""
    _spared_pids.discard(pid)


_RUN = """
import os.path, sys
sys.path.append(os.path.dirname(sys.argv.pop(1)))
import runner
sys.path.pop()
runner.main()
"""
"""What the program of a path does, but by its byte code: to compile it takes longer than to run."""


def _start_runner(fd: int) -> subprocess.Popen[bytes]:
    # In UTF-8 mode, its strings stand for the same bytes as those that `_portable` makes.
    options = ["-I", "-S", "-X", "utf8", "-c", _RUN]
    command = [sys.executable, *options, runner.__file__, str(fd)]
    return subprocess.Popen(command, pass_fds=[fd], start_new_session=True)


def _number_of(message: Mapping[str, Any]) -> int:
    """Return the number of an event; 0 if it has none."""
    number = message.get("number", 0)
    if type(number) is not int:
        raise MalformedFrameError(f"the runner numbers an event {number!r:.200}")
    return number


def _decode(message: Mapping[str, Any]) -> RunnerEvent:
    fields = dict(message)
    fields.pop("number", None)
    try:
        return _EVENTS[fields.pop("type")](**fields)
    except (KeyError, TypeError) as error:
        raise MalformedFrameError(f"the runner says {message!r:.200}") from error


def _fields(spec: WorkerSpec | ZygoteSpec) -> dict[str, object]:
    """Return what a runner is told of a process that it is to start."""
    told = {name: getattr(spec, name) for name in spec.__slots__ if name != "zygote"}
    return {**told, "identity": None if spec.identity is None else asdict(spec.identity)}


def _portable(value: Any) -> Any:
    """Make strings of any bytes such that UTF-8 mode makes the same bytes of them."""
    if isinstance(value, str):
        return os.fsencode(value).decode("utf-8", "surrogateescape")
    if isinstance(value, Mapping):
        return {_portable(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    return value

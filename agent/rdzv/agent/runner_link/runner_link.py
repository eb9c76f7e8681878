"""The agent's link to one runner: requests and their results, which are events, are values."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rdzv.agent import job_programs, runner
from rdzv.agent.core.events import RunnerExited, StartFailed, StoreHostExited, WorkersGone
from rdzv.agent.runner.channel import Channel, MalformedFrameError
from rdzv.agent.runner.descriptors import close_fds
from rdzv.agent.runner.requests import (
    ForgetEvents,
    KeepSpec,
    StartStoreHost,
    StartWorkers,
    WorkerSpec,
    type_of,
)
from rdzv.agent.runner.spawn import NOT_STARTED
from rdzv.agent.runner.system import Identity
from rdzv.agent.runner_link import agent_children
from rdzv.agent.runner_link.runner_events import OnEvent, RunnerLog, decode_event, number_of
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent.runner")

_PROGRAM = Path(runner.__file__).with_name("__main__.py")
_STORE_HOST = Path(job_programs.__file__).with_name("store_host.py")
KILL_TIMEOUT_S = 1.0
PING_S = 2.0
MAX_UNANSWERED = 8
"""The pings that a runner may leave unanswered, one after another; then it hangs, and is killed."""
CLOSE_TIMEOUT_S = 10.0
"""How long a runner that has not started anything may take to end."""


@struct(frozen=True)
class RunnerHello:
    """A runner's description of itself, for an agent that might adopt it."""

    pid: int
    last_round: int | None
    """The round whose workers were last ordered to start."""
    workers: Mapping[int, int]
    """The workers, by LOCAL_RANK, that have been started in the round whose processes exist, if
    any, whether or not they have exited: their pids.
    """
    store_hosts: frozenset[int]
    kept: Mapping[str, str]


class StartedRunner:
    """A runner that was just started and has not received any requests.

    It ends when this process ends or when this object is closed.
    """

    def __init__(self) -> None:
        """Start the runner. Raises `OSError` if it cannot be started."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = _start_runner(theirs.fileno())
            except OSError:
                self._socket.close()
                raise
        self._linked = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def link(self, on_event: OnEvent) -> RunnerLink:
        """Return the link to the runner. From now on, close the link instead."""
        self._linked = True
        return RunnerLink(self.process, Channel(self._socket), on_event)

    def close(self) -> None:
        if not self._linked:
            self._linked = True
            self._socket.close()
            self.process.wait(CLOSE_TIMEOUT_S)


class RunnerLink:
    """The link to one runner, and through it to the processes of one job on this node.

    Requests return at once and are carried out in order; their results arrive as events. Events are
    delivered one at a time from the event loop, never from within a request (see `OnEvent`).
    Requests to a runner that has exited do nothing.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | None,
        channel: Channel,
        on_event: OnEvent,
        adopted: RunnerHello | None = None,
    ) -> None:
        """Take over a runner, either just started by `spawn` or adopted."""
        if process is None:
            assert adopted is not None
            self.pid = adopted.pid
        else:
            self.pid = process.pid
            agent_children.note_runner(process.pid)
        self._process = process
        self._channel = channel
        self._on_event = on_event
        self._exited = asyncio.Event()
        self._exit: RunnerExited | None = None
        self._handling: asyncio.Future[None] | None = None
        """Done once the event that is being handled has been handled; later events wait."""
        self._log = RunnerLog(self.pid)
        self._asked_to_end = False
        self._last_event = self._heard = 0
        """The number of the last event that was handled, and of the last one that the runner may
        forget.
        """
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._loop = asyncio.get_running_loop()
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._loop.call_soon(self._notice_exit)
        else:
            self._loop.add_reader(self._pidfd, self._notice_exit)
        self._loop.add_reader(channel.fileno(), self._read)
        self._ending: asyncio.Task[None] | None = None
        self._unanswered: int | None = None
        """The pings since the runner last sent anything; None until it first has."""
        self._next_ping: asyncio.TimerHandle | None = None
        self._ping()

    @classmethod
    async def spawn(cls, on_event: OnEvent) -> RunnerLink:
        """Start a runner. If this process dies, the runner kills everything that it has started."""
        return StartedRunner().link(on_event)

    def ask(self, request: Any, *fds: int) -> None:
        """Send a request of runner/requests.py, or a struct with its name and fields.

        Raises `ValueError` if it is too large.
        """
        fields = msgspec.to_builtins(request, enc_hook=str)
        self._send({"type": type_of(type(request)), **_portable(fields)}, *fds)

    async def let_go(self, timeout_s: float) -> None:
        """Leave the runner to the next agent: send unsent requests and stop receiving events."""
        self._loop.remove_reader(self._channel.fileno())
        self._stop_pings()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_sent.wait()
        except TimeoutError:
            log.warning("the runner (pid %d) did not read all requests", self.pid)
        if not self._exited.is_set():
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
            self._exited.set()

    def start_workers(
        self, round: int, workers: Sequence[WorkerSpec], keep: KeepSpec | None = None
    ) -> None:
        """Start all workers of a round. Refused while any may still be in the previous round.

        With `keep`, the parked workers that it names continue instead of being started, and new
        workers can be kept later.
        """
        try:
            self.ask(StartWorkers(round, tuple(workers), keep))
        except ValueError as error:
            self._loop.call_soon(self._fail_start, round, str(error))

    def start_store_host(
        self,
        round: int,
        listen_socket: socket.socket,
        python: str,
        env: Mapping[str, str],
        identity: Identity | None = None,
    ) -> None:
        """Serve the round's store on a bound, listening socket, using the job's interpreter.

        The caller should close its copy of the socket afterwards, so that clients notice if the
        store dies.
        """
        fd = os.dup(listen_socket.fileno())
        try:
            self.ask(StartStoreHost(round, (python, str(_STORE_HOST)), env, identity), fd)
        except ValueError as error:
            log.error("cannot start the store host of round %d: %s", round, error)
            not_started = StoreHostExited(round, exit_code=NOT_STARTED)
            self._loop.call_soon(self._on_event, not_started)

    def kill(self) -> None:
        """Kill all processes now, including the runner. `RunnerExited` follows."""
        self._asked_to_end = True
        self._send({"type": "shutdown"})

    async def close(self, timeout_s: float) -> None:
        self.kill()
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            self._give_up(f"it has not ended everything within {timeout_s:g} s")
            async with asyncio.timeout(agent_children.SWEEP_TIMEOUT_S + 2 * KILL_TIMEOUT_S):
                await self._exited.wait()

    # ------------------------------------------------------------------ to the runner

    def _send(self, message: Mapping[str, object], *fds: int) -> None:
        if self._exited.is_set():
            close_fds(fds)
            return
        try:
            self._channel.send(message, *fds)
            self._await_writable()
        except BufferError as error:
            self._give_up(str(error))
        except OSError:
            pass  # It has exited, as its pidfd is about to show.

    def _ping(self) -> None:
        """Ask for an answer again and again, and kill a runner that gives none.

        What is counted is pings, not seconds, so that a pause of this process counts only once.
        """
        if self._unanswered is not None:
            if self._unanswered == MAX_UNANSWERED:
                self._give_up(f"it hangs: no answer for {MAX_UNANSWERED * PING_S:g} s")
                return
            self._unanswered += 1
        self._send({"type": "ping"})
        self._next_ping = self._loop.call_later(PING_S, self._ping)

    def _stop_pings(self) -> None:
        if self._next_ping is not None:
            self._next_ping.cancel()

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

    def _fail_start(self, round: int, reason: str) -> None:
        self._on_event(StartFailed(round, reason))
        self._on_event(WorkersGone(round))

    # ------------------------------------------------------------------ from the runner

    def _read(self) -> None:
        try:
            self._channel.receive()
            self._unanswered = 0
        except EOFError:
            self._loop.remove_reader(self._channel.fileno())
        self._deliver()

    def _deliver(self) -> None:
        try:
            # An event's handler may close this link.
            while not self._exited.is_set() and self._handling is None:
                if (message := self._channel.next_message()) is None:
                    break
                if message.get("type") == "pong":
                    continue
                event, number = decode_event(message), number_of(message)
                self._log.write(event)
                handling = self._on_event(event)
                if handling is None or handling.done():
                    self._last_event = number or self._last_event
                else:
                    self._handling = handling
                    handling.add_done_callback(partial(self._go_on, number))
        except MalformedFrameError as error:
            self._give_up(str(error))
        if self._last_event > self._heard:
            # An event is confirmed only after it has been handled, so that an event that kills the
            # agent is resent to the next one.
            self._heard = self._last_event
            self.ask(ForgetEvents(self._heard))

    def _go_on(self, number: int, _: asyncio.Future[None]) -> None:
        self._handling = None
        self._last_event = number or self._last_event
        self._deliver()
        if self._exit is not None:
            self._end(self._exit)

    def _notice_exit(self) -> None:
        if self._exited.is_set():
            return
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        code = 0 if self._asked_to_end else None
        if self._process is not None:
            code = self._process.wait()  # Does not block, because the pidfd shows that it is dead.
        self._exit = RunnerExited(code)
        try:
            self._drain()
        finally:
            self._end(self._exit)

    def _end(self, how: RunnerExited) -> None:
        if self._handling is not None or self._exited.is_set():
            return
        self._stop_pings()
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._exited.set()
        agent_children.forget_runner(self.pid)
        self._on_event(how)

    def _drain(self) -> None:
        try:
            while self._channel.receive():
                self._deliver()
        except EOFError:
            pass

    def _give_up(self, reason: str) -> None:
        """Kill a malfunctioning runner, and all that it has started. `RunnerExited` follows."""
        if self._ending is None:
            log.error("killing the runner (pid %d): %s", self.pid, reason)
            self._ending = self._loop.create_task(self._kill_all())

    async def _kill_all(self) -> None:
        # Its descendants are killed first: once an adopted runner is dead, they are children of
        # init, which knows nobody's. While it lives, none of them can leave it.
        if self._pidfd is not None:
            await agent_children.kill_all_below(self.pid, self._pidfd)
        if self._process is not None:
            self._process.kill()
        elif self._pidfd is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._exited.wait()
        if self._exit is None:
            # Something in the kernel holds it; nothing else may wait for that.
            log.error("the runner (pid %d) survives SIGKILL", self.pid)
            if self._pidfd is not None:
                self._loop.remove_reader(self._pidfd)
            self._exit = RunnerExited(-signal.SIGKILL)
            self._end(self._exit)


def _start_runner(fd: int) -> subprocess.Popen[bytes]:
    # In UTF-8 mode, its strings stand for the same bytes as those made by `_portable`.
    command = [sys.executable, "-I", "-S", "-X", "utf8", str(_PROGRAM), str(fd)]
    return subprocess.Popen(command, pass_fds=[fd], start_new_session=True)


def _portable(value: Any) -> Any:
    """Return a value whose strings stand for the same bytes in UTF-8 mode as they do here."""
    if isinstance(value, str):
        return os.fsencode(value).decode("utf-8", "surrogateescape")
    if isinstance(value, Mapping):
        return {_portable(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    return value

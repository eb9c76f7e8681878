"""Store hosts: one process per round that serves the round's c10d store on the agent's socket.

A store host is forked from the zygote if that has imported torch, and started cold otherwise. Its
program is store_host.py. It outlives its round.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from contextlib import suppress
from functools import partial

from .child_exits import exit_fields
from .descriptors import (
    close_job_socket,
    close_shared,
    dup_fds,
    receive_data,
    write_warning,
)
from .frames import RequestError
from .spawn import NOT_STARTED, Program, reason_of
from .warm_forks import FORK_TIMEOUT_S, WarmStart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .child_exits import Child
    from .requests import StartStoreHost, StopStoreHost
    from .runner import Runner
    from .warm_forks import Fork


class StoreHosts:
    """Starts and stops the store hosts, at most one per round."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._hosts: dict[int, Child] = {}

    def rounds(self) -> list[int]:
        return sorted({*self._hosts, *self._warm()})

    def start(self, spec: StartStoreHost) -> None:
        agent, forks = self._runner.agent, self._runner.forks
        listen_fd = agent.take_fd()
        if listen_fd is None and agent.lost_fds:
            self._report_failure(spec.round, f"its socket was lost: {os.strerror(errno.EMFILE)}")
            return
        if listen_fd is None:
            raise RequestError("start_store_host came without a listening socket")
        try:
            if spec.round in self.rounds():
                raise RequestError(f"round {spec.round} has a store host")
            if forks.has_imported("torch", spec.argv[0], spec.identity):
                [copy] = dup_fds(listen_fd)
                forks.want([WarmStoreHost(self, spec, copy)])
            else:
                self._start_cold(spec, listen_fd)
        except OSError as error:
            self._report_failure(spec.round, reason_of(error))
        finally:
            # Only the store host may hold the socket, so that clients notice if it dies.
            close_shared(socket.socket(fileno=listen_fd))

    def stop(self, request: StopStoreHost) -> None:
        number = request.round
        host = self._hosts.get(number)
        if host is not None:
            host.kill()
        elif (start := self._warm().get(number)) is not None:
            self._runner.forks.drop([start])
            killed = exit_fields(-signal.SIGKILL)
            self._runner.agent.emit("store_host_exited", round=number, **killed)

    def take_running(self, number: int, child: Child) -> None:
        self._hosts[number] = child
        self._runner.agent.emit("store_host_ready", round=number)

    def report_exit(self, number: int, code: int) -> None:
        del self._hosts[number]
        self._runner.agent.emit("store_host_exited", round=number, **exit_fields(code))

    def start_cold_instead(self, starts: Sequence[WarmStart], reason: str) -> None:
        for start in starts:
            if isinstance(start, WarmStoreHost):
                write_warning(f"round {start.spec.round}: its store host will start cold: {reason}")
                try:
                    if not self._runner.loop.shutting_down:
                        self._start_cold(start.spec, start.listen_fd)
                finally:
                    start.close()

    def _warm(self) -> dict[int, WarmStoreHost]:
        wanted = self._runner.forks.wanted()
        return {start.spec.round: start for start in wanted if isinstance(start, WarmStoreHost)}

    def _start_cold(self, spec: StartStoreHost, listen_fd: int) -> None:
        try:
            ready, theirs = socket.socketpair()
            ready.setblocking(False)
            try:
                read = partial(self._read_ready, spec.round, ready)
                self._runner.loop.watch(ready.fileno(), read)
                child = self._runner.children.start(
                    f"the store host of round {spec.round}",
                    _program_of(spec, listen_fd, theirs.fileno()),
                    partial(self._end, spec),
                    spared=True,
                )
            except OSError:
                self._runner.loop.unwatch(ready.fileno())
                ready.close()
                raise
            finally:
                theirs.close()
        except OSError as error:
            self._report_failure(spec.round, reason_of(error))
            return
        self._hosts[spec.round] = child

    def _read_ready(self, number: int, ready: socket.socket) -> None:
        line = b""
        with suppress(OSError):
            line, _ = receive_data(ready, 64)
        self._runner.loop.unwatch(ready.fileno())
        close_job_socket(ready)
        if line == b"ready\n" and number in self._hosts:
            self._runner.agent.emit("store_host_ready", round=number)

    def _end(self, spec: StartStoreHost, child: Child, code: int) -> None:
        if child.failure:
            write_warning(f"cannot start the store host {spec.argv[0]!r}: {child.failure}")
        self.report_exit(spec.round, code)

    def _report_failure(self, number: int, reason: str) -> None:
        write_warning(f"cannot start the store host of round {number}: {reason}")
        self._runner.agent.emit("store_host_exited", round=number, **exit_fields(NOT_STARTED))


class WarmStoreHost(WarmStart):
    """A warm store host, which counts as running once it is serving."""

    outlives_rounds = True
    replaced_after_exit = True  # A fork that was given up may still hold the socket.

    def __init__(self, owner: StoreHosts, spec: StartStoreHost, listen_fd: int) -> None:
        """Take ownership of the socket, keeping it in case a cold store host must serve."""
        super().__init__(owner, FORK_TIMEOUT_S)
        self._hosts = owner
        self.spec = spec
        self.listen_fd = listen_fd

    def send_order(self, fork: Fork, child: Child) -> None:
        program = {"argv": self.spec.argv, "env": self.spec.env}
        fork.send_program("store_host", program, [self.listen_fd])

    def take_running(self, child: Child) -> None:
        self.close()
        self._hosts.take_running(self.spec.round, child)

    def take_exit(self, child: Child, code: int) -> None:
        self._hosts.report_exit(self.spec.round, code)

    def close(self) -> None:
        close_shared(socket.socket(fileno=self.listen_fd))


def _program_of(spec: StartStoreHost, listen_fd: int, ready_fd: int) -> Program:
    return Program(
        argv=(*spec.argv, "--fd", str(listen_fd), "--ready-fd", str(ready_fd)),
        env=spec.env,
        pass_fds=(listen_fd, ready_fd),
        identity=spec.identity,
    )

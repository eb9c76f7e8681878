"""The agent's own children: runners, other programs, and processes left behind by dead runners.

The agent is a subreaper, so a dead runner's descendants become its children. `sweep_orphans` kills
those and nothing else, because every other child is recorded here.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rdzv.agent.runner.descriptors import close_shared
from rdzv.agent.runner.processes import (
    SWEEP_INTERVAL_S,
    children_of,
    kill_below,
    kill_descendants,
    list_descendants,
    reap,
)

log = logging.getLogger("rdzv.agent.runner")

SWEEP_TIMEOUT_S = 2.0
"""How long a dead runner's processes may take to disappear."""
HELPERS_S = 1.0
_KILL_TIMEOUT_S = 1.0
_STARTING_RETRY_S = 0.05
_LOOK_AGAIN_S = 0.02

MAX_ANSWER_BYTES = 8 << 20
"""The maximum size of a program's output; more is an error."""
CONNECT_TIMEOUT_S = 1.0
"""How long both ends may take to connect, unless other processes fill the listener's queue."""
SOCKET_BUFFER_BYTES = 128 << 10

_runner_pids: set[int] = set()
"""The pids of this process's runners that have not exited."""

_spared_pids: set[int] = set()

_starting: set[object] = set()


def note_runner(pid: int) -> None:
    _runner_pids.add(pid)


def forget_runner(pid: int) -> None:
    _runner_pids.discard(pid)


async def sweep_orphans(timeout_s: float = SWEEP_TIMEOUT_S) -> None:
    """Kill processes left behind by dead runners, if this process is a subreaper.

    Other runners keep running. The workers have died with their runner; what they have started has
    `HELPERS_S` to end by itself, as Python's resource tracker does when it has removed their files
    in /dev/shm. Then this waits until all these processes are gone, but for no longer than
    `timeout_s`, because one may be stuck in the kernel. Raises `OSError` if the children cannot be
    listed, so some may remain.
    """
    kill_from_s = time.monotonic() + HELPERS_S
    deadline_s = kill_from_s + timeout_s
    while True:
        late = time.monotonic() > deadline_s
        others = _runner_pids | _spared_pids
        kill = kill_descendants if time.monotonic() >= kill_from_s else list_descendants
        try:
            # A child that is still being started has not been recorded.
            left = [] if _starting else kill(others)
            reap(pid for pid in left if pid in children_of(os.getpid()))
        except OSError:
            if late:
                raise
            left = []
        else:
            if not left and not _starting:
                return
        if late and left:
            pids = ", ".join(map(str, left))
            log.error("processes left by a dead runner survived SIGKILL: pid %s", pids)
            return
        await (_exited(left[0], SWEEP_INTERVAL_S) if left else asyncio.sleep(_STARTING_RETRY_S))


async def kill_all_below(pid: int, pidfd: int, timeout_s: float = SWEEP_TIMEOUT_S) -> None:
    """Kill all descendants of a runner that may hang, until none is left or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    # Once the runner has exited, its pid may be another's.
    while not poll.poll(0) and time.monotonic() < deadline_s:
        with suppress(OSError):
            if not kill_below(pid):
                return
        await asyncio.sleep(_LOOK_AGAIN_S)


async def kill_hung(pid: int) -> None:
    """Kill a runner that hangs; first its descendants, which could not be found afterwards.

    Returns once it is gone, or at the latest after some seconds.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            await kill_all_below(pid, pidfd)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
        await _exited(pid, SWEEP_TIMEOUT_S)


async def wait_for_exit(pidfd: int, within_s: float) -> None:
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await exited.wait()
    finally:
        loop.remove_reader(pidfd)


async def _exited(pid: int, within_s: float) -> None:
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            await wait_for_exit(pidfd, within_s)
        finally:
            os.close(pidfd)


async def start_spared(
    *args: str, chdir: Path | None = None, **how: Any
) -> asyncio.subprocess.Process:
    """Start a program that is exempt from `sweep_orphans`. Use `end_spared` to end it.

    The program and the folder `chdir` may be on a hung file system; the new process waits for it,
    not the event loop. So a program that cannot be started reports the error on its stderr and
    exits with 125 (for the folder), 126 or 127.
    """
    this = object()
    _starting.add(this)
    try:
        process = await asyncio.create_subprocess_exec(*aside(args, chdir), **how)
        spare(process.pid)
    finally:
        _starting.remove(this)
    return process


async def ask_spared(
    *args: str, timeout_s: float, first: str = "", **how: Any
) -> tuple[int, bytes, bytes]:
    """Run a program, such as one of a job's, and return its exit code, stdout and stderr.

    `first` are the shell's commands before it, such as `ulimit`. `how` is as for `start_spared`.

    Raises:
        OSError: it cannot be started, or writes more than `MAX_ANSWER_BYTES`.
        TimeoutError: it has not ended in time.
    """
    if first:
        args = ("/bin/sh", "-c", f'{first}; exec "$0" "$@"', *args)
    with ExitStack() as sockets:
        ours, theirs = zip(*(connected_pair() for _ in range(2)), strict=True)
        for end in ours:
            sockets.enter_context(end)
        for end in theirs:
            sockets.callback(close_shared, end)
        process = await start_spared(
            *args, stdin=asyncio.subprocess.DEVNULL, stdout=theirs[0], stderr=theirs[1], **how
        )
        for end in theirs:
            close_shared(end)
        reading = [asyncio.ensure_future(_read_all(end)) for end in ours]
        try:
            async with asyncio.timeout(timeout_s):
                output, complaint = await asyncio.gather(*reading)
                return await process.wait(), output, complaint
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            await end_spared(process)


async def _read_all(end: socket.socket) -> bytes:
    loop, output = asyncio.get_running_loop(), bytearray()
    while data := await loop.sock_recv(end, 1 << 18):
        output += data
        if len(output) > MAX_ANSWER_BYTES:
            raise OSError(errno.EFBIG, f"it has written more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(output)


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection within this machine, the second for a job's process.

    What else connects two processes lets one of them block the other in the kernel: a Unix socket
    passes descriptors, whose close() may take as long as their sender likes, and the lock of a pipe
    is held while its writer waits for a page of its own memory. Raises `OSError` if there is no
    loopback interface, or there are too few descriptors.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(CONNECT_TIMEOUT_S)
        # Otherwise these grow to megabytes. Accepted sockets inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        ours = socket.create_connection(listener.getsockname(), CONNECT_TIMEOUT_S)
        try:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            while True:
                theirs, peer = listener.accept()
                if peer == ours.getsockname():
                    theirs.setblocking(True)
                    return ours, theirs
                theirs.close()  # Another process was faster.
        except OSError:
            ours.close()
            raise


async def end_spared(process: asyncio.subprocess.Process) -> None:
    """Kill a process unless it has ended, without waiting if it hangs in the kernel."""
    if process.returncode is None:
        process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.wait()
    spare_no_more(process.pid)


def aside(command: Sequence[str], chdir: Path | None = None) -> list[str]:
    """Return a command line that starts a program through env(1), in a folder.

    Starting a process blocks until its program is opened, and thus until the file server responds;
    env(1) is local.
    """
    if "=" in command[0]:
        # env(1) would mistake it for a variable.
        command = ["/bin/sh", "-c", 'exec "$0" "$@"', *command]
    return ["/usr/bin/env", *([] if chdir is None else ["-C", str(chdir)]), *command]


def spare(pid: int) -> None:
    """Exempt a child from `sweep_orphans` until `spare_no_more` is called."""
    _spared_pids.add(pid)


def spare_no_more(pid: int) -> None:
    _spared_pids.discard(pid)

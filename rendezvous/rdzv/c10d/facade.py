"""Serves torch's store from a separate process and polls its contents once a second.

The process dies with rdzvd. If it dies alone, it is restarted with an empty store: torch's clients
do not reconnect, so their jobs end, but jobs launched later will find a store. The process is never
killed for being slow, because that would end those jobs too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rdzv.c10d.observations import State, Watch
from rdzv.errors import InvalidRequestError, RendezvousError
from rdzv.runtime.clock import Clock
from rdzv.transport.endpoints import Listen, cannot_listen
from rdzv.view.answers import JobStatus

log = logging.getLogger("rdzv.c10d")

SCRIPT = Path(__file__).with_name("store_server.py")
NO_TORCH = 3
"""The process's exit code if torch cannot be imported."""

READY_TIMEOUT_S = 120.0
"""Importing torch takes a second or two, but much longer on a cold disk or a loaded machine."""
LOOK_EVERY_S = 1.0
"""torch's store does not report changed keys, so it is polled. Nothing else in rdzv polls."""
SLOW_AFTER_S = 30.0
"""An answer that takes longer than this is logged but still awaited."""
RESTART_AFTER_S = (1.0, 30.0)
"""The first and the longest wait before the process is restarted. The wait doubles each time."""
STEADY_AFTER_S = 60.0
"""Once the process has lived this long, the next wait is the first one again."""
END_TIMEOUT_S = 5.0
"""How long the process may take to exit after its socket is closed before it is killed."""
BACKLOG = 1_024
MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""Sixteen times the process's own limit."""
LISTED_JOBS = 8
"""The maximum number of jobs named in a log line."""
WARNED_JOBS = 1_000
"""How many unreadable jobs are remembered, so that each is logged only once."""
LAST_WORDS = 4_096
"""How many bytes of the process's stderr are kept to explain its exit."""


class Answer(msgspec.Struct, frozen=True):
    """An answer of the child process; see `store_server` for its fields."""

    states: dict[str, msgspec.Raw] = {}
    unreadable: dict[str, str] = {}
    gone: list[str] = []
    left_out: int = 0
    error: str = ""

    def read(self) -> tuple[dict[str, State | None], dict[str, str]]:
        """Return the states of jobs, and why those of others cannot be read."""
        states: dict[str, State | None] = {}
        unreadable = dict(self.unreadable)
        for rdzv_id, raw in self.states.items():
            try:
                states[rdzv_id] = msgspec.json.decode(raw, type=State | None)
            except msgspec.ValidationError as error:
                unreadable[rdzv_id] = str(error)
        return states, unreadable


class _EndedError(Exception):
    """The process has ended or sent an invalid message."""


class Facade:
    """The store being served and the observations of its jobs."""

    def __init__(self, bound: Listen, python: str, clock: Clock) -> None:
        self.bound = bound
        self._python = python
        self._clock = clock
        self._watch = Watch()
        self._warned: set[str] = set()
        self._complaint = ""

    def view(self, rdzv_id: str) -> JobStatus | None:
        return self._watch.view(rdzv_id, self._clock.now_ms())

    def views(self) -> tuple[JobStatus, ...]:
        return self._watch.views(self._clock.now_ms())

    # ---------------------------------------------------------------- the life of the process

    async def keep(self, server: _StoreServer) -> None:
        """Poll the process and restart it whenever it exits, until cancelled."""
        wait_s, most_s = RESTART_AFTER_S
        while True:
            began_ms = self._clock.now_ms()
            try:
                await self._look_until_it_ends(server)
            except _EndedError as error:
                self._lose_all(str(error))
            except Exception as error:
                log.exception("c10d: a bug in rdzvd, please report it")
                self._lose_all(f"was abandoned: {error!r}")
            finally:
                await server.kill()
            if self._clock.now_ms() - began_ms >= STEADY_AFTER_S * 1000:
                wait_s = RESTART_AFTER_S[0]
            while True:
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, most_s)
                try:
                    server = await _StoreServer.start(listening_socket(self.bound), self._python)
                    break
                except (RendezvousError, OSError) as error:
                    log.error("c10d: %s; retrying in %g s", error, wait_s)
            log.warning("c10d: serving a new, empty store on %s (pid %d)", self.bound, server.pid)

    def _lose_all(self, why: str) -> None:
        lost = self._watch.clear()
        follows = "no job used it"
        if lost:
            more = f" and {len(lost) - LISTED_JOBS} more" if len(lost) > LISTED_JOBS else ""
            jobs = ", ".join(lost[:LISTED_JOBS])
            follows = f"its jobs will end without their store; launch them again: {jobs}{more}"
        log.error("c10d: the process that served torch's store %s; %s", why, follows)
        self._warned.clear()

    # ---------------------------------------------------------------- looking

    async def _look_until_it_ends(self, server: _StoreServer) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            answer = await self._ask(server)
            if answer.error:
                self._complain(f"the jobs in torch's store cannot be listed: {answer.error}")
                continue
            try:
                self._take(answer)
            except Exception:
                # The store is still being served, and other jobs are still being watched.
                log.exception("c10d: a bug in rdzvd, please report it: lost one check")

    def _take(self, answer: Answer) -> None:
        states, unreadable = answer.read()
        for rdzv_id, why in unreadable.items():
            self._warn_of(rdzv_id, why)
        beyond = f"{answer.left_out} jobs in torch's store exceed the limit, and are not observed"
        self._complain(beyond if answer.left_out else "")
        self._watch.take(states, (*answer.gone, *unreadable), self._clock.now_ms())

    async def _ask(self, server: _StoreServer) -> Answer:
        asking = asyncio.ensure_future(server.ask())
        try:
            done, _ = await asyncio.wait([asking], timeout=SLOW_AFTER_S)
            if not done:
                self._complain(f"torch's store has not answered for {SLOW_AFTER_S:g} s")
            return await asking
        finally:
            asking.cancel()

    def _complain(self, complaint: str) -> None:
        """Log a polling failure once for as long as it lasts; an empty complaint ends it."""
        if complaint != self._complaint and complaint:
            log.warning("c10d: %s", complaint)
        self._complaint = complaint

    def _warn_of(self, rdzv_id: str, why: str) -> None:
        if rdzv_id not in self._warned and len(self._warned) < WARNED_JOBS:
            self._warned.add(rdzv_id)
            log.warning("c10d: cannot show the state of job %a: %s", rdzv_id, why)


# ------------------------------------------------------------------------------------ the process


class _StoreServer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._said: deque[int] = deque(maxlen=LAST_WORDS)
        self._listening = asyncio.ensure_future(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, listening: socket.socket, python: str) -> _StoreServer:
        """Start the process on a listening socket, close our copy, and wait until it is serving."""
        with listening:
            try:
                # Start it from the main thread, because the kernel kills it when the thread that
                # started it ends.
                process = await asyncio.create_subprocess_exec(
                    *(python, str(SCRIPT), str(listening.fileno())),
                    pass_fds=(listening.fileno(),),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    limit=MOST_ANSWER_BYTES,
                )
            except OSError as error:
                raise InvalidRequestError(
                    f"{python} cannot be run to serve torch's store: {error.strerror}; name "
                    "an interpreter that has torch with --c10d-python"
                ) from error
        server = cls(process)
        try:
            await server._wait_until_ready(python)
        except BaseException:
            await server.kill()
            raise
        return server

    async def _wait_until_ready(self, python: str) -> None:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                line = await self._hear()
        except TimeoutError:
            raise RendezvousError(
                f"torch's store was not ready within {READY_TIMEOUT_S:g} s; is {python} stuck?"
            ) from None
        except _EndedError as error:
            if self._process.returncode == NO_TORCH:
                raise InvalidRequestError(
                    f"--c10d needs torch, which {python} cannot import ({self.last_words()}); "
                    "install rdzv[torch] beside rdzvd, or name another interpreter with "
                    "--c10d-python"
                ) from None
            raise RendezvousError(f"torch's store cannot be served: its process {error}") from None
        if line != b"ready\n":
            raise RendezvousError(f"{python} did not serve torch's store: {line!r}")

    async def ask(self) -> Answer:
        """Ask for changes."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        try:
            return msgspec.json.decode(await self._hear(), type=Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _EndedError(f"sent an invalid answer: {error}") from error

    async def _hear(self) -> bytes:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError as error:
            raise _EndedError(f"sent an invalid answer: {error}") from error
        if not line.endswith(b"\n"):
            await self._end()
            words = self.last_words()
            raise _EndedError(self._how_it_ended() + (f": {words}" if words else ""))
        return line

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        await self.kill()

    def _how_it_ended(self) -> str:
        code = self._process.returncode or 0
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"was ended by signal {-code}"

    async def _listen(self) -> None:
        """Collect the end of the process's stderr, which has torch's own warnings and errors."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(LAST_WORDS):
            self._said.extend(chunk)

    def last_words(self) -> str:
        lines = bytes(self._said).decode(errors="replace").splitlines()
        line = next((line for line in reversed(lines) if line.strip()), "")
        return "".join(char if char.isprintable() else " " for char in line)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._listening


def listening_socket(listen: Listen) -> socket.socket:
    """Return a socket that listens for torch's clients."""
    try:
        infos = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise cannot_listen(listen, error, "--c10d") from error
    family, kind, protocol, _, address = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `[::]` means every address of this machine, including IPv4 addresses.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise cannot_listen(listen, error, "--c10d") from error
    return sock


@asynccontextmanager
async def serving_c10d(
    listen: Listen | None, python: str, clock: Clock
) -> AsyncIterator[Facade | None]:
    """Serve torch's store at `listen` until the body ends; yield None if `listen` is None."""
    if listen is None:
        yield None
        return
    listening = listening_socket(listen)
    bound = Listen(listen.host, listening.getsockname()[1])
    server = await _StoreServer.start(listening, python)
    facade = Facade(bound, python, clock)
    log.info("c10d: serving torch's store on %s (pid %d)", bound, server.pid)
    if not bound.loopback:
        log.warning("insecure: anyone who can reach %s can run code on its jobs' nodes", bound)
    keeping = asyncio.create_task(facade.keep(server))
    try:
        yield facade
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping

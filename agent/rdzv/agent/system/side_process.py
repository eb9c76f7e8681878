"""The agent's handle on a process that runs `torch_side.py` with the job's interpreter.

The process runs a job's code, which may send anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rdzv.agent import runner_link
from rdzv.agent.runner.descriptors import close_shared
from rdzv.agent.system.accounts import Account, started_as
from rdzv.errors import InvalidRequestError

log = logging.getLogger("rdzv.agent")

READY_TIMEOUT_S = 120.0
"""How long it may take to get ready; importing torch from a cold network disk is slow."""

MAX_UNSENT_BYTES = 1 << 20
"""The maximum number of bytes that may wait for a process that does not read; more are refused."""

MAX_LINE_BYTES = 1 << 20
"""The maximum length of an answer. The longest holds the variables of a node's workers."""

REAP_TIMEOUT_S = 5.0
"""How long its interpreter may take to exit once its work is done."""

_SCRIPT = Path(__file__).parents[1] / "job_programs" / "torch_side.py"

Message = dict[str, Any]


class SideProcess(asyncio.Protocol):
    """JSON lines to and from a process. Its end, which may come at any time, is just an event.

    It owes one answer at its start and one for each `ask`. If it sends anything else, it is killed.
    Callbacks come from the event loop, one after another, and must not raise.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        python: str,
        on_message: Callable[[Message], None],
    ) -> None:
        """Take over a process that was just started. Use `start` instead."""
        self._process = process
        self._python = python
        self._on_message = on_message
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._owed = 1
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[Message] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def start(
        cls,
        python: str,
        options: Mapping[str, object],
        on_message: Callable[[Message], None] = lambda _: None,
        *,
        environ: Mapping[str, str] | None = None,
        chdir: Path | None = None,
        account: Account | None = None,
    ) -> SideProcess:
        """Start `torch_side.py`; `options` select its task.

        `environ`, `chdir` and `account` are the job's; the defaults are this process's own.

        Raises:
            OSError: the interpreter cannot be started.
        """
        ours, theirs = runner_link.connected_pair()
        with theirs:
            try:
                with started_as(account) as how:
                    process = subprocess.Popen(  # noqa: ASYNC220
                        runner_link.aside([python, str(_SCRIPT), str(theirs.fileno())], chdir),
                        stdin=subprocess.DEVNULL,
                        # Another account must not write to the agent's log.
                        stdout=None if account is None else subprocess.DEVNULL,
                        stderr=None if account is None else subprocess.DEVNULL,
                        env=environ,
                        pass_fds=[theirs.fileno()],
                        # The agent itself handles Ctrl-C.
                        start_new_session=True,
                        **how,
                    )
            except OSError:
                ours.close()
                raise
            close_shared(theirs)
        runner_link.spare(process.pid)
        loop = asyncio.get_running_loop()
        _, side = await loop.create_connection(lambda: cls(process, python, on_message), sock=ours)
        side.send(options)
        return side

    async def ready(self, what: str) -> None:
        """Wait until it is ready for its task; `what` is the option that requests the task.

        Raises:
            InvalidRequestError: it cannot do the task; the message gives the reason.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                answer = await asyncio.shield(self._first)
        except TimeoutError:
            answer = {"refused": f"torch was not ready there within {READY_TIMEOUT_S:g} s"}
        if reason := answer.get("refused"):
            raise InvalidRequestError(f"{what}: {self._python} answers: {reason}")

    @property
    def has_answered(self) -> bool:
        """Whether it has reported that it is ready, or why it is not."""
        return self._first.done()

    @property
    def refusal(self) -> str:
        """Why it cannot do its task, if it has reported a reason."""
        return str(self._first.result().get("refused", "")) if self._first.done() else ""

    def send(self, message: Mapping[str, object]) -> bool:
        """Send a line; return whether it was accepted for sending, not whether it arrives."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        transport.write(json.dumps(message).encode() + b"\n")
        return True

    def ask(self, message: Mapping[str, object]) -> bool:
        """Send a line that the process answers; otherwise like `send`."""
        sent = self.send(message)
        self._owed += sent
        return sent

    async def close(self, timeout_s: float) -> bool:
        """Allow the process to finish its work, then kill it; return whether it ended by itself."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        await asyncio.wait([self._over], timeout=timeout_s)
        in_time = self._over.done()
        if not in_time:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()
        if not await asyncio.to_thread(self._reap):
            in_time = False
        runner_link.spare_no_more(self._process.pid)
        return in_time

    def _reap(self) -> bool:
        """Wait for a process whose socket is closed, killing it if it does not end."""
        try:
            self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_TIMEOUT_S)
            return False
        return True

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._received += end
            line, self._received = bytes(self._received), bytearray()
            if not self._take(line):
                return
        self._received += rest
        if self._received and not self._owed:
            self._end("more than was asked for", bytes(self._received))
        elif len(self._received) > MAX_LINE_BYTES:
            self._end(f"a line of more than {MAX_LINE_BYTES:,} bytes", bytes(self._received))

    def _take(self, line: bytes) -> bool:
        if not self._owed:
            return self._end("more than was asked for", line)
        try:
            message = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return self._end("a line that is no answer", line)
        self._owed -= 1
        if self._first.done():
            self._on_message(message)
        else:
            self._first.set_result(message)
        return True

    def _end(self, what: str, line: bytes) -> bool:
        """Kill a process that sends something else than answers."""
        log.warning(
            "killed %s (pid %d), which runs the job's code: it sent %s: %r",
            self._python,
            self._process.pid,
            what,
            line[:200],
        )
        self._owed = 0
        if not self._first.done():
            self._first.set_result({"refused": f"it sent {what}, and was killed"})
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that no more lines will arrive."""
        if not self._first.done():
            self._first.set_result({"refused": "it ended before it was ready (see above)"})
        if not self._over.done():
            self._over.set_result(None)
            self._on_message({"ended": True})

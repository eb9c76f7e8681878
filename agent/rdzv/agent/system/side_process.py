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

from rdzv.agent.runner.descriptors import close_shared
from rdzv.agent.runner_link import agent_children
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

_SCRIPT = Path(__file__).parents[1] / "job_programs" / "torch_side.py"

Message = dict[str, Any]


class SideProcess:
    """JSON lines to and from a process. Its end, which may come at any time, is just an event.

    It owes one answer at its start and one for each `ask`. If it sends anything else, it is killed.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        python: str,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        on_end: Callable[[], None],
    ) -> None:
        """Take over a process that was just started. Use `start` instead."""
        self._process = process
        self._python = python
        self._reader, self._writer = streams
        self._on_end = on_end
        self._owed = 1
        self._first: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        python: str,
        options: Mapping[str, object],
        on_end: Callable[[], None] = lambda: None,
        *,
        environ: Mapping[str, str] | None = None,
        chdir: Path | None = None,
        account: Account | None = None,
    ) -> SideProcess:
        """Start `torch_side.py`; `options` select its task.

        `environ`, `chdir` and `account` are the job's; the defaults are this process's own. Raises
        `OSError` if the interpreter cannot be started.
        """
        ours, theirs = agent_children.connected_pair()
        with theirs:
            try:
                with started_as(account) as how:
                    process = subprocess.Popen(  # noqa: ASYNC220
                        agent_children.aside([python, str(_SCRIPT), str(theirs.fileno())], chdir),
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
        agent_children.spare(process.pid)
        streams = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        side = cls(process, python, streams, on_end)
        side.send(options)
        return side

    async def ready(self, what: str) -> None:
        """Wait until it is ready for its task; `what` is the option that requests the task.

        Raises `InvalidRequestError` if it cannot do the task; the message gives the reason.
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
        return self._first.done()

    @property
    def refusal(self) -> str:
        """Why it cannot do its task, if it has reported a reason."""
        return str(self._first.result().get("refused", "")) if self._first.done() else ""

    def send(self, message: Mapping[str, object]) -> bool:
        """Send a line; return whether it was accepted for sending, not whether it arrives."""
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        self._writer.write(json.dumps(message).encode() + b"\n")
        return True

    async def ask(self, message: Mapping[str, object]) -> Message | None:
        if not self.send(message):
            return None
        self._owed += 1
        return await self.answer()

    async def answer(self) -> Message | None:
        return (
            None if self._listening.done() and self._answers.empty() else await self._answers.get()
        )

    async def close(self, timeout_s: float) -> bool:
        """Allow the process to finish its work, then kill it; return whether it ended by itself."""
        if not self._writer.transport.is_closing():
            self._writer.write_eof()
        await asyncio.wait([self._listening], timeout=timeout_s)
        in_time = self._listening.done()
        if not in_time:
            self._process.kill()
        self._writer.transport.abort()
        await self._listening
        if not await asyncio.to_thread(self._reap):
            in_time = False
        agent_children.spare_no_more(self._process.pid)
        return in_time

    def _reap(self) -> bool:
        try:
            self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_TIMEOUT_S)
            return False
        return True

    async def _listen(self) -> None:
        """Take answers until the process ends, or sends something else and is killed."""
        line, wrong = b"", ""
        try:
            while not wrong and (line := await self._reader.readline()):
                wrong = self._take(line)
        except ValueError:
            wrong = f"a line of more than {MAX_LINE_BYTES:,} bytes"
        except OSError:
            pass
        if wrong:
            text = "killed %s (pid %d), which runs the job's code: it sent %s: %r"
            log.warning(text, self._python, self._process.pid, wrong, line[:200])
            self._process.kill()
        self._writer.transport.abort()
        if not self._first.done():
            ended = (
                f"it sent {wrong}, and was killed"
                if wrong
                else ("it ended before it was ready (see above)")
            )
            self._first.set_result({"refused": ended})
        self._answers.put_nowait(None)
        self._on_end()

    def _take(self, line: bytes) -> str:
        if not self._owed:
            return "more than was asked for"
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return "a line that is no answer"
        self._owed -= 1
        if self._first.done():
            self._answers.put_nowait(message)
        else:
            self._first.set_result(message)
        return ""

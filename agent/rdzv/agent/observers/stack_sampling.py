"""Samples workers' stacks with py-spy, from outside, so that the workers need not cooperate.

py-spy stops a process for some milliseconds, unless it is not running. If py-spy is not permitted,
or finds no Python, /proc still shows the process's state and where it sleeps in the kernel, and a
note says why there is no more, and what would help.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rdzv.agent.core.model import AgentState
from rdzv.agent.observers.collective_records import NoRecordError, RecordReader
from rdzv.agent.observers.flight_records import FlightRecord, entries_for
from rdzv.agent.runner_link.agent_children import ask_spared
from rdzv.agent.system.accounts import Identity
from rdzv.core.evidence.collectives import FINISHED
from rdzv.core.evidence.stacks import (
    EXITED,
    STOPPED,
    UNINTERRUPTIBLE,
    ZOMBIE,
    StackFrame,
    ThreadStack,
    WorkerStack,
)
from rdzv.messages import TakeStacks
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.agent")

RECORD_TIMEOUT_S = 3.0
"""How long torch may take to return a worker's record; usually a few milliseconds."""
PY_SPY_TIMEOUT_S = 5.0
"""How long py-spy may take for one worker, which normally takes about 20 ms."""
ON_THE_WAY_S = 1.0
"""How much of the server's deadline is reserved for sending the stacks."""
MAX_ASKED = 8
"""Requests for one job at a time. The server has a lower limit of its own."""
AT_ONCE = 4
"""Workers sampled at a time, because py-spy takes CPU to read a worker's libraries."""

MAX_THREADS = 32
MAX_FRAMES = 64
MAX_BYTES = 64 * 1024
"""The maximum size of one worker's reported threads, not counting its main thread."""
MAX_NAME_CHARS = 200
MAX_FILE_CHARS = 300
MAX_KERNEL_FRAMES = 16
MAX_NOTE_CHARS = 500
PY_SPY_LIMITS = "ulimit -v 1048576; ulimit -t 20"
"""Of its address space, in KiB, and its CPU time, in seconds, as it reads what a job may have
made."""

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@struct(frozen=True)
class Target:
    """A worker to sample."""

    rank: int
    local_rank: int
    pid: int
    file: str = ""
    """Its progress file, in whose folder its torch listens; empty if there is none."""


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


Say = Callable[[int, tuple[WorkerStack, ...], bool, str], Awaitable[None]]
"""Sends stacks for a request, whether they are the last, and the reason if there are none."""


class StackAnswers:
    """Handles requests for the stacks of one job's workers on this node."""

    def __init__(self, say: Say, records: RecordReader) -> None:
        self._say = say
        self._records = records
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, asked: TakeStacks, state: AgentState, running: Mapping[int, Target]) -> None:
        """The more workers the round has in total, the less of each worker's record is sent."""
        assignment, error = state.assignment, f"it has no workers of round {asked.round}"
        targets: list[Target] = []
        finished: list[WorkerStack] = []
        if assignment and (assignment.run, assignment.round) == (asked.run, asked.round):
            error = f"its workers of round {asked.round} have all exited"
            for one in state.finished:
                exited_ms = max(monotonic_ms() - one.at_ms, 0)
                who = (one.rank, one.local_rank, one.pid)
                finished.append(WorkerStack(*who, FINISHED, exited_ms=exited_ms))
            if not state.workers_gone and state.alive:
                targets = [running[n] for n in sorted(state.alive & running.keys())]
                error = "its workers are about to be started"
            if targets or len(finished) == state.job.local_world_size:
                error = ""
        if len(self._tasks) >= MAX_ASKED:
            targets, error = [], f"this node already answers {MAX_ASKED} requests for stacks"
        entries = entries_for(assignment.world_size if assignment else 1)
        answering = self._answer(asked, targets, error, entries, finished)
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(
        self,
        asked: TakeStacks,
        targets: Sequence[Target],
        error: str,
        entries: int,
        finished: Sequence[WorkerStack],
    ) -> None:
        look = partial(self._with_record, entries=entries)
        # Some of the time is reserved for sending the stacks.
        timeout_s = max(asked.timeout_ms / 1000 - ON_THE_WAY_S, ON_THE_WAY_S)
        try:
            for worker in finished:
                await self._say(asked.request, (worker,), False, "")
            async with contextlib.aclosing(
                take_all(targets, timeout_s, look, self._records.identity)
            ) as stacks:
                async for stack in stacks:
                    await self._say(asked.request, (stack,), False, "")
        except Exception as failure:
            log.exception("cannot capture stacks of %s", asked.rdzv_id)
            error = f"a bug in its agent: {failure!r}"
        await self._say(asked.request, (), True, error)

    async def _with_record(
        self, target: Target, sampling: Awaitable[WorkerStack | None], entries: int
    ) -> WorkerStack | None:
        read = self._record(target, entries)
        stack, record = await asyncio.gather(sampling, read, return_exceptions=True)
        if isinstance(stack, BaseException):
            raise stack
        gone = stack is None or stack.state == ZOMBIE
        left = self._records.left(target.file, target.pid, entries, gone=gone)
        if left is not None:
            who = target.rank, target.local_rank, target.pid
            groups = self._records.with_members(target.file, target.pid, left.record.groups)
            return WorkerStack(*who, EXITED, note=left.error, collectives=groups)
        if stack is None:
            return None
        if isinstance(record, FlightRecord):
            groups = self._records.with_members(target.file, target.pid, record.groups)
            return replace(stack, collectives=groups)
        if isinstance(record, NoRecordError):
            return replace(stack, no_record=str(record)[:MAX_NOTE_CHARS])
        raise record

    async def _record(self, target: Target, entries: int) -> FlightRecord:
        if process_state(target.pid) == STOPPED:
            # Otherwise the others would wait for a response that cannot come.
            raise NoRecordError("it is stopped by a signal, so it does not answer")
        left = self._records.left(target.file, target.pid, entries, gone=False)
        if left is not None:
            return left.record
        return await self._records.read(target.file, target.pid, entries, RECORD_TIMEOUT_S)


With = Callable[[Target, Awaitable[WorkerStack | None]], Awaitable[WorkerStack | None]]
"""Adds other data to a worker's stack, read while the stack is being sampled."""


async def take_all(
    targets: Sequence[Target],
    timeout_s: float,
    look: With | None = None,
    identity: Identity | None = None,
) -> AsyncGenerator[WorkerStack, None]:
    """Yield each stack as soon as it is read; a note after `timeout_s`; none for exited workers."""
    py_spy, gate = find_py_spy(), asyncio.Semaphore(AT_ONCE)
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    stacks = [(one, _take(py_spy, one, gate, deadline_s, identity)) for one in targets]
    tasks = [asyncio.ensure_future(look(one, s) if look else s) for one, s in stacks]
    try:
        for found in asyncio.as_completed(tasks):
            if (stack := await found) is not None:
                yield stack
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _take(
    py_spy: str | None,
    target: Target,
    gate: asyncio.Semaphore,
    deadline_s: float,
    identity: Identity | None,
) -> WorkerStack | None:
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as held:
        try:
            async with asyncio.timeout_at(deadline_s):
                await held.enter_async_context(gate)
        except TimeoutError:
            note = "there was no time left to sample it: others on this node took too long"
            return _from_proc(target, note)
        left_s = min(PY_SPY_TIMEOUT_S, deadline_s - loop.time())
        return await _look(py_spy, target, max(left_s, 0.1), identity)


async def _look(
    py_spy: str | None, target: Target, timeout_s: float, identity: Identity | None
) -> WorkerStack | None:
    state = process_state(target.pid)
    if state == "":
        return None
    if py_spy is None:
        note = "py-spy is missing: `pip install py-spy` beside rdzv, or put it on PATH"
        return _from_proc(target, note)
    if state == ZOMBIE:
        return _from_proc(target, "")
    # A stopped process cannot be stopped again, nor can one in D state until it leaves that state.
    ways = (
        [("--nonblocking",)]
        if state in (STOPPED, "t", UNINTERRUPTIBLE)
        else [(), ("--nonblocking",)]
    )
    rights: dict[str, Any] = {}
    if identity is not None and _ptrace_scope() == 0:
        # A worker may be made to mislead whoever reads its memory, which its account may do here.
        rights = {"user": identity.uid, "group": identity.gid, "extra_groups": identity.groups}
    note = ""
    for way in ways:
        try:
            dump = await _run(py_spy, target.pid, way, timeout_s, rights)
            threads = parse_dump(dump, target.pid)
        except (OSError, ValueError, TimeoutError) as error:
            note = note or _why_not(target.pid, str(error))
            if way == ():
                # py-spy may have been killed while it had the worker stopped. That may not be
                # visible yet; SIGCONT also cancels a pending SIGSTOP.
                with contextlib.suppress(OSError):
                    os.kill(target.pid, signal.SIGCONT)
            continue
        found = _from_proc(target, "")
        if found is None:
            return None
        # The place where it sleeps in the kernel matters only if it cannot leave that sleep.
        kernel = found.kernel if found.state == UNINTERRUPTIBLE else ()
        return replace(found, threads=threads, kernel=kernel)
    return _from_proc(target, note)


async def _run(
    py_spy: str, pid: int, way: Sequence[str], timeout_s: float, rights: Mapping[str, Any]
) -> bytes:
    try:
        code, output, complaint = await ask_spared(
            py_spy,
            *("dump", "--json", *way, "--pid", str(pid)),
            timeout_s=timeout_s,
            first=PY_SPY_LIMITS,
            # Its account may read its environment, so nothing of the agent's is in it.
            env={"PATH": os.defpath, "RUST_BACKTRACE": "0"},
            # The agent itself handles Ctrl-C.
            start_new_session=True,
            **rights,
        )
    except TimeoutError:
        raise TimeoutError(f"py-spy took longer than {timeout_s:g} s") from None
    if code != 0:
        raise ValueError(_complaint(complaint) or f"py-spy ended with {code}")
    return output


def _complaint(text: bytes) -> str:
    r"""Summarize py-spy's error message in one line.

    >>> _complaint(b"Error: No stacks\n\nCaused by:\n  0: Refused\n  1: EPERM\n\nStack backtrace:")
    'No stacks: Refused: EPERM'
    """
    message = text.decode(errors="replace").partition("Stack backtrace:")[0]
    lines = (line.strip() for line in message.splitlines())
    parts = [line for line in lines if line and not line.startswith(("Caused by", "Reason"))]
    return ": ".join(part.removeprefix("Error: ").lstrip("0123456789: ") for part in parts)


def _why_not(pid: int, complaint: str) -> str:
    note = f"py-spy: {complaint}"
    with contextlib.suppress(OSError):
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
        if os.geteuid() not in (0, owner):
            note = (
                f"py-spy may not read it: it runs as uid {owner}, and this agent as uid "
                f"{os.geteuid()}; give the agent CAP_SYS_PTRACE"
            )
        elif os.geteuid() != 0 and (scope := _ptrace_scope()) > 0:
            note = (
                f"py-spy may not read it: kernel.yama.ptrace_scope is {scope}; set it to "
                "0 (sysctl), or give the agent CAP_SYS_PTRACE, or have the worker call "
                "prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)"
            )
    return note[:MAX_NOTE_CHARS]


def _ptrace_scope() -> int:
    try:
        return int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return 0


# ---------------------------------------------------------------------- py-spy's output


def parse_dump(text: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Parse the output of `py-spy dump --json`, main thread first; long stacks are truncated."""
    try:
        dumped = json.loads(text)
        main = _main_thread(dumped, pid)
        found = [_thread(one, main=one is main) for one in dumped]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot read py-spy's output ({error!r})") from error
    found.sort(key=lambda thread: not thread.main)
    return _bounded(found[:MAX_THREADS])


def _main_thread(dumped: list[Any], pid: int) -> Any:
    """Return Python's main thread, or the first thread if none is marked as such."""
    if not dumped:
        raise ValueError("py-spy finds no Python thread in it")
    by_id = (one for one in dumped if one.get("os_thread_id") == pid)
    by_name = (one for one in dumped if one.get("thread_name") == "MainThread")
    return next(by_id, None) or next(by_name, dumped[0])


def _bounded(threads: Sequence[ThreadStack]) -> tuple[ThreadStack, ...]:
    room, kept = MAX_BYTES, list(threads[:1])
    for thread in threads[1:]:
        room -= sum(len(frame.name) + len(frame.file) + 16 for frame in thread.frames)
        if room > 0:
            kept.append(thread)
    return tuple(kept)


def _thread(thread: Any, *, main: bool) -> ThreadStack:
    frames = tuple(
        StackFrame(
            name=str(frame["name"])[:MAX_NAME_CHARS],
            file=str(frame.get("filename") or "?")[-MAX_FILE_CHARS:],
            line=max(int(frame.get("line") or 0), 0) or None,
        )
        for frame in thread["frames"][:MAX_FRAMES]
    )
    # Python does not name threads until `threading` is imported.
    name = str(thread.get("thread_name") or ("MainThread" if main else ""))[:MAX_NAME_CHARS]
    return ThreadStack(name, main, frames, bool(thread.get("owns_gil")))


# ---------------------------------------------------------------------- /proc


def process_state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _from_proc(target: Target, note: str) -> WorkerStack | None:
    state = process_state(target.pid)
    if state == "":
        return None
    kernel = () if state == ZOMBIE else _kernel(target.pid)
    return WorkerStack(target.rank, target.local_rank, target.pid, state, (), note, kernel)


def _kernel(pid: int) -> tuple[str, ...]:
    """Return where a process sleeps in the kernel: the full stack for root, or one function."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/stack").read_text().splitlines()
        # `[<0>] futex_wait_queue+0x61/0x90`
        names = (line.rpartition(" ")[2].partition("+")[0] for line in lines)
        if found := tuple(name for name in names if name and not name.startswith("0x"))[
            :MAX_KERNEL_FRAMES
        ]:
            return found
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text().strip()
        if place not in ("", "0"):
            return (place,)
    return ()

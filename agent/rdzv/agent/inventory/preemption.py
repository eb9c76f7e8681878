"""Detects that this machine is about to be preempted, from a file that appears or from a command.

The site provides either one, because each cloud has its own signal (`docs/drain.md`). The first
line of either may say how many seconds are left. Errors do not affect any job.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from rdzv.agent.inventory.health_checks import run_in_session
from rdzv.agent.system.side_thread import find_program, in_thread, in_time
from rdzv.core.words import duration
from rdzv.structs import Duration, setting, struct

log = logging.getLogger("rdzv.agent")

BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 60.0
"""The wait before a failed command is restarted; it doubles, unless the command ran long."""
STEADY_S = 60.0
"""If a command has run this long, its next restart is only delayed by the minimum wait."""
LOOK_EVERY_S = 1.0
"""The interval at which the file is looked at. One that is still empty then has no details."""
MAX_LINE_BYTES = 4_096
MAX_LEFT_S = 7 * 86_400
START_WITHIN_S = 10.0
"""How long it may take to find the command, which may be on a file server."""

Give = Callable[[int, str], None]
"""A callback that receives the milliseconds left and the reason."""


# fmt: off
@struct(frozen=True)
class Preemption:
    """How the agent learns that this machine is about to be preempted."""

    file: Annotated[Path | None, setting(reason="""
        When this file appears, this machine is about to be preempted: workers are notified, and the
        node leaves its jobs. The first line of the file may say how many seconds are left.
        """)] = None
    command: Annotated[tuple[str, ...], setting(reason="""
        A program and its arguments. It runs all the time, and exits with 0 when this machine is
        about to be preempted; its first line of output may say how many seconds are left. After any
        other exit code it is restarted.""")] = ()
    deadline_ms: Annotated[Duration, setting(ge=0, le=86_400_000, reason="""
        How much time is left after a notice that does not say so.""")] = 30_000
# fmt: on


@asynccontextmanager
async def reporting_preemptions(preemption: Preemption, give: Give) -> AsyncIterator[None]:
    watching, works = _Watching(preemption, give), []
    if preemption.file is not None:
        works.append(watching.file(preemption.file))
    if preemption.command:
        works.append(watching.command(preemption.command))
    tasks = [asyncio.create_task(_guarded(work), name="preemption") for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _guarded(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("stopped watching for preemptions because of a bug in rdzv-agent")


class _Watching:
    def __init__(self, preemption: Preemption, give: Give) -> None:
        self._preemption = preemption
        self._give = give

    # ------------------------------------------------------------------ the file

    async def file(self, path: Path) -> None:
        before = given = None
        while True:
            text = await in_thread(_read, path)
            # An empty file may be about to be written.
            if text is not None and text != given and (text or before is not None):
                self._take(text, f"preempted ({path})")
                given = text
            before, given = text, None if text is None else given
            await asyncio.sleep(LOOK_EVERY_S)

    # ------------------------------------------------------------------ the command

    async def command(self, command: Sequence[str]) -> None:
        loop, wait_s, logged = asyncio.get_running_loop(), BACKOFF_FIRST_S, ""
        while True:
            began_s = loop.time()
            try:
                code, line = await _run(command)
            except OSError as error:
                why = f"cannot be started: {error.strerror or error}"
            else:
                if code == 0:
                    self._take(line, f"preemption reported by {command[0]}")
                    return
                why = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            if loop.time() - began_s >= STEADY_S:
                wait_s = BACKOFF_FIRST_S
            level = logging.DEBUG if why == logged else logging.WARNING
            text = "`preemption.command` (%s) %s; restarting it in %g s"
            log.log(level, text, command[0], why, wait_s)
            logged = why
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_MAX_S)

    def _take(self, text: str, why: str) -> None:
        left_ms = left_ms_of(text)
        if left_ms is None:
            if text:
                log.warning("%s: %r is not a number of seconds; using the default time", why, text)
            left_ms = self._preemption.deadline_ms
        log.warning("%s: this node will leave all its jobs within %s", why, duration(left_ms))
        self._give(left_ms, why)


def left_ms_of(text: str) -> int | None:
    """Parse the seconds left; return milliseconds, or None if the text is not a valid number.

    >>> left_ms_of("120"), left_ms_of("1.5 s"), left_ms_of(""), left_ms_of("soon")
    (120000, 1500, None, None)
    """
    try:
        seconds = float(text.strip().removesuffix("s"))
    except ValueError:
        return None
    return round(seconds * 1000) if 0 <= seconds <= MAX_LEFT_S else None


def _read(path: Path) -> str | None:
    """Return a file's first line, None if there is no file, or the error if it is unreadable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"({error.strerror})"
    try:
        return _line(os.read(fd, MAX_LINE_BYTES))
    except OSError as error:
        return f"({error.strerror})"
    finally:
        os.close(fd)


def _line(data: bytes) -> str:
    return data.decode(errors="replace").partition("\n")[0].strip()


async def _run(command: Sequence[str]) -> tuple[int, str]:
    first = b""

    def hear(data: bytes) -> None:
        nonlocal first
        if b"\n" not in first:
            first = (first + data)[:MAX_LINE_BYTES]

    await in_time(START_WITHIN_S, find_program, command[0])
    code = await run_in_session(command, hear)
    return code, _line(first)

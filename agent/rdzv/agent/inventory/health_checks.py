"""The checks that can be configured for a node: a command, disks, GPUs, the kernel's log.

Also runs a site's commands, each in a session of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rdzv.agent.inventory import xid
from rdzv.agent.inventory.resources import ask_nvml, parts_of
from rdzv.agent.runner_link import agent_children
from rdzv.agent.system.side_thread import find_program, in_thread, in_time
from rdzv.core.words import counted, listed, size_text

SAID_BYTES = 16 * 1024
"""How much of the end of a command's output is kept."""
SAID_CHARS = 200
KILLED_S = 1.0
"""How long a killed command may take to end."""
MEMORY_SETTLES_S = 3.0
"""How long to wait for GPU memory, which the driver frees only after its process has ended."""
MEMORY_AGAIN_S = 0.2


@dataclass(eq=False)
class NodeCheck:
    """A check of the node."""

    name: str
    timeout_s: float

    async def look(self, unused_gpus: frozenset[str]) -> str:
        """Return the problem, phrased to follow the check's name, or "" if there is none."""
        raise NotImplementedError

    async def lift(self) -> None:
        """Dismiss earlier errors, because an operator has dealt with the node."""


# ---------------------------------------------------------------------- a command


async def run_in_session(
    args: Sequence[str], hear: Callable[[bytes], None], timeout_s: float | None = None, **how: Any
) -> int:
    """Return its exit code. At its end or after `timeout_s`, all in its session are killed."""
    loop, stream, (read_fd, write_fd) = (
        asyncio.get_running_loop(),
        asyncio.StreamReader(),
        os.pipe(),
    )
    # asyncio's own pipe would wait for every process that has inherited it, not just the command.
    pipe, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_fd, "rb", buffering=0)
    )
    try:
        try:
            process = await agent_children.start_spared(
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                start_new_session=True,
                **how,
            )
        finally:
            os.close(write_fd)
        reading = asyncio.create_task(_read_all(stream, hear))
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                # If the command survives SIGKILL, it is left alone.
                async with asyncio.timeout(KILLED_S):
                    await process.wait()
                    await reading
            reading.cancel()
            agent_children.spare_no_more(process.pid)
    finally:
        pipe.close()


async def _read_all(stream: asyncio.StreamReader, hear: Callable[[bytes], None]) -> None:
    while data := await stream.read(4_096):
        hear(data)


@dataclass(eq=False)
class Command(NodeCheck):
    """An operator's command. The node is healthy if it exits with 0 in time."""

    args: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    async def look(self, unused_gpus: frozenset[str]) -> str:
        output = bytearray()

        def hear(data: bytes) -> None:
            output.extend(data)
            del output[:-SAID_BYTES]

        env = {**self.environ, "RDZV_UNUSED_GPUS": ",".join(sorted(unused_gpus))}
        try:
            await in_time(self.timeout_s, find_program, self.args[0])
        except OSError as error:
            return f"cannot be started: {error.strerror or error}"
        try:
            code = await run_in_session(
                self.args, hear, self.timeout_s, stderr=asyncio.subprocess.STDOUT, env=env
            )
        except TimeoutError:
            return f"did not end within {self.timeout_s:g} s{_last_line(output)}"
        except OSError as error:
            return f"cannot be started: {error.strerror or error}"
        if code == 0:
            return ""
        how = f"ended by signal {-code}" if code < 0 else f"exited {code}"
        return f"{how}{_last_line(output)}"


def _last_line(output: bytearray) -> str:
    lines = output.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:SAID_CHARS]}" if last else ""


# ---------------------------------------------------------------------- disks


@dataclass(eq=False)
class Disk(NodeCheck):
    """Checks the free space on a path's disk that is available to accounts other than root."""

    path: Path = Path("/")
    min_free_bytes: int = 0
    min_free_percent: float = 0.0

    async def look(self, unused_gpus: frozenset[str]) -> str:
        """In a thread, because a file server may hang."""
        try:
            found = await in_thread(os.statvfs, self.path)
        except OSError as error:
            return f"cannot be checked: {error.strerror}"
        free = found.f_bavail * found.f_frsize
        percent = 100 * free / (found.f_blocks * found.f_frsize or 1)
        if percent < self.min_free_percent:
            least = f"{self.min_free_percent:g} %"
            return f"has {percent:.2g} % free ({size_text(free)}), but {least} are required"
        if free < self.min_free_bytes:
            return f"has {size_text(free)} free, but {size_text(self.min_free_bytes)} are required"
        return ""


# ---------------------------------------------------------------------- GPUs


def look_at_gpus() -> tuple[dict[str, int], list[str]]:
    found, trouble = ask_nvml(_ask_each)
    return found or ({}, [trouble])


def _ask_each(nvml: Any) -> tuple[dict[str, int], list[str]]:
    used: dict[str, int] = {}
    wrong = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            for part in parts_of(nvml, nvml.nvmlDeviceGetHandleByIndex(index)):
                memory = nvml.nvmlDeviceGetMemoryInfo(part)
                used[nvml.nvmlDeviceGetUUID(part)] = int(memory.used)
        except nvml.NVMLError as error:
            # A GPU that has fallen off the bus does not even report its name.
            wrong.append(f"number {index}: {error}")
    return used, wrong


@dataclass(eq=False)
class Gpus(NodeCheck):
    """Checks that each GPU responds, and that GPUs without a job are not in use."""

    uuids: Sequence[str] = ()
    count: int = 0
    memory_used: int = 0
    """The number of bytes that may be in use on an idle GPU."""
    look_at: Callable[[], tuple[dict[str, int], list[str]]] = look_at_gpus

    async def look(self, unused_gpus: frozenset[str]) -> str:
        """Memory that is being freed gets a moment."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(MEMORY_SETTLES_S, self.timeout_s / 2)
        while True:
            used, wrong = await in_thread(self.look_at)
            if text := self._missing(used, wrong):
                return text
            full = [u for u in self.uuids if u in unused_gpus and used[u] > self.memory_used]
            if not full:
                return ""
            if loop.time() >= until_s:
                most = max(used[uuid] for uuid in full)
                return f"{listed(full)}: {size_text(most)} are in use, but no job uses it"
            await asyncio.sleep(MEMORY_AGAIN_S)

    def _missing(self, used: Mapping[str, int], wrong: Sequence[str]) -> str:
        silent = [uuid for uuid in self.uuids if uuid not in used]
        why = f": {listed(wrong)}" if wrong else ""
        if silent:
            return f"{listed(silent)} {'does' if len(silent) == 1 else 'do'} not answer{why}"
        if len(used) < self.count:
            return f"{counted(len(used), 'GPU')} of {self.count} answer{why}"
        return ""


# ---------------------------------------------------------------------- the kernel's log


@dataclass(eq=False)
class Xids(NodeCheck):
    """Checks that no GPU has had an error that requires a reset or a repair."""

    codes: Collection[str] = xid.CODES
    log: Path = xid.KMSG
    lifted: xid.Lifted = field(default_factory=lambda: xid.Lifted(Path("/nonexistent")))

    async def look(self, unused_gpus: frozenset[str]) -> str:
        """Search for errors since the boot, or since an operator last dismissed them."""
        try:
            records = await in_thread(xid.read_records, self.log)
        except OSError as error:
            return (
                f"cannot read the log {self.log}: {error.strerror}; give the agent "
                "CAP_SYSLOG, or remove this check"
            )
        after = await in_thread(self.lifted.number)
        return xid.describe(xid.parse(records), self.codes, after)

    async def lift(self) -> None:
        records = await in_thread(xid.read_records, self.log)
        await in_thread(self.lifted.lift, records)

"""Takes over from the previous agent: its instance, and the runners that have outlived it.

::

    RUNTIME_DIR/instance.json    the instance of the node, as the server knows it
    RUNTIME_DIR/runners/*.sock   the sockets of its runners

If no runner can be adopted (its half is `rdzv.agent.runner.agent_link`), this agent is a new
instance, as after a reboot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from pathlib import Path

import msgspec

from rdzv.agent.handover.handover_state import (
    PLACEMENT,
    STATE,
    KeptPlacement,
    KeptState,
    decode_placement,
    decode_state,
)
from rdzv.agent.handover.leaked_processes import kill_leaked, mark_of
from rdzv.agent.runner_link.agent_children import kill_hung, wait_for_exit
from rdzv.agent.runner_link.found_runner import FoundRunner, NotAdoptableError, SilentRunnerError
from rdzv.agent.system.side_thread import in_time
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")

KILL_WITHIN_S = 10.0
"""How long it may take to find and kill a dead runner's processes, as the kernel may be slow."""

HANGS_AFTER_S = 16.0
"""How long a runner that does not answer has before it is killed. It would never end by itself, and
this node starts no job before it has.
"""

TELL_EVERY_S = 10.0
"""The interval between log lines about runners that are still running."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@struct(frozen=True)
class NodeInstance:
    """An instance of a node, with its id and the values that the server assigned to it."""

    instance: str
    incarnation: int = 0
    leadership: int = 0
    lease_ms: int | None = None
    """How much silence the server tolerates. Runners wait this long for an agent, even if the agent
    that adopted them dies before any server has responded to it.
    """


@struct(frozen=True)
class _Saved:
    """The content of `instance.json`."""

    node_id: str
    boot_id: str
    instance: NodeInstance


@struct(frozen=True)
class AdoptedRunner:
    """An adopted runner and the state that it kept."""

    runner: FoundRunner
    placement: KeptPlacement
    state: KeptState


class RunnerAdoption:
    """Adopts the runners that the previous agent left, and leaves this one's to the next agent."""

    def __init__(self, runtime_dir: Path, node_id: str) -> None:
        self._file = runtime_dir / "instance.json"
        self._sockets = runtime_dir / "runners"
        self._node_id = node_id
        self.instance = NodeInstance(uuid.uuid4().hex)
        """The instance as which this agent runs, which is decided by `adopt_runners`."""
        self._silent: set[asyncio.Task[None]] = set()

    def new_socket(self) -> Path:
        return self._sockets / f"{uuid.uuid4().hex}.sock"

    async def adopt_runners(self) -> list[AdoptedRunner]:
        """Adopt every runner that can be adopted. If there is one, continue as its instance.

        The other runners are left to their orphan timeout, and the reason is logged. Raises
        `OSError` if the directory cannot be written to.
        """
        self._sockets.mkdir(mode=0o700, exist_ok=True)
        former = self._read()
        met = await asyncio.gather(*(self._meet(path) for path in sorted(self._found())))
        adopted = []
        for found in met:
            if found is not None and (runner := self._adopt(found, former)) is not None:
                adopted.append(runner)
        if adopted:
            assert former is not None
            self.instance = former
        self._write()
        return adopted

    def note_welcome(self, incarnation: int, leadership: int, lease_ms: int) -> None:
        known = NodeInstance(self.instance.instance, incarnation, leadership, lease_ms)
        if known != self.instance:
            self.instance = known
            try:
                self._write()
            except OSError as error:
                log.warning(
                    "cannot write %s: %s; if this agent crashes, the next one must join as a new "
                    "instance", self._file, error)  # fmt: skip

    # ------------------------------------------------------------------ runners

    def _found(self) -> list[Path]:
        return [path for path in self._sockets.iterdir() if path.suffix == ".sock"]

    async def _meet(self, path: Path) -> FoundRunner | None:
        try:
            if (found := await FoundRunner.meet(path)) is None:
                # A runner removes its own socket unless it is killed.
                await in_time(KILL_WITHIN_S, kill_leaked, mark_of(path))
                _remove(path)
            return found
        except SilentRunnerError as error:
            log.warning("the runner at %s is not adopted: %s", path, error)
            task = asyncio.create_task(self._end_if_hung(path))
            self._silent.add(task)
            task.add_done_callback(self._silent.discard)
        except NotAdoptableError as error:
            self._tell_left(path, str(error))
        except OSError as error:
            log.error("cannot check for processes left by the dead runner of %s: %s", path, error)
        return None

    async def _end_if_hung(self, path: Path) -> None:
        """Kill a runner that still does not answer; another one ends after its orphan timeout."""
        try:
            found = await FoundRunner.meet(path, HANGS_AFTER_S)
        except SilentRunnerError as error:
            log.error("killing the runner at %s: it hangs: %s", path, error)
            await kill_hung(error.pid)
            await self._meet(path)  # Nothing listens there any more, so it is cleared up.
        except NotAdoptableError as error:
            self._tell_left(path, str(error))
        else:
            if found is not None:
                found.leave()

    def _adopt(self, found: FoundRunner, former: NodeInstance | None) -> AdoptedRunner | None:
        try:
            placement = decode_placement(found.hello.kept.get(PLACEMENT))
            state = decode_state(found.hello.kept.get(STATE))
            if placement.node_id != self._node_id:
                raise NotAdoptableError(
                    f"it belongs to node {placement.node_id}, and this one is {self._node_id}"
                )
            if former is None or placement.instance != former.instance:
                raise NotAdoptableError(
                    f"it belongs to instance {placement.instance} of this node, not to "
                    f"the one in {self._file}"
                )
        except NotAdoptableError as error:
            found.leave()
            self._tell_left(found.path, str(error))
            return None
        found.adopt()
        return AdoptedRunner(found, placement, state)

    def _tell_left(self, path: Path, why: str) -> None:
        log.warning(
            "the runner at %s is not adopted; it ends after its orphan timeout: %s", path, why
        )

    # ------------------------------------------------------------------ the instance

    def _read(self) -> NodeInstance | None:
        """Return the previous agent's instance if it dates from the current boot, or None."""
        try:
            saved = msgspec.json.decode(self._file.read_bytes(), type=_Saved)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("cannot read %s: %r", self._file, error)
            return None
        is_ours = saved.boot_id == _boot_id() and saved.node_id == self._node_id
        return saved.instance if is_ours else None

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")
        _remove(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, msgspec.json.encode(_Saved(self._node_id, _boot_id(), self.instance)))
        finally:
            os.close(fd)
        temporary.replace(self._file)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


class RunnerRecords:
    """Records this agent's runners for the next agent.

    A runner that cannot be adopted ends no later than its orphan timeout, unless a process is stuck
    in the kernel. Until then its GPUs must not be given to other jobs. So each runner is recorded
    in the state directory, and the next agent starts no job before those have ended.
    """

    def __init__(self, state_dir: Path, proc: Path = Path("/proc")) -> None:
        self._folder = state_dir / "runners"
        self._proc = proc
        self._own: set[int] = set()

    def note(self, pid: int) -> None:
        self._own.add(pid)
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / str(pid)).write_text(self._started_at(pid), encoding="ascii")
        except OSError as error:
            log.warning("cannot record runner pid %d for the next agent: %s", pid, error)

    def forget(self, pid: int) -> None:
        self._own.discard(pid)
        with contextlib.suppress(OSError):
            (self._folder / str(pid)).unlink()

    async def former_gone(self) -> None:
        for path in self._former():
            pid = int(path.name)
            while (process := self._open(path)) is not None:
                log.warning("waiting for runner pid %d of the previous agent to end", pid)
                try:
                    await wait_for_exit(process, TELL_EVERY_S)
                finally:
                    os.close(process)
            self.forget(pid)

    def _former(self) -> list[Path]:
        try:
            found = [path for path in self._folder.iterdir() if path.name.isdecimal()]
        except OSError:
            return []
        return [path for path in found if int(path.name) not in self._own]

    def _open(self, path: Path) -> int | None:
        try:
            process = os.pidfd_open(int(path.name))
        except OSError:
            return None
        # Checked only now, because another process may have reused the pid.
        if self._is_it(path):
            return process
        os.close(process)
        return None

    def _is_it(self, path: Path) -> bool:
        try:
            return path.read_text(encoding="ascii") == self._started_at(int(path.name))
        except (OSError, ValueError):
            return False

    def _started_at(self, pid: int) -> str:
        """Return a process's start time since boot, together with the boot's id."""
        # The command is in parentheses and may contain any character.
        fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        state, started = fields[0], fields[19]
        if state in (b"Z", b"X"):
            raise ProcessLookupError(f"pid {pid} has ended")
        boot = (self._proc / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii")
        return f"{started.decode()} {boot.strip()}"

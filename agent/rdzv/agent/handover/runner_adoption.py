"""Takes over from the previous agent: its instance, and the runners that have outlived it.

::

    RUNTIME_DIR/instance.json       the instance of the node, as the server knows it
    RUNTIME_DIR/runners/*.sock      the sockets of its runners

The agent that holds the lock on the runtime directory knows that the previous one is gone. If it
can adopt a runner (the runner's half is `rdzv.agent.runner.agent_link`), it continues as the
same instance: the server sees a node that was away and is back, and nothing is re-formed. Otherwise
it is a new instance, as after a reboot.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import uuid
from pathlib import Path

from rdzv.agent.handover.handover_state import (
    PLACEMENT,
    STATE,
    KeptPlacement,
    KeptState,
    decode_placement,
    decode_state,
)
from rdzv.agent.handover.leaked_processes import kill_leaked, mark_of
from rdzv.agent.runner_link import FoundRunner, NotAdoptableError, SilentRunnerError, kill_hung
from rdzv.agent.system.side_thread import in_time
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")

KILL_WITHIN_S = 10.0
"""How long it may take to find and kill a dead runner's processes, as the kernel may be slow."""

HANGS_AFTER_S = 16.0
"""How long a runner that does not answer has before it is killed. It would never end by itself, and
this node starts no job before it has.
"""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@struct(frozen=True)
class Instance:
    """An instance of a node, with its id and the values that the server assigned to it."""

    instance: str
    incarnation: int = 0
    leadership: int = 0
    lease_ms: int | None = None
    """How much silence the server tolerates. Runners wait this long for an agent, even if the agent
    that adopted them dies before any server has responded to it.
    """


@struct(frozen=True)
class AdoptedRunner:
    """An adopted runner and the state that it kept."""

    runner: FoundRunner
    placement: KeptPlacement
    state: KeptState


class RunnerAdoption:
    """Adopts the runners that the previous agent left, and leaves this one's to the next agent."""

    def __init__(self, runtime_dir: Path, node_id: str) -> None:
        """Use a runtime directory, whose lock the caller must hold."""
        self._file = runtime_dir / "instance.json"
        self._sockets = runtime_dir / "runners"
        self._node_id = node_id
        self.instance = Instance(uuid.uuid4().hex)
        """The instance as which this agent runs, which is decided by `adopt_runners`."""
        self._silent: set[asyncio.Task[None]] = set()

    def new_socket(self) -> Path:
        return self._sockets / f"{uuid.uuid4().hex}.sock"

    async def adopt_runners(self) -> list[AdoptedRunner]:
        """Adopt every runner that can be adopted. If there is one, continue as its instance.

        The other runners are left to their orphan timeout, and the reason is logged.

        Raises:
            OSError: the directory cannot be written to.
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
        """Record the values that the server assigned to this instance."""
        known = Instance(self.instance.instance, incarnation, leadership, lease_ms)
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

    def _adopt(self, found: FoundRunner, former: Instance | None) -> AdoptedRunner | None:
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

    def _read(self) -> Instance | None:
        """Return the previous agent's instance if it dates from the current boot, or None."""
        try:
            said = json.loads(self._file.read_bytes())
            if said["boot_id"] != _boot_id() or said["node_id"] != self._node_id:
                return None
            lease_ms = None if said["lease_ms"] is None else int(said["lease_ms"])
            return Instance(
                str(said["instance"]), int(said["incarnation"]), int(said["leadership"]), lease_ms
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning("cannot read %s: %r", self._file, error)
            return None

    def _write(self) -> None:
        """Write the instance atomically to a file that only this user can read."""
        text = json.dumps(
            {
                "node_id": self._node_id,
                "instance": self.instance.instance,
                "incarnation": self.instance.incarnation,
                "leadership": self.instance.leadership,
                "lease_ms": self.instance.lease_ms,
                "boot_id": _boot_id(),
            }
        )
        temporary = self._file.with_suffix(".new")
        _remove(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
        temporary.replace(self._file)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()

"""Starts the process that writes a snapshot to disk under the job's account.

The process is `python -m rdzv.worker.write_snapshots`, which receives the slots as descriptors and
does not depend on the workers. It first copies the slots if there is memory for that, and closes a
pipe. Until then, or else while it runs, the workers do not overwrite that step; they skip saves
instead. It outlives its round, but not the runner.
"""

from __future__ import annotations

import socket
from functools import partial

from .linux.descriptors import close_fds, close_job_socket
from .requests import read_argv, read_env, read_field, read_identity, read_optional_text
from .spawn import Program, reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .agent_link import AgentLink
    from .child_exits import Child, Children
    from .loop import Loop
    from .snapshot_slots import SnapshotSlots

_COPIED = "RDZV_SNAPSHOT_COPIED"


class SnapshotWriters:
    """Runs the writer process, at most one at a time."""

    def __init__(
        self, loop: Loop, children: Children, agent: AgentLink, slots: SnapshotSlots
    ) -> None:
        self._loop = loop
        self._children = children
        self._agent = agent
        self._slots = slots
        self._writer: Child | None = None
        self._copied: socket.socket | None = None
        """The end of the pipe that the writer closes once it has copied the slots."""

    def write(self, request: Mapping[str, object]) -> None:
        """Handle `write_snapshots`. An event reports the result."""
        mark = {
            "lineage": read_field(request, "lineage", int),
            "step": read_field(request, "step", int),
            "series": read_field(request, "series", str),
        }
        argv, env = tuple(read_argv(request)), read_env(request)
        identity, cwd = read_identity(request), read_optional_text(request, "cwd")
        if self._writer is not None:
            self._tell(mark, "another step is still being written")
            return
        try:
            fds = self._slots.copies_of(mark)
        except OSError as error:
            self._tell(mark, reason_of(error))
            return
        if not fds:
            self._tell(mark, "this node holds no part of it")
            return
        named = f"{mark['lineage']}:{mark['step']}:{mark['series']}"
        words = (*argv, "--mark", named, *map(str, fds))
        try:
            if self._slots.has_memory_for_copies(fds):
                # No pipe: a job holds its lock, and so delays its close, for as long as it likes.
                self._copied, theirs = socket.socketpair()
                fds = (*fds, theirs.detach())
                env = {**env, _COPIED: str(fds[-1])}
                self._loop.watch(self._copied.fileno(), self._unpin)
            self._writer = self._children.start(
                f"the writer of step {mark['step']}",
                Program(argv=words, env=env, cwd=cwd, pass_fds=fds, identity=identity),
                partial(self._end, mark, identity is not None),
                spared=True,
            )
        except OSError as error:
            self._close_copied()
            self._tell(mark, reason_of(error))
        else:
            self._slots.pin(mark)
        finally:
            close_fds(fds)

    def _unpin(self) -> None:
        """Let workers overwrite the step, whatever the job's end of the link says."""
        self._close_copied()
        self._slots.pin(None)

    def _close_copied(self) -> None:
        if self._copied is not None:
            self._loop.unwatch(self._copied.fileno())
            close_job_socket(self._copied)
            self._copied = None

    def _end(self, mark: Mapping[str, object], is_private: bool, child: Child, code: int) -> None:
        self._writer = None
        self._unpin()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        said = "; its stderr says why" if code > 0 and not is_private else ""
        reason = child.failure or f"its writer ended with {how}{said}"
        self._tell(mark, "" if code == 0 else reason)

    def _tell(self, mark: Mapping[str, object], reason: str) -> None:
        if self._agent.hears_of_snapshots:
            self._agent.tell("snapshots_written", **mark, reason=reason)

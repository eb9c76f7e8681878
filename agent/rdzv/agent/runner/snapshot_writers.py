"""Starts the process that writes a snapshot to disk under the job's account.

The process is `python -m rdzv.worker.write_snapshots`, which receives the slots as descriptors and
does not depend on the workers. It first copies the slots if there is memory for that, and closes a
pipe. Until then, or else while it runs, the workers do not overwrite that step; they skip saves
instead. It outlives its round, but not the runner. It is forked from the zygote if that has
imported torch.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, replace
from functools import partial

from .descriptors import close_fds, close_job_socket, write_warning
from .spawn import Program, reason_of
from .warm_forks import FORK_TIMEOUT_S, WarmStart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .child_exits import Child
    from .requests import StateMark, WriteSnapshots
    from .runner import Runner
    from .warm_forks import Fork

_COPIED = "RDZV_SNAPSHOT_COPIED"


class SnapshotWriters:
    """Runs the writer process, at most one at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._mark: StateMark | None = None
        self._copied: socket.socket | None = None
        """The end of the pipe that the writer closes once it has copied the slots."""

    def write(self, spec: WriteSnapshots) -> None:
        mark = spec.mark
        if self._mark is not None:
            self._tell(mark, "another step is still being written")
            return
        try:
            fds = self._runner.slots.copies_of(mark)
        except OSError as error:
            self._tell(mark, reason_of(error))
            return
        if not fds:
            self._tell(mark, "this node holds no part of it")
            return
        named = f"{mark.lineage}:{mark.step}:{mark.series}"
        self._mark = mark
        program = Program(
            argv=(*spec.argv, "--mark", named),
            env=spec.env,
            cwd=spec.cwd,
            pass_fds=fds,
            identity=spec.identity,
        )
        try:
            if self._runner.slots.has_memory_for_copies(fds):
                # No pipe: a job holds its lock, and so delays its close, for as long as it likes.
                self._copied, theirs = socket.socketpair()
                program = replace(program, pass_fds=(*fds, theirs.detach()))
                self._runner.loop.watch(self._copied.fileno(), self._unpin)
        except OSError as error:
            close_fds(program.pass_fds)
            self._finish(reason_of(error))
            return
        if self._runner.forks.has_imported("torch", spec.argv[0], spec.identity):
            self._runner.slots.pin(mark)
            self._runner.forks.want([WarmWriter(self, program, copies=self._copied is not None)])
        else:
            self._start_cold(program)

    def start_cold_instead(self, starts: Sequence[WarmStart], reason: str) -> None:
        for start in starts:
            if isinstance(start, WarmWriter) and not self._runner.loop.shutting_down:
                write_warning(f"the writer of a snapshot will start cold: {reason}")
                self._start_cold(start.program)
            elif isinstance(start, WarmWriter):
                start.close()

    def _start_cold(self, program: Program) -> None:
        assert self._mark is not None
        fds = [str(fd) for fd in program.pass_fds]
        env = program.env
        if self._copied is not None:
            env = {**env, _COPIED: fds.pop()}
        started = replace(program, argv=(*program.argv, *fds), env=env)
        try:
            name = f"the writer of step {self._mark.step}"
            end = partial(self.end, program.identity is not None)
            self._runner.children.start(name, started, end, spared=True)
        except OSError as error:
            self._finish(reason_of(error))
        else:
            self._runner.slots.pin(self._mark)
        finally:
            close_fds(program.pass_fds)

    def _unpin(self) -> None:
        """Let workers overwrite the step, whatever the job's end of the link says."""
        self._close_copied()
        self._runner.slots.pin(None)

    def _close_copied(self) -> None:
        if self._copied is not None:
            self._runner.loop.unwatch(self._copied.fileno())
            close_job_socket(self._copied)
            self._copied = None

    def end(self, is_private: bool, child: Child, code: int) -> None:
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        hint = "; its stderr says why" if code > 0 and not is_private else ""
        reason = child.failure or f"its writer ended with {how}{hint}"
        self._finish("" if code == 0 else reason)

    def _finish(self, reason: str) -> None:
        self._unpin()
        mark, self._mark = self._mark, None
        assert mark is not None
        self._tell(mark, reason)

    def _tell(self, mark: StateMark, reason: str) -> None:
        if self._runner.agent.hears_of_snapshots:
            self._runner.agent.tell("snapshots_written", mark=asdict(mark), reason=reason)


class WarmWriter(WarmStart):
    """A writer that is forked from the zygote."""

    outlives_rounds = True
    replaced_after_exit = True  # Two writers of one part would remove each other's files.

    def __init__(self, owner: SnapshotWriters, program: Program, *, copies: bool) -> None:
        """Take ownership of the program's descriptors, the last of which is a pipe if it copies."""
        super().__init__(owner, FORK_TIMEOUT_S)
        self._writers = owner
        self.program = program
        self._copies = copies

    def send_order(self, fork: Fork, child: Child) -> None:
        program = {name: getattr(self.program, name) for name in ("argv", "env", "cwd")}
        program["copied"] = _COPIED if self._copies else ""
        fork.send_program("snapshot_writer", program, self.program.pass_fds)

    def take_running(self, child: Child) -> None:
        self.close()

    def take_exit(self, child: Child, code: int) -> None:
        self._writers.end(self.program.identity is not None, child, code)

    def close(self) -> None:
        close_fds(self.program.pass_fds)

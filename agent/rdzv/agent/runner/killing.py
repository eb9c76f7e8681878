"""How workers are killed: `Killing.advance` sends SIGKILL to all processes of an ending round.

It does so when a stop's grace period is over or no worker remains, when a worker could not be
started, at the fence, and when the runner shuts down, and repeats it until no process remains. The
runner is a child subreaper, so it inherits daemons and no process escapes. Only parked workers, and
processes that they have started, survive.

The workers are killed first. What they have started then has a short time to end by itself
(`HelpersTime`), except at the fence and when the runner shuts down. In this time Python's resource
tracker, which waits for its worker's end, removes its files in /dev/shm; a logger or the writer of
a checkpoint writes what it still has. torch_shm_manager, which does as the tracker does but two
seconds later, holds up no round (child_exits.py); a runner waits for it before it ends.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from .processes import descendants_of, signal_relative

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .runner import Runner

STUCK_AFTER_S = 5.0

HELPERS_S = 2.0
"""How long the processes that dead workers have started may take to end by themselves."""

QUIET_S = 0.5
"""How long they are left alone after a failure. Those in the worker's process group, such as a
DataLoader's, which would wait for longer, get SIGTERM then.
"""


class HelpersTime:
    """The time in which processes that dead workers have started may end by themselves."""

    def __init__(self, exits: Mapping[int, int], told: Collection[int]) -> None:
        """Take the workers' exit codes by pid, and the signals that told them to end."""
        self._exits = exits
        self._told = told
        self._since: float | None = None
        self._signalled: set[int] = set()

    @property
    def ends_at(self) -> float:
        return 0.0 if self._since is None else self._since + HELPERS_S

    def goes_on(self, left: list[int]) -> bool:
        """Return whether the time is not over. Sends SIGTERM to those that get it."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        due = {pid for pid in self._exits if now >= self._since + self._quiet_s(pid)}
        if due := due - self._signalled:
            self._signalled |= due
            _signal_members(due, left)
        return now < self.ends_at

    def _quiet_s(self, pid: int) -> float:
        code = self._exits[pid]
        if code == 0:
            return HELPERS_S  # It was done, so what it left behind was meant to be.
        return 0.0 if -code in self._told else QUIET_S


def _signal_members(groups: Collection[int], children: list[int]) -> None:
    found = descendants_of(children)
    family = {os.getpid(), *found}
    for pid in found:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) in groups:
                signal_relative(pid, signal.SIGTERM, family)


class Killing:
    """Kills the processes of ending rounds, and of the runner when it shuts down."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._since: float | None = None
        self._reported = False
        self._helpers = HelpersTime({}, ())

    @property
    def goes_on(self) -> bool:
        """Whether a kill must be repeated because some processes remain."""
        return self._since is not None

    def advance(self) -> bool:
        """Kill whatever must be killed. Returns whether the runner is finished."""
        if self._since is None:
            held, ends = self._runner.workers.round, self._runner.loop.shutting_down
            if not (ends or (held is not None and held.is_to_be_killed)):
                return False
            self._since, self._reported = time.monotonic(), False
            if held is not None:
                self._helpers = HelpersTime(held.exited, held.signals_sent)
            self._runner.workers.begin_kill()
            if self._runner.loop.shutting_down:
                self._runner.forks.drop(self._runner.forks.wanted())
        try:
            left = self._runner.children.kill(self._runner.workers.stays, self._helpers_time())
        except OSError:  # They will be listed again, as after any other kill.
            self._report_survivors(self._runner.children.known())
            return False
        if left:
            self._report_survivors(left)
            return False
        if self._runner.loop.shutting_down and self._runner.children.cleaning():
            return False
        self._since = None
        self._runner.workers.end_round()
        return self._runner.loop.shutting_down

    def _helpers_time(self) -> HelpersTime | None:
        held = self._runner.workers.round
        if self._runner.loop.shutting_down or held is None or held.fenced or self._reported:
            return None
        return self._helpers

    def _report_survivors(self, left: list[int]) -> None:
        assert self._since is not None
        began = max(self._since, self._helpers.ends_at)
        if self._reported or time.monotonic() < began + STUCK_AFTER_S:
            return
        self._reported = True
        if self._runner.workers.round is not None:
            self._runner.agent.emit("stuck", round=self._runner.workers.round.number, pids=left)
            # The node is given up, so its parked workers could never continue.
            self._runner.workers.round.keep_none()

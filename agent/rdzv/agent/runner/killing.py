"""How workers are killed: `Killing.advance` sends SIGKILL to all processes of an ending round.

It does so when a stop's grace period is over or no worker remains, when a worker could not be
started, at the fence, and when the runner shuts down, and repeats it until no process remains. The
runner is a child subreaper, so it inherits daemons and no process escapes. Only parked workers, and
processes that they have started, survive.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent_link import AgentLink
    from .child_exits import Children
    from .loop import Loop
    from .warm_forks import WarmForks
    from .workers import Workers

STUCK_AFTER_S = 5.0


class Killing:
    """Kills the processes of ending rounds, and of the runner when it shuts down."""

    def __init__(
        self,
        loop: Loop,
        children: Children,
        agent: AgentLink,
        workers: Workers,
        forks: WarmForks,
    ) -> None:
        self._loop = loop
        self._children = children
        self._agent = agent
        self._workers = workers
        self._forks = forks
        self._since: float | None = None
        """When the current kill began; None if there is none."""
        self._reported = False

    @property
    def goes_on(self) -> bool:
        """Whether a kill must be repeated because some processes remain."""
        return self._since is not None

    def advance(self) -> bool:
        """Kill whatever must be killed. Returns whether the runner is finished."""
        if self._since is None:
            held = self._workers.round
            if not (self._loop.shutting_down or (held is not None and held.is_to_be_killed)):
                return False
            self._since, self._reported = time.monotonic(), False
            self._workers.begin_kill()
            if self._loop.shutting_down:
                self._forks.drop(self._forks.wanted())
        try:
            left = self._children.kill(self._workers.stays)
        except OSError:  # They will be listed again, as after any other kill.
            self._report_survivors(self._children.known())
            return False
        if left:
            self._report_survivors(left)
            return False
        self._since = None
        self._workers.end_round()
        return self._loop.shutting_down

    def _report_survivors(self, left: list[int]) -> None:
        assert self._since is not None
        if self._reported or time.monotonic() < self._since + STUCK_AFTER_S:
            return
        self._reported = True
        if self._workers.round is not None:
            self._agent.emit("stuck", round=self._workers.round.number, pids=left)
            # The node is given up, so its parked workers could never continue.
            self._workers.round.keep_none()

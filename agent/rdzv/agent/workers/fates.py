"""What became of each worker of this node's last round, and how much of it the agent did."""

from __future__ import annotations

from collections.abc import Collection

from rdzv.agent.core.model import Assignment, Outcome
from rdzv.structs import replace, struct


@struct(frozen=True)
class Stop:
    """How the agent told a worker to end."""

    signum: int
    grace_ms: int
    """Between the signal and SIGKILL."""


@struct(frozen=True)
class WorkerFate:
    """One worker, from its start to its end."""

    local_rank: int
    rank: int
    role_rank: int
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    """What ended it; None with no exit code either: it has not ended, or was never started."""
    failed: bool = False
    """It failed by itself."""
    stopped: Stop | None = None
    """It was told to end by the agent; that it then failed is no failure."""


@struct(frozen=True)
class LocalRound:
    """The workers of one round on this node."""

    assignment: Assignment
    workers: tuple[WorkerFate, ...]
    """By LOCAL_RANK."""

    @classmethod
    def begin(cls, assignment: Assignment, local_world_size: int) -> LocalRound:
        """Return a round whose workers are about to be started."""
        first, role_first = assignment.rank_first, assignment.role_rank_first
        fates = (WorkerFate(n, first + n, role_first + n) for n in range(local_world_size))
        return cls(assignment, tuple(fates))

    def started(self, local_rank: int, pid: int) -> LocalRound:
        """Take note that a worker runs."""
        return self._with(local_rank, pid=pid)

    def told_to_end(self, alive: Collection[int], stop: Stop) -> LocalRound:
        """Take note that the agent ends the workers that are alive; the first word counts."""
        return replace(
            self,
            workers=tuple(
                replace(fate, stopped=stop)
                if fate.local_rank in alive and fate.stopped is None
                else fate
                for fate in self.workers
            ),
        )

    def ended(
        self, local_rank: int, exit_code: int | None, signal: int | None, *, failed: bool
    ) -> LocalRound:
        """Take note of an exit; a worker that failed before it was told to end has failed."""
        stopped = None if failed else self.workers[local_rank].stopped
        return self._with(
            local_rank, exit_code=exit_code, signal=signal, failed=failed, stopped=stopped
        )

    def _with(self, local_rank: int, **changes: object) -> LocalRound:
        before, fate = self.workers[:local_rank], self.workers[local_rank]
        changed: WorkerFate = replace(fate, **changes)  # type: ignore[arg-type]
        return replace(self, workers=(*before, changed, *self.workers[local_rank + 1 :]))


@struct(frozen=True)
class NodeOutcome(Outcome):
    """How a job ended for this node, with what became of its last workers."""

    workers: tuple[WorkerFate, ...] = ()

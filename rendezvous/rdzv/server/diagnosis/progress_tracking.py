"""Keeps the progress that nodes report for their workers, in memory and for live rounds only.

No decision depends on progress, so it is kept neither in the rendezvous core nor in the store;
nodes report it again to a restarted server. At most one entry is kept for each worker in a live
round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.model import Round, State
from rdzv.errors import InvalidRequestError
from rdzv.messages import Progress
from rdzv.structs import replace


@dataclass(slots=True)
class _Job:
    """The progress that the nodes in one round have reported."""

    run: str
    round: Round
    ranks: dict[str, range]
    """The RANKs of each node's workers, by node_id."""
    said: dict[str, tuple[int, Progress]] = field(default_factory=dict)
    """Each node's latest report and the time when it was received, by node_id."""


class ProgressBoard:
    """The latest progress reports, by job and node."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    def note(self, state: State, node_id: str, said: Progress, now_ms: int) -> None:
        """Record a node's progress in the live round.

        Raises:
            InvalidRequestError: the report names a worker that the node does not have.

        """
        round_ = state.membership.live_round
        assert round_ is not None
        job = self._job(state, round_)
        ranks = job.ranks[node_id]
        for one in said.ranks:
            if one.rank not in ranks:
                raise InvalidRequestError(
                    f"progress of RANK {one.rank}: {node_id} has RANK {ranks[0]}..{ranks[-1]} in "
                    f"round {said.round}; name those"
                )
        job.said[node_id] = now_ms, said

    def _job(self, state: State, round_: Round) -> _Job:
        """Return the record for a job's live round, creating it if there is none."""
        rdzv_id = state.membership.rdzv_id
        job = self._jobs.get(rdzv_id)
        if job is None or not state.membership.is_live(job.run, job.round.number):
            job = self._jobs[rdzv_id] = _Job(state.membership.run, round_, _ranks(round_))
        elif job.round is not round_:
            # An adopted node has replaced a placeholder.
            job.round, job.ranks = round_, _ranks(round_)
        return job

    def tidy(self, state: State) -> None:
        """Drop the progress of a round that is over and of nodes that no longer have a seat."""
        rdzv_id = state.membership.rdzv_id
        if (job := self._jobs.get(rdzv_id)) is None:
            return
        if not state.membership.is_live(job.run, job.round.number):
            del self._jobs[rdzv_id]
        elif len(job.said) > len(state.seats):
            job.said = {n: said for n, said in job.said.items() if n in state.seats}

    def shown(self, state: State, now_ms: int) -> tuple[RankProgress, ...]:
        """Return the progress of a job's workers in its live round, in RANK order."""
        job = self._jobs.get(state.membership.rdzv_id)
        if job is None or not state.membership.is_live(job.run, job.round.number):
            return ()
        found = [
            replace(one, age_ms=one.age_ms + max(now_ms - heard_ms, 0))
            for node_id, (heard_ms, said) in job.said.items()
            if node_id in state.seats
            for one in said.ranks
        ]
        return tuple(sorted(found, key=lambda one: one.rank))


def _ranks(round_: Round) -> dict[str, range]:
    return {p.node_id: p.ranks for p in round_.participants}

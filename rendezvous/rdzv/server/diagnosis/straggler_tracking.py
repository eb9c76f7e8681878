"""Finds stragglers among workers, from the progress that their nodes report.

In memory, for the present round only, and for people: nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rdzv.core.events import Event, RankCaughtUp, RankStraggles
from rdzv.core.model import Round, State
from rdzv.core.stragglers import Pace, Sample, Straggler, follow
from rdzv.server.messages import RankProgress

LOOKS = 10
"""The number of comparisons within the time after which a slow worker counts as a straggler."""
LOOK_LEAST_MS, LOOK_MOST_MS = 200, 5_000
SILENT_MS, SILENT_STEPS = 60_000, 3
"""A worker that has reported nothing for this long, and for this many of its steps, is silent
rather than slow: it may hang, which is judged elsewhere, and its last rate no longer counts."""


@dataclass(slots=True)
class _Job:
    """The workers of one round."""

    run: str
    round: int
    looked_ms: int
    pace: Pace = field(default_factory=Pace)


class Stragglers:
    """The stragglers of one server's jobs."""

    def __init__(self, after_ms: int, tell: Callable[[str, tuple[Event, ...]], None]) -> None:
        """Call `tell` when a worker has straggled for `after_ms`, and when it has caught up."""
        self._after_ms = after_ms
        self._tell = tell
        self._jobs: dict[str, _Job] = {}

    @property
    def _look_every_ms(self) -> int:
        return min(max(self._after_ms // LOOKS, LOOK_LEAST_MS), LOOK_MOST_MS)

    @property
    def jobs(self) -> int:
        """The number of jobs that are tracked."""
        return len(self._jobs)

    def note(
        self, state: State, progress: Callable[[], Sequence[RankProgress]], now_ms: int
    ) -> None:
        """Compare the workers of a job, unless they were compared a moment ago."""
        membership, round_ = state.membership, state.membership.round
        if round_ is None or not round_.live:
            return
        rdzv_id, key = membership.rdzv_id, (membership.run, round_.number)
        job = self._jobs.get(rdzv_id)
        if job is None or (job.run, job.round) != key:
            job = self._jobs[rdzv_id] = _Job(*key, looked_ms=now_ms - self._look_every_ms)
        if now_ms - job.looked_ms < self._look_every_ms:
            return
        job.looked_ms = now_ms
        before = job.pace
        job.pace = follow(before, _samples(round_, progress()), now_ms, self._after_ms)
        events = _events(round_, before, job.pace)
        if events:
            self._tell(rdzv_id, events)

    def tidy(self, state: State) -> None:
        """Forget a round that is over."""
        rdzv_id, round_ = state.membership.rdzv_id, state.membership.round
        job = self._jobs.get(rdzv_id)
        if job is not None:
            live = state.membership.ended is None and round_ is not None and round_.live
            key = (state.membership.run, round_.number if round_ is not None else None)
            if not live or (job.run, job.round) != key:
                del self._jobs[rdzv_id]

    def shown(self, rdzv_id: str) -> tuple[Straggler, ...]:
        """Return the stragglers of a job, by RANK."""
        job = self._jobs.get(rdzv_id)
        return tuple(s for _, s in sorted(job.pace.stragglers.items())) if job is not None else ()


def _samples(round_: Round, progress: Sequence[RankProgress]) -> list[Sample]:
    roles = {
        p.rank_first + local_rank: p.offer.role
        for p in round_.participants
        for local_rank in range(p.offer.local_world_size)
    }
    return [
        Sample(one.rank, roles.get(one.rank, ""), 1 / one.rate)
        for one in progress
        if one.rate > 0 and one.age_ms <= max(SILENT_MS, SILENT_STEPS * 1_000 / one.rate)
    ]


def _events(round_: Round, before: Pace, after: Pace) -> tuple[Event, ...]:
    nodes = {
        rank: p.node_id
        for p in round_.participants
        for rank in range(p.rank_first, p.rank_first + p.offer.local_world_size)
    }
    began = [
        RankStraggles(round_.number, rank, nodes.get(rank, ""), found.step_s, found.median_s)
        for rank, found in after.stragglers.items()
        if rank not in before.stragglers
    ]
    over = [
        RankCaughtUp(round_.number, rank, nodes.get(rank, ""))
        for rank in before.stragglers
        if rank not in after.stragglers
    ]
    return (*began, *over)

"""Finds stragglers from nodes' reports about progress and about workers' entries into collectives.

Everything is kept in memory and for live rounds only, and is shown to people: no decision depends
on it. Workers that wait for each other in collectives all have the same rate, so rates count only
where collectives are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rdzv import messages
from rdzv.core.events import Event, RankCaughtUp, RankStraggles
from rdzv.core.evidence.lateness import (
    LEAST_PAIRS,
    LOOKS,
    Arrivals,
    GroupLook,
    arrivals,
    follow,
    pairs,
)
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import Pace, Sample, Straggler
from rdzv.core.evidence.stragglers import follow as follow_rates
from rdzv.core.model import Round, State
from rdzv.errors import InvalidRequestError
from rdzv.server.diagnosis.round_reports import LiveRounds, Tell
from rdzv.structs import replace
from rdzv.transport.wire import convert

LOOKS_AT_RATES = 10
"""How often rates are compared within the time after which a slow worker counts as a straggler."""
LOOK_LEAST_MS, LOOK_MOST_MS = 200, 5_000
RECORDS_COUNT_MS = 120_000
"""Rates count again once no collectives could be compared for this long."""
SILENT_MS, SILENT_STEPS = 60_000, 3
"""A worker that has reported nothing for this long, and for the time of this many steps, is silent
rather than slow, so its last rate no longer counts. Whether it hangs is judged elsewhere."""


MAX_GROUPS = 1_024
"""The maximum number of process groups in one round; a large job has a few for each of its
nodes."""
MAX_KEPT = 512
"""The maximum number of one group's collectives that are kept until all nodes have reported
them."""


@dataclass(slots=True)
class _Group:
    """The entries into one process group's collectives."""

    latest: dict[str, int] = field(default_factory=dict)
    """The latest collective that each node has reported, by node_id."""
    entered_us: dict[int, dict[int, int]] = field(default_factory=dict)
    per_second: float = 0.0
    errors_us: dict[str, int | None] = field(default_factory=dict)

    def note(self, node_id: str, said: messages.GroupArrivals) -> None:
        self.per_second, self.errors_us[node_id] = said.per_second, said.error_us
        self.latest[node_id] = max(said.entered_us, default=self.latest.get(node_id, 0))
        for sequence, entered in said.entered_us.items():
            self.entered_us.setdefault(sequence, {}).update(entered)
        for sequence in sorted(self.entered_us)[:-MAX_KEPT]:
            del self.entered_us[sequence]

    def complete(self) -> int:
        """Return how many collectives all nodes have reported together with their successors."""
        upto = min(self.latest.values())
        return sum(n < upto for n in pairs(self.entered_us))

    def take(self) -> GroupLook:
        upto = min(self.latest.values())
        taken = {n: entered for n, entered in self.entered_us.items() if n <= upto}
        # The last one is kept, so that it can be compared with the next one later.
        self.entered_us = {n: entered for n, entered in self.entered_us.items() if n >= upto}
        errors_us = [one for one in self.errors_us.values() if one is not None]
        known = len(errors_us) == len(self.errors_us)
        return GroupLook(taken, self.per_second, max(errors_us) if known else None)


class ArrivalBoard:
    """A round's entries into collectives that have not been compared yet."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def note(self, node_id: str, said: messages.Arrivals) -> None:
        for group in said.groups:
            if group.group in self._groups or len(self._groups) < MAX_GROUPS:
                self._groups.setdefault(group.group, _Group()).note(node_id, group)

    def take(self) -> list[GroupLook]:
        """Remove and return the entries that can be compared now, or [] while there are too few."""
        if all(group.complete() < LEAST_PAIRS for group in self._groups.values()):
            return []
        return [group.take() for group in self._groups.values() if group.complete()]


@dataclass(slots=True)
class _Job:
    round: int
    nodes: dict[int, str]
    """The node_id for each RANK. It is computed only once, because hundreds of reports per second
    are checked against it."""
    looked_ms: int | None = None
    compared_ms: int | None = None
    """When collectives were last compared; initially, when the round was first seen."""
    pace: Pace = field(default_factory=Pace)
    board: ArrivalBoard = field(default_factory=ArrivalBoard)
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def stragglers(self) -> dict[int, Straggler]:
        return {**self.pace.stragglers, **self.arrivals.stragglers}


class Stragglers:
    """The stragglers in one server's jobs."""

    def __init__(self, after_ms: int, tell: Tell) -> None:
        self._after_ms = after_ms
        self._tell = tell
        self.rounds: LiveRounds[_Job] = LiveRounds(lambda one: _Job(one.number, _nodes(one)))

    def _look_every_ms(self, looks: int) -> int:
        return min(max(self._after_ms // looks, LOOK_LEAST_MS), LOOK_MOST_MS)

    def note(
        self, state: State, progress: Callable[[], Sequence[RankProgress]], now_ms: int
    ) -> None:
        """Compare the rates of a job's workers, unless they were compared a moment ago."""
        job, round_ = self._job(state, now_ms), state.membership.live_round
        every_ms = self._look_every_ms(LOOKS_AT_RATES)
        if job.looked_ms is not None and now_ms - job.looked_ms < every_ms:
            return
        job.looked_ms, before = now_ms, job.stragglers
        if not job.arrivals.looks and round_ is not None:
            samples = _samples(round_, progress())
            job.pace = follow_rates(job.pace, samples, now_ms, self._after_ms)
        elif now_ms - (job.compared_ms or 0) >= RECORDS_COUNT_MS:
            job.arrivals = Arrivals()
        self._tell_changes(state, job, before)

    def note_arrivals(
        self, state: State, node_id: str, said: messages.Arrivals, now_ms: int
    ) -> bool:
        """Record when a node's workers entered collectives, and compare all nodes' entries if due.

        Return whether the stragglers have changed.
        """
        job = self._job(state, now_ms)
        for group in said.groups:
            told = {rank for entered in group.entered_us.values() for rank in entered}
            if (rank := next((r for r in told if job.nodes.get(r) != node_id), None)) is not None:
                raise InvalidRequestError(f"arrivals of RANK {rank}: {node_id} has no such")
        job.board.note(node_id, said)
        every_ms = self._look_every_ms(LOOKS)
        if now_ms - (job.compared_ms or 0) < every_ms or not (groups := job.board.take()):
            return False
        before, job.compared_ms, job.pace = job.stragglers, now_ms, Pace()
        job.arrivals = follow(job.arrivals, arrivals(groups, job.nodes), now_ms)
        return self._tell_changes(state, job, before)

    def _job(self, state: State, now_ms: int) -> _Job:
        job = self.rounds.begun(state)
        if job.compared_ms is None:
            job.compared_ms = now_ms
        return job

    def _tell_changes(self, state: State, job: _Job, before: dict[int, Straggler]) -> bool:
        events = _events(job, before)
        if events:
            self._tell(state.membership.rdzv_id, events)
        return bool(events)

    def shown(self, state: State, now_ms: int) -> tuple[Straggler, ...]:
        if (job := self.rounds.find(state)) is None:
            return ()
        since_ms = {**job.pace.slow_since_ms, **job.arrivals.slow_since_ms}
        return tuple(
            replace(one, age_ms=max(now_ms - since_ms[rank], 0))
            for rank, one in sorted(job.stragglers.items())
        )


def _samples(round_: Round, progress: Sequence[RankProgress]) -> list[Sample]:
    roles = {rank: p.offer.role for p in round_.participants for rank in p.ranks}
    return [
        Sample(one.rank, roles.get(one.rank, ""), 1 / one.rate)
        for one in progress
        if one.rate and one.age_ms <= max(SILENT_MS, SILENT_STEPS * 1_000 / one.rate)
    ]


def _nodes(round_: Round) -> dict[int, str]:
    return {rank: p.node_id for p in round_.participants for rank in p.ranks}


def _events(job: _Job, before: dict[int, Straggler]) -> tuple[Event, ...]:
    after = job.stragglers
    if before.keys() == after.keys():
        return ()
    began = [
        convert(RankStraggles, found, round=job.round, node_id=job.nodes.get(rank, ""))
        for rank, found in after.items()
        if rank not in before
    ]
    over = [
        RankCaughtUp(job.round, rank, job.nodes.get(rank, ""))
        for rank in before
        if rank not in after
    ]
    return (*began, *over)

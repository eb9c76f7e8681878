"""What nodes report of the workers of live rounds: their starts, their steps, and who is late.

All of this is kept in memory and for live rounds only, and no decision depends on it. Nodes report
it again after a reconnect, and to a server that takes over. Workers that wait for each other in
collectives all have the same rate, so rates count only where collectives are not recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rdzv import messages
from rdzv.core import events
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import (
    LEAST_PAIRS,
    LOOKS,
    GroupLook,
    Pace,
    RecentArrivals,
    Sample,
    Straggler,
    arrivals,
    follow_arrivals,
    follow_rates,
    pairs,
)
from rdzv.core.model import Round, State
from rdzv.core.rounds.ranks import participant_of
from rdzv.core.words import LISTED
from rdzv.errors import InvalidRequestError
from rdzv.structs import replace, struct
from rdzv.transport.wire import convert

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

OLDEST_COLLECTIVE_MS = 60_000
"""A collective entered longer ago than this is not the round's first, or its time is wrong."""
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

WorkerReport = messages.Progress | messages.WorkersStarted | messages.Arrivals


@struct(frozen=True)
class Starts:
    """The number of workers that were kept, hot, started warm, and started cold."""

    kept: int
    warm: int
    cold: int
    hot: int = 0


@dataclass(slots=True)
class _Group:
    latest: dict[str, int] = field(default_factory=dict)
    entered_us: dict[int, dict[int, int]] = field(default_factory=dict)
    per_second: float = 0.0
    errors_us: dict[str, int | None] = field(default_factory=dict)

    def note(self, node_id: str, report: messages.GroupArrivals) -> None:
        self.per_second, self.errors_us[node_id] = report.per_second, report.error_us
        self.latest[node_id] = max(report.entered_us, default=self.latest.get(node_id, 0))
        for sequence, entered in report.entered_us.items():
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

    def note(self, node_id: str, report: messages.Arrivals) -> None:
        for group in report.groups:
            if group.group in self._groups or len(self._groups) < MAX_GROUPS:
                self._groups.setdefault(group.group, _Group()).note(node_id, group)

    def take(self) -> list[GroupLook]:
        """Remove and return the entries that can be compared now, or [] while there are too few."""
        if all(group.complete() < LEAST_PAIRS for group in self._groups.values()):
            return []
        return [group.take() for group in self._groups.values() if group.complete()]


@dataclass(slots=True, eq=False)
class LiveRound:
    """What is known about the workers of one live round."""

    run: str
    round: Round
    compared_ms: int
    """When collectives were last compared; initially, when the round was first heard of."""
    progress: dict[str, tuple[int, messages.Progress]] = field(default_factory=dict)
    step: int = -1
    step_at_ms: int = 0
    redone: bool = False
    in_collectives: bool = False
    started: dict[str, tuple[messages.StartedWorker, ...]] = field(default_factory=dict)
    not_loaded: set[str] = field(default_factory=set)
    """The nodes, or the first few of them, that have not loaded some snapshots."""
    forks: set[str] = field(default_factory=set)
    scripts: dict[str, str] = field(default_factory=dict)
    """The script of each node whose workers have entered its function under @elastic."""
    script: str = ""
    """The one script of all nodes, once all have said so."""
    looked_ms: int | None = None
    pace: Pace = field(default_factory=Pace)
    board: ArrivalBoard = field(default_factory=ArrivalBoard)
    arrivals: RecentArrivals = field(default_factory=RecentArrivals)

    @property
    def nodes(self) -> dict[int, str]:
        return {rank: p.node_id for p in self.round.participants for rank in p.ranks}

    @property
    def stragglers(self) -> dict[int, Straggler]:
        return {**self.pace.stragglers, **self.arrivals.stragglers}


class RoundReports:
    """The live rounds of one server's jobs, as far as nodes have reported of their workers.

    A server that takes over records the first collective and the first step again; the ledger
    counts only the first record of each in a round.
    """

    def __init__(self, driver: Driver) -> None:
        self._clock = driver.clock
        self._tell = driver.note
        self._after_ms = driver.config.progress.straggler_after_ms
        self._rounds: dict[str, LiveRound] = {}

    def find(self, state: State) -> LiveRound | None:
        known = self._rounds.get(state.membership.rdzv_id)
        live = known is not None and state.membership.is_live(known.run, known.round.number)
        return known if live else None

    def note(self, state: State, node_id: str, report: WorkerReport) -> bool:
        """Record a report about the live round, and return whether it changes what is shown."""
        membership, round_ = state.membership, state.membership.live_round
        assert round_ is not None
        known, now_ms = self.find(state), self._clock.now_ms()
        if known is None:
            known = self._rounds[membership.rdzv_id] = LiveRound(membership.run, round_, now_ms)
        known.round = round_  # An adopted node may have replaced a placeholder.
        match report:
            case messages.Progress():
                check_own(round_, node_id, (one.rank for one in report.ranks), "progress")
                known.progress[node_id] = now_ms, report
                self._note_steps(known, node_id, report, membership.spent.furthest_step, now_ms)
                self._compare_rates(known, state, now_ms)
                return True
            case messages.WorkersStarted():
                return self._note_starts(known, node_id, report)
            case messages.Arrivals():
                return self._note_arrivals(known, node_id, report, now_ms)

    def note_state(self, state: State) -> None:
        """Drop what was reported of a round that is over, and by nodes without a seat."""
        membership = state.membership
        if (known := self._rounds.get(membership.rdzv_id)) is None:
            return
        if membership.is_live(known.run, known.round.number):
            if len(known.progress) > len(state.seats):
                known.progress = {n: one for n, one in known.progress.items() if n in state.seats}
            return
        del self._rounds[membership.rdzv_id]
        if known.step >= 0 and membership.run == known.run and membership.ended is None:
            age_ms = max(self._clock.now_ms() - known.step_at_ms, 0)
            last = events.LastStepMade(known.round.number, known.step, age_ms)
            self._tell(membership.rdzv_id, (last,))

    # ---------------------------------------------------------------- what is shown

    def progress(self, state: State) -> tuple[RankProgress, ...]:
        if (known := self.find(state)) is None:
            return ()
        now_ms = self._clock.now_ms()
        found = [
            replace(one, age_ms=one.age_ms + max(now_ms - heard_ms, 0))
            for node_id, (heard_ms, report) in known.progress.items()
            if node_id in state.seats
            for one in report.ranks
        ]
        return tuple(sorted(found, key=lambda one: one.rank))

    def starts(self, state: State) -> Mapping[str, Starts]:
        known = self.find(state)
        return {node_id: _counted(one) for node_id, one in known.started.items()} if known else {}

    def forks(self, state: State) -> bool | None:
        """Return whether zygotes serve the script on all nodes of the live round, if there is one.

        Only then may a node that has not run the script fork its first workers.
        """
        round_, known = state.membership.live_round, self.find(state)
        if round_ is None:
            return None
        return known is not None and all(p.node_id in known.forks for p in round_.participants)

    def script(self, state: State) -> str:
        """Return the script whose workers have shown, on all nodes, that they can be standbys."""
        known = self.find(state)
        return known.script if known is not None else ""

    def stragglers(self, state: State) -> tuple[Straggler, ...]:
        if (known := self.find(state)) is None:
            return ()
        now_ms = self._clock.now_ms()
        since_ms = {**known.pace.slow_since_ms, **known.arrivals.slow_since_ms}
        return tuple(
            replace(one, age_ms=max(now_ms - since_ms[rank], 0))
            for rank, one in sorted(known.stragglers.items())
        )

    # ---------------------------------------------------------------- steps

    def _note_steps(
        self,
        known: LiveRound,
        node_id: str,
        report: messages.Progress,
        furthest: int | None,
        now_ms: int,
    ) -> None:
        """Tell of the first step, and of the one with which all lost steps are redone."""
        if not report.ranks:
            return
        best = max(report.ranks, key=lambda one: one.step)
        at_ms = now_ms - best.age_ms
        news: list[events.Event] = []
        if known.step < 0:
            known.step, known.step_at_ms, known.redone = best.step, at_ms, furthest is None
            news.append(
                events.FirstStepMade(report.round, node_id, best.rank, best.step, best.age_ms)
            )
        if not known.redone and furthest is not None and best.step >= furthest:
            known.redone = True
            ago_ms = max(now_ms - _reached_ms(known, best.step, at_ms, furthest), 0)
            news.append(events.LostStepsRedone(report.round, furthest, ago_ms))
        if best.step > known.step:
            known.step, known.step_at_ms = best.step, at_ms
        if news:
            self._tell(report.rdzv_id, tuple(news))

    # ---------------------------------------------------------------- starts

    def _note_starts(self, known: LiveRound, node_id: str, report: messages.WorkersStarted) -> bool:
        round_ = known.round
        participant = participant_of(round_, node_id)
        assert participant is not None
        size = participant.offer.local_world_size
        if sorted(worker.local_rank for worker in report.workers) != list(range(size)):
            raise InvalidRequestError(
                f"started workers: {node_id} names {len(report.workers)}, and has local_rank "
                f"0..{size - 1} in round {report.round}; name each of them once"
            )
        if report.not_loaded and node_id not in known.not_loaded and len(known.not_loaded) < LISTED:
            known.not_loaded.add(node_id)
            missing = events.SnapshotsNotLoaded(round_.number, node_id, report.not_loaded)
            self._tell(report.rdzv_id, (missing,))
        (known.forks.add if report.forks else known.forks.discard)(node_id)
        if report.script and node_id not in known.scripts:
            known.scripts[node_id] = report.script
            is_one = {*known.scripts.values()} == {report.script}
            if is_one and len(known.scripts) == len(round_.participants):
                known.script = report.script
        if node_id in known.started:
            return False
        known.started[node_id] = report.workers
        if len(known.started) == len(round_.participants):
            self._tell(report.rdzv_id, (_all_started(known),))
        return True

    # ---------------------------------------------------------------- stragglers

    def _look_every_ms(self, looks: int) -> int:
        return min(max(self._after_ms // looks, LOOK_LEAST_MS), LOOK_MOST_MS)

    def _compare_rates(self, known: LiveRound, state: State, now_ms: int) -> None:
        every_ms = self._look_every_ms(LOOKS_AT_RATES)
        if known.looked_ms is not None and now_ms - known.looked_ms < every_ms:
            return
        known.looked_ms, before = now_ms, known.stragglers
        if not known.arrivals.looks:
            samples = _samples(known.round, self.progress(state))
            known.pace = follow_rates(known.pace, samples, now_ms, self._after_ms)
        elif now_ms - known.compared_ms >= RECORDS_COUNT_MS:
            known.arrivals = RecentArrivals()
        self._tell_changes(state.membership.rdzv_id, known, before)

    def _note_arrivals(
        self, known: LiveRound, node_id: str, report: messages.Arrivals, now_ms: int
    ) -> bool:
        """Compare all nodes' entries into collectives if that is due.

        Return whether the stragglers have changed.
        """
        entered = (ranks for group in report.groups for ranks in group.entered_us.values())
        ranks_entered = {rank for ranks in entered for rank in ranks}
        check_own(known.round, node_id, ranks_entered, "arrivals")
        known.board.note(node_id, report)
        changed = False
        due = now_ms - known.compared_ms >= self._look_every_ms(LOOKS)
        if due and (groups := known.board.take()):
            before, known.compared_ms, known.pace = known.stragglers, now_ms, Pace()
            known.arrivals = follow_arrivals(known.arrivals, arrivals(groups, known.nodes), now_ms)
            changed = self._tell_changes(report.rdzv_id, known, before)
        if not known.in_collectives:
            known.in_collectives = True
            entered_ms = _entered_ago_ms(report, now_ms)
            first = events.FirstCollectiveMade(report.round, node_id, entered_ms)
            self._tell(report.rdzv_id, (first,))
        return changed

    def _tell_changes(self, rdzv_id: str, known: LiveRound, before: dict[int, Straggler]) -> bool:
        after, number = known.stragglers, known.round.number
        if before.keys() == after.keys():
            return False
        nodes = known.nodes
        began = [
            convert(events.RankStraggles, found, round=number, node_id=nodes.get(rank, ""))
            for rank, found in after.items()
            if rank not in before
        ]
        over = [
            events.RankCaughtUp(number, rank, nodes.get(rank, ""))
            for rank in before
            if rank not in after
        ]
        self._tell(rdzv_id, (*began, *over))
        return True


def check_own(round_: Round | None, node_id: str, ranks: Iterable[int], what: str) -> None:
    """Refuse a report about workers that a participant does not have."""
    participant = participant_of(round_, node_id)
    assert round_ is not None and participant is not None
    own = participant.ranks
    for rank in ranks:
        if rank not in own:
            raise InvalidRequestError(
                f"{what} of RANK {rank}: {node_id} has RANK {own[0]}..{own[-1]} in round "
                f"{round_.number}; name those"
            )


def _entered_ago_ms(report: messages.Arrivals, now_ms: int) -> int:
    """Return how long ago the first of these collectives was entered, or 0 if unknown."""
    ages_ms = [
        now_ms - entered_us // 1_000
        for group in report.groups
        if group.error_us is not None
        for entered in group.entered_us.values()
        for entered_us in entered.values()
    ]
    return max((age for age in ages_ms if 0 <= age <= OLDEST_COLLECTIVE_MS), default=0)


def _reached_ms(known: LiveRound, step: int, at_ms: int, furthest: int) -> int:
    """Return when `furthest` was reached, assuming a steady pace between two reports."""
    if step <= known.step or furthest <= known.step:
        return at_ms
    share = (furthest - known.step) / (step - known.step)
    return round(known.step_at_ms + (at_ms - known.step_at_ms) * share)


def _samples(round_: Round, progress: Sequence[RankProgress]) -> list[Sample]:
    roles = {rank: p.offer.role for p in round_.participants for rank in p.ranks}
    return [
        Sample(one.rank, roles.get(one.rank, ""), 1 / one.rate)
        for one in progress
        if one.rate and one.age_ms <= max(SILENT_MS, SILENT_STEPS * 1_000 / one.rate)
    ]


def _counted(workers: Iterable[messages.StartedWorker]) -> Starts:
    how = Counter(worker.how for worker in workers)
    return Starts(**{one: how[one] for one in events.WorkerStart})


def _all_started(known: LiveRound) -> events.WorkersStarted:
    found = _counted(worker for workers in known.started.values() for worker in workers)
    new = [
        events.NewWorker(p.rank_first + worker.local_rank, p.node_id, worker.how, worker.why)
        for p in known.round.participants
        for worker in known.started[p.node_id]
        if worker.why and worker.how != events.WorkerStart.KEPT
    ]
    number = known.round.number
    return convert(events.WorkersStarted, found, round=number, new=tuple(new[:LISTED]))

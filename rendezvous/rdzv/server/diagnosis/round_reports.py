"""What nodes report of the workers of live rounds: progress, milestones, and how they were started.

All of this is kept in memory and for live rounds only, and no decision depends on it. Nodes report
it again after a reconnect, and to a server that takes over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rdzv import messages
from rdzv.core.events import (
    Event,
    FirstCollectiveMade,
    FirstStepMade,
    LastStepMade,
    LostStepsRedone,
    NewWorker,
    SnapshotsNotLoaded,
    WorkersStarted,
    WorkerStart,
)
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.model import Participant, Round, State
from rdzv.core.rounds.ranks import participant_of
from rdzv.core.words import LISTED
from rdzv.errors import InvalidRequestError
from rdzv.messages import Arrivals, Progress
from rdzv.structs import replace, struct

Tell = Callable[[str, tuple[Event, ...]], None]
"""Records events of a job that were not caused by a command."""

T = TypeVar("T")


class LiveRounds(Generic[T]):
    """A record of each job's live round, which is dropped once the round is over."""

    def __init__(self, begin: Callable[[Round], T]) -> None:
        self._begin = begin
        self._known: dict[str, tuple[str, int, T]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, state: State) -> T | None:
        run, number, record = self._known.get(state.membership.rdzv_id, ("", 0, None))
        return record if state.membership.is_live(run, number) else None

    def begun(self, state: State) -> T:
        if (record := self.find(state)) is None:
            membership, round_ = state.membership, state.membership.live_round
            assert round_ is not None
            record = self._begin(round_)
            self._known[membership.rdzv_id] = membership.run, round_.number, record
        return record

    def tidy(self, state: State) -> tuple[str, int, T] | None:
        """Drop a record whose round is over, and return it with its run and round."""
        known = self._known.get(state.membership.rdzv_id)
        if known is None or state.membership.is_live(known[0], known[1]):
            return None
        return self._known.pop(state.membership.rdzv_id)


# ------------------------------------------------------------------ progress


class ProgressBoard:
    """The latest progress reports, with at most one entry for each worker."""

    def __init__(self) -> None:
        self.rounds: LiveRounds[_Progress] = LiveRounds(_Progress)

    def note(self, state: State, node_id: str, said: Progress, now_ms: int) -> None:
        known, round_ = self.rounds.begun(state), state.membership.live_round
        if known.round is not round_ and round_ is not None:
            # An adopted node has replaced a placeholder.
            known.round, known.ranks = round_, _ranks(round_)
        ranks = known.ranks[node_id]
        for one in said.ranks:
            if one.rank not in ranks:
                raise InvalidRequestError(
                    f"progress of RANK {one.rank}: {node_id} has RANK {ranks[0]}..{ranks[-1]} in "
                    f"round {said.round}; name those"
                )
        known.said[node_id] = now_ms, said

    def tidy(self, state: State) -> None:
        """Drop the progress of a round that is over and of nodes that no longer have a seat."""
        self.rounds.tidy(state)
        known = self.rounds.find(state)
        if known is not None and len(known.said) > len(state.seats):
            known.said = {n: said for n, said in known.said.items() if n in state.seats}

    def shown(self, state: State, now_ms: int) -> tuple[RankProgress, ...]:
        """Return the progress of a job's workers in its live round, in RANK order."""
        if (known := self.rounds.find(state)) is None:
            return ()
        found = [
            replace(one, age_ms=one.age_ms + max(now_ms - heard_ms, 0))
            for node_id, (heard_ms, said) in known.said.items()
            if node_id in state.seats
            for one in said.ranks
        ]
        return tuple(sorted(found, key=lambda one: one.rank))


class _Progress:
    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.ranks = _ranks(round_)
        """The RANKs of each node's workers, by node_id."""
        self.said: dict[str, tuple[int, Progress]] = {}
        """Each node's latest report and the time when it was received, by node_id."""


def _ranks(round_: Round) -> dict[str, range]:
    return {p.node_id: p.ranks for p in round_.participants}


# ------------------------------------------------------------------ milestones

OLDEST_COLLECTIVE_MS = 60_000
"""A collective entered longer ago than this is not the round's first, or its time is wrong."""


@dataclass(slots=True)
class _Furthest:
    """The furthest step in one live round, and when it was made."""

    step: int = -1
    at_ms: int = 0
    redone: bool = False
    """Whether all lost steps have been redone."""


class StepMilestones:
    """Records first collectives, and first, last and redone steps, for the ledger.

    A server that takes over records the first collective and the first step again; the ledger
    counts only the first record of each in a round.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._rounds: LiveRounds[_Furthest] = LiveRounds(lambda _: _Furthest())
        self._collectives: LiveRounds[set[str]] = LiveRounds(lambda _: set())
        """The node that was the first to report a collective."""

    def note(self, state: State, node_id: str, said: Progress, now_ms: int) -> None:
        if not said.ranks:
            return
        best = max(said.ranks, key=lambda one: one.step)
        at_ms, furthest = now_ms - best.age_ms, state.membership.spent.furthest_step
        events: tuple[Event, ...] = ()
        known = self._rounds.begun(state)
        if known.step < 0:
            known.step, known.at_ms, known.redone = best.step, at_ms, furthest is None
            events = (FirstStepMade(said.round, node_id, best.rank, best.step, best.age_ms),)
        if not known.redone and furthest is not None and best.step >= furthest:
            known.redone = True
            reached_ms = _reached_ms(known, best.step, at_ms, furthest)
            events = (*events, LostStepsRedone(said.round, furthest, max(now_ms - reached_ms, 0)))
        if best.step > known.step:
            known.step, known.at_ms = best.step, at_ms
        if events:
            self._tell(said.rdzv_id, events)

    def note_collectives(self, state: State, node_id: str, said: Arrivals, now_ms: int) -> None:
        first = self._collectives.begun(state)
        if not first:
            first.add(node_id)
            event = FirstCollectiveMade(said.round, node_id, _entered_ago_ms(said, now_ms))
            self._tell(said.rdzv_id, (event,))

    def note_state(self, state: State, now_ms: int) -> None:
        self._collectives.tidy(state)
        if (over := self._rounds.tidy(state)) is None:
            return
        (run, number, known), membership = over, state.membership
        if membership.run == run and membership.ended is None:
            last = LastStepMade(number, known.step, max(now_ms - known.at_ms, 0))
            self._tell(membership.rdzv_id, (last,))


def _entered_ago_ms(said: Arrivals, now_ms: int) -> int:
    """Return how long ago the first of these collectives was entered, or 0 if unknown."""
    ages_ms = [
        now_ms - entered_us // 1_000
        for group in said.groups
        if group.error_us is not None
        for entered in group.entered_us.values()
        for entered_us in entered.values()
    ]
    return max((age for age in ages_ms if 0 <= age <= OLDEST_COLLECTIVE_MS), default=0)


def _reached_ms(known: _Furthest, step: int, at_ms: int, furthest: int) -> int:
    """Return when `furthest` was reached, assuming a steady pace between two reports."""
    if step <= known.step or furthest <= known.step:
        return at_ms
    share = (furthest - known.step) / (step - known.step)
    return round(known.at_ms + (at_ms - known.at_ms) * share)


# ------------------------------------------------------------------ starts


@struct(frozen=True)
class Starts:
    """The number of workers that were kept, started warm, and started cold."""

    kept: int
    warm: int
    cold: int


@dataclass(slots=True)
class _Starts:
    said: dict[str, tuple[messages.StartedWorker, ...]] = field(default_factory=dict)
    not_loaded: set[str] = field(default_factory=set)
    """The nodes, or the first few of them, that have not loaded some snapshots."""
    forks: set[str] = field(default_factory=set)
    """The nodes with a zygote that serves the script."""


class WorkerStarts:
    """The reports of how workers were started, with at most one for each node."""

    def __init__(self, tell: Tell) -> None:
        """Call `tell` with an event once all nodes in a round have reported.

        It is also called for the first few nodes that have not loaded snapshots.
        """
        self._tell = tell
        self.rounds: LiveRounds[_Starts] = LiveRounds(lambda _: _Starts())

    def note(self, state: State, node_id: str, said: messages.WorkersStarted) -> bool:
        """Record how a node's workers were started for the live round.

        Return whether the report is new.
        """
        round_ = state.membership.live_round
        participant = participant_of(round_, node_id)
        assert round_ is not None and participant is not None
        _check(said, participant)
        known = self.rounds.begun(state)
        if said.not_loaded and node_id not in known.not_loaded and len(known.not_loaded) < LISTED:
            known.not_loaded.add(node_id)
            event = SnapshotsNotLoaded(round_.number, node_id, said.not_loaded)
            self._tell(said.rdzv_id, (event,))
        (known.forks.add if said.forks else known.forks.discard)(node_id)
        if node_id in known.said:
            return False
        known.said[node_id] = said.workers
        if len(known.said) == len(round_.participants):
            self._tell(said.rdzv_id, (_event(round_, known),))
        return True

    def forks(self, state: State) -> bool | None:
        """Return whether zygotes serve the script on all nodes of the live round, if there is one.

        Only then may a node that has not run the script fork its first workers.
        """
        round_, known = state.membership.live_round, self.rounds.find(state)
        if round_ is None:
            return None
        return known is not None and all(p.node_id in known.forks for p in round_.participants)

    def shown(self, state: State) -> Mapping[str, Starts]:
        known = self.rounds.find(state)
        return {node_id: _counted(one) for node_id, one in known.said.items()} if known else {}


def _check(said: messages.WorkersStarted, participant: Participant) -> None:
    named = sorted(worker.local_rank for worker in said.workers)
    size = participant.offer.local_world_size
    if named != list(range(size)):
        raise InvalidRequestError(
            f"started workers: {participant.node_id} names {len(named)}, and has local_rank "
            f"0..{size - 1} in round {said.round}; name each of them once"
        )


def _counted(workers: tuple[messages.StartedWorker, ...]) -> Starts:
    how = Counter(worker.how for worker in workers)
    return Starts(*(how[one] for one in (WorkerStart.KEPT, WorkerStart.WARM, WorkerStart.COLD)))


def _event(round_: Round, known: _Starts) -> WorkersStarted:
    workers = tuple(worker for said in known.said.values() for worker in said)
    found = _counted(workers)
    new = [
        NewWorker(p.rank_first + worker.local_rank, p.node_id, worker.how, worker.why)
        for p in round_.participants
        for worker in known.said[p.node_id]
        if worker.why and worker.how != WorkerStart.KEPT
    ]
    return WorkersStarted(round_.number, found.kept, found.warm, found.cold, tuple(new[:LISTED]))

"""The ledger of a run: how each second was spent, computed from the run's history.

Every moment from the run's beginning to its end, or to now, lies in exactly one interval. Nothing
is read from a sentence, and nothing is guessed. If no worker has reported a step, training is
counted from the round's first collective or, if torch has no record of collectives, from the start
of the workers. The ledger states when this is the case (`Ledger.steps_reported`).

Some facts arrive late: a failure is reported after it happened, and only a complete round shows
when enough nodes were ready. The times of a round are therefore final only once the round has
ended.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rdzv.core import events
from rdzv.core.model import Cause
from rdzv.errors import UnknownJobError
from rdzv.structs import replace, struct
from rdzv.view import history
from rdzv.view.answers import Event

DECLINED = "node declined"
"""The cause of time lost because a node could not run the job."""


class LedgerPhase(StrEnum):
    """The ways in which a run's time is spent, as defined in docs/ledger.md."""

    QUEUED = "queued"
    WAITING = "waiting"
    FORMING = "forming"
    STARTING = "starting"
    LOADING = "loading"
    TRAINING = "training"
    REDOING = "redoing"
    DETECTING = "detecting"
    STOPPING = "stopping"


@struct(frozen=True)
class Interval:
    """One stretch of a run's time."""

    from_unix_ms: int
    until_unix_ms: int
    phase: str
    cause: str
    """The cause to which lost time is attributed: the one that ended this round or the previous
    one. Empty if there is none."""
    node_id: str
    """The node to which this cause refers. Empty if it is unknown, or if the cause refers to no
    node or to several."""
    round: int | None
    """The round to which the interval belongs, or None between rounds."""
    nodes: float
    """The number of nodes that the job held all this time or, before its first round, the mean."""
    seats: int
    """The number of nodes in the round or, between rounds, in the next one, as far as known."""
    steps: int = 0
    """The new steps made in training, or the steps redone; 0 while a round's last is unknown."""
    way: str = ""
    """How the round got its workers, in words. Empty between rounds, or if unknown."""

    @property
    def ms(self) -> int:
        return self.until_unix_ms - self.from_unix_ms

    @property
    def node_ms(self) -> int:
        return round(self.ms * self.nodes)


@struct(frozen=True)
class Cost:
    """The time for which one cause, on one node, has kept runs from training."""

    cause: str
    """The cause, or empty for the start, and for all causes."""
    node_id: str
    """The node to which the cause refers. Empty if there is none, and for all nodes."""
    times: int
    """The number of round ends, or of refusals, with this cause."""
    ms: int
    node_ms: int
    work_ms: int
    """The time multiplied by the nodes of the round."""
    gpu_ms: int | None
    """The GPU time, or None if the number of GPUs of a run is unknown."""


@struct(frozen=True)
class Comeback:
    """The time until training resumed, summed over rounds that got their workers in one way."""

    way: str
    times: int
    ms: int
    node_ms: int


@struct(frozen=True)
class Ledger:
    """The ledger of one run's time, until its end or until now."""

    run: str
    run_number: int | None
    """The number of the run, or None if the run's beginning is no longer in the history, in which
    case the ledger starts later."""
    from_unix_ms: int
    until_unix_ms: int
    wall_ms: int
    result: str
    """The way in which the run ended, or empty while it is open."""
    goodput: float | None
    """The share of time spent training, or None if no time has passed."""
    steps_reported: bool
    """Whether any worker has reported a step. If not, redone steps count as training, and so do
    starting and loading unless collectives are recorded, so `goodput` is an upper bound."""
    steps_redone: int
    snapshots: int
    """How many were saved in memory in rounds that have ended."""
    snapshots_ms: int
    """How long they have stopped training, in all."""
    node_ms: int
    gpus_per_node: int | None
    """The number of GPUs that each node gives to the run, or None if unknown."""
    phases: dict[str, int]
    """The milliseconds spent in each phase, with 0 for phases that did not occur."""
    costs: tuple[Cost, ...]
    """The costs of not training, by cause and node, with the largest node time first."""
    comebacks: tuple[Comeback, ...]
    """How long it took until training resumed, the quickest way first."""
    intervals: tuple[Interval, ...]


def summed(intervals: Iterable[Interval], *, nodes: bool = False) -> dict[str, int]:
    """Return the milliseconds per phase, of the run or of its nodes, in the order of the phases."""
    spent = dict.fromkeys((phase.value for phase in LedgerPhase), 0)
    for interval in intervals:
        spent[interval.phase] += interval.node_ms if nodes else interval.ms
    return spent


def gaps(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Group the intervals without training by the round end, or the refusal, that each is due to.

    The time before the first training is a group, too.
    """
    found: list[list[Interval]] = []
    before: Interval | None = None
    for one in intervals:
        if one.phase != LedgerPhase.TRAINING:
            if _begins(one, before):
                found.append([])
            found[-1].append(one)
        before = one
    return found


def costs(intervals: Iterable[Interval], gpus: int | None) -> list[Cost]:
    """Return what each gap in training has cost."""
    found = []
    for gap in gaps(intervals):
        node_ms = sum(one.node_ms for one in gap)
        work_ms = sum(one.ms * one.seats for one in gap)
        gpu_ms = None if gpus is None else node_ms * gpus
        ms, cause = sum(one.ms for one in gap), (gap[0].cause, gap[0].node_id)
        found.append(Cost(*cause, 1, ms, node_ms, work_ms, gpu_ms))
    return found


def added(found: Iterable[Cost], names: Callable[[Cost], tuple[str, str]]) -> tuple[Cost, ...]:
    """Add costs up by the cause and node that `names` returns, the largest node time first."""
    parts: dict[tuple[str, str], list[Cost]] = {}
    for cost in found:
        parts.setdefault(names(cost), []).append(cost)
    sums = [
        Cost(
            *of,
            times=sum(cost.times for cost in each),
            ms=sum(cost.ms for cost in each),
            node_ms=sum(cost.node_ms for cost in each),
            work_ms=sum(cost.work_ms for cost in each),
            gpu_ms=gpu_total(cost.gpu_ms for cost in each),
        )
        for of, each in parts.items()
    ]
    return tuple(sorted(sums, key=lambda one: (-one.node_ms, -one.ms, one.cause, one.node_id)))


def gpu_total(parts: Iterable[int | None]) -> int | None:
    """Return the sum, or None if a part is unknown."""
    found = list(parts)
    return None if None in found else sum(part or 0 for part in found)


def _begins(one: Interval, before: Interval | None) -> bool:
    """Return whether an interval is the first one attributed to its cause."""
    if before is None or before.phase == LedgerPhase.TRAINING:
        return True
    if one.phase in _ENDS:
        return before.phase not in _ENDS or before.round != one.round
    return (before.cause, before.node_id) != (one.cause, one.node_id)


def comebacks(intervals: Iterable[Interval]) -> tuple[Comeback, ...]:
    """Sum up the gaps in training by how the round that ended each gap got its workers."""
    found: dict[str, list[int]] = {}
    trained, ms, node_ms = False, 0, 0
    for one in intervals:
        if one.phase != LedgerPhase.TRAINING:
            ms, node_ms = ms + one.ms, node_ms + one.node_ms
            continue
        if trained and ms and one.way:
            sums = found.setdefault(one.way, [0, 0, 0])
            sums[:] = sums[0] + 1, sums[1] + ms, sums[2] + node_ms
        trained, ms, node_ms = True, 0, 0
    ways = [Comeback(way, *sums) for way, sums in found.items()]
    return tuple(sorted(ways, key=lambda one: one.ms / one.times))


_ENDS = (LedgerPhase.DETECTING, LedgerPhase.STOPPING)


def ledgers_of(past: Iterable[Event], now_ms: int, state: str = "") -> list[Ledger]:
    """Return the ledger of each run, oldest first.

    `state` is the job's current state, if known; it distinguishes a queued job from a waiting one.
    """
    books: dict[str, Book] = {}
    for event in past:
        name = event.run or ""
        book = books.get(name)
        if book is None:
            book = books[name] = Book(name, event.unix_ms)
        book.note(event.unix_ms, history.read(event.name, event.fields))
    last = next(reversed(books), None)
    return [book.ledger(now_ms, state if name == last else "") for name, book in books.items()]


def run_numbers(runs: Iterable[Ledger]) -> list[int]:
    return [run.run_number for run in runs if run.run_number is not None]


def chosen(rdzv_id: str, runs: Sequence[Ledger], number: int | None) -> Ledger:
    """Return the ledger of the run with the given number, or of the last run if it is None."""
    if not runs:
        raise UnknownJobError(f"no history of {rdzv_id} is kept, so it has no ledger")
    if number is None:
        return runs[-1]
    for run in runs:
        if run.run_number == number:
            return run
    kept = ", ".join(map(str, run_numbers(runs))) or "none"
    raise UnknownJobError(f"run {number} of {rdzv_id} is not kept; runs that are: {kept}")


@dataclass(slots=True)
class _Round:
    """The latest round. Its time is booked once the next round follows."""

    number: int
    at_ms: int
    adopted: bool
    way: str = ""
    alone: bool = False
    """Whether the round has a single worker, whose collectives are not recorded."""
    first: tuple[int, int] | None = None
    """The time and number of its first step."""
    collective_ms: int | None = None
    redone_ms: int | None = None
    last_ms: int | None = None
    failed_ms: int | None = None
    hung_ms: int | None = None
    lost_ms: dict[str, int] = field(default_factory=dict)
    """For each lost node, by node_id, the time since which it had been silent."""
    dead_ms: int = 0
    ended_ms: int | None = None
    settled_ms: int | None = None
    cause: str = ""
    node_id: str = ""
    furthest: int | None = None


@dataclass(slots=True)
class Book:
    """Builds the ledger of one run from its events, in order."""

    run: str
    began_ms: int
    number: int | None = None
    result: str = ""
    snapshots: int = 0
    snapshots_ms: int = 0
    booked: list[Interval] = field(default_factory=list)
    folded: dict[str, int] = field(default_factory=dict)
    """Milliseconds by phase of intervals that are no longer in `booked`; see `fold`."""
    folded_nodes: dict[str, int] = field(default_factory=dict)
    """The same for the nodes' time."""
    _until_ms: int = -1
    """The time up to which everything is booked."""
    _now_ms: int = 0
    _round: _Round | None = None
    _cause: tuple[str, str] = ("", "")
    """The cause and node to which time between rounds and redone steps are attributed."""
    _furthest: int | None = None
    _any_steps: bool = False
    _any_collectives: bool = False
    _trained: bool = False
    """Whether a finished round has made a step or, if none are reported, a collective."""
    _queued: bool = False
    _called_ms: int | None = None
    _vacant_ms: int = 0
    """The time at which the run began or last lost a node."""
    _gpus: int | None = None
    _present: set[str] = field(default_factory=set)
    _unnamed: int = 0
    _held: list[tuple[int, int]] = field(default_factory=list)
    """The number of held nodes at `_until_ms`, and each later change, with their times."""
    _seats: int = 0
    """The number of nodes in the latest round or, once that is booked, in the next one."""

    def __post_init__(self) -> None:
        self._until_ms = self._now_ms = self._vacant_ms = self.began_ms
        self._held = [(self.began_ms, 0)]

    def ledger(self, now_ms: int, state: str = "") -> Ledger:
        book = self._until(now_ms, state)
        phases, wall_ms = summed(book.booked), book._now_ms - self.began_ms
        return Ledger(
            run=self.run,
            run_number=self.number,
            from_unix_ms=self.began_ms,
            until_unix_ms=book._now_ms,
            wall_ms=wall_ms,
            result=self.result,
            goodput=phases[LedgerPhase.TRAINING] / wall_ms if wall_ms else None,
            steps_reported=self._any_steps,
            steps_redone=sum(one.steps for one in book.booked if one.phase == LedgerPhase.REDOING),
            snapshots=self.snapshots,
            snapshots_ms=self.snapshots_ms,
            node_ms=sum(interval.node_ms for interval in book.booked),
            gpus_per_node=self._gpus,
            phases=phases,
            costs=added(costs(book.booked, self._gpus), lambda one: (one.cause, one.node_id)),
            comebacks=comebacks(book.booked),
            intervals=tuple(book.booked),
        )

    def fold(self) -> None:
        """Keep only the sums of the booked time, for a server that does not show intervals."""
        if self.booked:
            (self.folded, self.folded_nodes), self.booked = self._sums(), []

    def sums(self, now_ms: int, state: str = "") -> tuple[dict[str, int], dict[str, int]]:
        """Return the milliseconds per phase up to now, of the run and of its nodes."""
        return self._until(now_ms, state)._sums()

    def _sums(self) -> tuple[dict[str, int], dict[str, int]]:
        spent, of_nodes = summed(self.booked), summed(self.booked, nodes=True)
        spent = {phase: ms + self.folded.get(phase, 0) for phase, ms in spent.items()}
        return spent, {p: ms + self.folded_nodes.get(p, 0) for p, ms in of_nodes.items()}

    def _until(self, now_ms: int, state: str) -> Book:
        book = copy.copy(self)
        book.booked, book._held = [*self.booked], [*self._held]
        if not self.result:
            book._now_ms = max(now_ms, self._now_ms)
            book._queued = book._queued or state == LedgerPhase.QUEUED
            book._close(book._now_ms)
        return book

    # ---------------------------------------------------------------- events

    def note(self, at_ms: int, event: history.Kept | None) -> None:
        """Record the next event, or None if it is unknown.

        An event's time never precedes the last one's.
        """
        if self.result:
            return
        self._now_ms = now_ms = max(at_ms, self._now_ms)
        match event:
            case events.RunBegan():
                self.number, self._queued = event.run_number, event.queued
                self._gpus = event.gpus_per_node
            case history.NodesPlaced():
                self._place(event, now_ms)
            case events.JobQueued():
                self._queued, self._vacant_ms = True, now_ms
            case events.NodeDeclined():
                self._decline(event, now_ms)
            case events.LastCallBegan():
                self._called_ms = now_ms
            case history.RoundCompleted():
                self._complete(event, now_ms)
            case history.RoundAdopted():
                self._close(now_ms)
                self._round = _Round(event.round, now_ms, adopted=True)
                self._seats = event.nodes
                self._hold(now_ms, event.nodes)
            case history.RoundEnded() | history.RoundSettled():
                self._end(event, now_ms)
            case events.SnapshotsSaved():
                self.snapshots += event.times
                self.snapshots_ms += event.stopped_ms
            case history.RunEnded():
                self._close(now_ms)
                self.result = event.result
            case _:
                self._note_node(event, now_ms)
                self._note_evidence(event, now_ms)

    def _place(self, event: history.NodesPlaced, now_ms: int) -> None:
        if event.was_queued:
            self._close(self._vacant_ms)
            self._book(now_ms, LedgerPhase.QUEUED, self._cause)
        self._queued = False

    def _decline(self, event: events.NodeDeclined, now_ms: int) -> None:
        self._vacant_ms = now_ms
        if self._round is None or self._round.settled_ms is not None:
            self._book_round(now_ms)
            self._cause = (DECLINED, event.node_id)
            self._book(now_ms, LedgerPhase.WAITING, self._cause)

    def _complete(self, event: history.RoundCompleted, now_ms: int) -> None:
        self._book_round(now_ms)
        self._seats = event.nodes
        self._book(now_ms - event.enough_ms, LedgerPhase.WAITING, self._cause)
        self._book(now_ms, LedgerPhase.FORMING, self._cause)
        self._called_ms, self._queued = None, False
        alone = event.world_size == 1
        self._round = _Round(event.round, now_ms, adopted=False, way=_way(event), alone=alone)
        self._present.update(place.node_id for place in event.participants)
        self._hold(now_ms, event.nodes)

    def _end(self, event: history.RoundEnded | history.RoundSettled, now_ms: int) -> None:
        round_ = self._of(event.round)
        if isinstance(event, history.RoundEnded):
            round_.ended_ms, round_.dead_ms = now_ms, event.dead_ms
        else:
            round_.ended_ms = now_ms if round_.ended_ms is None else round_.ended_ms
            round_.settled_ms = now_ms
            round_.furthest = _further(round_.furthest, event.step)
        round_.cause, round_.node_id = event.cause.value, event.cause_node_id

    def _note_node(self, event: history.Kept | None, now_ms: int) -> None:
        match event:
            case events.NodeJoined(node_id=node_id) | events.NodeAdopted(node_id=node_id):
                if node_id not in self._present:
                    self._present.add(node_id)
                    adopted = isinstance(event, events.NodeAdopted)
                    self._unnamed -= 1 if adopted and self._unnamed else 0
            case events.NodeLeft(node_id=node_id) | events.NodeLost(node_id=node_id):
                if node_id not in self._present:
                    self._unnamed = max(self._unnamed - 1, 0)
                self._present.discard(node_id)
                self._vacant_ms = now_ms
            case history.NodesWithdrawn():
                self._vacant_ms = now_ms
            case _:
                return
        self._hold(now_ms)

    def _hold(self, now_ms: int, at_least: int = 0) -> None:
        self._unnamed = max(self._unnamed, at_least - len(self._present))
        if (nodes := len(self._present) + self._unnamed) != self._held[-1][1]:
            self._held.append((now_ms, nodes))

    def _note_evidence(self, event: history.Kept | None, now_ms: int) -> None:
        at_ms = now_ms - getattr(event, "age_ms", 0)
        match event:
            case events.WorkersStarted():
                self._of(event.round).way = _way(event)
            case events.FirstCollectiveMade():
                self._collective(self._of(event.round), at_ms)
            case events.FirstStepMade():
                self._step(self._of(event.round), event.step, at_ms)
            case events.LostStepsRedone() if (of := self._of(event.round)).redone_ms is None:
                of.redone_ms = at_ms
            case events.LastStepMade():
                of = self._of(event.round)
                of.last_ms, of.furthest = at_ms, _further(of.furthest, event.step)
            case history.WorkerFailed():
                of = self._of(event.round)
                of.failed_ms = _earlier(of.failed_ms, at_ms)
            case events.WorkersHang():
                of = self._of(event.round)
                of.hung_ms = _earlier(of.hung_ms, now_ms - event.silent_ms)
            case events.HangOver():
                self._of(event.round).hung_ms = None
            case events.NodeLost() if self._round is not None:
                self._round.lost_ms.setdefault(event.node_id, now_ms - event.silent_ms)

    def _step(self, round_: _Round, step: int, at_ms: int) -> None:
        if round_.first is None:
            round_.first = at_ms, step
        if not self._any_steps:
            self._any_steps = True
            self._never_trained()

    def _collective(self, round_: _Round, at_ms: int) -> None:
        if round_.collective_ms is None:
            round_.collective_ms = at_ms
        if not self._any_collectives:
            self._any_collectives = True
            if not self._any_steps and not self._trained:
                self._never_trained()

    def _never_trained(self) -> None:
        """Rebook training as starting, because the rounds so far turned out not to train."""
        self._trained = False
        self.booked = _starting(self.booked)
        for sums in (self.folded, self.folded_nodes):
            if trained_ms := sums.pop(LedgerPhase.TRAINING, 0):
                started_ms = sums.get(LedgerPhase.STARTING, 0)
                sums[LedgerPhase.STARTING.value] = started_ms + trained_ms

    def _of(self, number: int) -> _Round:
        """Return the latest round if it has this number, or else a dummy.

        Other rounds no longer matter.
        """
        if self._round is None and self.number is None and not self.booked:
            # The round was complete before this history began.
            self._round = _Round(number, self._until_ms, adopted=True)
        known = self._round is not None and self._round.number == number
        return self._round if known and self._round else _Round(number, 0, adopted=True)

    # ---------------------------------------------------------------- booking

    def _book(
        self,
        until_ms: int,
        phase: LedgerPhase,
        cause: tuple[str, str] = ("", ""),
        of: _Round | None = None,
        steps: int = 0,
    ) -> None:
        """Book the unbooked time up to `until_ms`, but never beyond now.

        It becomes one interval, or several if the number of held nodes changes meanwhile.
        """
        since_ms, until_ms = self._until_ms, min(until_ms, self._now_ms)
        number, way = (None, "") if of is None else (of.number, of.way)
        pieces = self._pieces(since_ms, until_ms)
        if len(pieces) > 1 and of is None and not cause[0]:
            # Thousands of nodes may come one by one before the first round.
            node_ms = sum(ms * nodes for ms, nodes in pieces)
            pieces = [(until_ms - since_ms, node_ms / (until_ms - since_ms))]
        for ms, nodes in pieces:
            span = (self._until_ms, self._until_ms + ms)
            made = round(steps * ms / (until_ms - span[0]))
            steps, self._until_ms = steps - made, span[1]
            self.booked.append(
                Interval(*span, phase.value, *cause, number, nodes, self._seats, made, way)
            )

    def _pieces(self, since_ms: int, until_ms: int) -> list[tuple[int, float]]:
        """Return how long how many nodes were held between two times, and forget it."""
        pieces: list[tuple[int, float]] = []
        while since_ms < until_ms:
            while len(self._held) > 1 and self._held[1][0] <= since_ms:
                del self._held[0]
            next_ms = min([until_ms, *(changed_ms for changed_ms, _ in self._held[1:2])])
            pieces.append((next_ms - since_ms, self._held[0][1]))
            since_ms = next_ms
        return pieces

    def _close(self, until_ms: int) -> None:
        ended = self._round is None or self._round.ended_ms is not None
        self._book_round(until_ms)
        if ended:
            if self._queued:
                self._book(min(self._vacant_ms, until_ms), LedgerPhase.WAITING, self._cause)
            elif self._called_ms is not None:
                self._book(min(self._called_ms, until_ms), LedgerPhase.WAITING, self._cause)
            phase = LedgerPhase.QUEUED if self._queued else LedgerPhase.WAITING
            phase = LedgerPhase.FORMING if self._called_ms is not None else phase
            self._book(until_ms, phase, self._cause)

    def _book_round(self, until_ms: int) -> None:
        """Book the last round up to the time when all its nodes had stopped."""
        round_, self._round = self._round, None
        if round_ is None:
            return
        ended_ms = until_ms if round_.ended_ms is None else round_.ended_ms
        broke_ms = _broke_ms(round_, ended_ms)
        owed = self._cause
        began_ms = round_.at_ms if round_.alone else round_.collective_ms
        if self._any_steps:
            began_ms = round_.first[0] if round_.first is not None else None
        if not round_.adopted and (self._any_steps or self._any_collectives):
            first_ms = broke_ms if began_ms is None else min(began_ms, broke_ms)
            phase = LedgerPhase.LOADING if self._trained else LedgerPhase.STARTING
            self._book(first_ms, phase, owed, round_)
        if round_.first is not None and not round_.adopted:
            self._book_redone(round_, min(broke_ms, ended_ms), owed)
        first = round_.first[1] if round_.first is not None else None
        furthest = _further(self._furthest, round_.furthest, first)
        steps = 0
        if first is not None and furthest is not None and round_.furthest is not None:
            steps = furthest - (first - 1 if self._furthest is None else self._furthest)
        self._book(broke_ms, LedgerPhase.TRAINING, of=round_, steps=steps)
        self._furthest = furthest
        self._trained = self._trained or began_ms is not None or self._furthest is not None
        if round_.ended_ms is None and broke_ms >= ended_ms:
            return
        self._cause = (round_.cause or Cause.WORKER_FAILURE.value, round_.node_id)
        self._book(ended_ms, LedgerPhase.DETECTING, self._cause, round_)
        stopped_ms = until_ms if round_.settled_ms is None else round_.settled_ms
        self._book(stopped_ms, LedgerPhase.STOPPING, self._cause, round_)

    def _book_redone(self, round_: _Round, broke_ms: int, owed: tuple[str, str]) -> None:
        assert round_.first is not None
        step, furthest = round_.first[1], self._furthest
        if furthest is None or step > furthest:
            return
        reached = furthest if round_.redone_ms is not None else round_.furthest or step
        steps = max(min(reached, furthest) - step + 1, 0)
        redone_ms = broke_ms if round_.redone_ms is None else min(round_.redone_ms, broke_ms)
        self._book(redone_ms, LedgerPhase.REDOING, owed, round_, steps)


def _broke_ms(round_: _Round, ended_ms: int) -> int:
    """Return when a round stopped training: at its end, or earlier if a failure was noticed late.

    The result is never before the last step. A step made after a node fell silent shows that the
    other nodes continued.
    """
    found = [ended_ms - round_.dead_ms]
    if round_.failed_ms is not None:
        found.append(round_.failed_ms)
    if round_.hung_ms is not None:
        found.append(round_.hung_ms)
    if round_.cause == Cause.NODE_LOST and round_.node_id in round_.lost_ms:
        found.append(round_.lost_ms[round_.node_id])
    broke_ms = max(min(found), round_.at_ms, round_.last_ms or 0)
    return min(broke_ms, ended_ms)


def _way(event: history.RoundCompleted | events.WorkersStarted) -> str:
    """Describe how a round gets its workers, as far as it is known before its nodes report that.

    It is cold if one of the new workers was started cold.
    """
    if isinstance(event, history.RoundCompleted):
        if event.kept:
            return "all kept" if event.kept == event.world_size else "some kept"
        return "all new"
    if not event.kept:
        return "cold" if event.cold else "all warm"
    if not event.cold and not event.warm and not event.hot:
        return "all kept"
    return f"some kept, others {'cold' if event.cold else 'warm' if event.warm else 'hot'}"


def _earlier(known_ms: int | None, found_ms: int) -> int:
    return found_ms if known_ms is None else min(known_ms, found_ms)


def _further(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)


def _starting(booked: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for one in booked:
        if one.phase != LedgerPhase.TRAINING:
            found.append(one)
            continue
        cause, node_id = (found[-1].cause, found[-1].node_id) if found else ("", "")
        starting = LedgerPhase.STARTING.value
        found.append(replace(one, phase=starting, cause=cause, node_id=node_id))
    return found

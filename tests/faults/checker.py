"""Judges a history: returns which promises of the system it shows to be broken.

Pure: a history in, violations out. Each rule is a function that yields the evidence against the
system, so a test can show that the rule finds it (tests/unit/project/test_faults_checker.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from tests.faults.history import (
    Announced,
    Exited,
    FaultBegan,
    FaultHealed,
    JobEnded,
    MetStranger,
    NotRecovered,
    Parked,
    Promise,
    Record,
    Recovered,
    RunBegan,
    RunEnded,
    Settled,
    Started,
    Stepped,
    Told,
)

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, and by what."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Episode:
    """One fault, from its beginning until all hosts train again."""

    began: FaultBegan
    healed: FaultHealed | None
    over: Recovered | NotRecovered | None

    @property
    def until_s(self) -> float:
        return self.over.at_s if self.over is not None else float("inf")

    def __str__(self) -> str:
        return f"fault {self.began.number} ({self.began.name} on {', '.join(self.began.hosts)})"


@dataclass(frozen=True, slots=True)
class History:
    """The records of one lane by kind, each in chronological order."""

    records: Sequence[Record]
    episodes: tuple[Episode, ...] = field(init=False)

    def __post_init__(self) -> None:
        healed = {record.number: record for record in self.of(FaultHealed)}
        over: dict[int, Recovered | NotRecovered] = {}
        over |= {record.number: record for record in self.of(Recovered)}
        over |= {record.number: record for record in self.of(NotRecovered)}
        episodes = tuple(
            Episode(began, healed.get(began.number), over.get(began.number))
            for began in self.of(FaultBegan)
        )
        object.__setattr__(self, "episodes", episodes)

    def of(self, kind: type[R]) -> list[R]:
        found: list[R] = []
        found += (record for record in self.records if isinstance(record, kind))
        if kind in (Started, Stepped, Exited, Parked):
            found.sort(key=lambda record: getattr(record, "at_s", 0.0))
        return found


def check(records: Sequence[Record]) -> tuple[Violation, ...]:
    """Return all evidence against the system in one history."""
    history = History(records)
    return tuple(
        Violation(rule.__name__.strip("_").replace("_", " "), text)
        for rule in RULES
        for text in rule(history)
    )


# ------------------------------------------------------------------ consistency


def _a_round_completes_once(history: History) -> Iterator[str]:
    """No two complete rounds have the same number and different participants."""
    seen: dict[int, Announced] = {}
    for announced in history.of(Announced):
        first = seen.setdefault(announced.round, announced)
        if first != announced:
            yield f"round {announced.round} is {_shape(first)} and {_shape(announced)}"


def _ranks_tile(history: History) -> Iterator[str]:
    """The ranks of a round are exactly 0..WORLD_SIZE-1."""
    for announced in history.of(Announced):
        ranks = sorted(
            rank
            for place in announced.places
            for rank in range(place.rank_first, place.rank_last + 1)
        )
        if ranks != list(range(announced.world_size)):
            yield f"round {announced.round} has ranks {ranks} of {announced.world_size}"


def _agents_hear_what_was_announced(history: History) -> Iterator[str]:
    """Each agent received its own assignment in the round that the server announced."""
    announced = {a.round: a for a in history.of(Announced)}
    for told in history.of(Told):
        round_ = announced.get(told.round)
        if round_ is None:
            yield f"{told.node_id} was told of round {told.round}, which was never announced"
            continue
        places = {p.node_id: (p.rank_first, p.rank_last) for p in round_.places}
        line = (told.world_size, told.group_world_size, told.master)
        if places.get(told.node_id) != (told.rank_first, told.rank_last):
            yield f"{told} is not in {_shape(round_)}"
        elif line != (round_.world_size, len(round_.places), round_.master):
            yield f"{told} does not agree with {_shape(round_)}"


def _agents_agree(history: History) -> Iterator[str]:
    """All that receive a round receive the same one, each with its own GROUP_RANK."""
    heard: dict[int, dict[str, Told]] = defaultdict(dict)
    for told in history.of(Told):
        heard[told.round][told.node_id] = told
    for number, lines in heard.items():
        common = {(t.group_world_size, t.world_size, t.master, t.restarts) for t in lines.values()}
        if len(common) > 1:
            yield f"round {number} was told as {sorted(common)}"
        if len({t.group_rank for t in lines.values()}) < len(lines):
            yield f"round {number} has the same GROUP_RANK twice: {sorted(lines)}"


def _workers_find_what_their_agent_was_told(history: History) -> Iterator[str]:
    """RANK, WORLD_SIZE, MASTER_ADDR etc. are the agent's assignment; one worker per rank."""
    lines = {(told.node_id, told.round): told for told in history.of(Told)}
    owners: dict[tuple[int, int], Started] = {}
    for started in history.of(Started):
        told = lines.get((started.node_id, started.round))
        where = f"rank {started.rank} of round {started.round} on {started.node_id}"
        if told is None:
            yield f"{where} started, but its agent was never told of that round"
            continue
        said = (told.group_rank, told.group_world_size, told.world_size, told.master, told.restarts)
        found = (
            started.group_rank, started.group_world_size, started.world_size, started.master,
            started.restarts,
        )  # fmt: skip
        if said != found or not told.rank_first <= started.rank <= told.rank_last:
            yield f"{where} found {found} where its agent was told {said}"
        owner = owners.setdefault((started.round, started.rank), started)
        if owner is not started:
            yield f"{where} is pid {started.pid}, and pid {owner.pid} on {owner.node_id} as well"


def _nobody_meets_a_stranger(history: History) -> Iterator[str]:
    """No worker of another round connects to a round's meeting place."""
    for met in history.of(MetStranger):
        yield f"rank 0 of round {met.round} on {met.host} met {met.text}"


# ------------------------------------------------------------------ fencing


def _round_numbers_never_go_back(history: History) -> Iterator[str]:
    """Round numbers never decrease: in the server's announcements, for an agent, or on a host."""
    series: dict[str, list[int]] = defaultdict(list)
    for announced in history.of(Announced):
        series["the server announced"].append(announced.round)
    for told in history.of(Told):
        series[f"{told.node_id} was told of"].append(told.round)
    for started in history.of(Started):
        series[f"{started.host} ran"].append(started.round)
    for who, numbers in series.items():
        for earlier, later in pairwise(numbers):
            if later < earlier or (later == earlier and not who.endswith("ran")):
                yield f"{who} round {later} after {earlier}"


def _no_old_worker_beside_a_new_one(history: History) -> Iterator[str]:
    """Once a worker of a round has started, none of an older round is alive where it can be seen.

    If the server cannot reach a node, or the node's agent cannot act, its workers may continue.
    """
    starts = _first_starts(history)
    numbers = sorted(starts)
    blamed: dict[int, tuple[Stepped | Exited | Parked, int]] = {}
    alive = [*history.of(Stepped), *history.of(Exited), *history.of(Parked)]
    for record in alive:
        newer = numbers[bisect_right(numbers, record.round) :]
        began = [number for number in newer if starts[number] < record.at_s]
        if began and not _unseen(history, record.host, record.at_s):
            blamed[record.pid] = (record, began[0])
    for pid, (record, number) in blamed.items():
        yield (
            f"pid {pid} on {record.host}, of round {record.round}, was alive "
            f"{record.at_s - starts[number]:.3f} s after round {number} had its first worker"
        )


def _who_stays_has_parked(history: History) -> Iterator[str]:
    """A process takes part in a later round only once it has parked, and stays where it is."""
    parked = {(record.pid, record.round) for record in history.of(Parked)}
    last: dict[int, Started] = {}
    for started in history.of(Started):
        before = last.get(started.pid)
        last[started.pid] = started
        if before is None:
            continue
        where = f"pid {started.pid}, of round {before.round} on {before.node_id},"
        if (before.host, before.node_id) != (started.host, started.node_id):
            yield f"{where} is in round {started.round} on {started.node_id}"
        if started.round <= before.round:
            yield f"{where} started again in round {started.round}"
        elif (before.pid, before.round) not in parked:
            yield f"{where} had not parked before round {started.round}"


def _first_starts(history: History) -> dict[int, float]:
    starts: dict[int, float] = {}
    for started in history.of(Started):
        starts.setdefault(started.round, started.at_s)
    return starts


def _unseen(history: History, host: str, at_s: float) -> bool:
    return any(
        host in episode.began.unseen and episode.began.at_s <= at_s <= episode.until_s
        for episode in history.episodes
    )


# ------------------------------------------------------------------ what a fault may cost


def _faults_are_as_invisible_as_promised(history: History) -> Iterator[str]:
    """If a fault may not be noticed, no worker starts or ends, and the round stays."""
    starts = history.of(Started)
    for episode in history.episodes:
        if episode.began.promise is not Promise.NOTHING:
            continue
        for started in starts:
            if episode.began.at_s <= started.at_s <= episode.until_s:
                yield f"{episode} started a worker of round {started.round} on {started.host}"
                break
        if isinstance(episode.over, Recovered):
            before = (episode.began.round, sorted(episode.began.pids))
            after = (episode.over.round, sorted(episode.over.pids))
            if before != after:
                yield f"{episode} turned round and workers from {before} into {after}"


def _restarts_are_neither_lost_nor_invented(history: History) -> Iterator[str]:
    """A restart is spent for each worker that was killed, and for nothing else."""
    total = 0
    for episode in history.episodes:
        if isinstance(episode.over, Recovered):
            due = 1 if episode.began.promise is Promise.ONE_RESTART else 0
            total += due
            spent = episode.over.restarts - episode.began.restarts
            if spent != due:
                yield f"{episode} has spent {spent} restarts, not {due}"
    charged = [s for s in history.of(Settled) if s.cause == "worker failure"]
    ended = history.of(JobEnded)
    if ended and ended[-1].restarts != total:
        yield f"the job ended with {ended[-1].restarts} restarts; {total} workers were killed"
    if ended and len(charged) != total:
        rounds = [settled.round for settled in charged]
        yield f"rounds {rounds} are charged to a worker failure; {total} workers were killed"


def _calm(history: History) -> Iterator[str]:
    """Between two faults nothing changes."""
    for last, episode in pairwise(history.episodes):
        if isinstance(last.over, Recovered):
            before = (last.over.round, last.over.restarts, sorted(last.over.pids))
            after = (episode.began.round, episode.began.restarts, sorted(episode.began.pids))
            if before != after:
                yield f"after {last} all was well with {before}; before the next it is {after}"


# ------------------------------------------------------------------ life


def _every_fault_is_survived(history: History) -> Iterator[str]:
    """After a fault has healed, all hosts train again within the deadline."""
    for episode in history.episodes:
        if isinstance(episode.over, NotRecovered):
            yield f"{episode}: {episode.over.reason}"
        elif episode.over is None:
            yield f"{episode} has no end: the run was cut short"
    for record in history.of(NotRecovered):
        if record.number < 0:
            yield f"without a fault: {record.reason}"


def _every_fault_does_harm(history: History) -> Iterator[str]:
    """A fault of the network that met no frame has proven nothing."""
    for episode in history.episodes:
        if episode.healed is not None and episode.healed.harmed == 0:
            yield f"{episode} met no frame"


def _training_goes_forward(history: History) -> Iterator[str]:
    """RANK 0 continues from the saved step, so steps never go back; two groups would take turns."""
    furthest = -1
    by_round: dict[int, list[Stepped]] = defaultdict(list)
    for stepped in history.of(Stepped):
        if stepped.rank == 0 and stepped.step >= 0:
            by_round[stepped.round].append(stepped)
    for number in sorted(by_round):
        for stepped in by_round[number]:
            if stepped.step < furthest:
                yield f"round {number} is at step {stepped.step} after {furthest} had been reached"
                break
            furthest = stepped.step


def _the_job_is_closed_once_and_rightly(history: History) -> Iterator[str]:
    """One run, which ends with success once its workers are told to end, and not before."""
    began, closed, ended = history.of(RunBegan), history.of(RunEnded), history.of(JobEnded)
    if len({record.run for record in began}) != 1:
        yield f"the job had {len(began)} runs: {[record.run for record in began]}"
    for record in closed:
        if record.result != "succeeded":
            yield f"run {record.run} was closed as {record.result}: {record.reason}"
    if ended:
        if (ended[-1].state, set(ended[-1].exit_codes)) != ("succeeded", {0}):
            yield f"it is {ended[-1].state}, with exit codes {ended[-1].exit_codes}"
    elif not history.of(NotRecovered):
        yield "nobody saw its end"


def _shape(announced: Announced) -> str:
    places = " ".join(f"{p.node_id}={p.rank_first}..{p.rank_last}" for p in announced.places)
    return f"({places}, world_size {announced.world_size}, {announced.master})"


RULES: tuple[Callable[[History], Iterator[str]], ...] = (
    _a_round_completes_once,
    _ranks_tile,
    _agents_hear_what_was_announced,
    _agents_agree,
    _workers_find_what_their_agent_was_told,
    _nobody_meets_a_stranger,
    _round_numbers_never_go_back,
    _no_old_worker_beside_a_new_one,
    _who_stays_has_parked,
    _faults_are_as_invisible_as_promised,
    _restarts_are_neither_lost_nor_invented,
    _calm,
    _every_fault_is_survived,
    _every_fault_does_harm,
    _training_goes_forward,
    _the_job_is_closed_once_and_rightly,
)

"""A job's life as derived from its history: runs, their rounds, and the cost of each change.

All of it is derived from the fields of events. An event without fields, or with
an unknown name or unknown fields, is kept as a line of text, from which nothing is derived.

The history names the first eight participants of a round. The others become known when later events
name them; until then, only their number is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rdzv.core import events
from rdzv.view import history
from rdzv.view.answers import Event, JobStatus
from rdzv.view.sentences import failure, kept, one_line


@dataclass(slots=True)
class Round:
    """One round, from the moment when nodes began to wait for it."""

    number: int
    since_ms: int
    """The time at which the previous round ended or the run began."""
    at_ms: int
    nodes: tuple[str, ...] = ()
    more: int = 0
    """The number of participants whose names are unknown."""
    workers: int = 0
    adopted: bool = False
    """Whether it was completed before this history began."""
    ended_ms: int | None = None
    cause: str = ""
    reason: str = ""
    settled_ms: int | None = None
    """The time at which all nodes had stopped."""
    charge: str = ""
    charge_reason: str = ""
    stopped_ms: dict[str, int] = field(default_factory=dict)
    """The time, by node, when the node had stopped its workers or was gone."""
    dead_ms: int = 0
    """The time for which its workers had been dead when it ended, if a cut-off node had killed
    them."""
    kept: str = ""
    """A description of the kept workers, or empty if none could be kept."""
    completed: history.RoundCompleted | None = None
    starts: events.WorkersStarted | None = None
    """How it got its workers, or None if no node has reported that."""
    first_ms: int | None = None
    """The time of its first step or, if none is reported, of its first collective."""
    failed: list[history.WorkerFailed] = field(default_factory=list)
    slow: list[events.RankStraggles] = field(default_factory=list)
    gone: dict[str, str] = field(default_factory=dict)
    """By node that went with the round: `was lost` or `left`, and why."""
    restarts: str = ""
    """The restarts spent by then, such as `1 of 3`, or empty if the nodes' own agents count them.
    """

    @property
    def live_until_ms(self) -> int | None:
        """The time until which its workers ran, or None while they are running."""
        return None if self.ended_ms is None else max(self.ended_ms - self.dead_ms, self.at_ms)


@dataclass(slots=True)
class Run:
    """One run of the job."""

    run: str
    began_ms: int
    number: int | None = None
    """The number of the run, or None if its beginning is no longer in the history."""
    began_why: str = ""
    rounds: list[Round] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    """The time and description of each worker failure."""
    suspects: list[tuple[int, str]] = field(default_factory=list)
    """The same for each worker in which a collective failed; the cause usually lies elsewhere."""
    nodes: dict[str, None] = field(default_factory=dict)
    """All nodes named in its history, in order of appearance."""
    happenings: list[Event] = field(default_factory=list)
    ended_ms: int | None = None
    result: str = ""
    reason: str = ""

    @property
    def round(self) -> Round | None:
        return self.rounds[-1] if self.rounds else None


def runs_of(past: Iterable[Event]) -> list[Run]:
    runs: dict[str, Run] = {}
    for event in past:
        name = event.run or ""
        run = runs.get(name)
        if run is None:
            run = runs[name] = Run(name, event.unix_ms)
        _note(run, event)
    return list(runs.values())


def name_present(run: Run, status: JobStatus) -> None:
    """Add the names of the live round's participants, taken from the job's current status."""
    round_ = run.round
    if round_ is None or round_.number != status.round or status.run != run.run:
        return
    seated = [node.node_id for node in status.nodes if node.group_rank is not None]
    for node in seated:
        _take_part(run, round_, node)


def _note(run: Run, event: Event) -> None:
    now_ms, known = event.unix_ms, history.read(event.name, event.fields)
    if node := node_of(event):
        run.nodes.setdefault(node)
    match known:
        case events.RunBegan():
            run.number, run.began_why = known.run_number, one_line(known.reason)
        case history.RoundCompleted():
            run.rounds.append(_completed(run, known, now_ms))
        case events.WorkersStarted():
            _round(run, known.round).starts = known
        case events.FirstStepMade():
            _round(run, known.round).first_ms = now_ms - known.age_ms
            run.happenings.append(event)
        case events.FirstCollectiveMade():
            round_ = _round(run, known.round)
            round_.first_ms = round_.first_ms or now_ms - known.age_ms
            run.happenings.append(event)
        case events.RankStraggles():
            _round(run, known.round).slow.append(known)
            run.happenings.append(event)
        case history.RoundAdopted():
            run.rounds.append(Round(known.round, now_ms, now_ms, more=known.nodes, adopted=True))
        case history.RoundEnded():
            _end(_round(run, known.round), known, now_ms)
        case history.RoundSettled():
            _settle(_round(run, known.round), known, now_ms)
        case history.RunEnded():
            run.ended_ms, run.result, run.reason = now_ms, known.result, one_line(known.reason)
        case history.WorkerFailed():
            failed = run.suspects if known.suspect else run.failures
            failed.append((now_ms, failure(known)))
            if not known.suspect:
                _round(run, known.round).failed.append(known)
        case _:
            _note_node(run, known, now_ms)
            run.happenings.append(event)


def _note_node(run: Run, known: history.Kept | None, now_ms: int) -> None:
    match known:
        case events.NodeSucceeded() | events.NodeStuck() | events.NodeAdopted():
            _take_part(run, _round(run, known.round), known.node_id)
        case events.NodeStopped():
            round_ = _round(run, known.round)
            _take_part(run, round_, known.node_id)
            round_.stopped_ms.setdefault(known.node_id, now_ms)
        case events.NodeLeft() | events.NodeLost():
            _go(run, known, now_ms)


def node_of(event: Event) -> str | None:
    """Return the node that an event is about, or None if it is about the job or unknown."""
    node = (event.fields or {}).get("node_id")
    return node if isinstance(node, str) else None


def _completed(run: Run, known: history.RoundCompleted, now_ms: int) -> Round:
    nodes = tuple(place.node_id for place in known.participants)
    for node in nodes:
        run.nodes.setdefault(node)
    last = run.round
    since_ms = run.began_ms if last is None or last.ended_ms is None else last.ended_ms
    more = max(known.nodes - len(nodes), 0)
    which = one_line(kept(known))
    return Round(
        known.round,
        since_ms,
        now_ms,
        nodes,
        more,
        known.world_size,
        kept=which,
        completed=known,
    )


def _round(run: Run, number: int) -> Round:
    """Return a round, first adding it as completed before the history began if it is missing."""
    for round_ in reversed(run.rounds):
        if round_.number == number:
            return round_
    made = Round(number, run.began_ms, run.began_ms, adopted=True)
    run.rounds.append(made)
    run.rounds.sort(key=lambda round_: round_.number)
    return made


def _take_part(run: Run, round_: Round, node: str) -> None:
    run.nodes.setdefault(node)
    if node not in round_.nodes:
        round_.nodes = (*round_.nodes, node)
        round_.more = max(round_.more - 1, 0)


def _go(run: Run, known: events.NodeLeft | events.NodeLost, now_ms: int) -> None:
    last, node = run.round, known.node_id
    if last is not None and last.ended_ms is not None and node in last.nodes:
        last.stopped_ms.setdefault(node, now_ms)
        how = "left" if isinstance(known, events.NodeLeft) else "was lost"
        last.gone[node] = one_line(f"{how}: {known.reason}")


def _end(round_: Round, known: history.RoundEnded, now_ms: int) -> None:
    if round_.ended_ms is None:
        round_.ended_ms, round_.dead_ms = now_ms, known.dead_ms
        round_.cause, round_.reason = known.cause, one_line(known.reason)


def _settle(round_: Round, known: history.RoundSettled, now_ms: int) -> None:
    round_.settled_ms = now_ms
    round_.charge, round_.charge_reason = known.cause, one_line(known.reason)
    if known.max_restarts is not None:
        round_.restarts = f"{known.restarts} of {known.max_restarts}"


def following(run: Run, round_: Round) -> Round | None:
    index = run.rounds.index(round_) + 1
    return run.rounds[index] if index < len(run.rounds) else None

"""A job's life as its history tells it: runs, their rounds, and what each change cost.

The history is lines for people, one an event. They are read back here: the same words that
`rdzv.server.telemetry.event_lines` writes, which a test holds for every event that there is. What
is not understood, as from a server of a later version, is kept as its text.

A line names the first eight participants of a round. Who else took part is known from what they
said of that round later; as long as they have said nothing, there are only so many more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rdzv.core.words import DURATION, parse_duration
from rdzv.view.answers import Event, JobStatus

_NODE = r"(?P<node>\S+)"
_ROUND = r"round (?P<round>\d+)"
_WORDS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "RunBegan": r"run (?P<number>\d+) \((?P<run>\S+)\) began: (?P<reason>.*)",
        "NodeJoined": rf"{_NODE} joined from (?P<address>\S*) with (?P<workers>\d+) workers?",
        "NodeStopped": rf"{_NODE} stopped its workers of {_ROUND}",
        "NodeSucceeded": rf"{_NODE} succeeded in {_ROUND}",
        "NodeLeaving": rf"{_NODE} leaves: (?P<reason>.*)",
        "NodeLeft": rf"{_NODE} left: (?P<reason>.*)",
        "NodeWentAway": rf"{_NODE} is away, .*",
        "NodeCameBack": rf"{_NODE} is back after .*",
        "NodeLost": rf"{_NODE} was lost: (?P<reason>.*)",
        "NodeStuck": rf"{_NODE} is stuck in {_ROUND}: (?P<reason>.*)",
        "WorkerFailed": rf"worker failed in {_ROUND}: (?P<reason>rank \d+ \(local_rank \d+\) on "
        rf"{_NODE}: .*)",
        "RoundCompleted": rf"{_ROUND} complete: (?P<places>.*), world_size (?P<workers>\d+), "
        r"MASTER .*",
        "RoundAdopted": rf"{_ROUND} of (?P<number>\d+) nodes? goes on: .*",
        "NodeAdopted": rf"{_NODE} has GROUP_RANK \d+ in {_ROUND}",
        "RoundEnded": rf"{_ROUND} ended \((?P<cause>[a-z ]+)\): (?P<reason>.*)",
        "RoundSettled": rf"{_ROUND} is charged to (?P<cause>[a-z ]+): (?P<reason>.*?)"
        r"(?:; restarts spent: (?P<spent>\d+) of (?P<most>\d+))?",
        "RunEnded": r"run (?P<run>\S+) (?P<result>[a-z]+): (?P<reason>.*)",
    }.items()
}
_PLACE = re.compile(r"(?P<node>\S+)=\d+(?:\.\.\d+)?")
_MORE = re.compile(r" and (\d+) more nodes?$")

_DEAD = re.compile(rf"has killed its workers ({DURATION}) ago \(--fence-after\)")
"""Why a round ended whose workers were dead before that was heard."""

# What nodes say of the round that they take part in.
_OF_PARTICIPANTS = {"NodeStopped", "NodeSucceeded", "NodeStuck", "NodeAdopted"}


def words(event: Event) -> dict[str, str]:
    """Read a line back into what it was made of; nothing if it is not understood.

    >>> words(Event(0, "r1", "NodeLost", "n7 was lost: lease ran out"))
    {'node': 'n7', 'reason': 'lease ran out'}
    """
    pattern = _WORDS.get(event.name)
    found = pattern.fullmatch(event.text) if pattern is not None else None
    return {k: v for k, v in found.groupdict().items() if v is not None} if found else {}


@dataclass(slots=True)
class Round:
    """One round, from when the nodes began to meet for it."""

    number: int
    since_ms: int
    """When the round before ended, or the run began."""
    at_ms: int
    """When it was complete."""
    nodes: tuple[str, ...] = ()
    more: int = 0
    """Participants whose names are not known."""
    workers: int = 0
    adopted: bool = False
    """It was complete before this history began."""
    ended_ms: int | None = None
    cause: str = ""
    reason: str = ""
    settled_ms: int | None = None
    """When everyone had stopped."""
    charge: str = ""
    charge_reason: str = ""
    stopped_ms: dict[str, int] = field(default_factory=dict)
    """By node: when it had stopped its workers, or was gone."""
    dead_ms: int = 0
    """For how long its workers were dead when it ended: killed by a node that was cut off."""
    restarts: str = ""
    """How many restarts were spent then, such as `1 of 3`; empty if the nodes count."""

    @property
    def live_until_ms(self) -> int | None:
        """Until when its workers ran; None: they do."""
        return None if self.ended_ms is None else max(self.ended_ms - self.dead_ms, self.at_ms)


@dataclass(slots=True)
class Run:
    """One run of the job."""

    run: str
    began_ms: int
    number: int | None = None
    """None if its beginning is not in the history any more."""
    began_why: str = ""
    rounds: list[Round] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Workers that failed: when, and which and how."""
    nodes: dict[str, None] = field(default_factory=dict)
    """All that were ever in it, in their order."""
    happenings: list[tuple[int, str, str]] = field(default_factory=list)
    """All else: when, the event's name, and its line."""
    ended_ms: int | None = None
    result: str = ""
    reason: str = ""

    @property
    def round(self) -> Round | None:
        """The last round that was complete."""
        return self.rounds[-1] if self.rounds else None

    def live_ms(self, now_ms: int) -> int:
        """Return for how long rounds were live."""
        until_ms = now_ms if self.ended_ms is None else self.ended_ms
        return sum(
            max((until_ms if r.live_until_ms is None else r.live_until_ms) - r.at_ms, 0)
            for r in self.rounds
        )


def runs_of(history: Iterable[Event]) -> list[Run]:
    """Return the runs of a job, oldest first."""
    runs: dict[str, Run] = {}
    for event in history:
        name = event.run or ""
        run = runs.get(name)
        if run is None:
            run = runs[name] = Run(name, event.unix_ms)
        note(run, event)
    return list(runs.values())


def name_present(run: Run, status: JobStatus) -> None:
    """Take the names of the live round's participants from what the job is now."""
    round_ = run.round
    if round_ is None or round_.number != status.round or status.run != run.run:
        return
    seated = [node.node_id for node in status.nodes if node.group_rank is not None]
    for node in seated:
        _take_part(run, round_, node)


def note(run: Run, event: Event) -> None:
    """Take the next event of a run into it."""
    said, now_ms = words(event), event.unix_ms
    if node := said.get("node"):
        run.nodes.setdefault(node)
    if not said and event.name in _WORDS:
        run.happenings.append((now_ms, event.name, event.text))
        return
    match event.name:
        case "RunBegan":
            run.number, run.began_why = int(said["number"]), said["reason"]
        case "RoundCompleted":
            run.rounds.append(_completed(run, said, now_ms))
        case "RoundAdopted":
            number, nodes = int(said["round"]), int(said["number"])
            run.rounds.append(Round(number, now_ms, now_ms, more=nodes, adopted=True))
        case "RoundEnded":
            _end(_round(run, said, now_ms), said, now_ms)
        case "RoundSettled":
            _settle(_round(run, said, now_ms), said, now_ms)
        case "RunEnded":
            run.ended_ms, run.result, run.reason = now_ms, said["result"], said["reason"]
        case "WorkerFailed":
            run.failures.append((now_ms, said["reason"]))
        case name:
            if name in _OF_PARTICIPANTS:
                round_ = _round(run, said, now_ms)
                _take_part(run, round_, said["node"])
                if name == "NodeStopped":
                    round_.stopped_ms.setdefault(said["node"], now_ms)
            elif name in ("NodeLeft", "NodeLost"):
                _go(run, said["node"], now_ms)
            run.happenings.append((now_ms, name, event.text))


def _completed(run: Run, said: Mapping[str, str], now_ms: int) -> Round:
    text, more = said["places"], 0
    if (others := _MORE.search(text)) is not None:
        text, more = text[: others.start()], int(others[1])
    nodes = tuple(place["node"] for place in _PLACE.finditer(text))
    for node in nodes:
        run.nodes.setdefault(node)
    last = run.round
    since_ms = run.began_ms if last is None or last.ended_ms is None else last.ended_ms
    return Round(int(said["round"]), since_ms, now_ms, nodes, more, int(said["workers"]))


def _round(run: Run, said: Mapping[str, str], now_ms: int) -> Round:
    """Find a round; one that is not in the history was complete before it began."""
    number = int(said["round"])
    for round_ in reversed(run.rounds):
        if round_.number == number:
            return round_
    made = Round(number, run.began_ms, run.began_ms, adopted=True)
    run.rounds.append(made)
    run.rounds.sort(key=lambda round_: round_.number)
    return made


def _take_part(run: Run, round_: Round, node: str) -> None:
    """Name a participant that the line of its round has not named."""
    run.nodes.setdefault(node)
    if node not in round_.nodes:
        round_.nodes = (*round_.nodes, node)
        round_.more = max(round_.more - 1, 0)


def _go(run: Run, node: str, now_ms: int) -> None:
    """Take note that a node is gone, and so has no workers of the last round any more."""
    last = run.round
    if last is not None and last.ended_ms is not None and node in last.nodes:
        last.stopped_ms.setdefault(node, now_ms)


def _end(round_: Round, said: Mapping[str, str], now_ms: int) -> None:
    if round_.ended_ms is None:
        round_.ended_ms, round_.cause, round_.reason = now_ms, said["cause"], said["reason"]
        if dead := _DEAD.search(round_.reason):
            round_.dead_ms = parse_duration(dead[1])


def _settle(round_: Round, said: Mapping[str, str], now_ms: int) -> None:
    round_.settled_ms, round_.charge = now_ms, said["cause"]
    round_.charge_reason = said["reason"]
    if "spent" in said:
        round_.restarts = f"{said['spent']} of {said['most']}"


def following(run: Run, round_: Round) -> Round | None:
    """Return the round after this one."""
    index = run.rounds.index(round_) + 1
    return run.rounds[index] if index < len(run.rounds) else None

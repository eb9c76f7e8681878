"""The sources of a history: workers' diaries, agents' logs, the server's event history."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rdzv.core.events import RunBegan as RunBeganKept
from rdzv.view import history as kept_history
from rdzv.view.answers import Event
from rdzv.view.life import node_of
from tests.faults.history import (
    Announced,
    Place,
    Record,
    RunBegan,
    RunEnded,
    Settled,
    Started,
    Stepped,
    Told,
    decode,
)

_TOLD = re.compile(
    r": round (\d+): GROUP_RANK (\d+) of (\d+), RANK (\d+)\.\.(\d+) of (\d+), "
    r"MASTER (\S+), restarts (\d+) of \S+$"
)


_READ = ("RoundCompleted", "RoundSettled", "RunBegan", "RunEnded")


class Diaries:
    """The diaries of all workers of a lane, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.records: list[Record] = []
        self.started: dict[int, Started] = {}
        """The start of each worker, by pid."""
        self.latest: dict[int, Stepped] = {}
        """Each worker's progress when it last wrote, by pid."""
        self._folder = folder
        self._read: dict[Path, int] = {}

    def poll(self) -> None:
        """Read what was written since the last time; an incomplete line waits."""
        for path in self._folder.glob("*.jsonl"):
            at = self._read.get(path, 0)
            if path.stat().st_size == at:
                continue
            with path.open("rb") as diary:
                diary.seek(at)
                whole = diary.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] = at + len(whole) + 1
                for line in whole.decode().splitlines():
                    self._take(decode(line))

    def _take(self, record: Record) -> None:
        self.records.append(record)
        match record:
            case Started():
                self.started[record.pid] = record
            case Stepped():
                self.latest[record.pid] = record

    def in_round(self, number: int) -> dict[str, list[int]]:
        """Return the workers of a round by host."""
        found: dict[str, list[int]] = {}
        for started in self.started.values():
            if started.round == number:
                found.setdefault(started.host, []).append(started.pid)
        return found

    @property
    def newest_round(self) -> int:
        return max((started.round for started in self.started.values()), default=-1)


def told(host: str, node_id: str, log: str) -> Iterator[Told]:
    """Find in the log of one agent what it received."""
    for line in log.splitlines():
        if match := _TOLD.search(line):
            round_, group_rank, nodes, first, last, world_size = map(int, match.groups()[:6])
            yield Told(
                host, node_id, round_, group_rank, nodes, first, last, world_size,
                match[7], int(match[8]),
            )  # fmt: skip


def announced(events: Iterable[Event]) -> Iterator[Record]:
    """Find in the history of the server what it announced and settled.

    Raises:
        ValueError: a relevant event cannot be read; its fields must have changed.
    """
    for event in events:
        run = event.run or ""
        match kept_history.read(event.name, event.fields):
            case kept_history.RoundCompleted() as round_:
                yield _announced(run, round_)
            case kept_history.RoundSettled() as settled:
                yield Settled(run, settled.round, settled.cause, settled.restarts)
            case RunBeganKept():
                yield RunBegan(run)
            case kept_history.RunEnded() as ended:
                yield RunEnded(run, ended.result, ended.reason)
            case None if event.name in _READ:
                raise ValueError(f"{event.name} cannot be read: {event.text!r}")


def _announced(run: str, round_: kept_history.RoundCompleted) -> Announced:
    places = tuple(
        Place(p.node_id, p.rank_first, p.rank_first + p.local_world_size - 1)
        for p in round_.participants
    )
    master = f"{round_.master_addr}:{round_.master_port}"
    return Announced(run, round_.round, places, round_.world_size, master)


def lost_nodes(events: Iterable[Event]) -> frozenset[str]:
    """Return the ids of all nodes that the server has given up."""
    return frozenset(node_of(event) or "" for event in events if event.name == "NodeLost")

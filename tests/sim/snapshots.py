"""Snapshots of a job's state in a simulation: saved now and then, in slots that outlive workers.

The real content of a slot is kept here beside its mark, so that an observer sees whether loaded
parts fit together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from rdzv.agent.core import events
from rdzv.core.model import Assignment, Snapshot, SnapshotMark
from rdzv.core.snapshots import CopyCarrier, CopySource, MissingCopies
from rdzv.structs import replace, struct

if TYPE_CHECKING:
    from tests.sim.agents import Runner, Workers

SLOTS = 2


@struct(frozen=True)
class Saved:
    """The content of a slot."""

    mark: SnapshotMark
    shard: int
    workers: Workers
    """The round that has really sealed the step."""
    copy: Snapshot | None = None
    """What was asked for, if it is a copy of another node's."""


class Slots:
    """The slots of one job on one node."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.held: dict[int, list[Saved | None]] = {}
        """By LOCAL_RANK."""
        self.watermark: SnapshotMark | None = None
        self.given_up: SnapshotMark | None = None
        self.copies: tuple[Saved, ...] = ()
        """What is kept of other nodes' snapshots."""
        self.missing: MissingCopies | None = None
        self._fetches = 0
        self._fetching: SnapshotMark | None = None
        self._round: Assignment | None = None
        self._lineage = 0

    def begin(self, workers: Workers, assignment: Assignment, base: int) -> None:
        """Save now and then in a round whose workers continue from step `base`."""
        world, part = self._runner.world, self._runner.part
        every_ms = world.swarm.snapshot_every_ms
        if not every_ms:
            return
        self._round = assignment
        self._lineage = world.judge.lineage(workers, carried=assignment.source is not None)
        for local_rank, slots in self.held.items():
            # A repeated step is another one.
            self.held[local_rank] = [
                None if one and one.mark.lineage == self._lineage and one.mark.step > base else one
                for one in slots
            ]
        self.given_up = None
        if assignment.source is not None:
            self._drop_copies_after(base)
        self._tell()
        shards = self._shards()
        ranks = range(part.job.local_world_size) if shards > 1 else range(1)
        for number in range(1, world.steps_sealed(workers) + 1):
            for local_rank in ranks:
                in_ms = number * every_ms + world.random.choice((0, 1, every_ms // 2))
                save = partial(self._save, workers, local_rank, base + number)
                world.agenda.after(in_ms, save)

    def fetch(self, mark: SnapshotMark, sources: tuple[CopySource, ...]) -> None:
        """Begin to fetch copies instead of others; that takes a while, and may fail."""
        world = self._runner.world
        self._fetches += 1
        self._fetching = mark
        in_ms = world.random.choice((0, 5, 300, 3_000))
        world.agenda.after(in_ms, partial(self._fetched, self._fetches, mark, sources))

    def _fetched(self, number: int, mark: SnapshotMark, sources: tuple[CopySource, ...]) -> None:
        world = self._runner.world
        if number != self._fetches:
            return
        found = [
            replace(there, copy=one)
            for source in sources
            for one in source.snapshots
            for there in self._held_by(source.node_id)
            if (there.mark, there.shard) == (one.mark, one.shard)
        ]
        wanted = sum(len(source.snapshots) for source in sources)
        if len(found) < wanted or world.happens("copies fail"):
            world.count("copies failed")
            self.missing = MissingCopies(mark, "it is not there any more")
        else:
            world.count("copies kept")
            self.copies, self.missing = tuple(found), None
        self._tell()

    def _drop_copies_after(self, step: int) -> None:
        self.copies = tuple(one for one in self.copies if one.mark.step <= step)
        if self._fetching is not None and self._fetching.step > step:
            self._fetches += 1
        self.missing = None

    def _held_by(self, node_id: str) -> Iterator[Saved]:
        for agent in self._runner.world.agents:
            if agent.name == node_id and self._runner.part.rdzv_id in agent.parts:
                yield from agent.parts[self._runner.part.rdzv_id].runner.slots.own()

    def own(self) -> Iterator[Saved]:
        """Yield what workers of this node have saved."""
        for slots in self.held.values():
            yield from (one for one in slots if one is not None)

    def all(self) -> Iterator[Saved]:
        """Yield all that is held, copies as well."""
        yield from self.own()
        yield from self.copies

    def _shards(self) -> int:
        line, replicas = self._round, self._runner.world.swarm.replicas
        assert line is not None
        if not replicas:
            return 1
        return line.world_size // replicas if line.world_size % replicas == 0 else line.world_size

    def _save(self, workers: Workers, local_rank: int, step: int) -> None:
        """Begin to save; until the end, the slot holds nothing."""
        world = self._runner.world
        if not self._runner.trains(workers, local_rank):
            return
        slots = self.held.setdefault(local_rank, [None] * SLOTS)
        number = self._free(slots)
        if number is None:
            world.count("snapshot skipped")
            return
        slots[number] = None
        self._tell()
        in_ms = world.random.choice((0, 5, 300))
        world.agenda.after(in_ms, partial(self._saved, workers, local_rank, step, number))

    def _saved(self, workers: Workers, local_rank: int, step: int, number: int) -> None:
        world, line = self._runner.world, self._round
        if not self._runner.trains(workers, local_rank) or line is None:
            return
        shards = self._shards()
        mark = SnapshotMark(self._lineage, step, str(line.round), shards)
        shard = (line.rank_first + local_rank) % shards
        damaged = world.happens("slot is damaged")
        self.held[local_rank][number] = None if damaged else Saved(mark, shard, workers)
        world.count("snapshot saved")
        self._tell()

    def _free(self, slots: list[Saved | None]) -> int | None:
        """Return the slot that may be overwritten; None if neither may."""
        for number, one in enumerate(slots):
            if one is None:
                return number
        ours = [n for n, one in enumerate(slots) if one and one.mark.lineage == self._lineage]
        if not ours:
            pinned = [n for n, one in enumerate(slots) if one and one.mark == self.watermark]
            return 1 - pinned[0] if pinned else 0
        kept = max(ours, key=lambda n: slots[n].mark)  # type: ignore[union-attr]
        newest = slots[kept]
        assert newest is not None
        mark = self.watermark
        known = mark is not None and mark.lineage == self._lineage and newest.mark.step <= mark.step
        if known:
            return 1 - kept
        return kept if self.given_up is not None and newest.mark <= self.given_up else None

    def _tell(self) -> None:
        world = self._runner.world
        held = tuple(
            Snapshot(local_rank, one.mark, one.shard, 1_000, "digest")
            for local_rank, slots in sorted(self.held.items())
            for one in slots
            if one is not None
        )
        held += tuple(one.copy for one in self.copies if one.copy is not None)
        if held and world.happens("wrong snapshots"):
            world.judge.honest_of_snapshots = False
            one, step = held[-1], world.random.choice((0, 1, 7, 1 << 53))
            held = (*held[:-1], replace(one, mark=replace(one.mark, step=step)))
        world.judge.claims(self._runner.part.rdzv_id, held)
        carrier = CopyCarrier(40_000, "secret") if world.swarm.snapshot_copies else None
        self._runner.tell(events.SnapshotsChanged(held, carrier, self.missing))

"""Workers that park between rounds, in a simulation: at once, late or never; some die of it.

A worker with the library parks when its round ends, or by itself when a collective fails in it (a
*suspect*). This module keeps the true state of each; its node's claims may differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rdzv.agent.core import events
from rdzv.agent.core.machine import resume_ms
from rdzv.agent.core.standbys import HOT
from rdzv.core.model import Assignment, KeptWorker
from rdzv.structs import replace, struct

if TYPE_CHECKING:
    from tests.sim.agents import Runner, Workers


@struct(frozen=True)
class Hot:
    """What a standby, which was started without a round, has in memory."""

    script: str
    since_ms: int


@struct(frozen=True)
class Parked:
    """The true state of a parked worker."""

    workers: Workers
    """The round that it took part in; `STANDBY` is the number of none."""
    pid: int
    step: int | None
    torn: bool
    shard: int = 0
    shards: int = 1
    """Its state is part `shard` of this many; 1 if the state is not sharded."""
    oldest_step: int | None = None
    hot: Hot | None = None
    """Of a standby alone."""

    @property
    def sealed(self) -> int:
        return self.step or 0

    def holds(self, step: int) -> bool:
        """Return whether it can continue from a step, if its state is sharded."""
        return not self.torn and (self.oldest_step or 0) <= step <= self.sealed


class Parking:
    """The workers of one job on one node that can park, and the parked ones."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        part, world = runner.part, runner.world
        chance = Random(f"{world.seed}, {part.node_id} and {part.rdzv_id} with the library")
        ranks = range(part.job.local_world_size) if part.job.keep_timeout_ms else ()
        share = 1.0 if world.swarm.standby == HOT else 0.9
        self.able = frozenset(rank for rank in ranks if chance.random() < share)
        """LOCAL_RANKs of workers that say hello."""
        self.pids: dict[int, int] = {}
        self.parked: dict[int, Parked] = {}
        self.suspects: set[int] = set()
        """LOCAL_RANKs of workers that have parked by themselves, in a round that may still run."""
        self.unhealed: set[int] = set()
        """LOCAL_RANKs of new workers that have not received the source's state yet."""
        self._ending: set[int] | None = None
        """Process ids of those that were told to end; None: nobody was."""
        self.base = 0
        """How many steps each worker had sealed when the round began."""
        self._rank_first = 0
        self._world_size = 1

    # -------------------------------------------------------------- a round begins

    def go(self, assignment: Assignment, *, hot: bool) -> None:
        """Let the kept workers, or the standbys, take part; the other parked ones end before."""
        world, size = self._runner.world, self._runner.part.job.local_world_size
        among = range(size) if hot else assignment.kept
        kept = {rank: self.parked[rank] for rank in among if rank in self.parked}
        if self._ending is not None:
            self._ended(self._ending)
        world.counts["workers hot" if hot else "workers kept"] += len(kept)
        self.pids = {
            rank: kept[rank].pid if rank in kept else world.new_pid(rank) for rank in range(size)
        }
        self.parked, self.suspects, self.unhealed = {}, set(), set()
        self.base = assignment.resume_step or 0
        if assignment.snapshot is not None and assignment.snapshot_loads:
            self.base = assignment.snapshot.step
        self._rank_first, self._world_size = assignment.rank_first, assignment.world_size
        for rank in () if hot else kept:
            if world.happens("goes on never"):
                # It is then a suspect, and may be the only one.
                in_ms = resume_ms(self._runner.part.job) - 1
                world.agenda.after(in_ms, partial(self._blame, self._runner.workers))
            else:
                in_ms = world.random.choice((5, 200, 5_000))
                resumed = events.WorkerResumed(assignment.round, rank)
                world.agenda.after(in_ms, partial(self._runner.tell, resumed))
        if self._runner.part.job.standby == HOT:
            self._note_starts(assignment, kept, "hot" if hot else "kept")

    def _note_starts(self, assignment: Assignment, kept: Iterable[int], how: str) -> None:
        """Say how each worker was started, and, later, that a new one has its state."""
        world, workers = self._runner.world, self._runner.workers
        for rank, pid in self.pids.items():
            said = how if rank in kept else "cold"
            self._runner.tell(events.WorkerStarted(assignment.round, rank, pid, said))
            if said != "kept":
                if assignment.source is not None:
                    self.unhealed.add(rank)
                in_ms = world.random.choice((5, 200, 5_000))
                world.agenda.after(in_ms, partial(self._heal, workers, rank))

    def _heal(self, workers: Workers | None, local_rank: int) -> None:
        if workers is not None and self._runner.trains(workers, local_rank, healed=False):
            self.unhealed.discard(local_rank)
            self._runner.tell(events.WorkerResumed(workers[2], local_rank))

    def _blame(self, workers: Workers | None) -> None:
        if self._runner.workers == workers:
            self._runner.world.blame()

    def suspect(self, workers: Workers, among: Iterable[int]) -> bool:
        """Let a collective fail in a worker, which parks; return whether any can."""
        able = sorted(self.able.intersection(among) - self.suspects)
        world = self._runner.world
        if not able or world.random.random() < 0.2:
            return False
        local_rank = world.random.choice(able)
        self.suspects.add(local_rank)
        world.count("worker suspected")
        pid = self.pids[local_rank]
        self._runner.tell(
            events.WorkerSuspected(workers[2], local_rank, pid, "connection closed", "", age_ms=0)
        )
        return True

    # -------------------------------------------------------------- a round ends

    def park(self, workers: Workers, among: Iterable[int]) -> dict[int, Parked]:
        """Return those workers that park in time."""
        world = self._runner.world
        parked = {}
        for local_rank in sorted(self.able.intersection(among)):
            if local_rank in self.suspects or not world.happens("parks never"):
                step = world.steps_sealed(workers) + self.base
                step -= world.random.choice((0, 0, 1)) if step > self.base else 0
                torn = world.happens("torn")
                if local_rank in self.unhealed:
                    # It has what it was started with, or part of what it is sent.
                    torn = torn or bool(world.swarm.replicas) or world.random.random() < 0.5
                    step = 0
                one = Parked(workers, self.pids[local_rank], step or None, torn)
                parked[local_rank] = self._sharded(one, self._rank_first + local_rank)
        return parked

    def _sharded(self, one: Parked, rank: int) -> Parked:
        """Record which part of the state a worker has, if its model is sharded."""
        world, swarm = self._runner.world, self._runner.world.swarm
        if not swarm.replicas:
            return one
        shards = self._world_size
        if shards % swarm.replicas == 0:
            shards //= swarm.replicas
        if shards == 1:
            return one
        # A worker touched since then has what it held before; nothing, if it held nothing.
        touched = world.random.random() < 0.3
        older = swarm.holds_last and not touched and one.sealed > self.base
        return replace(
            one,
            torn=one.torn or (touched and not swarm.holds_last),
            shard=rank % shards,
            shards=shards,
            oldest_step=one.sealed - 1 if older else one.step,
        )

    def claims(self) -> tuple[KeptWorker, ...]:
        """Return the claims about the workers that have just parked; some die of it."""
        world = self._runner.world
        world.counts["workers parked"] += len(self.parked)
        claims = []
        for local_rank, one in self.parked.items():
            step, torn, shard, oldest_step = one.step, one.torn, one.shard, one.oldest_step
            if world.happens("wrong claims"):
                world.judge.honest = False
                step = world.random.choice((None, 0, one.sealed + 1, one.sealed + 7, 1 << 53))
                torn = not torn
                if one.shards > 1:
                    shard, oldest_step = world.random.randrange(one.shards), None
            claims.append(
                KeptWorker(local_rank, step, torn, shard, one.shards, oldest_step, pid=one.pid)
            )
            self.perhaps_dies(local_rank, one.pid)
        return tuple(claims)

    def waiting(self) -> tuple[KeptWorker, ...]:
        """Describe those that are parked since an earlier round, for want of a start of this."""
        return tuple(
            KeptWorker(n, p.step, p.torn, p.shard, p.shards, p.oldest_step, pid=p.pid)
            for n, p in self.parked.items()
            if p.hot is None and p.pid not in (self._ending or ())
        )

    def perhaps_dies(self, local_rank: int, pid: int) -> None:
        """End a parked worker soon, in some histories."""
        world = self._runner.world
        if world.happens("dies parked"):
            in_ms = world.random.choice((0, 5, 500))
            world.agenda.after(in_ms, partial(self._die, local_rank, pid))

    def trouble_seating(self) -> None:
        """End a standby of which its agent knows nothing yet, or its node, as it gets its seat."""
        world, agent = self._runner.world, self._runner.part.agent
        if self.parked and world.happens("standby dies as it is seated"):
            local_rank = world.random.choice(sorted(self.parked))
            self._die(local_rank, self.parked[local_rank].pid)
        if world.happens("node dies as it is seated"):
            silent, in_ms = world.random.random() < 0.5, world.random.choice((0, 5, 200))
            world.agenda.after(in_ms, partial(agent.die, silent=silent))
            world.agenda.after(in_ms + 3_000, partial(world.start_node, agent.name))

    def _die(self, local_rank: int, pid: int) -> None:
        one = self.parked.get(local_rank)
        if one is not None and one.pid == pid:
            del self.parked[local_rank]
            self._runner.world.count("died parked")
            self._runner.tell(events.KeptExited(local_rank, pid))
            self._runner.world.buried(self._runner.part.agent)

    def end(self, grace_ms: int) -> None:
        """End all that are parked, and the standbys that are starting."""
        world = self._runner.world
        here = (*self.parked.values(), *self._runner.standbys.starting.values())
        self._ending = pids = {one.pid for one in here}
        in_ms = world.random.choice((0, 50, grace_ms))
        world.agenda.after(in_ms, lambda: self._ended(pids) if pids is self._ending else None)

    def end_at_once(self) -> None:
        """Let nothing be left of those that were told to end."""
        if self._ending is not None:
            self._ended(self._ending)

    def _ended(self, pids: set[int]) -> None:
        self._ending = None
        self.parked = {rank: one for rank, one in self.parked.items() if one.pid not in pids}
        self._runner.standbys.killed(pids)
        self._runner.tell(events.KeptGone())
        self._runner.world.buried(self._runner.part.agent)

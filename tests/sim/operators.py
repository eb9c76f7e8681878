"""Operators' requests to a server: submitting, scaling, restarting, stopping, cordoning.

Each request goes to the leading server, as from `rdzvctl`; a failed request is not repeated, except
submissions. Once nothing new goes wrong, jobs get back the bounds that they were launched with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from rdzv.core.commands import Restart, Scale, Stop, Submit
from rdzv.core.fleet.job_queue import Host, demand
from rdzv.errors import InvalidRequestError, RendezvousError
from rdzv.server.driver import Driver
from tests.sim.checkers import fits
from tests.sim.daemons import Daemon, Held

if TYPE_CHECKING:
    from rdzv.core.model import Membership, State
    from tests.sim.cluster import Server
    from tests.sim.world import World

OPERATOR = "an operator wants it"
AGAIN_MS = 3_000
"""The delay before a failed submission is repeated."""
SOON_MS = 60_000
"""A quarantine that ends this soon returns its node to a job while all should be calm."""


class Operators:
    """All users of `rdzvctl`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cordoned: set[str] = set()
        """The nodes on which a server has promised to place nothing more."""
        self._lifting: Counter[str] = Counter()
        """How many requests to lift cordons and drains of a node are unanswered."""
        self.refused: set[str] = set()
        """Jobs that no node could ever take, as a server said when all was well."""
        self._runs = 0

    # -------------------------------------------------------------- requests

    def _ask(
        self,
        what: str,
        request: Callable[[Driver], Awaitable[Any]],
        done: Callable[[], object] = lambda: None,
        failed: Callable[[RendezvousError | None], object] = lambda error: None,
        of: str = "",
    ) -> None:
        """Send a request to the leader; its answer arrives unless the leader dies first."""
        world, leader = self.world, self.world.leader
        if leader is None or leader.process.paused:
            failed(None)
            return

        async def ask() -> None:
            assert leader is not None
            try:
                await request(leader.driver)
            except RendezvousError as error:
                world.count(f"operator: {what} refused: {error.code}")
                failed(error)
            else:
                world.count(f"operator: {what}")
                done()

        world.note(f"an operator asks: {what} {of}".rstrip())
        leader.process.enter(lambda: leader.process.create_task(ask()))

    def _job(self, chance: Random) -> Membership | None:
        stored = self.world.judge.stored
        names = [name for name in self.world.swarm.jobs if name in stored]
        return stored[chance.choice(names)] if names else None

    def scales(self, chance: Random) -> None:
        """Change a job's bounds while it runs."""
        if (job := self._job(chance)) is not None:
            least = chance.randint(1, 3)
            most = least + chance.randint(0, 2)
            self._scale(job, least, most)

    def _scale(self, job: Membership, least: int, most: int) -> None:
        command = Scale(job.run, least, most, OPERATOR)
        self._ask(
            f"scale {least}:{most}", lambda driver: driver.operations.obey(job.rdzv_id, command)
        )

    def restarts(self, chance: Random) -> None:
        if (job := self._job(chance)) is not None and job.round is not None:
            command = Restart(job.run, job.round.number, OPERATOR)
            self._ask("restart", lambda driver: driver.operations.obey(job.rdzv_id, command))

    def stops(self, chance: Random) -> None:
        if (job := self._job(chance)) is not None:
            command = Stop(job.run, OPERATOR)
            self._ask("stop", lambda driver: driver.operations.obey(job.rdzv_id, command))

    def cordons(self, chance: Random) -> None:
        name = chance.choice(list(self.world.specs))
        self._ask(
            "cordon",
            lambda driver: driver.fleet.cordon(name, "it is slow"),
            done=partial(self._promised, name),
            of=name,
        )

    def uncordons(self, chance: Random) -> None:
        name = chance.choice(list(self.world.specs))
        self._lift("uncordon", name, lambda driver: driver.fleet.uncordon(name))

    def _promised(self, name: str) -> None:
        """Record a server's promise, unless the contrary was requested meanwhile."""
        if not self._lifting[name]:
            self.cordoned.add(name)

    def _lift(self, what: str, name: str, request: Callable[[Driver], Awaitable[Any]]) -> None:
        """Request that a node may be used again; even without an answer, it may be."""
        self.cordoned.discard(name)
        self._lifting[name] += 1

        def answered(_error: RendezvousError | None = None) -> None:
            self._lifting[name] -= 1

        self._ask(what, request, done=answered, failed=answered, of=name)

    def drains(self, chance: Random) -> None:
        """Empty a node; nothing is placed on it until the drain is lifted."""
        name = chance.choice(list(self.world.specs))
        deadline_ms = chance.choice((0, 100, 2_000, 20_000, 300_000))
        self._ask(
            "drain",
            lambda driver: driver.fleet.drain(name, deadline_ms, "by ada", force=True),
            done=partial(self._promised, name),
            of=name,
        )

    def undrains(self, chance: Random) -> None:
        self._undrain(chance.choice(list(self.world.specs)))

    def _undrain(self, name: str) -> None:
        self._lift("undrain", name, lambda driver: driver.fleet.undrain(name))

    def preempts(self, chance: Random) -> None:
        """Notify a node that it is about to be preempted, which soon happens."""
        agents = [agent for agent in self.world.agents if agent.alive]
        if not agents:
            return
        agent, left_ms = chance.choice(agents), chance.choice((500, 5_000, 30_000))
        agent.awake(partial(agent.preempt, left_ms))
        self.world.agenda.after(left_ms + 1_000, agent.die)
        start = partial(self.world.start_node, agent.name)
        self.world.agenda.after(left_ms + chance.choice((2_000, 20_000)), start)

    def submits(self, chance: Random) -> None:
        """Submit a job anew; this is refused if a run of it has not ended."""
        if specs := self.world.swarm.specs:
            self._submit(chance.choice(list(specs)), self._new_run(), insist=False)

    def submit(self, rdzv_id: str) -> None:
        """Submit a job, repeatedly until that succeeds."""
        self._submit(rdzv_id, self._new_run(), insist=True)

    def _new_run(self) -> str:
        self._runs += 1
        return f"submitted-{self._runs}"

    def _submit(self, rdzv_id: str, run: str, *, insist: bool) -> None:
        world = self.world
        command = Submit(run, world.swarm.jobs[rdzv_id], world.swarm.specs[rdzv_id], "somebody")

        def failed(error: RendezvousError | None) -> None:
            if world.calm and isinstance(error, InvalidRequestError):
                self.refused.add(rdzv_id)
            elif insist and (error is None or error.code != "JobExistsError"):
                again = partial(self._submit, rdzv_id, run, insist=True)
                world.agenda.after(AGAIN_MS, again)

        request: Callable[[Driver], Awaitable[Any]] = lambda driver: driver.operations.submit_job(  # noqa: E731
            rdzv_id, command
        )
        self._ask(f"submit {rdzv_id}", request, failed=failed)

    # -------------------------------------------------------------- the end

    def heal(self) -> None:
        """Ensure that every job exists, with the bounds that it was launched with."""
        judge, swarm = self.world.judge, self.world.swarm
        for rdzv_id in swarm.jobs:
            job = judge.stored.get(rdzv_id)
            if job is None and rdzv_id in swarm.specs and rdzv_id not in self.refused:
                self._submit(rdzv_id, self._new_run(), insist=False)
            if job is not None and job.ended is None:
                bounds = self._launched(job)
                if job.scaled not in (None, bounds):
                    self._scale(job, *bounds)
        for name in self._drained():
            self._undrain(name)
        for agent in list(self.world.agents):
            if agent.alive and agent.drain.wished is not None:
                agent.die()
        self.world.agenda.after(AGAIN_MS, self.heal)

    def _drained(self) -> list[str]:
        """Return the nodes that an operator wants to be empty."""
        leader = self.world.leader
        drains = leader.driver.fleet.drains() if leader is not None else {}
        return [name for name, drain in drains.items() if drain.by_operator]

    def ills(self) -> Iterable[str]:
        """Yield everything that is wrong with submitted jobs."""
        world, leader = self.world, self.world.leader
        for job in world.judge.stored.values():
            if job.ended is None and job.scaled not in (None, self._launched(job)):
                yield f"{job.rdzv_id} still has the bounds {job.scaled}"
        for name in self._drained():
            # A paused server lifts it late, and only then do its jobs return to it.
            yield f"{name} is still drained"
        if leader is None or not world.swarm.specs:
            return
        if leader.driver.placer.settled_at_ms > leader.process.now_ms():
            yield "the server still waits for nodes that are on their way back"
        for record in leader.driver.leases.records.values():
            # A job that could have it blocks those behind it in the queue.
            if record.stream is None:
                yield f"the server still waits for {record.node_id}"
        for node_id, quarantined in leader.driver.quarantine.nodes.items():
            if quarantined.until_ms - leader.process.now_ms() <= SOON_MS:
                yield f"{node_id} is quarantined for a moment yet"
        for agent in world.agents:
            for held in agent.held if isinstance(agent, Daemon) else ():
                rdzv_id, run = held.placed.key
                if self._waits_for_room(held):
                    continue
                job, state = world.judge.stored.get(rdzv_id), leader.driver.jobs.peek(rdzv_id)
                if held.part is not None and job is not None and held.part.state.run == job.run:
                    # It continued in another run that was adopted after the store's loss.
                    run = job.run
                if job is None or job.run != run or job.ended is not None:
                    yield f"{agent.name} still holds {held.placed.key}, which is over"
                # A node that was given up, and came back by itself, takes part as if by its own
                # wish.
                elif state is not None and agent.name not in _in(state):
                    yield f"{agent.name} still holds {held.placed.key}, and is not in it"

    def _launched(self, job: Membership) -> tuple[int, int]:
        settings = self.world.swarm.jobs[job.rdzv_id]
        return settings.min_nodes, settings.max_nodes

    def _waits_for_room(self, held: Held) -> bool:
        """Return whether a node was given more than it has, which requires a loss of the store.

        Jobs for which it has no room wait there until something else has ended.
        """
        queued = held.ready and not held.starting and not held.given_back
        return queued and self.world.judge.era > 0

    def why_waits(self, job: Membership) -> str:
        """Return why a submitted job rightly has no round; empty if it should have one."""
        world = self.world
        leader = world.leader
        state = leader.driver.jobs.peek(job.rdzv_id) if leader is not None else None
        wait = leader.driver.placer.queue_wait_of(job.rdzv_id) if leader is not None else None
        held = [h for a in world.agents if isinstance(a, Daemon) for h in a.held]
        mine = [h for h in held if h.placed.key == (job.rdzv_id, job.run)]
        without_room = [h for h in mine if self._waits_for_room(h)]
        # The others may begin without them.
        if without_room and len(mine) - len(without_room) < job.min_nodes:
            return "a node that is to run it has no room yet"
        if any(h.part is not None and h.part.runner.workers is not None for h in mine):
            # They have not stopped yet.
            return ""
        if state is not None and job.submission is None:
            # It was adopted after the store's loss: no node is placed on it any more.
            few = not state.seats and len(state.waiting) < job.min_nodes
            return "nobody has submitted it" if few else ""
        wanted = demand(state, 0) if state is not None else None
        if leader is None or wait is None or wanted is None or not wanted.missing:
            return ""
        if not wait.jobs_before:
            free = self._free_for(job, leader) - len(wanted.here)
            return "" if free >= wanted.missing else wait.reason
        return wait.reason

    def _free_for(self, job: Membership, leader: Server) -> int:
        """Count the nodes that really have room for a job."""
        assert job.submission is not None
        spec = job.submission.spec
        declined = {one.node_id for one in job.submission.declined}
        # A placement may be stored without any answer.
        cordoned = {
            *leader.driver.fleet.ordered,
            *leader.driver.quarantine.nodes,
        }
        free = 0
        for agent in self.world.agents:
            if not isinstance(agent, Daemon) or not agent.greeted or agent.name in cordoned:
                continue
            taken = {held.placed.key: held.gpus for held in agent.held}
            host = Host(agent.name, agent.resources, taken)
            free += agent.name not in declined and fits(spec, host, now=True)
        return free


def _in(state: State) -> set[str]:
    return {*state.placed, *state.seats, *state.waiting, *state.stuck}

"""What an observer of a history knows of standbys, and the guarantees about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rdzv.agent.core.commands import SayJoin
from rdzv.agent.core.model import Phase
from rdzv.core.model import NO_STANDBY, Assignment, Membership, Round, RoundEnd, StandbyState
from rdzv.messages import WorkersStarted

if TYPE_CHECKING:
    from tests.sim.agents import Part, Workers
    from tests.sim.world import World


class StandbyJudge:
    """The judge of standbys."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._shown: dict[Workers, dict[str, str]] = defaultdict(dict)
        """By round and node: the script whose workers have all entered their function."""
        self._asked_new: set[Workers] = set()
        """Rounds whose end asked for new processes."""

    def note_end(self, workers: Workers, end: RoundEnd) -> None:
        """Note that a round has ended."""
        if not end.keep:
            self._asked_new.add(workers)

    def _renewed_ms(self, workers: Workers) -> int:
        """Return since when all processes that this round may have are new."""
        judge, renewed_ms = self._world.judge, 0
        for rdzv_id, run, ended in () if judge.era else self._asked_new:
            later = [n for job, of, n in judge.rounds if (job, of) == (rdzv_id, run) and n > ended]
            first = (rdzv_id, run, min(later, default=0))
            if (rdzv_id, run) == workers[:2] and later and first[2] <= workers[2]:
                renewed_ms = max(renewed_ms, judge.known_ms[first])
        return renewed_ms

    def shows(self, part: Part, said: WorkersStarted) -> None:
        """Note that all workers of a node have entered their function under @elastic."""
        self._shown[part.rdzv_id, said.run, said.round].setdefault(part.node_id, said.script)

    def check_start(self, part: Part, script: str) -> None:
        """No script runs without ranks unless all workers of some round have shown that it may."""
        judge = self._world.judge
        if part.runner.workers is not None:
            judge.fail(f"standby: {part.node_id} starts some beside {part.runner.workers}")
        for workers, said in self._shown.items():
            if workers[:2] == (part.rdzv_id, part.state.run):
                names = [p.node_id for p in judge.rounds[workers].participants]
                if all(said.get(name) == script for name in names):
                    return
        if not judge.era:
            judge.fail(f"standby: {part.node_id} starts {script}, which nobody has shown to park")

    def check_offer(self, part: Part, say: SayJoin) -> None:
        """A node offers none that it knows to have ended, and none as kept."""
        judge, parked = self._world.judge, part.runner.parking.parked
        for one in say.kept:
            there = parked.get(one.local_rank)
            if there is not None and there.pid == one.pid and there.hot is not None:
                judge.fail(f"standby: {part.node_id} offers {one} as kept, which was in no round")
        dead = {one.pid for one in part.state.kept} & part.dead
        if say.standby.state is StandbyState.READY and dead:
            judge.fail(f"standby: {part.node_id} is ready, and knows that {dead} have ended")

    def check_seated(self, part: Part, workers: Workers, assignment: Assignment) -> None:
        """Standbys are of this run, no older than a restart, and heal as new workers do."""
        judge, name = self._world.judge, part.node_id
        renewed_ms = self._renewed_ms(workers)
        for local_rank, parked in part.runner.parking.parked.items():
            if parked.hot is None or (parked.workers[1] != workers[1] and not judge.era):
                judge.fail(f"standby: {name} seats {parked}, which is none")
            elif parked.hot.since_ms < renewed_ms:
                judge.fail(f"standby: {name} seats one from before an operator's restart")
            if assignment.source == assignment.rank_first + local_rank:
                judge.fail(f"standby: {name} heals others from {parked}")

    def missing(self, membership: Membership, round_: Round) -> Iterable[str]:
        """Yield the waiting nodes that should have a standby, and have none, nor say why."""
        script = self._script(membership, round_)
        for agent in self._world.agents if script else ():
            part = agent.parts.get(membership.rdzv_id)
            if part is None or not agent.greeted or part.state.phase is not Phase.JOINING:
                continue
            standby, ends = part.state.standby, part.state.ending_kept or part.state.is_ending
            again = "had parked" in standby.why
            if not ends and part.state.run == membership.run and (again or standby == NO_STANDBY):
                yield f"{agent.name} has no standby of {script}: {standby.why}"

    def _script(self, membership: Membership, round_: Round) -> str:
        """Return the script that all nodes of a running round would still say that they have."""
        said = set()
        for participant in round_.participants:
            of = [a.parts.get(membership.rdzv_id) for a in self._world.agents if a.greeted]
            mine = [p.said for p in of if p is not None and p.node_id == participant.node_id]
            one = mine[0] if len(mine) == 1 else None
            said.add(one.script if one is not None and one.round == round_.number else "")
        return said.pop() if len(said) == 1 else ""

    def amiss(self, rdzv_id: str) -> set[str]:
        """Return where a server and its nodes disagree on who has a standby, or it is not so."""
        leader, world = self._world.leader, self._world
        state = leader.driver.jobs.peek(rdzv_id) if leader is not None else None
        if state is None or state.membership.ended is not None:
            return set()
        amiss, round_ = set(), state.membership.live_round
        script, renewed_ms = "", 0
        if round_ is not None:
            script = self._script(state.membership, round_)
            renewed_ms = self._renewed_ms((rdzv_id, state.membership.run, round_.number))
        for node_id, waiting in state.waiting.items():
            mine = [a for a in world.agents if a.name == node_id and rdzv_id in a.parts]
            if len(mine) != 1 or not mine[0].greeted:
                continue
            part = mine[0].parts[rdzv_id]
            own = NO_STANDBY if part.state.ending_kept else part.state.standby
            world.count(f"waits, with a standby that is {own.state}")
            if waiting.standby != own:
                amiss.add(f"{node_id} has {own}, and the server thinks {waiting.standby}")
            parked = part.runner.parking.parked.values()
            hot = [one.hot for one in parked if one.hot is not None]
            if own.state is StandbyState.READY and len(hot) != part.job.local_world_size:
                amiss.add(f"{node_id} is ready, and has {len(hot)} standbys")
            others = {one.script for one in hot} - {script} if script else ()
            if own.state is StandbyState.READY and others:
                amiss.add(f"{node_id} has standbys of {others}, and {script} runs")
            if own.state is StandbyState.READY and any(o.since_ms < renewed_ms for o in hot):
                amiss.add(f"{node_id} has standbys from before an operator's restart")
        return amiss

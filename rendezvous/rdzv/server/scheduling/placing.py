"""Places submitted jobs: gets a plan from `core/fleet/job_queue` and carries it out.

Each placement is a command to the job's rendezvous. This module therefore stores nothing itself,
and a server that takes over continues from the stored jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from rdzv.core.commands import Command, GiveUp, Place, Withdraw
from rdzv.core.fleet import job_queue
from rdzv.core.fleet.node_resources import Drain
from rdzv.core.life.submitted_jobs import awaited
from rdzv.core.model import JobSpec, State
from rdzv.core.reason import ReasonItem
from rdzv.core.words import counted, duration
from rdzv.errors import InvalidRequestError, RendezvousError
from rdzv.runtime.clock import Timer
from rdzv.server.engine.store_access import STORE_RETRY_MS
from rdzv.server.scheduling.fleet import takes_part
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.scheduling")


QUIET_MS = 20
"""The delay between a change and placement, so that changes that arrive together are one."""


class Placer:
    """Places one server's submitted jobs whenever a change may have made that possible."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._clock = driver.clock
        self.settled_at_ms = 0
        """The time until which nodes may still be reconnecting to this server."""
        self.stopped = False
        self._timer = Timer(driver.clock, self._look)
        self._waits: Mapping[str, job_queue.QueuedWait] = {}

    def start(self) -> None:
        self.settled_at_ms = self._clock.now_ms() + self._driver.config.lease.takeover_grace_ms
        self._timer.arm_by(self._clock.now_ms())

    def stop(self) -> None:
        self.stopped = True
        self._timer.cancel()

    def wake(self) -> None:
        """Schedule placement of jobs soon, once for all changes that arrive together."""
        if not self.stopped and (self._driver.fleet.reported or self._waits):
            self._timer.arm_by(self._clock.now_ms() + QUIET_MS)

    def queue_wait_of(self, rdzv_id: str) -> job_queue.QueuedWait | None:
        return self._waits.get(rdzv_id)

    def _look(self, due_ms: int) -> None:
        self._driver.tasks.start(self.place())

    async def place(self) -> None:
        async with self._driver.fleet.placing:
            await self._bar()
            done: list[tuple[str, Command]] = []
            while not self.stopped and await self._resolved() and (commands := self._decide()):
                if commands == done:
                    log.error(
                        "a bug in rdzvd, please report it: placement changes nothing: %s", commands
                    )
                    return
                for rdzv_id, command in commands:
                    try:
                        await self._driver.engine.submit(rdzv_id, command)
                    except RendezvousError as error:
                        log.warning("cannot place job %s now, will retry: %s", rdzv_id, error)
                        self._timer.arm_by(self._clock.now_ms() + STORE_RETRY_MS)
                        return
                done = commands

    async def _bar(self) -> None:
        bar = self._driver.quarantine.bar
        barred = dict(bar.barred)
        for state in self._driver.jobs.states:
            membership = state.membership
            if membership.submission is None or membership.ended or state.barred == barred:
                continue
            try:
                await self._driver.engine.submit(membership.rdzv_id, bar)
            except RendezvousError as error:
                log.warning(
                    "cannot release nodes from job %s now, will retry: %s",
                    membership.rdzv_id,
                    error,
                )
                self._timer.arm_by(self._clock.now_ms() + STORE_RETRY_MS)

    async def _resolved(self) -> bool:
        """Resolve every commit in doubt, because it may have given nodes to a job.

        Return False if one cannot be resolved now; it will be retried.
        """
        for rdzv_id in self._driver.jobs.doubtful:
            try:
                async with self._driver.jobs.claim(rdzv_id):
                    pass
            except RendezvousError as error:
                log.warning(
                    "placing nothing until the last commit of job %s is resolved: %s",
                    rdzv_id,
                    error,
                )
                self._timer.arm_by(self._clock.now_ms() + STORE_RETRY_MS)
                return False
        return True

    def _decide(self) -> list[tuple[str, Command]]:
        now_ms = self._clock.now_ms()
        states = [
            state for state in self._driver.jobs.states if state.membership.submission is not None
        ]
        if not states:
            # No job is waiting for nodes, so there is no need to look at thousands of them.
            self._waits = {}
            return []
        going = self._driver.fleet.drains()
        asked = [job_queue.demand(state, now_ms, going.keys()) for state in states]
        demands = {d.rdzv_id: d for d in asked if d is not None}
        settled = now_ms >= self.settled_at_ms
        decided = job_queue.place_queued_jobs(
            demands.values(), self._driver.fleet.hosts(states), settled=settled
        )
        self._waits = decided.waits
        if demands:
            self._arm(states, now_ms)
        lost = self._vanished(states) if settled else {}
        runs = {state.membership.rdzv_id: state.membership.run for state in states}
        return [*_withdrawn_from(going, states), *_commands(decided, runs, lost)]

    def _arm(self, states: Iterable[State], now_ms: int) -> None:
        due = [job_queue.grows_at_ms(state) for state in states if state.membership.ended is None]
        later = [at_ms for at_ms in (self.settled_at_ms, *due) if at_ms is not None]
        later = [at_ms for at_ms in later if now_ms < at_ms]
        if later:
            self._timer.arm_by(min(later))

    def _vanished(self, states: Iterable[State]) -> dict[str, tuple[str, ...]]:
        records = self._driver.leases.records
        vanished = {
            state.membership.rdzv_id: tuple(n for n in awaited(state) if n not in records)
            for state in states
            if state.membership.ended is None
        }
        return {rdzv_id: node_ids for rdzv_id, node_ids in vanished.items() if node_ids}

    # ---------------------------------------------------------------- what would be placed

    def check_placeable(self, spec: JobSpec) -> None:
        """Refuse a job that no known node could ever run.

        While nodes may still be reconnecting to a server that has just started, every job passes.
        """
        if self._clock.now_ms() < self.settled_at_ms:
            return
        hosts = self._driver.fleet.hosts(self._driver.jobs.states)
        if (miss := job_queue.nearest_miss(spec, hosts)) is not None:
            raise InvalidRequestError(
                f"none of the nodes known here could ever take this job; the best match: {miss}. "
                f"Ask for less, or first start rdzv-agent on a node that has it"
            )

    def short_without(self, node_id: str) -> str:
        """Return which jobs would have too few nodes without this one; empty if there are none."""
        states = [
            state
            for state in self._driver.jobs.states
            if state.membership.ended is None and takes_part(state, node_id)
        ]
        going = {*self._driver.fleet.drains(), node_id}
        return "; ".join(why for state in states if (why := self._short(state, going)))

    def _short(self, state: State, going: set[str]) -> str:
        membership = state.membership
        here = {*state.seats, *state.waiting} - going - state.away.keys()
        lacks = membership.min_nodes - len(here)
        if lacks <= 0:
            return ""
        have = f"{membership.rdzv_id} would have {len(here)} of the {membership.min_nodes} nodes"
        if membership.submission is None:
            within = duration(membership.settings.join_timeout_ms)
            return f"{have} that it needs: it stops, and ends unless others join within {within}"
        free = self._free_for(state, going)
        if free >= lacks:
            return ""
        others = f"and {counted(free, 'other')} free for it"
        return f"{have} that it needs, {others}: it stops until others are free"

    def _free_for(self, state: State, going: set[str]) -> int:
        coming = [n for n in awaited(state) if n not in going]
        states = [s for s in self._driver.jobs.states if s.membership.submission is not None]
        hosts = [
            replace(host, unusable=ReasonItem("", state="drained"))
            if host.node_id in going
            else host
            for host in self._driver.fleet.hosts(states)
        ]
        now_ms = self._clock.now_ms()
        asked = [job_queue.demand(other, now_ms, going) for other in states]
        planned = job_queue.place_queued_jobs([d for d in asked if d is not None], hosts)
        return len(coming) + len(planned.places.get(state.membership.rdzv_id, ()))


def _withdrawn_from(
    going: Mapping[str, Drain], states: Iterable[State]
) -> list[tuple[str, Command]]:
    commands: list[tuple[str, Command]] = []
    for state in states if going else ():
        membership = state.membership
        gone = tuple(n for n in awaited(state) if n in going) if membership.ended is None else ()
        if gone:
            why = "; ".join(dict.fromkeys(f"{n}: {going[n].reason}" for n in gone))
            commands.append((membership.rdzv_id, Withdraw(membership.run, gone, why)))
    return commands


def _commands(
    decided: job_queue.Plan, runs: Mapping[str, str], lost: Mapping[str, Collection[str]]
) -> list[tuple[str, Command]]:
    """Convert a plan to commands. Those that free nodes come first, as other jobs wait for them."""
    commands: list[tuple[str, Command]] = []
    for rdzv_id, reason in decided.hopeless.items():
        commands.append((rdzv_id, GiveUp(runs[rdzv_id], reason)))
    for rdzv_id, gone in lost.items():
        reason = "no report since this server took over"
        commands.append((rdzv_id, Withdraw(runs[rdzv_id], tuple(gone), reason)))
    for rdzv_id, node_ids in decided.surplus.items():
        reason = "the job was scaled down"
        commands.append((rdzv_id, Withdraw(runs[rdzv_id], node_ids, reason)))
    for rdzv_id, node_ids in decided.stranded.items():
        reason = str(decided.waits[rdzv_id].reason)
        commands.append((rdzv_id, Withdraw(runs[rdzv_id], node_ids, reason)))
    for rdzv_id, node_ids in decided.places.items():
        commands.append((rdzv_id, Place(runs[rdzv_id], node_ids)))
    return commands

"""Decide, persist, publish: always in this order, and one command at a time for each job.

Commands that arrive for a job during a commit are decided one after another and share the next
commit, so a thousand nodes sending at once cost only a few commits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rdzv.bounds import refusal
from rdzv.core import rendezvous
from rdzv.core.commands import Command, Join, Scale, Submit, Tick
from rdzv.core.invariants import violations
from rdzv.core.model import Settings, State
from rdzv.core.rendezvous import Transition
from rdzv.errors import InvariantError, RendezvousConnectionError, RendezvousError
from rdzv.server.engine.jobs import Asked, Guard, Job, Step
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.jobs")

AT_ONCE = 256
"""The maximum number of commands that are decided together and share a commit."""
AT_ONCE_MS = 100
"""The maximum time spent deciding commands together; no other task runs during this time."""


class Engine:
    """Runs the commands of one server's jobs."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._clock = driver.clock
        self._store = driver.store
        self._waiting: dict[str, deque[Asked]] = {}

    def is_waiting(self, rdzv_id: str) -> bool:
        """Return whether a command is waiting for a job, which then stays in memory."""
        return bool(self._waiting.get(rdzv_id))

    async def submit(self, rdzv_id: str, command: Command, guard: Guard | None = None) -> State:
        """Run one command to completion: decide, persist, publish, in that order.

        Returns the job's state after the command. `guard` checks the state before the command, and
        nothing changes the job in between. If the caller is cancelled, the command still completes.

        Raises:
            RendezvousError: the command was refused and changed nothing. After a
                `RendezvousConnectionError` it may have taken effect, and the caller repeats it.

        """
        self._check_size(command)
        asked = Asked(command, guard)
        self._ask_for(rdzv_id, asked)
        decided = await asked.outcome
        if isinstance(decided, RendezvousError):
            raise decided
        return decided

    def _check_size(self, command: Command) -> None:
        """Refuse a job of more nodes than this server ever holds, which would wait for nothing."""
        match command:
            case (
                Join(settings=Settings(min_nodes=least))
                | Submit(settings=Settings(min_nodes=least))
                | Scale(min_nodes=least)
            ) if least > (most := self._driver.config.limits.nodes):
                reason = f"is above the {most} nodes that this server holds"
                remedy = "lower it, or raise the server's limit `nodes`"
                raise refusal("--nnodes: min_nodes", least, reason, remedy)

    def _ask_for(self, rdzv_id: str, asked: Asked) -> None:
        if (waiting := self._waiting.get(rdzv_id)) is not None:
            waiting.append(asked)
        else:
            self._waiting[rdzv_id] = deque([asked])
            self._driver.tasks.start(self._decide_asked(rdzv_id))

    async def _decide_asked(self, rdzv_id: str) -> None:
        waiting = self._waiting[rdzv_id]
        try:
            while waiting:
                await self._decide_next(rdzv_id, waiting)
                # Yield only once per batch: with thousands of tasks ready, each yield takes a long
                # time.
                await asyncio.sleep(0)
        finally:
            del self._waiting[rdzv_id]
            for asked in waiting:
                asked.outcome.cancel()

    async def _decide_next(self, rdzv_id: str, waiting: deque[Asked]) -> None:
        batch: list[Asked] = []
        try:
            async with self._driver.jobs.claim(rdzv_id) as job:
                until_ms = self._clock.now_ms() + AT_ONCE_MS
                steps: list[Step] = []
                while waiting and len(batch) < AT_ONCE and self._clock.now_ms() < until_ms:
                    batch.append(waiting.popleft())
                    await self._add_step_if_sound(job, batch[-1], steps)
                await self._settle(job, steps)
        except RendezvousError as error:
            # If the job could not be claimed, the batch is empty, so answer the first command in
            # the queue.
            for asked in batch or [waiting.popleft()]:
                if isinstance(error, RendezvousConnectionError) and asked.command != Tick():
                    self._store.waits(rdzv_id, asked.command)
                asked.answer(error)
        finally:
            for asked in batch:
                asked.outcome.cancel()

    async def _add_step_if_sound(self, job: Job, asked: Asked, steps: list[Step]) -> None:
        """Decide one more command; if it would break a guarantee, refuse only this command."""
        try:
            await self._add_step(job, asked, steps)
        except InvariantError as error:
            asked.answer(error)

    async def _add_step(self, job: Job, asked: Asked, steps: list[Step]) -> None:
        """Decide one more command on top of `steps`, which are not stored yet, and append it.

        A refused command is answered at once and adds nothing.

        Raises:
            InvariantError: this command would break a guarantee; the earlier steps are stored.
            RendezvousError: the job cannot be judged or stored; every command in the batch fails.

        """
        state = steps[-1].after if steps else job.state
        command = asked.command
        if isinstance(command, Join):
            command = replace(command, new_run=self._driver.new_uid())
        try:
            if asked.guard is not None:
                asked.guard(state)
            transition = self._decide(state, command)
        except RendezvousError as error:
            asked.answer(error)
            return
        first, rows = await self._driver.quarantine.judge(state, transition)
        job.pending += rows
        if first is not None:
            barred = Step(first, state, self._decide(state, first))
            await self._check(job, barred, steps)
            steps.append(barred)
            state = barred.after
            try:
                transition = self._decide(state, command)
            except RendezvousError as error:
                asked.answer(error)
                return
        step = Step(command, state, transition, asked)
        await self._check(job, step, steps)
        steps.append(step)

    async def steps(
        self, job: Job, choices: Sequence[Callable[[State], Command | None]]
    ) -> list[RendezvousError]:
        """Run several commands in one commit, for a job that the caller has claimed.

        Each choice receives the state after the preceding commands and returns the next command, or
        None for no command. Returns the errors of refused commands.
        """
        steps: list[Step] = []
        decided: list[Asked] = []
        for choose in choices:
            command = choose(steps[-1].after if steps else job.state)
            if command is not None:
                asked = Asked(command)
                decided.append(asked)
                await self._add_step_if_sound(job, asked, steps)
        await self._settle(job, steps)
        outcomes = [asked.outcome.result() for asked in decided]
        return [outcome for outcome in outcomes if isinstance(outcome, RendezvousError)]

    async def _check(self, job: Job, step: Step, decided: list[Step]) -> None:
        """Refuse a step that breaks a guarantee, after storing the steps before it."""
        broken = violations(step.before, step.after)
        if broken:
            earlier, decided[:] = tuple(decided), ()
            await self._settle(job, earlier)
            raise await self._reload_broken(job, step.command, broken)

    async def _settle(self, job: Job, steps: Sequence[Step]) -> None:
        if not steps:
            return
        stored = steps[-1].after.membership is not job.state.membership
        if stored:
            await self._persist(job, steps)
        self.publish(job, steps, stored=stored)

    def _decide(self, state: State, command: Command) -> Transition:
        now_ms = self._driver.loop_watch.listened_until_ms()
        try:
            return rendezvous.step(state, command, now_ms)
        except RendezvousError:
            raise
        except Exception as error:
            # Values are immutable, so a failed step has not changed anything.
            log.exception("job %s: %s failed", state.membership.rdzv_id, command)
            raise _bug(state.membership.rdzv_id, command, f"failed: {error!r}") from error

    async def _reload_broken(self, job: Job, command: Command, broken: list[str]) -> InvariantError:
        what = f"would break {'; '.join(broken)}"
        log.error("job %s: %s %s", job.rdzv_id, command, what)
        await self._driver.jobs.load(job)
        # Retry after a delay; otherwise a tick that breaks a guarantee would loop without pause.
        job.timer.arm(self._driver.jobs.retry_at_ms())
        return _bug(job.rdzv_id, command, what)

    async def _persist(self, job: Job, steps: Sequence[Step]) -> None:
        membership = steps[-1].after.membership
        events = (row for step in steps for row in self._driver.history.rows(step.transition))
        rows = (*job.pending, *events)
        try:
            with self._driver.metrics.committing():
                swapped = self._store.compare_and_swap(job.rdzv_id, membership, job.revision, rows)
                job.revision = await self._driver.jobs.write(job, swapped)
        except RendezvousConnectionError as error:
            if not error.definite:
                job.doubt = tuple(steps)
            for step in steps:
                # Commands without events, such as most ticks, are not reported as waiting.
                if step.events:
                    self._store.waits(job.rdzv_id, step.command)
            raise
        job.pending = ()

    def publish(self, job: Job, steps: Sequence[Step], *, stored: bool) -> None:
        """Apply steps to the job's state in memory, one after another, and announce each of them.

        Never waits. `stored` means that the steps' history was stored with them; otherwise the
        history waits for the next commit.
        """
        for step in steps:
            job.loaded = step.after
            self._store.decided(job.rdzv_id, step.command)
            self._driver.jobs.note_end(job)
            job.timer.arm(step.transition.wake_at_ms)
            rows = self._driver.history.rows(step.transition)
            if not stored:
                self._driver.history.postpone(job, rows)
            self._driver.history.publish(job, rows, step.events)
            now_ms = self._clock.now_ms()
            self._driver.metrics.count_step(step.before, step.after, step.events, now_ms)
            self._driver.publish(job, step)
            if step.asked is not None:
                step.asked.answer(step.after)

    def on_due(self, job: Job, due_ms: int) -> None:
        if self._driver.loop_watch.late(due_ms):
            job.timer.arm_by(self._driver.loop_watch.settled_ms)
        else:
            # No caller waits for the outcome; after an error, the job's timer is rearmed.
            self._ask_for(job.rdzv_id, Asked(Tick()))


def _bug(rdzv_id: str, command: Command, what: str) -> InvariantError:
    return InvariantError(
        f"a bug in rdzvd, please report it: {type(command).__name__} in job {rdzv_id} {what}; "
        "nothing was changed"
    )

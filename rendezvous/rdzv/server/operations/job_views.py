"""Jobs as operators see them: a single job, all jobs, or a job each time it changes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.model import State
from rdzv.core.reason import ReasonItem
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.errors import LimitExceededError, RendezvousConnectionError, UnknownJobError
from rdzv.server.diagnosis.worker_starts import Starts
from rdzv.stores.base import Record
from rdzv.structs import replace
from rdzv.view.answers import JobStatus
from rdzv.view.explain import view

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

WATCHERS = 1_000
"""The number of callers that watch jobs at once. Each costs a message for every change."""


class JobViews:
    """One server's jobs as operators see them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.watching = 0
        """The number of callers that are watching a job."""

    async def status(self, rdzv_id: str) -> JobStatus:
        """Return the view of a job; raises the same errors as `state`."""
        return self.of(await self.state(rdzv_id))

    async def state(self, rdzv_id: str) -> State:
        """Return the state of a known job.

        Raises:
            UnknownJobError: no such job is known.
            RendezvousConnectionError: the job is not stored yet, or the store is unavailable.

        """
        state = await self._driver.jobs.look(rdzv_id)
        if not state.membership.run:
            if self._driver.store.waiting(rdzv_id):
                trouble = self._driver.store.trouble_of(rdzv_id)
                raise RendezvousConnectionError(f"job {rdzv_id} is not stored yet: {trouble}")
            raise UnknownJobError(
                f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
            )
        return state

    def of(self, state: State) -> JobStatus:
        rdzv_id, drains = state.membership.rdzv_id, self._driver.fleet.drains()
        wait = self._driver.placer.queue_wait_of(rdzv_id)
        shown = view(state, self._driver.clock.now_ms(), wait, drains)
        # The view shows the stored state; the reason names commands that are waiting to be stored.
        if state.membership.ended is not None and not self._driver.store.waiting(rdzv_id):
            return shown
        if not (trouble := self._driver.store.trouble_of(rdzv_id)):
            return shown
        items = (ReasonItem(trouble), *shown.reason.items)
        return replace(shown, reason=replace(shown.reason, items=items))

    async def watch(self, rdzv_id: str) -> AsyncGenerator[JobStatus, None]:
        """Yield a job's view now and after each change; a slow reader misses some of the views.

        Raises:
            UnknownJobError: no such job is known.
            LimitExceededError: there are too many watchers.
            RendezvousConnectionError: this server no longer serves.

        """
        if self.watching >= WATCHERS:
            raise LimitExceededError(
                f"{self.watching} callers watch jobs here, which is the limit; try again later"
            )
        self.watching += 1
        try:
            while not self._driver.watchers.closed:
                changed = self._driver.watchers.next_change(rdzv_id)
                yield await self.status(rdzv_id)
                await changed.wait()
            raise RendezvousConnectionError("this server no longer serves; ask again")
        finally:
            self.watching -= 1

    async def list(self) -> tuple[JobStatus, ...]:
        return tuple([view async for view in self.each()])

    async def each(self) -> AsyncGenerator[JobStatus, None]:
        async with contextlib.aclosing(self._driver.jobs.each()) as states:
            async for state in states:
                # A job that was forgotten in the meantime is left out.
                if state.membership.run:
                    yield self.of(state)

    def progress(self, rdzv_id: str) -> tuple[RankProgress, ...]:
        """Return the progress of the workers in a job's live round, in RANK order."""
        state = self._driver.jobs.peek(rdzv_id)
        return (
            self._driver.diagnosis.progress.shown(state, self._driver.clock.now_ms())
            if state is not None
            else ()
        )

    def stragglers(self, rdzv_id: str) -> tuple[Straggler, ...]:
        """Return the stragglers in a job's live round, in RANK order."""
        return self._driver.diagnosis.stragglers.shown(rdzv_id)

    def starts(self, rdzv_id: str) -> Mapping[str, Starts]:
        """Return how the workers of a job's live round were started, by node."""
        state = self._driver.jobs.peek(rdzv_id)
        return self._driver.diagnosis.starts.shown(state) if state is not None else {}

    def snapshots(self, rdzv_id: str) -> SnapshotsKnown:
        """Return what is known about the snapshots of a job's state in its nodes' memory."""
        state = self._driver.jobs.peek(rdzv_id)
        return (
            self._driver.diagnosis.snapshots.shown(state) if state is not None else SnapshotsKnown()
        )

    def hangs(self, rdzv_id: str) -> str:
        """Return a description of a job's currently hanging workers; empty if none hangs."""
        return self._driver.diagnosis.hangs.shown(rdzv_id)

    def noted(self, rdzv_id: str) -> int:
        """Return how many of a job's recorded events were not caused by a step."""
        return self._driver.history.noted(rdzv_id)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest events, oldest first.

        Raises:
            UnknownJobError: no such job is known.

        """
        await self.state(rdzv_id)
        return await self._driver.history.of(rdzv_id, limit)

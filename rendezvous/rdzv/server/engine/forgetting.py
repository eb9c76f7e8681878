"""Deletes ended jobs when an operator asks for it, or when they are too many or too old."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from rdzv.core.model import State, job_state
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
    UnknownJobError,
)
from rdzv.runtime.clock import DAY_MS, Clock, Timer
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.clock_steps import TimeSeen
from rdzv.server.engine.job import Job
from rdzv.server.engine.jobs import Jobs
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.engine.stored_records import KeyValueRecord
from rdzv.server.settings.server_settings import RdzvdSettings

log = logging.getLogger("rdzv.jobs")

TIME_SEEN = "time-seen"
"""The name of the key-value record of when this store's servers ran."""


PRUNE_EVERY_MS = 3_600_000
"""How often ended jobs are checked, and so how soon a reload of their retention has an effect."""


class Forgetting:
    """Deletes one server's ended jobs together with their history."""

    def __init__(
        self, jobs: Jobs, store: StoreAccess, clock: Clock, config: RdzvdSettings, tasks: Tasks
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._seen = KeyValueRecord(store, TIME_SEEN, msgspec.json.Decoder(TimeSeen).decode)
        self._clock = clock
        self._tasks = tasks
        self._retention = config.retention
        """Read at each use, because a reload may change the values."""
        self._time_noted = False
        """Whether this server has stored the time since it started."""
        self._timer = Timer(clock, lambda _: self.start_pruning())

    def stop(self) -> None:
        self._timer.cancel()

    async def forget(self, rdzv_id: str) -> None:
        """Delete an ended job and its history; a later join with the same rdzv_id starts a new job.

        If the caller is cancelled, the deletion still completes.

        Raises:
            UnknownJobError: no node has ever joined the job.
            InvalidRequestError: its run is open, or it still has nodes; nothing was deleted.
            RendezvousConnectionError: the job may have been deleted; retry.

        """
        error = await asyncio.shield(self._tasks.start(self._forgotten(rdzv_id)))
        if error is not None:
            raise error

    async def _forgotten(self, rdzv_id: str) -> RendezvousError | None:
        try:
            async with self._jobs.claim(rdzv_id) as job:
                refuse_to_forget(job.state)
                await self._delete(job, "an operator requested it")
        except RendezvousError as error:
            return error
        return None

    async def _delete(self, job: Job, why: str) -> None:
        """Delete a claimed job whose run has ended from the store, and reset it in memory."""
        try:
            await self._jobs.write(job, self._store.delete(job.rdzv_id, job.revision))
        except RendezvousConnectionError as error:
            if not error.definite:
                # The next claim finds out whether the job was deleted.
                job.loaded = None
            raise
        log.info("forgot job %s: %s", job.rdzv_id, why)
        self._jobs.vacate(job)

    # ---------------------------------------------------------------- pruning

    def start_pruning(self) -> None:
        """Forget ended jobs that are too old or too many, now and at regular intervals.

        Jobs that cannot be read are left alone. Never blocks.
        """
        self._timer.arm(self._clock.now_ms() + PRUNE_EVERY_MS)
        self._tasks.start(self._prune())

    async def _prune(self) -> None:
        most, kept_ms = self._retention.ended_jobs, self._retention.ended_for_ms
        now_ms, ended_at_ms = self._clock.now_ms(), dict(self._jobs.ended)
        try:
            seen = await self._note_time(now_ms)
        except RendezvousError as error:
            log.warning("could not forget ended jobs: %s; will retry", error)
            return
        counted = {
            rdzv_id: now_ms - seen.counted_since(at_ms, now_ms)
            for rdzv_id, at_ms in ended_at_ms.items()
        }
        for rdzv_id, why in outlived(counted, now_ms, most, kept_ms):
            try:
                async with self._jobs.claim(rdzv_id) as job:
                    ended = job.state.membership.ended
                    # The job may have begun and even ended another run in the meantime.
                    same = ended is not None and ended.at_ms == ended_at_ms[rdzv_id]
                    if same and not job.state.anybody:
                        await self._delete(job, why)
            except (RendezvousConnectionError, LimitExceededError) as error:
                log.warning("could not forget ended jobs: %s; will retry", error)
                return
            except RendezvousError as error:
                log.error("cannot forget job %s: %s", rdzv_id, error)

    async def _note_time(self, now_ms: int) -> TimeSeen:
        """Store the current time as a time at which a server ran, and return the stored value."""
        await self._seen.load()
        seen = self._seen.value.noted(now_ms, at_start=not self._time_noted)
        await self._seen.swap(seen, msgspec.json.encode(seen))
        self._time_noted = True
        return seen


def outlived(
    ended_at_ms: Mapping[str, int], now_ms: int, most: int, kept_ms: int
) -> tuple[tuple[str, str], ...]:
    """Return the ended jobs to forget, each with the reason, in the order in which they ended.

    These are jobs that ended more than `kept_ms` ago, and the oldest jobs in excess of `most`.

    >>> outlived({"a": 30, "b": 10, "c": 20}, now_ms=40, most=2, kept_ms=DAY_MS)
    (('b', '2 other jobs have ended since'),)
    """
    oldest_first = sorted(ended_at_ms, key=lambda rdzv_id: (ended_at_ms[rdzv_id], rdzv_id))
    too_many = max(len(oldest_first) - most, 0)
    too_old = sum(1 for at_ms in ended_at_ms.values() if now_ms - at_ms > kept_ms)
    return tuple(
        (
            rdzv_id,
            f"it ended more than {kept_ms / DAY_MS:g} days ago"
            if place < too_old
            else f"{most} other jobs have ended since",
        )
        for place, rdzv_id in enumerate(oldest_first[: max(too_many, too_old)])
    )


def refuse_to_forget(state: State) -> None:
    """Refuse to forget a job whose run has not ended or that still has nodes.

    Raises:
        UnknownJobError: no node has ever joined the job.
        InvalidRequestError: its run has not ended, or it still has nodes.

    """
    membership = state.membership
    rdzv_id = membership.rdzv_id
    if not membership.run:
        raise UnknownJobError(
            f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
        )
    if membership.ended is None:
        raise InvalidRequestError(
            f"job {rdzv_id} is {job_state(state)} and cannot be forgotten; stop it first, with "
            f"`rdzvctl stop {rdzv_id}`, or wait for its end"
        )
    if state.anybody:
        names = sorted({*state.seats, *state.waiting, *state.stuck})
        raise InvalidRequestError(
            f"job {rdzv_id} cannot be forgotten: it is {job_state(state)}, and {names[0]} is "
            "still in it; wait until no node is"
        )

"""Deletes ended jobs when an operator asks for it, or when they are too many or too old.

A job's age can only be read from the clock, which may be a month ahead when a server starts.
Servers therefore store the time regularly. If no time was stored for a long period, either no
server ran or the clock was stepped. The two cannot be told apart, so such a *gap* does not count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from rdzv import errors
from rdzv.core.model import State, job_state
from rdzv.core.words import duration
from rdzv.runtime.clock import DAY_MS, Timer
from rdzv.server.engine.jobs import Job
from rdzv.server.engine.store_access import KeyValueRecord
from rdzv.structs import struct

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.jobs")

TIME_SEEN = "time-seen"
"""The name of the key-value record of when this store's servers ran."""


PRUNE_EVERY_MS = 3_600_000
"""How often ended jobs are checked, and so how soon a reload of their retention has an effect."""

GAP_MS = DAY_MS
"""Stored times further apart than this have a gap between them. The usual interval is far
shorter."""

STEP_MS = 60_000
"""A clock that is behind by more than this is logged."""

MOST_GAPS = 16


@struct(frozen=True)
class TimeSeen:
    """The stored value: the latest time and the preceding gaps, oldest first."""

    seen_ms: int = 0
    gaps: tuple[tuple[int, int], ...] = ()

    def noted(self, now_ms: int, *, at_start: bool = True) -> TimeSeen:
        """Return the value updated to `now_ms`; with `at_start`, also record and log any gap.

        A clock that was stepped back is only logged. While a server runs, its clock is monotonic
        and therefore never stepped.

        >>> TimeSeen(1_000).noted(2_000), TimeSeen(1_000).noted(1_000 + 3 * DAY_MS).gaps
        (TimeSeen(seen_ms=2000, gaps=()), ((1000, 259201000),))
        """
        ahead_ms = now_ms - self.seen_ms
        if not at_start or not self.seen_ms or -STEP_MS <= ahead_ms <= GAP_MS:
            return TimeSeen(now_ms, self.gaps)
        if ahead_ms < 0:
            log.warning(
                "the clock is %s behind the last time recorded in this store, so it was stepped "
                "back; times in the future are treated as now",
                duration(-ahead_ms),
            )
            return TimeSeen(now_ms, self.gaps)
        log.warning(
            "the clock is %s ahead of the last time recorded in this store: either no server ran "
            "in between or the clock was stepped; that period does not count toward the age of "
            "ended jobs",
            duration(ahead_ms),
        )
        return TimeSeen(now_ms, (*self.gaps, (self.seen_ms, now_ms))[-MOST_GAPS:])

    def counted_since(self, at_ms: int, now_ms: int) -> int:
        """Return how long ago a time was, not counting gaps; a time in the future counts as now.

        >>> TimeSeen(90, ((20, 50), (40, 60))).counted_since(10, now_ms=90)
        40
        """
        counted_ms, reached_ms = 0, at_ms
        # Gaps overlap if the clock was set back and then stepped forward again.
        for begin_ms, end_ms in sorted(self.gaps):
            counted_ms += max(min(begin_ms, now_ms) - reached_ms, 0)
            reached_ms = max(reached_ms, end_ms)
        return counted_ms + max(now_ms - reached_ms, 0)


class Forgetting:
    """Deletes one server's ended jobs together with their history."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._jobs = driver.jobs
        self._clock = driver.clock
        self._seen = KeyValueRecord(driver.store, TIME_SEEN, msgspec.json.Decoder(TimeSeen).decode)
        self._time_noted = False
        """Whether this server has stored the time since it started."""
        self._timer = Timer(driver.clock, lambda _: self.start_pruning())

    def stop(self) -> None:
        self._timer.cancel()

    async def forget(self, rdzv_id: str) -> None:
        """Delete an ended job and its history; a later join with the same rdzv_id starts a new job.

        If the caller is cancelled, the deletion still completes.
        """
        error = await asyncio.shield(self._driver.tasks.start(self._forgotten(rdzv_id)))
        if error is not None:
            raise error

    async def _forgotten(self, rdzv_id: str) -> errors.RendezvousError | None:
        try:
            async with self._jobs.claim(rdzv_id) as job:
                refuse_to_forget(job.state)
                await self._delete(job, "an operator requested it")
        except errors.RendezvousError as error:
            return error
        return None

    async def _delete(self, job: Job, why: str) -> None:
        try:
            await self._jobs.write(job, self._driver.store.delete(job.rdzv_id, job.revision))
        except errors.RendezvousConnectionError as error:
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
        self._driver.tasks.start(self._prune())

    async def _prune(self) -> None:
        # Read at each use, because a reload may change the values.
        retention = self._driver.config.retention
        most, kept_ms = retention.ended_jobs, retention.ended_for_ms
        now_ms, ended_at_ms = self._clock.now_ms(), dict(self._jobs.ended)
        try:
            seen = await self._record_time(now_ms)
        except errors.RendezvousError as error:
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
            except (errors.RendezvousConnectionError, errors.LimitExceededError) as error:
                log.warning("could not forget ended jobs: %s; will retry", error)
                return
            except errors.RendezvousError as error:
                log.error("cannot forget job %s: %s", rdzv_id, error)

    async def _record_time(self, now_ms: int) -> TimeSeen:
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
    membership = state.membership
    rdzv_id = membership.rdzv_id
    if not membership.run:
        raise errors.UnknownJobError(
            f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
        )
    if membership.ended is None:
        raise errors.InvalidRequestError(
            f"job {rdzv_id} is {job_state(state)} and cannot be forgotten; stop it first, with "
            f"`rdzvctl stop {rdzv_id}`, or wait for its end"
        )
    if state.anybody:
        names = sorted({*state.seats, *state.waiting, *state.stuck})
        raise errors.InvalidRequestError(
            f"job {rdzv_id} cannot be forgotten: it is {job_state(state)}, and {names[0]} is "
            "still in it; wait until no node is"
        )

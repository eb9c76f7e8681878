"""A job's workers as operators see them: their logs and their stacks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from typing import TYPE_CHECKING

from rdzv.core.evidence.stacks import Report
from rdzv.core.model import State
from rdzv.core.words import listed
from rdzv.errors import InvalidRequestError, RendezvousClosedError, RendezvousConnectionError
from rdzv.messages import LogsWanted
from rdzv.view.answers import LogLines

if TYPE_CHECKING:
    from rdzv.server.driver import Driver


class WorkerViews:
    """The workers of one server's jobs as operators see them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def read_logs(self, rdzv_id: str, wanted: LogsWanted) -> AsyncGenerator[LogLines, None]:
        """Yield the output of a job's workers as their nodes send it.

        Raises:
            UnknownJobError: no such job is known.
            InvalidRequestError: the job has had no such round or no such RANK.
            RendezvousClosedError: the given run is not the last.
            LimitExceededError: there are too many readers.
            RendezvousConnectionError: this server no longer serves.

        """
        state = await self._driver.views.state(rdzv_id)
        if self._driver.watchers.closed:
            raise RendezvousConnectionError("this server no longer serves; ask again")
        reader = self._driver.diagnosis.logs.open(state, wanted)
        try:
            while (lines := await reader.next()) is not None:
                yield lines
        finally:
            reader.close()

    async def stacks(self, rdzv_id: str, run: str, number: int | None, why: str) -> Report:
        """Return a round's stacks, captured now or when the round hung; see `Control.TakeStacks`.

        Raises:
            UnknownJobError: no such job is known.
            RendezvousClosedError: the given run is not the last.
            InvalidRequestError: no round is live, and no stacks of that round were kept.
            LimitExceededError: too many collections are running.
            RendezvousConnectionError: the store is unavailable, or this server no longer serves.

        """
        state = await self._driver.views.state(rdzv_id)
        membership = state.membership
        if run and run != membership.run:
            raise RendezvousClosedError(
                f"run {run} of {rdzv_id} has ended, and another has begun: run {membership.run}"
            )
        live = _live_round(state)
        if live is not None and number in (None, live):
            return await self._driver.diagnosis.stacks.take(state, why)
        found, kept = await self._kept_stacks(state, number)
        if found is None:
            raise _no_stacks(rdzv_id, number, live, kept)
        return found

    async def kept_stacks(self, rdzv_id: str, number: int | None) -> Report:
        """Return the archived stacks of a round that hung, without asking any node.

        Raises:
            UnknownJobError: no such job is known.
            InvalidRequestError: no stacks are kept, or none from this round.
            RendezvousConnectionError: the store is unavailable, or this server no longer serves.

        """
        state = await self._driver.views.state(rdzv_id)
        found, kept = await self._kept_stacks(state, number)
        if found is not None:
            return found
        if number is None:
            raise InvalidRequestError(
                f"no stacks of {rdzv_id} are kept: no round of this run has hung; "
                f"`rdzvctl stacks {rdzv_id}` takes those of its workers now"
            )
        raise _no_stacks(rdzv_id, number, _live_round(state), kept)

    async def _kept_stacks(
        self, state: State, number: int | None
    ) -> tuple[Report | None, Collection[int]]:
        """Return a round's stacks or the latest ones, and the numbers of rounds that have any."""
        rdzv_id, run = state.membership.rdzv_id, state.membership.run
        kept = await self._driver.diagnosis.stack_archive.rounds(rdzv_id, run)
        wanted = number if number is not None else max(kept, default=None)
        if wanted is None or wanted not in kept:
            return None, kept
        return await self._driver.diagnosis.stack_archive.find(rdzv_id, run, wanted), kept


def _live_round(state: State) -> int | None:
    last = state.membership.round
    live = last is not None and last.live and not state.membership.ended
    return last.number if last is not None and live else None


def _no_stacks(
    rdzv_id: str, number: int | None, live: int | None, kept: Collection[int]
) -> InvalidRequestError:
    rounds = f"those of round {listed(kept)} are" if kept else "no round of this run has hung"
    if number is None:
        return InvalidRequestError(
            f"{rdzv_id} has no workers now, so there are no stacks to take, and none are kept: "
            f"{rounds}"
        )
    present = f"; its workers are in round {live} now" if live is not None else ""
    return InvalidRequestError(
        f"no stacks of round {number} of {rdzv_id} are kept, {rounds}{present}"
    )
